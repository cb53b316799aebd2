"""The paper's step sizes, rounds, batches and bounds on risk, as pure functions.

Logarithms are natural. Misprints of the paper are corrected, and named in the docstrings. Numbers
that could only be learned from private data (phi, upsilon, gap) are inputs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from dpfl_jax.errors import positive, require
from dpfl_jax.federation.isrl.privacy import Budget


@dataclasses.dataclass(frozen=True)
class Problem:
    """A convex federated problem and its privacy budget. If silos differ, it has the worst values.

    Attributes:
      lipschitz: bound L on the norm of a record's gradient over W.
      diameter: diameter D of W, twice its radius.
      dim: number of parameters d.
      silos: number of silos N.
      silo_size: number of records of a silo n.
      budget: the budget that a silo grants its records.
      cohort: number M of silos that answer in a round; if it is random, 1/M = E[1/M_r].
      smoothness: beta; inf if the loss is not smooth.
      strong_convexity: mu; 0 if the loss is only convex.
      phi: standard deviation of a record's gradient within its silo.
      upsilon: heterogeneity, the root mean square distance of silos' gradients from their mean.
      gap: bound on F(w_0) - F*.

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
        """epsilon n / sqrt(d): the larger it is, the less privacy costs."""
        return self.budget.epsilon * self.silo_size / math.sqrt(self.dim)

    @property
    def noise(self) -> float:
        """sqrt(d ln(1/delta)) / (epsilon n)."""
        return math.sqrt(math.log(1 / self.budget.delta)) / self.signal


def minibatch_step(problem: Problem, rounds: int, sigma: float) -> float:
    """Returns the step size eta of noisy minibatch SGD, by Theorem 2.1 (D.1).

    For strongly convex losses it follows Lemma D.5, with c = d sigma^2/M + L^2.

    Args:
      problem: the problem.
      rounds: number of rounds R.
      sigma: noise on a silo's *mean* gradient, only used if the loss is strongly convex.
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
    """Returns the number of rounds of noisy minibatch SGD, by Theorem 2.1."""
    p, beta, mu = problem, problem.smoothness, problem.strong_convexity
    private = p.cohort * p.signal**2
    sampled = min(p.cohort * p.silo_size, private)
    if mu:
        inside = max(math.e, beta * p.diameter**2 * mu * private / p.lipschitz**2)
        return math.ceil(max(1, 2 * beta / mu * math.log(inside), sampled))
    return max(1, math.ceil(beta * p.diameter / p.lipschitz * math.sqrt(sampled) + sampled))


def accelerated_rounds(problem: Problem, batch: float) -> int:
    """Returns the number of rounds of accelerated ERM with local batch K, by Theorem 4.1 (F.1).

    It is multi-stage if the loss is strongly convex. For convex losses the paper prints (beta
    D/L)^{1/4}. Balancing the two terms of its proof gives the square root of the whole product,
    which also reproduces Theorem F.2.
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
    """Returns the local batch K, from 1 to n, of one-pass accelerated SGD, by Theorem 3.1.

    The number of rounds is then R = floor(n / K). For convex losses K is (L/(beta D))^{2/5} n^{3/5}
    (d ln(1/delta))^{1/5} / (epsilon^{2/5} M^{1/5}), which the paper prints with a lost bracket. It
    balances beta D^2 K^2/n^2 against LD sqrt(d ln(1/delta)) / (epsilon sqrt(K n M)).
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
    """Returns the variance V^2 of the mean noisy gradient in one pass, by Lemma E.3.

    It is phi^2/(MK) + (1 - (M-1)/(N-1)) upsilon^2/M + d sigma^2/M, where sigma is the noise on one
    silo's *mean*. (The lemma writes the noise inside the mean over K, but it is not divided by K.)
    """
    p, m = problem, problem.cohort
    between = 0.0 if p.silos == 1 else (1 - (m - 1) / (p.silos - 1)) * p.upsilon**2 / m
    return p.phi**2 / (m * batch) + between + p.dim * sigma**2 / m


def variance_erm(problem: Problem, batch: float, sigma: float) -> float:
    """Returns a bound on V^2 in ERM: 4 L^2/(MK) (0 with all records) + d sigma^2/M (Lemma F.1)."""
    p = problem
    whole = p.cohort * batch >= p.silo_size * p.silos
    sampled = 0.0 if whole else 4 * p.lipschitz**2 / (p.cohort * batch)
    return sampled + p.dim * sigma**2 / p.cohort


def smoothing_sco(problem: Problem) -> float:
    """Returns beta of the Moreau envelope for one pass (SCO), by section 2."""
    p = problem
    if p.strong_convexity:
        return p.strong_convexity * p.cohort / (1 / p.silo_size + p.noise**2)
    scale = p.lipschitz * math.sqrt(p.cohort) / p.diameter
    return scale / (1 / math.sqrt(p.silo_size) + p.noise)


def smoothing_erm(problem: Problem) -> float:
    """Returns beta of the Moreau envelope for ERM, by Theorem F.2."""
    p = problem
    if p.strong_convexity:
        return p.strong_convexity * p.cohort * p.signal**2
    return p.signal * math.sqrt(p.cohort) * p.lipschitz / p.diameter


class Risk(NamedTuple):
    """A bound on the excess risk: the parts that are due to sampling and to privacy.

    Constants are 1, and the upper bounds hide log^2 factors, so that these are only orders of size.
    """

    statistical: float
    private: float


def risk_upper_bound(problem: Problem) -> Risk:
    """Returns the upper bound for noisy minibatch SGD with i.i.d. silos, by Theorem 2.1."""
    p = problem
    if p.strong_convexity:
        scale = p.lipschitz**2 / (p.strong_convexity * p.cohort)
        return Risk(scale / p.silo_size, scale * p.noise**2)
    scale = p.lipschitz * p.diameter / math.sqrt(p.cohort)
    return Risk(scale / math.sqrt(p.silo_size), scale * p.noise)


def empirical_risk_upper_bound(problem: Problem) -> Risk:
    """Returns the upper bound on the excess *empirical* risk of accelerated ERM, by Theorem 4.1."""
    return Risk(0.0, risk_upper_bound(problem).private)


def one_pass_risk_upper_bound(problem: Problem) -> Risk:
    """Returns the upper bound for one accelerated pass over any silos, by Theorem 3.1.

    Every silo answers, or silos are so similar that those that answer do for all.
    """
    return _any_silos(problem, problem.noise / math.sqrt(problem.cohort))


def shuffled_risk_upper_bound(problem: Problem) -> Risk:
    """Returns the upper bound with a trusted shuffler and i.i.d. silos, by Theorem 5.1."""
    p = problem
    cost = p.noise / p.silos
    if p.strong_convexity:
        scale = p.lipschitz**2 / p.strong_convexity
        return Risk(scale / (p.silo_size * p.cohort), scale * cost**2)
    scale = p.lipschitz * p.diameter
    return Risk(scale / math.sqrt(p.silo_size * p.cohort), scale * cost)


def shuffled_one_pass_risk_upper_bound(problem: Problem) -> Risk:
    """Returns the upper bound with a trusted shuffler and any silos, by Theorem 5.2."""
    return _any_silos(problem, problem.noise / problem.silos)


def local_risk_upper_bound(problem: Problem) -> Risk:
    """Returns the upper bound if people do not trust their own silo, either.

    It is Theorem 2.1's with a silo for each record.
    """
    p = problem
    records, answering = p.silos * p.silo_size, p.cohort * p.silo_size
    return risk_upper_bound(
        dataclasses.replace(p, silos=math.ceil(records), silo_size=1.0, cohort=answering)
    )


def _any_silos(problem: Problem, cost: float) -> Risk:
    p, mu = problem, problem.strong_convexity
    records = p.silo_size * p.cohort
    if mu:
        private = math.sqrt(p.smoothness / mu) * p.lipschitz**2 / mu * cost**2
        return Risk(p.phi**2 / (mu * records), private)
    private = (p.smoothness**0.25 * p.lipschitz * p.diameter**1.5 * cost) ** 0.8
    return Risk(p.phi * p.diameter / math.sqrt(records), private)


def risk_lower_bound(problem: Problem) -> Risk:
    """Returns the lower bound for (compositional, C = 1) ISRL-DP algorithms, by Theorem 2.2."""
    p = problem
    cost = 1 / (p.signal * math.sqrt(p.cohort))
    if p.strong_convexity:
        sampled = p.phi**2 / (p.strong_convexity * p.silo_size * p.cohort)
        return Risk(sampled, p.lipschitz * p.diameter * min(1.0, cost**2))
    sampled = p.phi * p.diameter / math.sqrt(p.cohort * p.silo_size)
    return Risk(sampled, p.lipschitz * p.diameter * min(1.0, cost))


def central_risk_lower_bound(problem: Problem) -> Risk:
    """Returns the convex lower bound with a trusted server (Bassily et al. 2019)."""
    p = problem
    private = p.lipschitz * p.diameter * min(1.0, 1 / (p.signal * p.cohort))
    return Risk(p.phi * p.diameter / math.sqrt(p.cohort * p.silo_size), private)
