"""What mechanisms share in which every user has turns, and nothing rests on sampling.

    turn(u) = uniform in 0 .. s-1, for each user u                # once, before training
    at each step t:
      U   = the users whose turn is t mod s
      D_u = at most group_size examples of u, afresh, for u in U
      g_t = sum over U of clip(mean over D_u of grad, C)
      g   = (g_t + C sigma (K^-1 Z)_t) / M                        # K: of the mechanism

In T steps a user takes part at most k = ceil(T / s) times, and two of these steps are s apart. What
that moves K G by is bounded for whoever knows whose turn it is: nothing rests on sampling being
secret, and nothing is gained by it.

Turns are drawn user by user, not by devices that check in, nor by cutting a list of users: a list
of equal parts depends on everybody.
"""

from __future__ import annotations

import abc
import dataclasses
import math

import numpy as np
import optax

from dpfl_jax.accounting.cells import StrategyMatrix
from dpfl_jax.config.kinds import CENTRAL
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.allocation import Allocation
from dpfl_jax.mechanisms.base import Population
from dpfl_jax.noise import Noise
from dpfl_jax.sampling import Cyclic

_LARGEST_CLIP = 1e20  # float32 ends at 3e38: for 1e9 people in 1e9 steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class InTurns(Allocation, abc.ABC, kinds=CENTRAL):
    """Every user at every s-th step, with Toeplitz noise.

    Attributes:
      cohort_size: M, the divisor, and about the expected number of users per step: that is (number
        of users) / s.
      sampling_prob: 1 / s for a whole s; default s = (number of users) / M, rounded.
      horizon: most steps of the run; default those of the plan.
    """

    horizon: int | None = None

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.horizon is not None and self.horizon < 1:
            raise BadInputError(f"mechanism.horizon is {self.horizon}: it must be 1 or more steps")
        if self.clip_norm > _LARGEST_CLIP:
            raise BadInputError(
                f"mechanism.clip_norm is {self.clip_norm:g}, but sums of all steps are kept, which "
                f"must stay finite: set it to at most {_LARGEST_CLIP:g}"
            )

    def _as_they_run(self, name: str, count: int, what: str) -> None:
        """Checks numbers from 0 to 1, and makes them those of float32: no others are accounted.

        Args:
          name: field.
          count: how many there must be.
          what: one for each of these.

        Raises:
          BadInputError: other numbers, or more.
        """
        given = np.asarray(getattr(self, name) or (), np.float32)
        if len(given) != count or not ((given >= 0) & (given <= 1)).all():
            raise BadInputError(
                f"mechanism.{name} has {len(given)} numbers, but it must have one for each of "
                f"the {what}, all from 0 to 1"
            )
        object.__setattr__(self, name, tuple(map(float, given)))

    def _check_total(self, name: str) -> None:
        """Raises BadInputError unless the numbers of a field add up to 1 at most."""
        if (total := math.fsum(getattr(self, name) or ())) > 1:
            raise BadInputError(
                f"mechanism.{name} add up to {total:g}, but to at most 1 they must, so that a step "
                "is remembered no more than it counts itself: make them smaller"
            )

    @abc.abstractmethod
    def column(self, steps: int) -> np.ndarray:
        """The first column of K, or more; float64 [steps], none above the one before."""

    @abc.abstractmethod
    def taken_back(self, noise: Noise) -> optax.GradientTransformationExtraArgs:
        """The transformation that adds K^-1 Z, where ``noise`` draws Z."""

    # ---- what runs -------------------------------------------------------------------------

    def scheme(self, population: Population) -> Cyclic:
        """Turns, drawn once."""
        # proof: in-turns-sampling-1
        return Cyclic(self.once_in(population))

    def noise_transform(self) -> optax.GradientTransformationExtraArgs:
        """Noise of standard deviation C sigma in every row of K G, taken back later."""
        steps = self.horizon or 1
        # What one turn moves: no more than is accounted, so that the grid is fine enough.
        reach = float(np.linalg.norm(self.column(steps))) * self.rule.sensitivity
        # proof: in-turns-noise-1
        return self.taken_back(Noise(self.noise_stddev, reach, self.noise, rows=4 * steps))

    # ---- what is accounted -----------------------------------------------------------------

    def matrix(self, steps: int) -> StrategyMatrix:
        """Toeplitz; raises BadInputError beyond the horizon."""
        if steps > (self.horizon or 0):
            raise BadInputError(
                f"{steps} steps are asked for, but mechanism.horizon is {self.horizon}: raise it"
            )
        return StrategyMatrix(tuple(self.column(max(steps, 1)).tolist()), "toeplitz")

    def told_sampling(self, population: Population) -> str:
        """Turns, then as ULS."""
        separation = self.once_in(population)
        return (
            f"each of {population.num_users} users at every {separation}-th step, from one of the "
            f"first {separation} on that is drawn uniformly and independently (no amplification by "
            f"sampling is counted on), {self._examples} of a user who takes part"
        )
