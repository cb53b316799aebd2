"""What mechanisms share in which users leave when a privacy budget of their own is spent.

Source: Feldman and Zrnic, "Individual privacy accounting via a Renyi filter" (2021, arXiv
2008.11193). ``individual`` draws users, ``individual_els`` their examples; the run is that of
``training.filtered``.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, TypeVar

import numpy as np
import optax

from dpfl_jax import accounting
from dpfl_jax.accounting.accountant import Accountant
from dpfl_jax.accounting.events import LEAST_NOISE
from dpfl_jax.accounting.renyi import ORDERS
from dpfl_jax.accounting.renyi_filter import RenyiFilter, best_order
from dpfl_jax.clipping import OwnBound
from dpfl_jax.config.kinds import CENTRAL
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.base import Mechanism, Population
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import PoissonWithDropout

Self = TypeVar("Self", bound="OwnBudgets")
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
class OwnBudgets(Mechanism, abc.ABC, kinds=CENTRAL):
    """Users with privacy budgets of their own, before a mechanism that draws units by Poisson.

    Attributes:
      refresh: steps between two looks at everybody's gradients; each is a pass over all users.
      least_steps: steps that everybody can pay for; default half of the run's.
      order: Renyi order of the filter; default the best for ``least_steps``.
    """

    refresh: int = 20
    least_steps: int | None = None
    order: float | None = None

    own_budgets: ClassVar[bool] = True
    accountant: ClassVar[str]  # how the epsilon of the filter is computed, for the guarantee
    unfiltered: ClassVar[str]  # kind of the same mechanism, in which nobody leaves
    leaving: ClassVar[str]  # how a guarantee goes on, after what is drawn
    costliest: ClassVar[str]  # what step costs most, in words

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
                f"nobody can pay for a step: set it higher, or use mechanism.kind={self.unfiltered}"
            )

    # ---- what runs -------------------------------------------------------------------------

    @property
    def rule(self) -> OwnBound:
        """To each user's own bound."""
        return OwnBound(self.clip_norm, self.clipping == "normalized")

    def is_stateful(self, population: Population) -> bool:
        """Who takes part depends on earlier steps."""
        return True

    @property
    def _below(self) -> Any:
        """As the mechanism would be in which nobody leaves."""
        return super()

    def sampler(self, user_offsets: np.ndarray, key: RootKey) -> Any:
        """As without budgets, but of nobody until it is known until when each unit stays."""
        made = self._below.sampler(user_offsets, key)
        nobody = np.zeros(made.population, np.int64)
        return dataclasses.replace(made, scheme=PoissonWithDropout(made.scheme.prob, nobody))

    @property
    @abc.abstractmethod
    def most_units(self) -> int:
        """Units of one user that may be drawn in a step."""

    @abc.abstractmethod
    def units_of_users(self, user_offsets: np.ndarray) -> np.ndarray:
        """int64 [users]: units of each that may be drawn in a step."""

    def filter(self, population: Population) -> RenyiFilter:
        """What a step costs each user."""
        prob = self.sampling_probability(population)
        return RenyiFilter.of(self.sigma, prob, *self._chosen(), self.most_units)

    def _chosen(self) -> tuple[int, float]:
        """Least steps and order; raises BadInputError before they are chosen."""
        if self.least_steps is None or self.order is None:
            raise BadInputError(
                f"this {self.kind} mechanism has no least_steps or order yet: make a plan, which "
                "chooses them for its number of steps"
            )
        return self.least_steps, self.order

    # ---- what is accounted -----------------------------------------------------------------

    def for_steps(
        self: Self,
        population: Population,
        steps: int,
        optimizer: optax.GradientTransformation | None = None,
    ) -> Self:
        """With the budget of half the steps, unless it has one; the best order, once it has noise.

        Raises:
          BadInputError: everybody can pay for all steps.
        """
        least = max(1, steps // 2) if self.least_steps is None else self.least_steps
        if least >= steps:
            raise BadInputError(
                f"mechanism.least_steps is {least}, but the run has {steps} steps, so that nobody "
                "would ever leave: set it lower, or use "
                f"mechanism.kind={self.unfiltered}, which needs less noise"
            )
        return dataclasses.replace(self, least_steps=least)

    def calibrated(
        self: Self,
        population: Population,
        steps: int,
        epsilon: float | None,
        delta: float | None,
        optimizer: optax.GradientTransformation | None = None,
    ) -> tuple[Self, float]:
        """As every mechanism; then the order at which a budget costs least."""
        made, delta = super().calibrated(population, steps, epsilon, delta, optimizer)
        if made.order is None:
            order = best_order(made._below.event(population, made.least_steps), delta)
            made = dataclasses.replace(made, order=order)
        return made, delta

    def calibrate(
        self: Self, population: Population, steps: int, epsilon: float, delta: float
    ) -> Self:
        """With the smallest noise at which ``least_steps`` steps at the clip norm meet the target.

        Raises:
          BadInputError: as of every mechanism, or everybody can pay for all steps.
        """
        self._check_owners(population)
        chosen = self.for_steps(population, steps)

        def budget(sigma: float) -> Any:
            made = dataclasses.replace(chosen, noise_multiplier=sigma)
            if made.order is None:
                return made._below.event(population, made.least_steps)
            return made.event(population, steps)

        everybody = chosen.sampling_probability(population) == 1
        accountant: Accountant = "pld" if everybody else "rdp"
        sigma = accounting.calibrate_noise_multiplier(budget, epsilon, delta, accountant=accountant)
        return dataclasses.replace(chosen, noise_multiplier=sigma)

    def event(self, population: Population, steps: int) -> Any:
        """The filter's, once anybody can have spent a budget."""
        prob = self.sampling_probability(population)
        given = (self.sigma, prob, *self._chosen(), steps)
        return accounting.events.filtered(*given, group_size=self.most_units)

    def told_sampling(self, population: Population) -> str:
        """As without budgets, and who leaves."""
        return (
            f"{self._below.told_sampling(population)}, {self.leaving} when a budget of their own "
            f"is spent: that of {self.least_steps} steps {self.costliest}, at the Renyi order "
            f"{self.order}; charged, drawn or not, at a bound that is taken of everybody every "
            f"{self.refresh} steps"
        )

    def guarantee(
        self, population: Population, steps: int, delta: float, caveats: tuple[str, ...] = ()
    ) -> accounting.Guarantee:
        """As of every mechanism; and what is told to nobody."""
        made = super().guarantee(population, steps, delta, (CAVEAT, *caveats))
        assumptions = (*made.assumptions, *ASSUMPTIONS)
        return dataclasses.replace(made, accountant=self.accountant, assumptions=assumptions)
