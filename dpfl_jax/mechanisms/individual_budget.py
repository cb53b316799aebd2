"""Individual privacy budgets: a user whose budget is spent no longer takes part.

Source: Feldman and Zrnic, "Individual privacy accounting via a Renyi filter" (2021, arXiv
2008.11193), with users for points and Poisson sampling:

    every `refresh` steps, for each user u:                          # a look at everybody
      b_u = min(C, largest norm of a gradient of u's units at the model as it is now)  # rounded up
    at each step t:
      A   = users who can pay for this step, too, at b_u             # drawn or not, they pay
      U   = each unit of A independently with probability q          # Poisson
      g   = (sum over U of clip(gradient, b_u) + N(0, (C sigma)^2)) / M

A step costs a user the Renyi divergence of a Poisson-sampled Gaussian whose mean moves by b_u (of a
mixture of such Gaussians if a user has several units). Everybody's budget pays for `least_steps`
steps at b = C, with a whole group of units. So no user leaves before that, and users with small
gradients leave later or never. Without individual budgets, training ends for all users at once.

Departures:

* b_u is measured at the last refresh, not at this step. Only the gradients of drawn users are
  computed at a step, and a bound that changes when a user is drawn would reveal the draw. So
  gradients are clipped to b_u, even if they have grown since.
* All units of a user are clipped to one bound per user. A bound for each unit would not save
  budget: the cost follows from the largest.
* A user who cannot pay at b_u sits out until the next refresh, when b_u may be smaller.
* The divisor stays the same, and how many users are left is kept secret.

``training.filtered`` runs it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from dpfl_jax import accounting
from dpfl_jax.accounting.accountant import Accountant
from dpfl_jax.accounting.cells import Contribution, SeveralUnits
from dpfl_jax.accounting.filters import RenyiFilter, best_order
from dpfl_jax.accounting.renyi import ORDERS
from dpfl_jax.clipping import Flat, Normalized, OwnBound
from dpfl_jax.config.kinds import BUDGETS, Named
from dpfl_jax.errors import BadInputError, at_least
from dpfl_jax.sampling import Poisson, PoissonWithDropout

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
class IndividualBudget(Named, kinds=BUDGETS):
    """A privacy budget for each user, with Poisson sampling (Feldman and Zrnic 2021).

    Attributes:
      refresh: number of steps after which the norms of all users' gradients are measured again,
        each time with a pass over all users.
      least_steps: number of steps that every budget pays for; None: half of the run's steps.
      renyi_order: Renyi order of the filter; None: the best for ``least_steps``.

    Examples:
      >>> from dpfl_jax.experimental import IndividualBudget, individual
      >>> mechanism = individual(group_size=4, cohort_size=64, refresh=10)
      >>> mechanism.budget == IndividualBudget(refresh=10)
      True
    """

    refresh: int = 20
    least_steps: int | None = None
    renyi_order: float | None = None

    kind: ClassVar[str] = "individual"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("mechanism.refresh", self.refresh, 1, most=1 << 30)
        at_least("mechanism.least_steps", self.least_steps, 1, most=1 << 30)
        if self.renyi_order is not None and not ORDERS[0] <= self.renyi_order <= ORDERS[-1]:
            raise BadInputError(
                f"mechanism.renyi_order is {self.renyi_order}, but it must be from {ORDERS[0]:g} "
                f"to {ORDERS[-1]:g}: leave it out, and the best is taken"
            )

    def check(self, clip: Any) -> None:
        """Raises BadInputError unless individual budgets work with this clip rule."""
        if type(clip) not in (Flat, Normalized):  # OwnBound, which runs instead, bounds like these
            raise BadInputError(
                f"mechanism.clipping is {clip.kind}, but individual budgets bound the norm of the "
                "whole gradient: set it to flat"
            )

    def rule(self, clip: Any) -> OwnBound:
        """Returns the rule that clips to each user's own bound, at most the clip norm."""
        assert isinstance(clip, (Flat, Normalized))
        return OwnBound(clip.clip_norm, isinstance(clip, Normalized))

    def empty_sampler(self, made: Any) -> Any:
        """Returns a sampler like ``made`` that never draws any unit.

        The run (``training.filtered``) replaces it once it knows how long each unit stays.
        """
        stay = np.zeros(made.population, np.int64)
        return dataclasses.replace(made, scheme=PoissonWithDropout(made.scheme.draw_prob, stay))

    def fitted_to(self, steps: int) -> IndividualBudget:
        """Returns the budget with ``least_steps`` set, by default to half of the steps.

        Raises:
          BadInputError: every user could pay for all steps.
        """
        least = max(1, steps // 2) if self.least_steps is None else self.least_steps
        if least >= steps:
            raise BadInputError(
                f"mechanism.least_steps is {least}, but the run has {steps} steps, so that no user "
                "would ever leave: set it lower, or do without individual budgets "
                "(mechanism.kind=uls or els), which needs less noise"
            )
        return dataclasses.replace(self, least_steps=least)

    def with_order(self, budget_event: Any, delta: float) -> IndividualBudget:
        """Returns the budget with ``renyi_order`` set, by default to the one of least epsilon.

        Args:
          budget_event: event of ``least_steps`` steps.
          delta: delta of the guarantee.
        """
        if self.renyi_order is not None:
            return self
        return dataclasses.replace(self, renyi_order=best_order(budget_event, delta))

    def _chosen(self) -> tuple[int, float]:
        if self.least_steps is None or self.renyi_order is None:
            raise BadInputError(
                "these budgets have no least_steps or renyi_order yet: make a plan, which chooses "
                "them for its number of steps"
            )
        return self.least_steps, self.renyi_order

    def filter(self, sigma: float, scheme: Any, contribution: Contribution | None) -> RenyiFilter:
        """Returns the filter that charges each user for a step with this noise multiplier."""
        of = (*self._chosen(), _max_units(contribution))
        return RenyiFilter.of(sigma, _poisson(scheme).draw_prob, *of)

    def event(
        self, sigma: float, scheme: Any, contribution: Contribution | None, steps: int
    ) -> Any:
        """Returns the event of ``steps`` steps: the filter's after ``least_steps``."""
        given = (sigma, _poisson(scheme).draw_prob, *self._chosen(), steps)
        return accounting.events.individual(*given, group_size=_max_units(contribution))

    def accountant(self, scheme: Any) -> Accountant:
        """Returns the name of the accountant that calibrates the noise."""
        return "pld" if _poisson(scheme).draw_prob == 1 else "rdp"

    def describe(self, sampling: str, contribution: Contribution | None) -> str:
        """Returns the sampling in words, with when users leave, for the guarantee."""
        leaving, costliest = "who leaves", "at the clip norm"
        if contribution:
            leaving = "of users who leave"
            costliest = "at the clip norm with a whole group of examples"
        return (
            f"{sampling}, {leaving} when a budget of their own is spent: that of "
            f"{self.least_steps} steps {costliest}, at the Renyi order {self.renyi_order}; "
            "charged, drawn or not, at a bound that is taken of everybody every "
            f"{self.refresh} steps"
        )

    def accountant_description(self, contribution: Contribution | None) -> str:
        """Returns in words how epsilon is computed, for the guarantee."""
        over = "Poisson-subsampled Gaussians of each user's own bound"
        if contribution:
            over = "mixtures of Gaussians of each user's own bound and number of examples"
        return (
            f"Renyi filter over {over} (rounded upwards); PLD until anybody can have spent a budget"
        )


BUDGETS.register(IndividualBudget)


def _max_units(contribution: Contribution | None) -> int:
    return contribution.max_units if isinstance(contribution, SeveralUnits) else 1


def _poisson(scheme: Any) -> Poisson:
    if not isinstance(scheme, Poisson):
        raise BadInputError(
            "individual budgets are proven for Poisson sampling only: set "
            "mechanism.participation.scheme to poisson, or leave out mechanism.budget"
        )
    return scheme
