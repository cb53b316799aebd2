"""What the units of a step were like, in sums. Computed without noise."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepStats:
    """Sums over the units of one step. Computed from private data without noise.

    Attributes (float32 scalars):
      units: units drawn.
      loss: sum of unit losses over finite ones.
      clipped: units whose gradient norm was above what it was clipped to.
      norm: sum of unit gradient norms.
      nonfinite: units whose gradient had a NaN or infinity and was replaced by zero.
    """

    units: jax.Array
    loss: jax.Array
    clipped: jax.Array
    norm: jax.Array
    nonfinite: jax.Array

    @classmethod
    def zero(cls, *shape: int) -> StepStats:
        """Of no units; ``shape`` of each sum."""
        return cls(*[jnp.zeros(shape, jnp.float32)] * 5)

    def row(self, private: bool) -> dict[str, Any]:
        """What a row of metrics holds of them."""
        units, finite = float(self.units), float(self.units - self.nonfinite)
        return {
            "units": int(units),
            "train_loss": float(self.loss) / finite if finite else None,
            "fraction_clipped": float(self.clipped) / finite if finite and private else None,
            "mean_norm": float(self.norm) / finite if finite and private else None,
            "nonfinite_units": int(self.nonfinite),
        }
