"""Individual privacy budgets: a user who has spent theirs takes part no longer.

Source: Feldman and Zrnic, "Individual privacy accounting via a Renyi filter" (2021, arXiv
2008.11193), with users for points and Poisson sampling:

    every `refresh` steps, for each user u:                          # a look at everybody
      b_u = min(C, largest norm of a gradient of u's units at the model as it is now)  # rounded up
    at each step t:
      A   = users who can pay for this step, too, at b_u             # drawn or not, they pay
      U   = each unit of A independently with probability q          # Poisson
      g   = (sum over U of clip(gradient, b_u) + N(0, (C sigma)^2)) / M

A step costs a user the Renyi divergence of a Poisson-sampled Gaussian that moves by b_u (where a
user has several units: of a mixture of these). The budget of everybody is that of `least_steps`
steps at b = C (and a whole group of units). So nobody leaves before that. Users with small
gradients leave later, or never. Without such budgets the accounting ends for all at once.

Departures: b_u is of the last look, not of this step, whose gradient is taken of those alone who
are drawn: a bound that is taken when a user is drawn would tell that they were. So it is clipped
to, whatever the gradient is by now. All units of a user are clipped to the user's bound: one of
each would clip closer, and save nobody anything, as the largest would still be paid for. Who cannot
pay at b_u sits out until the next look, at which b_u may be smaller. The divisor stays, and nobody
is told how many users are left. The run is that of ``training.filtered``.
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
    """A budget of each user's own, before units that are drawn by Poisson.

    Attributes:
      refresh: steps between two looks at everybody's gradients; each is a pass over all users.
      least_steps: steps that everybody can pay for; None: half of the run's.
      renyi_order: of the filter; None: the best for ``least_steps``.

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
        """Raises BadInputError unless users can have budgets with this clip rule."""
        if type(clip) not in (Flat, Normalized):  # what is run instead bounds as these do
            raise BadInputError(
                f"mechanism.clipping is {clip.kind}, but a user's own bound is that of the whole "
                "gradient: set it to flat"
            )

    def rule(self, clip: Any) -> OwnBound:
        """To each user's own bound, at most the clip norm."""
        assert isinstance(clip, (Flat, Normalized))
        return OwnBound(clip.clip_norm, isinstance(clip, Normalized))

    def empty_sampler(self, made: Any) -> Any:
        """The sampler without budgets, in which every unit has left already.

        The run (``training.filtered``) replaces that as it learns how long each stays.
        """
        nobody = np.zeros(made.population, np.int64)
        return dataclasses.replace(made, scheme=PoissonWithDropout(made.scheme.draw_prob, nobody))

    def fitted_to(self, steps: int) -> IndividualBudget:
        """With the budget of half the steps, unless it has one.

        Raises:
          BadInputError: everybody can pay for all steps.
        """
        least = max(1, steps // 2) if self.least_steps is None else self.least_steps
        if least >= steps:
            raise BadInputError(
                f"mechanism.least_steps is {least}, but the run has {steps} steps, so that nobody "
                "would ever leave: set it lower, or let nobody have a budget of their own "
                "(mechanism.kind=uls or els), which needs less noise"
            )
        return dataclasses.replace(self, least_steps=least)

    def with_order(self, budget_event: Any, delta: float) -> IndividualBudget:
        """With the order at which the budget costs least, unless it has one.

        Args:
          budget_event: of ``least_steps`` steps.
          delta: of the guarantee.
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
        """What a step costs each user."""
        of = (*self._chosen(), _max_units(contribution))
        return RenyiFilter.of(sigma, _poisson(scheme).draw_prob, *of)

    def event(
        self, sigma: float, scheme: Any, contribution: Contribution | None, steps: int
    ) -> Any:
        """The filter's, once anybody can have spent a budget."""
        given = (sigma, _poisson(scheme).draw_prob, *self._chosen(), steps)
        return accounting.events.individual(*given, group_size=_max_units(contribution))

    def accountant(self, scheme: Any) -> Accountant:
        """Which calibrates the noise of a budget."""
        return "pld" if _poisson(scheme).draw_prob == 1 else "rdp"

    def describe(self, sampling: str, contribution: Contribution | None) -> str:
        """The sampling in words, with who leaves."""
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
        """How the epsilon of the filter is computed, for the guarantee."""
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
            "budgets of users' own are proven for Poisson sampling alone: take it, or leave out "
            "mechanism.budget"
        )
    return scheme
