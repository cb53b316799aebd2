"""The distribution of exact noise: a table of 2,048 columns, computed in exact arithmetic.

Noise is Z = V 2^32 + U - 11 (2^31 - 1/2) - 1/2, where U is the sum of eleven uniform 32-bit words,
and V, one of +-1/2, +-3/2, ..., is drawn from the table: a spline of degree 10 with 2^32 integers
between its knots. The weights of V are those with which that spline is Gaussian;
docs/internals/noise.md says how far from it. Everything here is Python's integers and decimals, so
that it is the same on every machine.
"""

from __future__ import annotations

import decimal
import fractions
import functools
import math

import numpy as np

COLUMNS = 1 << 11
WORDS = 11  # uniform words in a number: the order of the spline
STDDEV = 157.5 * 2.0**32  # of Z
THRESHOLD_BITS = 148  # of one column; what the table's weights are multiples of is 2^-159
_BERNOULLI = ("1/6", "1/30", "1/42", "1/30", "5/66", "691/2730", "7/6", "3617/510")


def weights(count: int = COLUMNS) -> list[decimal.Decimal]:
    """P(V = i + 1/2 | V > 0) of the spline that is Gaussian, for i = 0, 1, ..., count - 1.

    Their Fourier transform is the Gaussian's over the spline's, exp(-v t^2 / 2 + c_2 t^4 + ...):
    a Gaussian density times a series in Hermite polynomials. 60 digits and more are right.
    """
    with decimal.localcontext(decimal.Context(prec=90)) as context:
        # c_k = 11 |B_2k| / (2k (2k)!), from log(sin(x) / x); then the exponential of that series.
        log_terms = [fractions.Fraction(0), fractions.Fraction(0)]
        for k, number in enumerate(_BERNOULLI[1:], 2):
            divisor = 2 * k * math.factorial(2 * k)
            log_terms.append(WORDS * fractions.Fraction(number) / divisor)
        terms = [fractions.Fraction(1)]
        for n in range(1, len(log_terms)):
            weighted = sum(j * log_terms[j] * terms[n - j] for j in range(1, n + 1))
            terms.append(fractions.Fraction(weighted) / n)

        def exactly(x: fractions.Fraction) -> decimal.Decimal:
            return context.divide(decimal.Decimal(x.numerator), decimal.Decimal(x.denominator))

        step = fractions.Fraction(STDDEV) / 2**32
        variance = exactly(step**2 - fractions.Fraction(WORDS, 12) + fractions.Fraction(1, 2**64))
        series = [(-1) ** k * exactly(e) / variance**k for k, e in enumerate(terms)]

        def one(i: int) -> decimal.Decimal:
            square = decimal.Decimal(2 * i + 1) ** 2 / (4 * variance)
            z = square.sqrt()
            before, now, total = decimal.Decimal(1), z, series[0]
            for n in range(1, 2 * len(series) - 2):
                before, now = now, z * now - n * before
                if n % 2:
                    total += series[(n + 1) // 2] * now
            return total * (-square / 2).exp()

        # Over all half-integers they add up to sqrt(2 pi v), to far more digits than are kept.
        densities = [one(i) for i in range(max(count, COLUMNS + 200))]
        whole = sum(densities, decimal.Decimal(0))
        return [w / whole for w in densities[:count]]


def counts() -> list[int]:
    """The weights that are drawn, times 2^159: rounded, and adding up to 2^159."""
    with decimal.localcontext(decimal.Context(prec=90)):
        drawn = weights()
        scale = 2 ** (THRESHOLD_BITS + 11) / sum(drawn, decimal.Decimal(0))
        rounded = [int((w * scale).to_integral_value()) for w in drawn]
    rounded[0] += (COLUMNS << THRESHOLD_BITS) - sum(rounded)
    return rounded


@functools.cache
def alias_table() -> np.ndarray:
    """uint32 [6, 2048]: of each column its threshold (148 bits in five words), and its alias.

    Walker 1977, Vose 1991, in integers: a column is itself below its threshold, and its alias from
    there on; no weight is changed.
    """
    left, full = counts(), 1 << THRESHOLD_BITS
    threshold, alias = [full] * COLUMNS, list(range(COLUMNS))
    small = [i for i, n in enumerate(left) if n < full]
    large = [i for i, n in enumerate(left) if n >= full]
    while small:
        i, j = small.pop(), large[-1]
        threshold[i], alias[i] = left[i], j
        left[j] -= full - left[i]
        if left[j] < full:
            small.append(large.pop())
    rows = [[(t >> by) & 0xFFFFFFFF for t in threshold] for by in (128, 96, 64, 32, 0)]
    return np.array([*rows, alias], np.uint32)
