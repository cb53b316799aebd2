"""Gradients formed for a few units at a time, and how many units `auto` takes at a time."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpfl_jax.clipping import accumulate, clipped_grad, cost
from dpfl_jax.clipping.jaxprs import peak_bytes
from dpfl_jax.clipping.rules import Flat, PerLayer

KEY, UNITS = jax.random.key(11), 16


def normal(number, *shape):
    return jax.random.normal(jax.random.fold_in(KEY, number), shape)


def loss(params, x):
    """A kernel, a matrix used transposed, a part of one, and one of two unlike uses."""
    y = jax.lax.conv_general_dilated(
        x[None], params["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )[0]
    y = jnp.sin(y @ (0.5 * params["turned"]).T) + params["bias"]
    y = jnp.cos(y @ params["part"][1:5])
    return jnp.sum(y @ params["twice"]) + jnp.sum(jnp.sin(x @ params["twice"].reshape(2, 6)))


PARAMS = {
    "kernel": normal(1, 3, 2, 5),
    "turned": normal(2, 4, 5),
    "bias": normal(3, 4),
    "part": normal(4, 6, 3),
    "twice": normal(5, 3, 4),
}


@pytest.fixture
def one_at_a_time(monkeypatch):
    small = dataclasses.replace(cost.MACHINES["cpu"], cache=100.0, working_set=100.0)
    monkeypatch.setitem(cost.MACHINES, "cpu", small)


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize("compensated", [False, True])
@pytest.mark.parametrize("rule", [Flat(2.0), PerLayer(2.0)], ids=lambda rule: type(rule).__name__)
def test_sums_and_norms_are_those_of_vmap(rule, compensated, monkeypatch):
    """With a padded unit that holds NaNs, one that has a NaN and one that overflows."""
    monkeypatch.setattr(accumulate, "needs_compensation", lambda *_: compensated)
    x = normal(6, UNITS, 7, 2)
    x = x.at[3].set(jnp.nan).at[5, 2].set(jnp.nan).at[9].mul(1e30)
    options = {"mask": jnp.arange(UNITS) != 3, "weight": 1 / (1 + jnp.arange(UNITS) % 3)}
    made = {"ghost": {"norm_method": "keep"}, "vmap": {}}
    got, want = (
        jax.jit(clipped_grad(loss, rule=rule, strategy=way, **more))(PARAMS, x, **options)
        for way, more in made.items()
    )
    assert got.nonfinite.tolist() == want.nonfinite.tolist()
    assert np.flatnonzero(got.nonfinite).tolist() == [5, 9]
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("one_at_a_time")
def test_units_of_several_devices_keep_their_places():
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:8]), ("d",)), PartitionSpec("d"))
    x = normal(7, UNITS, 7, 2)
    f = clipped_grad(
        loss, clip_norm=1.0, strategy="ghost", norm_method="keep", unit_sharding=sharding
    )
    got = jax.jit(f)(PARAMS, jax.device_put(x, sharding))
    want = clipped_grad(loss, clip_norm=1.0, strategy="vmap")(PARAMS, x)
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize("method", ["keep", "direct"])
def test_narrow_numbers_are_taken_as_they_are(method):
    """One unit holds NaNs, one infinities: they too pass through the loop over units."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w).astype(jnp.float32) ** 2)

    w = normal(8, 5, 4).astype(jnp.bfloat16)
    x = normal(9, UNITS, 6, 5).astype(jnp.bfloat16).at[2].set(jnp.nan).at[7].set(jnp.inf)
    got, want = (
        jax.jit(clipped_grad(loss, clip_norm=0.5, strategy=s, norm_method=method))(w, x)
        for s in ("ghost", "vmap")
    )
    np.testing.assert_array_equal(got.nonfinite, want.nonfinite)
    chex.assert_trees_all_close((got.sum, got.norms), (want.sum, want.norms), rtol=1e-2, atol=1e-2)


def test_a_microbatch_of_all_units_is_no_loop():
    """XLA's CPU compiler takes twice as long for a convolution in a loop of one turn."""
    x = normal(10, UNITS, 7, 2)
    for size in (UNITS, UNITS + 5):
        f = clipped_grad(loss, clip_norm=1.0, strategy="vmap", microbatch_size=size)
        assert "scan" not in str(jax.make_jaxpr(f)(PARAMS, x))


def recurrent(params, x):
    def cell(h, x):
        h = jnp.tanh(h @ params["h"] + x @ params["x"])
        return h, None

    return jnp.sum(jax.lax.scan(cell, jnp.zeros(len(params["h"])), x)[0] @ params["out"])


def test_what_does_not_fit_is_taken_in_microbatches():
    """A recurrent net of 32 units holds over 32 MiB, which are slow to get at each call."""
    params = {"h": jnp.zeros((64, 64)), "x": jnp.zeros((16, 64)), "out": jnp.zeros((64, 3))}
    unit = jax.ShapeDtypeStruct((32, 1100, 16), jnp.float32)
    for size, fits in ((None, False), (16, True)):
        f = clipped_grad(recurrent, clip_norm=1.0, strategy="ghost", microbatch_size=size)
        taken = jax.jit(f).lower(params, unit).compile().memory_analysis().temp_size_in_bytes
        guess = peak_bytes(jax.make_jaxpr(f)(params, unit).jaxpr)
        assert (taken < cost.MACHINES["cpu"].working_set) is fits
        assert 0.6 * taken < guess < 1.7 * taken
    f = clipped_grad(recurrent, clip_norm=1.0)
    assert f.explain(params, unit).microbatch_size == 16
    small = jax.ShapeDtypeStruct((8, 1100, 16), jnp.float32)
    assert f.explain(params, small).microbatch_size is None
    limited = clipped_grad(recurrent, clip_norm=1.0, memory_limit=6e6)
    assert limited.explain(params, unit).microbatch_size in (2, 4)


@pytest.mark.parametrize(("width", "steps", "taken"), [(256, 1400, 4), (128, 1500, 8)])
def test_memory_and_few_rows_are_weighed(width, steps, taken):
    """Twice as many units hold 37 and 51 MB, half as many 12 and 13: neither is worth it."""
    shapes = {"h": (width, width), "x": (16, width), "out": (width, 3)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    unit = jax.ShapeDtypeStruct((32, steps, 16), jnp.float32)
    f = clipped_grad(recurrent, clip_norm=1.0)
    assert f.explain(params, unit).microbatch_size == taken
