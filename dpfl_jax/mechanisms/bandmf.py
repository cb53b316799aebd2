"""BandMF: user-level sampling by groups in turns, with noise that cancels over the steps.

Source: Choquette-Choo et al., "(Amplified) Banded Matrix Factorization: a unified approach to
private training" (2023, arXiv 2306.08153), Algorithm 2 and Theorem 4, with users for examples and
strategies of McKenna (2024, arXiv 2405.15913).

    group(u) = uniform in 0 .. b-1, for each user u                   # once, before training
    at each step t:
      U   = each user of group t mod b independently with probability p
      D_u = at most group_size examples of u, afresh, for u in U
      g_t = sum over U of clip(mean over D_u of grad, C)
      g   = (g_t + C sigma (K^-1 Z)_t) / M                            # K has b bands

Between the turns of a user are b steps, and K has b bands: so a user pays for T / b steps at b
times the probability, and the noise of a step is taken back in the steps that follow. Optimisers
add up gradients, so that what counts is the noise of their prefix sums.

Departures: groups are drawn user by user, not cut to equal sizes: a partition into equal parts
depends on everybody. p = b M / N is a constant of the number of users, whatever the groups' sizes
are; M is expected over the draws of groups, too.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import optax

from dpfl_jax.accounting.cells import StrategyMatrix
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.base import Population
from dpfl_jax.mechanisms.uls import ULS
from dpfl_jax.noise import Noise, banded, strategy, workload_of
from dpfl_jax.sampling import CyclicPoisson, check_probability


@dataclasses.dataclass(frozen=True, kw_only=True)
class BandMF(ULS):
    """User-level sampling by groups in turns, with banded noise.

    Attributes:
      cohort_size: M, expected number of users per step (the divisor).
      sampling_prob: p, of a user of the group whose turn it is; default bands * cohort_size /
        (number of users).
      bands: b, of the noise's matrix, and number of groups. 1 is ULS.
      strategy: first column of that matrix, one number for each band; default the best for the
        number of steps and the optimiser.
    """

    bands: int = 4
    strategy: tuple[float, ...] | None = None

    kind: ClassVar[str] = "bandmf"

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.bands < 1:
            raise BadInputError(f"mechanism.bands is {self.bands}, but it must be at least 1")
        if self.strategy is None:
            return
        if self.bands == 1:
            raise BadInputError("mechanism.strategy is for two bands or more: leave it out")
        column = np.asarray(self.strategy, np.float32)
        if len(column) != self.bands or not np.isfinite(column).all() or not column[0] > 0:
            raise BadInputError(
                f"mechanism.strategy has {len(column)} numbers, but it must have one for each of "
                f"the {self.bands} bands, all finite and the first above 0"
            )
        # As it runs, so that no other number is accounted.
        object.__setattr__(self, "strategy", tuple(map(float, column)))

    @property
    def column(self) -> tuple[float, ...]:
        """The strategy; raises BadInputError before it is chosen for a number of steps."""
        if self.strategy is not None:
            return self.strategy
        if self.bands == 1:
            return (1.0,)
        raise BadInputError(
            "this bandmf mechanism has no strategy yet: give mechanism.strategy, or make a plan, "
            "which chooses one for its number of steps"
        )

    def for_steps(
        self,
        population: Population,
        steps: int,
        optimizer: optax.GradientTransformation | None = None,
    ) -> BandMF:
        """With the strategy that is best for these steps and optimiser, unless it has one."""
        if self.strategy is not None or self.bands == 1:
            return self
        chosen = strategy(self.bands, steps, workload_of(optimizer, steps))
        return dataclasses.replace(self, strategy=chosen)

    # ---- what runs -------------------------------------------------------------------------

    def sampling_probability(self, population: Population) -> float:
        """P = b M / N unless declared."""
        if self.sampling_prob is not None:
            return self.sampling_prob
        users = max(population.num_users, 1)
        return check_probability(
            self.bands * self.cohort_size / users,
            f"expected cohort of {self.cohort_size:g} from one of {self.bands} groups of "
            f"{population.num_users} users",
            "set mechanism.bands times mechanism.cohort_size to at most "
            f"{population.num_users}, or use more data",
        )

    def scheme(self, population: Population) -> CyclicPoisson:
        """As many groups as bands; of the group whose turn it is, each user by a coin."""
        # proof: bandmf-sampling-1
        return CyclicPoisson(self.sampling_probability(population), self.bands)

    def matrix(self, steps: int) -> StrategyMatrix:
        """Banded."""
        del steps
        return StrategyMatrix(self.column, "banded")

    def noise_transform(self) -> optax.GradientTransformationExtraArgs:
        """Noise of standard deviation C sigma in every row of C G, taken back as its bands say."""
        column = self.column
        reach = float(np.linalg.norm(column)) * self.rule.sensitivity
        # proof: bandmf-noise-2
        noise = Noise(self.noise_stddev, reach, self.noise, rows=self.bands)
        return banded(noise, column, self.divisor)

    # ---- what is accounted -----------------------------------------------------------------

    def told_sampling(self, population: Population) -> str:
        """Groups in turns, then as ULS."""
        told = super().told_sampling(population)
        if self.bands == 1:
            return told
        return f"{self.bands} groups of users, drawn user by user, in turns; of a group: {told}"
