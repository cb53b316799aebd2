"""Samplers for any law: examples of a list, or users with some of their examples."""

from __future__ import annotations

import dataclasses

import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling.base import Draw, bucket_bounds
from dpfl_jax.sampling.contribution import check_group_size, choose_within_users
from dpfl_jax.sampling.laws import AtRate, Law


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleSampler:
    """Draws examples from a list of positions by a law.

    Attributes:
      law: which of them, with ``law.population == len(positions)``.
      positions: int64 [n], store positions that may be drawn.
      key: root key of the run.
    """

    law: Law
    positions: np.ndarray
    key: RootKey
    group_size: None = None

    def __post_init__(self) -> None:
        """Checks that the law is for as many units as there are."""
        _check_population(self.law, len(self.positions), "examples")

    @property
    def description(self) -> str:
        """One line for the report."""
        return self.law.describe("examples")

    @property
    def expected_size(self) -> float:
        """Expected number of examples in a draw."""
        return self.law.expected_size

    def size_bound(self, tail: float = 1e-15) -> int:
        """A number of examples that a draw exceeds with probability at most ``tail``."""
        return self.law.size_bound(tail)

    def draw(self, step: int) -> Draw:
        """Returns the examples of ``step``: units [n], positions [n]."""
        units = self.law.indices(self.key, step)
        return Draw(units, self.positions[units])


@dataclasses.dataclass(frozen=True, eq=False)
class UserSampler:
    """Draws users by a law, and up to ``group_size`` examples of each, uniformly.

    Attributes:
      law: which users, with ``law.population`` the number of users.
      user_offsets: int64 [num_users + 1]; user u owns positions offsets[u]:offsets[u+1].
      group_size: most examples of one user in a step.
      key: root key of the run.
    """

    law: Law
    user_offsets: np.ndarray
    group_size: int
    key: RootKey

    def __post_init__(self) -> None:
        """Checks the sizes."""
        check_group_size(self.group_size)
        _check_population(self.law, len(self.user_offsets) - 1, "users")

    @property
    def description(self) -> str:
        """One line for the report."""
        return (
            f"{self.law.describe('users')}; up to {self.group_size} examples of a user per step, "
            "uniformly without replacement"
        )

    @property
    def expected_size(self) -> float:
        """Expected number of users in a draw."""
        return self.law.expected_size

    def size_bound(self, tail: float = 1e-15) -> int:
        """A number of users that a draw exceeds with probability at most ``tail``."""
        return self.law.size_bound(tail)

    def bucket_bounds(self, sizes: tuple[int, ...], tail: float = 1e-15) -> tuple[int, ...]:
        """As ``size_bound``, for the users whose examples first fit into each of ``sizes``."""
        prob = self.law.rate if isinstance(self.law, AtRate) else None
        return bucket_bounds(self.user_offsets, sizes, self.size_bound(tail), prob, tail)

    def draw(self, step: int) -> Draw:
        """Returns the users of ``step``: units [n], positions [n, group_size] (-1 = none)."""
        users = self.law.indices(self.key, step)
        # proof: uls-sampling-2
        rng = self.key.numpy("within-user", step)
        return Draw(users, choose_within_users(rng, self.user_offsets, users, self.group_size))


def _check_population(law: Law, population: int, what: str) -> None:
    if law.population != population:
        raise BadInputError(
            f"the sampling law is for {law.population} units, but there are {population} {what}"
        )
