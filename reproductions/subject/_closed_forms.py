"""Marathe et al., subject-level DP in federated learning (two texts, here "A" and "B").

A: "Subject Granular Differential Privacy in Federated Learning". B: "Subject Level Differential
Privacy with Hierarchical Gradient Averaging". K is the most records of a subject in a silo, q the
sampling probability of a record, T R the number of local steps of the whole run.

Examples:
  >>> from reproductions.subject import _closed_forms
  >>> _closed_forms.rounds_printed(30, silos=10)
  9
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from scipy import optimize

from dpfl_jax.accounting import events
from dpfl_jax.accounting.calibrate import calibrate_noise_multiplier
from dpfl_jax.accounting.renyi import renyi_divergences
from dpfl_jax.errors import at_least


def item_budget_of_group(
    epsilon: float, delta: float, size: int, *, tight: bool = False
) -> tuple[float, float]:
    """Record-level (eps, delta) that gives a group of ``size`` the target by the generic lemma.

    A, Definition 3.3: eps = E / g, delta = D / (g e^((g-1) E / g)); the printed delta misses D.
    ``tight``: A's appendix, delta = D (e^(E/g) - 1) / (e^E - 1).
    """
    at_least("the group size", size, 1)
    item = epsilon / size
    if tight:
        return item, delta * math.expm1(item) / math.expm1(epsilon)
    return item, delta / (size * math.exp((size - 1) * item))


def noise_by_group(
    epsilon: float,
    delta: float,
    size: int,
    sampling_prob: float,
    steps: int,
    *,
    tight: bool = False,
    moments: bool = False,
) -> float:
    """sigma_g: record-level DP-SGD noise for :func:`item_budget_of_group`, by PLD or moments.

    Sound if ``size`` is K, the most records of a subject in the silo. With the paper's ``size`` =
    Z, the largest count in the *batch*, it is NOT A BOUND for the subject: the amplification is
    that of one record, and a noise that follows Z depends on private data.
    """
    item_epsilon, item_delta = item_budget_of_group(epsilon, delta, size, tight=tight)
    if moments:
        return moments_noise(item_epsilon, item_delta, sampling_prob, steps)
    return calibrate_noise_multiplier(
        lambda sigma: events.poisson(sigma, sampling_prob, steps), item_epsilon, item_delta
    )


def moments_noise(epsilon: float, delta: float, sampling_prob: float, steps: int) -> float:
    """Noise of DP-SGD by the papers' moments accountant (Abadi et al. 2016, Theorem 2).

    Epsilon is the least D_a + log(1 / delta) / (a - 1) over the orders a = 2, ..., 64.
    """
    orders = np.arange(2.0, 65.0)

    def excess(log_noise: float) -> float:
        event = events.poisson(math.exp(log_noise), sampling_prob, steps)
        bounds = renyi_divergences(event, orders) - math.log(delta) / (orders - 1)
        return float(bounds.min()) - epsilon

    return math.exp(optimize.brentq(excess, math.log(0.2), math.log(1e5)))


def hi_grad_fraction(
    sampling_prob: float, items_per_subject: float, variant: Literal["exact", "A", "B"] = "exact"
) -> float:
    """Probability that a subject is in the batch, as HiGradAvgDP's texts take it.

    exact: 1 - (1-q)^K. A: K q with K the maximum (a valid upper bound, at most 1; with the *mean*
    records per subject, as in Theorem 3.7, NOT A BOUND). B: q, NOT A BOUND by a factor of about K.
    """
    if variant == "exact":
        return events.any_of_several(sampling_prob, int(items_per_subject))
    return min(1.0, items_per_subject * sampling_prob) if variant == "A" else sampling_prob


def user_ldp_noise(epsilon: float, delta: float, steps: int) -> float:
    """UserLDP by A's Theorem 3.10: a step moves by C, every batch counts. NOT A BOUND: by 2C."""
    return moments_noise(epsilon, delta, 1.0, steps)


def user_ldp_least_noise(epsilon: float, delta: float) -> float:
    """What A's Theorem 3.11 asks for besides: 1 / (sqrt(2 pi) epsilon delta e^epsilon)."""
    return 1 / (math.sqrt(2 * math.pi) * epsilon * delta * math.exp(epsilon))


def rounds_printed(rounds: int, silos: int) -> int:
    """A, Theorem 3.13 / B, Theorem 4.2: train R / sqrt(s) rounds to pay for s silos. NOT A BOUND.

    The loss of s silos over R rounds grows as sqrt(R s), so it takes R / s.
    """
    return math.floor(rounds / math.sqrt(silos))
