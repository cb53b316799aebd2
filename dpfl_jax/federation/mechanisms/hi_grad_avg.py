"""HiGradAvgDP: each subject contributes the average of its clipped gradients.

Source: Marathe et al., "Subject Granular Differential Privacy in Federated Learning", Algorithm 2;
"Subject Level Differential Privacy with Hierarchical Gradient Averaging", Algorithm 1.

    S   = each record of the silo independently with probability q
    g_a = mean over subject a's records in S of clip(grad, C)        # norm <= C
    g~  = (sum over subjects of g_a + N(0, sigma^2 C^2)) / B

Departures. Sampling is Poisson: with batches of a fixed size a subject's records displace others'
and the sensitivity is not C. The divisor is the constant B: the number of distinct subjects (the
first paper's choice) can be read off the size of the noise. A subject is in a batch with
probability 1 - (1-q)^K; the second paper accounts for q.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import numpy as np

from dpfl_jax.accounting.cells import Contribution
from dpfl_jax.federation.data import Silo
from dpfl_jax.federation.mechanisms.base import (
    LossFn,
    SiloDraw,
    SiloFacts,
    SiloMechanism,
    grouped_positions,
    mean_of_examples,
    runs_of,
)
from dpfl_jax.randomness import RootKey


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiGradAvgDP(SiloMechanism):
    """Hierarchical gradient averaging.

    Attributes:
      order: ``"clip_then_average"`` (the papers) or ``"average_then_clip"`` (the gradient of the
        mean loss of the subject's records in the batch, clipped once: same sensitivity).
    """

    order: Literal["clip_then_average", "average_then_clip"] = "clip_then_average"

    kind: ClassVar[str] = "hi_grad_avg"

    @property
    def layout(self) -> tuple[Any, ...]:
        """Kind and order."""
        return (*super().layout, self.order)

    def assemble(self, silo: Silo, chosen: np.ndarray, key: RootKey, step: int) -> SiloDraw:
        """Counts each subject's records over the whole batch, before anything is split."""
        del key, step
        subjects = silo.subject_of_record[chosen]
        _, lengths = runs_of(subjects)
        if self.order == "average_then_clip":
            # proof: hi-grad-avg-sensitivity-2
            positions = grouped_positions(silo.first, chosen, subjects, self.max_items_per_subject)
            weight = np.ones(len(positions), np.float32)
        else:
            positions = silo.first + chosen
            # proof: hi-grad-avg-sensitivity-1
            weight = np.repeat(1.0 / lengths, lengths).astype(np.float32)
        return SiloDraw(positions, weight)

    def unit_size(self, facts: SiloFacts) -> int | None:
        """K if subjects are the units."""
        del facts
        return self.max_items_per_subject if self.order == "average_then_clip" else None

    def unit_loss(self, loss_fn: LossFn) -> LossFn:
        """One record's loss, or the mean over a subject's records in the batch."""
        return mean_of_examples(loss_fn) if self.order == "average_then_clip" else loss_fn

    def contribution(self, unit: str) -> Contribution:
        """Of K records those in a batch are averaged: Poisson at 1 - (1-q)^K."""
        del unit
        return Contribution(units=self.max_items_per_subject, averaged=True)
