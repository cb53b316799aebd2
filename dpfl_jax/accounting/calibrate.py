"""The parameters that a target (epsilon, delta) asks for: found fast, then certified.

The search starts where the central limit theorem puts the answer, works on a medium grid, and
finishes on a fine one; the returned parameter is then checked on the finest grid, and moved to the
safe side until it passes. What is returned always satisfies the target by that check.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation

from dpfl_jax.accounting import cache
from dpfl_jax.accounting.accountant import (
    ADD_OR_REMOVE,
    FINE,
    FINEST,
    TooLittleNoiseError,
    check_delta,
    check_epsilon,
    clt_signal,
    grid_is_limited,
)
from dpfl_jax.accounting.accountant import epsilon as epsilon_of
from dpfl_jax.accounting.composition import TableTooLargeError
from dpfl_jax.errors import BadInputError

MakeEvent = Callable[[float], dp_accounting.DpEvent]
SMALLEST_NOISE, LARGEST_NOISE = 1e-3, 1e9


def calibrate_noise_multiplier(
    make_event: MakeEvent,
    epsilon: float,
    delta: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
    relative_tolerance: float = 1e-5,
    start: float | None = None,
    use_cache: bool = True,
) -> float:
    """Smallest noise multiplier whose event satisfies (epsilon, delta), rounded up.

    Args:
      make_event: noise multiplier -> event of the whole run; epsilon must fall with the noise.
      epsilon: target, > 0.
      delta: target, in (0, 1).
      relation: adjacency.
      relative_tolerance: most by which the answer exceeds the smallest, on the fine grid.
      start: where to begin, for example a neighbouring answer; by default where the central limit
        theorem puts it, which is far off for tiny sampling probabilities. It saves time, no more.
      use_cache: look the answer up on disk first (and certify it again), store it after.

    Returns:
      The noise multiplier; ``epsilon(make_event(it), delta, resolution=FINEST) <= epsilon``. 0.0
      if the event needs no noise at all.

    Raises:
      BadInputError: if no noise multiplier in [1e-3, 1e9] will do, or an input is out of range.
    """
    check_epsilon(epsilon)
    check_delta(delta)

    def certified(sigma: float) -> bool:
        return _certified(make_event(sigma), epsilon, delta, relation)

    key = ""
    if use_cache:
        key = cache.key_of(
            "noise", make_event(1.0), make_event(3.0), epsilon, delta, relation, relative_tolerance
        )
        known = (cache.read(key) or {}).get("noise_multiplier")
        # Certified again, so that what is on disk can never weaken a guarantee.
        if (
            isinstance(known, float)
            and SMALLEST_NOISE <= known <= LARGEST_NOISE
            and certified(known)
        ):
            return known
    sigma = _search_noise(make_event, epsilon, delta, relation, relative_tolerance, start)
    if sigma == 0.0:
        return 0.0
    step = relative_tolerance
    while not certified(sigma):
        sigma, step = _round_up(sigma * (1 + step)), 2 * step
    if use_cache:
        cache.write(key, {"noise_multiplier": sigma})
    return sigma


def _search_noise(
    make_event: MakeEvent,
    epsilon: float,
    delta: float,
    relation: NeighboringRelation,
    relative_tolerance: float,
    near: float | None = None,
) -> float:
    """The noise multiplier on the fine grid, not yet certified; 0.0 if none is needed."""

    def excess(sigma: float, resolution: float) -> float:
        """Log of epsilon over the target; <= 0 is good enough."""
        value = _epsilon_or_inf(make_event(sigma), delta, relation, resolution)
        return math.log(max(value, 1e-300) / epsilon) if value < math.inf else math.inf

    mu = clt_signal(make_event(1.0), relation)
    if mu == 0.0 and excess(1.0, FINE) <= 0:
        return 0.0
    start = mu / gaussian_signal(epsilon, delta) if near is None else near
    start = min(max(start, SMALLEST_NOISE), LARGEST_NOISE)
    quick = None
    if mu > 0.0:
        quick = _newton(lambda s: excess(s, FINE), start, relative_tolerance)
    if quick is not None:
        return _round_up(quick)
    if excess(LARGEST_NOISE, 0.3) > 0:
        raise BadInputError(
            f"no noise multiplier gives epsilon {epsilon:g} at delta {delta:g}: part of the run "
            "spends more than that whatever the noise; raise the target or drop that part"
        )
    low, high = _bracket(lambda s: excess(s, 0.1), start, 1.25 if near is None else 1.06)
    sigma = _refine(lambda s: excess(s, 0.1), low, high, 1e-3)
    # The medium grid overstates the noise by up to about 0.2 %.
    tolerance = relative_tolerance
    if grid_is_limited(make_event(sigma), delta, relation, 0.1):
        return _round_up(sigma)  # a finer grid is not to be had
    if grid_is_limited(make_event(sigma), delta, relation, FINE):
        # Rare, very large losses: tables are at their largest, and precision costs seconds.
        tolerance = max(tolerance, 2e-3)
    fine_low, fine_high = _bracket(lambda s: excess(s, FINE), sigma, factor=1.002)
    sigma = _refine(lambda s: excess(s, FINE), fine_low, fine_high, tolerance)
    return _round_up(sigma)


def calibrate_steps(
    make_event: Callable[[int], dp_accounting.DpEvent],
    epsilon: float,
    delta: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
    most: int = 10_000_000,
) -> int:
    """Largest number of steps (or rounds) that satisfies (epsilon, delta).

    Args:
      make_event: number of steps -> event of the whole run.
      epsilon: target, > 0.
      delta: target, in (0, 1).
      relation: adjacency.
      most: largest number considered.

    Returns:
      A number of steps in [1, most], certified on the finest grid.

    Raises:
      BadInputError: if even one step exceeds the target.
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
    """Largest group size (examples of a user) that satisfies (epsilon, delta).

    Arguments, result and errors as for :func:`calibrate_steps`.
    """
    return _largest_count(make_event, epsilon, delta, relation, most, "example per user")


def calibrate_sampling_prob(
    make_event: MakeEvent,
    epsilon: float,
    delta: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
    least: float = 1e-9,
    relative_tolerance: float = 1e-5,
) -> float:
    """Largest sampling probability that satisfies (epsilon, delta), rounded down.

    Args:
      make_event: probability in (0, 1] -> event of the whole run; epsilon must grow with it.
      epsilon: target, > 0.
      delta: target, in (0, 1).
      relation: adjacency.
      least: smallest probability considered.
      relative_tolerance: most by which the answer falls short of the largest.

    Returns:
      A probability in [least, 1], certified on the finest grid.

    Raises:
      BadInputError: if even ``least`` exceeds the target.
    """
    fits = _fits(make_event, epsilon, delta, relation)
    if not _certified(make_event(least), epsilon, delta, relation):
        raise BadInputError(
            f"even a sampling probability of {least:g} exceeds epsilon {epsilon:g} at delta "
            f"{delta:g}: raise the noise multiplier or lower the number of steps"
        )
    if fits(1.0, 0.1) and _certified(make_event(1.0), epsilon, delta, relation):
        return 1.0
    low, high = least, 1.0
    for grid, tolerance in ((0.1, 1e-2), (FINE, relative_tolerance)):
        while high / low > 1 + tolerance:
            middle = math.sqrt(low * high)
            if fits(middle, grid):
                low = middle
            else:
                high = middle
        # The next grid may disagree a little about either end.
        low, high = max(low / 1.01, least), min(high * 1.01, 1.0)
    low, high = low * 1.01, high / 1.01
    scale = 10.0 ** (6 - math.floor(math.log10(low)))
    answer = math.floor(low * scale) / scale
    step = relative_tolerance
    while not _certified(make_event(answer), epsilon, delta, relation):
        answer, step = answer * (1 - step), 2 * step
        if answer < least or step > 0.5:
            return least
    return answer


def _epsilon_or_inf(
    event: dp_accounting.DpEvent, delta: float, relation: NeighboringRelation, grid: float
) -> float:
    """Epsilon, or ``inf`` where it is too large to be computed: a search needs no more."""
    try:
        return epsilon_of(event, delta, relation=relation, resolution=grid)
    except (TooLittleNoiseError, TableTooLargeError):
        return math.inf


def _certified(
    event: dp_accounting.DpEvent, epsilon: float, delta: float, relation: NeighboringRelation
) -> bool:
    """Whether an event meets the target as it will be stated, and on the finest grid.

    Every calibration ends with it.
    """
    return all(_epsilon_or_inf(event, delta, relation, grid) <= epsilon for grid in (FINEST, FINE))


def _fits(
    make_event: Callable[[Any], dp_accounting.DpEvent],
    epsilon: float,
    delta: float,
    relation: NeighboringRelation,
) -> Callable[[Any, float], bool]:
    check_epsilon(epsilon)
    check_delta(delta)

    def fits(value: Any, grid: float) -> bool:
        return _epsilon_or_inf(make_event(value), delta, relation, grid) <= epsilon

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
        # The coarse grid settles all but the last few per cent.
        grid = 0.1 if high - low > max(8, low // 32) else FINE
        if fits(middle, grid):
            low = middle
        else:
            high = middle
    # A coarse grid may have ruled out the edge: walk up while the fine grid allows it.
    step = max(1, low // 64)
    while step >= 1:
        while low + step <= most and fits(low + step, FINE):
            low += step
        step //= 2
    back = 1
    while low > 1 and not _certified(make_event(low), epsilon, delta, relation):
        low, back = max(low - back, 1), 2 * back
    return low


def _newton(excess: Callable[[float], float], start: float, tolerance: float) -> float | None:
    """Secant steps in logarithms, where epsilon is nearly a power of the noise.

    Returns:
      A noise multiplier that satisfies the target and exceeds the smallest by about ``tolerance``
      at most, or None if the curve is not tame enough (the caller brackets then).
    """
    point, slope = math.log(start), -1.0
    value = excess(start)
    for _ in range(6):
        if not abs(value) < 1.0:
            return None
        # Aim at the middle of the tolerance, on the safe side.
        if value <= 0 and value >= slope * tolerance:
            return math.exp(point)
        step = (-value + 0.5 * slope * tolerance) / slope
        following = excess(math.exp(point + step))
        if not math.isfinite(following):
            return None
        slope = (following - value) / step if step != 0 else slope
        if not -20.0 < slope < -0.2:
            return None
        point, value = point + step, following
    return None


def gaussian_signal(epsilon: float, delta: float) -> float:
    """Mu such that a Gaussian of sensitivity mu and unit noise is exactly (epsilon, delta)-DP."""
    with np.errstate(divide="ignore"):
        return 1.0 / float(dp_accounting.get_sigma_gaussian(epsilon, delta))


def _round_up(value: float, digits: int = 7) -> float:
    """Rounds up to ``digits`` significant digits: the answer prints as it is."""
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return math.ceil(value * scale * (1 - 1e-15)) / scale


Function = Callable[[float], float]


def _bracket(
    excess: Function, start: float, factor: float = 1.25
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(sigma, excess) on either side of the target, from ``start`` outwards."""
    here = (start, excess(start))
    while True:
        if here[1] > 0:
            if here[0] >= LARGEST_NOISE:
                raise BadInputError("no noise multiplier up to 1e9 reaches the target epsilon")
            other = (min(here[0] * factor, LARGEST_NOISE), 0.0)
            other = (other[0], excess(other[0]))
            if other[1] <= 0:
                return here, other
        else:
            if here[0] <= SMALLEST_NOISE:
                raise BadInputError(
                    f"the target is met already at noise multiplier {SMALLEST_NOISE:g}: it asks "
                    "for practically no noise; lower the target epsilon"
                )
            other = (max(here[0] / factor, SMALLEST_NOISE), 0.0)
            other = (other[0], excess(other[0]))
            if other[1] > 0:
                return other, here
        here, factor = other, factor**1.6


def _refine(
    excess: Function, low: tuple[float, float], high: tuple[float, float], tolerance: float
) -> float:
    """Shrinks a bracket by regula falsi in logarithms; returns its safe end."""
    (bad, bad_value), (good, good_value) = low, high
    for turn in range(100):
        if good / bad <= 1 + tolerance:
            break
        share = 0.5
        if math.isfinite(bad_value) and good_value > -600 and turn % 4 != 3:
            share = bad_value / (bad_value - good_value)
        width = math.log(good / bad)
        # Aim a little to the side of the far end, so that both ends move.
        edge = min(0.25, 0.4 * tolerance / width)
        share = min(max(share + edge if share < 0.999 else share, edge), 1 - edge)
        middle = bad * math.exp(share * width)
        value = excess(middle)
        if value > 0:
            bad, bad_value = middle, value
        else:
            good, good_value = middle, value
    return good
