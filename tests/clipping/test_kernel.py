"""Gradients kept in bfloat16, and the kernel that forms them with their norms."""

import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec
from zoo import lm_batch

from dpfl_jax.clipping import PerLayer, clipped_grad
from dpfl_jax.clipping.cost import machine_for
from dpfl_jax.clipping.taps import kernel
from dpfl_jax.models import LanguageModel, transformer_config

# s, n, positions, a, b: one row, one number, sides that tiles do not divide, several tiles.
SHAPES = [(1, 2, 1, 5, 7), (2, 2, 70, 20, 130), (1, 1, 33, 1, 1)]


def factors(s, n, positions, a, b, seed=0):
    rng = np.random.default_rng(seed)
    sides = [rng.normal(size=(s, n, positions, width)) for width in (a, b)]
    return [jnp.asarray(x, jnp.bfloat16) for x in sides]


def agrees(shape, platform, seed=0):
    """The interpreted kernel gives the rounded products, and the norms of what it gives."""
    left, right = factors(*shape, seed)
    exact = np.einsum("snka,snkb->nsab", *(np.asarray(x, np.float64) for x in (left, right)))
    gradients, squared = jax.jit(lambda x, y: kernel.fused(x, y, platform))(left, right)
    assert gradients.dtype == jnp.bfloat16
    got = np.asarray(gradients, np.float64)
    # Rounded once: half a unit in the last of eight bits, and the order of a float32 sum.
    slack = 1e-6 * np.sqrt(shape[2]) * np.abs(exact).max()
    np.testing.assert_allclose(got, exact, rtol=2.0**-8, atol=slack)
    np.testing.assert_allclose(np.sqrt(squared), np.sqrt((got**2).sum((1, 2, 3))), rtol=1e-6)
    alone = jax.jit(lambda x, y: kernel.squares(x, y, platform))(left, right)
    np.testing.assert_allclose(np.sqrt(alone), np.sqrt((exact**2).sum((1, 2, 3))), rtol=1e-6)
    plain, plain_squared = jax.jit(kernel.fused)(left, right)  # what a CPU runs
    np.testing.assert_allclose(np.asarray(plain, np.float64), got, rtol=2.0**-7, atol=slack)
    np.testing.assert_allclose(plain_squared, squared, rtol=1e-4)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_interpreted_kernel_equals_the_product(shape, platform):
    agrees(shape, platform)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_the_interpreted_kernel_equals_the_product_for_many_shapes(seed):
    rng = np.random.default_rng(seed)
    shape = (*rng.integers(1, 4, 2), rng.integers(1, 200), *rng.integers(1, 400, 2))
    agrees(tuple(map(int, shape)), ["gpu", "tpu"][seed % 2], seed)


def on(kind, platform, **axes):
    """A mesh of devices that are not there."""
    told = {"device_kind": kind, "num_cores": 1, "platform": platform}
    known = inspect.signature(AbstractDevice).parameters
    device = AbstractDevice(**{k: v for k, v in told.items() if k in known})
    kinds = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), kinds, abstract_device=device)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("kind", "platform"), [("NVIDIA H100", "gpu"), ("TPU v5 lite", "tpu")])
def test_the_kernel_lowers_for_devices_that_are_not_there(kind, platform, split):
    mesh = on(kind, platform, data=2) if split else on(kind, platform)
    lowers = "cuda" if platform == "gpu" else platform
    rows = PartitionSpec(None, "data")
    for shape in [*SHAPES, (3, 2, 1024, 512, 384)]:
        for function in (kernel.fused, kernel.squares):
            if split:
                out = PartitionSpec("data")
                one = function
                function = jax.shard_map(one, mesh=mesh, in_specs=(rows, rows), out_specs=out)
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in factors(*shape)]
            if split and shape[1] == 1:
                continue
            with jax.sharding.use_abstract_mesh(mesh):
                text = jax.jit(function).trace(*shapes).lower(lowering_platforms=(lowers,))
            assert "custom_call" in text.as_text()


def transformer():
    config = {"vocab_size": 11, "num_layers": 2, "embed_dim": 16, "num_heads": 2, "mlp_dim": 24}
    model = LanguageModel(transformer_config("tiny", max_seq_len=6, dtype="bfloat16", **config))
    return model.loss, model.init(jax.random.key(0)), lm_batch(5)


WAYS = ["gram", "direct", "tiles", "keep", "fused", None]


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("method", WAYS)
def test_a_unit_of_a_transformer_moves_the_sum_by_its_clip_norm(method, platform):
    """Left out, with whatever data in its place; and all ways agree with plain gradients."""
    (loss, params, batch), n = transformer(), 5
    plain = jax.jit(clipped_grad(loss, clip_norm=1.0, strategy="vmap"))(params, batch)
    clip = 0.5 * float(np.median(plain.norms))
    made = {"strategy": "ghost", "norm_method": method, "platform": platform}
    f = jax.jit(clipped_grad(loss, clip_norm=clip, **made))
    whole = f(params, batch)
    np.testing.assert_allclose(whole.norms, plain.norms, rtol=2e-2)
    for i in range(n):
        other = batch | {"tokens": batch["tokens"].at[i].set((batch["tokens"][i] * 3 + 1) % 11)}
        without = f(params, other, mask=jnp.arange(n) != i)
        moved = [
            np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64))
            for a, b in zip(jax.tree.leaves(whole.sum), jax.tree.leaves(without.sum), strict=True)
        ]
        assert np.linalg.norm(moved) <= clip * (1 + 1e-6)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("method", ["keep", "fused"])
def test_norms_are_those_of_the_rounded_gradient(method, rows):
    """Each number is rounded up by 0.29 %: the norm of what was rounded would be too small."""

    def loss(w, unit):
        return jnp.sum((unit["x"] @ w.astype(jnp.bfloat16) * unit["d"]).astype(jnp.float32))

    above_half = 2.0**-8 + 2.0**-10  # of the last bit of 1, with as much again
    d = np.tile([[1.0], [above_half]], (1, 6))
    batch = {"x": np.ones((rows, 2, 4)), "d": np.broadcast_to(d, (rows, 2, 6))}
    batch = {name: jnp.asarray(x, jnp.bfloat16) for name, x in batch.items()}
    clip = 0.5
    f = clipped_grad(loss, clip_norm=clip, strategy="ghost", norm_method=method, platform="gpu")
    got = jax.jit(f)(jnp.zeros((4, 6)), batch)
    np.testing.assert_allclose(got.norms, (1 + 2.0**-7) * np.sqrt(24.0), rtol=1e-6)
    assert np.linalg.norm(np.asarray(got.sum, np.float64)) <= rows * clip * (1 + 1e-6)


def stacked(params, example):
    """Layers in a loop, a scaled and transposed matrix, an axis of experts."""

    def layer(h, w):
        return jnp.tanh(h @ w.astype(h.dtype)), None

    h, _ = jax.lax.scan(layer, example, params["layers"])
    h = h @ (0.5 * params["turned"]).T.astype(h.dtype)
    h = jnp.einsum("td,edf->etf", h, params["experts"].astype(h.dtype))
    return jnp.sum(jnp.sin(h.astype(jnp.float32)))


STACKED = {"layers": (3, 6, 6), "turned": (5, 6), "experts": (2, 5, 4)}


@pytest.mark.parametrize("rule", [None, PerLayer(0.3)])
def test_the_kernel_takes_factors_in_any_order(rule):
    keys = dict(zip(STACKED, jax.random.split(jax.random.key(0), 3)))
    params = {name: jax.random.normal(keys[name], shape) for name, shape in STACKED.items()}
    batch = jax.random.normal(jax.random.key(1), (4, 7, 6)).astype(jnp.bfloat16)
    rule = {"clip_norm": 0.3} if rule is None else {"rule": rule}

    def made(**how):
        return jax.jit(clipped_grad(stacked, **rule, **how))(params, batch)

    want = made(strategy="vmap")
    for method in ("fused", "tiles"):
        f = clipped_grad(stacked, **rule, strategy="ghost", norm_method=method, platform="gpu")
        assert {leaf.method for leaf in f.explain(params, batch).leaves} == {method}
        got = made(strategy="ghost", norm_method=method, platform="gpu")
        np.testing.assert_allclose(got.norms, want.norms, rtol=2e-2)
        for a, b in zip(jax.tree.leaves(got.sum), jax.tree.leaves(want.sum), strict=True):
            np.testing.assert_allclose(a, b, rtol=5e-2, atol=5e-3)


def test_auto_takes_the_kernel_where_it_saves_time_and_nothing_is_split():
    """On a GPU between short units (Gram matrices) and long ones (XLA's products are faster)."""

    def loss(w, x):
        return jnp.sum(jnp.sin((x @ w.astype(x.dtype)).astype(jnp.float32)))

    def methods(length, platform, shard, **more_axes):
        f = clipped_grad(loss, clip_norm=1.0, strategy="ghost", platform=platform)
        found = []

        def see(w, x):
            found.append(f.explain(w, x).leaves[0].method)
            return x.sum()[None]

        if shard:
            axes = {"data": 8 // max(more_axes.values(), default=1), **more_axes}
            mesh = jax.make_mesh(
                tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
            )
            rows = PartitionSpec("data")
            see = jax.shard_map(
                see,
                mesh=mesh,
                in_specs=(PartitionSpec(), rows),
                out_specs=rows,
                axis_names={"data"},
            )
        w = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
        jax.eval_shape(see, w, jax.ShapeDtypeStruct((16, length, 2048), jnp.bfloat16))
        return found[-1]

    assert [methods(k, "gpu", True) for k in (128, 512, 1024)] == ["gram", "fused", "keep"]
    assert methods(512, "gpu", True, fsdp=1) == "fused"  # the mesh of a run
    assert methods(512, "gpu", True, fsdp=2) == "keep"
    assert methods(512, "gpu", False) == "keep"  # the compiler may split units over 8 devices
    assert methods(512, "cpu", True) in ("gram", "direct", "keep")


@pytest.mark.parametrize(("kind", "known"), [("NVIDIA H100 80GB HBM3", True), ("NVIDIA L4", False)])
def test_gpus_with_less_shared_memory_go_without_the_kernel(kind, known, monkeypatch):
    device = types.SimpleNamespace(device_kind=kind)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: [device])
    assert (machine_for("gpu").kernel is not None) is known
