"""LocalItemDP: DP-SGD inside each silo, protecting single records.

Source: Marathe et al., "Subject Granular Differential Privacy in Federated Learning", section 5
(the item-level baseline); "Subject Level Differential Privacy with Hierarchical Gradient
Averaging", Algorithm 1's baseline.

    S   = each record of the silo independently with probability q
    g~  = (sum over S of clip(grad, C) + N(0, sigma^2 C^2)) / B
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from dpfl_jax.accounting.cells import Contribution
from dpfl_jax.federation.mechanisms.base import SiloMechanism


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalItemDP(SiloMechanism):
    """Record-level DP-SGD in a silo; a record is in one silo, so silos do not compose."""

    kind: ClassVar[str] = "local_item"
    unit: ClassVar[str] = "record"

    def contribution(self, unit: str) -> Contribution | None:
        """A subject has K records, each of which moves the sum by up to C."""
        # proof: local-item-event-1
        return None if unit == "record" else Contribution(units=self.max_items_per_subject)
