"""Parameters split over devices: the same result, and no more sent than without privacy."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from neighbours import removed

from dpfl_jax.clipping import clipped_grad
from dpfl_jax.models import LanguageModel, TransformerConfig, attention
from dpfl_jax.training.slices import collectives

MODEL = LanguageModel(
    TransformerConfig(num_layers=2, embed_dim=64, num_heads=4, vocab_size=128, remat="none")
)
EXPERTS = dataclasses.replace(
    MODEL.config, activation="swiglu", mlp_dim=32, num_experts=8, experts_per_token=2
)
UNITS, LENGTH = 16, 32
MESHES = {"fully sharded": {"fsdp": 8}, "mixed": {"data": 2, "fsdp": 2, "tensor": 2}}


def split(mesh, path, x):
    """Kernels over fsdp, and tensor on the other side: outputs, then inputs of the next layer."""
    name, axes = jax.tree_util.keystr(path), [None] * x.ndim
    tensor = "tensor" if "tensor" in mesh.axis_names else None
    if "kernel" in name or "embedding" in name:
        inward = "out" in name or "down" in name or "embedding" in name
        axes[-2:] = (tensor, "fsdp") if inward else ("fsdp", tensor)
    return NamedSharding(mesh, PartitionSpec(*axes))


def test_the_choice_of_a_strategy_counts_messages():
    """Split parameters are gathered, and their gradients scattered, for each unit of a scan."""
    params, batch = jnp.zeros((1000, 1000)), jnp.zeros((UNITS, 1000))

    def microseconds(axis):
        mesh = jax.make_mesh((8,), (axis,), axis_types=(AxisType.Auto,))
        rows = NamedSharding(mesh, PartitionSpec(axis))
        f = clipped_grad(
            lambda w, x: jnp.sum(jnp.tanh(x @ w)), clip_norm=1.0, platform="tpu", unit_sharding=rows
        )
        return np.array(re.findall(r"(\d+) us", f.explain(params, batch).reason), int)

    # 8 bytes a parameter at 100 GB/s; book-keeping sends once for two units a device.
    np.testing.assert_allclose(microseconds("fsdp") - microseconds("data"), [40, 80], atol=1)


@pytest.mark.nightly
@pytest.mark.slow(
    "one MLP-mixed-gram",
    "experts-mixed-direct",
    "one MLP-fully sharded-keep",
)
@pytest.mark.parametrize("method", ["gram", "direct", "keep"])
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("model", [MODEL, LanguageModel(EXPERTS)], ids=["one MLP", "experts"])
def test_sharded_parameters(model, sizes, method):
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
    split_units = tuple(axis for axis in sizes if axis != "tensor")
    rows = NamedSharding(mesh, PartitionSpec(split_units))
    params = model.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (UNITS, LENGTH), 0, 128)
    batch = {"tokens": tokens, "mask": jnp.ones((UNITS, LENGTH), bool)}
    want = jax.jit(clipped_grad(model.loss, clip_norm=0.1, strategy="vmap"))(params, batch)

    places = jax.tree_util.tree_map_with_path(lambda path, x: split(mesh, path, x), params)
    params, batch = jax.device_put(params, places), jax.device_put(batch, rows)
    f = clipped_grad(
        model.loss, clip_norm=0.1, strategy="ghost", norm_method=method, unit_sharding=rows
    )

    def private(params, batch):
        out = f(params, batch)
        return out.sum, out.norms

    def plain(params, batch):
        return jax.grad(lambda p: jax.vmap(model.loss, (None, 0))(p, batch).sum())(params)

    compiled = jax.jit(private, out_shardings=(places, rows)).lower(params, batch).compile()
    total, norms = compiled(params, batch)
    np.testing.assert_allclose(norms, want.norms, rtol=2e-5)
    for got, expected in zip(jax.tree.leaves(total), jax.tree.leaves(want.sum)):
        np.testing.assert_allclose(got, expected, atol=2e-6)

    def sent(compiled):
        # Loops here run over the layers.
        return sum(c.bytes * (2 if c.in_loop else 1) for c in collectives(compiled.as_text()))

    public = jax.jit(plain, out_shardings=places).lower(params, batch).compile()
    assert sent(compiled) <= 1.1 * sent(public)


@pytest.mark.slow
def test_packed_rows_split_along_the_sequence(monkeypatch):
    """A user's own layout: no axis of ours splits tokens, but their compiler may be told to."""
    monkeypatch.setattr(attention, "BLOCK", 8)
    clip = 0.1
    fields = {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 32}
    config = TransformerConfig(vocab_size=32, max_seq_len=LENGTH, attention="blockwise", **fields)
    model = LanguageModel(config)
    mesh = jax.make_mesh((2, 4), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    cut = NamedSharding(mesh, PartitionSpec("data", "sequence"))
    rng = np.random.default_rng(0)
    ends = np.sort(rng.integers(1, LENGTH + 1, (8, 3)), axis=1)  # of three sequences a row
    places = np.arange(LENGTH)
    segments = (ends[:, :, None] <= places).sum(axis=1) + 1
    segments = np.where(places < ends[:, -1:], segments, 0).astype("i4")
    tokens = rng.integers(0, 32, segments.shape).astype("i4")
    batch = {"tokens": tokens, "mask": segments > 0, "segments": segments}
    params, mask = model.init(jax.random.key(0)), np.arange(8) < 7

    whole = clipped_grad(model.loss, clip_norm=clip, strategy="vmap")
    want = jax.jit(whole)(params, batch, mask=mask)
    split = jax.jit(clipped_grad(model.loss, clip_norm=clip, unit_sharding=rows))

    def placed(batch, mask):
        return split(params, jax.device_put(batch, cut), mask=jax.device_put(mask, rows))

    got = placed(batch, mask)
    np.testing.assert_allclose(got.norms, want.norms, rtol=2e-5)
    pairs = zip(jax.tree.leaves(got.sum), jax.tree.leaves(want.sum))
    assert all(np.allclose(a, b, atol=2e-6) for a, b in pairs)
    for unit in (0, 6):
        less = placed(*removed(batch, mask, unit))
        both = zip(jax.tree.leaves(got.sum), jax.tree.leaves(less.sum))
        moved = np.sqrt(sum(np.square(a - b).sum() for a, b in both))
        assert clip * (1 - 1e-2) <= moved <= clip * (1 + 1e-4)
