"""Personal sampling rates: how often a record may be sampled, given its personal epsilon.

Liu et al. 2024 (rPDP-FL): noise and clip norm are common to all records, and a record's sampling
rate q makes its epsilon hold. Epsilon grows with q, so a budget's rate is found by bisection on a
fixed geometric grid. The tight accountant (PLD; silos drawn first, records second) evaluates each
grid point at most once for all budgets. Every rate that is returned has been certified, without
interpolation; rates between grid points are rounded down.
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

# Rates are powers of e^-0.005: at most half a percent below the largest rate a budget allows.
LOG_STEP = 0.005
LEAST_RATE = 1e-6
Unreachable = Literal["error", "exclude"]


class UnreachableBudgetError(BadInputError):
    """No sampling rate keeps a record's budget.

    Attributes:
      row: row of the first such record.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


@dataclasses.dataclass(frozen=True)
class TwoStage:
    """The setting that all records of a run have in common.

    Attributes:
      noise_multiplier: sigma of every local step.
      local_steps: tau, local steps in a round.
      rounds: T, number of rounds.
      participation_prob: lambda, probability of a silo in a round; which silos take part is public.
      delta: delta of all records.
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
        """Returns what ``rounds`` rounds (default: all) do to a record with this sampling rate."""
        steps = self.local_steps * (self.rounds if rounds is None else rounds)
        return NoisedSums(self.scheme(rate), self.noise_multiplier, steps, 1).event()

    def scheme(self, rate: float) -> TwoStagePoisson:
        """Returns the sampling scheme of a record with this sampling rate."""
        return TwoStagePoisson(float(rate), self.participation_prob, self.local_steps)

    def epsilon(self, rate: float, accountant: Accountant = "pld") -> float:
        """Returns an upper bound on epsilon of a record sampled at ``rate``, or ``inf``."""
        return epsilon_or_inf(self.event(rate), self.delta, ADD_OR_REMOVE, accountant=accountant)

    def closed_form(self) -> tuple[float, int, int, float, float]:
        """Returns the arguments that functions of ``closed_forms`` take after the rate."""
        return (
            self.noise_multiplier,
            self.local_steps,
            self.rounds,
            self.participation_prob,
            self.delta,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class PersonalRates:
    """Sampling rates of records, and what they cost.

    Attributes:
      rates: float64 [n], q in [0, 1]; 0 for records that take no part.
      epsilons: float64 [n], upper bounds on the epsilon that each record spends in all rounds.
    """

    rates: np.ndarray
    epsilons: np.ndarray


class RateSolver:
    """Epsilon of grid rates, computed on demand and cached; ``solver`` shares one per setting."""

    def __init__(self, setting: TwoStage) -> None:
        self.setting = setting
        self.grid = np.exp(-LOG_STEP * np.arange(math.ceil(-math.log(LEAST_RATE) / LOG_STEP) + 1))
        self._known: dict[int, float] = {}

    @property
    def evaluations(self) -> int:
        """Number of grid rates that were accounted so far."""
        return len(self._known)

    def at(self, index: int) -> float:
        """Returns epsilon of the rate ``grid[index]``."""
        if index not in self._known:
            self._known[index] = self.setting.epsilon(float(self.grid[index]))
        return self._known[index]

    @property
    def smallest(self) -> float:
        """Epsilon of the smallest rate on the grid."""
        return self.at(len(self.grid) - 1)

    def solve(self, budgets: np.ndarray, unreachable: Unreachable = "error") -> PersonalRates:
        """Returns the largest certified rate for each budget.

        Args:
          budgets: float [n], each record's epsilon, >= 0. ``inf`` is for records without a limit,
            0 for records that take no part (although delta alone would allow a small rate).
          unreachable: what to do with a budget above 0 and below the epsilon of the smallest rate:
            ``error``, or ``exclude`` the record (rate 0).

        Raises:
          BadInputError: a budget is not a number >= 0.
          UnreachableBudgetError: with ``error``, a budget cannot be reached.
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
            if low == high:  # larger rates, before ``low``, exceed all of these budgets
                indices[first:stop] = low
                continue
            middle = (low + high) // 2
            # Budgets from ``split`` on allow grid[middle].
            split = first + int(np.searchsorted(distinct[first:stop], self.at(middle), "left"))
            stack.append((first, split, middle + 1, high))
            stack.append((split, stop, low, middle))
        costs = np.array([0.0] * nothing + [self.at(k) for k in indices[nothing:]])
        # Rounding may make epsilon fall with the rate: step down until each budget holds.
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
                    f"row {row} asks for epsilon {budgets[row]:g}, but even a record with the "
                    f"smallest sampling rate, {self.grid[-1]:.2g}, spends {self.smallest:.4g}: "
                    "raise its budget or the noise multiplier, or exclude the record",
                    row,
                )
            rates, costs = np.where(short, 0.0, rates), np.where(short, 0.0, costs)
        return PersonalRates(rates[inverse], costs[inverse])

    def spent(self, rates: np.ndarray, exact_up_to: int = 64) -> np.ndarray:
        """Returns upper bounds on epsilon of records with these sampling rates, float64 [n].

        Args:
          rates: float [n], in [0, 1].
          exact_up_to: if there are more distinct rates than this, they are rounded up to the grid.
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
        """Returns the index of the smallest grid rate that is at least ``rate``."""
        index = min(int(-math.log(rate) / LOG_STEP) + 1, len(self.grid) - 1)
        while index > 0 and self.grid[index] < rate:
            index -= 1
        return index

    def rounds_within(self, rates: np.ndarray, budgets: np.ndarray) -> np.ndarray:
        """Returns the rounds after which each record must leave to keep its budget, int64 [n].

        A record's result depends on its rate and budget alone. Its rate is always rounded up to the
        grid, which can only shorten its stay; rates of ``solve`` lie on the grid.
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
            # The curve does not decrease, so this counts the rounds that the budget allows.
            # proof: rpdp-leaving-2
            out[mine] = np.searchsorted(curve, budgets[mine], side="right")
        return out

    def spent_after(self, rates: np.ndarray, stay: np.ndarray, rounds: int) -> np.ndarray:
        """Returns upper bounds on epsilon after ``rounds`` rounds, float64 [n].

        ``rates`` is float [n]; ``stay``, int [n], is how many rounds each record takes part in.
        """
        rates, stay = np.asarray(rates, np.float64), np.minimum(stay, rounds)
        full = stay >= self.setting.rounds
        out = np.zeros(len(rates))
        out[full] = self.spent(rates[full], exact_up_to=0)
        part = np.flatnonzero(~full & (stay > 0) & (rates > 0))
        indices = np.array([self.index_above(r) for r in rates[part].tolist()], np.int64)
        for index in np.unique(indices).tolist():
            mine = part[indices == index]
            # The epsilon of all rounds is a bound, too: its discretisation may give a little less.
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
    """Returns the solver of a setting, which the whole process shares."""
    return RateSolver(setting)


def check_budgets(budgets: np.ndarray) -> np.ndarray:
    """Returns the budgets as float64 [n]; raises BadInputError that names the first bad row."""
    budgets = np.asarray(budgets, dtype=np.float64)
    if budgets.ndim != 1:
        raise BadInputError(f"budgets must be one number per record, not of shape {budgets.shape}")
    bad = np.flatnonzero(~(budgets >= 0))
    if len(bad):
        raise BadInputError(
            f"row {bad[0]} has the budget {budgets[bad[0]]}, but every record's epsilon must be a "
            "number >= 0 (inf for no limit)"
        )
    return budgets


def certified_rates(
    budgets: np.ndarray, setting: TwoStage, unreachable: Unreachable = "error"
) -> PersonalRates:
    """Returns the largest certified rate for each record's epsilon, as ``RateSolver.solve``."""
    return solver(setting).solve(budgets, unreachable)


@dataclasses.dataclass(frozen=True, eq=False)
class FittedRates:
    """Rates by Simulation-CurveFitting, and how far they exceed the budgets.

    Attributes:
      rates: float64 [n], sampling rates.
      epsilons: float64 [n], what the rates cost by the tight accountant.
      renyi_epsilons: float64 [n], what they cost by the Renyi accountant that was fitted.
      violations: number of records whose ``epsilons`` exceed their budget.
      renyi_violations: number of records whose ``renyi_epsilons`` exceed their budget.
      worst: largest ratio of ``epsilons`` to the budget.
      renyi_worst: largest ratio of ``renyi_epsilons`` to the budget.
      fit: the fitted curve.
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
        """Returns counts and worst ratios as JSON values."""
        names: tuple[str, ...] = ("violations", "worst")
        if not np.isnan(self.renyi_epsilons).any():
            names += ("renyi_violations", "renyi_worst")
        return {"records": len(self.rates)} | {name: getattr(self, name) for name in names}


@functools.lru_cache(maxsize=32)
def _fit(setting: TwoStage) -> closed_forms.CurveFit:
    return closed_forms.fit_curve(*setting.closed_form())


def fitted_rates(budgets: np.ndarray, setting: TwoStage, exact_up_to: int = 512) -> FittedRates:
    """Returns rates by Simulation-CurveFitting (Liu et al. 2024, Algorithm 2). NOT CERTIFIED.

    Args:
      budgets: float [n], > 0, each record's epsilon.
      setting: the run's setting.
      exact_up_to: if there are more distinct budgets than this, costs are those of the next larger
        grid rates (half a percent above at most), and Renyi costs, which are slow, are NaN.
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
