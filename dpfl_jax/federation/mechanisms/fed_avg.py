"""FedAvg: plain local SGD, no clipping, no noise. The baseline (McMahan et al. 2017)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import dp_accounting
import jax

from dpfl_jax.clipping import ClippedGradResult
from dpfl_jax.federation.mechanisms.base import LossFn, PyTree, SiloFacts, SiloMechanism, SumFn
from dpfl_jax.mechanisms.unclipped import unclipped_sum


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvg(SiloMechanism):
    """Sums plain gradients; guarantees nothing."""

    noise_multiplier: float | None = 0.0

    kind: ClassVar[str] = "fed_avg"
    unit: ClassVar[str] = "none"
    private: ClassVar[bool] = False

    def clipped_grad(self, loss_fn: LossFn, **options: Any) -> SumFn:
        """The plain gradient of the sum of losses."""
        del options
        plain = unclipped_sum(loss_fn)

        def summed(
            params: PyTree, units: PyTree, mask: jax.Array, weight: jax.Array, clip_norm: jax.Array
        ) -> ClippedGradResult:
            del weight, clip_norm
            return plain(params, units, mask)

        return summed

    def contribution(self, unit: str) -> None:
        """Nothing is accounted."""

    def event(self, facts: SiloFacts, steps: int) -> Any:
        """Not private."""
        del facts, steps
        return dp_accounting.NonPrivateDpEvent()
