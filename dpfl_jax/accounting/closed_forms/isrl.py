"""Lowy and Razaviyayn 2023 (ICLR), "Private federated learning without a trusted server".

L is the per-example gradient bound, K the local minibatch, n records in a silo, R rounds. Noise is
given as a standard deviation on the *mean* gradient, divided by L; the noise multiplier of the
accountant is that times K (noise on the sum over L).

Examples:
  >>> from dpfl_jax.accounting.closed_forms import isrl
  >>> round(isrl.minibatch_noise(rounds=35, silo_size=1238, epsilon=3.0, delta=1e-6), 4)
  0.4151
"""

from __future__ import annotations

import math

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

    Justified there by an asymptotic theorem; at epsilon 12 and 18 it spends 12.5 and 20.3. Local
    SGD takes it with R K for R, and spends 26.7 at epsilon 3 if composed step by step.
    """
    return math.sqrt(8 * math.log(1 / delta) * rounds) / (silo_size * epsilon)


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


def _require(condition: bool, words: str) -> None:
    if not condition:
        raise BadInputError(f"this formula holds only for {words}: use the numerical accountant")
