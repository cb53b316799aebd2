"""Correlated noise, of every kind: it is C^-1 Z on every layout, and a lost state shows nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from noising import (
    KEY,
    banded_matrix,
    buffered_matrix,
    inverse_banded_matrix,
    key_of,
    released,
)

from dpfl_jax.matrices import buffered_error, inverse_error, prefix_error
from dpfl_jax.mesh import make_mesh, parameter_shardings, state_shardings
from dpfl_jax.noise import Noise, banded, banded_inverse, buffered, redrawn

COLUMN = (0.75, 0.5, 0.4375)  # exact in float32
BUFFERS = ((0.75, 0.25), (0.5, 0.125))
TAKEN = (0.5, 0.25, 0.125)
STEPS = 8
# kind: (transformation, rows of its noise, C, numbers kept of sums and of releases, error of sums)
KINDS = {
    "banded": (banded, 3, banded_matrix, (2, 2), prefix_error, COLUMN),
    "buffered": (buffered, 4 * STEPS, buffered_matrix, (4, 2), buffered_error, BUFFERS),
    "inverse": (
        banded_inverse,
        4 * STEPS,
        inverse_banded_matrix,
        (6, 3),
        inverse_error,
        TAKEN,
    ),
}
EACH = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("law", ["exact", "float"])
def test_noise_is_what_its_matrix_says(kind, law):
    """x_t = g_t + (C^-1 Z)_t, with Z as independent noise would be drawn."""
    make, rows, matrix, kept, _, given = KINDS[kind]
    rng = np.random.default_rng(0)
    params = {"w": jnp.zeros((40, 3)), "frozen": None, "b": jnp.zeros(5, jnp.bfloat16)}
    sums = [
        {"w": jnp.float32(rng.normal(size=(40, 3))), "frozen": None, "b": jnp.ones(5)}
        for _ in range(STEPS)
    ]
    noise = Noise(2.0, 1.0, law, rows=rows)
    out, state = released(make(noise, given, 4.0), sums, params)
    assert int(state.step) == STEPS
    for name, numbers in zip(("sums", "released"), kept, strict=True):
        assert state.memory[name]["w"].shape == (numbers, 40, 3)
    assert out[0]["frozen"] is None
    assert out[0]["b"].dtype == jnp.bfloat16
    nothing = {"w": jnp.zeros((40, 3)), "frozen": None, "b": jnp.zeros(5)}
    z = np.stack([noise.add(KEY.words("noise", t), nothing)["w"] for t in range(STEPS)])
    noises = np.tensordot(np.linalg.inv(matrix(given, STEPS)), z, axes=1)
    wanted = (np.stack([g["w"] for g in sums]) + noises) / 4.0
    np.testing.assert_allclose(np.stack([r["w"] for r in out]), wanted, atol=2e-5)


@pytest.mark.slow
@pytest.mark.nightly("float")
@EACH
@pytest.mark.parametrize("law", ["exact", "float"])
def test_covariance_on_eight_devices(kind, law):
    """Parameters split eight ways: sample covariances over 120,000 coordinates are those of C^-1.

    Of the 21 entries none is more than 5 standard errors off, by luck 1e-5 of the time.
    """
    make, rows, matrix, numbers, _, given = KINDS[kind]
    mesh, steps, shape = make_mesh(data=1, fsdp=4, tensor=2), 6, (200, 600)
    params = {"mlp": {"up": {"kernel": jnp.zeros(shape)}}}
    places = parameter_shardings(params, mesh)
    assert not places["mlp"]["up"]["kernel"].is_fully_replicated
    zero = jax.device_put(params, places)

    def place(memory):
        return jax.device_put(memory, state_shardings(params, memory, mesh))

    def flat(out):
        return np.stack([np.asarray(r["mlp"]["up"]["kernel"]).ravel() for r in out])

    transform = make(Noise(1.5, 1.0, law, rows=rows), given, 2.0)
    out, state = released(transform, [zero] * steps, zero, place)
    for name, number in zip(("sums", "released"), numbers, strict=True):
        kept = state.memory[name]["mlp"]["up"]["kernel"]
        assert kept.sharding.shard_shape(kept.shape) == (number, 50, 300)
    x = flat(out)
    inverse = np.linalg.inv(matrix(given, steps))
    wanted = 0.75**2 * inverse @ inverse.T
    error = np.sqrt((np.outer(np.diag(wanted), np.diag(wanted)) + wanted**2) / x.shape[1])
    assert np.abs((x @ x.T / x.shape[1] - wanted) / error).max() < 5
    # What is undone is white: C C^T is the covariance of the inverse.
    white = matrix(given, steps) @ x
    assert np.abs(white @ white.T / x.shape[1] - 0.75**2 * np.eye(steps)).max() < 5 * error.max()
    # The numbers are the same on one device.
    np.testing.assert_array_equal(x, flat(released(transform, [params] * steps, params)[0]))


@EACH
def test_an_error_of_prefix_sums_is_that_of_their_matrix(kind):
    _, _, matrix, _, error, given = KINDS[kind]
    sums = np.tril(np.ones((20, 20))) @ np.linalg.inv(matrix(given, 20))
    wanted = np.sqrt((sums**2).sum(axis=1).mean() / 10.5)
    assert error(given, 20) == pytest.approx(wanted)


@EACH
def test_nothing_is_released_of_a_lost_state_or_after_a_step_left_out(kind):
    """What would be released of a state begun anew shows past sums without noise."""
    make, rows, *_, given = KINDS[kind]
    transform, params = make(Noise(2.0, 1.0, "float", rows=rows), given, 1.0), {"w": jnp.zeros(4)}
    total, state = {"w": jnp.ones(4)}, transform.init(params)
    gradient, after = transform.update(total, state, params, noise_key=key_of(0))
    assert np.isfinite(gradient["w"]).all()
    for lost in (transform.init(params), after):  # begun anew at step 2; step 1 was left out
        gradient, broken = transform.update(total, lost, params, noise_key=key_of(2))
        assert np.isnan(gradient["w"]).all()
        gradient, _ = transform.update(total, broken, params, noise_key=key_of(int(broken.step)))
        assert np.isnan(gradient["w"]).all()  # and nothing after it


MADE = [*((kind[0], kind[-1], 1) for kind in KINDS.values()), (redrawn, TAKEN, len(TAKEN) + 1)]


@pytest.mark.parametrize(("make", "given", "keys"), MADE)
def test_nothing_is_released_of_another_run_or_of_a_step_taken_twice(make, given, keys):
    """Another run draws others under other noise: what is kept of this one is not its past."""
    transform, params = make(Noise(2.0, 1.0, "float", rows=3), given, 1.0), {"w": jnp.zeros(4)}
    total = {"w": jnp.ones(4)}

    def key(step, run=7):
        return np.concatenate([np.tile(KEY.words("noise", step), keys), np.uint32([step, run, 9])])

    _, state = transform.update(total, transform.init(params), params, noise_key=key(0))
    gradient, after = transform.update(total, state, params, noise_key=key(1))
    assert np.isfinite(gradient["w"]).all()
    for again, noise_key in ((state, key(1, run=8)), (after, key(1))):
        gradient, _ = transform.update(total, again, params, noise_key=noise_key)
        assert np.isnan(gradient["w"]).all()
