"""Frozen parameters: norms and sums of the trained ones alone, for every strategy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpfl_jax.clipping import clipped_grad, join, split
from dpfl_jax.errors import BadInputError
from dpfl_jax.models import LanguageModel, TransformerConfig
from dpfl_jax.models.config import Lora
from dpfl_jax.models.params import is_adapter, merge, without_adapters

BASE = TransformerConfig(
    vocab_size=37,
    max_seq_len=8,
    embed_dim=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    activation="swiglu",
    tie_embeddings=False,
    remat="none",
)
ADAPTED = dataclasses.replace(BASE, lora=Lora(rank=2, targets=("*/attention/*", "*/mlp/down")))
GEMMA = dataclasses.replace(
    BASE, activation="geglu", norm_plus_one=True, scale_embeddings=True, post_norms=True
)
GPT2 = dataclasses.replace(
    BASE,
    activation="gelu",
    norm="layer",
    positions="learned",
    use_bias=True,
    num_kv_heads=4,
    tie_embeddings=True,
)


def biases(name):
    return name.endswith("bias")


def last(name):
    return name.startswith(("last_blocks", "final_norm"))


CHOICES = {
    "lora": (ADAPTED, is_adapter),
    "biases": (GPT2, biases),
    "last layers": (dataclasses.replace(BASE, last_layers=1), last),
    "embedding": (GPT2, lambda name: name == "embedding"),
    "all of gemma": (GEMMA, None),
}


def problem(config, n=5):
    model = LanguageModel(config)
    params = jax.jit(model.init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    noisy = jax.tree.map(
        lambda x: x + jnp.asarray(0.3 * rng.normal(size=x.shape), jnp.float32), params
    )
    lengths = rng.integers(2, 9, n)
    batch = {
        "tokens": jnp.asarray(rng.integers(2, 37, (n, 8)), jnp.int32),
        "mask": jnp.asarray(np.arange(8) < lengths[:, None]),
    }
    return model, noisy, batch


def by_definition(model, params, trainable, batch, clip_norm):
    """Per-unit gradients of the trained leaves alone, by vmap(grad)."""
    trained, frozen = split(params, trainable)

    def loss(trained, example):
        return model.loss(join(trained, frozen), example)

    each = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(trained, batch)
    squared = sum(jnp.sum(g.reshape(g.shape[0], -1) ** 2, -1) for g in jax.tree.leaves(each))
    norms = jnp.sqrt(squared)
    weights = jnp.minimum(1.0, clip_norm / norms)
    return norms, jax.tree.map(lambda g: jnp.einsum("n...,n->...", g, weights), each)


STRATEGIES = {
    "ghost": {"strategy": "ghost"},
    "gram": {"strategy": "ghost", "norm_method": "gram"},
    "direct": {"strategy": "ghost", "norm_method": "direct"},
    "kept": {"strategy": "ghost", "norm_method": "keep"},
    "ghost in microbatches": {"strategy": "ghost", "microbatch_size": 2},
    "scan": {"strategy": "scan"},
    "vmap": {"strategy": "vmap"},
    "auto": {"strategy": "auto"},
}


PAIRS = [
    (c, s)
    for c in CHOICES
    for s in STRATEGIES
    if c == "lora" or s in ("ghost", "scan", "vmap", "auto")  # ways to norms: see test_taps
]


@pytest.mark.nightly
@pytest.mark.slow(
    "kept",
    "direct",
    "lora-auto",
    "biases-auto",
    "biases-ghost",
    "embedding-vmap",
    "embedding-ghost",
    "last layers-scan",
    "all of gemma-auto",
    "ghost in microbatches",
)
@pytest.mark.parametrize(("choice", "strategy"), PAIRS)
def test_every_strategy_bounds_the_trained_leaves_alone(choice, strategy):
    config, trainable = CHOICES[choice]
    model, params, batch = problem(config)
    norms, total = by_definition(model, params, trainable, batch, clip_norm=0.5)
    assert float(norms.min()) > 0
    bounded = clipped_grad(model.loss, clip_norm=0.5, trainable=trainable, **STRATEGIES[strategy])
    found = jax.jit(bounded)(params, batch)
    np.testing.assert_allclose(found.norms, norms, rtol=2e-5)
    assert jax.tree.structure(found.sum) == jax.tree.structure(total)
    for a, b in zip(jax.tree.leaves(found.sum), jax.tree.leaves(total), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_book_keeping_needs_no_copies_of_adapters():
    model, params, batch = problem(ADAPTED)
    bounded = clipped_grad(model.loss, clip_norm=0.5, trainable=is_adapter, strategy="ghost")
    leaves = bounded.explain(params, batch).leaves
    assert len(leaves) == 10  # five projections of the stack, two factors each
    assert {leaf.method for leaf in leaves} <= {"gram", "direct", "keep"}


def test_a_frozen_base_is_an_argument_not_a_constant():
    """What is traced holds no array of the base, and no gradient in its shape."""
    model, params, batch = problem(ADAPTED)
    trained, frozen = split(params, is_adapter)
    bounded = clipped_grad(model.loss, clip_norm=0.5, trainable=is_adapter, strategy="ghost")

    def step(trained, frozen, batch):
        return bounded(join(trained, frozen), batch).sum

    traced = jax.make_jaxpr(step)(trained, frozen, batch)
    largest = max((np.size(c) for c in traced.consts), default=0)
    assert largest <= 8 * 8  # masks and rotary angles of eight positions
    shapes = [v.aval.shape for v in traced.jaxpr.outvars]
    assert sorted(shapes) == sorted(x.shape for x in jax.tree.leaves(trained))


@pytest.mark.nightly
def test_the_base_of_adapters_may_be_of_low_precision():
    model, params, batch = problem(ADAPTED)
    trained, frozen = split(params, is_adapter)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), frozen)
    high = jax.tree.map(lambda x: x.astype(jnp.float32), low)
    bounded = jax.jit(clipped_grad(model.loss, clip_norm=0.5, trainable=is_adapter))
    a, b = bounded(join(trained, low), batch), bounded(join(trained, high), batch)
    np.testing.assert_allclose(a.norms, b.norms, rtol=1e-5)
    assert {x.dtype for x in jax.tree.leaves(a.sum)} == {jnp.dtype("float32")}


@pytest.mark.nightly
def test_fresh_adapters_change_nothing_and_merged_ones_compute_the_same():
    model, params, batch = problem(ADAPTED)
    example = jax.tree.map(lambda x: x[0], batch)
    plain = LanguageModel(BASE)
    fresh = jax.jit(model.init)(jax.random.key(0))
    adapted, alone = jax.jit(model.logits), jax.jit(plain.logits)
    tokens = example["tokens"]
    np.testing.assert_allclose(
        adapted(fresh, tokens), alone(without_adapters(fresh), tokens), rtol=1e-6
    )
    merged = merge(params, ADAPTED.lora)
    shapes = jax.eval_shape(plain.init, jax.random.key(0))
    assert jax.tree.structure(merged) == jax.tree.structure(shapes)
    found = alone(merged, tokens)
    np.testing.assert_allclose(found, adapted(params, tokens), rtol=1e-4, atol=1e-4)
    assert np.abs(alone(without_adapters(params), tokens) - found).max() > 0.1


def test_splitting():
    params = {"a": jnp.ones(2), "b": [jnp.zeros(3), jnp.arange(4)]}
    trained, frozen = split(params)
    assert [x.shape for x in jax.tree.leaves(frozen)] == [(4,)]  # integers are never trained
    trained, frozen = split(params, {"a": False, "b": True})
    assert [x.shape for x in jax.tree.leaves(trained)] == [(3,)]
    back = join(trained, frozen)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    with pytest.raises(BadInputError, match="no floating-point parameter is trainable"):
        split(params, lambda name: name == "c")
