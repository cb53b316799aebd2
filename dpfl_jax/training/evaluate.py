"""Held-out loss, by example and by user."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpfl_jax.data.placement import local_columns, ship_columns
from dpfl_jax.data.store import Readable
from dpfl_jax.run.mesh import replicated, unit_axes, unit_parts

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Mean losses over held-out users.

    Attributes:
      loss: mean over examples.
      loss_by_user: mean over users of the mean over each user's examples.
      examples: examples evaluated.
      users: users evaluated.
    """

    loss: float
    loss_by_user: float
    examples: int
    users: int

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types."""
        return dataclasses.asdict(self)


def summarize(losses: np.ndarray, user_offsets: np.ndarray) -> Evaluation:
    """Averages per-example losses [n] of the users given by ``user_offsets`` (cut off at n)."""
    offsets = np.minimum(user_offsets - user_offsets[0], len(losses))
    counts = np.diff(offsets)
    present = counts > 0
    user = np.repeat(np.arange(len(counts)), counts)
    sums = np.bincount(user, weights=losses, minlength=len(counts))
    return Evaluation(
        loss=float(losses.mean()),
        loss_by_user=float((sums[present] / counts[present]).mean()),
        examples=len(losses),
        users=int(present.sum()),
    )


class Evaluator:
    """Evaluates one model on one store, compiled once."""

    def __init__(
        self,
        loss_fn: Callable[..., jax.Array],
        mesh: Mesh,
        batch_size: int = 64,
    ) -> None:
        """Prepares the evaluation.

        Args:
          loss_fn: ``(params, example) -> scalar`` for one example.
          mesh: examples are split over its unit axes.
          batch_size: examples per device and batch.
        """
        self._batch = batch_size * unit_parts(mesh)
        self._sharding = NamedSharding(mesh, PartitionSpec(unit_axes(mesh)))
        # Whole on every device: each process then has all losses.
        whole = None if self._sharding.is_fully_addressable else replicated(mesh)
        self._losses = jax.jit(jax.vmap(loss_fn, in_axes=(None, 0)), out_shardings=whole)

    def losses(self, params: PyTree, store: Readable) -> np.ndarray:
        """Returns the loss of each example, float32 [n], in store order."""
        first, stop = int(store.user_offsets[0]), int(store.user_offsets[-1])
        mine = local_columns(self._sharding, self._batch, axis=0)
        parts = []
        for start in range(first, stop, self._batch):
            # The last batch repeats its last example instead of compiling for another shape.
            positions = np.minimum(np.arange(start, start + self._batch), stop - 1)
            examples = ship_columns(
                store.read(positions[mine]), mine, self._batch, 0, self._sharding
            )
            parts.append(self._losses(params, examples))
        return np.concatenate([np.asarray(p) for p in parts]).astype(np.float32)[: stop - first]

    def __call__(self, params: PyTree, store: Readable) -> Evaluation:
        """Returns the mean losses on ``store``."""
        return summarize(self.losses(params, store).astype(np.float64), store.user_offsets)
