"""Charles et al. 2024, "Fine-tuning large language models with user-level differential privacy"."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
from scipy import special, stats


def large_noise_els(batch: float, users: float, steps: int, epsilon: float, delta: float) -> float:
    """sigma_ELS ~ (B / N) sqrt(T) / mu(eps, delta): the large-noise limit, whatever the group size.

    Explains why Figure 2(a) is flat. A rule of thumb, NOT A BOUND: the true noise is larger.
    """
    return batch / users * math.sqrt(steps) * dp_accounting.get_sigma_gaussian(epsilon, delta)


def large_noise_uls(cohort: float, users: float, steps: int, epsilon: float, delta: float) -> float:
    """sigma_ULS ~ (M / N) sqrt(T) / mu(eps, delta). A rule of thumb, NOT A BOUND."""
    return large_noise_els(cohort, users, steps, epsilon, delta)


def renyi_of_binomial_mixture(order: int, sigma: float, group_size: int, prob: float) -> float:
    """R_alpha(N(Binom(K, p), s^2) || N(0, s^2)) at an integer order, exactly (Appendix C).

    exp((a-1) R_a) = E exp(((sum c_i)^2 - sum c_i^2) / (2 s^2)) over c_1..c_a ~ Binom(K, p).
    """
    counts = np.arange(group_size + 1)
    log_weight = stats.binom.logpmf(counts, group_size, prob) - counts**2 / (2 * sigma**2)
    # Distribution of the sum of `order` counts, in log space.
    total = np.array([0.0])
    for _ in range(order):
        grown = np.full(len(total) + group_size, -np.inf)
        for count, weight in zip(counts, log_weight):
            part = slice(count, count + len(total))
            grown[part] = np.logaddexp(grown[part], total + weight)
        total = grown
    sums = np.arange(len(total))
    log_moment = special.logsumexp(total + sums**2 / (2 * sigma**2))
    return float(log_moment / (order - 1))


def lemma_1_holds(order: int, sigma: float, group_size: int, prob: float) -> bool:
    """Lemma 1: R_a(P_K(K s), Q(K s)) <= R_a(P_1(s), Q(s)) for integers a > 1, K >= 1."""
    grouped = renyi_of_binomial_mixture(order, group_size * sigma, group_size, prob)
    return grouped <= renyi_of_binomial_mixture(order, sigma, 1, prob) * (1 + 1e-9) + 1e-12
