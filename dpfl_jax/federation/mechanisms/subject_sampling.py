"""Per-silo ULS: sample subjects rather than records, and clip once per subject.

The modern rival of the subject-level papers' algorithms: DP-SGD with user-level sampling (Charles
et al. 2024, Algorithm 2) inside each silo.

    S   = each subject of the silo independently with probability q
    g_a = clip(gradient of the mean loss of up to G of a's records, C)
    g~  = (sum over S of g_a + N(0, sigma^2 C^2)) / (expected number of subjects)
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.data import Silo
from dpfl_jax.federation.mechanisms.base import (
    LossFn,
    SiloDraw,
    SiloFacts,
    SiloMechanism,
    mean_of_examples,
)
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import choose_within_users


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubjectULS(SiloMechanism):
    """User-level sampling in a silo, the users being its subjects.

    ``batch_size`` and ``sampling_prob`` are of records, as in the other mechanisms, so that the
    same numbers mean the same compute: a subject is sampled with probability
    batch_size / (group_size * number of subjects), or ``sampling_prob``.

    Attributes:
      group_size: G, most records of a subject in a step; privacy does not depend on it.
    """

    group_size: int = 1

    kind: ClassVar[str] = "subject_uls"

    def __post_init__(self) -> None:
        """Validates."""
        super().__post_init__()
        if self.group_size < 1:
            raise BadInputError(f"group_size is {self.group_size}, but it must be at least 1")

    def probability(self, facts: SiloFacts) -> float:
        """Of each subject."""
        if self.sampling_prob is not None:
            return self.sampling_prob
        assert self.batch_size is not None
        return min(1.0, self.batch_size / (self.group_size * max(facts.num_subjects, 1)))

    def num_units(self, facts: SiloFacts) -> int:
        """Its subjects."""
        # proof: subject-uls-sampling-1
        return facts.num_subjects

    def contribution(self, unit: str) -> None:
        """Subjects are drawn."""

    def assemble(self, silo: Silo, chosen: np.ndarray, key: RootKey, step: int) -> SiloDraw:
        """Chooses up to G records of each subject, afresh at each step."""
        # proof: subject-uls-sampling-2
        rng = key.numpy("within-subject", step)
        local = choose_within_users(rng, silo.subject_offsets, chosen, self.group_size)
        positions = np.where(local >= 0, local + silo.first, -1)
        return SiloDraw(positions, np.ones(len(chosen), np.float32))

    def unit_size(self, facts: SiloFacts) -> int | None:
        """G."""
        del facts
        return self.group_size

    def unit_loss(self, loss_fn: LossFn) -> LossFn:
        """The mean over the subject's records."""
        # proof: subject-uls-sensitivity-1
        return mean_of_examples(loss_fn)
