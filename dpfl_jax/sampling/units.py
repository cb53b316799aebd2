"""Samplers for any scheme: examples of a list, or users with some of their examples."""

from __future__ import annotations

import dataclasses

import numpy as np

from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling.base import Draw, bucket_bounds
from dpfl_jax.sampling.contribution import check_group_size, choose_within_users
from dpfl_jax.sampling.schemes import SamplingScheme, Scheme, check_population


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleSampler:
    """Draws examples from a list of positions.

    Attributes:
      scheme: which of them.
      positions: int64 [n], store positions that may be drawn.
      key: root key of the run.
    """

    scheme: Scheme
    positions: np.ndarray
    key: RootKey
    group_size: None = None

    def __post_init__(self) -> None:
        """Checks that there are examples."""
        check_population(self.population)

    @property
    def population(self) -> int:
        """Number of examples that may be drawn."""
        return len(self.positions)

    @property
    def expected_size(self) -> float:
        """Expected number of examples in a draw."""
        return self.scheme.expected_size(self.population)

    def size_bound(self, tail: float = 1e-15) -> int:
        """A number of examples that a draw exceeds with probability at most ``tail``."""
        return self.scheme.size_bound(self.population, tail)

    def draw(self, step: int) -> Draw:
        """Returns the examples of ``step``: units [n], positions [n]."""
        units = self.scheme.indices(self.key, step, self.population)
        return Draw(units, self.positions[units])


@dataclasses.dataclass(frozen=True, eq=False)
class UserSampler:
    """Draws users, and up to ``group_size`` examples of each, uniformly.

    Attributes:
      scheme: which users.
      user_offsets: int64 [num_users + 1]; user u owns positions offsets[u]:offsets[u+1].
      group_size: most examples of one user in a step.
      key: root key of the run.
    """

    scheme: Scheme
    user_offsets: np.ndarray
    group_size: int
    key: RootKey

    def __post_init__(self) -> None:
        """Checks the sizes."""
        check_group_size(self.group_size)
        check_population(self.population)

    @property
    def population(self) -> int:
        """Number of users."""
        return len(self.user_offsets) - 1

    @property
    def expected_size(self) -> float:
        """Expected number of users in a draw."""
        return self.scheme.expected_size(self.population)

    def size_bound(self, tail: float = 1e-15) -> int:
        """A number of users that a draw exceeds with probability at most ``tail``."""
        return self.scheme.size_bound(self.population, tail)

    def bucket_bounds(self, sizes: tuple[int, ...], tail: float = 1e-15) -> tuple[int, ...]:
        """As ``size_bound``, for the users whose examples first fit into each of ``sizes``."""
        prob = self.scheme.rate if isinstance(self.scheme, SamplingScheme) else None
        return bucket_bounds(self.user_offsets, sizes, self.size_bound(tail), prob, tail)

    def draw(self, step: int) -> Draw:
        """Returns the users of ``step``: units [n], positions [n, group_size] (-1 = none)."""
        users = self.scheme.indices(self.key, step, self.population)
        # proof: uls-sampling-2
        rng = self.key.numpy("within-user", step)
        return Draw(users, choose_within_users(rng, self.user_offsets, users, self.group_size))
