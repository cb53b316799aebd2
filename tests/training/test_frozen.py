"""A frozen base: an argument of the step, split over devices, no part of sums, noise and state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from neighbours import removed

from dpfl_jax.clipping import Flat, join, split
from dpfl_jax.mechanisms import els, non_private
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches
from dpfl_jax.mesh import make_mesh, parameter_shardings
from dpfl_jax.models import LanguageModel, TransformerConfig
from dpfl_jax.models.config import Lora
from dpfl_jax.models.params import is_adapter
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.state import init_state
from dpfl_jax.training.central import make_train_step
from tests.noised import noised

LENGTH, VOCAB, CLIP = 8, 32, 0.1
MODEL = LanguageModel(
    TransformerConfig(
        num_layers=2,
        embed_dim=16,
        num_heads=4,
        vocab_size=VOCAB,
        max_seq_len=LENGTH,
        remat="none",
        lora=Lora(rank=2, targets=("*/attention/*", "*/mlp/down")),
    )
)
LAYOUTS = {"data": {}, "mixed": {"data": 2, "fsdp": 2, "tensor": 2}, "fsdp": {"fsdp": 8}}
MECHANISM = els(group_size=2, batch_size=20, clip_norm=CLIP)

KEYS = RootKey.from_seed(0).words("noise", 0)


def buffers():
    """Two rows in use of three, the second half full."""
    tokens = jax.random.randint(jax.random.key(1), (3, 16, LENGTH), 0, VOCAB)
    mask = jnp.arange(48).reshape(3, 16) < 24
    return {"tokens": tokens, "mask": jnp.ones(tokens.shape, bool)}, mask, np.int32(2)


def parts(mesh):
    """Trained and frozen parameters, placed; the base in bfloat16; adapters that do something."""
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) * 0.2, shapes)
    trained, frozen = split(params, is_adapter)
    frozen = jax.tree.map(lambda x: x.astype(jnp.bfloat16), frozen)
    return (jax.device_put(part, parameter_shardings(part, mesh)) for part in (trained, frozen))


def norm(a, b):
    return np.sqrt(
        sum(
            np.sum(np.square(np.asarray(x) - np.asarray(y)))
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        )
    )


def by_definition(trained, frozen, units, mask):
    """Clipped per-example gradients of the adapters, by plain vmap(grad)."""

    def loss(adapters, example):
        return MODEL.loss(join(adapters, frozen), example)

    flat = jax.tree.map(lambda x: x.reshape(48, *x.shape[2:])[:24], units)
    each = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(trained, flat)
    squared = sum(jnp.sum(g.reshape(24, -1) ** 2, -1) for g in jax.tree.leaves(each))
    weights = jnp.minimum(1.0, CLIP / jnp.sqrt(squared))
    return jax.tree.map(lambda g: jnp.einsum("n...,n->...", g, weights), each)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data", "mixed", "fsdp"])
def test_the_sum_is_that_of_the_trained_leaves_on_every_layout(name):
    mesh = make_mesh(**LAYOUTS[name])
    trained, frozen = parts(mesh)
    units, mask, used = buffers()
    total = jax.jit(
        clipped_sum_over_microbatches(MECHANISM, MODEL.loss, mesh, trainable=is_adapter)
    )
    got, stats = total(trained, units, mask, used, frozen)
    want = by_definition(*parts(make_mesh(devices=jax.devices()[:1])), units, mask)
    assert norm(got, want) <= 1e-4 * CLIP * 24
    assert float(stats.units) == 24
    assert float(stats.clipped) == 24
    for unit in ((0, 0), (0, 15), (1, 7)):
        less, _ = total(trained, *removed(units, mask, unit), used, frozen)
        assert CLIP * (1 - 1e-2) <= norm(got, less) <= CLIP * (1 + 1e-4)


@pytest.mark.nightly
def test_a_step_changes_adapters_alone_and_keeps_nothing_of_the_base():
    mesh = make_mesh(**LAYOUTS["mixed"])
    trained, frozen = parts(mesh)
    optimizer = optax.adam(1e-2)
    state = init_state(trained, optimizer, mesh)
    step = make_train_step(
        noised(MECHANISM, 0.7), MODEL.loss, optimizer, mesh, trainable=is_adapter
    )
    new, _ = step(state, *buffers(), KEYS, frozen)
    assert jax.tree.structure(new.params) == jax.tree.structure(trained)
    # Noise on every adapter: nothing is left as it was.
    for a, b in zip(jax.tree.leaves(new.params), jax.tree.leaves(trained), strict=True):
        assert np.all(np.asarray(a) != np.asarray(b))
    held = sum(x.size for x in jax.tree.leaves(new.opt_state) if x.ndim)
    assert held == 2 * sum(x.size for x in jax.tree.leaves(trained))
    for x in jax.tree.leaves(frozen):  # not donated: the next step needs them
        assert not x.is_deleted()
    assert frozen["blocks"]["mlp"]["up"]["kernel"].sharding.spec == PartitionSpec(
        None, "fsdp", "tensor"
    )


@pytest.mark.nightly
def test_without_privacy_the_same_leaves_are_trained():
    mesh = make_mesh()
    trained, frozen = parts(mesh)
    optimizer = optax.sgd(1.0)
    state = init_state(trained, optimizer, mesh)
    plain = non_private(batch_size=24)
    step = make_train_step(noised(plain, 0.0), MODEL.loss, optimizer, mesh, trainable=is_adapter)
    units, mask, used = buffers()
    new, _ = step(state, units, mask, used, KEYS, frozen)
    unclipped = dataclasses.replace(MECHANISM, clip=Flat(1e9))
    other = make_train_step(
        noised(unclipped, 0.0), MODEL.loss, optimizer, mesh, trainable=is_adapter
    )
    again, _ = other(init_state(trained, optimizer, mesh), units, mask, used, KEYS, frozen)
    moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), new.params, trained)
    want = jax.tree.map(
        lambda a, b: (np.asarray(a) - np.asarray(b)) * 20 / 24, again.params, trained
    )
    for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
        assert np.abs(a).max() > 1e-3
