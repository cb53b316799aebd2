"""Gradients formed for a few units at a time, and how many units `auto` takes at a time."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from neighbours import removed

from dpfl_jax.clipping import accumulate, clipped_grad, cost
from dpfl_jax.clipping.jaxprs import count_flops, peak_bytes
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


# ---- formed in the backward pass, in bfloat16, on accelerators -----------------------------------


def narrow_loss(remat, params, unit):
    """Layers in a loop, read as they are and turned and scaled, with experts; a tied embedding."""

    def layer(h, w):
        h = h + jnp.tanh(h @ w["in"].astype(h.dtype)) @ (0.5 * w["out"]).T.astype(h.dtype)
        each = jnp.einsum("td,edf->tef", h, w["experts"].astype(h.dtype))
        return h + jnp.sin(each).sum(1), None

    if remat:
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    h = params["embedding"][unit["ids"]].astype(jnp.bfloat16) * unit["times"].astype(jnp.bfloat16)
    h, _ = jax.lax.scan(layer, h, params["layers"])
    return jnp.sum((h @ params["embedding"].T.astype(h.dtype)).astype(jnp.float32) ** 2)


def narrow_case(units=4):
    params = {
        "embedding": normal(20, 7, 4),
        "layers": {
            "in": 0.3 * normal(21, 3, 4, 5),
            "out": 0.3 * normal(22, 3, 4, 5),
            "experts": 0.3 * normal(23, 3, 2, 4, 4),
        },
    }
    ids = jax.random.randint(KEY, (units, 40), 0, 7)  # rows repeat
    return params, {"ids": ids, "times": 0.5 + jnp.abs(normal(24, units, 40, 1))}


EARLY = {"layers/in", "layers/out", "layers/experts"}


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_what_the_backward_pass_forms_is_each_units_gradient(platform, remat):
    loss = functools.partial(narrow_loss, remat)
    params, batch = narrow_case()
    f = clipped_grad(loss, clip_norm=3.0, strategy="ghost", norm_method="keep", platform=platform)
    reports = {leaf.name: leaf for leaf in f.explain(params, batch).leaves}
    for name in EARLY:
        assert reports[name].method == "keep"
        assert reports[name].recorded == 2 * math.prod(reports[name].shape)  # and no factors
    plain = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, batch)
    each = [np.asarray(x, np.float64) for x in jax.tree.leaves(plain)]
    norms = np.sqrt(sum((x**2).reshape(len(x), -1).sum(1) for x in each))
    weights = np.minimum(1.0, 3.0 / norms)
    got = jax.jit(f)(params, batch)
    np.testing.assert_allclose(got.norms, norms, rtol=1e-3)
    for x, y in zip(jax.tree.leaves(got.sum), each, strict=True):
        want = np.tensordot(weights, y, 1)
        assert np.linalg.norm(x - want) <= 2e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_gradients_smaller_than_their_factors_need_no_room(platform):
    f = clipped_grad(
        functools.partial(narrow_loss, False), clip_norm=1.0, platform=platform, memory_limit=1.0
    )
    for strategy in ("ghost", "auto"):
        g = dataclasses.replace(f, strategy=strategy)
        methods = {leaf.name: leaf.method for leaf in g.explain(*narrow_case()).leaves}
        assert {name for name, method in methods.items() if method == "keep"} == EARLY


def test_what_a_checkpoint_stores_is_not_computed_again():
    counted = []
    for strategy in ("ghost", "vmap"):
        loss = functools.partial(narrow_loss, True)
        f = clipped_grad(loss, clip_norm=1.0, strategy=strategy, norm_method="keep", platform="gpu")
        counted.append(count_flops(lambda p, b, f=f: f(p, b).sum, *narrow_case()))
    assert counted[0] == counted[1]


@pytest.mark.parametrize("devices", [1, 4])
def test_a_unit_moves_what_the_backward_pass_formed_by_its_clip_norm(devices):
    params, batch = narrow_case(8)
    loss = functools.partial(narrow_loss, True)
    clip = 0.5
    f = clipped_grad(loss, clip_norm=clip, strategy="ghost", norm_method="keep", platform="gpu")
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    rows = PartitionSpec("data")

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(), rows, rows), out_specs=PartitionSpec()
    )
    def total(params, batch, mask):
        return jax.lax.psum(f(params, batch, mask=mask).sum, "data")

    real = np.ones(8, bool)
    whole = total(params, batch, real)
    for i in (0, 5):
        without = total(params, *removed(batch, real, i))
        moved = [
            np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64))
            for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(without), strict=True)
        ]
        assert 0.99 * clip <= np.linalg.norm(moved) <= clip * (1 + 1e-6)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("method", [None, "gram", "direct", "keep", "tiles", "fused"])
@pytest.mark.parametrize("scale", [1e25, 1e15, 1e4, -1e-20])
def test_a_parameter_scaled_by_any_number_is_clipped(scale, method, narrow):
    """Squares of the gradient with respect to what was scaled underflow, or overflow."""
    dtype = jnp.bfloat16 if narrow else jnp.float32

    def loss(w, unit):
        y = unit["x"] @ (w * scale).astype(dtype)
        return jnp.sum((y * unit["d"]).astype(jnp.float32))

    small = 3.0 / math.sqrt(abs(scale))  # gradients of some hundred
    batch = {"x": (small * normal(30, 2, 64, 8)), "d": small * normal(31, 2, 64, 8)}
    batch = jax.tree.map(lambda x: x.astype(dtype), batch)
    for platform in (None, "gpu"):
        how = {"strategy": "ghost", "norm_method": method, "platform": platform}
        got = jax.jit(clipped_grad(loss, clip_norm=0.5, **how))(
            jnp.zeros((8, 8)), batch, mask=jnp.array([True, False])
        )
        assert got.norms[0] > 100
        assert 0.4 <= np.linalg.norm(np.asarray(got.sum, np.float64)) <= 0.5 * (1 + 1e-6)


@pytest.mark.parametrize("count", [0, 1])
def test_a_tied_embedding_may_look_up_nothing(count):
    def loss(table, unit):
        head = unit["x"].astype(jnp.bfloat16) @ table.T.astype(jnp.bfloat16)

        def step(total, i):
            return total + jnp.sum(table[i] ** 2), None

        return jnp.sum(head.astype(jnp.float32) ** 2) + jax.lax.scan(step, 0.0, unit["ids"])[0]

    table = normal(32, 7, 4)
    batch = {"x": normal(33, 3, 40, 4), "ids": jnp.full((3, count), 2)}
    options = {"strategy": "ghost", "norm_method": "keep", "platform": "gpu"}
    with jax.numpy_rank_promotion("raise"):
        got = clipped_grad(loss, clip_norm=1.0, **options)(table, batch)
    want = clipped_grad(loss, clip_norm=1.0, strategy="vmap")(table, batch)
    chex.assert_trees_all_close((got.sum, got.norms), (want.sum, want.norms), rtol=1e-2, atol=1e-2)
