"""Bounding how many examples of one user are used: once for a run (ELS) or per step (ULS).

Both choices are uniform without replacement, and a user with fewer examples than the limit
contributes them all: nothing is repeated. Where examples have several owners, the choice is greedy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpfl_jax.errors import at_least


def check_group_size(group_size: int) -> int:
    """Returns ``group_size`` as an int, or raises BadInputError if it is below 1."""
    at_least("group_size", group_size, 1)
    return int(group_size)


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
    sorted_user = heavy_user[order]
    starts = np.r_[0, np.flatnonzero(np.diff(sorted_user)) + 1] if len(order) else order
    run_length = np.diff(np.r_[starts, len(order)])
    rank = np.arange(len(order)) - np.repeat(starts, run_length)
    kept_heavy = heavy_positions[order[rank < group_size]]
    return np.sort(np.concatenate([positions[~over], kept_heavy]))


def limit_shared(
    rng: np.random.Generator,
    set_of_unit: np.ndarray,
    owners: Sequence[tuple[int, ...]],
    limit: int,
) -> np.ndarray:
    """Keeps units such that no one owns more than ``limit`` of those kept, greedily.

    Units are sorted by how far their owners are beyond the limit, added up, and ties are broken at
    random. In this order each is kept unless one of its owners has ``limit`` already. Nothing can
    be added to what is kept, so that it is at least 1 / (most owners of a unit) of the most that is
    possible; on graphs like those of e-mails it is about 0.99. Source: Ganesh et al. 2025 (arXiv
    2503.03622), section 4, without its choices with duplicates.

    Args:
      rng: generator for the order.
      set_of_unit: int64 [n], which set of owners each unit has.
      owners: for each set, its members, from 0 on, each once.
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
        else:  # an owner who has reached the limit stays there
            usable[some] = ()
    return np.sort(np.array(kept, np.int64))


def limited_size(user_offsets: np.ndarray, group_size: int) -> int:
    """Number of examples that ``limit_contributions`` keeps (no randomness in it).

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

    Floyd's subset algorithm, run for all users at once: its cost does not grow with how many
    examples a user owns.

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
