"""Personal sampling rates: from each record's own epsilon to how often it may be sampled.

Liu et al. 2024 (rPDP-FL): noise and clipping are common, and a record's rate q is what makes its
epsilon true. Epsilon grows with q, so the rate of a budget is found by bisection, on a fixed
geometric grid whose points are evaluated by the tight accountant (PLD; silos drawn first, records
second), each once for all budgets: a rate that is returned has itself been certified, nothing is
interpolated, and the rest is rounded down.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import dp_accounting
import numpy as np

from dpfl_jax.accounting import closed_forms, events
from dpfl_jax.accounting.accountant import (
    ADD_OR_REMOVE,
    FINE,
    Accountant,
    TooLittleNoiseError,
    check_delta,
    epsilon_curve,
    epsilon_or_inf,
)
from dpfl_jax.accounting.cells import NoisedSums, TwoStagePoisson
from dpfl_jax.accounting.composition import TableTooLargeError
from dpfl_jax.errors import BadInputError, positive

# Rates are powers of e^-0.005: at most half a percent below the largest that a budget allows.
LOG_STEP = 0.005
LEAST_RATE = 1e-6
Unreachable = Literal["error", "exclude"]


class UnreachableBudgetError(BadInputError):
    """A budget that no sampling rate keeps.

    Attributes:
      row: of the first such record.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


@dataclasses.dataclass(frozen=True)
class TwoStage:
    """The setting that all records of a run have in common.

    Attributes:
      noise_multiplier: sigma of every local step.
      local_steps: tau, in a round.
      rounds: T.
      participation_prob: lambda, of a silo in a round; which silos take part is public.
      delta: the same for all records.
    """

    noise_multiplier: float
    local_steps: int
    rounds: int
    participation_prob: float
    delta: float

    def __post_init__(self) -> None:
        sigma = events.check_noise(self.noise_multiplier)
        positive("the noise multiplier of personal sampling rates", sigma)
        events.check_count(self.local_steps, "number of local steps", 1)
        events.check_count(self.rounds, "number of rounds", 1)
        events.check_prob(self.participation_prob, "participation probability")
        object.__setattr__(self, "delta", check_delta(self.delta))

    def event(self, rate: float, rounds: int | None = None) -> dp_accounting.DpEvent:
        """What the run does to a record of this rate, in ``rounds`` rounds (default all)."""
        steps = self.local_steps * (self.rounds if rounds is None else rounds)
        return NoisedSums(self.scheme(rate), self.noise_multiplier, steps, 1).event()

    def scheme(self, rate: float) -> TwoStagePoisson:
        """The sampling scheme of a record of this rate."""
        return TwoStagePoisson(float(rate), self.participation_prob, self.local_steps)

    def epsilon(self, rate: float, accountant: Accountant = "pld") -> float:
        """Upper bound on epsilon of a record that is sampled at ``rate``; ``inf`` if too large."""
        return epsilon_or_inf(self.event(rate), self.delta, ADD_OR_REMOVE, accountant=accountant)

    def closed_form(self) -> tuple[float, int, int, float, float]:
        """Arguments of the functions of ``closed_forms`` that follow the rate."""
        return (
            self.noise_multiplier,
            self.local_steps,
            self.rounds,
            self.participation_prob,
            self.delta,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class PersonalRates:
    """Rates of records, and what they cost.

    Attributes:
      rates: float64 [n], q in [0, 1]; 0 for records that take no part.
      epsilons: float64 [n], upper bounds on what each record spends in all rounds.
    """

    rates: np.ndarray
    epsilons: np.ndarray


class RateSolver:
    """Epsilon of grid rates, computed on demand and cached. One per setting: use ``solver``."""

    def __init__(self, setting: TwoStage) -> None:
        self.setting = setting
        self.grid = np.exp(-LOG_STEP * np.arange(math.ceil(-math.log(LEAST_RATE) / LOG_STEP) + 1))
        self._known: dict[int, float] = {}

    @property
    def evaluations(self) -> int:
        """Rates accounted so far: what a solution cost."""
        return len(self._known)

    def at(self, index: int) -> float:
        """Epsilon of the rate ``grid[index]``."""
        if index not in self._known:
            self._known[index] = self.setting.epsilon(float(self.grid[index]))
        return self._known[index]

    @property
    def smallest(self) -> float:
        """Epsilon of the smallest rate on the grid."""
        return self.at(len(self.grid) - 1)

    def solve(self, budgets: np.ndarray, unreachable: Unreachable = "error") -> PersonalRates:
        """The largest certified rate for each budget.

        Args:
          budgets: float [n], epsilon of each record, >= 0; ``inf`` for records that need none, 0
            for those that take no part (rate 0, though delta alone would let them in a little).
          unreachable: what to do with a budget above 0 and below the epsilon of the smallest rate:
            ``error``, or ``exclude`` the record (rate 0).

        Raises:
          BadInputError: a budget that is no number >= 0, or (with ``error``) an unreachable one;
            the sentence names the first such row.
        """
        budgets = check_budgets(budgets)
        distinct, inverse = np.unique(budgets, return_inverse=True)
        nothing = int(np.searchsorted(distinct, 0.0, "right"))  # a budget of 0: never sampled
        last = len(self.grid) - 1
        indices = np.full(len(distinct), last)
        # Distinct budgets in order share their neighbours' evaluations: halve the index range.
        stack = [(nothing, len(distinct), 0, last)]
        while stack:
            first, stop, low, high = stack.pop()
            if first == stop:
                continue
            if low == high:  # rates before ``low`` cost too much for all of these
                indices[first:stop] = low
                continue
            middle = (low + high) // 2
            # Budgets from ``split`` on can afford the larger rate grid[middle].
            split = first + int(np.searchsorted(distinct[first:stop], self.at(middle), "left"))
            stack.append((first, split, middle + 1, high))
            stack.append((split, stop, low, middle))
        costs = np.array([0.0] * nothing + [self.at(k) for k in indices[nothing:]])
        # Epsilons of neighbouring rates may differ by rounding: step down until each budget holds.
        # proof: rpdp-rate-1
        while (again := (costs > distinct) & (indices < last)).any():
            indices[again] += 1
            costs[again] = [self.at(k) for k in indices[again]]
        rates = np.where(distinct > 0, self.grid[indices], 0.0)
        short = costs > distinct
        if short.any():
            row = int(np.flatnonzero(short[inverse])[0])
            if unreachable == "error":
                raise UnreachableBudgetError(
                    f"row {row} asks for epsilon {budgets[row]:g}, but a record that is sampled as "
                    f"rarely as {self.grid[-1]:.2g} spends {self.smallest:.4g}, the smallest that "
                    "can be reached here: raise its budget or the noise multiplier, or exclude it",
                    row,
                )
            rates, costs = np.where(short, 0.0, rates), np.where(short, 0.0, costs)
        return PersonalRates(rates[inverse], costs[inverse])

    def spent(self, rates: np.ndarray, exact_up_to: int = 64) -> np.ndarray:
        """Upper bounds on epsilon of records of given rates, float64 [n].

        Args:
          rates: float [n], in [0, 1].
          exact_up_to: with more distinct rates than this, they are rounded up to the grid.
        """
        rates = np.asarray(rates, dtype=np.float64)
        if rates.size and not ((rates >= 0) & (rates <= 1)).all():
            raise BadInputError("every sampling rate must be a number in [0, 1]")
        distinct, inverse = np.unique(rates, return_inverse=True)
        costs = np.zeros(len(distinct))
        for i, rate in enumerate(distinct.tolist()):
            if rate == 0.0:
                continue
            index = self.index_above(rate)
            if self.grid[index] == rate or len(distinct) > exact_up_to:
                costs[i] = self.at(index)
            else:
                costs[i] = self.setting.epsilon(rate)
        return costs[inverse]

    def index_above(self, rate: float) -> int:
        """The smallest grid rate that is at least ``rate``."""
        index = min(int(-math.log(rate) / LOG_STEP) + 1, len(self.grid) - 1)
        while index > 0 and self.grid[index] < rate:
            index -= 1
        return index

    def rounds_within(self, rates: np.ndarray, budgets: np.ndarray) -> np.ndarray:
        """After how many rounds each record must leave, so that none exceeds its budget.

        It depends on a record's own rate and budget only: its rate is rounded up to the grid,
        always, which can only shorten it. Rates of ``solve`` lie on the grid.

        Returns:
          int64 [n].
        """
        rates, budgets = np.asarray(rates, np.float64), check_budgets(budgets)
        rounds = self.setting.rounds
        out = np.full(len(rates), rounds, np.int64)
        over = np.flatnonzero(self.spent(rates, exact_up_to=0) > budgets)
        if not len(over):
            return out
        indices = np.array([self.index_above(r) for r in rates[over].tolist()])
        for index in np.unique(indices).tolist():
            mine = over[indices == index]
            curve = self._curve(index)
            # Non-decreasing in the rounds: how many entries fit.
            # proof: rpdp-leaving-2
            out[mine] = np.searchsorted(curve, budgets[mine], side="right")
        return out

    def spent_after(self, rates: np.ndarray, stay: np.ndarray, rounds: int) -> np.ndarray:
        """Upper bounds on epsilon after ``rounds`` rounds of records that leave after ``stay``."""
        rates, stay = np.asarray(rates, np.float64), np.minimum(stay, rounds)
        full = stay >= self.setting.rounds
        out = np.zeros(len(rates))
        out[full] = self.spent(rates[full], exact_up_to=0)
        part = np.flatnonzero(~full & (stay > 0) & (rates > 0))
        indices = np.array([self.index_above(r) for r in rates[part].tolist()], np.int64)
        for index in np.unique(indices).tolist():
            mine = part[indices == index]
            # At most that of all rounds, of which another discretisation may give a little less.
            out[mine] = np.minimum(self._curve(index)[stay[mine] - 1], self.at(index))
        return out

    @functools.lru_cache(maxsize=4096)  # noqa: B019  (solvers live as long as the process)
    def _curve(self, index: int) -> np.ndarray:
        """Epsilon of grid[index] after 1, 2, ... rounds, made non-decreasing."""
        event = self.setting.event(float(self.grid[index]), 1)
        counts = list(range(1, self.setting.rounds + 1))
        try:
            curve = epsilon_curve(event, counts, self.setting.delta, resolution=FINE)
        except (TooLittleNoiseError, TableTooLargeError):
            curve = [math.inf] * len(counts)
        return np.maximum.accumulate(np.asarray(curve))


@functools.lru_cache(maxsize=32)
def solver(setting: TwoStage) -> RateSolver:
    """The solver of a setting, shared by all of this process."""
    return RateSolver(setting)


def check_budgets(budgets: np.ndarray) -> np.ndarray:
    """Returns them as float64 [n]; raises BadInputError that names the first bad row."""
    budgets = np.asarray(budgets, dtype=np.float64)
    if budgets.ndim != 1:
        raise BadInputError(f"budgets must be one number per record, not {budgets.shape}")
    bad = np.flatnonzero(~(budgets >= 0))
    if len(bad):
        raise BadInputError(
            f"row {bad[0]} has the budget {budgets[bad[0]]}, but every record's epsilon must be a "
            "number >= 0 (inf for none)"
        )
    return budgets


def certified_rates(
    budgets: np.ndarray, setting: TwoStage, unreachable: Unreachable = "error"
) -> PersonalRates:
    """The largest rate that each record's epsilon allows, certified. See ``RateSolver.solve``."""
    return solver(setting).solve(budgets, unreachable)


@dataclasses.dataclass(frozen=True, eq=False)
class FittedRates:
    """Rates of Simulation-CurveFitting, and where they break their promise.

    Attributes:
      rates: float64 [n].
      epsilons: float64 [n], what they cost by the tight accountant.
      renyi_epsilons: float64 [n], what they cost by the Renyi accountant that was fitted.
      violations: records whose ``epsilons`` exceed their budget.
      renyi_violations: records whose ``renyi_epsilons`` do.
      worst: largest ratio of ``epsilons`` to the budget.
      renyi_worst: largest ratio of ``renyi_epsilons`` to the budget.
      fit: the curve.
    """

    rates: np.ndarray
    epsilons: np.ndarray
    renyi_epsilons: np.ndarray
    violations: int
    renyi_violations: int
    worst: float
    renyi_worst: float
    fit: closed_forms.CurveFit

    def to_json(self) -> dict[str, Any]:
        """Counts and worst ratios, as JSON values."""
        names: tuple[str, ...] = ("violations", "worst")
        if not np.isnan(self.renyi_epsilons).any():
            names += ("renyi_violations", "renyi_worst")
        return {"records": len(self.rates)} | {name: getattr(self, name) for name in names}


@functools.lru_cache(maxsize=32)
def _fit(setting: TwoStage) -> closed_forms.CurveFit:
    return closed_forms.fit_curve(*setting.closed_form())


def fitted_rates(budgets: np.ndarray, setting: TwoStage, exact_up_to: int = 512) -> FittedRates:
    """Simulation-CurveFitting (Liu et al. 2024, Algorithm 2): NOT CERTIFIED; counts violations.

    Args:
      budgets: float [n], > 0.
      setting: of the run.
      exact_up_to: with more distinct budgets than this, costs are those of the next grid rates,
        half a percent larger, and Renyi costs (an accounting for each) are left out: NaN.
    """
    budgets = check_budgets(budgets)
    fit = _fit(setting)
    distinct, inverse = np.unique(budgets, return_inverse=True)
    rates = np.array([fit.rate(float(b)) for b in distinct])
    costs = solver(setting).spent(rates, exact_up_to=exact_up_to)
    renyi = np.full(len(distinct), np.nan)
    if len(distinct) <= exact_up_to:
        form = setting.closed_form()
        renyi = np.array([closed_forms.epsilon_two_stage(q, *form)[0] if q else 0.0 for q in rates])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio, renyi_ratio = np.nan_to_num(costs / distinct), np.nan_to_num(renyi / distinct)
    return FittedRates(
        rates=rates[inverse],
        epsilons=costs[inverse],
        renyi_epsilons=renyi[inverse],
        violations=int((costs > distinct)[inverse].sum()),
        renyi_violations=int((renyi > distinct)[inverse].sum()),
        worst=float(ratio.max(initial=0.0)),
        renyi_worst=float(renyi_ratio.max(initial=0.0)),
        fit=fit,
    )
