"""Attention block by block: that of NumPy, the gradients of the plain one, and no square of T."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dpfl_jax.clipping import clipped_grad
from dpfl_jax.clipping.jaxprs import every_program
from dpfl_jax.errors import BadInputError
from dpfl_jax.mesh import make_mesh
from dpfl_jax.models import LanguageModel, TransformerConfig, attention, transformer
from dpfl_jax.models.attention import attend

UNITS = 3
FORMS = ("plain", "blockwise")


@pytest.fixture
def short_blocks(monkeypatch):
    """Blocks of 8 positions and pieces of 4 losses, so that small models have many of both."""
    monkeypatch.setattr(attention, "BLOCK", 8)
    monkeypatch.setattr(transformer, "_MAX_LOGITS", 4 * 4 * 37)


def setting(seed):
    """A random one: key heads, queries of each, length, width, softcap, window, segments."""
    rng = np.random.default_rng(seed)
    heads, group, length = rng.integers(1, 4), rng.integers(1, 4), int(rng.integers(2, 40))
    window = int(rng.integers(1, length + 3)) if rng.random() < 0.6 else None
    softcap = float(rng.uniform(1, 4)) if rng.random() < 0.5 else None

    def normal(*shape):
        return rng.normal(size=(UNITS, *shape)).astype(np.float32)

    q, k, v = normal(heads, group, length, 4), normal(heads, length, 4), normal(heads, length, 4)
    segments = np.sort(rng.integers(0, 4, (UNITS, length)), axis=1).astype(np.int32)
    return q, k, v, segments if rng.random() < 0.6 else None, softcap, window


def numpy_attention(q, k, v, segments, softcap, window):
    """Position by position, from the definition."""
    out = np.zeros(q.shape)
    for head, group, t in np.ndindex(q.shape[:3]):
        seen = [
            s
            for s in range(t + 1)
            if (window is None or t - s < window)
            and (segments is None or segments[s] == segments[t])
        ]
        scores = k[head, seen].astype(np.float64) @ q[head, group, t]
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[head, group, t] = weights / weights.sum() @ v[head, seen]
    return out


@pytest.mark.nightly("1", "2", "3", "4", "5", "6", "7", "8", "9")
@pytest.mark.parametrize("seed", range(4))
def test_random_settings(seed, short_blocks):
    q, k, v, segments, softcap, window = setting(seed)
    mapped = (0, 0, 0, None if segments is None else 0)

    def values_and_gradients(form):
        def one(q, k, v, segments):
            options = {"form": form, "softcap": softcap, "window": window, "segments": segments}
            out, back = jax.vjp(lambda *x: attend(*x, **options), q, k, v)
            return out, back(jnp.sin(out + 1))

        return jax.jit(jax.vmap(one, mapped))(q, k, v, segments)

    plain, blockwise = (values_and_gradients(form) for form in FORMS)
    for u in range(UNITS):
        own = None if segments is None else segments[u]
        want = numpy_attention(q[u], k[u], v[u], own, softcap, window)
        np.testing.assert_allclose(plain[0][u], want, atol=1e-5)
        np.testing.assert_allclose(blockwise[0][u], want, atol=1e-5)
    for a, b in zip(plain[1], blockwise[1]):
        np.testing.assert_allclose(a, b, atol=1e-5)


CONFIG = TransformerConfig(
    vocab_size=37, max_seq_len=30, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2
)


def examples(n=4, length=30):
    rng = np.random.default_rng(1)
    mask = np.arange(length) < rng.integers(3, length, n)[:, None]
    return {"tokens": rng.integers(3, 37, (n, length)).astype(np.int32), "mask": mask}


WINDOWS = {  # as of Gemma 3
    "head_norms": True,
    "num_layers": 3,
    "sliding_window": 11,
    "global_every": 2,
    "local_rope_theta": 100.0,
}


@pytest.mark.slow
@pytest.mark.nightly("fields4", "fields5")
@pytest.mark.parametrize(
    ("strategy", "fields"),
    [
        ("ghost", {}),
        ("ghost", {"tie_embeddings": False}),
        ("scan", {}),
        ("vmap", {}),
        ("ghost", WINDOWS),
        ("scan", WINDOWS),
    ],
)
def test_clipped_gradients_are_those_of_plain_attention(strategy, fields, short_blocks):
    """Norms and sums of units, whose losses are computed in pieces, too."""
    config = dataclasses.replace(CONFIG, **{"attention_softcap": 2.0} | fields)
    model = LanguageModel(dataclasses.replace(config, attention="blockwise"))
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: x if "norm" in jax.tree_util.keystr(path) else 6 * x,
        model.init(jax.random.key(0)),
    )
    got = jax.jit(clipped_grad(model.loss, clip_norm=0.5, strategy=strategy))(params, examples())
    plain = LanguageModel(dataclasses.replace(config, attention="plain", remat="none"))
    reference = jax.vmap(jax.value_and_grad(plain.loss), (None, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "_MAX_LOGITS", 2**28)
        losses, gradients = jax.jit(reference)(params, examples())
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(gradients)]
    norms = np.sqrt(sum(np.square(x).sum(tuple(range(1, x.ndim))) for x in leaves))
    np.testing.assert_allclose(got.losses, losses, rtol=1e-5)
    np.testing.assert_allclose(got.norms, norms, rtol=1e-5)
    weights = np.minimum(1, 0.5 / norms)
    assert (weights < 1).any()
    for a, b in zip(jax.tree.leaves(got.sum), leaves):
        np.testing.assert_allclose(a, np.einsum("n,n...->...", weights, b), atol=1e-5)


def test_no_array_grows_with_the_square_of_the_length():
    length = 8192
    config = dataclasses.replace(CONFIG, max_seq_len=length, num_kv_heads=None)
    example = jax.tree.map(lambda x: jnp.asarray(x[0]), examples(1, length))

    def largest(form):
        model = LanguageModel(dataclasses.replace(config, attention=form))
        params = jax.eval_shape(model.init, jax.random.key(0))
        program = jax.make_jaxpr(jax.grad(model.loss))(params, example)
        return max(
            math.prod(getattr(v.aval, "shape", ()))
            for inner in every_program(program)
            for equation in getattr(inner, "jaxpr", inner).eqns
            for v in equation.outvars
        )

    assert largest("plain") == config.num_heads * length**2
    assert largest("auto") <= config.num_heads * attention.BLOCK**2 + length * 128


@pytest.fixture
def pretended_cudnn(monkeypatch):
    """JAX traces and lowers cuDNN's kernel, as if a GPU were here."""
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    if not hasattr(fused, "_attention_out_aval"):
        pytest.skip("this JAX does not say over which devices cuDNN's results vary")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(fused, "check_compute_capability", lambda _: True)


@pytest.mark.parametrize("strategy", ["ghost", "vmap", "scan"])
@pytest.mark.parametrize(
    ("window", "packed"), [(None, False), pytest.param(5, True, marks=pytest.mark.slow)]
)
def test_cudnn_is_lowered_where_every_device_clips_its_own_units(
    pretended_cudnn, strategy, window, packed
):
    """That is all that can be seen without a GPU: its kernel, forward and backward, per device."""
    segments = jnp.asarray(np.repeat([[0, 1]], 8, axis=1)) if packed else None

    def loss(w, x):
        q = (x @ w).astype(jnp.bfloat16).reshape(16, 2, 2, 8).transpose(1, 2, 0, 3)
        mine = None if segments is None else segments[0]
        out = attend(q, q[:, 0], q[:, 1], form="cudnn", window=window, segments=mine)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    clipped = clipped_grad(loss, clip_norm=1.0, strategy=strategy)
    mesh = make_mesh(devices=jax.devices()[:4])
    total = jax.shard_map(
        lambda w, x: jax.lax.psum(clipped(w, x).sum, "data"),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
    )
    given = (jnp.ones((8, 32)), jnp.ones((8, 16, 8)))
    text = jax.jit(total).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    kernels = {*re.findall(r"cudnn\$fmha\w+", text)}
    assert len(kernels) == 2
    assert sum(kernel.endswith("Backward") for kernel in kernels) == 1


@pytest.mark.parametrize(
    ("softcap", "message"), [(2.0, "knows no attention_softcap"), (None, "needs an NVIDIA GPU")]
)
def test_cudnn_where_it_cannot_be_used_is_one_sentence(softcap, message):
    if jax.default_backend() == "gpu" and softcap is None:
        pytest.skip("it can be used here")
    q = jnp.ones((1, 1, 4, 8))
    with pytest.raises(BadInputError, match=message):
        attend(q, q[:, 0], q[:, 0], form="cudnn", softcap=softcap)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 100])
def test_cudnn_gives_the_values_and_gradients_of_plain_attention(window):
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
        for shape in ((2, 2, 256, 64), (2, 256, 64), (2, 256, 64))
    )

    def loss(form, q, k, v):
        out = attend(0.125 * q, k, v, form=form, window=window)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    found, want = (
        jax.jit(jax.value_and_grad(functools.partial(loss, form), (0, 1, 2)))(q, k, v)
        for form in ("cudnn", "plain")
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)
