"""User-level sampling with individual accounting: users with small gradients stay for longer.

Source: Feldman and Zrnic, "Individual privacy accounting via a Renyi filter" (2021, arXiv
2008.11193), with users for points and Poisson sampling:

    every `refresh` steps, for each user u:                          # a look at everybody
      b_u = min(C, norm of u's gradient at the model as it is now)   # rounded up to a public level
    at each step t:
      A   = users who can pay for this step, too, at b_u             # drawn or not, they pay
      U   = each user of A independently with probability q          # Poisson
      D_u = at most group_size examples of u, afresh, for u in U
      g_u = clip(mean over D_u of grad, b_u)
      g   = (sum over U of g_u + N(0, (C sigma)^2)) / M

A step costs a user the Renyi divergence of a Poisson-sampled Gaussian that moves by b_u. The budget
of everybody is that of `least_steps` steps at b = C: nobody leaves before, and who has small
gradients leaves later or never, where the accounting of `uls` ends for all at once.

Departures: b_u is of the last look, not of this step, whose gradient is taken of those alone who
are drawn: a bound that is taken when a user is drawn would tell that they were. So it is clipped
to, whatever the gradient is by now. Who cannot pay at b_u sits out until the next look, at which
b_u may be smaller. M stays, and nobody is told how many users are left.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from dpfl_jax import accounting
from dpfl_jax.accounting.accountant import Accountant
from dpfl_jax.accounting.events import LEAST_NOISE
from dpfl_jax.accounting.renyi import ORDERS
from dpfl_jax.accounting.renyi_filter import RenyiFilter, best_order
from dpfl_jax.clipping import OwnBound
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.base import Population
from dpfl_jax.mechanisms.uls import ULS
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Staying, UserSampler

ASSUMPTIONS = (
    "the filter's order and levels, least_steps and refresh are public constants, fixed before "
    "looking at one user's data",
    "private/users.csv is told to nobody, nor is outside_guarantee, or any timing or rate, of "
    "metrics.jsonl and report.json, which tell how many still take part",
)
CAVEAT = (
    "how long steps take tells who can observe it how many users still take part, and about their "
    "gradients"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Individual(ULS):
    """User-level sampling, in which every user has a privacy budget of their own.

    Attributes:
      refresh: steps between two looks at everybody's gradients; each is a pass over all users.
      least_steps: steps that everybody can pay for; default half of the run's.
      order: Renyi order of the filter; default the best for ``least_steps``.
    """

    refresh: int = 20
    least_steps: int | None = None
    order: float | None = None

    kind: ClassVar[str] = "individual"
    own_budgets: ClassVar[bool] = True
    accountant: ClassVar[str] = (
        "Renyi filter over Poisson-subsampled Gaussians of each user's own bound (rounded "
        "upwards); PLD until anybody can have spent a budget"
    )

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.clipping == "per_layer":
            raise BadInputError(
                "mechanism.clipping is per_layer, but a user's own bound is that of the whole "
                "gradient: set it to standard"
            )
        for name in ("refresh", "least_steps"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 1 << 30:
                raise BadInputError(f"mechanism.{name} is {value}, but it must be at least 1")
        if self.order is not None and not ORDERS[0] <= self.order <= ORDERS[-1]:
            raise BadInputError(
                f"mechanism.order is {self.order}, but it must be from {ORDERS[0]:g} to "
                f"{ORDERS[-1]:g}: leave it out, and the best is taken"
            )
        if self.noise_multiplier is not None and self.noise_multiplier < LEAST_NOISE:
            raise BadInputError(
                f"mechanism.noise_multiplier is {self.noise_multiplier:g}, but without noise "
                "nobody can pay for a step: set it higher, or use mechanism.kind=uls"
            )

    # ---- what runs -------------------------------------------------------------------------

    @property
    def rule(self) -> OwnBound:
        """To each user's own bound."""
        return OwnBound(self.clip_norm, self.clipping == "normalized")

    @property
    def remembers(self) -> bool:
        """Who takes part depends on earlier steps."""
        return True

    def sampler(self, user_offsets: np.ndarray, key: RootKey) -> UserSampler:
        """As ULS, but of nobody until the law is told until when each user stays."""
        made = super().sampler(user_offsets, key)
        prob = self.sampling_probability(self.population(user_offsets))
        nobody = np.zeros(made.law.population, np.int64)
        return dataclasses.replace(made, law=Staying(made.law.population, prob, nobody))

    def filter(self, population: Population) -> RenyiFilter:
        """What a step costs each user."""
        prob = self.sampling_probability(population)
        return RenyiFilter.of(self.sigma, prob, *self._chosen())

    def _chosen(self) -> tuple[int, float]:
        """Least steps and order; raises BadInputError before they are chosen."""
        if self.least_steps is None or self.order is None:
            raise BadInputError(
                "this individual mechanism has no least_steps or order yet: make a plan, which "
                "chooses them for its number of steps"
            )
        return self.least_steps, self.order

    # ---- what is accounted -----------------------------------------------------------------

    def for_steps(self, population: Population, steps: int) -> Individual:
        """With the budget of half the steps, unless it has one; the best order, once it has noise.

        Raises:
          BadInputError: everybody can pay for all steps.
        """
        least = max(1, steps // 2) if self.least_steps is None else self.least_steps
        if least >= steps:
            raise BadInputError(
                f"mechanism.least_steps is {least}, but the run has {steps} steps, so that nobody "
                "would ever leave: set it lower, or use mechanism.kind=uls, which needs less noise"
            )
        return dataclasses.replace(self, least_steps=least)

    def calibrated(
        self, population: Population, steps: int, epsilon: float | None, delta: float | None
    ) -> tuple[Individual, float]:
        """As every mechanism; then the order at which a budget costs least."""
        made, delta = super().calibrated(population, steps, epsilon, delta)
        if made.order is None:
            prob = made.sampling_probability(population)
            order = best_order(made.sigma, prob, made.least_steps or 1, delta)
            made = dataclasses.replace(made, order=order)
        return made, delta

    def calibrate(
        self, population: Population, steps: int, epsilon: float, delta: float
    ) -> Individual:
        """With the smallest noise at which ``least_steps`` steps at the clip norm meet the target.

        Raises:
          BadInputError: as of every mechanism, or everybody can pay for all steps.
        """
        self._check_owners(population)
        chosen = self.for_steps(population, steps)
        prob, least = chosen.sampling_probability(population), chosen.least_steps or 1

        def budget(sigma: float) -> Any:
            if self.order is None:
                return accounting.events.uls(sigma, prob, least)
            return accounting.events.filtered(sigma, prob, least, self.order, steps)

        accountant: Accountant = "pld" if prob == 1 else "rdp"
        sigma = accounting.calibrate_noise_multiplier(budget, epsilon, delta, accountant=accountant)
        return dataclasses.replace(chosen, noise_multiplier=sigma)

    def event(self, population: Population, steps: int) -> Any:
        """The filter's, once anybody can have spent a budget."""
        prob = self.sampling_probability(population)
        return accounting.events.filtered(self.sigma, prob, *self._chosen(), steps)

    def told_sampling(self, population: Population) -> str:
        """As ULS, and who leaves."""
        return (
            f"{super().told_sampling(population)}, who leaves when a budget of their own is spent: "
            f"that of {self.least_steps} steps at the clip norm, at the Renyi order {self.order}; "
            f"charged, drawn or not, at a bound that is taken of everybody every {self.refresh} "
            "steps"
        )

    def guarantee(
        self, population: Population, steps: int, delta: float, caveats: tuple[str, ...] = ()
    ) -> accounting.Guarantee:
        """As of every mechanism; and what is told to nobody."""
        made = super().guarantee(population, steps, delta, (CAVEAT, *caveats))
        return dataclasses.replace(made, assumptions=(*made.assumptions, *ASSUMPTIONS))
