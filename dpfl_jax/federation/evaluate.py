"""Held-out loss and accuracy, by record and by subject."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpfl_jax.data.store import Store
from dpfl_jax.run.mesh import DATA_AXIS
from dpfl_jax.training.evaluate import summarize

PyTree = Any


@dataclasses.dataclass(frozen=True)
class FederatedEvaluation:
    """Means over held-out records.

    Attributes:
      loss: mean over records.
      loss_by_user: mean over subjects of the mean over each one's records.
      examples: records.
      users: subjects.
      accuracy: share of records whose label is predicted; None if the task has no labels.
    """

    loss: float
    loss_by_user: float
    examples: int
    users: int
    accuracy: float | None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types."""
        return dataclasses.asdict(self)


class FederatedEvaluator:
    """Evaluates one model on one store, compiled once."""

    def __init__(self, model: Any, mesh: Mesh, batch_size: int = 256) -> None:
        """Prepares; ``model`` has ``loss`` and, for labels, ``predict``."""
        self._batch = batch_size * mesh.shape[DATA_AXIS]
        self._sharding = NamedSharding(mesh, PartitionSpec(DATA_AXIS))
        predict: Callable[..., jax.Array] | None = getattr(model, "predict", None)

        def one(params: PyTree, example: Any) -> tuple[jax.Array, jax.Array]:
            hit = jnp.float32(jnp.nan)
            if predict is not None and "label" in example:
                hit = (predict(params, example["x"]) == example["label"]).astype(jnp.float32)
            return model.loss(params, example), hit

        self._measure = jax.jit(jax.vmap(one, in_axes=(None, 0)))

    def __call__(self, params: PyTree, store: Store) -> FederatedEvaluation:
        """Returns the means on ``store``."""
        first, stop = int(store.user_offsets[0]), int(store.user_offsets[-1])
        losses, hits = [], []
        for start in range(first, stop, self._batch):
            # The last batch repeats its last record instead of compiling for another shape.
            positions = np.minimum(np.arange(start, start + self._batch), stop - 1)
            batch = jax.device_put(store.read(positions), self._sharding)
            loss, hit = self._measure(params, batch)
            losses.append(np.asarray(loss))
            hits.append(np.asarray(hit))
        count = stop - first
        found = summarize(np.concatenate(losses)[:count].astype(np.float64), store.user_offsets)
        accuracy = float(np.concatenate(hits)[:count].mean())
        return FederatedEvaluation(
            **dataclasses.asdict(found), accuracy=None if np.isnan(accuracy) else accuracy
        )
