"""Records with several owners: e-mails, chats, co-authored texts.

A *set of owners* takes the place of a user in a store: its id joins the ids of its members, and its
records lie together. ``SharedStore`` knows who owns which record, and gives the part in which no
user owns more records than a mechanism may use. Whatever asks for the records of one user is
refused, so that no set is taken for a person.

Source: Ganesh, McKenna, McMahan, Smith, Wu, "It's my data too: private ML for datasets with
multi-user training examples" (2025, arXiv 2503.03622).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpfl_jax.data.keys import SEPARATOR
from dpfl_jax.data.schema import Schema
from dpfl_jax.data.store import ArrayStore, Store, unit_key_of, user_order_key
from dpfl_jax.errors import BadInputError
from dpfl_jax.sampling.samplers import limit_shared

_REFUSED = (
    "records of these data have several owners, but this treats each record as one user's: "
    "use dpfl train with mechanism.kind=els or owner_sets, or give every record one owner"
)
_BLOCK = 2**16  # records per read


def store_from_users(users: Any, schema: Schema | None = None) -> Store:
    """Returns the store of (user, arrays) pairs; a user may be the id of a set of owners."""
    return infer_shared_ownership(ArrayStore.from_users(users, schema, allow_sets=True))


def infer_shared_ownership(store: Any) -> Any:
    """Returns a ``SharedStore`` if the users of a store are sets of owners, else the store."""
    return SharedStore(store) if getattr(store, "users_are_sets", False) else store


class SharedStore(Store):
    """Records that belong to sets of users.

    Attributes:
      sets: a store of the same records whose users are the sets of owners.
      owners: for each set, the indices of its members (in the order of ``user_ids``).
    """

    def __init__(self, sets: Store):
        self.sets, self.schema = sets, sets.schema
        self.unit_key, self.task = unit_key_of(sets), getattr(sets, "task", None)
        members = [name.split(SEPARATOR) for name in sets.user_ids(range(sets.num_users))]
        self._names = sorted({name for owners in members for name in owners}, key=user_order_key)
        place = {name: i for i, name in enumerate(self._names)}
        self.owners = [tuple(place[name] for name in owners) for owners in members]

    @property
    def num_users(self) -> int:
        """Number of users that own a record."""
        return len(self._names)

    @property
    def num_examples(self) -> int:
        return self.sets.num_examples

    @property
    def user_offsets(self) -> np.ndarray:  # type: ignore[override]
        """Refused: the records of a user do not lie together."""
        raise BadInputError(_REFUSED)

    @property
    def examples_per_user(self) -> np.ndarray:
        """Refused: they do not add up to the number of records (``examples_per_owner``)."""
        raise BadInputError(_REFUSED)

    @functools.cached_property
    def examples_per_owner(self) -> np.ndarray:
        """int64 [num_users]: records that each user owns, alone or with others."""
        counts = np.zeros(self.num_users, np.int64)
        for size, members in zip(self.sets.examples_per_user.tolist(), self.owners, strict=True):
            counts[list(members)] += size
        return counts

    @property
    def most_owners(self) -> int:
        """The largest number of owners of one record."""
        return max(map(len, self.owners), default=1)

    @property
    def fingerprint(self) -> str:
        return self.sets.fingerprint

    def user_ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        return [self._names[int(i)] for i in indices]

    def records(self, positions: np.ndarray) -> np.ndarray:
        return self.sets.records(positions)

    @property
    def has_lengths(self) -> bool:  # type: ignore[override]
        return self.sets.has_lengths

    def lengths(self, positions: np.ndarray) -> np.ndarray:
        return self.sets.lengths(positions)

    def bounded(self, limit: int, whole: bool = False) -> BoundedStore:
        """The part in which no user owns more than ``limit`` records, or sets (``whole``).

        What is kept depends on who owns which record, and never on what is in the records.
        """
        digest = hashlib.sha256(b"dpfl_jax contribution bounding").digest()
        rng = np.random.default_rng(np.frombuffer(digest, np.uint32))
        sizes = self.sets.examples_per_user
        of_unit = np.arange(len(sizes)) if whole else np.repeat(np.arange(len(sizes)), sizes)
        # proof: shared-choice-1
        kept = limit_shared(rng, of_unit, self.owners, limit)
        if whole:
            chosen = np.zeros(len(sizes), bool)
            chosen[kept] = True
            kept = np.flatnonzero(np.repeat(chosen, sizes))
        return BoundedStore(self, kept, limit)


@dataclasses.dataclass(frozen=True)
class Bounding:
    """Exact numbers of what contribution bounding keeps.

    Attributes:
      limit: most records (or sets of owners) of a user.
      users: users who own a record.
      users_left_out: users of whom no record is kept.
      examples: all records.
      examples_kept: kept records.
      tokens: tokens of all records; None if they are not texts.
      tokens_kept: tokens of kept records.
      by_owners: by number of owners: kept records, and all.
    """

    limit: int
    users: int
    users_left_out: int
    examples: int
    examples_kept: int
    tokens: int | None
    tokens_kept: int | None
    by_owners: dict[int, tuple[int, int]]

    def __str__(self) -> str:
        tokens = f", {self.tokens_kept:,} of {self.tokens:,} tokens" if self.tokens else ""
        return (
            f"contribution bounding at {self.limit}: kept {self.examples_kept:,} of "
            f"{self.examples:,} records{tokens}; {self.users_left_out:,} of {self.users:,} users "
            "are left without any"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON object."""
        kept = {str(n): {"kept": k, "of": all} for n, (k, all) in self.by_owners.items()}
        return dataclasses.asdict(self) | {"by_owners": kept}


class BoundedStore(Store):
    """Some records of a shared store; its users are sets of owners.

    Attributes:
      shared: the store that all records are in.
    """

    users_are_sets = True

    def __init__(self, shared: SharedStore, kept: np.ndarray, limit: int):
        """Takes sorted positions in ``shared``, int64 [n], and the limit of ``bounded``."""
        self.shared, self.schema, self._limit = shared, shared.schema, limit
        self.unit_key = shared.unit_key
        self.immutable = getattr(shared.sets, "immutable", False)
        sets = np.searchsorted(shared.sets.user_offsets, kept, side="right") - 1
        self._sets, counts = np.unique(sets, return_counts=True)
        self.user_offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._kept = kept

    def user_ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        return self.shared.sets.user_ids(self._sets[np.asarray(indices, dtype=np.int64)])

    def records(self, positions: np.ndarray) -> np.ndarray:
        return self.shared.records(self._kept[positions])

    @property
    def has_lengths(self) -> bool:  # type: ignore[override]
        return self.shared.has_lengths

    def lengths(self, positions: np.ndarray) -> np.ndarray:
        return self.shared.lengths(self._kept[self._check(positions)])

    @functools.cached_property
    def bounding(self) -> Bounding:
        """What was left out; reads the lengths of all texts."""
        shared, sizes = self.shared, self.shared.sets.examples_per_user
        kept = np.zeros(len(sizes), np.int64)
        kept[self._sets] = np.diff(self.user_offsets)
        kept_users = {user for i in self._sets.tolist() for user in shared.owners[i]}
        degree = np.array([len(members) for members in shared.owners])
        text = self.schema.kind == "tokens"
        return Bounding(
            self._limit,
            shared.num_users,
            shared.num_users - len(kept_users),
            shared.num_examples,
            self.num_examples,
            _tokens(shared) if text else None,
            _tokens(self) if text else None,
            {
                int(n): (int(kept[degree == n].sum()), int(sizes[degree == n].sum()))
                for n in np.unique(degree)
            },
        )


def _tokens(store: SharedStore | BoundedStore) -> int:
    return sum(
        int(store.lengths(np.arange(low, min(low + _BLOCK, store.num_examples))).sum())
        for low in range(0, store.num_examples, _BLOCK)
    )


def shared_store(store: Any) -> SharedStore | None:
    """The ``SharedStore`` that a store is a part of; None if its users are people."""
    if isinstance(store, BoundedStore):
        return store.shared
    shared = infer_shared_ownership(store)
    return shared if isinstance(shared, SharedStore) else None


def bounding_of(store: Any) -> Bounding | None:
    """What contribution bounding left out; None if examples have one owner each."""
    return store.bounding if isinstance(store, BoundedStore) else None


def grouped_by_owner_set(store: Any) -> Any:
    """The store of a ``SharedStore`` whose users are sets of owners; other stores as they are."""
    return store.sets if isinstance(store, SharedStore) else store


def owner_ids(store: Any) -> set[str]:
    """Ids of all who own a record of a store, whose users may be sets of owners."""
    store = grouped_by_owner_set(store)
    names = store.user_ids(range(store.num_users))
    return {owner for name in names for owner in name.split(SEPARATOR)}
