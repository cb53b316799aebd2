"""LocalItemDP: DP-SGD inside each silo, protecting single records.

Source: Marathe et al., "Subject Granular Differential Privacy in Federated Learning", section 5
(the item-level baseline); "Subject Level Differential Privacy with Hierarchical Gradient
Averaging", Algorithm 1's baseline.

    S   = each record of the silo independently with probability q
    g~  = (sum over S of clip(grad, C) + N(0, sigma^2 C^2)) / B
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from dpfl_jax.accounting import events
from dpfl_jax.federation.mechanisms.base import SiloFacts, SiloMechanism


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalItemDP(SiloMechanism):
    """Record-level DP-SGD in a silo; a record is in one silo, so silos do not compose."""

    kind: ClassVar[str] = "local_item"
    unit: ClassVar[str] = "record"

    def event(self, facts: SiloFacts, steps: int) -> Any:
        """Poisson-subsampled Gaussian over records."""
        # proof: local-item-event-1
        return events.poisson(self.sigma, self.probability(facts), steps)

    def subject_event(self, facts: SiloFacts, steps: int) -> Any:
        """A subject of K records moves the sum by up to K C: a mixture of Gaussians."""
        return events.local_group_dp(
            self.sigma, self.probability(facts), self.max_items_per_subject, steps
        )
