"""User-level sampling whose cohorts never exceed a given size: one shape on the device, no more.

Source: Chua et al., "Scalable DP-SGD: shuffling vs. Poisson subsampling" (2024, arXiv 2411.04205),
with users for units:

    at each step:
      U   = each user independently with probability q
      if U has more than `cohort_cap` users: a uniform subset of so many
      g   = (sum over U of clip(mean over D_u of grad, C) + N(0, (C sigma)^2)) / M

A user who is there can push another one out, which is accounted for as that one's replacement: the
cap should be seldom reached. Without a cap (``uls``) room is made for what one draw in 10^15
exceeds, some 8 standard deviations; with one, 4 are plenty.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.base import Population
from dpfl_jax.mechanisms.uls import ULS
from dpfl_jax.sampling import TruncatedPoisson


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truncated(ULS):
    """User-level sampling, cut to a cohort's largest size.

    Attributes:
      cohort_cap: most users of a step; at least cohort_size.
    """

    cohort_cap: int

    kind: ClassVar[str] = "truncated"

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if not self.cohort_cap >= self.cohort_size:
            raise BadInputError(
                f"cohort_cap is {self.cohort_cap}, less than the expected {self.cohort_size:g} "
                "users: set it 4 standard deviations above, or lower mechanism.cohort_size"
            )

    @classmethod
    def at_budget(cls, compute_budget: float, group_size: int, **common: Any) -> Truncated:
        """As ULS, with room for 4 standard deviations more."""
        cohort = compute_budget / group_size
        cap = math.ceil(cohort + 4.0 * math.sqrt(cohort))
        return cls(group_size=group_size, cohort_size=cohort, cohort_cap=cap, **common)

    def scheme(self, population: Population) -> TruncatedPoisson:
        """Each user by a coin; the draw is cut at random."""
        # proof: truncated-sampling-1
        return TruncatedPoisson(self.sampling_probability(population), self.cohort_cap)

    def told_sampling(self, population: Population) -> str:
        """As ULS, and the cap."""
        return f"{super().told_sampling(population)}, of at most {self.cohort_cap} users"
