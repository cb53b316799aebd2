"""Samplers: a random-access sequence of draws, one per step, and how hosts share a draw.

A draw holds positions into a store, so that only drawn examples are read. A sampler derives the
draw of step t from the root key and t alone, so every host computes the same draw and reads only
its part. The number of examples of one user is bounded once for a run (ELS) or in each step (ULS).
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dpfl_jax.errors import at_least
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling.schemes import SamplingScheme, Scheme, binomial_bound, check_population


@dataclasses.dataclass(frozen=True)
class Draw:
    """The units that take part in one step.

    Attributes:
      units: int64 [n], the index of each unit drawn (an example of the limited set, a user).
      positions: int64 [n] or [n, group_size], store positions of each unit's examples; -1 where a
        unit has fewer than group_size examples.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.sampling import Draw
      >>> draw = Draw(units=np.array([3, 8]), positions=np.array([[30, 31], [80, -1]]))
      >>> draw.size, draw.example_mask.tolist()
      (2, [[True, True], [True, False]])
    """

    units: np.ndarray
    positions: np.ndarray

    @property
    def size(self) -> int:
        """Number of units drawn; it may be 0, as a step without units is still a step."""
        return len(self.units)

    @property
    def example_mask(self) -> np.ndarray:
        """Bool array of the shape of ``positions``: True where there is an example."""
        return self.positions >= 0


class Sampler(Protocol):
    """Random access to the draws of a run: any step's draw, without drawing earlier steps.

    Examples:
      >>> import numpy as np
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.sampling import ExampleSampler, Poisson, Sampler
      >>> key = dpfl.RootKey.from_seed(0)
      >>> sampler: Sampler = ExampleSampler(Poisson(0.25), np.arange(100), key)
      >>> sampler.expected_size, sampler.size_bound(1e-15) < 100
      (25.0, True)
    """

    @property
    def expected_size(self) -> float:
        """Expected number of units in a draw."""

    @property
    def group_size(self) -> int | None:
        """Most examples of a unit in a draw, or None if a unit is one example."""

    def size_bound(self, tail: float = 1e-15) -> int:
        """Returns a number of units that a draw exceeds with probability at most ``tail``."""

    def draw(self, step: int) -> Draw:
        """Returns the draw of ``step`` (0-based), without replaying earlier steps."""


class _OfScheme(abc.ABC):
    """A sampler whose units are drawn by a scheme."""

    scheme: Scheme

    @property
    @abc.abstractmethod
    def population(self) -> int:
        """Number of units that may be drawn."""

    @property
    def expected_size(self) -> float:
        """Expected number of units in a draw."""
        return self.scheme.expected_size(self.population)

    def size_bound(self, tail: float = 1e-15) -> int:
        """Returns a number of units that a draw exceeds with probability at most ``tail``."""
        return self.scheme.size_bound(self.population, tail)


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleSampler(_OfScheme):
    """Draws examples from a list of positions.

    Attributes:
      scheme: how examples are drawn.
      positions: int64 [n], store positions that may be drawn.
      key: root key of the run.

    Examples:
      >>> import numpy as np
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.sampling import ExampleSampler, Poisson
      >>> sampler = ExampleSampler(Poisson(1.0), np.array([5, 7, 9]), dpfl.RootKey.from_seed(0))
      >>> sampler.draw(0).positions.tolist()
      [5, 7, 9]
    """

    scheme: Scheme
    positions: np.ndarray
    key: RootKey
    group_size: None = None

    def __post_init__(self) -> None:
        check_population(self.population)

    @property
    def population(self) -> int:
        return len(self.positions)

    def draw(self, step: int) -> Draw:
        """Returns the examples of ``step``: units [n], positions [n]."""
        units = self.scheme.indices(self.key, step, self.population)
        return Draw(units, self.positions[units])


@dataclasses.dataclass(frozen=True, eq=False)
class UserSampler(_OfScheme):
    """Draws users, and up to ``group_size`` examples of each, uniformly.

    Attributes:
      scheme: how users are drawn.
      user_offsets: int64 [num_users + 1]; user u owns positions offsets[u]:offsets[u+1].
      group_size: most examples of one user in a step.
      key: root key of the run.

    Examples:
      >>> import numpy as np
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.sampling import Poisson, UserSampler
      >>> offsets = np.array([0, 3, 4])  # two users, of three examples and one
      >>> key = dpfl.RootKey.from_seed(0)
      >>> draw = UserSampler(Poisson(1.0), offsets, group_size=2, key=key).draw(0)
      >>> draw.positions.shape, int(draw.example_mask.sum())
      ((2, 2), 3)
    """

    scheme: Scheme
    user_offsets: np.ndarray
    group_size: int
    key: RootKey

    def __post_init__(self) -> None:
        check_group_size(self.group_size)
        check_population(self.population)

    @property
    def population(self) -> int:
        return len(self.user_offsets) - 1

    def bucket_bounds(self, sizes: tuple[int, ...], tail: float = 1e-15) -> tuple[int, ...]:
        """Returns bounds on the number of a draw's users in each bucket of sizes.

        Args:
          sizes: increasing bucket sizes, up to the group size; a user goes to the first bucket that
            holds all the examples the user may have in a draw.
          tail: probability with which each bound may be exceeded.

        Returns:
          One number of users per size.
        """
        most, offsets = self.size_bound(tail), self.user_offsets
        held = np.minimum(np.diff(offsets), sizes[-1])
        held = held[held > 0]  # users without examples go to the smallest bucket
        counts = np.bincount(np.searchsorted(np.asarray(sizes), held), minlength=len(sizes))
        counts[0] += self.population - len(held)
        if not isinstance(self.scheme, SamplingScheme):  # users are not drawn independently
            return tuple(int(min(most, count)) for count in counts)
        rate = self.scheme.rate
        return tuple(min(most, binomial_bound(int(count), rate, tail)) for count in counts)

    def draw(self, step: int) -> Draw:
        """Returns the users of ``step``: units [n], positions [n, group_size] (-1 = none)."""
        users = self.scheme.indices(self.key, step, self.population)
        # proof: uls-sampling-2
        rng = self.key.numpy("within-user", step)
        return Draw(users, choose_within_users(rng, self.user_offsets, users, self.group_size))


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of a draw that one host reads.

    A step's units fill rows of a global buffer [rows, row]: unit i is in row i // row, column
    i % row. Each host reads the columns of its devices.

    Attributes:
      slots: int64 [rows, columns], index into the draw's units; -1 for padding.
      positions: int64 [rows, columns] or [rows, columns, group_size], store positions; -1 for
        padding.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.sampling import Draw, share_of
      >>> draw = Draw(units=np.arange(5), positions=10 + np.arange(5))
      >>> share_of(draw, row=4, columns=[2, 3]).slots.tolist()
      [[2, 3], [-1, -1]]
    """

    slots: np.ndarray
    positions: np.ndarray


def share_of(
    draw: Draw, row: int, columns: Sequence[int] | np.ndarray, rows: int | None = None
) -> Share:
    """Returns the units in some columns of the global buffer.

    Args:
      draw: the whole draw, which every host has without reading data.
      row: units per row over all hosts.
      columns: the columns of this host, increasing.
      rows: rows of the buffer; default: as many as the draw fills.

    Raises:
      ValueError: the columns are outside the row or do not increase, or the draw does not fit.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.sampling import Draw, share_of
      >>> draw = Draw(units=np.arange(5), positions=10 + np.arange(5))
      >>> share_of(draw, row=4, columns=[0, 1]).positions.tolist()  # -1 is padding
      [[10, 11], [14, -1]]
    """
    needed = -(-draw.size // row)
    rows = needed if rows is None else rows
    chosen = np.asarray(columns, dtype=np.int64)
    if chosen.size and not (chosen[0] >= 0 and chosen[-1] < row and (np.diff(chosen) > 0).all()):
        raise ValueError(f"columns {columns} lie outside a row of {row}, or do not increase")
    if rows < needed:
        raise ValueError(f"{draw.size} units do not fit into {rows} rows of {row}")
    slots = np.arange(rows, dtype=np.int64)[:, None] * row + chosen
    real = slots < draw.size
    slots = np.where(real, slots, -1)
    positions = np.full((*slots.shape, *draw.positions.shape[1:]), -1, np.int64)
    positions[real] = draw.positions[slots[real]]
    return Share(slots, positions)


# ---- how many examples of one user are used ------------------------------------------------------
# All choices are uniform without replacement, and a user with fewer examples than the limit
# contributes all of them. Where examples have several owners, the choice is greedy.


def check_group_size(group_size: int) -> int:
    """Returns ``group_size`` as an int, or raises BadInputError if it is below 1."""
    at_least("group_size", group_size, 1)
    return int(group_size)


def places_in_runs(values: np.ndarray) -> np.ndarray:
    """Returns how many equal values precede each value, int64 [n]; equal values are adjacent."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    lengths = np.diff(np.append(starts, len(values)))
    return np.arange(len(values)) - np.repeat(starts, lengths)


def limit_contributions(
    rng: np.random.Generator, user_offsets: np.ndarray, group_size: int
) -> np.ndarray:
    """Keeps at most ``group_size`` examples of each user (the set D_sub of DP-SGD-ELS).

    Source: Charles et al. 2024, Algorithm 1, first loop. Users' choices are independent.

    Args:
      rng: generator for the choice.
      user_offsets: int64 [num_users + 1]; user u owns positions offsets[u]:offsets[u+1].
      group_size: most examples of one user.

    Returns:
      Sorted int64 [n], the store positions kept.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.sampling import limit_contributions
      >>> offsets = np.array([0, 3, 4])  # two users, of three examples and one
      >>> len(limit_contributions(np.random.default_rng(0), offsets, group_size=2))
      3
    """
    check_group_size(group_size)
    offsets = np.asarray(user_offsets, dtype=np.int64)
    counts = np.diff(offsets)
    user = np.repeat(np.arange(len(counts)), counts)
    over = counts[user] > group_size
    positions = np.arange(offsets[0], offsets[-1], dtype=np.int64)
    heavy_positions, heavy_user = positions[over], user[over]
    # Rank random tickets within each heavy user; ties of 53-bit tickets are broken by position.
    order = np.lexsort((rng.random(len(heavy_positions)), heavy_user))
    kept_heavy = heavy_positions[order[places_in_runs(heavy_user[order]) < group_size]]
    return np.sort(np.concatenate([positions[~over], kept_heavy]))


def limit_shared(
    rng: np.random.Generator,
    set_of_unit: np.ndarray,
    owners: Sequence[tuple[int, ...]],
    limit: int,
) -> np.ndarray:
    """Keeps units greedily so that no owner has more than ``limit`` of them.

    Units are sorted by the sum of their owners' excesses over the limit, with ties broken at
    random, and kept in this order unless an owner already has ``limit`` units. The result is
    maximal, so it has at least 1 / (most owners of a unit) of the largest possible number of units;
    on graphs like those of e-mails it has about 0.99 of it. Source: Ganesh et al. 2025 (arXiv
    2503.03622), section 4, without its choices with duplicates.

    Args:
      rng: generator for the order.
      set_of_unit: int64 [n], each unit's set of owners, an index into ``owners``.
      owners: the members of each set, numbered from 0, without repeats.
      limit: most units of one owner.

    Returns:
      Sorted int64 [m], the units kept.
    """
    check_group_size(limit)
    sizes = np.bincount(set_of_unit, minlength=len(owners))
    owned = np.zeros(1 + max((max(members) for members in owners), default=-1), np.int64)
    for size, members in zip(sizes.tolist(), owners, strict=True):
        owned[list(members)] += size
    beyond = np.maximum(owned - limit, 0)
    cost = np.array([int(beyond[list(members)].sum()) for members in owners], np.int64)
    order = np.lexsort((rng.random(len(set_of_unit)), cost[set_of_unit]))
    left = [limit] * len(owned)
    usable: list[tuple[int, ...]] = list(owners)
    kept = []
    for unit, some in zip(order.tolist(), np.asarray(set_of_unit)[order].tolist(), strict=True):
        members = usable[some]
        # proof: shared-choice-2
        if members and all(left[user] for user in members):
            kept.append(unit)
            for user in members:
                left[user] -= 1
        else:  # owners never get below the limit again: skip this set from now on
            usable[some] = ()
    return np.sort(np.array(kept, np.int64))


def limited_size(user_offsets: np.ndarray, group_size: int) -> int:
    """Returns the number of examples that ``limit_contributions`` keeps, which is not random.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.sampling import limited_size
      >>> limited_size(np.array([0, 3, 4]), group_size=2)
      3
    """
    check_group_size(group_size)
    return int(np.minimum(np.diff(user_offsets), group_size).sum())


def choose_within_users(
    rng: np.random.Generator, user_offsets: np.ndarray, users: np.ndarray, group_size: int
) -> np.ndarray:
    """Chooses up to ``group_size`` examples of each user, uniformly without replacement.

    It runs Floyd's subset algorithm for all users at once, whose cost does not grow with the number
    of examples that a user owns.

    Args:
      rng: generator for the choice.
      user_offsets: int64 [num_users + 1].
      users: int64 [n], distinct users.
      group_size: most examples of one user.

    Returns:
      int64 [n, group_size], store positions; -1 where the user has no more examples.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.sampling import choose_within_users
      >>> rng, offsets = np.random.default_rng(0), np.array([0, 3, 4])
      >>> choose_within_users(rng, offsets, users=np.array([0, 1]), group_size=2).shape
      (2, 2)
    """
    check_group_size(group_size)
    first = np.asarray(user_offsets)[users]
    counts = np.asarray(user_offsets)[np.asarray(users) + 1] - first
    chosen = np.full((len(users), group_size), -1, dtype=np.int64)
    slots = np.arange(group_size)
    heavy = counts > group_size
    light = ~heavy
    chosen[light] = np.where(slots < counts[light, None], slots, -1)
    heavy_counts = counts[heavy]
    subset = np.full((len(heavy_counts), group_size), -1, dtype=np.int64)
    for i in slots:
        last = heavy_counts - group_size + i
        candidate = rng.integers(0, last, endpoint=True)
        taken = (subset[:, :i] == candidate[:, None]).any(axis=1)
        subset[:, i] = np.where(taken, last, candidate)
    chosen[heavy] = subset
    return np.where(chosen >= 0, chosen + first[:, None], -1)
