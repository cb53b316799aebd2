"""What float32 may do to a sum: hide other units, overflow, or drift over many microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from neighbours import removed

from dpfl_jax.clipping import Flat, Normalized, OwnBound, clipped_grad
from dpfl_jax.clipping.accumulate import needs_compensation
from dpfl_jax.errors import BadInputError


def moved_by_removing(gradient, params, batch, unit, n):
    everyone = np.ones(n, bool)
    less, others = removed(batch, everyone, unit)
    a = gradient(params, batch, mask=everyone)
    b = gradient(params, less, mask=others)
    return float(jnp.linalg.norm(jnp.ravel(a.sum - b.sum)))


@pytest.mark.parametrize("method", [None, "gram", "direct"])
def test_uses_that_cancel_do_not_hide_other_units(method):
    """Unit 0's two unlike uses of W cancel exactly; each alone would swallow what others add."""
    n, width, ones = 1024, 32, 15
    x, a = np.zeros((n, width), np.float32), np.zeros((n, width), np.float32)
    y, b = np.zeros((n, 16), np.float32), np.zeros((n, 64), np.float32)
    x[0, 0], y[0, 0] = 1e6, 1e6
    a[0, :ones], b[0, :ones] = 1e6 / ones**0.5, -1e6 / ones**0.5
    x[1:, 0], y[1:, 0] = 0.00097, 0.00097
    a[1:, :ones], b[1:, :ones] = 1, 1

    def loss(w, u):
        first = jnp.vdot(u["x"] @ w, u["a"])
        return first + jnp.vdot(u["y"] @ w.reshape(16, 64), u["b"])

    options = {} if method is None else {"strategy": "ghost", "norm_method": method}
    gradient = jax.jit(clipped_grad(loss, clip_norm=1.0, **options))
    batch = {"x": x, "a": a, "y": y, "b": b}
    assert moved_by_removing(gradient, jnp.zeros((width, width)), batch, 0, n) <= 0.1


def test_gram_sums_that_overflow_are_not_taken_for_small():
    rng = np.random.default_rng(0)
    n, positions = 256, 16
    true = np.zeros((n, positions))
    for i in range(n):
        a, m = rng.uniform(1.2, 1.84) * 1e19, int(rng.integers(4, 12))
        b = rng.uniform(3.4e38 / a, 3.4e38 / a * 2.2) / m
        row = np.full(positions, (m * b - a + rng.uniform(-1, 1) * 1.2e19) / (positions - 1 - m))
        row[0], row[1 : 1 + m] = a, -b
        true[i] = rng.choice([-1, 1]) * rng.permutation(row)
    x = (np.sign(true) * np.sqrt(abs(true))).astype(np.float32)[:, :, None]
    d = np.sqrt(abs(true)).astype(np.float32)[:, :, None]
    gradient = jax.jit(
        clipped_grad(
            lambda p, u: jnp.sum((u["x"] @ p) * u["d"]),
            clip_norm=1.0, strategy="ghost", norm_method="gram",
        )
    )  # fmt: skip
    found = gradient(jnp.zeros((1, 1)), {"x": x, "d": d})
    contributions = np.asarray(found.weights, np.float64) * abs(true.sum(axis=1))
    assert contributions.max() <= 1 + 1e-3


@pytest.mark.parametrize("size", [4, 64])
def test_many_microbatches_do_not_drift(size):
    n = 2**17
    gradient = jax.jit(
        clipped_grad(lambda p, u: p * u, clip_norm=1.0, strategy="vmap", microbatch_size=size)
    )
    for seed in range(3):
        x = np.random.default_rng(seed).uniform(0.5, 1, n).astype(np.float32)
        found = float(gradient(jnp.float32(0), x).sum)
        # One unit in the last place of a sum near 1e5 is 1/128.
        assert found == pytest.approx(x.astype(np.float64).sum(), abs=1 / 64)


def test_what_units_of_small_bounds_add_is_not_rounded_away():
    """However few they are: a bound may be as small as what each addition rounds by."""
    own = np.array([1.0, *[2.0**-25] * 64], np.float32)
    gradient = clipped_grad(lambda p, u: p * u["x"], rule=OwnBound(1.0), strategy="scan")
    found = float(gradient(jnp.float32(0), {"x": np.ones_like(own), "bound": own}).sum)
    assert found == pytest.approx(own.astype(np.float64).sum(), abs=2.0**-23)


def test_compensation_is_for_large_sums_alone():
    assert not needs_compensation(1024, 1024)
    assert not needs_compensation(4096, 512)
    assert needs_compensation(65536, 1024)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "promise_in_bounds", "fill", "clip"])
def test_rows_that_do_not_exist_have_the_gradient_that_jax_gives_them(mode):
    table = jnp.ones((7, 3))

    def loss(t, u):
        rows = t[u["i"]] if mode is None else t.at[u["i"]].get(mode=mode)
        return jnp.sum(jnp.where(jnp.isfinite(rows), rows, 0.0) * u["d"][:, None])

    i = np.array([[1, 99, -50, 3], [0, 0, 7, -1]], np.int32)
    batch = {"i": i, "d": np.ones((2, 4), np.float32)}
    plain = clipped_grad(loss, clip_norm=1e3, strategy="vmap")(table, batch)
    fast = clipped_grad(loss, clip_norm=1e3, strategy="ghost")(table, batch)
    np.testing.assert_allclose(fast.sum, plain.sum, rtol=1e-6)
    np.testing.assert_allclose(fast.norms, plain.norms, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("rule", [Flat, Normalized])
def test_a_clip_norm_gone_wrong_on_the_device_lets_nothing_through(rule, value):
    with pytest.raises(BadInputError, match="must be finite"):
        rule(jnp.float32(value))

    @jax.jit
    def weights(clip_norm):
        return rule(clip_norm).weights(jnp.array([0.0, 1.0, 1e9]), jnp.ones(3))

    np.testing.assert_array_equal(weights(jnp.float32(value)), np.zeros(3))


def test_a_weight_gone_wrong_lets_no_unit_add_more_than_it_may():
    gradient = clipped_grad(lambda p, x: jnp.vdot(p, x), clip_norm=1.0)
    weight = jnp.array([0.5, np.nan, np.inf, -1.0, 2.0])
    bounded = gradient(jnp.zeros(2), jnp.full((5, 2), 9.0), weight=weight)
    assert bounded.sum.sum() == pytest.approx(2**0.5 * (0.5 + 0 + 1 + 0 + 1))
    np.testing.assert_allclose(bounded.weights * bounded.norms, [0.5, 0.0, 1.0, 0.0, 1.0])
