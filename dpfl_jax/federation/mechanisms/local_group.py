"""LocalGroupDP: DP-SGD inside each silo, with noise for all of a subject's records.

Source: Marathe et al., "Subject Granular Differential Privacy in Federated Learning", Algorithm 1.

    S   = each record of the silo independently with probability q
    g~  = (sum over S of clip(grad, C) + N(0, sigma^2 C^2)) / B

Departures. The paper picks sigma anew for each batch, for groups of Z = the largest number of
records of one subject in that batch, with the amplification of one record. That is not private
(the scale of the noise is a statistic of the private batch) and Z is not the number of records by
which neighbours differ. Here sigma is one constant, for a subject of up to K records in the silo,
accounted by the mixture of Gaussians with Binomial(K, q) shifts; ``batch_cap`` is the honest form
of Z: at most that many records of a subject stay in a batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from dpfl_jax.accounting.cells import Contribution
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.data import Silo
from dpfl_jax.federation.mechanisms.base import SiloDraw, SiloMechanism, runs_of
from dpfl_jax.randomness import RootKey


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalGroupDP(SiloMechanism):
    """Record-clipped DP-SGD accounted for subjects.

    Attributes:
      batch_cap: most records of one subject in a batch; others are dropped from it at random.
    """

    batch_cap: int | None = None

    kind: ClassVar[str] = "local_group"

    def __post_init__(self) -> None:
        """Validates."""
        super().__post_init__()
        if self.batch_cap is not None and self.batch_cap < 1:
            raise BadInputError(f"batch_cap is {self.batch_cap}, but it must be at least 1")

    @property
    def layout(self) -> tuple[Any, ...]:
        """Kind and cap."""
        return (*super().layout, self.batch_cap)

    def assemble(self, silo: Silo, chosen: np.ndarray, key: RootKey, step: int) -> SiloDraw:
        """Applies the cap."""
        subjects = silo.subject_of_record[chosen]
        if self.batch_cap is not None and len(chosen):
            ticket = key.numpy("batch-cap", step).random(len(chosen))
            order = np.lexsort((ticket, subjects))
            starts, lengths = runs_of(subjects)
            rank = np.arange(len(chosen)) - np.repeat(starts, lengths)
            # proof: local-group-sampling-1
            chosen = np.sort(chosen[order[rank < self.batch_cap]])
        return SiloDraw(silo.first + chosen, np.ones(len(chosen), np.float32))

    def contribution(self, unit: str) -> Contribution:
        """K records, at most ``batch_cap`` of them in a batch, each moving the sum by C."""
        del unit
        return Contribution(units=self.max_items_per_subject, cap=self.batch_cap)
