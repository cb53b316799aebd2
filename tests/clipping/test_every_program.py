"""Every way to clip, for every kind of model: what a unit can do to the sum.

Each program is compiled once, as users compile it, and called for every case. On a GPU:

    JAX_PLATFORMS=cuda pytest tests/clipping/test_every_program.py -m "slow or not slow"
"""

import functools
import os
from concurrent.futures import ThreadPoolExecutor

import haiku
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from neighbours import removed
from test_frameworks import LinenNet, NnxNet
from test_odd_losses import ODD
from zoo import ZOO, lm_batch, normal, tokens

from dpfl_jax.clipping import Flat, clipped_grad
from dpfl_jax.clipping.taps import kernel
from dpfl_jax.models import LanguageModel, transformer_config

UNITS = 4  # units of each batch that are left out, one after the other
QUICK = ("straight_and_transposed",)  # a model for every change
LONG = ("transformer", "cnn", "linen", "lstm", "gru", "layers", "unrolled")  # slow to compile


def linen():
    batch = {"ids": tokens(0, 13, 3, 5), "image": normal(1, 3, 6, 6, 2)}
    net = LinenNet()
    params = net.init(jax.random.key(2), *(batch[name][0] for name in ("ids", "image")))
    return lambda p, e: jnp.sum(net.apply(p, e["ids"], e["image"]) ** 2), params, batch


def flax_nnx():
    graph, params, rest = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param, ...)
    params = jax.tree.map(jnp.asarray, nnx.to_pure_dict(params))

    def loss(params, ids):
        net = nnx.merge(graph, nnx.State(params), rest)
        return jnp.sum(jnp.tanh(net(ids)) ** 2)

    return loss, params, tokens(0, 13, 4, 5)


def haiku_mlp():
    net = haiku.without_apply_rng(haiku.transform(lambda x: haiku.nets.MLP([6, 3])(x)))
    params = net.init(jax.random.key(0), jnp.zeros(5))
    return lambda p, x: jnp.sum(net.apply(p, x) ** 2), params, normal(1, 5, 5)


def language_model(dtype="float32"):
    """So long that the backward pass forms gradients in bfloat16, where a platform keeps them."""
    shape = {"vocab_size": 11, "num_layers": 2, "embed_dim": 16, "num_heads": 2, "mlp_dim": 24}
    model = LanguageModel(transformer_config("tiny", max_seq_len=24, dtype=dtype, **shape))
    return model.loss, model.init(jax.random.key(0)), lm_batch(5, t=24)


MODELS = ZOO | {
    "bag": ODD["bags_of_embeddings"],
    "haiku": haiku_mlp,
    "linen": linen,
    "nnx": flax_nnx,
    "language_model": language_model,
}


def mark(model):
    if model in QUICK:
        return ()
    return pytest.mark.nightly if model.startswith(LONG) else pytest.mark.slow


def narrow(tree):
    def one(x):
        return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(one, tree)


def ways():
    """``name -> (options, platform whose kernel is interpreted)``."""
    found = {"auto": ({}, None)} | {name: ({"strategy": name}, None) for name in ("vmap", "scan")}
    for method in ("gram", "direct", "keep", "tiles", "fused"):
        ghost = {"strategy": "ghost", "norm_method": method}
        # Only a CPU keeps no gradients in bfloat16, and has no kernel.
        platform = "gpu" if method in ("keep", "tiles", "fused") else None
        found[method] = (ghost | {"platform": platform}, None)
        if method == "keep":
            found["keep, in float32"] = (ghost, None)
    if jax.default_backend() == "cpu":
        for method, platform in (("tiles", "gpu"), ("fused", "gpu"), ("fused", "tpu")):
            how = {"strategy": "ghost", "norm_method": method, "platform": platform}
            found[f"{method}, {platform}, interpreted"] = (how, platform)
    return found


def programs(loss, params, batch, monkeypatch, most=None):
    """``name of a way -> compiled (params, batch, mask, clip norm) -> sum, norms``, each once.

    Args:
      loss: of one unit.
      params: its parameters.
      batch: units.
      monkeypatch: the fixture.
      most: the ways to take; None: all.
    """
    mask = jnp.ones(len(jax.tree.leaves(batch)[0]), bool)
    traced = {}
    for name, (how, interpreted) in ways().items():
        if most is not None and name not in most:
            continue
        gradient = clipped_grad(loss, clip_norm=1.0, **how)

        def run(params, batch, mask, clip, gradient=gradient):
            got = gradient(params, batch, mask=mask, rule=Flat(clip))
            return got.sum, got.norms

        with monkeypatch.context() as patch:
            for function in (kernel.fused, kernel.squares) if interpreted else ():
                by = functools.partial(function, interpret=interpreted)
                patch.setattr(kernel, function.__name__, by)
            one = jax.jit(run).trace(params, batch, mask, jnp.float32(1.0))
        text = str(one.jaxpr)
        if not interpreted or "pallas_call" in text:
            traced.setdefault(text, (name, one))
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:  # pytest's workers: 4
        made = pool.map(lambda pair: (pair[0], pair[1].lower().compile()), traced.values())
        return dict(made)


def distance(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    off = [np.linalg.norm(np.asarray(x, np.float64) - np.asarray(y, np.float64)) for x, y in pairs]
    return np.linalg.norm(off)


def with_floats(batch, where, change):
    """The batch, with a unit's floats changed; tokens stay."""

    def one(x):
        x = np.array(x)
        if np.issubdtype(x.dtype, np.floating):
            x[where] = change(x[where])
        return x

    return jax.tree.map(one, batch)


def check(name, run, params, batch):
    """Returns the largest distance, over the clip norm, by which a unit has moved the sum."""
    n = len(jax.tree.leaves(batch)[0])
    everyone = np.ones(n, bool)
    clip = np.float32(0.5 * np.median(run(params, batch, everyone, np.float32(1.0))[1]))
    total = functools.partial(lambda *given: run(params, *given, clip)[0])
    # XLA adds a table's gradients up in any order on a GPU.
    rounding = 0.0 if jax.default_backend() == "cpu" else 1e-6 * clip
    whole, most = total(batch, everyone), 0.0
    for i in range(min(n, UNITS)):
        other, mask = removed(batch, everyone, i)
        large, lost = (
            with_floats(batch, i, change) for change in (lambda x: 100 * x, lambda x: x * np.nan)
        )
        without = total(other, mask)
        assert np.isfinite(distance(without, without)), name
        for left_out in (large, lost):
            assert distance(total(left_out, mask), without) <= rounding, (name, i)
        moved = [distance(total(x, everyone), without) for x in (batch, other, large, lost)]
        most = max(most, *moved)
        assert max(moved) <= clip * (1 + 1e-6), (name, i, moved, clip)
    assert distance(whole, total(batch, everyone)) <= rounding
    assert most > 0.5 * clip, name  # a unit that is clipped
    return float(most / clip)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", [pytest.param(m, marks=mark(m)) for m in MODELS])
def test_no_unit_moves_the_sum_by_more_than_its_clip_norm(
    model, dtype, monkeypatch, record_property
):
    """Left out with other data in its place, NaNs or a hundredfold; then the same, not left out.

    Of what is left out nothing is left, to the last bit.
    """
    if model == "language_model":  # casts by itself
        loss, params, batch = language_model(dtype)
    else:
        loss, params, batch = MODELS[model]()
        if dtype == "bfloat16":
            wide = loss

            def loss(params, example):
                return wide(narrow(params), narrow(example)).astype(jnp.float32)

    long = model.startswith(("transformer", "language_model"))  # to compile
    few = ("auto", "vmap", "gram", "keep", "fused") if long else None
    made = programs(loss, params, batch, monkeypatch, few)
    record_property("programs", len(made))
    found = {name: check(name, run, params, batch) for name, run in made.items()}
    record_property("excess", max(found.values()) - 1)
