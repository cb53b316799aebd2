"""What excess risk is possible: the paper's upper and lower bounds, up to constants and logarithms.

For a reader who wants to know, before training, whether privacy will cost anything. Constants are
1; the upper bounds hide log^2 factors, so the numbers are rates, not promises.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Risk(NamedTuple):
    """Excess risk: the part that sampling causes, and the part that privacy causes."""

    statistical: float
    private: float

    @property
    def total(self) -> float:
        """Their sum."""
        return self.statistical + self.private


def iid_convex(
    lipschitz: float,
    diameter: float,
    n: float,
    silos: float,
    dim: int,
    epsilon: float,
    delta: float,
) -> Risk:
    """Theorem 2.1: noisy MB-SGD, i.i.d. silos, convex; optimal."""
    noise = math.sqrt(dim * math.log(1 / delta)) / (epsilon * n)
    scale = lipschitz * diameter / math.sqrt(silos)
    return Risk(scale / math.sqrt(n), scale * noise)


def iid_strongly_convex(
    lipschitz: float, mu: float, n: float, silos: float, dim: int, epsilon: float, delta: float
) -> Risk:
    """Theorem 2.1: strongly convex."""
    scale = lipschitz**2 / (mu * silos)
    return Risk(scale / n, scale * dim * math.log(1 / delta) / (epsilon * n) ** 2)


def lower_convex(
    phi: float, lipschitz: float, diameter: float, n: float, silos: float, dim: int, epsilon: float
) -> Risk:
    """Theorem 2.2: no ISRL-DP algorithm (compositional, C = 1) does better, up to logarithms."""
    private = lipschitz * diameter * min(1.0, math.sqrt(dim) / (epsilon * n * math.sqrt(silos)))
    return Risk(phi * diameter / math.sqrt(silos * n), private)


def lower_strongly_convex(
    phi: float,
    lipschitz: float,
    mu: float,
    diameter: float,
    n: float,
    silos: float,
    dim: int,
    epsilon: float,
) -> Risk:
    """Theorem 2.2: strongly convex."""
    private = lipschitz * diameter * min(1.0, dim / ((epsilon * n) ** 2 * silos))
    return Risk(phi**2 / (mu * n * silos), private)


def central_convex(
    phi: float, lipschitz: float, diameter: float, n: float, silos: float, dim: int, epsilon: float
) -> Risk:
    """The trusted-server lower bound (Bassily et al. 2019): 1/sqrt(N) less noise."""
    private = lipschitz * diameter * min(1.0, math.sqrt(dim) / (epsilon * n * silos))
    return Risk(phi * diameter / math.sqrt(silos * n), private)
