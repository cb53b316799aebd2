"""What a sampler is: a random-access sequence of draws, one per step.

A draw is host-side and made of positions into a store, so that only what was drawn is read.
Every sampler derives step t's draw from the root key and t alone.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
from scipy import stats

from dpfl_jax.errors import BadInputError


@dataclasses.dataclass(frozen=True)
class Draw:
    """The units taking part in one step.

    Attributes:
      units: int64 [n], the index of each unit drawn (an example of the limited set, a user).
      positions: int64 [n] or [n, group_size], store positions of the examples of each unit; -1
        where a unit has fewer examples than group_size.
    """

    units: np.ndarray
    positions: np.ndarray

    @property
    def size(self) -> int:
        """Number of units drawn (may be 0: a step without units is still a step)."""
        return len(self.units)

    @property
    def example_mask(self) -> np.ndarray:
        """Bool array of the shape of ``positions``: True where there is an example."""
        return self.positions >= 0


class Sampler(Protocol):
    """Random access to the draws of a run."""

    @property
    def expected_size(self) -> float:
        """Expected number of units in a draw."""

    @property
    def group_size(self) -> int | None:
        """Examples a unit may hold in a draw, or None if the unit is one example."""

    def size_bound(self, tail: float = 1e-15) -> int:
        """A number of units that a draw exceeds with probability at most ``tail``."""

    def draw(self, step: int) -> Draw:
        """Returns the draw of ``step`` (0-based), without replaying earlier steps."""


def check_probability(
    prob: float, what: str, advice: str = "lower the expected size or use more data"
) -> float:
    """Returns ``prob`` if it is in (0, 1].

    Raises:
      BadInputError: if it is not; ``what`` says what the probability was made from.
    """
    if not 0.0 < prob <= 1.0:
        raise BadInputError(
            f"the sampling probability is {prob:.6g} ({what}), but it must be above 0 and at most "
            f"1: {advice}"
        )
    return float(prob)


def binomial_bound(population: int, prob: float, tail: float) -> int:
    """Smallest k with P(Binomial(population, prob) > k) <= tail."""
    if population == 0:
        return 0
    return int(stats.binom.isf(tail, population, prob))


def bucket_bounds(
    user_offsets: np.ndarray, sizes: tuple[int, ...], most: int, prob: float | None, tail: float
) -> tuple[int, ...]:
    """Bounds, for users sorted by how many examples they hold in a draw, on each sort's number.

    Args:
      user_offsets: int64 [num_users + 1].
      sizes: increasing group sizes up to the group size; a user goes to the first that holds all
        examples it may bring.
      most: largest number of users in a draw.
      prob: probability with which each user is drawn independently; None if they are not.
      tail: probability with which each bound may be exceeded.

    Returns:
      One number of users per size.
    """
    held = np.minimum(np.diff(user_offsets), sizes[-1])
    held = held[held > 0]  # a user without examples fits anywhere: count it with the smallest
    counts = np.bincount(np.searchsorted(np.asarray(sizes), held), minlength=len(sizes))
    counts[0] += len(user_offsets) - 1 - len(held)
    if prob is None:
        return tuple(int(min(most, count)) for count in counts)
    return tuple(min(most, binomial_bound(int(count), prob, tail)) for count in counts)
