"""Attention block by block: that of NumPy, the gradients of the plain one, and no square of T."""

import dataclasses
import functools
import math
import re
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from dpfl_jax import Execution
from dpfl_jax.clipping import clipped_grad
from dpfl_jax.clipping.jaxprs import every_program
from dpfl_jax.errors import BadInputError
from dpfl_jax.mesh import make_mesh
from dpfl_jax.models import LanguageModel, TransformerConfig, attention, transformer
from dpfl_jax.models import splash as tpu
from dpfl_jax.models.attention import attend
from dpfl_jax.training.start import check_attention
from dpfl_jax.varying import vary, varying_axes
from tests.neighbours import removed

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
        out = attention._cudnn(q, q[:, 0], q[:, 1], None, window, mine)
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
        attention._cudnn(q, q[:, 0], q[:, 0], softcap, None, None)


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
        for form in ("fused", "plain")
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)


# ---- splash attention, on TPUs -------------------------------------------------------------------


def by_plain(q, k, v, softcap, window, segments):
    return attend(q, k, v, form="plain", softcap=softcap, window=window, segments=segments)


interpreted = functools.partial(tpu.splash, interpret=True)


@pytest.mark.parametrize(
    ("shape", "softcap", "window", "packed"),
    [
        ((2, 2, 130, 8), None, None, False),
        pytest.param((1, 3, 200, 16), 2.0, 70, True, marks=pytest.mark.slow),
        pytest.param((2, 1, 700, 8), None, 530, True, marks=pytest.mark.slow),
    ],
)
def test_splash_gives_the_values_and_gradients_of_plain_attention(shape, softcap, window, packed):
    """Key heads, queries of each, length, width: in one block and in two, of which one is short."""
    rng = np.random.default_rng(0)
    heads, _, length, width = shape
    q, k, v = (
        rng.normal(size=(2, *x)).astype(np.float32) / width**0.25
        for x in (shape, (heads, length, width), (heads, length, width))
    )
    segments = np.sort(rng.integers(0, 4, (2, length)), axis=1).astype(np.int32) if packed else None

    def values_and_gradients(function):
        def one(q, k, v, mine):
            out, back = jax.vjp(lambda *x: function(*x, softcap, window, mine), q, k, v)
            return out, *back(jnp.sin(out + 1))

        return jax.jit(jax.vmap(one, (0, 0, 0, 0 if packed else None)))(q, k, v, segments)

    for a, b in zip(values_and_gradients(interpreted), values_and_gradients(by_plain), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def per_device(function, *, reduced):
    """Clipped sums and norms by ``function`` on four devices, or a loss's plain gradient."""

    def loss(w, x):
        q = (x["x"] @ w).reshape(-1, 2, 2, 8).transpose(1, 2, 0, 3)
        return jnp.sum(jnp.sin(function(q, q[:, 0], q[:, 1], 2.0, 5, x["segments"])) ** 2)

    def local(w, x, mask):
        if reduced is None:  # JAX itself sums over the devices, as ``w`` is the same on all of them
            return jax.grad(lambda w: jax.vmap(loss, (None, 0))(w, x).sum())(w)
        found = clipped_grad(loss, clip_norm=1.0, strategy=reduced)(w, x, mask=mask)
        return jax.lax.psum(found.sum, "data"), found.norms

    rows, whole = PartitionSpec("data"), PartitionSpec()
    return jax.jit(
        jax.shard_map(
            local,
            mesh=make_mesh(devices=jax.devices()[:4]),
            in_specs=(whole, rows, rows),
            out_specs=whole if reduced is None else (whole, rows),
        )
    )


def packed_units():
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(0, 3, (8, 16)), axis=1).astype(np.int32)
    units = {"x": rng.normal(size=(8, 16, 8)).astype(np.float32), "segments": segments}
    return rng.normal(size=(8, 32)).astype(np.float32), units, np.ones(8, bool)


@pytest.mark.parametrize("strategy", ["ghost", "vmap", "scan"])
def test_splash_is_lowered_where_every_device_clips_its_own_units(strategy):
    """Three kernels, each for all units of a device: none is run for one unit after the other."""
    program = per_device(tpu.splash, reduced=strategy).trace(*packed_units())
    text = program.lower(lowering_platforms=("tpu",)).as_text()
    assert len(re.findall(r'kernel_name = "splash_mha_(?:fwd|dkv|dq)', text)) == 3
    assert text.count("stablehlo.while") == (strategy == "scan")


@pytest.fixture
def typed_interpreter(monkeypatch):
    """JAX's interpreter of kernels, which mixes what varies over devices with what does not.

    Here it is traced without a mesh, and what it traced is evaluated with values that all vary.
    """
    library = pytest.importorskip("jax._src.pallas.hlo_interpreter")
    original = getattr(library, "pallas_call_hlo_interpret", None)
    if original is None or not hasattr(jax.typeof(1.0), "manual_axis_type"):
        pytest.skip("this JAX has another interpreter")

    def typed(*args, **params):
        axes = varying_axes(args)
        with ThreadPoolExecutor(1) as pool:
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
            traced = jax.make_jaxpr(lambda *x: original(*x, **params))
            return evaluated(axes, pool.submit(traced, *shapes).result(), *args)

    monkeypatch.setattr(library, "pallas_call_hlo_interpret", typed)


def evaluated(axes, program, *args):
    run = functools.partial(evaluated, axes)
    known = dict(zip([*program.jaxpr.constvars, *program.jaxpr.invars], [*program.consts, *args]))

    def read(v):
        return vary(jnp.asarray(v.val, v.aval.dtype) if isinstance(v, Literal) else known[v], axes)

    for equation in program.jaxpr.eqns:
        x, params, name = (
            [read(v) for v in equation.invars],
            equation.params,
            equation.primitive.name,
        )
        if name == "while":
            a = params["cond_nconsts"]
            b = a + params["body_nconsts"]
            test = functools.partial(run, params["cond_jaxpr"], *x[:a])
            body = functools.partial(run, params["body_jaxpr"], *x[a:b])
            out = jax.lax.while_loop(lambda c, f=test: f(*c)[0], lambda c, f=body: f(*c), x[b:])
        elif name == "scan":  # a loop over nothing
            consts = len(x) - len(equation.outvars)
            body = functools.partial(run, params["jaxpr"], *x[:consts])
            out = jax.lax.fori_loop(0, params["length"], lambda _, c, f=body: f(*c), x[consts:])
        elif name == "cond":
            branches = [functools.partial(run, branch) for branch in params["branches"]]
            out = jax.lax.switch(x[0], branches, *x[1:])
        elif name in ("jit", "closed_call"):
            out = run(params["jaxpr" if name == "jit" else "call_jaxpr"], *x)
        else:
            out = equation.primitive.bind(*x, **params)
            out = out if equation.primitive.multiple_results else [out]
        known |= zip(equation.outvars, out, strict=True)
    return [read(v) for v in program.jaxpr.outvars]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ghost", "vmap", "scan"])
def test_splash_on_every_device_clips_as_plain_attention_and_bounds_a_unit(
    typed_interpreter, strategy
):
    w, units, mask = packed_units()
    clipped = per_device(interpreted, reduced=strategy)
    total, norms = clipped(w, units, mask)
    want, want_norms = per_device(by_plain, reduced=strategy)(w, units, mask)
    np.testing.assert_allclose(total, want, atol=1e-6)
    np.testing.assert_allclose(norms, want_norms, rtol=1e-5)
    assert norms.min() > 1
    for where in (0, 5):
        less, _ = clipped(w, *removed(units, mask, where))
        moved = np.linalg.norm(np.float64(total) - np.float64(less))
        assert 0.5 < moved <= 1 + 1e-6


def test_splash_leaves_sums_over_devices_where_jax_puts_them(typed_interpreter):
    """The gradient with respect to what all devices share, which is one sum over them."""
    given = packed_units()
    found, want = (per_device(f, reduced=None)(*given) for f in (interpreted, by_plain))
    np.testing.assert_allclose(found, want, atol=1e-5 * np.abs(want).max())
    program = per_device(tpu.splash, reduced=None).trace(*given)
    assert program.lower(lowering_platforms=("tpu",)).as_text().count("all_reduce") == 1


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="fused is cuDNN's kernel here")
def test_fused_is_a_kernel_where_devices_clip_and_auto_where_the_compiler_splits():
    def fused(q, k, v, softcap, window, segments):
        return attend(q, k, v, form="fused", softcap=softcap, window=window, segments=segments)

    def kernels(program, *args):
        names = (e.primitive.name for x in every_program(program(*args)) for e in x.eqns)
        return sum(name == "pallas_call" for name in names)

    given = packed_units()
    assert kernels(jax.make_jaxpr(per_device(fused, reduced="ghost")), *given) == 3
    q = jnp.ones((1, 1, 4, 8))
    assert not kernels(jax.make_jaxpr(fused), q, q[:, 0], q[:, 0], None, None, None)


@pytest.mark.parametrize(
    ("platform", "fsdp", "message"),
    [("cpu", 1, "the platform here is cpu"), ("tpu", 2, "cannot be split over devices")],
)
def test_fused_is_refused_before_the_first_step(platform, fsdp, message):
    config = types.SimpleNamespace(execution=Execution(attention="fused"))
    devices = np.array([types.SimpleNamespace(platform=platform)])
    mesh = types.SimpleNamespace(devices=devices, shape={"data": 1, "fsdp": fsdp})
    with pytest.raises(BadInputError, match=message):
        check_attention(config, mesh)


def test_a_splash_attention_of_another_kind_is_refused(monkeypatch):
    monkeypatch.setattr(tpu, "_INLINED", frozenset())
    q = jnp.ones((1, 1, 4, 8))
    with pytest.raises(BadInputError, match="not the one known here, it contains jit: take auto"):
        interpreted(q, q[:, 0], q[:, 0], None, None, None)
