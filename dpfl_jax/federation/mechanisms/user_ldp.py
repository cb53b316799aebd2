"""UserLDP: the gradient of the whole batch is clipped once, and hidden entirely.

Source: Marathe et al., "Subject Granular Differential Privacy in Federated Learning", Algorithm 3;
"Subject Level Differential Privacy with Hierarchical Gradient Averaging", Algorithm 2.

    S   = each record of the silo independently with probability q
    g~  = clip(mean over S of grad, C) + N(0, sigma^2 C^2)           # not divided by B

Departure. The papers take C for the sensitivity; two clipped means can point in opposite
directions, so it is 2C. No amplification by sampling is claimed, as in the papers.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from dpfl_jax.accounting.cells import Contribution, Everyone
from dpfl_jax.federation.data import Silo
from dpfl_jax.federation.mechanisms.base import (
    LossFn,
    SiloDraw,
    SiloFacts,
    SiloMechanism,
    mean_of_examples,
)
from dpfl_jax.randomness import RootKey


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserLDP(SiloMechanism):
    """One clipped mean gradient per step."""

    kind: ClassVar[str] = "user_ldp"

    def divisor(self, facts: SiloFacts) -> float:
        """1: what is noised is the mean already."""
        del facts
        # proof: user-ldp-divisor-1
        return 1.0

    def assemble(self, silo: Silo, chosen: np.ndarray, key: RootKey, step: int) -> SiloDraw:
        """All records are one unit."""
        del key, step
        # proof: user-ldp-sensitivity-1
        return SiloDraw((silo.first + chosen)[None, :], np.ones(1, np.float32))

    def unit_size(self, facts: SiloFacts) -> int | None:
        """The largest batch."""
        return max(1, super().usual_size(facts))

    def usual_size(self, facts: SiloFacts, tail: float = 1e-15) -> int:
        """One unit."""
        del facts, tail
        return 1

    def unit_loss(self, loss_fn: LossFn) -> LossFn:
        """The mean over the records of the batch."""
        return mean_of_examples(loss_fn)

    def scheme(self, facts: SiloFacts) -> Everyone:
        """The unit is there at every step, whichever records are drawn for it."""
        del facts
        return Everyone()

    def contribution(self, unit: str) -> Contribution:
        """A subject turns the unit into another: as if one went and one came, 2C."""
        del unit
        return Contribution(units=2)
