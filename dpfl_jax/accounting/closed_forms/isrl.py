"""Lowy and Razaviyayn 2023 (ICLR), "Private federated learning without a trusted server".

L is the per-example gradient bound, K the local minibatch, n records in a silo, R rounds. Noise is
given as a standard deviation on the *mean* gradient, divided by L; the noise multiplier of the
accountant is that times K (noise on the sum over L).
"""

from __future__ import annotations

import math

import numpy as np

from dpfl_jax.accounting import events
from dpfl_jax.accounting.accountant import REPLACE
from dpfl_jax.accounting.accountant import delta as delta_of
from dpfl_jax.accounting.accountant import epsilon as epsilon_of
from dpfl_jax.accounting.event_types import ApproximateDpEvent
from dpfl_jax.errors import BadInputError


def minibatch_noise(rounds: int, silo_size: int, epsilon: float, delta: float) -> float:
    """Theorem D.1 / F.1: sigma^2 = 256 L^2 R ln(2.5 R / d) ln(2 / d) / (n^2 e^2), over L^2.

    Valid, and very loose (at n = 1238, R = 35, epsilon 1 it spends 0.027). Needs
    epsilon <= 2 ln(2/delta) and K >= :func:`minibatch_least_batch`.
    """
    _require(epsilon <= 2 * math.log(2 / delta), "epsilon <= 2 ln(2/delta)")
    square = 256 * rounds * math.log(2.5 * rounds / delta) * math.log(2 / delta)
    return math.sqrt(square) / (silo_size * epsilon)


def minibatch_least_batch(rounds: int, silo_size: int, epsilon: float, delta: float) -> float:
    """The proof's condition on the batch: K >= e n / (4 sqrt(2 R ln(2 / d)))."""
    return epsilon * silo_size / (4 * math.sqrt(2 * rounds * math.log(2 / delta)))


def one_pass_noise(batch_size: float, epsilon: float, delta: float) -> float:
    """Theorem E.1: sigma^2 = 32 L^2 ln(1.25 / d) / (e^2 K^2), over L^2; e <= 8 ln(1/d). Valid."""
    _require(epsilon <= 8 * math.log(1 / delta), "epsilon <= 8 ln(1/delta)")
    return math.sqrt(32 * math.log(1.25 / delta)) / (epsilon * batch_size)


def experiment_noise(rounds: int, silo_size: int, epsilon: float, delta: float) -> float:
    """Appendix I: sigma^2 = 8 L^2 ln(1/d) R / (n^2 e^2), over L^2. NOT A BOUND.

    Justified there by an asymptotic theorem; at epsilon 12 and 18 it spends 12.5 and 20.3.
    """
    return math.sqrt(8 * math.log(1 / delta) * rounds) / (silo_size * epsilon)


def experiment_batch(rounds: int, silo_size: int, epsilon: float) -> float:
    """Appendix I: K = n sqrt(e) / (2 sqrt(R))."""
    return silo_size * math.sqrt(epsilon) / (2 * math.sqrt(rounds))


def local_sgd_noise(
    rounds: int, local_steps: int, silo_size: int, epsilon: float, delta: float
) -> float:
    """Section 3.10: sigma^2 = 8 L^2 R K ln(1/d) / (e^2 n^2) per local step, over L^2. NOT A BOUND.

    Composed step by step it spends 26.7 at epsilon 3.
    """
    return experiment_noise(rounds * local_steps, silo_size, epsilon, delta)


def user_level_budget(silo_size: int, epsilon: float, delta: float) -> tuple[float, float]:
    """Appendix D.3.5: record-level (eps / n, delta / (4 n)) for a user-level target, eps <= 1."""
    _require(epsilon <= 1, "a user-level epsilon <= 1")
    return epsilon / silo_size, delta / (4 * silo_size)


def user_level_guarantee(silo_size: int, epsilon: float, delta: float) -> tuple[float, float]:
    """Record-level (e0, d0) gives the whole silo (n e0, n e^((n-1) e0) d0)."""
    grown = (silo_size - 1) * epsilon
    factor = math.exp(grown) if grown < 700 else math.inf
    return silo_size * epsilon, silo_size * factor * delta


def shuffled_epsilon(epsilon: float, silos: int, silo_size: int, delta: float) -> float:
    """Theorem D.5, eq. (21): epsilon of one shuffled round of (epsilon, .)-DP silo randomisers.

    Raises:
      BadInputError: outside its range, epsilon <= ln(N / (16 ln(2/delta))) / n.
    """
    limit = silos / (16 * math.log(2 / delta))
    _require(
        limit > 1 and epsilon <= math.log(limit) / silo_size,
        "epsilon <= ln(N / (16 ln(2/delta))) / n",
    )
    grown = math.exp(silo_size * epsilon)
    inner = 8 * math.sqrt(grown * math.log(4 / delta) / silos) + 8 * grown / silos
    return math.log1p(math.tanh(epsilon / 2) * inner)


def shuffled_delta(
    epsilon: float, silos: int, silo_size: int, delta: float, silo_delta: float
) -> float:
    """Theorem D.5: delta + 2 N n e^((n-1) e) silo_delta."""
    return delta + 2 * silos * silo_size * math.exp((silo_size - 1) * epsilon) * silo_delta


def sdp_least_cohort(rounds: int, silos: int, delta: float) -> int:
    """Theorem G.1's condition M >= 16 ln(18 R M^2 / (N delta)) at M = N: the least M."""
    m = 1
    while m < 16 * math.log(18 * rounds * m * (m / max(m, silos)) / delta):
        m += 1
    return m


def sdp_noise(
    rounds: int,
    cohort: int,
    silos: int,
    silo_size: int,
    epsilon: float,
    delta: float,
    constant: float = 1.0,
) -> float:
    """Theorem G.1: sigma^2 = C L^2 R M ln(R M^2/(N d)) ln(R/d) ln(1/d) / (n^2 N^2 e^2), over L^2.

    The constant C is not given in the paper: NOT A BOUND for any particular one. See
    :func:`sdp_epsilon` for the chain of its proof with numbers.
    """
    square = constant * rounds * cohort * math.log(rounds * cohort**2 / (silos * delta))
    square *= math.log(rounds / delta) * math.log(1 / delta)
    return math.sqrt(square) / (silo_size * silos * epsilon)


def sdp_epsilon(
    noise_multiplier: float, rounds: int, cohort: int, silos: int, silo_size: int, delta: float
) -> float:
    """Shuffle-DP epsilon of noisy SGD with K = 1: the chain of Theorem G.1, with numbers.

    Each of M secretly drawn silos sends the noisy gradient of one random record through a
    shuffler. Exact Gaussian (replace-one) -> shuffling, Feldman, McMillan, Talwar 2021, Theorem 3.8
    -> subsampling with rate M / (n N) -> optimal composition over R rounds (PLD). The split of
    delta is optimised over a grid; every choice is valid. Unit: record; adjacency: replace-one;
    trust: shuffle.

    Args:
      noise_multiplier: sigma / L of each report.
      rounds: R.
      cohort: M, silos that answer in a round, drawn at random and in secret.
      silos: N.
      silo_size: n, public.
      delta: in (0, 1).

    Returns:
      Epsilon; ``inf`` where no choice is within the range of the shuffling theorem.
    """
    rate = cohort / (silo_size * silos)
    local = events.gaussian(noise_multiplier, 1)
    best = math.inf
    for share in (0.1, 0.3, 0.5):
        # rounds * rate * (shuffle_delta + local part) = share * delta; the rest is composition's.
        per_round = share * delta / (rounds * rate)
        if per_round >= 1:
            continue
        shuffle_delta = per_round / 2
        limit = cohort / (16 * math.log(2 / shuffle_delta))
        if limit <= 1:
            continue
        for e0 in np.geomspace(1e-3, math.log(limit), 40):
            try:
                hidden = shuffled_epsilon(float(e0), cohort, 1, shuffle_delta)
            except BadInputError:
                continue
            local_delta = delta_of(local, float(e0), relation=REPLACE)
            spent = (math.exp(hidden) + 1) * (1 + math.exp(-e0) / 2) * cohort * local_delta
            if spent > per_round / 2:
                continue
            step = ApproximateDpEvent(math.log1p(rate * math.expm1(hidden)), rate * per_round)
            found = epsilon_of(events.repeated(step, rounds), delta, relation=REPLACE)
            best = min(best, found)
            break
    return best


def _require(condition: bool, words: str) -> None:
    if not condition:
        raise BadInputError(f"this formula holds only for {words}: use the numerical accountant")
