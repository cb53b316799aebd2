"""Poisson sampling: every unit takes part in a step independently, with the same probability.

This is the sampling that the Poisson-subsampled and mixture-of-Gaussians events account for. The
number of units varies from step to step and is never rounded, truncated or padded with real data.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling.base import Draw, binomial_bound, bucket_bounds, check_probability
from dpfl_jax.sampling.contribution import choose_within_users


def poisson_indices(rng: np.random.Generator, population: int, prob: float) -> np.ndarray:
    """Draws each of ``population`` units independently with probability ``prob``.

    The size is drawn from Binomial(population, prob), then a uniform subset of that size: the same
    law as independent coins, at a cost that follows the draw and not the population.

    Returns:
      Sorted int64 [n], the units drawn.
    """
    if prob >= 1.0:
        return np.arange(population, dtype=np.int64)
    size = rng.binomial(population, prob)
    chosen = rng.choice(population, size=size, replace=False, shuffle=False)
    return np.sort(chosen.astype(np.int64, copy=False))


@dataclasses.dataclass(frozen=True)
class PoissonExamples:
    """Poisson sampling of examples from a fixed list of positions (ELS: the limited set D_sub).

    Attributes:
      positions: int64 [n], store positions that may be drawn.
      prob: probability with which each is drawn at each step.
      key: root key of the run.
    """

    positions: np.ndarray
    prob: float
    key: RootKey
    group_size: None = None

    def __post_init__(self) -> None:
        """Validates the probability."""
        check_probability(self.prob, f"for {len(self.positions)} examples")

    @property
    def description(self) -> str:
        """One line for the report."""
        return f"Poisson over {len(self.positions)} examples, probability {self.prob:.6g} each"

    @property
    def expected_size(self) -> float:
        """Expected number of examples in a draw."""
        return len(self.positions) * self.prob

    def size_bound(self, tail: float = 1e-15) -> int:
        """A number of examples that a draw exceeds with probability at most ``tail``."""
        return binomial_bound(len(self.positions), self.prob, tail)

    def draw(self, step: int) -> Draw:
        """Returns the examples of ``step``: units [n], positions [n]."""
        rng = self.key.numpy("sampling", step)
        units = poisson_indices(rng, len(self.positions), self.prob)
        return Draw(units, self.positions[units])


@dataclasses.dataclass(frozen=True)
class PoissonUsers:
    """Poisson sampling of users, with up to ``group_size`` examples of each one drawn (ULS).

    The examples of a drawn user are chosen afresh at each step, uniformly without replacement, and
    independently of every other user.

    Attributes:
      user_offsets: int64 [num_users + 1]; user u owns positions offsets[u]:offsets[u+1].
      prob: probability with which each user is drawn at each step.
      group_size: most examples of one user in a step.
      key: root key of the run.
    """

    user_offsets: np.ndarray
    prob: float
    group_size: int
    key: RootKey

    def __post_init__(self) -> None:
        """Validates the probability."""
        check_probability(self.prob, f"for {self.num_users} users")

    @property
    def num_users(self) -> int:
        """Number of users that may be drawn."""
        return len(self.user_offsets) - 1

    @property
    def description(self) -> str:
        """One line for the report."""
        return (
            f"Poisson over {self.num_users} users, probability {self.prob:.6g} each; up to "
            f"{self.group_size} examples of a user per step, uniformly without replacement"
        )

    @property
    def expected_size(self) -> float:
        """Expected number of users in a draw."""
        return self.num_users * self.prob

    def size_bound(self, tail: float = 1e-15) -> int:
        """A number of users that a draw exceeds with probability at most ``tail``."""
        return binomial_bound(self.num_users, self.prob, tail)

    def bucket_bounds(self, sizes: tuple[int, ...], tail: float = 1e-15) -> tuple[int, ...]:
        """As ``size_bound``, for the users whose examples first fit into each of ``sizes``."""
        most = self.size_bound(tail)
        return bucket_bounds(self.user_offsets, sizes, most, self.prob, tail)

    def draw(self, step: int) -> Draw:
        """Returns the users of ``step``: units [n], positions [n, group_size] (-1 = none)."""
        users = poisson_indices(self.key.numpy("sampling", step), self.num_users, self.prob)
        rng = self.key.numpy("within-user", step)
        return Draw(users, choose_within_users(rng, self.user_offsets, users, self.group_size))
