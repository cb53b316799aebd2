"""Calibration: noise, steps, group sizes and sampling rates that meet a target (epsilon, delta).

A search starts at a saddle-point approximation, continues with coarse upper bounds and ends with
fine ones, so that the result meets the target by the bound that will be stated.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation

from dpfl_jax.accounting.accountant import (
    ADD_OR_REMOVE,
    FINE,
    Accountant,
    check_delta,
    check_epsilon,
    epsilon_or_inf,
    rough_epsilon,
)
from dpfl_jax.accounting.accountant import epsilon as epsilon_of
from dpfl_jax.accounting.leaves import flatten
from dpfl_jax.errors import BadInputError
from dpfl_jax.files import answer_file, write_answer

MakeEvent = Callable[[float], dp_accounting.DpEvent]
SMALLEST_NOISE, LARGEST_NOISE = 1e-3, 1e9
LEAST_PROB = 1e-9
COARSE = 0.2
# Version of the answers cached on disk: raise it when the numerics change them.
_VERSION = "3"


def calibrate_noise_multiplier(
    make_event: MakeEvent,
    epsilon: float,
    delta: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
    relative_tolerance: float = 1e-5,
    use_cache: bool = True,
    near: float | None = None,
    accountant: Accountant = "pld",
) -> float:
    """Returns the smallest noise multiplier whose event satisfies (epsilon, delta), rounded up.

    Args:
      make_event: noise multiplier -> event of the whole run; epsilon must fall with the noise.
      epsilon: target, > 0.
      delta: target, in (0, 1).
      relation: adjacency.
      relative_tolerance: largest relative excess over the smallest noise multiplier.
      use_cache: whether to look the answer up on disk (and certify it again), and to store it.
      near: a good guess, at which the fine search then starts.
      accountant: computes epsilon; "rdp" for events without a known privacy-loss distribution.

    Returns:
      A noise multiplier with ``epsilon(make_event(noise_multiplier), delta) <= epsilon``; 0.0 if
      the event needs no noise.

    Raises:
      BadInputError: no noise multiplier in [1e-3, 1e9] meets the target, or an input is out of
        range.

    Examples:
      >>> from dpfl_jax import accounting
      >>> def event(noise_multiplier):
      ...     return accounting.events.uls(noise_multiplier, 0.01, steps=1000)
      >>> round(accounting.calibrate_noise_multiplier(event, epsilon=2.0, delta=1e-5), 3)
      0.959
    """
    epsilon, delta = check_epsilon(epsilon), check_delta(delta)
    if flatten(make_event(1.0), relation).reveals_nothing:
        return 0.0
    if accountant != "pld":

        def excess_of(sigma: float) -> float:
            event = make_event(sigma)
            cost = epsilon_of(event, delta, relation=relation, accountant=accountant)
            return _over(cost, epsilon)

        return _root(excess_of, 1.0, relative_tolerance, -1.0)[0]
    fits = _fits(make_event, epsilon, delta, relation)
    excess = functools.partial(_excess, make_event, epsilon, delta, relation, FINE)
    ends = make_event(1.0), make_event(3.0)
    file = _cache_file("noise", *ends, epsilon, delta, relation, relative_tolerance)
    if use_cache and (known := _remembered(file, lambda s: fits(s, FINE))) is not None:
        return known
    if near is None:
        near, slope = _rough_root(make_event, epsilon, delta, relation)
        coarse = functools.partial(_excess, make_event, epsilon, delta, relation, COARSE)
        near, slope = _root(coarse, near, 1.5e-3, slope)
        # A coarse epsilon is too large by the factor 1 + resolution^2 / 12.
        near *= math.exp((COARSE**2 - FINE**2) / 12.0 / slope)
    else:
        here, beyond = (rough_epsilon(make_event(near * x), delta, relation) for x in (1.0, 1.02))
        slope = math.log(beyond / here) / math.log(1.02) if 0.0 < beyond < here < math.inf else -1.0
    sigma, _ = _root(excess, near, relative_tolerance, slope)
    if use_cache:
        write_answer(file, sigma)
    return sigma


def coarse_noise_multiplier(
    make_event: MakeEvent,
    epsilon: float,
    delta: float,
    near: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
) -> float:
    """Returns a noise multiplier that satisfies (epsilon, delta) by coarse bounds, much faster.

    It is up to 2.5 % above that of ``calibrate_noise_multiplier``: enough to see that a setting
    needs far too much noise.

    Args:
      make_event: noise multiplier -> event of the whole run.
      epsilon: target, > 0.
      delta: target, in (0, 1).
      near: a good guess.
      relation: adjacency.
    """
    epsilon, delta = check_epsilon(epsilon), check_delta(delta)
    fits = _fits(make_event, epsilon, delta, relation)
    ends = make_event(1.0), make_event(3.0)
    file = _cache_file("coarse noise", *ends, epsilon, delta, relation)
    if (known := _remembered(file, lambda s: fits(s, COARSE))) is not None:
        return known
    excess = functools.partial(_excess, make_event, epsilon, delta, relation, COARSE)
    sigma, _ = _root(excess, near, 2e-2, -1.5)
    write_answer(file, sigma)
    return sigma


def _excess(
    make_event: MakeEvent,
    epsilon: float,
    delta: float,
    relation: NeighboringRelation,
    grid: float,
    sigma: float,
) -> float:
    return _over(_bound(make_event(sigma), delta, relation, grid), epsilon)


# ---- answers cached on disk ----------------------------------------------------------------------


def _cache_file(*content: Any) -> pathlib.Path | None:
    return answer_file("accounting", _VERSION, *map(repr, content))


def _remembered(file: pathlib.Path | None, fits: Callable[[float], bool]) -> float | None:
    """The cached noise multiplier if it passes ``fits`` again: a bad file weakens no guarantee."""
    try:
        known = None if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(known, float) or not SMALLEST_NOISE <= known <= LARGEST_NOISE:
        return None
    return known if fits(known) else None


def noise_near(
    make_event: MakeEvent,
    epsilon: float,
    delta: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
    near: float | None = None,
) -> float:
    """Returns an estimate of the smallest noise multiplier (``rough_epsilon``): NOT CERTIFIED."""
    return _rough_root(make_event, epsilon, delta, relation, near or 1.0)[0]


def noise_ahead(known: Sequence[tuple[float, float]], at: float) -> float | None:
    """Extrapolates noise multipliers that are known at other settings; None if too few are known.

    Args:
      known: pairs (x, noise multiplier), all positive, the pair with the nearest x last.
      at: the x at which the noise multiplier is needed.
    """
    last = known[-8:]
    if len({x for x, _ in last}) < 4 or min(noise for _, noise in last) <= 0.0:
        return None
    x, y = np.log(np.array(last)).T
    guess = float(np.polyfit(x - math.log(at), y, 2)[-1])
    return math.exp(min(max(guess, y[-1] - 1.0), y[-1] + 1.0))


def _over(epsilon: float, target: float) -> float:
    """Log of epsilon over the target, which is met if this is <= 0."""
    return math.log(max(epsilon, 1e-300) / target) if epsilon < math.inf else math.inf


def _rough_root(
    make_event: MakeEvent,
    epsilon: float,
    delta: float,
    relation: NeighboringRelation,
    near: float = 1.0,
) -> tuple[float, float]:
    def excess(sigma: float) -> float:
        value = rough_epsilon(make_event(sigma), delta, relation)
        return math.log(max(value, 1e-3 * epsilon) / epsilon) if value < math.inf else math.inf

    try:
        return _root(excess, near, 1e-3, -1.0)
    except BadInputError:  # the certified search will say what is wrong
        return 1.0, -1.0


def calibrate_steps(
    make_event: Callable[[int], dp_accounting.DpEvent],
    epsilon: float,
    delta: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
    most: int = 10_000_000,
) -> int:
    """Returns the largest number of steps (or rounds) that satisfies (epsilon, delta).

    Args:
      make_event: number of steps -> event of the whole run.
      epsilon: target, > 0.
      delta: target, in (0, 1).
      relation: adjacency.
      most: largest number considered.

    Returns:
      A number of steps in [1, most], certified on the finest grid.

    Raises:
      BadInputError: even one step exceeds the target.

    Examples:
      >>> from dpfl_jax import accounting
      >>> def event(steps):
      ...     return accounting.events.uls(1.0, 0.01, steps)
      >>> accounting.calibrate_steps(event, epsilon=2.0, delta=1e-5) > 500
      True
    """
    return _largest_count(make_event, epsilon, delta, relation, most, "step")


def calibrate_group_size(
    make_event: Callable[[int], dp_accounting.DpEvent],
    epsilon: float,
    delta: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
    most: int = 1_000_000,
) -> int:
    """Returns the largest group size (examples per user) that satisfies (epsilon, delta).

    Arguments, result and errors are those of :func:`calibrate_steps`, with group sizes for steps.

    Examples:
      >>> from dpfl_jax import accounting
      >>> def event(group_size):
      ...     return accounting.events.els(4.0, 0.01, group_size, steps=100)
      >>> accounting.calibrate_group_size(event, epsilon=2.0, delta=1e-5)
      18
    """
    return _largest_count(make_event, epsilon, delta, relation, most, "example per user")


def calibrate_sampling_prob(
    make_event: MakeEvent,
    epsilon: float,
    delta: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
) -> float:
    """Returns the largest sampling probability that satisfies (epsilon, delta), rounded down.

    The result is too small by a factor of about 1 - 1e-5.

    Args:
      make_event: probability in (0, 1] -> event of the whole run; epsilon must grow with it.
      epsilon: target, > 0.
      delta: target, in (0, 1).
      relation: adjacency.

    Returns:
      A probability in [LEAST_PROB, 1], certified on the finest grid.

    Raises:
      BadInputError: even ``LEAST_PROB`` (1e-9) exceeds the target.

    Examples:
      >>> from dpfl_jax import accounting
      >>> def event(sampling_prob):
      ...     return accounting.events.uls(1.0, sampling_prob, steps=1000)
      >>> round(accounting.calibrate_sampling_prob(event, epsilon=2.0, delta=1e-5), 4)
      0.0109
    """
    fits = _fits(make_event, epsilon, delta, relation)
    if not _certified(make_event(LEAST_PROB), epsilon, delta, relation):
        raise BadInputError(
            f"even a sampling probability of {LEAST_PROB:g} exceeds epsilon {epsilon:g} at delta "
            f"{delta:g}: raise the noise multiplier or lower the number of steps"
        )
    if fits(1.0, 0.1) and _certified(make_event(1.0), epsilon, delta, relation):
        return 1.0
    low, high = LEAST_PROB, 1.0
    for grid, tolerance in ((0.1, 1e-2), (FINE, 1e-5)):
        while high / low > 1 + tolerance:
            middle = math.sqrt(low * high)
            if fits(middle, grid):
                low = middle
            else:
                high = middle
        # The finer grid may disagree a little about either end.
        low, high = max(low / 1.01, LEAST_PROB), min(high * 1.01, 1.0)
    low, high = low * 1.01, high / 1.01
    scale = 10.0 ** (6 - math.floor(math.log10(low)))
    answer = math.floor(low * scale) / scale
    step = 1e-5
    while not _certified(make_event(answer), epsilon, delta, relation):
        answer, step = answer * (1 - step), 2 * step
        if answer < LEAST_PROB or step > 0.5:
            return LEAST_PROB
    return answer


def _bound(
    event: dp_accounting.DpEvent, delta: float, relation: NeighboringRelation, grid: float
) -> float:
    return epsilon_or_inf(event, delta, relation, resolution=grid, accountant="pld")


def _certified(
    event: dp_accounting.DpEvent, epsilon: float, delta: float, relation: NeighboringRelation
) -> bool:
    """Whether an event meets the target by the stated bound, which ends every calibration."""
    return _bound(event, delta, relation, FINE) <= float(epsilon)


def _fits(
    make_event: Callable[[Any], dp_accounting.DpEvent],
    epsilon: float,
    delta: float,
    relation: NeighboringRelation,
) -> Callable[[Any, float], bool]:
    epsilon, delta = check_epsilon(epsilon), check_delta(delta)

    def fits(value: Any, grid: float) -> bool:
        return _bound(make_event(value), delta, relation, grid) <= epsilon

    return fits


def _largest_count(
    make_event: Callable[[int], dp_accounting.DpEvent],
    epsilon: float,
    delta: float,
    relation: NeighboringRelation,
    most: int,
    noun: str,
) -> int:
    fits = _fits(make_event, epsilon, delta, relation)
    if not _certified(make_event(1), epsilon, delta, relation):
        raise BadInputError(
            f"even one {noun} exceeds epsilon {epsilon:g} at delta {delta:g}: raise the noise "
            "multiplier or lower the sampling probability"
        )
    low, high = 1, 2
    while high <= most and fits(high, 0.1):
        low, high = high, 2 * high
    if low * 2 > most and fits(most, FINE):
        low, high = most, most + 1
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        # The coarse grid suffices except for the last few per cent.
        grid = 0.1 if high - low > max(8, low // 32) else FINE
        if fits(middle, grid):
            low = middle
        else:
            high = middle
    # The coarse grid may have ruled out valid counts: walk up while the fine grid allows it.
    step = max(1, low // 64)
    while step >= 1:
        while low + step <= most and fits(low + step, FINE):
            low += step
        step //= 2
    back = 1
    while low > 1 and not _certified(make_event(low), epsilon, delta, relation):
        low, back = max(low - back, 1), 2 * back
    return low


def _round_up(value: float) -> float:
    """Rounds up to seven significant digits, so that a printed noise multiplier is exact."""
    scale = 10.0 ** (6 - math.floor(math.log10(value)))
    return math.ceil(value * scale * (1 - 1e-15)) / scale


def _root(
    excess: Callable[[float], float], start: float, tolerance: float, slope: float
) -> tuple[float, float]:
    """The noise multiplier at which a falling ``excess`` turns negative, on the safe side.

    It takes secant steps in logarithms, where epsilon is nearly a power of the noise, within the
    known bracket, and bisects where these do not help.

    Returns:
      A number of seven digits whose ``excess`` is <= 0, at most ``tolerance`` (relative) above the
      smallest; and the slope there, in logarithms.
    """
    low, high = math.log(SMALLEST_NOISE), math.log(LARGEST_NOISE)
    bad, good = -math.inf, math.inf
    sigma, cap = _round_up(min(max(start, SMALLEST_NOISE), LARGEST_NOISE)), 0.5
    point, value, before = math.log(sigma), excess(sigma), (math.nan, math.nan)
    for turn in range(200):
        bad, good = (point, good) if value > 0 else (bad, point)
        rise = (value - before[1]) / (point - before[0]) if point != before[0] else math.nan
        slope = min(max(rise, -20.0), -0.2) if math.isfinite(rise) else slope
        if value <= 0 and (value >= slope * tolerance or good - bad <= tolerance):
            return sigma, slope
        if bad >= high:
            raise BadInputError(
                "no noise multiplier up to 1e9 reaches the target epsilon, because part of the run "
                "exceeds the target at any noise: raise the target epsilon or remove that part"
            )
        if good <= low:
            raise BadInputError(
                f"practically no noise (noise multiplier {SMALLEST_NOISE:g}) already meets the "
                "target: lower the target epsilon"
            )
        # Aim at the middle of the tolerance, on the safe side.
        step = (-value + 0.5 * slope * tolerance) / slope if math.isfinite(value) else cap
        step, cap = min(max(step, -cap), cap), 1.6 * cap
        new = min(max(point + step, low), high)
        if not bad < new < good or (turn % 6 == 5 and good - bad < math.inf):
            new = 0.5 * (bad + good)
        if good - bad <= tolerance:
            new = good
        before = point, value
        sigma = _round_up(math.exp(new))
        point, value = math.log(sigma), excess(sigma)
    raise BadInputError(f"the search for noise failed near {sigma:g}: raise the target epsilon")
