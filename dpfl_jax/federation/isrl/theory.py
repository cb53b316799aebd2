"""The paper's step sizes, rounds, batches and bounds on risk, as pure functions.

Logarithms are natural. Misprints of the paper are corrected, and named where that happens. What
needs private data to be known (phi, upsilon, gap) is an input: it is never estimated here.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from dpfl_jax.errors import positive, require
from dpfl_jax.federation.isrl.privacy import Budget


@dataclasses.dataclass(frozen=True)
class Problem:
    """A convex problem of silos and the privacy they ask for. Where silos differ: the worst one's.

    Attributes:
      lipschitz: L, bound of a record's gradient over W.
      diameter: D of W, twice its radius.
      dim: d, number of parameters.
      silos: N.
      silo_size: n.
      budget: what a silo grants its records.
      cohort: M, silos that answer in a round; 1/M = E[1/M_r] if their number is random.
      smoothness: beta; inf if the loss is not smooth.
      strong_convexity: mu; 0 if the loss is only convex.
      phi: standard deviation of a record's gradient within its silo.
      upsilon: heterogeneity, root of the mean squared distance of silos' gradients from their mean.
      gap: >= F(w_0) - F*.

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> problem = isrl.Problem(
      ...     lipschitz=1.0, diameter=2.0, dim=10, silos=25, silo_size=1000,
      ...     budget=isrl.Budget(3.0, 1e-6), cohort=25,
      ... )
      >>> problem.noise < problem.signal
      True
    """

    lipschitz: float
    diameter: float
    dim: int
    silos: int
    silo_size: float
    budget: Budget
    cohort: float
    smoothness: float = math.inf
    strong_convexity: float = 0.0
    phi: float = 0.0
    upsilon: float = 0.0
    gap: float = 0.0

    def __post_init__(self) -> None:
        for name in ("lipschitz", "diameter", "dim", "silo_size", "cohort", "smoothness"):
            require(getattr(self, name) > 0, name, getattr(self, name), "above 0")

    @property
    def signal(self) -> float:
        """Epsilon n / sqrt(d): what privacy costs falls with it."""
        return self.budget.epsilon * self.silo_size / math.sqrt(self.dim)

    @property
    def noise(self) -> float:
        """sqrt(d ln(1/delta)) / (epsilon n)."""
        return math.sqrt(math.log(1 / self.budget.delta)) / self.signal


def minibatch_step(problem: Problem, rounds: int, sigma: float) -> float:
    """Eta of noisy MB-SGD: Theorem 2.1 (D.1), convex; Lemma D.5, c = d sigma^2/M + L^2, strongly.

    Args:
      problem: of which silos.
      rounds: R.
      sigma: noise of a silo's *mean* gradient (needed if strongly convex).
    """
    positive("rounds", rounds)
    p, mu = problem, problem.strong_convexity
    if mu:
        noise = p.dim * sigma**2 / p.cohort + p.lipschitz**2
        grown = max(2.0, mu**2 * p.diameter**2 * rounds**2 / noise)
        return min(1 / (2 * p.smoothness), math.log(grown) / (mu * rounds))
    private = p.signal * math.sqrt(p.cohort / rounds)
    least = min(1.0, private, math.sqrt(p.silo_size * p.cohort / rounds))
    return min(1 / p.smoothness, p.diameter / (p.lipschitz * math.sqrt(rounds)) * least)


def minibatch_rounds(problem: Problem) -> int:
    """Theorem 2.1: R of noisy MB-SGD."""
    p, beta, mu = problem, problem.smoothness, problem.strong_convexity
    private = p.cohort * p.signal**2
    sampled = min(p.cohort * p.silo_size, private)
    if mu:
        inside = max(math.e, beta * p.diameter**2 * mu * private / p.lipschitz**2)
        return math.ceil(max(1, 2 * beta / mu * math.log(inside), sampled))
    return max(1, math.ceil(beta * p.diameter / p.lipschitz * math.sqrt(sampled) + sampled))


def accelerated_rounds(problem: Problem, batch: float) -> int:
    """Theorem 4.1 (F.1): R of accelerated ERM, in stages if strongly convex, at local batch K.

    Convex: printed with (beta D/L)^{1/4}; balancing the proof's two terms gives the square root of
    the whole product, which is also what reproduces Theorem F.2.
    """
    p, beta, mu = problem, problem.smoothness, problem.strong_convexity
    if mu:
        inside = max(math.e, p.gap * mu * p.cohort * p.signal**2 / p.lipschitz**2)
        first = math.sqrt(beta / mu) * math.log(inside)
    else:
        first = math.sqrt(beta * p.diameter / p.lipschitz * math.sqrt(p.cohort) / p.noise)
    whole = p.cohort * batch >= p.silos * p.silo_size
    return math.ceil(max(1, first, 0 if whole else 1 / (batch * p.noise**2)))


def one_pass_batch(problem: Problem) -> int:
    """Theorem 3.1: K of one-pass accelerated MB-SGD, within 1 and n; R = floor(n / K).

    Convex: K = (L/(beta D))^{2/5} n^{3/5} (d ln(1/delta))^{1/5} / (epsilon^{2/5} M^{1/5}), printed
    with a lost bracket; it balances beta D^2 K^2/n^2 against LD sqrt(d ln) / (epsilon sqrt(K n M)).
    """
    p, n, mu = problem, problem.silo_size, problem.strong_convexity
    if mu:
        private = p.cohort / (p.lipschitz * p.noise) ** 2
        sampled = n * p.cohort / p.phi**2
        inside = max(math.e, mu * p.gap * min(private, sampled))
        batch = n / (math.sqrt(p.smoothness / mu) * math.log(inside))
    else:
        scale = p.lipschitz / (p.smoothness * p.diameter)
        batch = n * (scale * p.noise) ** 0.4 / p.cohort**0.2
    return int(min(max(1, round(batch)), n))


def variance_sco(problem: Problem, batch: float, sigma: float) -> float:
    """Lemma E.3: V^2 of the mean noisy gradient; sigma is the noise of one silo's *mean*.

    phi^2/(MK) + (1 - (M-1)/(N-1)) upsilon^2/M + d sigma^2/M. (The lemma writes the noise inside the
    mean over K; it is not divided by K.)
    """
    p, m = problem, problem.cohort
    between = 0.0 if p.silos == 1 else (1 - (m - 1) / (p.silos - 1)) * p.upsilon**2 / m
    return p.phi**2 / (m * batch) + between + p.dim * sigma**2 / m


def variance_erm(problem: Problem, batch: float, sigma: float) -> float:
    """Lemma F.1: V^2 <= 4 L^2/(MK) (unless all records answer) + d sigma^2/M."""
    p = problem
    whole = p.cohort * batch >= p.silo_size * p.silos
    sampled = 0.0 if whole else 4 * p.lipschitz**2 / (p.cohort * batch)
    return sampled + p.dim * sigma**2 / p.cohort


def smoothing_sco(problem: Problem) -> float:
    """Section 2 (non-smooth), SCO: beta of the Moreau envelope."""
    p = problem
    if p.strong_convexity:
        return p.strong_convexity * p.cohort / (1 / p.silo_size + p.noise**2)
    scale = p.lipschitz * math.sqrt(p.cohort) / p.diameter
    return scale / (1 / math.sqrt(p.silo_size) + p.noise)


def smoothing_erm(problem: Problem) -> float:
    """Theorem F.2: epsilon n sqrt(M) L / (sqrt(d) D); strongly mu M epsilon^2 n^2 / d."""
    p = problem
    if p.strong_convexity:
        return p.strong_convexity * p.cohort * p.signal**2
    return p.signal * math.sqrt(p.cohort) * p.lipschitz / p.diameter


class Risk(NamedTuple):
    """Excess risk that is possible: the parts that sampling and that privacy cause.

    Constants are 1, and the upper bounds hide log^2 factors: the numbers are rates, not promises.
    """

    statistical: float
    private: float


def risk_upper_bound(problem: Problem) -> Risk:
    """Theorem 2.1: noisy MB-SGD, i.i.d. silos."""
    p = problem
    if p.strong_convexity:
        scale = p.lipschitz**2 / (p.strong_convexity * p.cohort)
        return Risk(scale / p.silo_size, scale * p.noise**2)
    scale = p.lipschitz * p.diameter / math.sqrt(p.cohort)
    return Risk(scale / math.sqrt(p.silo_size), scale * p.noise)


def risk_lower_bound(problem: Problem) -> Risk:
    """Theorem 2.2: no ISRL-DP algorithm (compositional, C = 1) does better, up to logarithms."""
    p = problem
    cost = 1 / (p.signal * math.sqrt(p.cohort))
    if p.strong_convexity:
        sampled = p.phi**2 / (p.strong_convexity * p.silo_size * p.cohort)
        return Risk(sampled, p.lipschitz * p.diameter * min(1.0, cost**2))
    sampled = p.phi * p.diameter / math.sqrt(p.cohort * p.silo_size)
    return Risk(sampled, p.lipschitz * p.diameter * min(1.0, cost))


def central_risk_lower_bound(problem: Problem) -> Risk:
    """The trusted server's convex lower bound (Bassily et al. 2019): 1/sqrt(N) less noise."""
    p = problem
    private = p.lipschitz * p.diameter * min(1.0, 1 / (p.signal * p.cohort))
    return Risk(p.phi * p.diameter / math.sqrt(p.cohort * p.silo_size), private)
