"""The clip norm that follows a quantile: what one unit moves, and where it ends."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from neighbours import removed

from dpfl_jax.clipping import Adaptive, adapting_noise, clipped_and_counted, clipped_grad
from dpfl_jax.errors import BadInputError
from dpfl_jax.noise import Noise, transformation
from dpfl_jax.randomness import RootKey

CLIP = Adaptive(quantile=0.7, count_weight=0.5)


def dot(params, x):
    """The gradient is the unit itself."""
    return params["w"] @ x


PARAMS = {"w": jnp.ones(3)}
SUMMED = jax.jit(clipped_and_counted(CLIP, clipped_grad(dot, rule=CLIP.rule())))


def noise_of(multiplier, divisor):
    inner = Noise(multiplier * CLIP.sensitivity, CLIP.sensitivity, "float")
    return adapting_noise(CLIP, transformation(inner, divisor))


def distance(a, b):
    return float(optax.global_norm(jax.tree.map(jnp.subtract, a, b)))


@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, 50.0])
def test_one_unit_moves_gradient_and_count_together_by_the_sensitivity(clip_norm):
    """Removed, and its data changed, whatever C is; and no less where the unit is clipped."""
    batch, everyone = np.float32(np.random.default_rng(0).normal(size=(4, 3))), np.ones(4, bool)
    reached = 0.0
    for size in (0.0, 1e-4, 1.0, 1e6, 1e25, np.nan, np.inf):
        batch[2] = size
        others, without = removed(batch, everyone, 2)
        whole = SUMMED(clip_norm, PARAMS, batch, mask=everyone).sum
        moved = distance(whole, SUMMED(clip_norm, PARAMS, others, mask=without).sum)
        assert moved <= CLIP.sensitivity * (1 + 1e-5)
        reached = max(reached, moved)
    assert reached >= CLIP.sensitivity * (1 - 1e-5)


def test_padding_and_what_is_not_finite_add_nothing():
    batch = jnp.array([[0.1, 0, 0], [9.0, 0, 0], [np.nan, 0, 0], [0.1, 0, 0], [np.inf, 0, 0]])
    got = SUMMED(1.0, PARAMS, batch, mask=jnp.array([1.0, 1.0, 1.0, 0.0, np.nan]))
    np.testing.assert_array_equal(got.nonfinite, [False, False, True, False, False])
    assert got.sum.indicators == 0.0  # a half, and less a half
    np.testing.assert_allclose(got.sum.gradient["w"], [1.1, 0, 0], rtol=1e-6)
    none = SUMMED(1.0, PARAMS, batch, mask=jnp.zeros(5))
    assert not any(np.any(x) for x in jax.tree.leaves(none.sum))
    assert not any(np.any(x) for x in jax.tree.leaves(SUMMED(1.0, PARAMS, batch[:0]).sum))


def test_the_clip_norm_finds_the_quantile_and_the_gradient_is_clipped_to_it():
    rng, units, steps = np.random.default_rng(0), 200, 60
    batches = rng.normal(size=(steps, units, 3))
    norms = rng.lognormal(size=(steps, units))
    batches *= (norms / np.linalg.norm(batches, axis=2))[..., None]
    keys = np.stack([RootKey.from_seed(0).words("noise", t) for t in range(steps)])
    noise = noise_of(0.1, units)

    def step(state, given):
        batch, key = given
        total = SUMMED(state.memory.clip_norm, PARAMS, batch).sum
        gradient, after = noise.update(total, state, PARAMS, noise_key=key)
        return after, (state.memory.clip_norm, gradient["w"])

    start = noise.init(PARAMS)
    start = start._replace(memory=start.memory._replace(clip_norm=jnp.float32(5.0)))
    state, (used, gradients) = jax.jit(lambda x: jax.lax.scan(step, start, x))((batches, keys))
    assert int(state.step) == steps
    # The quantile of 70 % of a standard log-normal is exp(0.524).
    np.testing.assert_allclose(np.log(used[-10:]), 0.524, atol=0.15)
    weights = np.minimum(1, used[:, None] / norms)
    want = np.einsum("tn,tnd->td", weights, batches) / units
    spread = 0.1 * CLIP.sensitivity * used[:, None] / units
    assert (np.abs(gradients - want) < 6 * spread).all()


def test_noise_is_shared_out_as_by_theorem_1():
    """Of multipliers z_sum and sigma_b, both together are one Gaussian of multiplier z."""
    z = 1.3
    gradients, count = z * CLIP.sensitivity, z * CLIP.sensitivity / CLIP.count_weight
    assert gradients**-2 + (2 * count) ** -2 == pytest.approx(z**-2)


def test_the_clip_norm_never_leaves_what_float32_holds():
    """Of noise alone, the gradients all zero: and the dtypes are those of the parameters."""
    noise = noise_of(1e4, 1.0)
    params = {"w": jnp.ones(3, jnp.bfloat16), "frozen": jnp.ones(2)}
    state = noise.init(params)
    total = SUMMED(1.0, PARAMS, jnp.zeros((1, 3))).sum
    total = total._replace(gradient={**total.gradient, "frozen": None})
    for t in range(4):
        key = RootKey.from_seed(0).words("noise", t)
        gradient, state = noise.update(total, state, params, noise_key=key)
        assert gradient["w"].dtype == jnp.bfloat16
        assert gradient["frozen"] is None
        assert np.float32(1e-12) <= state.memory.clip_norm <= np.float32(1e18)
        alone = SUMMED(state.memory.clip_norm, PARAMS, jnp.full((1, 3), 1e18)).sum.gradient["w"]
        assert jnp.linalg.norm(alone) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantile": 1.0}, "quantile is 1.0, but it must be above 0 and below 1"),
        ({"quantile": 0.0}, "quantile is 0.0, but it must be finite and above 0"),
        ({"count_weight": -1.0}, "count_weight is -1.0"),
        ({"clip_norm": math.inf}, "clip_norm is inf"),
    ],
)
def test_what_no_clip_norm_can_follow_is_refused(fields, message):
    with pytest.raises(BadInputError, match=message):
        Adaptive(**fields)
