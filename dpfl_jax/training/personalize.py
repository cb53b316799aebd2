"""How well a model does once each held-out user has tuned it on their own text.

Charles et al. 2024, Appendix G.2: for each test user a few local epochs of SGD on half of their
examples, then the loss on the other half. Evaluation only: what a user's own copy of the model has
seen of that user has no guarantee against that user's copy being looked at, and needs none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from dpfl_jax.clipping import Trainable, join, split
from dpfl_jax.data.store import Readable
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.base import mean_of_examples

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Personalization:
    """Mean losses over users, on the half of their examples that nothing was tuned on.

    Attributes:
      before: of the model as it is.
      after: of each user's own copy.
      learning_rate: of the local epochs.
      users: that were scored.
    """

    before: float
    after: float
    learning_rate: float
    users: int


def personalize(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    store: Readable,
    learning_rates: Sequence[float] = (0.003, 0.01, 0.03, 0.1, 0.3),
    *,
    epochs: int = 4,
    batch_size: int = 4,
    most_examples: int = 32,
    users_at_once: int = 16,
    trainable: Trainable = None,
) -> Personalization:
    """Tunes one copy of the model for each user.

    The learning rate is the one that is best for half of the users; the others are scored.

    Args:
      loss_fn: ``(params, example) -> scalar``.
      params: the model.
      store: held-out users; those with fewer than two examples are left out.
      learning_rates: of SGD, tried.
      epochs: local epochs (the paper: 4).
      batch_size: of a local step (the paper does not say).
      most_examples: of a user, the first ones.
      users_at_once: copies of the trained parameters in memory.
      trainable: which parameters a user tunes, as in ``fit``.

    Raises:
      BadInputError: fewer than two users with two examples.
    """
    offsets = np.asarray(store.user_offsets)
    counts = np.minimum(np.diff(offsets), most_examples)
    chosen = np.flatnonzero(counts >= 2)
    if len(chosen) < 2:
        raise BadInputError(
            "personalisation needs at least two held-out users with two examples each"
        )
    half = most_examples // 2
    half += -half % batch_size
    scores = _scorer(mean_of_examples(loss_fn), epochs, batch_size, half)
    parts = split(params, trainable)

    def losses(users: np.ndarray, rate: float) -> tuple[np.ndarray, np.ndarray]:
        found = []
        for start in range(0, len(users), users_at_once):
            part = users[start : start + users_at_once]
            padded = np.concatenate([part, np.repeat(part[-1:], users_at_once - len(part))])
            own = _halves(store, offsets, counts, padded, half)
            found.append([np.asarray(x)[: len(part)] for x in scores(*parts, *own, rate)])
        before, after = zip(*found)
        return np.concatenate(before), np.concatenate(after)

    tuning, scored = chosen[::2], chosen[1::2]
    best = min(learning_rates, key=lambda rate: float(losses(tuning, rate)[1].mean()))
    before, after = losses(scored, best)
    return Personalization(float(before.mean()), float(after.mean()), best, len(scored))


def _halves(
    store: Readable, offsets: np.ndarray, counts: np.ndarray, users: np.ndarray, half: int
) -> tuple[PyTree, PyTree]:
    """Every other example of each user to tune on, the rest to score; padded to ``half``."""
    out = []
    for first in (0, 1):
        positions = [np.arange(offsets[u] + first, offsets[u] + counts[u], 2) for u in users]
        mask = np.zeros((len(users), half), bool)
        for row, found in enumerate(positions):
            mask[row, : len(found)] = True
        examples = store.read(np.concatenate(positions))

        def scatter(leaf: np.ndarray, mask: np.ndarray = mask) -> np.ndarray:
            full = np.zeros((*mask.shape, *leaf.shape[1:]), leaf.dtype)
            full[mask] = leaf
            return full

        out.append({"examples": jax.tree.map(scatter, examples), "mask": mask})
    return out[0], out[1]


def _scorer(user_loss: Any, epochs: int, batch_size: int, half: int) -> Any:
    def one(
        params: PyTree, frozen: PyTree, tune: PyTree, score: PyTree, rate: Any
    ) -> tuple[jax.Array, jax.Array]:
        def loss(params: PyTree, user: PyTree) -> jax.Array:
            return user_loss(join(params, frozen), user)

        batches = jax.tree.map(
            lambda x: x.reshape(half // batch_size, batch_size, *x.shape[1:]), tune
        )

        def step(p: PyTree, batch: PyTree) -> tuple[PyTree, None]:
            # A batch of padding has loss zero and gradient zero.
            gradient = jax.grad(loss)(p, batch)
            return optax.apply_updates(p, jax.tree.map(lambda g: -rate * g, gradient)), None

        tuned = params
        for _ in range(epochs):
            tuned, _ = jax.lax.scan(step, tuned, batches)
        return loss(params, score), loss(tuned, score)

    return jax.jit(jax.vmap(one, in_axes=(None, None, 0, 0, None)))
