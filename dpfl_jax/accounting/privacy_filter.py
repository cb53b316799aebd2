"""A privacy filter: which runs a budget allows if each is chosen after seeing the earlier ones.

Composing the privacy losses of runs that were chosen in this way does not bound what the sequence
reveals. A sum that grows by known amounts does, if its limit is fixed before the first run. There
are three such sums, each with its part of delta, and a run may begin if one of them allows it:

- steps of the first run's kind, for runs that have no others;
- squared means of Gaussians that dominate the runs but for a small probability;
- Renyi divergences of one order.

Proof: docs/theory/ledger.md.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from scipy import special

from dpfl_jax.accounting.accountant import (
    ADD_OR_REMOVE,
    LARGEST_MEAN_LOSS,
    TooLittleNoiseError,
    accountant_of,
    epsilon,
    profile,
)
from dpfl_jax.accounting.composition import TableTooLargeError
from dpfl_jax.accounting.drawn import RESERVED
from dpfl_jax.accounting.events import composed, gaussian
from dpfl_jax.accounting.leaves import Flat, RenyiLeaf, flatten
from dpfl_jax.accounting.renyi import ORDERS, epsilon_from_renyi, renyi_divergences
from dpfl_jax.errors import BadInputError

# Parts of delta; they add up to 1.
STEPS, GAUSSIANS, RENYI = 0.25, 0.5, 0.25
# Part of the Gaussians' delta for what they do not dominate, and least part of that for one run.
_TAIL, _LEAST_TAIL = 0.25, 1e-4
_POINTS = 500
_TOLERANCE = 1e-4
# Where budgets of Gaussians that an order suits best end: sampled Gaussians cost least there.
_SAMPLED = 0.7


def filtered_epsilon(
    runs: Sequence[dp_accounting.DpEvent],
    delta: float,
    relation: NeighboringRelation = ADD_OR_REMOVE,
) -> float:
    """The least budget that allows these runs, each chosen after seeing the earlier ones.

    A budget that is fixed before the first run holds for all of them, whatever they are, if each
    begins only where this number, with it, is at most the budget. Of one run it is its epsilon.

    Args:
      runs: what each does to one unit, in the order in which they were reserved.
      delta: of the budget, in (0, 1).
      relation: adjacency.

    Returns:
      Epsilon >= 0; ``inf`` if no budget allows them.
    """
    some = [event for event in runs if not _reveals_nothing(flatten(event, relation))]
    if not some:
        return 0.0
    if len(some) == 1:
        # proof: ledger-first-1
        return _epsilon(some[0], delta, relation)
    # proof: ledger-filter-1
    return min(
        _by_steps(some, STEPS * delta, relation),
        _by_gaussians(some, GAUSSIANS * delta, relation),
        _by_renyi(some, RENYI * delta, relation),
    )


def _reveals_nothing(flat: Flat) -> bool:
    return flat.private and not flat.leaves and flat.gaussian == 0


def _epsilon(event: dp_accounting.DpEvent, delta: float, relation: NeighboringRelation) -> float:
    """Epsilon of an event fixed beforehand; inf where the noise is too small for any accountant."""
    try:
        accountant = accountant_of(event, relation)
        return epsilon(event, delta, relation=relation, accountant=accountant)
    except (TooLittleNoiseError, TableTooLargeError):
        return math.inf


def _by_steps(
    runs: Sequence[dp_accounting.DpEvent], delta: float, relation: NeighboringRelation
) -> float:
    """Epsilon of all runs as one, if they are made of one kind of step; else inf."""
    flats = [flatten(event, relation) for event in runs]
    # proof: ledger-steps-1
    kinds = {leaf for flat in flats for leaf, _ in flat.leaves}
    if len(kinds) != 1 or any(flat.gaussian or not flat.private for flat in flats):
        return math.inf
    if isinstance(next(iter(kinds)), RenyiLeaf):
        return math.inf
    return _epsilon(composed(*runs), delta, relation)


def _by_gaussians(
    runs: Sequence[dp_accounting.DpEvent], delta: float, relation: NeighboringRelation
) -> float:
    """Epsilon of the first run and of a Gaussian that pays for all others."""
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
    return _epsilon(whole, (delta - tail) / (1.0 - tail), relation)


def _share(flat: Flat, most: float, tail: float) -> float:
    """The part that one run takes; ``inf`` if all of it is not enough.

    It is the least s with which a Gaussian of the squared mean s ``most`` dominates the run, but
    for a probability of s ``tail``.
    """
    if not flat.private:
        return math.inf
    if not flat.leaves:
        return flat.gaussian / most
    curves = profile(flat, _LEAST_TAIL * tail, _POINTS)
    # proof: ledger-gaussians-1
    return _least(lambda s: all(dominates(s * most, s * tail, *c) for c in curves), 1.0)


def _least(holds: Callable[[float], bool], most: float = 2 * LARGEST_MEAN_LOSS) -> float:
    """A number little above the least at which ``holds``, which must be monotone; inf if none."""
    if not holds(most):
        return math.inf
    low, high = 1e-12 * most, most
    while high > low * (1.0 + _TOLERANCE):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def dominates(squared: float, apart: float, epsilons: np.ndarray, deltas: np.ndarray) -> bool:
    """Whether a Gaussian dominates, but for a probability, whatever has a curve of deltas.

    Args:
      squared: mean of the Gaussian, over its standard deviation, squared.
      apart: probability with which everything is revealed.
      epsilons: float64 [n], ascending from 0.
      deltas: float64 [n], upper bounds on the hockey-stick divergence, not growing.
    """
    # Beyond the last one the divergence does not grow, and the Gaussian's is above ``apart``.
    if not deltas[-1] <= apart < 1.0:
        return False
    mean = math.sqrt(squared)
    middle, half = 0.5 * (epsilons[1:] + epsilons[:-1]), 0.5 * np.diff(epsilons)
    # Both sides of H = P(S) - e^eps Q(S), rounded so that H is not above its value.
    above = special.ndtr(0.5 * mean - middle / mean) * (1.0 - 1e-13)
    below = np.exp(middle + special.log_ndtr(-0.5 * mean - middle / mean)) * (1.0 + 1e-11)
    # In e^eps the run's bound is a chord and the Gaussian's divergence is convex, so above its
    # tangent in the middle; the tangent is above the chord if it is so at both ends.
    # proof: ledger-gaussians-3
    ends = ((-half, deltas[:-1]), (half, deltas[1:]))
    return all(
        bool((apart + (1.0 - apart) * (above - below * np.exp(step)) >= bounds).all())
        for step, bounds in ends
    )


def _by_renyi(
    runs: Sequence[dp_accounting.DpEvent], delta: float, relation: NeighboringRelation
) -> float:
    """The least budget by Renyi divergences, where each budget has the order that suits it."""
    orders = ORDERS[(ORDERS > 1.02) & (ORDERS < 128.0)]
    try:
        divergences = sum(renyi_divergences(event, orders, relation) for event in runs)
    except BadInputError:  # of a run that has none
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
    # An order serves budgets from ``least`` to ``largest``, and refuses those below its epsilon.
    refused = epsilons > least
    return float(np.minimum(epsilons, largest)[refused].max(initial=0.0))
