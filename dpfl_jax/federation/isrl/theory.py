"""The paper's step sizes, rounds and batches, as pure functions. Natural logarithms throughout.

n records a silo, M silos answer, d parameters, L gradient bound, beta smoothness, mu strong
convexity, D diameter of W (twice the radius), (epsilon, delta) per silo. Misprints of the paper are
corrected, and named where that happens. What needs private data to be known (phi, upsilon, the
distance to the minimiser) is an input: it is never estimated here.
"""

from __future__ import annotations

import math

from dpfl_jax.errors import BadInputError


def check(**values: float) -> None:
    """Raises BadInputError unless every value is finite and above 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise BadInputError(f"{name} is {value}, but it must be finite and above 0")


def minibatch_step_convex(
    rounds: int,
    beta: float,
    lipschitz: float,
    diameter: float,
    *,
    n: float,
    silos: float,
    dim: int,
    epsilon: float,
) -> float:
    """Theorem 2.1 (D.1), convex: eta of noisy MB-SGD."""
    check(rounds=rounds, beta=beta, lipschitz=lipschitz, diameter=diameter, epsilon=epsilon)
    private = epsilon * n * math.sqrt(silos) / math.sqrt(rounds * dim)
    least = min(1.0, private, math.sqrt(n * silos / rounds))
    return min(1 / beta, diameter / (lipschitz * math.sqrt(rounds)) * least)


def minibatch_rounds_convex(
    beta: float,
    lipschitz: float,
    diameter: float,
    *,
    n: float,
    silos: float,
    dim: int,
    epsilon: float,
) -> int:
    """Theorem 2.1, convex: R of noisy MB-SGD."""
    private = epsilon * n / math.sqrt(dim)
    first = beta * diameter * math.sqrt(silos) / lipschitz * min(math.sqrt(n), private)
    return max(1, math.ceil(first + min(n * silos, private**2 * silos)))


def minibatch_step_strongly_convex(
    rounds: int,
    beta: float,
    mu: float,
    lipschitz: float,
    diameter: float,
    *,
    silos: float,
    dim: int,
    sigma: float,
) -> float:
    """Lemma D.5 with c = d sigma^2 / M + L^2: eta; sigma is of the *mean* gradient."""
    check(rounds=rounds, beta=beta, mu=mu, lipschitz=lipschitz, diameter=diameter)
    noise = dim * sigma**2 / silos + lipschitz**2
    grown = max(2.0, mu**2 * diameter**2 * rounds**2 / noise)
    return min(1 / (2 * beta), math.log(grown) / (mu * rounds))


def minibatch_rounds_strongly_convex(
    beta: float,
    mu: float,
    lipschitz: float,
    diameter: float,
    *,
    n: float,
    silos: float,
    dim: int,
    epsilon: float,
) -> int:
    """Theorem 2.1, strongly convex: R of noisy MB-SGD."""
    private = silos * epsilon**2 * n**2 / dim
    inside = max(math.e, beta * diameter**2 * mu * private / lipschitz**2)
    return max(1, math.ceil(max(2 * beta / mu * math.log(inside), min(silos * n, private))))


def accelerated_rounds_convex(
    beta: float,
    lipschitz: float,
    diameter: float,
    *,
    n: float,
    silos: float,
    dim: int,
    epsilon: float,
    delta: float,
    batch: float,
    num_silos: float,
) -> int:
    """Theorem 4.1 (F.1): R of accelerated ERM.

    Printed with (beta D/L)^{1/4}; balancing the proof's two terms gives the square root of the
    whole product, which is also what reproduces Theorem F.2.
    """
    noise = math.sqrt(dim * math.log(1 / delta))
    first = math.sqrt(beta * diameter / lipschitz * math.sqrt(silos) * epsilon * n / noise)
    return max(
        1, math.ceil(max(first, _sampling_rounds(n, silos, batch, num_silos, epsilon, noise)))
    )


def _sampling_rounds(
    n: float, silos: float, batch: float, num_silos: float, epsilon: float, noise: float
) -> float:
    if silos * batch >= num_silos * n:
        return 0.0
    return epsilon**2 * n**2 / (batch * noise**2)


def accelerated_rounds_strongly_convex(
    beta: float,
    mu: float,
    lipschitz: float,
    gap: float,
    *,
    n: float,
    silos: float,
    dim: int,
    epsilon: float,
    delta: float,
    batch: float,
    num_silos: float,
) -> int:
    """Theorem 4.1: R of multi-stage accelerated ERM; gap >= F(w_0) - F*."""
    inside = max(math.e, gap * mu * silos * epsilon**2 * n**2 / (lipschitz**2 * dim))
    noise = math.sqrt(dim * math.log(1 / delta))
    first = math.sqrt(beta / mu) * math.log(inside)
    return max(
        1, math.ceil(max(first, _sampling_rounds(n, silos, batch, num_silos, epsilon, noise)))
    )


def one_pass_batch_convex(
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
    """Theorem 3.1, convex: K of one-pass accelerated MB-SGD, within 1 and n; R = floor(n / K).

    K = (L/(beta D))^{2/5} n^{3/5} (d ln(1/delta))^{1/5} / (epsilon^{2/5} M^{1/5}): printed with a
    lost bracket; it balances beta D^2 K^2/n^2 against LD sqrt(d ln) / (epsilon sqrt(K n M)).
    """
    noise = dim * math.log(1 / delta)
    batch = (lipschitz / (beta * diameter)) ** 0.4 * n**0.6 * noise**0.2
    batch /= epsilon**0.4 * silos**0.2
    return int(min(max(1, round(batch)), n))


def one_pass_batch_strongly_convex(
    beta: float,
    mu: float,
    lipschitz: float,
    gap: float,
    phi: float,
    *,
    n: float,
    silos: float,
    dim: int,
    epsilon: float,
    delta: float,
) -> int:
    """Theorem 3.1, strongly convex: K of the multi-stage one-pass algorithm."""
    private = epsilon**2 * n**2 * silos / (lipschitz**2 * dim * math.log(1 / delta))
    inside = max(math.e, mu * gap * min(private, n * silos / phi**2))
    batch = n / (math.sqrt(beta / mu) * math.log(inside))
    return int(min(max(1, round(batch)), n))


def variance_sco(
    phi: float,
    upsilon: float,
    *,
    batch: float,
    silos: float,
    num_silos: int,
    dim: int,
    sigma: float,
) -> float:
    """Lemma E.3: V^2 of the mean noisy gradient; sigma is the noise of one silo's *mean*.

    phi^2/(MK) + (1 - (M-1)/(N-1)) upsilon^2/M + d sigma^2/M. (The lemma writes the noise inside the
    mean over K; it is not divided by K.)

    Args:
      phi: standard deviation of a record's gradient within its silo.
      upsilon: heterogeneity, root of the mean squared distance of silos' gradients from their mean.
      batch: K.
      silos: M.
      num_silos: N.
      dim: d.
      sigma: noise of a silo's message.
    """
    between = 0.0 if num_silos == 1 else (1 - (silos - 1) / (num_silos - 1)) * upsilon**2 / silos
    return phi**2 / (silos * batch) + between + dim * sigma**2 / silos


def variance_erm(
    lipschitz: float,
    *,
    batch: float,
    n: float,
    silos: float,
    num_silos: int,
    dim: int,
    sigma: float,
) -> float:
    """Lemma F.1: V^2 <= 4 L^2/(MK) (unless all records answer) + d sigma^2/M."""
    sampled = 0.0 if silos * batch >= n * num_silos else 4 * lipschitz**2 / (silos * batch)
    return sampled + dim * sigma**2 / silos


def smoothing_convex_sco(
    lipschitz: float,
    diameter: float,
    *,
    n: float,
    silos: float,
    dim: int,
    epsilon: float,
    delta: float,
) -> float:
    """Section 2 (non-smooth), convex SCO: beta of the Moreau envelope."""
    inside = 1 / math.sqrt(n) + math.sqrt(dim * math.log(1 / delta)) / (epsilon * n)
    return lipschitz * math.sqrt(silos) / diameter / inside


def smoothing_strongly_convex_sco(
    mu: float, *, n: float, silos: float, dim: int, epsilon: float, delta: float
) -> float:
    """The same, strongly convex SCO."""
    return mu * silos / (1 / n + dim * math.log(1 / delta) / (epsilon * n) ** 2)


def smoothing_convex_erm(
    lipschitz: float, diameter: float, *, n: float, silos: float, dim: int, epsilon: float
) -> float:
    """Theorem F.2, convex ERM: beta = epsilon n sqrt(M) L / (sqrt(d) D)."""
    return epsilon * n * math.sqrt(silos) * lipschitz / (math.sqrt(dim) * diameter)


def smoothing_strongly_convex_erm(
    mu: float, *, n: float, silos: float, dim: int, epsilon: float
) -> float:
    """The same, strongly convex ERM: beta = mu M epsilon^2 n^2 / d."""
    return mu * silos * (epsilon * n) ** 2 / dim
