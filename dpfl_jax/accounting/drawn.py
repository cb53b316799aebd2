"""What the noise that is drawn costs beyond the ideal noise that is accounted for."""

from __future__ import annotations

import math
from typing import Literal

NoiseLaw = Literal["exact", "float"]

# Every epsilon is computed at this much less than delta, which pays for what is below.
RESERVED = 2.0**-20
# Largest number of coordinates of one sum; more are refused.
MOST_COORDINATES = 1 << 36
# Exact noise against the Gaussian rounded down, for one coordinate (docs/internals/noise.md; tests
# compute all three from the table): what is beyond the table, and two chi-square distances: of the
# table's weights, rounded to multiples of 2^-159, and of the spline between them.
BEYOND_TABLE, TABLE, SPLINE = 1.2e-38, 2.2e-57, 2.0e-58

UNPAID = "this epsilon is too large for delta to pay for that: it is idealised"
IDEALISED = (
    "what is idealised: the outputs of HMAC-SHA256, Philox and ChaCha12 (keys of 128 bits or more) "
    "count as random bits; gradients are clipped and added up in float32, whose rounding is not "
    "accounted for"
)
IDEALISED_FLOAT = (
    "what is idealised: the outputs of HMAC-SHA256, Philox and threefry (whose keys have 64 bits) "
    "count as random bits, and noise drawn and added in float32 as real-valued noise; "
    "attacks on the keys' length or on the grid of float32 values are not accounted for, nor is "
    "the rounding of gradients clipped and added up in float32"
)


def distance(coordinates: float) -> float:
    """Total variation between so many draws of exact noise and rounded Gaussian noise, at most.

    Divergences of independent draws add up (Kullback-Leibler, at most chi-square), and total
    variation is at most the root of half of them (Pinsker); what is cut off adds up itself.
    """
    roots = math.sqrt(TABLE / 2) + math.sqrt(SPLINE / 2)
    return BEYOND_TABLE * coordinates + roots * math.sqrt(coordinates)


def noise_assumptions(
    law: NoiseLaw, epsilon: float, delta: float, steps: int | None
) -> tuple[str, ...]:
    """What a guarantee assumes of its noise.

    Args:
      law: ``"exact"`` or ``"float"``.
      epsilon: of the guarantee.
      delta: of the guarantee.
      steps: in which noise was added; None: not known (a million are allowed for).

    Examples:
      >>> from dpfl_jax.accounting import noise_assumptions
      >>> len(noise_assumptions("float", epsilon=1.0, delta=1e-5, steps=100)) > 0
      True
    """
    if law == "float":
        return (IDEALISED_FLOAT,)
    apart = distance(float(MOST_COORDINATES) * (10**6 if steps is None else max(steps, 1)))
    # If both of two laws are that far from their idealisations, delta grows by (1 + e^eps) of it.
    paid = epsilon < 700 and (1 + math.exp(epsilon)) * apart <= RESERVED * delta
    sentence = (
        "noise is drawn and added in integers, for sums of up to 2^36 coordinates: what is drawn "
        f"is within {apart:.1g} (total variation, all steps together) of Gaussian noise, rounded; "
    )
    sentence += "2^-20 of delta is kept for that" if paid else UNPAID
    return (sentence, IDEALISED)
