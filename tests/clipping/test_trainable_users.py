"""A user's examples and frozen parameters at once: against per-user gradients by vmap(grad).

Units are whole users (the mean over the examples they have, as in ULS), and a part of a transformer
is trained: adapters in a stack, adapters and a norm in a loop of recomputed blocks, last blocks.
"""

import dataclasses
import fnmatch
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpfl_jax.clipping import clipped_grad, join, split
from dpfl_jax.mechanisms.participation import mean_of_examples
from dpfl_jax.models import LanguageModel, TransformerConfig
from dpfl_jax.models.config import Lora
from dpfl_jax.models.params import is_adapter

TINY = TransformerConfig(
    vocab_size=7, max_seq_len=4, num_layers=2, embed_dim=4, num_heads=1, mlp_dim=4, remat="none"
)
ADAPTERS = Lora(rank=2, alpha=4.0, targets=("*/attention/query", "*/mlp/down"))


def some_of_a_loop(name):
    """One factor of each adapter, a norm, and the tied embedding, used at both ends."""
    return fnmatch.fnmatchcase(name, "*lora_b") or name in ("embedding", "final_norm/scale")


def last(name):
    return name.startswith(("last_blocks/", "final_norm/"))


CHOICES = {
    "lora": ({"lora": ADAPTERS}, is_adapter),
    "loop_mix": (
        {"num_layers": 1, "lora": ADAPTERS, "scan_layers": False, "remat": "full"},
        some_of_a_loop,
    ),
    "last": ({"last_layers": 1, "remat": "light"}, last),
}


@functools.cache
def by_definition(choice):
    """Loss, parameters, users, and what vmap(grad) says of them: norms, bound and clipped sum."""
    fields, trainable = CHOICES[choice]
    model = LanguageModel(dataclasses.replace(TINY, **fields))
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.asarray(0.5 * rng.normal(size=x.shape), "f4"), shapes)
    users = {
        "examples": {
            "tokens": jnp.asarray(rng.integers(0, 7, (3, 2, 4)), jnp.int32),
            "mask": jnp.asarray([[[1, 1, 1, 1], [1, 1, 0, 0]]] * 3, bool),
        },
        "mask": jnp.asarray([[1, 1], [1, 0], [0, 1]], bool),
    }
    loss = mean_of_examples(model.loss)
    trained, frozen = split(params, trainable)

    def of_trained(trained, user):
        return loss(join(trained, frozen), user)

    each = jax.jit(jax.vmap(jax.grad(of_trained), (None, 0)))(trained, users)
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(each)]
    norms = np.sqrt(sum((x.reshape(3, -1) ** 2).sum(1) for x in leaves))
    clip_norm = float(np.sort(norms)[:2].mean())
    weights = np.minimum(1.0, clip_norm / norms)
    assert (weights < 1).sum() == 2
    total = [np.einsum("n...,n->...", x, weights) for x in leaves]
    return loss, params, users, norms, clip_norm, total, jax.tree.structure(trained)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("strategy", ["ghost", "scan"])
def test_users_are_bounded_by_their_trained_leaves(choice, strategy):
    loss, params, users, norms, clip_norm, total, structure = by_definition(choice)
    bounded = clipped_grad(
        loss, clip_norm=clip_norm, strategy=strategy, trainable=CHOICES[choice][1]
    )
    found = jax.jit(bounded)(params, users)
    np.testing.assert_allclose(found.norms, norms, rtol=2e-5)
    assert jax.tree.structure(found.sum) == structure
    for a, b in zip(jax.tree.leaves(found.sum), total, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * clip_norm)
