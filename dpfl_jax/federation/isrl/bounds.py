"""What excess risk is possible: the paper's upper and lower bounds, up to constants and logarithms.

For a reader who wants to know, before training, whether privacy will cost anything. Constants are
1; the upper bounds hide log^2 factors, so the numbers are rates, not promises.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dpfl_jax.federation.isrl.theory import Problem


class Risk(NamedTuple):
    """Excess risk: the part that sampling causes, and the part that privacy causes."""

    statistical: float
    private: float


def upper(problem: Problem) -> Risk:
    """Theorem 2.1: noisy MB-SGD, i.i.d. silos."""
    p = problem
    if p.strong_convexity:
        scale = p.lipschitz**2 / (p.strong_convexity * p.cohort)
        return Risk(scale / p.silo_size, scale * p.noise**2)
    scale = p.lipschitz * p.diameter / math.sqrt(p.cohort)
    return Risk(scale / math.sqrt(p.silo_size), scale * p.noise)


def lower(problem: Problem) -> Risk:
    """Theorem 2.2: no ISRL-DP algorithm (compositional, C = 1) does better, up to logarithms."""
    p = problem
    cost = 1 / (p.signal * math.sqrt(p.cohort))
    if p.strong_convexity:
        sampled = p.phi**2 / (p.strong_convexity * p.silo_size * p.cohort)
        return Risk(sampled, p.lipschitz * p.diameter * min(1.0, cost**2))
    sampled = p.phi * p.diameter / math.sqrt(p.cohort * p.silo_size)
    return Risk(sampled, p.lipschitz * p.diameter * min(1.0, cost))


def central(problem: Problem) -> Risk:
    """The trusted server's convex lower bound (Bassily et al. 2019): 1/sqrt(N) less noise."""
    p = problem
    private = p.lipschitz * p.diameter * min(1.0, 1 / (p.signal * p.cohort))
    return Risk(p.phi * p.diameter / math.sqrt(p.cohort * p.silo_size), private)
