"""Random allocation: each user takes part in exactly one of every t steps, drawn uniformly.

Source: Feldman and Shenfeld, "Efficient privacy loss accounting for subsampling and random
allocation" (2026, arXiv 2602.17284); "balls in bins" in Chua et al. 2024. With users for units:

    for each stretch of t steps:
      step(u) = uniform in 0 .. t-1, for each user u               # afresh for each stretch
    at each step:
      U   = the users whose step it is
      D_u = at most group_size examples of u, afresh, for u in U
      g   = (sum over U of clip(mean over D_u of grad, C) + N(0, (C sigma)^2)) / M

Nobody is drawn twice or never in a stretch, as happens with Poisson sampling of the same rate: so
less noise does, most of all in runs of one or few stretches. Cohorts vary as Poisson's do.

Departures: k of T steps are one of T / k in each of k stretches, which is what the paper's bound
for k of T is of; draws of different stretches are independent. A run may end within a stretch.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.base import Population
from dpfl_jax.mechanisms.uls import ULS
from dpfl_jax.sampling import RandomAllocation
from dpfl_jax.sampling.schemes import AtRate

LEAST_RATE = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocation(ULS):
    """Every user in one of every t steps.

    Attributes:
      cohort_size: M, the divisor, and about the expected number of users per step: that is (number
        of users) / t.
      sampling_prob: 1 / t for a whole t; default t = (number of users) / M, rounded.
    """

    kind: ClassVar[str] = "allocation"

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        prob = self.sampling_prob
        if prob is not None and prob < LEAST_RATE:
            raise BadInputError(
                f"sampling_prob is {prob:g}, but each user takes part in one of every 1 / "
                f"sampling_prob steps: set it to {LEAST_RATE:g} or more"
            )
        if prob is not None and abs(prob * round(1.0 / prob) - 1.0) > 1e-3:
            raise BadInputError(
                f"sampling_prob is {prob:g}, but each user takes part in one of "
                f"every t steps: set it to 1/t, e.g. {1 / round(1 / prob):g}"
            )

    def once_in(self, population: Population) -> int:
        """T: steps of which each user takes part in one."""
        return max(1, round(1.0 / max(super().sampling_probability(population), LEAST_RATE)))

    def sampling_probability(self, population: Population) -> float:
        """1 / t, of a step of which nothing else is known."""
        return 1.0 / self.once_in(population)

    def scheme(self, population: Population) -> AtRate:
        """A step of every stretch for each user."""
        # proof: allocation-sampling-1
        return RandomAllocation(self.once_in(population))

    def told_sampling(self, population: Population) -> str:
        """Users to steps, then as ULS."""
        return (
            f"each of {population.num_users} users in exactly one of every "
            f"{self.once_in(population)} steps, drawn uniformly and independently, "
            f"{self._examples} of a user who takes part"
        )
