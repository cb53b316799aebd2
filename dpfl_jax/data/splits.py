"""Splits by user, limits, and held-out examples within each user.

A user's side depends on a hash of the id alone: adding or removing a user never moves another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from dpfl_jax.data.owners import SharedStore
from dpfl_jax.data.store import Store, UserView
from dpfl_jax.errors import BadInputError, at_least, probability

FEW = 20  # a column with so few values, and many more rows, may not name people


def user_uniforms(store: Store, seed: int = 0, purpose: str = "split") -> np.ndarray:
    """Returns a number in [0, 1) per user, a keyed hash of the id: float64 [num_users]."""
    key = hashlib.sha256(f"dpfl_jax {purpose} {seed}".encode()).digest()
    words = [
        hashlib.blake2b(name.encode(), digest_size=8, key=key).digest()
        for name in store.user_ids(range(store.num_users))
    ]
    integers = np.frombuffer(b"".join(words), dtype="<u8")
    return (integers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def split_by_user(store: Store, fractions: Mapping[str, float], seed: int = 0) -> dict[str, Store]:
    """Splits users at random, each independently of all others.

    Args:
      store: what is split.
      fractions: expected share of the users per named part, e.g. ``{"validation": 0.1}``.
      seed: chooses the hash key; public, and no part of the mechanism.

    Returns:
      The named parts and "train", the remaining users, as views. A part may be empty by chance. A
      record whose owners are on several sides is in none.

    Raises:
      BadInputError: a fraction is outside [0, 1), or they leave nothing to train on.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.data import split_by_user
      >>> store = dpfl.from_texts([(f"user {i}", "text") for i in range(100)])
      >>> parts = split_by_user(store, {"test": 0.2})
      >>> sorted(parts), sum(part.num_users for part in parts.values())
      (['test', 'train'], 100)
    """
    for name, fraction in fractions.items():
        probability(f"{name}_fraction", fraction, one=False)
    if sum(fractions.values()) >= 1.0:
        raise BadInputError(
            f"the fractions {dict(fractions)} leave no users for 'train': lower them"
        )
    uniforms = user_uniforms(store, seed)
    side = np.searchsorted(np.cumsum(list(fractions.values())), uniforms, side="right")
    names = {"train": len(fractions), **{name: i for i, name in enumerate(fractions)}}
    if isinstance(store, SharedStore):
        sides = [set(side[list(members)].tolist()) for members in store.owners]
        side_of_set = np.array([min(s) if len(s) == 1 else -1 for s in sides])
        return {
            name: SharedStore(UserView(store.sets, np.flatnonzero(side_of_set == i)))
            for name, i in names.items()
        }
    return {name: UserView(store, np.flatnonzero(side == i)) for name, i in names.items()}


def split_within_users(
    store: Store, fraction: float, most: int | None = None, smallest: int = 1
) -> tuple[Store, Store]:
    """Holds out the first ``ceil(fraction * n)``, at most ``most``, of each user's n examples.

    This is the rule of Charles et al. 2024, section 5 (CC-News: the first 10 % of each user, at
    most
    32, after users with a single example are removed: ``smallest=2``).

    Args:
      store: what is split.
      fraction: share of each user's examples to hold out, rounded up.
      most: most held-out examples of one user.
      smallest: users with fewer examples are left out of both parts.

    Returns:
      The training part and the held-out part.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.data import split_within_users
      >>> store = dpfl.from_arrays({"x": [[0.0], [1.0], [2.0]]}, users=["ann", "ann", "bob"])
      >>> train, held_out = split_within_users(store, 0.5, smallest=2)
      >>> train.num_examples, held_out.num_examples
      (1, 1)
    """
    probability("the held-out fraction", fraction)
    at_least("data.held_out_max", most, 0)
    counts = store.examples_per_user
    users = np.flatnonzero(counts >= smallest)
    # The rounding guard keeps ceil(0.1 * 30) at 3.
    held = np.ceil(counts[users] * fraction - 1e-9).astype(np.int64)
    if most is not None:
        held = np.minimum(held, most)
    return UserView(store, users, first=held), UserView(store, users, counts=held)


def limit_store(
    store: Store, max_users: int | None = None, max_examples_per_user: int | None = None
) -> Store:
    """Keeps the first ``max_users`` users in store order, and the first examples of each.

    Store order is a hash order: the users kept are a pseudo-random choice that their ids determine.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.data import limit_store
      >>> store = dpfl.from_arrays({"x": [[0.0], [1.0], [2.0]]}, users=["ann", "ann", "bob"])
      >>> limit_store(store, max_examples_per_user=1).num_examples
      2
    """
    if max_users is None and max_examples_per_user is None:
        return store
    if isinstance(store, SharedStore):
        raise BadInputError(
            "some records have several owners: leave out max_users and max_examples_per_user; "
            "mechanism.group_size says how many of each owner's are used"
        )
    for name, value in (("max_users", max_users), ("max_examples_per_user", max_examples_per_user)):
        if value is not None and value < 1:
            raise BadInputError(f"data.{name} is {value}, but it must be at least 1")
    users = np.arange(min(store.num_users, max_users or store.num_users))
    counts = None
    if max_examples_per_user is not None:
        counts = np.full(len(users), max_examples_per_user, np.int64)
    return UserView(store, users, counts=counts)
