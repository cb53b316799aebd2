"""Flax Linen, Flax NNX and low precision: the engine sees a jaxpr, not a framework."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_taps import compare, relative_error
from zoo import ZOO, transformer_loss, transformer_params

from dpfl_jax.clipping import clipped_grad
from dpfl_jax.models import LanguageModel, TransformerConfig


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, ids, image):
        x = linen.Embed(13, 8)(ids)
        x = x + linen.SelfAttention(num_heads=2)(linen.LayerNorm()(x))
        x = linen.RNN(linen.OptimizedLSTMCell(5))(x)
        y = linen.relu(linen.Conv(4, (3, 3), strides=2)(image))
        y = linen.GroupNorm(num_groups=2)(y)
        return linen.DenseGeneral((2, 3))(jnp.concatenate([x.mean(0), y.mean((0, 1))]))


@pytest.mark.slow
def test_flax_linen():
    ids = jax.random.randint(jax.random.key(0), (3, 5), 0, 13)
    image = jax.random.normal(jax.random.key(1), (3, 6, 6, 2))
    net = LinenNet()
    params = net.init(jax.random.key(2), ids[0], image[0])

    def loss(params, e):
        return jnp.sum(net.apply(params, e["ids"], e["image"]) ** 2)

    compare(loss, params, {"ids": ids, "image": image}, [None])


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(13, 8, rngs=rngs)
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.conv = nnx.Conv(8, 6, kernel_size=(3,), rngs=rngs)
        self.out = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)[None]
        x = x + self.attention(self.norm(x))
        return self.out(nnx.silu(self.conv(x))[0])


@pytest.mark.slow
def test_flax_nnx():
    graph, params, rest = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, ids):
        return jnp.sum(jnp.tanh(nnx.merge(graph, params, rest)(ids)) ** 2)

    compare(loss, params, jax.random.randint(jax.random.key(0), (4, 5), 0, 13), [None])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_language_model(dtype):
    shape = {"vocab_size": 30, "embed_dim": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 8}
    model = LanguageModel(TransformerConfig(dtype=dtype, **shape))
    tolerance = 1e-5 if dtype == "float32" else 5e-2
    params = jax.tree.map(lambda p: 5 * p, model.init(jax.random.key(0)))
    batch = {
        "tokens": jax.random.randint(jax.random.key(1), (4, 8), 3, 30),
        "mask": jnp.arange(8) < jnp.array([8, 5, 1, 8])[:, None],
    }
    ways = [clipped_grad(model.loss, clip_norm=0.5, strategy=s) for s in ("ghost", "vmap")]
    got, want = jax.jit(lambda *given: [f(*given) for f in ways])(params, batch)
    np.testing.assert_allclose(got.norms, want.norms, rtol=tolerance)
    assert relative_error(got.sum, want.sum) < tolerance
    uses = clipped_grad(model.loss, clip_norm=0.5, strategy="ghost").explain(params, batch).leaves
    heavy = [r for r in uses if np.prod(r.shape) > 200]
    assert heavy
    assert all(r.method != "per-unit copies" for r in heavy), uses


def test_low_precision_stays_under_the_bound():
    """Rounding w * d to bfloat16 must not push one unit's contribution over C."""

    def loss(params, x):
        return jnp.sum(jnp.tanh(x.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)))

    params = {"w": jax.random.normal(jax.random.key(0), (64, 32))}
    f = jax.jit(clipped_grad(loss, clip_norm=1e-2, strategy="ghost", norm_method="gram"))
    for i in range(20):
        x = jax.random.normal(jax.random.key(i), (1, 3, 64))
        norm = float(jnp.linalg.norm(f(params, x).sum["w"]))
        assert 0.98e-2 < norm <= 1e-2


@pytest.mark.slow
@pytest.mark.nightly("data")
@pytest.mark.parametrize("axes", ["data", "model"])
def test_sharded_parameters_and_units_change_nothing(axes):
    """Automatic sharding: units over one axis, parameters whole or split over another."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params, (_, _, batch) = transformer_params(), ZOO["transformer"]()
    batch = jax.tree.map(lambda x: jnp.concatenate([x, x[:3]]), batch)

    def place(p):
        last = "model" if axes == "model" and p.ndim and p.shape[-1] % 2 == 0 else None
        return NamedSharding(mesh, PartitionSpec(*[None] * (p.ndim - 1), last))

    f = clipped_grad(transformer_loss, clip_norm=1.0, strategy="ghost")
    want = jax.jit(f)(params, batch)
    spread = jax.device_put(params, jax.tree.map(place, params))
    units = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    got = jax.jit(f)(spread, units)
    np.testing.assert_allclose(got.norms, want.norms, rtol=1e-5)
    assert relative_error(got.sum, want.sum) < 1e-5
