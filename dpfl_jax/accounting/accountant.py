"""Epsilon and delta of an event by privacy-loss distributions (PLD), which are upper bounds.

The grid adapts to the answer: at the order that determines it, the Renyi divergence is overstated
by a factor of about 1 + resolution^2 / 6, and so is the squared noise multiplier for a target.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_FLOOR, Decimal, localcontext
from fractions import Fraction
from typing import Any, Literal, TypeVar

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation, gaussian_mechanism

from dpfl_jax.accounting import renyi
from dpfl_jax.accounting.composition import Composition, Part, TableTooLargeError
from dpfl_jax.accounting.discretize import StepLoss
from dpfl_jax.accounting.drawn import RESERVED
from dpfl_jax.accounting.leaves import ApproximateLeaf, Flat, Leaf, MixtureLeaf, RenyiLeaf, flatten
from dpfl_jax.errors import BadInputError, at_least, require

Accountant = Literal["pld", "rdp", "zcdp"]
Answer = TypeVar("Answer")
Number = TypeVar("Number", int, float)

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighboringRelation.REPLACE_ONE

# Resolutions that overstate epsilon by about 0.008 % and 0.002 %.
FINE = 0.03
FINEST = 0.015

# Beyond this an answer would be meaningless, and computing it could take all memory.
LARGEST_MEAN_LOSS = 1e4
# Least length of a cell, in standard deviations of the noise.
LEAST_SPACING = 1e-4
DIRECTIONS = ("remove", "add")
# The mass cut off must be representable as a floating-point number.
_LEAST_LOG_TAIL = -600.0
_LEAST_DELTA = 1e-200


class TooLittleNoiseError(BadInputError):
    """The guarantee would be too weak to be meaningful, or to be computed."""


def check_delta(delta: float) -> float:
    """Returns delta as a Python float, because NumPy compares with a float32 in float32.

    Raises:
      BadInputError: delta is not in (0, 1), or is too small for tails to be computed.

    Examples:
      >>> from dpfl_jax.accounting import check_delta
      >>> check_delta(1e-5)
      1e-05
    """
    require(
        isinstance(delta, numbers.Real) and 0.0 < delta < 1.0,
        "delta",
        delta,
        "a number above 0 and below 1",
        "a usual choice is below one over the number of units",
    )
    why = f"tails of privacy losses are not computed below {_LEAST_DELTA:g}"
    at_least("delta", delta, _LEAST_DELTA, advice=why)
    return float(delta)


def check_epsilon(epsilon: float) -> float:
    """Returns epsilon as a Python float, for the reason of ``check_delta``.

    Raises:
      BadInputError: it is not finite and positive.
    """
    good = isinstance(epsilon, numbers.Real) and math.isfinite(epsilon) and epsilon > 0
    require(good, "epsilon", epsilon, "a finite number above 0")
    return float(epsilon)


def epsilon(
    event: dp_accounting.DpEvent,
    delta: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
    resolution: float = FINE,
    accountant: Accountant = "pld",
) -> float:
    """Returns an upper bound on epsilon at ``delta``.

    Args:
      event: what the mechanism does to one privacy unit.
      delta: in (0, 1); a share of 2^-20 pays for how the noise is drawn (``drawn``).
      relation: adjacency; the events of this package are add-or-remove unless they say otherwise.
      resolution: epsilon may be too large by about resolution^2 / 12 of itself; smaller is slower.
      accountant: "pld" (tight), or "rdp" or "zcdp" (looser, for comparison).

    Returns:
      Epsilon >= 0, in nats; ``inf`` if there is no finite guarantee (no noise, not private).

    Raises:
      BadInputError: delta is out of range, no accountant knows the event, or the table would not
        fit in memory.

    Examples:
      >>> from dpfl_jax import accounting
      >>> event = accounting.events.uls(noise_multiplier=1.0, sampling_prob=0.01, steps=1000)
      >>> round(accounting.epsilon(event, delta=1e-5), 3)
      1.828
    """
    delta = check_delta(delta)
    if accountant != "pld":
        return _loose_epsilon(event, delta * (1 - RESERVED), relation, accountant)
    flat = flatten(event, relation)
    if not flat.private:
        return math.inf
    delta *= 1 - _reserved(flat)
    if not flat.leaves:
        return _gaussian_epsilon(flat.gaussian, delta)
    return _flat_epsilon(flat, delta, resolution)


def accountant_of(
    event: dp_accounting.DpEvent, relation: NeighboringRelation = ADD_OR_REMOVE
) -> Accountant:
    """Returns the tightest accountant for an event: "rdp" if a part has no known losses.

    Examples:
      >>> from dpfl_jax import accounting
      >>> accounting.accountant_of(accounting.events.gaussian(1.0, steps=10))
      'pld'
    """
    known = not any(isinstance(leaf, RenyiLeaf) for leaf, _ in flatten(event, relation).leaves)
    return "pld" if known else "rdp"


def epsilon_or_inf(
    event: dp_accounting.DpEvent,
    delta: float,
    relation: NeighboringRelation,
    *,
    resolution: float = FINE,
    accountant: Accountant | None = None,
) -> float:
    """Returns ``epsilon``, by default by the tightest accountant; ``inf`` if noise is too small."""
    known = accountant or accountant_of(event, relation)
    try:
        return epsilon(event, delta, relation=relation, resolution=resolution, accountant=known)
    except (TooLittleNoiseError, TableTooLargeError):
        return math.inf


def delta(
    event: dp_accounting.DpEvent,
    epsilon: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
    resolution: float = FINE,
) -> float:
    """Returns an upper bound on delta at ``epsilon`` >= 0.

    A share of 2^-20 pays for how the noise is drawn. (It suffices down to a delta of about 1e-16;
    a guarantee says whether it does.) The other arguments are those of :func:`epsilon`.

    Examples:
      >>> from dpfl_jax import accounting
      >>> event = accounting.events.gaussian(noise_multiplier=4.0, steps=1)
      >>> accounting.delta(event, epsilon=1.0) < 2e-5
      True
    """
    at_least("epsilon", epsilon, 0)
    epsilon = float(epsilon)
    flat = flatten(event, relation)
    if not flat.private:
        return 1.0
    if not flat.leaves:
        if flat.gaussian == 0 or math.isinf(epsilon):
            return 0.0
        log_delta = _gaussian_log_delta(1.0 / math.sqrt(flat.gaussian), epsilon)
        return float(_with_drawn(math.exp(log_delta) * (1 + 1e-8), flat))
    # Cells, grid and tails are chosen for one delta: repeat until it is near the answer. The tails
    # at one delta still give the right order of magnitude for an answer 1e-7 times as large.
    best, near = 1.0, 1e-2
    for _ in range(40):
        near = max(min(near, best), _LEAST_DELTA)
        tail = _log_tail(flat, near)
        best = min(best, _worst(flat, lambda c: c.delta(epsilon), [near], resolution, tail))
        if best > 0.5 * near:
            break
        near = best
    return float(_with_drawn(best, flat))


def _reserved(flat: Flat) -> float:
    """The share of delta that pays for how noise is drawn; stated guarantees have already paid."""
    stated = all(isinstance(leaf, ApproximateLeaf) for leaf, _ in flat.leaves)
    return 0.0 if flat.gaussian == 0.0 and stated else RESERVED


def _with_drawn(delta: Any, flat: Flat) -> Any:
    """Adds to delta, a number or an array, the share that ``epsilon`` sets aside."""
    return np.minimum(1.0, delta / (1 - _reserved(flat)))


def epsilons_midway(
    event: Callable[[int], dp_accounting.DpEvent], total: int, counts: Sequence[int], delta: float
) -> list[float]:
    """Returns upper bounds on epsilon after each number of steps in ``counts``.

    Args:
      event: number of steps -> what the first so many steps do to one unit. If the whole run is one
        event repeated, one discretisation serves all; otherwise each count is accounted separately.
      total: steps of the whole run.
      counts: numbers of steps, each >= 1.
      delta: in (0, 1).

    Examples:
      >>> from dpfl_jax import accounting
      >>> def event(steps):
      ...     return accounting.events.uls(1.0, 0.01, steps)
      >>> [round(e, 2) for e in accounting.epsilons_midway(event, 100, [10, 100], delta=1e-5)]
      [0.38, 0.72]
    """
    whole = event(total)
    if isinstance(whole, dp_accounting.SelfComposedDpEvent) and whole.count == total:
        return epsilon_curve(whole.event, counts, delta)
    return [epsilon(e, delta, accountant=accountant_of(e)) for e in map(event, counts)]


def epsilon_curve(
    step_event: dp_accounting.DpEvent,
    steps: Sequence[int],
    delta: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
    resolution: float = 0.05,
) -> list[float]:
    """Returns upper bounds on epsilon after each number of steps, from one discretisation.

    Args:
      step_event: what ONE step does (not composed), or a run to be repeated.
      steps: numbers of steps, each >= 0.
      delta: in (0, 1).
      relation: adjacency.
      resolution: as for :func:`epsilon`; the default is for progress displays.

    Returns:
      One epsilon per entry of ``steps``; 0 for 0 steps; ``inf`` where there is no guarantee.

    Examples:
      >>> from dpfl_jax import accounting
      >>> step = accounting.events.uls(noise_multiplier=1.0, sampling_prob=0.01, steps=1)
      >>> [round(e, 2) for e in accounting.epsilon_curve(step, [10, 100], delta=1e-5)]
      [0.38, 0.72]
    """
    delta = check_delta(delta)
    at_least("a number of steps", min(steps, default=0), 0)
    flat = flatten(step_event, relation)
    if not flat.private:
        return [math.inf if t > 0 else 0.0 for t in steps]
    delta *= 1 - _reserved(flat)
    if not flat.leaves:
        return [_gaussian_epsilon(t * flat.gaussian, delta) for t in steps]
    some = sorted({t for t in steps if t > 0})
    if not some:
        return [0.0] * len(steps)
    log_tail = _log_tail(flat, delta) - math.log(some[-1])
    ends = {some[0], some[-1]}

    def curve(factor: float) -> list[float]:
        both = [
            _composed(flat, d, [delta], resolution, log_tail, factor, times=ends)
            for d in DIRECTIONS
        ]
        return [max(c.times(t).epsilon(delta) for c in both) if t > 0 else 0.0 for t in steps]

    return _coarsened(curve)


def epsilon_table(
    make_event: Callable[[Number], dp_accounting.DpEvent],
    values: Iterable[Number],
    delta: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
    resolution: float = FINE,
) -> dict[Number, float]:
    """Returns epsilon of a unit for each distinct value of a number in which units differ.

    A run's guarantee is that of its worst unit; the table says what the other units spend. The
    numbers must be *declared*: a table computed from counts in the private data is itself private.

    Args:
      make_event: a unit's value (its examples, its sampling rate) -> what the run does to the unit.
      values: the units' values, repeats allowed (a million units with a hundred values cost a
        hundred accountings).
      delta: in (0, 1), for all units.
      relation: adjacency.
      resolution: as for ``accounting.epsilon``.

    Returns:
      {value: upper bound on epsilon}, by increasing value.

    Raises:
      BadInputError: there are no values, or a value is not a valid parameter of the event.

    Examples:
      >>> from dpfl_jax import accounting
      >>> def event(examples):
      ...     return accounting.events.els(2.0, 0.01, examples, steps=100)
      >>> table = accounting.epsilon_table(event, [1, 4, 1], delta=1e-5)
      >>> {examples: round(epsilon, 2) for examples, epsilon in table.items()}
      {1: 0.19, 4: 0.87}
    """
    distinct = sorted(set(values))
    if not distinct:
        raise BadInputError("the table of epsilons needs at least one unit's value")
    return {
        value: epsilon(make_event(value), delta, relation=relation, resolution=resolution)
        for value in distinct
    }


def delta_curve(
    event: dp_accounting.DpEvent,
    epsilons: Sequence[float] | np.ndarray,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
    resolution: float = FINE,
) -> np.ndarray:
    """Returns upper bounds on delta at many epsilons, from one composition.

    No bound is below about 1e-15 times the number of steps: for smaller ones use :func:`delta`,
    whose arguments these are.

    Returns:
      float [len(epsilons)].

    Examples:
      >>> from dpfl_jax import accounting
      >>> event = accounting.events.gaussian(noise_multiplier=1.0, steps=1)
      >>> accounting.delta_curve(event, [0.0, 1.0, 2.0]).round(3).tolist()
      [0.383, 0.127, 0.021]
    """
    at = np.asarray(epsilons, dtype=float)
    at_least("an epsilon", at.min(initial=0.0), 0)
    flat = flatten(event, relation)
    if not flat.private:
        return np.ones(at.shape)
    if not flat.leaves:
        return np.array([delta(event, float(value), relation=relation) for value in at])
    tail = -50.0 - math.log(_steps(flat))
    # Choose the grid for both the largest and the smallest deltas that the curve resolves.
    ends = [0.1, 1e-10]
    return _with_drawn(
        _coarsened(
            lambda factor: np.maximum(
                *(_composed(flat, d, ends, resolution, tail, factor).deltas(at) for d in DIRECTIONS)
            )
        ),
        flat,
    )


Curve = tuple[np.ndarray, np.ndarray]


@functools.lru_cache(maxsize=256)
def profile(flat: Flat, least: float, points: int, resolution: float = 0.1) -> list[Curve]:
    """Returns curves of upper bounds on delta, from epsilon 0 to where delta is ``least``.

    A curve ends earlier if delta falls no further. Between neighbouring points the chord in
    e^epsilon is a bound, too, because delta is convex in it. Callers who state an epsilon must set
    aside the share of delta for how noise is drawn.

    Args:
      flat: a private event with leaves.
      least: in (0, 1).
      points: approximate number of points in a curve.
      resolution: as for :func:`epsilon`.

    Returns:
      One curve per direction, or one for both: epsilons, float64 [n], ascending from 0; and deltas,
      float64 [n].

    Raises:
      TooLittleNoiseError: epsilon is infinite at every small delta.
    """
    least = max(least, _LEAST_DELTA)
    if any(isinstance(leaf, RenyiLeaf) for leaf, _ in flat.leaves):
        return [_renyi_curve(flat, least, points)]
    tail = _log_tail(flat, least)

    def curve(direction: str) -> Curve:
        return _coarsened(
            lambda factor: _curve(
                _composed(flat, direction, [least], resolution, tail, factor), least, points
            )
        )

    return [curve(direction) for direction in DIRECTIONS]


def _curve(whole: Composition, least: float, points: int) -> Curve:
    """The curve, without a tilt as far as rounding allows and with several tilts beyond."""
    least += 1.001 * whole.infinity
    end = _finite(whole.epsilon(least))
    at = np.linspace(0.0, end, points)
    deltas = whole.deltas(at)
    seen = int((deltas > 1e-12 * (whole.steps + 100)).sum())
    if seen < points:
        at, deltas = at[:seen], deltas[:seen]
        for target in np.geomspace(deltas.min(initial=0.1), least, 5)[1:]:
            losses, bounds = whole.curve(whole.saddle(float(target))[0], math.log(least) - 17.0)
            new = (losses > at.max(initial=-1.0)) & (losses >= 0.0) & (losses < end)
            some = np.unique(np.linspace(0, max(new.sum() - 1, 0), points // 4).astype(int))
            at = np.append(at, losses[new][some[: new.sum()]])
            deltas = np.append(deltas, bounds[new][some[: new.sum()]])
        if at.min(initial=1.0) > 0.0:  # start at epsilon 0, where delta is at most 1
            at, deltas = np.append(0.0, at), np.append(1.0, deltas)
        at, deltas = np.append(at, end), np.append(deltas, least)
    return at, np.minimum.accumulate(deltas)


def _renyi_curve(flat: Flat, least: float, points: int) -> Curve:
    """The curve of both directions, if only Renyi divergences are known."""
    known = renyi.flat_divergences(flat, renyi.ORDERS)
    at = np.linspace(0.0, _finite(renyi.epsilon_from_renyi(known, renyi.ORDERS, least)), points)
    deltas = np.exp(renyi.log_delta_from_renyi(known, renyi.ORDERS, at))
    # Bound the total variation (Pinsker; Bretagnolle and Huber) by the Kullback-Leibler divergence,
    # which is at most the Renyi divergence of any order above 1.
    kl = float(known.min())
    return at, np.minimum(deltas, min(math.sqrt(kl / 2), math.sqrt(-math.expm1(-kl))))


def _finite(end: float) -> float:
    if math.isfinite(end):
        return end
    raise TooLittleNoiseError(
        "this run has no finite epsilon at a small delta: raise its noise multiplier"
    )


def rough_epsilon(
    event: dp_accounting.DpEvent, delta: float, relation: NeighboringRelation = ADD_OR_REMOVE
) -> float:
    """Returns epsilon to a few per cent, by a saddle point. NOT A BOUND: a start for searches."""
    flat = flatten(event, relation)
    if not flat.private:
        return math.inf
    if not flat.leaves:
        return _gaussian_epsilon(flat.gaussian, delta)
    sketch = _sketch(flat, "remove", 0.2, _log_tail(flat, delta))
    return sketch.clipped(sketch.tails(1e-3 * delta)).saddle(delta)[1]


def _loose_epsilon(
    event: dp_accounting.DpEvent, delta: float, relation: NeighboringRelation, accountant: str
) -> float:
    if accountant == "rdp":
        divergences = renyi.renyi_divergences(event, renyi.ORDERS, relation)
        return renyi.epsilon_from_renyi(divergences, renyi.ORDERS, delta)
    if accountant == "zcdp":
        return renyi.epsilon_from_zcdp(renyi.zcdp(event, relation), delta)
    raise BadInputError(f"unknown accountant {accountant!r}: choose pld, rdp or zcdp")


@functools.lru_cache(maxsize=1024)
def _flat_epsilon(flat: Flat, delta: float, resolution: float) -> float:
    tail = _log_tail(flat, delta)
    answer = _worst(flat, lambda c: c.epsilon(delta), [delta], resolution, tail)
    return _largest_loss(flat, delta) if math.isinf(answer) and not _reserved(flat) else answer


def _largest_loss(flat: Flat, delta: float) -> float:
    """The sum of the stated guarantees' epsilons if ``delta`` pays for all their deltas, else inf.

    If ``delta`` pays for exactly these, a table has no room for rounding. Decimals of 1,100 digits
    represent every float exactly.
    """
    stated = [(leaf.event, n) for leaf, n in flat.leaves if isinstance(leaf, ApproximateLeaf)]
    with localcontext(prec=1200, rounding=ROUND_FLOOR):
        kept = Decimal(1)
        for event, count in stated:
            kept *= (1 - Decimal(float(event.delta))) ** count
            kept *= 1 if count == 1 else 1 - Decimal("1e-1100")  # powers are not rounded down
        if kept < 1 - Decimal(delta):
            return math.inf
    whole = math.fsum(count * event.epsilon for event, count in stated)
    return whole * (1 + 2.0**-50)


def _worst(
    flat: Flat,
    answer: Callable[[Composition], float],
    deltas: list[float],
    resolution: float,
    tail: float,
) -> float:
    """The larger of the answers in the two directions."""

    def of(direction: str, resolution: float) -> float:
        return _coarsened(
            lambda factor: answer(_composed(flat, direction, deltas, resolution, tail, factor))
        )

    remove = of("remove", resolution)
    losses = (_losses(leaf, 0.4, tail) for leaf, _ in flat.leaves)
    if all(step.add is step.remove for step in losses):
        return remove
    # Adding usually costs less than removing, and then a coarse bound suffices to show it.
    return remove if of("add", 4.0 * resolution) <= remove else max(remove, of("add", resolution))


def _coarsened(answer: Callable[[float], Answer]) -> Answer:
    """``answer(1.0)``, on a grid coarser by a factor (still a bound) if the table is too large."""
    for factor in (1.0, 4.0, 16.0, 64.0):
        try:
            return answer(factor)
        except TableTooLargeError:
            continue
    return answer(256.0)


def _steps(flat: Flat) -> int:
    return sum(count for _, count in flat.leaves)


def _log_tail(flat: Flat, delta: float) -> float:
    """Log of a step's probability that may count as infinite loss: 1e-7 of delta over all steps."""
    wanted = min(-50.0, math.log(delta) - math.log(_steps(flat)) - 17.0)
    return max(wanted, _LEAST_LOG_TAIL)


def _gaussian_log_delta(sigma: float, epsilon: float) -> float:
    with np.errstate(divide="ignore"):
        return float(gaussian_mechanism._get_log_delta(sigma, epsilon))


def _gaussian_epsilon(total: float, delta: float) -> float:
    """Epsilon of Gaussians with total squared mean ``total`` (Balle and Wang 2018), rounded up."""
    if total == 0:
        return 0.0
    if total > 1e16:
        return math.inf
    sigma = 1.0 / math.sqrt(total)
    if _gaussian_log_delta(sigma, 0.0) <= math.log(delta):
        return 0.0
    with np.errstate(divide="ignore"):
        value = gaussian_mechanism.get_epsilon_gaussian(sigma, delta, tol=1e-12)
    return float(value) * (1 + 1e-11) + 1e-11


def _sketch(flat: Flat, direction: str, spacing: float, log_tail: float) -> Composition:
    """The composition with losses at the ends of cells, not on a grid: it has moments only."""
    leaves: list[tuple[Leaf, int]] = list(flat.leaves)
    if flat.gaussian > 0:
        leaves.append((MixtureLeaf((math.sqrt(flat.gaussian),), (1.0,)), 1))
    return Composition(
        [
            Part(
                getattr(_losses(leaf, spacing, log_tail), direction),
                count,
                getattr(leaf, "local_steps", 1),
                getattr(leaf, "probability", 1.0),
            )
            for leaf, count in leaves
        ]
    )


@functools.lru_cache(maxsize=256)
def _losses(leaf: Leaf, spacing: float, log_tail: float) -> StepLoss:
    return leaf.losses(spacing, log_tail)


def _excess(
    other: Composition,
    asked: list[tuple[float, float]],
    cumulants: list[float],
    allowed: list[float],
) -> float:
    """Largest ratio of another discretisation's excess in the cumulants to what is allowed."""
    pairs = zip(asked, cumulants, allowed)
    return max((other.cumulant(theta) - here) / most for (theta, _), here, most in pairs)


def _composed(
    flat: Flat,
    direction: str,
    deltas: list[float],
    resolution: float,
    log_tail: float,
    factor: float = 1.0,
    times: Iterable[int] = (1,),
) -> Composition:
    """The composition in one direction of adjacency, on a grid.

    Cells and grid are as coarse as the resolution allows at the tilt theta whose mean loss is
    epsilon. There the cumulant, which is theta times the Renyi divergence of order 1 + theta, may
    be too large by resolution^2 / 6 times the larger of itself and theta epsilon / 2 (equal for
    Gaussians). Whatever is chosen, the result is an upper bound.
    """
    spacing, before, excess, tails = 0.4, None, math.inf, None
    while True:
        sketch = _sketch(flat, direction, spacing, log_tail)
        if not sketch.mean <= LARGEST_MEAN_LOSS:
            raise TooLittleNoiseError(
                f"the expected privacy loss of this run is about {sketch.mean:.2g} nats, which "
                "allows no useful epsilon: raise the noise multiplier, or lower the sampling "
                "probability, the group size or the number of steps"
            )
        if sketch.largest < 1e-100:  # all losses are 0 or infinite
            return sketch.gridded(1e-15)
        tails = sketch.tails(1e-3 * min(deltas)) if tails is None else tails
        seen = sketch.clipped(tails)
        asked = [
            (max(theta, 0.01 / seen.sd), epsilon / count)
            for count in times
            for theta, epsilon in map(seen.times(count).saddle, deltas)
        ]
        cumulants = [seen.cumulant(theta) for theta, _ in asked]
        allowed = [
            resolution**2 / 6.0 * max(cumulant, 0.5 * theta * epsilon, 1e-300)
            for cumulant, (theta, epsilon) in zip(cumulants, asked)
        ]
        # As the excess falls with the square of the spacing, two spacings tell it.
        if before is not None:
            excess = _excess(before[1], asked, cumulants, allowed) / (
                (before[0] / spacing) ** 2 - 1.0
            )
        if excess <= 0.25 or spacing < LEAST_SPACING:
            break
        before = spacing, seen
        spacing *= 0.5 if excess == math.inf else min(max(0.45 / math.sqrt(excess), 0.05), 0.7)
    units = [leaf.unit for leaf, _ in flat.leaves if leaf.unit is not None]
    unit = _common_unit(units)
    if unit > 0 and len(units) == len(flat.leaves) and flat.gaussian == 0:
        return sketch.gridded(_aligned(factor * unit, unit))
    steps = _steps(flat) + 1
    grid = min(math.sqrt(12.0 * m / (t * (t + 1.0) * steps)) for m, (t, _) in zip(allowed, asked))
    # An atom is rounded up by up to one grid step, which matters if there are only few steps.
    tops = [
        (count * max(float(_losses(leaf, 0.4, log_tail).remove.losses.max()), 0.0), count)
        for leaf, count in flat.leaves
        if leaf.unit is not None
    ]
    if tops:
        whole = max(sum(top for top, _ in tops), sketch.sd)
        grid = min(grid, resolution / 30.0 * whole / min(sum(count for _, count in tops), 10.0))
    least = 2.0**-36 * sketch.largest
    largest = max(grid, least) if tops else math.inf
    for turn in range(40):
        grid = min(max(grid, least), largest)
        excess = _excess(seen.gridded(grid), asked, cumulants, allowed)
        if excess <= 1.0 and (abs(excess - 0.75) < 0.05 or turn >= 8 or grid == largest):
            break
        grid *= min(max(math.sqrt(0.75 / max(excess, 1e-4)), 0.05), 20.0 if turn < 8 else 0.7)
    return sketch.gridded(_aligned(factor * grid, unit))


def _common_unit(units: list[float]) -> float:
    """A number of which all ``units`` are integer multiples, or 0."""
    common = units[0] if units else 0.0
    for unit in units[1:]:
        if min(unit, common) <= 0:
            return 0.0
        ratio = Fraction(unit / common).limit_denominator(64)
        if ratio == 0 or abs(unit / common / ratio - 1.0) > 1e-13:
            return 0.0
        common /= ratio.denominator
    return common


def _aligned(grid: float, unit: float) -> float:
    """A grid near ``grid`` on which all integer multiples of ``unit`` lie."""
    if unit <= 0 or grid > 64.0 * unit:
        return grid
    near = unit / math.ceil(unit / grid - 1e-9) if grid <= unit else unit * math.ceil(grid / unit)
    # Round the grid upwards: an atom just above its grid point would be split.
    return near * (1.0 + 1e-15)
