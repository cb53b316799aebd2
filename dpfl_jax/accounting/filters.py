"""Privacy filters: what a budget allows where each cost is chosen after seeing earlier results.

For an account: which runs may begin. Composing the privacy losses of adaptively chosen runs does
not bound what the sequence reveals. A sum that grows by known amounts does, if its limit is fixed
before the first run. There are three such sums, each with its part of delta, and a run may begin if
one of them allows it:

- the number of steps, if all runs consist of steps of one kind;
- the squared means of Gaussians that dominate the runs except with a small probability;
- the Renyi divergences at one order.

Proof: docs/theory/ledger.md.

Within a run (``RenyiFilter``): every unit pays for its steps, and takes part only while its budget
lasts. Source: Feldman and Zrnic, "Individual privacy accounting via a Renyi filter" (2021, arXiv
2008.11193), with Poisson sampling. The norm of what a unit adds to a sum is bounded by one of a few
public levels, C 2^(-j/4). A step costs a unit the Renyi divergence of a Poisson-sampled Gaussian at
the unit's level, whether or not the unit is drawn, at one public order, in the larger direction.
Every unit's budget is the cost of ``least_steps`` steps at the clip norm.

Where parts of units are drawn (examples of users), each part is bounded by the unit's level, and a
binomial number of parts shifts the Gaussian; the number of parts is also rounded up to a public
one. Costs are integers, rounded up, so that adding them is exact.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from scipy import special

from dpfl_jax.accounting.accountant import (
    ADD_OR_REMOVE,
    LARGEST_MEAN_LOSS,
    TooLittleNoiseError,
    epsilon_or_inf,
    profile,
)
from dpfl_jax.accounting.composition import TableTooLargeError
from dpfl_jax.accounting.drawn import RESERVED
from dpfl_jax.accounting.events import composed, els, gaussian
from dpfl_jax.accounting.leaves import Flat, RenyiLeaf, flatten
from dpfl_jax.accounting.renyi import ORDERS, epsilon_from_renyi, renyi_divergences
from dpfl_jax.errors import BadInputError

# ---- runs of one account -------------------------------------------------------------------------

# The parts of delta of the three sums; they add up to 1.
STEPS, GAUSSIANS, RENYI = 0.25, 0.5, 0.25
# The part of the Gaussians' delta for what they do not dominate, and a run's least part of it.
_TAIL, _LEAST_TAIL = 0.25, 1e-4
_POINTS = 500
_TOLERANCE = 1e-4
# Scales the largest budget that an order serves; at this value sampled Gaussians cost least.
_SAMPLED = 0.7


def filtered_epsilon(
    runs: Sequence[dp_accounting.DpEvent],
    delta: float,
    relation: NeighboringRelation = ADD_OR_REMOVE,
) -> float:
    """Returns the least budget that allows these runs, each chosen after seeing the earlier ones.

    A budget that is fixed before the first run holds for all runs if each begins only where this
    number, computed with that run, is at most the budget. For a single run it is its epsilon.

    Args:
      runs: what each run does to one unit, in the order in which they were reserved.
      delta: the budget's delta, in (0, 1).
      relation: adjacency.

    Returns:
      Epsilon >= 0; ``inf`` if no budget allows them.
    """
    some = [event for event in runs if not flatten(event, relation).reveals_nothing]
    if not some:
        return 0.0
    if len(some) == 1:
        # proof: ledger-first-1
        return epsilon_or_inf(some[0], delta, relation)
    # proof: ledger-filter-1
    return min(
        _by_steps(some, STEPS * delta, relation),
        _by_gaussians(some, GAUSSIANS * delta, relation),
        _by_renyi(some, RENYI * delta, relation),
    )


def _by_steps(
    runs: Sequence[dp_accounting.DpEvent], delta: float, relation: NeighboringRelation
) -> float:
    """Epsilon of all runs composed if they consist of one kind of step, else ``inf``."""
    flats = [flatten(event, relation) for event in runs]
    # proof: ledger-steps-1
    kinds = {leaf for flat in flats for leaf, _ in flat.leaves}
    if len(kinds) != 1 or any(flat.gaussian or not flat.private for flat in flats):
        return math.inf
    if isinstance(next(iter(kinds)), RenyiLeaf):
        return math.inf
    return epsilon_or_inf(composed(*runs), delta, relation)


def _by_gaussians(
    runs: Sequence[dp_accounting.DpEvent], delta: float, relation: NeighboringRelation
) -> float:
    """Epsilon of the first run composed with a Gaussian that pays for all later runs."""
    tail = _TAIL * delta
    later = collections.Counter(flatten(event, relation) for event in runs[1:])
    try:
        squared = _least(
            lambda most: sum(n * _share(flat, most, tail) for flat, n in later.items()) <= 1.0
        )
    except (TooLittleNoiseError, TableTooLargeError):
        return math.inf
    if squared == math.inf:
        return math.inf
    # proof: ledger-gaussians-2
    whole = composed(runs[0], gaussian(1.0 / math.sqrt(squared), 1))
    return epsilon_or_inf(whole, (delta - tail) / (1.0 - tail), relation)


def _share(flat: Flat, most: float, tail: float) -> float:
    """The least s at which a Gaussian of squared mean s * ``most`` pays for a run; inf above 1.

    The Gaussian must dominate the run, except with probability s * ``tail``.
    """
    if not flat.private:
        return math.inf
    if not flat.leaves:
        return flat.gaussian / most
    curves = profile(flat, _LEAST_TAIL * tail, _POINTS)
    # proof: ledger-gaussians-1
    return _least(lambda s: all(dominates(s * most, s * tail, *c) for c in curves), 1.0)


def _least(holds: Callable[[float], bool], most: float = 2 * LARGEST_MEAN_LOSS) -> float:
    """The least number at which the monotone ``holds`` is true, rounded up; inf above ``most``."""
    if not holds(most):
        return math.inf
    low, high = 1e-12 * most, most
    while high > low * (1.0 + _TOLERANCE):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def dominates(squared: float, apart: float, epsilons: np.ndarray, deltas: np.ndarray) -> bool:
    """Returns whether a Gaussian dominates a curve of deltas, except with a small probability.

    Args:
      squared: (mean / standard deviation)^2 of the Gaussian.
      apart: probability with which everything is revealed.
      epsilons: float64 [n], ascending from 0.
      deltas: float64 [n], upper bounds on the hockey-stick divergence, non-increasing.
    """
    # Beyond the last epsilon the divergence does not grow, and the Gaussian's is above ``apart``.
    if not deltas[-1] <= apart < 1.0:
        return False
    mean = math.sqrt(squared)
    middle, half = 0.5 * (epsilons[1:] + epsilons[:-1]), 0.5 * np.diff(epsilons)
    # Both sides of H = P(S) - e^eps Q(S), rounded so that H is not above its value.
    above = special.ndtr(0.5 * mean - middle / mean) * (1.0 - 1e-13)
    below = np.exp(middle + special.log_ndtr(-0.5 * mean - middle / mean)) * (1.0 + 1e-11)
    # In e^eps the run's bound is a chord, and the Gaussian's divergence is convex, so it is above
    # its tangent in the middle. The tangent is above the chord if it is above both ends.
    # proof: ledger-gaussians-3
    ends = ((-half, deltas[:-1]), (half, deltas[1:]))
    return all(
        bool((apart + (1.0 - apart) * (above - below * np.exp(step)) >= bounds).all())
        for step, bounds in ends
    )


def _by_renyi(
    runs: Sequence[dp_accounting.DpEvent], delta: float, relation: NeighboringRelation
) -> float:
    """The least budget by Renyi divergences; which order is used follows from the budget alone."""
    orders = ORDERS[(ORDERS > 1.02) & (ORDERS < 128.0)]
    try:
        divergences = sum(renyi_divergences(event, orders, relation) for event in runs)
    except BadInputError:  # a run without Renyi accounting
        return math.inf
    assert isinstance(divergences, np.ndarray)
    log = -math.log(delta)
    # proof: ledger-renyi-1
    largest = _SAMPLED * log * (2.0 * orders - 1.0) / (orders - 1.0) ** 2
    least = np.append(largest[1:], 0.0)
    largest[0] = math.inf
    delta *= 1.0 - RESERVED
    epsilons = np.array(
        [epsilon_from_renyi(divergences[[i]], orders[[i]], delta) for i in range(len(orders))]
    )
    # An order serves budgets from ``least`` to ``largest`` and refuses those below its epsilon.
    refused = epsilons > least
    return float(np.minimum(epsilons, largest)[refused].max(initial=0.0))


# ---- steps of one run: what each unit has spent and may still spend ------------------------------

LEVELS, PER_HALF = 32, 4
_UNITS = 1 << 30  # the cost of a step at the clip norm
# Absolute and relative rounding errors of a divergence, which is computed from sums near 1.
_ROUNDING, _RELATIVE = 1e-13, 1e-9


def bounds(clip_norm: float) -> np.ndarray:
    """Returns the norm bound of each level, float32 [LEVELS]; the first is the clip norm."""
    return (clip_norm * 2.0 ** (-np.arange(LEVELS) / PER_HALF)).astype(np.float32)


def levels_of(norms: np.ndarray, clip_norm: float) -> np.ndarray:
    """Returns the level, uint8 [n], of the smallest bound at or above each norm; 0 if none is."""
    norms = np.asarray(norms, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.floor(PER_HALF * np.log2(clip_norm / norms))
    steps = np.where(np.isfinite(norms) & ~np.isnan(steps), steps, 0.0)
    return np.clip(steps, 0, LEVELS - 1).astype(np.uint8)


def sizes(most: int) -> tuple[int, ...]:
    """Returns the numbers of parts that have costs: about four per doubling, up to ``most``."""
    steps = range(PER_HALF * most.bit_length() + 1)
    return tuple(sorted({min(most, math.ceil(2 ** (i / PER_HALF))) for i in steps}))


def best_order(event: Any, delta: float) -> float:
    """Returns the order of ``renyi.ORDERS`` at which an event's epsilon is smallest."""
    divergences, delta = renyi_divergences(event), delta * (1 - RESERVED)
    each = [epsilon_from_renyi(divergences[[i]], ORDERS[[i]], delta) for i in range(len(ORDERS))]
    return float(ORDERS[int(np.argmin(each))])


@dataclasses.dataclass(frozen=True)
class RenyiFilter:
    """The costs of steps and the budget that every unit has.

    Attributes:
      costs: a step's cost by number of parts (``sizes``) and level, in units of 2^-30 times the
        cost of a step at the clip norm with ``most`` parts.
      least_steps: number of steps that every unit can pay for.
      order: Renyi order.
      step: divergence of the costliest step, nats.
      most: largest number of parts of a unit.
    """

    costs: tuple[tuple[int, ...], ...]
    least_steps: int
    order: float
    step: float
    most: int = 1

    @classmethod
    def of(
        cls, sigma: float, prob: float, least_steps: int, order: float, most: int = 1
    ) -> RenyiFilter:
        """Returns the filter of Poisson-sampled Gaussians.

        Args:
          sigma: noise multiplier, > 0.
          prob: probability that a part is drawn in a step.
          least_steps: the budget is the cost of so many steps at the clip norm with ``most`` parts.
          order: one of ``renyi.ORDERS``.
          most: largest number of parts of a unit.

        Raises:
          BadInputError: the noise is too small for costs to be computed.
        """
        costs, step = _costs(sigma, prob, order, most)
        return cls(costs, least_steps, order, step, most)

    @property
    def budget(self) -> int:
        """Every unit's budget, in the unit of ``costs``."""
        return self.least_steps * _UNITS

    def steps_left(
        self, spent: np.ndarray, levels: np.ndarray, most: int, parts: np.ndarray | int = 1
    ) -> np.ndarray:
        """Returns how many steps each unit can pay for at its level, int64 [n].

        Args:
          spent: int64 [n], what each unit has spent, in the unit of ``costs``.
          levels: uint8 [n].
          most: largest number of steps counted, at least 0.
          parts: int64 [n], at most ``self.most``; a unit without parts pays as if it had one.
        """
        # proof: individual-filter-1
        return np.minimum((self.budget - spent) // self._costs_of(levels, parts), most)

    def after(
        self, spent: np.ndarray, levels: np.ndarray, steps: int, parts: np.ndarray | int = 1
    ) -> np.ndarray:
        """Returns what units have spent after up to ``steps`` more, as they can pay, int64 [n]."""
        # proof: individual-filter-2
        taken = self.steps_left(spent, levels, steps, parts)
        return spent + taken * self._costs_of(levels, parts)

    def at_most(self, spent: np.ndarray, steps: int) -> np.ndarray:
        """Returns the most that units can spend by ``steps`` more steps at any level, int64 [n]."""
        return np.minimum(spent + steps * _UNITS, self.budget)

    def _costs_of(self, levels: np.ndarray, parts: np.ndarray | int) -> np.ndarray:
        return np.asarray(self.costs)[np.searchsorted(sizes(self.most), parts), levels]

    def epsilons(self, spent: np.ndarray, delta: float) -> np.ndarray:
        """Returns ``spent`` (int64 [n]) as epsilons at the filter's order, float64 [n]; secret."""
        order, delta = np.array([self.order]), delta * (1 - RESERVED)
        amounts, which = np.unique(np.asarray(spent), return_inverse=True)
        divergences = amounts[:, None] * (self.step / _UNITS)
        return np.array([epsilon_from_renyi(d, order, delta) for d in divergences])[which]


@functools.lru_cache(maxsize=64)
def _costs(
    sigma: float, prob: float, order: float, most: int
) -> tuple[tuple[tuple[int, ...], ...], float]:
    """Costs of a step by number of parts and level, and the divergence of the costliest step."""
    multipliers = sigma * 2.0 ** (np.arange(LEVELS) / PER_HALF)
    array = np.array([order])
    divergences = np.array(
        [
            [renyi_divergences(els(s, prob, n, 1), array)[0] for s in multipliers]
            for n in sizes(most)
        ]
    )
    largest = float(divergences[-1, 0])
    if not np.isfinite(divergences).all():
        raise BadInputError(
            f"at noise multiplier {sigma:g} the cost of a step cannot be computed at Renyi order "
            f"{order:g}: raise the noise multiplier"
        )
    # proof: individual-filter-3
    safe = np.ceil(_UNITS * ((divergences + _ROUNDING / (order - 1)) * (1 + _RELATIVE) / largest))
    return tuple(tuple(row) for row in np.minimum(safe, _UNITS).astype(int).tolist()), largest
