"""Epsilon and delta of an event, by privacy-loss distributions (PLD): upper bounds, always.

The grid follows the spread of one step's loss (``resolution`` times its standard deviation), so
that the excess it causes is the same whatever the noise: the squared noise multiplier it asks for
is too large by about resolution^2 / 6.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal, TypeVar

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation, gaussian_mechanism

from dpfl_jax.accounting import renyi
from dpfl_jax.accounting.composition import Composition, Part, TableTooLargeError
from dpfl_jax.accounting.leaves import Flat, Leaf, MixtureLeaf, flatten
from dpfl_jax.errors import BadInputError

Accountant = Literal["pld", "rdp", "zcdp"]
Answer = TypeVar("Answer")

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighboringRelation.REPLACE_ONE

# Excess of the noise multiplier: 0.008 %, and 0.002 % for the certificate.
FINE = 0.03
FINEST = 0.015

# Beyond these an answer would mean nothing, and computing it could take all memory.
LARGEST_MEAN_LOSS = 1e4
LARGEST_GRID = 30.0
# Grid over the largest atom of a few steps, in units of the resolution: 0.1 % of it.
_ATOM_RESOLUTION = 1.0 / 30.0
# What is cut off must itself be a floating-point number.
_LEAST_LOG_TAIL = -600.0
_LEAST_DELTA = 1e-200


class TooLittleNoiseError(BadInputError):
    """The guarantee would be so weak that it is not worth (or not possible) computing."""


def check_delta(delta: float) -> None:
    """Raises BadInputError unless 0 < delta < 1, and large enough for tails to be computed."""
    if not (isinstance(delta, int | float) and math.isfinite(delta) and 0.0 < delta < 1.0):
        raise BadInputError(
            f"delta is {delta}, but it must lie strictly between 0 and 1 (a usual choice is below "
            "one over the number of units)"
        )
    if delta < _LEAST_DELTA:
        raise BadInputError(
            f"delta is {delta:g}, but tails of privacy losses are only computed down to "
            f"{_LEAST_DELTA:g}: choose a larger one"
        )


def check_epsilon(epsilon: float) -> None:
    """Raises BadInputError unless epsilon is finite and positive."""
    if not (isinstance(epsilon, int | float) and math.isfinite(epsilon) and epsilon > 0):
        raise BadInputError(f"epsilon is {epsilon}, but it must be a finite number above 0")


def epsilon(
    event: dp_accounting.DpEvent,
    delta: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
    resolution: float = FINE,
    accountant: Accountant = "pld",
) -> float:
    """Upper bound on epsilon at ``delta``.

    Args:
      event: what the mechanism does to one privacy unit.
      delta: in (0, 1).
      relation: adjacency; the events of this package are add-or-remove unless they say otherwise.
      resolution: grid over the standard deviation of one step's loss; smaller is tighter, slower.
      accountant: "pld" (tight), or "rdp" or "zcdp" (looser, for comparison).

    Returns:
      Epsilon >= 0, in nats; ``inf`` if there is no finite guarantee (no noise, not private).

    Raises:
      BadInputError: delta out of range, an event that no accountant knows, or a table that would
        not fit in memory.
    """
    check_delta(delta)
    if accountant != "pld":
        return _loose_epsilon(event, delta, relation, accountant)
    flat = flatten(event, relation)
    if not flat.private:
        return math.inf
    if not flat.leaves:
        return _gaussian_epsilon(flat.gaussian, delta)
    log_tail = _log_tail(flat, delta)
    return _coarsened(
        lambda factor: max(
            c.epsilon(delta) for c in _compositions(flat, resolution, log_tail, factor)
        )
    )


def delta(
    event: dp_accounting.DpEvent,
    epsilon: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
    resolution: float = FINE,
) -> float:
    """Upper bound on delta at ``epsilon`` >= 0. Arguments as for :func:`epsilon`."""
    if not epsilon >= 0:
        raise BadInputError(f"epsilon is {epsilon}, but it must be 0 or more")
    flat = flatten(event, relation)
    if not flat.private:
        return 1.0
    if not flat.leaves:
        if flat.gaussian == 0 or math.isinf(epsilon):
            return 0.0
        log_delta = _gaussian_log_delta(1.0 / math.sqrt(flat.gaussian), epsilon)
        return min(1.0, float(math.exp(log_delta) * (1 + 1e-9)))
    if math.isinf(epsilon):
        built = _compositions(flat, resolution, -300.0 - math.log(_steps(flat)))
        return max(0.0, *(c.infinity for c in built))
    best = 1.0
    # Deeper tails need longer tables: only as deep as the answer is small.
    for log_lost in (-50.0, -100.0, -300.0):
        tail = log_lost - math.log(_steps(flat))

        def answer(factor: float, tail: float = tail) -> float:
            return max(c.delta(epsilon) for c in _compositions(flat, resolution, tail, factor))

        found = _coarsened(answer)
        best = min(best, found)
        if found > 0 and math.log(found) > log_lost + 14.0:
            break
    return best


def epsilons_midway(
    event: Callable[[int], dp_accounting.DpEvent], total: int, counts: Sequence[int], delta: float
) -> list[float]:
    """Upper bounds on epsilon after some of the steps of a run.

    Args:
      event: what the first so many steps do to one unit. Only where all of them are one event
        repeated is it composed here; else each number of steps is asked for.
      total: steps of the whole run.
      counts: numbers of steps, each >= 1.
      delta: in (0, 1).
    """
    whole = event(total)
    if isinstance(whole, dp_accounting.SelfComposedDpEvent) and whole.count == total:
        return epsilon_curve(whole.event, counts, delta)
    return [epsilon(event(count), delta) for count in counts]


def epsilon_curve(
    step_event: dp_accounting.DpEvent,
    steps: Sequence[int],
    delta: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
    resolution: float = 0.05,
) -> list[float]:
    """Upper bounds on epsilon after several numbers of steps, from one discretisation of a step.

    Args:
      step_event: what ONE step does (not composed), or a run to be repeated.
      steps: numbers of steps, each >= 0.
      delta: in (0, 1).
      relation: adjacency.
      resolution: as for :func:`epsilon`; the default is for progress displays.

    Returns:
      One epsilon per entry of ``steps``; 0 for 0 steps; ``inf`` where there is no guarantee.
    """
    check_delta(delta)
    if any(t < 0 for t in steps):
        raise BadInputError(f"numbers of steps must be 0 or more, got {list(steps)}")
    flat = flatten(step_event, relation)
    if not flat.private:
        return [math.inf if t > 0 else 0.0 for t in steps]
    if not flat.leaves:
        return [_gaussian_epsilon(t * flat.gaussian, delta) for t in steps]
    log_tail = _log_tail(flat, delta) - math.log(max(max(steps, default=1), 1))
    parts = _discretised(flat, resolution, log_tail)
    answers = []
    for t in steps:
        if t == 0:
            answers.append(0.0)
            continue
        scaled = [[dataclasses.replace(p, count=p.count * t) for p in d] for d in parts]
        answers.append(max(Composition(direction).epsilon(delta) for direction in scaled))
    return answers


def delta_curve(
    event: dp_accounting.DpEvent,
    epsilons: Sequence[float] | np.ndarray,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
    resolution: float = FINE,
) -> np.ndarray:
    """Upper bounds on delta at many epsilons, from one composition.

    None is below about 1e-15 times the number of steps, whatever the truth: for small ones ask
    :func:`delta`. Arguments as there.

    Returns:
      float [len(epsilons)].
    """
    at = np.asarray(epsilons, dtype=float)
    if not np.all(at >= 0):
        raise BadInputError(f"epsilons must be 0 or more, got {at[~(at >= 0)][0]}")
    flat = flatten(event, relation)
    if not flat.private:
        return np.ones(at.shape)
    if not flat.leaves:
        return np.array([delta(event, float(value), relation=relation) for value in at])
    tail = -50.0 - math.log(_steps(flat))
    return _coarsened(
        lambda factor: np.maximum(
            *(c.deltas(at) for c in _compositions(flat, resolution, tail, factor))
        )
    )


def clt_signal(
    event: dp_accounting.DpEvent, relation: NeighboringRelation = ADD_OR_REMOVE
) -> float:
    """Signal-to-noise ratio mu of the event in the large-noise limit; only a starting point.

    There a mixture acts as its mean: mu^2 = sum over steps of (mean sensitivity / sigma)^2
    (note 3.7 on Charles et al. 2024). Other events count through the variance of their loss.
    """
    flat = flatten(event, relation)
    if not flat.private:
        return math.inf
    total = flat.gaussian
    for leaf, count in flat.leaves:
        if isinstance(leaf, MixtureLeaf):
            total += count * leaf.mean_shift**2
        else:
            total += count * leaf.moments()["add"][1]
    return math.sqrt(total)


def _loose_epsilon(
    event: dp_accounting.DpEvent, delta: float, relation: NeighboringRelation, accountant: str
) -> float:
    if accountant == "rdp":
        found = renyi.renyi_divergences(event, renyi.ORDERS, relation)
        return renyi.epsilon_from_renyi(found, renyi.ORDERS, delta)
    if accountant == "zcdp":
        return renyi.epsilon_from_zcdp(renyi.zcdp(event, relation), delta)
    raise BadInputError(f"unknown accountant {accountant!r}: choose pld, rdp or zcdp")


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
    """Probability per step that may become an infinite loss: together below 1e-7 of delta."""
    wanted = min(-50.0, math.log(delta) - math.log(_steps(flat)) - 17.0)
    return max(wanted, _LEAST_LOG_TAIL)


def _gaussian_log_delta(sigma: float, epsilon: float) -> float:
    with np.errstate(divide="ignore"):
        return float(gaussian_mechanism._get_log_delta(sigma, epsilon))


def _gaussian_epsilon(total: float, delta: float) -> float:
    """Exact, for Gaussians alone (Balle and Wang 2018), rounded up."""
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


def grid_is_limited(
    event: dp_accounting.DpEvent, delta: float, relation: NeighboringRelation, resolution: float
) -> bool:
    """Whether the table size, not ``resolution``, decides the grid: rare but very large losses."""
    flat = flatten(event, relation)
    if not flat.leaves:
        return False
    wanted, possible, _ = _grids(flat, resolution, _log_tail(flat, delta))
    return possible > wanted


def _with_gaussian(flat: Flat) -> list[tuple[Leaf, int]]:
    leaves: list[tuple[Leaf, int]] = list(flat.leaves)
    if flat.gaussian > 0:
        leaves.append((MixtureLeaf((math.sqrt(flat.gaussian),), (1.0,)), 1))
    return leaves


def _grids(flat: Flat, resolution: float, log_tail: float) -> tuple[float, float, float]:
    """The grid that the resolution asks for, the finest that fits, and what it should divide.

    Between its atoms a loss costs the square of the grid, as rounding preserves the mean. The
    largest atom is rounded up by the grid itself, which counts where few steps may all meet it:
    the more steps, the less.
    """
    leaves = _with_gaussian(flat)
    counts = [count * getattr(leaf, "local_steps", 1) for leaf, count in leaves]
    possible = max(max(leaf.finest_grid(log_tail) for leaf, _ in leaves), 1e-12)
    if possible > LARGEST_GRID:
        raise TooLittleNoiseError(
            "the privacy losses of one step span more than a table can hold: the noise is far too "
            "small beside the sensitivity; raise the noise multiplier or lower the group size"
        )
    unit = _common_unit([leaf.unit for leaf, _ in leaves if leaf.top > 0])
    if unit > 0 and all(leaf.discrete for leaf, _ in leaves):
        return max(unit, possible), possible, unit
    variance = min(
        sum(count * leaf.moments()[direction][1] for leaf, count in leaves)
        for direction in ("remove", "add")
    )
    wanted = resolution * math.sqrt(max(variance, 1e-300) / sum(counts))
    with_atoms = [(leaf.top, count) for (leaf, _), count in zip(leaves, counts) if leaf.top > 0]
    if with_atoms:
        steps = sum(count for _, count in with_atoms)
        whole = max(sum(top * count for top, count in with_atoms), math.sqrt(variance))
        wanted = min(wanted, _ATOM_RESOLUTION * resolution * whole / min(steps, 10.0))
    return wanted, possible, unit


def _common_unit(units: list[float]) -> float:
    """A number of which all ``units`` are whole multiples, or 0."""
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
    """A grid not far above ``grid`` on which whole multiples of ``unit`` lie."""
    if unit <= 0 or grid > 64.0 * unit:
        return grid
    near = unit / math.ceil(unit / grid - 1e-9) if grid <= unit else unit * math.ceil(grid / unit)
    # An atom just above its grid point would be split: the grid errs upwards.
    return near * (1.0 + 1e-15)


def _discretised(
    flat: Flat, resolution: float, log_tail: float, factor: float = 1.0
) -> list[list[Part]]:
    """One list of parts per direction of adjacency, all on one grid."""
    leaves = _with_gaussian(flat)
    wanted, possible, unit = _grids(flat, resolution, log_tail)
    mean = sum(count * leaf.moments()["remove"][0] for leaf, count in leaves)
    if mean > LARGEST_MEAN_LOSS:
        raise TooLittleNoiseError(
            f"the expected privacy loss of this run is about {mean:.2g} nats, so that no useful "
            "epsilon exists: raise the noise multiplier, or lower the sampling probability, the "
            "group size or the number of steps"
        )
    grid = _aligned(factor * max(wanted, possible), unit)
    directions: list[list[Part]] = [[], []]
    for leaf, count in leaves:
        step = leaf.build(grid, log_tail)
        rounds = (count, getattr(leaf, "local_steps", 1), getattr(leaf, "probability", 1.0))
        directions[0].append(Part(step.remove, *rounds))
        directions[1].append(Part(step.add, *rounds))
    return directions


def _compositions(
    flat: Flat, resolution: float, log_tail: float, factor: float = 1.0
) -> list[Composition]:
    return [Composition(parts) for parts in _discretised(flat, resolution, log_tail, factor)]
