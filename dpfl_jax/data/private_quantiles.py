"""Differentially private quantiles of examples per user, by the exponential mechanism.

The median number of examples per user is the group size that Charles et al. 2024 (section 6)
suggest; the exact one is itself information about the users.
"""

from __future__ import annotations

import math

import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey


def private_quantile(
    counts: np.ndarray, quantile: float, epsilon: float, largest: int, rng: np.random.Generator
) -> int:
    """Releases one quantile of the counts with pure epsilon-DP for adding or removing a user.

    The exponential mechanism (McSherry & Talwar 2007; Smith 2011, algorithm 2, here over integers):
    candidate v in 1..largest has the score ``-|quantile * below - (1 - quantile) * above|`` with
    ``below`` the counts < v and ``above`` the counts > v. Adding or removing one user changes a
    score by at most ``max(quantile, 1 - quantile)``, and the score does not name the number of
    users. Output v is drawn with probability proportional to exp(epsilon * score / (2 *
    sensitivity)).

    Args:
      counts: int64 [num_users], examples of each user.
      quantile: in (0, 1); 0.5 for the median.
      epsilon: privacy loss.
      largest: public upper bound of the answer; must not be looked up in the data.
      rng: secret randomness.

    Returns:
      An integer in 1..largest.

    Raises:
      BadInputError: if a parameter is out of range.
    """
    if not 0.0 < quantile < 1.0:
        raise BadInputError(f"the quantile is {quantile}, but it must be above 0 and below 1")
    if not (epsilon > 0.0 and math.isfinite(epsilon)):
        raise BadInputError(f"epsilon is {epsilon}, but a private quantile needs one above 0")
    if largest < 1:
        raise BadInputError(f"the upper bound is {largest}, but it must be at least 1")
    ordered = np.sort(np.asarray(counts))
    candidates = np.arange(1, largest + 1)
    below = np.searchsorted(ordered, candidates, side="left")
    above = len(ordered) - np.searchsorted(ordered, candidates, side="right")
    scores = -np.abs(quantile * below - (1.0 - quantile) * above)
    sensitivity = max(quantile, 1.0 - quantile)
    # Adding Gumbel noise and taking the largest samples the exponential mechanism exactly.
    noisy = epsilon * scores / (2.0 * sensitivity) + rng.gumbel(size=largest)
    return int(candidates[np.argmax(noisy)])


def private_quantiles(
    counts: np.ndarray,
    quantiles: list[float],
    epsilon: float,
    largest: int,
    key: RootKey | None = None,
) -> list[int]:
    """Releases several quantiles; each gets an equal share of epsilon (basic composition)."""
    key = key or RootKey.generate()
    if not quantiles:
        raise BadInputError("no quantile is asked for: give at least one, e.g. 0.5")
    share = epsilon / len(quantiles)
    return [
        private_quantile(counts, q, share, largest, key.numpy("private-quantile", i))
        for i, q in enumerate(quantiles)
    ]
