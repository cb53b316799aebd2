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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpfl_jax.clipping import Trainable, join, split
from dpfl_jax.data.pipeline import local_columns, ship_columns
from dpfl_jax.data.store import Readable
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.unit_losses import mean_of_examples
from dpfl_jax.mesh import make_mesh, replicated, unit_axes, unit_parts

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


def check_users(store: Readable) -> None:
    """Checks, before a run begins, that there will be somebody to score at its end.

    Raises:
      BadInputError: fewer than two users with two examples.
    """
    if np.count_nonzero(np.diff(np.asarray(store.user_offsets)) >= 2) < 2:
        raise BadInputError(
            "personalisation needs at least two held-out users with two examples each: hold out "
            "more users, or set eval.personalize to false"
        )


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
    mesh: Mesh | None = None,
) -> Personalization:
    """Tunes one copy of the model for each user.

    The learning rate is the one that is best for half of the users; the others are scored. Nothing
    but the mean losses leaves this function: a user's copy lives on the devices until the next
    users' take its place. Of several processes all must call it, and all get the same.

    Args:
      loss_fn: ``(params, example) -> scalar``.
      params: the model.
      store: held-out users; those with fewer than two examples are left out.
      learning_rates: of SGD, tried.
      epochs: local epochs (the paper: 4).
      batch_size: of a local step (the paper does not say).
      most_examples: of a user, the first ones.
      users_at_once: copies of the trained parameters in the memory of all devices together,
        rounded up to a multiple of the devices.
      trainable: which parameters a user tunes, as in ``fit``.
      mesh: users are split over its unit axes; default that of the parameters.

    Raises:
      BadInputError: fewer than two users with two examples.
    """
    check_users(store)
    mesh = _mesh_of(params) if mesh is None else mesh
    parts = unit_parts(mesh)
    users_at_once = -(-users_at_once // parts) * parts
    sharding = NamedSharding(mesh, PartitionSpec(unit_axes(mesh)))
    mine = local_columns(sharding, users_at_once, axis=0)
    offsets = np.asarray(store.user_offsets)
    counts = np.minimum(np.diff(offsets), most_examples)
    chosen = np.flatnonzero(counts >= 2)
    half = most_examples // 2
    half += -half % batch_size
    # Whole on every device: each process then has all losses.
    whole = None if sharding.is_fully_addressable else replicated(mesh)
    scores = _scorer(mean_of_examples(loss_fn), epochs, batch_size, half, whole)
    trained, frozen = split(params, trainable)

    def losses(users: np.ndarray, rate: float) -> tuple[np.ndarray, np.ndarray]:
        found = []
        for start in range(0, len(users), users_at_once):
            part = users[start : start + users_at_once]
            padded = np.concatenate([part, np.repeat(part[-1:], users_at_once - len(part))])
            own = _halves(store, offsets, counts, padded[mine], half)
            own = ship_columns(own, mine, users_at_once, 0, sharding)
            out = scores(trained, frozen, *own, np.float32(rate))
            found.append([np.asarray(x)[: len(part)] for x in out])
        before, after = zip(*found)
        return np.concatenate(before), np.concatenate(after)

    tuning, scored = chosen[::2], chosen[1::2]

    def loss_of(rate: float) -> float:
        found = float(losses(tuning, rate)[1].mean())
        return found if np.isfinite(found) else np.inf  # NaN is below and above nothing

    best = min(learning_rates, key=loss_of)
    before, after = losses(scored, best)
    return Personalization(float(before.mean()), float(after.mean()), best, len(scored))


def _mesh_of(params: PyTree) -> Mesh:
    for leaf in jax.tree.leaves(params):
        place = getattr(leaf, "sharding", None)
        if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh):
            return place.mesh
    return make_mesh(devices=jax.devices()[:1])


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


def _scorer(user_loss: Any, epochs: int, batch_size: int, half: int, whole: Any) -> Any:
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

    return jax.jit(jax.vmap(one, in_axes=(None, None, 0, 0, None)), out_shardings=whole)
