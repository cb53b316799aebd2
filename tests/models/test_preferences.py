"""The DPO loss: its formula, its reference, and sums of clipped gradients of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpfl_jax.clipping import clipped_grad
from dpfl_jax.models import (
    LanguageModel,
    PreferenceModel,
    TransformerConfig,
    not_reference,
    with_reference,
)
from dpfl_jax.models.params import is_adapter

LORA = {"rank": 4, "alpha": 8.0, "targets": ("*/attention/*",)}
LENGTH, VOCAB, BETA = 6, 20, 0.3


def config(lora=None):
    return TransformerConfig(
        vocab_size=VOCAB, max_seq_len=LENGTH, embed_dim=8, num_layers=1, num_heads=2, bos_id=1,
        scan_layers=False, remat="none", lora=lora,
    )  # fmt: skip


def moved(params, trained):
    """Training has gone on: what is trained is elsewhere, the reference where it was."""
    rng = np.random.default_rng(1)

    def one(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return x + 0.3 * rng.normal(size=x.shape).astype(np.float32) * trained(name)

    return jax.tree_util.tree_map_with_path(one, params)


def setting(lora):
    model = PreferenceModel(config(lora), BETA)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    zero = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)
    first = moved(zero, lambda name: not name.endswith("lora_b"))
    trained = is_adapter if lora else not_reference
    params = with_reference(first, is_adapter if lora else None)
    rng = np.random.default_rng(0)
    pairs = {
        "tokens": rng.integers(3, VOCAB, (5, 2, LENGTH)).astype(np.int32),
        "mask": rng.random((5, 2, LENGTH)) < 0.6,
    }
    return model, first, moved(params, trained), trained, pairs


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_loss_is_the_formula_of_rafailov_et_al(lora):
    model, first, params, _, pairs = setting(lora)
    assert ("reference" in params) is (lora is None)  # of adapters the base is the reference

    def log_likelihood(model, params, tokens, mask):  # eq. 7 of the paper, by hand
        logits = np.asarray(model(params, tokens), np.float64)
        chances = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return chances[np.arange(LENGTH), tokens][mask].sum()

    own = {k: v for k, v in params.items() if k != "reference"}
    plain = jax.jit(LanguageModel(config(lora)).logits)
    losses = jax.jit(jax.vmap(model.loss, (None, 0)))
    expected = []
    for tokens, mask in zip(pairs["tokens"], pairs["mask"]):
        new, old = (
            [log_likelihood(plain, p, tokens[i], mask[i]) for i in (0, 1)] for p in (own, first)
        )
        margin = (new[0] - old[0]) - (new[1] - old[1])
        expected.append(np.log1p(np.exp(-BETA * margin)))
    got = losses(params, pairs)
    np.testing.assert_allclose(got, expected, rtol=2e-5)
    np.testing.assert_array_equal(model.right(got), np.array(expected) < np.log(2))
    start = losses(with_reference(first, is_adapter if lora else None), pairs)
    np.testing.assert_allclose(start, np.log(2), rtol=1e-6)
    same = jax.tree.map(lambda x: x[:, [0, 0]], pairs)  # chosen equals rejected
    np.testing.assert_array_equal(model.right(losses(params, same)), 0.5)


@pytest.mark.slow
@pytest.mark.nightly("ghost-None", "vmap-lora1")
@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("strategy", ["ghost", "vmap"])
def test_clipped_sums_are_those_of_plain_gradients(lora, strategy):
    model, _, params, trained, pairs = setting(lora)
    clip = 0.5
    f = clipped_grad(model.loss, clip_norm=clip, strategy=strategy, trainable=trained)
    got = jax.jit(f)(params, pairs)
    plain = jax.jit(jax.vmap(jax.grad(model.loss), (None, 0)))(params, pairs)
    flat = {
        jax.tree_util.keystr(p, simple=True, separator="/"): g
        for p, g in jax.tree_util.tree_flatten_with_path(plain)[0]
    }
    own = {name: g for name, g in flat.items() if trained(name)}
    for name, gradient in flat.items():  # a constant, also for who trains all there is
        if name.startswith("reference/"):
            assert not jnp.any(gradient)
    norms = jnp.sqrt(sum((g.reshape(5, -1) ** 2).sum(axis=1) for g in own.values()))
    np.testing.assert_allclose(got.norms, norms, rtol=1e-5)
    assert (norms > clip).any()
    weights = jnp.minimum(1.0, clip / norms)
    leaves = jax.tree_util.tree_flatten_with_path(got.sum)[0]
    assert len(leaves) == len(own)  # nothing of the reference is summed, and so none is noised
    for path, total in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        want = jnp.tensordot(weights, own[name], axes=1)
        np.testing.assert_allclose(total, want, rtol=1e-4, atol=1e-6)
