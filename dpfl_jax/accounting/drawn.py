"""What drawn noise costs in addition to the ideal Gaussian noise that is accounted for."""

from __future__ import annotations

import math
from typing import Literal

NoiseLaw = Literal["exact", "float"]

# The share of delta that every epsilon sets aside for the distance of drawn from ideal noise.
RESERVED = 2.0**-20
# Largest number of coordinates of one sum; larger sums are refused.
MOST_COORDINATES = 1 << 36
# Distances of one coordinate of exact noise from the Gaussian rounded down: the mass beyond the
# table, and the chi-square distances due to the table's weights, rounded to multiples of 2^-159,
# and to the spline between them (docs/internals/noise.md; tests compute all three).
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
    """Returns a bound on the total variation between exact and rounded Gaussian noise.

    The Kullback-Leibler divergences of independent coordinates, at most their chi-square distances,
    add up, and total variation is at most the root of half their sum (Pinsker). The mass beyond the
    table adds up directly.
    """
    roots = math.sqrt(TABLE / 2) + math.sqrt(SPLINE / 2)
    return BEYOND_TABLE * coordinates + roots * math.sqrt(coordinates)


def noise_assumptions(
    law: NoiseLaw, epsilon: float, delta: float, steps: int | None
) -> tuple[str, ...]:
    """Returns the sentences on what a guarantee assumes about its noise.

    Args:
      law: ``"exact"`` or ``"float"``.
      epsilon: epsilon of the guarantee.
      delta: delta of the guarantee.
      steps: number of steps that add noise; None: unknown, taken to be a million.

    Examples:
      >>> from dpfl_jax.accounting import noise_assumptions
      >>> len(noise_assumptions("float", epsilon=1.0, delta=1e-5, steps=100)) > 0
      True
    """
    if law == "float":
        return (IDEALISED_FLOAT,)
    apart = distance(float(MOST_COORDINATES) * (10**6 if steps is None else max(steps, 1)))
    # With both neighbours' outputs that far from their ideals, delta grows by (1 + e^eps) * apart.
    paid = epsilon < 700 and (1 + math.exp(epsilon)) * apart <= RESERVED * delta
    sentence = (
        "noise is drawn and added in integers, for sums of up to 2^36 coordinates: what is drawn "
        f"is within {apart:.1g} (total variation, all steps together) of Gaussian noise, rounded; "
    )
    sentence += "2^-20 of delta is kept for that" if paid else UNPAID
    return (sentence, IDEALISED)
