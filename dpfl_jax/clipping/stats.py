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
      loss: sum of unit losses.
      clipped: units whose gradient norm was above what it was clipped to.
      norm: sum of unit gradient norms.
      nonfinite: units whose loss, or gradient, had a NaN or infinity; such a gradient was replaced
        by zero. They are in no other sum but ``units``.
      clip_norm: of this step, where it adapts; it follows from releases, and is public.
    """

    units: jax.Array
    loss: jax.Array
    clipped: jax.Array
    norm: jax.Array
    nonfinite: jax.Array
    clip_norm: jax.Array | None = None

    @classmethod
    def of(cls, bounded: Any, mask: jax.Array, bound: Any) -> StepStats:
        """Of what a clipped sum says of the units at ``mask``; ``bound`` is what it clipped to."""
        real = mask.astype(bool)
        finite = real & ~bounded.nonfinite & jnp.isfinite(bounded.losses)

        def total(x: Any) -> jax.Array:
            return jnp.where(finite, x, 0).astype(jnp.float32).sum()

        return cls(
            units=real.astype(jnp.float32).sum(),
            loss=total(bounded.losses),
            clipped=total(bounded.norms > bound),
            norm=total(bounded.norms),
            nonfinite=(real & ~finite).astype(jnp.float32).sum(),
        )

    @classmethod
    def zero(cls, *shape: int) -> StepStats:
        """Of no units; ``shape`` of each sum."""
        return cls(*[jnp.zeros(shape, jnp.float32)] * 5)

    def row(self, private: bool) -> dict[str, Any]:
        """What a row of metrics holds of them."""
        units, finite = float(self.units), float(self.units - self.nonfinite)
        adapting = {} if self.clip_norm is None else {"clip_norm": float(self.clip_norm)}
        return {
            "units": int(units),
            "train_loss": float(self.loss) / finite if finite else None,
            "fraction_clipped": float(self.clipped) / finite if finite and private else None,
            "mean_norm": float(self.norm) / finite if finite and private else None,
            "nonfinite_units": int(self.nonfinite),
            **adapting,
        }
