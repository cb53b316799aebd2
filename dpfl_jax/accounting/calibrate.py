"""The parameters that a target (epsilon, delta) asks for: found fast, then certified.

The search starts where the central limit theorem puts the answer, works on a medium grid, and
finishes on a fine one; the returned parameter is then checked on the finest grid, and moved to the
safe side until it passes. What is returned always satisfies the target by that check.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import dp_accounting
from dp_accounting import NeighboringRelation

from dpfl_jax.accounting.accountant import (
    ADD_OR_REMOVE,
    FINE,
    FINEST,
    _gaussian_epsilon,
    check_delta,
    check_epsilon,
    clt_signal,
)
from dpfl_jax.accounting.accountant import epsilon as epsilon_of
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
) -> float:
    """Smallest noise multiplier whose event satisfies (epsilon, delta), rounded up.

    Args:
      make_event: noise multiplier -> event of the whole run; epsilon must fall with the noise.
      epsilon: target, > 0.
      delta: target, in (0, 1).
      relation: adjacency.
      relative_tolerance: most by which the answer exceeds the smallest, on the fine grid.

    Returns:
      The noise multiplier; ``epsilon(make_event(it), delta, resolution=FINEST) <= epsilon``. 0.0
      if the event needs no noise at all.

    Raises:
      BadInputError: if no noise multiplier in [1e-3, 1e9] will do, or an input is out of range.
    """
    check_epsilon(epsilon)
    check_delta(delta)

    def excess(sigma: float, resolution: float) -> float:
        """Log of epsilon over the target; <= 0 is good enough."""
        value = epsilon_of(make_event(sigma), delta, relation=relation, resolution=resolution)
        return math.log(max(value, 1e-300) / epsilon) if value < math.inf else math.inf

    if excess(LARGEST_NOISE, 0.3) > 0:
        raise BadInputError(
            f"no noise multiplier gives epsilon {epsilon:g} at delta {delta:g}: part of the run "
            "spends more than that whatever the noise; raise the target or drop that part"
        )
    mu = clt_signal(make_event(1.0), relation)
    if mu == 0.0:
        return 0.0
    start = min(max(mu / gaussian_signal(epsilon, delta), SMALLEST_NOISE), LARGEST_NOISE)
    low, high = _bracket(lambda s: excess(s, 0.1), start)
    sigma = _refine(lambda s: excess(s, 0.1), low, high, 1e-3)
    # The medium grid overstates the noise by up to about 0.2 %.
    fine_low, fine_high = _bracket(lambda s: excess(s, FINE), sigma, factor=1.002)
    sigma = _refine(lambda s: excess(s, FINE), fine_low, fine_high, relative_tolerance)
    sigma = _round_up(sigma)
    while excess(sigma, FINEST) > 0 or excess(sigma, FINE) > 0:
        sigma = _round_up(sigma * (1 + relative_tolerance))
    return sigma


def gaussian_signal(epsilon: float, delta: float) -> float:
    """Mu such that a Gaussian of sensitivity mu and unit noise is exactly (epsilon, delta)-DP."""
    low, high = 1e-9, 1.0
    while _gaussian_epsilon(high**2, delta) < epsilon:
        low, high = high, 2 * high
    for _ in range(60):
        middle = 0.5 * (low + high)
        if _gaussian_epsilon(middle**2, delta) <= epsilon:
            low = middle
        else:
            high = middle
    return low


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
