"""Step sizes, rounds and batches in the shuffle model (Theorems 5.1 and 5.2); see ``theory``."""

from __future__ import annotations

import math

from dpfl_jax.federation.isrl.theory import check, variance_sco


def shuffled_step_convex(
    rounds: int,
    beta: float,
    lipschitz: float,
    diameter: float,
    *,
    n: float,
    silos: float,
    num_silos: int,
    dim: int,
    epsilon: float,
    delta: float,
) -> float:
    """Theorem 5.1 (G.1), convex: eta of shuffled MB-SGD with one record a report."""
    check(rounds=rounds, beta=beta, lipschitz=lipschitz, diameter=diameter, epsilon=epsilon)
    logs = math.log(rounds * silos**2 / (num_silos * delta)) * math.log(rounds / delta)
    private = epsilon * n * num_silos / math.sqrt(dim * silos * logs * math.log(1 / delta))
    least = min(math.sqrt(n), private)
    return min(1 / beta, diameter * math.sqrt(silos) / (lipschitz * rounds) * least)


def shuffled_rounds(
    *, n: float, silos: float, num_silos: int, dim: int, epsilon: float, smooth: float
) -> int:
    """Theorem 5.1: R of shuffled MB-SGD: hardly ever few enough to run.

    Args:
      n: records of a silo.
      silos: M.
      num_silos: N.
      dim: d.
      epsilon: shuffle-DP.
      smooth: the optimisation term: convex (beta D/L) min{sqrt(nM), epsilon n N/sqrt d}; strongly
        convex (8 beta/mu) ln(beta D^2 mu epsilon^2 n^2 N^2 / (d L^2)).
    """
    check(n=n, silos=silos, epsilon=epsilon)
    whole = (epsilon * n * num_silos) ** 2 / silos
    return max(1, math.ceil(max(whole, num_silos / silos, min(n, whole / dim), smooth)))


def vector_batch_convex(
    beta: float,
    lipschitz: float,
    diameter: float,
    *,
    n: float,
    silos: float,
    dim: int,
    epsilon: float,
    delta: float,
) -> int:
    """Theorem 5.2, convex: K of the one-pass algorithm in the shuffle model, within 1 and n.

    K = (L/(beta D))^{2/5} n^{3/5} d^{1/5} ln^{2/5}(d/delta) / (epsilon M)^{2/5}. (Printed with the
    epsilon_0 and the logarithm of the algorithm without a shuffler.)
    """
    check(beta=beta, lipschitz=lipschitz, diameter=diameter, epsilon=epsilon)
    batch = (lipschitz / (beta * diameter)) ** 0.4 * n**0.6 * dim**0.2
    batch *= (math.log(dim / delta) / (epsilon * silos)) ** 0.4
    return int(min(max(1, round(batch)), n))


def variance_vector(
    phi: float,
    upsilon: float,
    *,
    batch: float,
    silos: float,
    num_silos: int,
    dim: int,
    noise: float,
) -> float:
    """Lemma E.3 with P_vec: ``noise`` is the variance of a coordinate of the protocol's sum."""
    sampled = variance_sco(
        phi, upsilon, batch=batch, silos=silos, num_silos=num_silos, dim=dim, sigma=0.0
    )
    return sampled + dim * noise / (silos * batch) ** 2
