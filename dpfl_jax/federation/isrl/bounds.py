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


def one_pass_convex(
    phi: float,
    lipschitz: float,
    beta: float,
    diameter: float,
    n: float,
    silos: float,
    dim: int,
    epsilon: float,
    delta: float,
) -> Risk:
    """Theorem 3.1: one-pass accelerated, any heterogeneity, all silos answer; convex."""
    noise = math.sqrt(dim * math.log(1 / delta)) / (epsilon * n * math.sqrt(silos))
    private = (beta**0.25 * lipschitz * diameter**1.5 * noise) ** 0.8
    return Risk(phi * diameter / math.sqrt(silos * n), private)


def one_pass_strongly_convex(
    phi: float,
    lipschitz: float,
    beta: float,
    mu: float,
    n: float,
    silos: float,
    dim: int,
    epsilon: float,
    delta: float,
) -> Risk:
    """Theorem 3.1: one-pass multi-stage, any heterogeneity, all silos answer; strongly convex."""
    noise = dim * math.log(1 / delta) / ((epsilon * n) ** 2 * silos)
    private = math.sqrt(beta / mu) * lipschitz**2 / mu * noise
    return Risk(phi**2 / (mu * n * silos), private)


def absent_convex(
    upsilon: float,
    lipschitz: float,
    beta: float,
    diameter: float,
    n: float,
    silos: float,
    num_silos: int,
    dim: int,
    epsilon: float,
    delta: float,
) -> float:
    """Theorem E.1: what heterogeneity adds to ``one_pass_convex`` when M of N silos answer."""
    noise = math.sqrt(dim * math.log(1 / delta)) / (epsilon * n * silos**3)
    scale = upsilon * lipschitz**0.2 * diameter**0.8 * beta**-0.2
    return math.sqrt(_absent(silos, num_silos)) * scale * noise**0.2


def absent_strongly_convex(
    upsilon: float, beta: float, mu: float, silos: float, num_silos: int
) -> float:
    """Theorem E.1: the same for ``one_pass_strongly_convex``."""
    return upsilon**2 / (mu * math.sqrt(beta / mu) * silos) * _absent(silos, num_silos)


def _absent(silos: float, num_silos: int) -> float:
    return (num_silos - silos) / (num_silos - 1) if num_silos > 1 else 0.0


def erm_convex(
    lipschitz: float,
    diameter: float,
    n: float,
    silos: float,
    dim: int,
    epsilon: float,
    delta: float,
) -> Risk:
    """Theorem 4.1: accelerated ERM, convex."""
    noise = math.sqrt(dim * math.log(1 / delta)) / (epsilon * n * math.sqrt(silos))
    return Risk(0.0, lipschitz * diameter * noise)


def erm_strongly_convex(
    lipschitz: float, mu: float, n: float, silos: float, dim: int, epsilon: float, delta: float
) -> Risk:
    """Theorem 4.1: strongly convex."""
    return Risk(0.0, lipschitz**2 / mu * dim * math.log(1 / delta) / ((epsilon * n) ** 2 * silos))


def shuffled_convex(
    lipschitz: float,
    diameter: float,
    n: float,
    silos: float,
    num_silos: int,
    dim: int,
    epsilon: float,
    delta: float,
) -> Risk:
    """Theorem 5.1: shuffled MB-SGD, i.i.d. silos; with all silos the trusted server's rate."""
    noise = math.sqrt(dim * math.log(1 / delta)) / (epsilon * n * num_silos)
    scale = lipschitz * diameter
    return Risk(scale / math.sqrt(n * silos), scale * noise)


def shuffled_strongly_convex(
    lipschitz: float,
    mu: float,
    n: float,
    silos: float,
    num_silos: int,
    dim: int,
    epsilon: float,
    delta: float,
) -> Risk:
    """Theorem 5.1, strongly convex."""
    noise = dim * math.log(1 / delta) / (epsilon * n * num_silos) ** 2
    return Risk(lipschitz**2 / (mu * n * silos), lipschitz**2 / mu * noise)


def vector_convex(
    phi: float,
    lipschitz: float,
    beta: float,
    diameter: float,
    n: float,
    silos: float,
    dim: int,
    epsilon: float,
    delta: float,
) -> Risk:
    """Theorem 5.2: one-pass in the shuffle model, any heterogeneity, all silos answer; convex."""
    noise = math.sqrt(dim) * math.log(dim / delta) / (epsilon * n * silos)
    private = (beta**0.25 * lipschitz * diameter**1.5 * noise) ** 0.8
    return Risk(phi * diameter / math.sqrt(silos * n), private)


def vector_strongly_convex(
    phi: float,
    lipschitz: float,
    beta: float,
    mu: float,
    n: float,
    silos: float,
    dim: int,
    epsilon: float,
    delta: float,
) -> Risk:
    """Theorem 5.2, strongly convex."""
    noise = dim * math.log(1 / delta) / (epsilon * n * silos) ** 2
    private = math.sqrt(beta / mu) * lipschitz**2 / mu * noise
    return Risk(phi**2 / (mu * n * silos), private)


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


def central_strongly_convex(
    phi: float,
    lipschitz: float,
    mu: float,
    diameter: float,
    n: float,
    silos: float,
    dim: int,
    epsilon: float,
) -> Risk:
    """The trusted-server lower bound (Theorem D.6), strongly convex."""
    private = lipschitz * diameter * min(1.0, dim / (epsilon * n * silos) ** 2)
    return Risk(phi**2 / (mu * n * silos), private)


def local_convex(lipschitz: float, diameter: float, silos: float, dim: int, epsilon: float) -> Risk:
    """Local DP (Duchi et al. 2013): silos of one record each, nobody is trusted."""
    private = lipschitz * diameter * min(1.0, math.sqrt(dim) / (epsilon * math.sqrt(silos)))
    return Risk(lipschitz * diameter / math.sqrt(silos), private)


def user_level_convex(
    lipschitz: float,
    diameter: float,
    n: float,
    silos: float,
    dim: int,
    epsilon: float,
    delta: float,
) -> Risk:
    """Appendix D.3.5: (epsilon <= 1, delta) for a silo's whole data by ISRL-DP at epsilon/n.

    The private part does not depend on n, and no algorithm does better.
    """
    noise = math.sqrt(dim * math.log(n / delta)) / (epsilon * math.sqrt(silos))
    return Risk(lipschitz * diameter / math.sqrt(n * silos), lipschitz * diameter * noise)


def unbalanced_convex(
    lipschitz: float,
    diameter: float,
    dim: int,
    sizes: list[int],
    epsilons: list[float],
    deltas: list[float],
    rounds: int,
) -> Risk:
    """Theorem H.1 with all silos answering: min{Xi / M, xi_max / M}, so the average counts."""
    private = math.sqrt(dim * unbalanced_term(sizes, epsilons, deltas, rounds))
    scale = lipschitz * diameter
    return Risk(scale / math.sqrt(min(sizes) * len(sizes)), scale * private)


def unbalanced_strongly_convex(
    lipschitz: float,
    mu: float,
    dim: int,
    sizes: list[int],
    epsilons: list[float],
    deltas: list[float],
    rounds: int,
) -> Risk:
    """Theorem H.1, strongly convex."""
    private = dim * unbalanced_term(sizes, epsilons, deltas, rounds)
    scale = lipschitz**2 / mu
    return Risk(scale / (len(sizes) * min(sizes)), scale * private)


def unbalanced_term(
    sizes: list[int],
    epsilons: list[float],
    deltas: list[float],
    rounds: int,
    law: dict[int, float] | None = None,
) -> float:
    """min{Xi / M', xi_max / M} of Appendix H.

    xi_i = ln(2.5 R/delta_i) ln(2/delta_i) / (n_i epsilon_i)^2, in falling order;
    Xi = sqrt(E[(mean of the first M_1)^2]); 1/M' = sqrt(E[1/M_r^2]); 1/M = E[1/M_r].

    Args:
      sizes: n_i.
      epsilons: of the silos.
      deltas: of the silos.
      rounds: R.
      law: {m: probability} of M_r; default all silos.
    """
    xi = sorted(
        (
            math.log(2.5 * rounds / d) * math.log(2 / d) / (n * e) ** 2
            for n, e, d in zip(sizes, epsilons, deltas, strict=True)
        ),
        reverse=True,
    )
    law = {len(xi): 1.0} if law is None else law
    average = math.sqrt(sum(p * (sum(xi[:m]) / m) ** 2 for m, p in law.items()))
    inverse = math.sqrt(sum(p / m**2 for m, p in law.items()))
    return min(average * inverse, xi[0] * sum(p / m for m, p in law.items()))


def privacy_for_free(n: float, dim: int, epsilon: float) -> bool:
    """Whether the statistical part dominates: d <= n epsilon^2."""
    return dim <= n * epsilon**2
