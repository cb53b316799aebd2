"""Records with several owners: e-mails, chats, co-authored texts.

A *set of owners* takes the place of a user in a store: its name is those of its members, and its
records lie together. Such a store says nothing of users by itself: ``SharedStore`` knows who owns
what, and gives the part of it in which nobody owns more records than a mechanism may use. Whatever
asks for the records of one user is refused, so that no set is taken for a person.

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
from dpfl_jax.data.store import ArrayStore, Store, StoreBase, unit_key_of, user_order_key
from dpfl_jax.errors import BadInputError
from dpfl_jax.sampling.contribution import limit_shared

_REFUSED = (
    "records of these data have several owners, and what is asked for treats each as one user's: "
    "use dpfl train with mechanism.kind=els or owner_sets, or give every record one owner"
)
_BLOCK = 2**16  # records read at once


def store_of(users: Any, schema: Schema | None = None) -> Store:
    """The store of (user, arrays) pairs, where a user may be the id of a set of owners."""
    return told_apart(ArrayStore.from_users(users, schema, sets=True))


def told_apart(store: Any) -> Any:
    """A store that knows the owners of its records, if users of this one are sets of owners."""
    return SharedStore(store) if getattr(store, "of_sets", False) else store


class SharedStore:
    """Records that belong to sets of users.

    Attributes:
      sets: the records, by set of owners: a store whose users are sets.
      owners: for each set, the users in it, by their places in the order of ``user_ids``.
    """

    def __init__(self, sets: Store):
        """Reads the names of all sets."""
        self.sets, self.schema = sets, sets.schema
        self.unit_key, self.task = unit_key_of(sets), getattr(sets, "task", None)
        members = [name.split(SEPARATOR) for name in sets.user_ids(range(sets.num_users))]
        self._names = sorted({name for some in members for name in some}, key=user_order_key)
        place = {name: i for i, name in enumerate(self._names)}
        self.owners = [tuple(place[name] for name in some) for some in members]

    schema: Schema

    @property
    def num_users(self) -> int:
        """Number of users that own a record."""
        return len(self._names)

    @property
    def num_examples(self) -> int:
        """Number of records."""
        return self.sets.num_examples

    @property
    def user_offsets(self) -> np.ndarray:
        """Refused: the records of a user do not lie together."""
        raise BadInputError(_REFUSED)

    @property
    def examples_per_user(self) -> np.ndarray:
        """Refused: they do not add up to the number of records (``owned``)."""
        raise BadInputError(_REFUSED)

    @functools.cached_property
    def owned(self) -> np.ndarray:
        """int64 [num_users]: records that each user owns, alone or with others."""
        counts = np.zeros(self.num_users, np.int64)
        for size, members in zip(self.sets.examples_per_user.tolist(), self.owners, strict=True):
            counts[list(members)] += size
        return counts

    @property
    def most_owners(self) -> int:
        """Owners of the record that has most."""
        return max(map(len, self.owners), default=1)

    @property
    def fingerprint(self) -> str:
        """Hex digest of records, owners and schema."""
        return self.sets.fingerprint

    def user_ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Returns the ids of the users with these indices."""
        return [self._names[int(i)] for i in indices]

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples at ``positions``."""
        return self.sets.read(positions)

    def records(self, positions: np.ndarray) -> np.ndarray:
        """Returns the stored records at ``positions``."""
        return self.sets.records(positions)

    def bounded(self, limit: int, whole: bool = False) -> BoundedStore:
        """The part in which nobody owns more than ``limit`` records (``whole``: sets of owners).

        What is kept follows from who owns which record, and from nothing that is in the records.
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
    """What is left where nobody may own too much; exact numbers.

    Attributes:
      limit: most records (or sets of owners) of a user.
      users: who own a record.
      users_left_out: of them, those of whose records none is kept.
      examples: records.
      examples_kept: of them.
      tokens: in all records; None if they are no texts.
      tokens_kept: of them.
      by_owners: by number of owners: records kept, and all.
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
        """One line."""
        tokens = f", {self.tokens_kept:,} of {self.tokens:,} tokens" if self.tokens else ""
        return (
            f"contribution bounding at {self.limit}: kept {self.examples_kept:,} of "
            f"{self.examples:,} records{tokens}; {self.users_left_out:,} of {self.users:,} users "
            "are left without any"
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        kept = {str(n): {"kept": k, "of": all} for n, (k, all) in self.by_owners.items()}
        return {**dataclasses.asdict(self), "by_owners": kept}


class BoundedStore(StoreBase):
    """Some records of a shared store; its users are sets of owners.

    Attributes:
      shared: the whole of it.
    """

    of_sets = True

    def __init__(self, shared: SharedStore, kept: np.ndarray, limit: int):
        """``kept``: sorted int64 [n], positions in ``shared``; ``limit``: see ``bounded``."""
        self.shared, self.schema, self._limit = shared, shared.schema, limit
        self.unit_key = shared.unit_key
        self.immutable = getattr(shared.sets, "immutable", False)
        sets = np.searchsorted(shared.sets.user_offsets, kept, side="right") - 1
        self._sets, counts = np.unique(sets, return_counts=True)
        self.user_offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._kept = kept

    def user_ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Returns the names of sets of owners."""
        return self.shared.sets.user_ids(self._sets[np.asarray(indices, dtype=np.int64)])

    def records(self, positions: np.ndarray) -> np.ndarray:
        """Returns the stored records at ``positions``."""
        return self.shared.records(self._kept[positions])

    @functools.cached_property
    def bounding(self) -> Bounding:
        """What was left out; the lengths of all texts are read for it."""
        shared, sizes = self.shared, self.shared.sets.examples_per_user
        kept = np.zeros(len(sizes), np.int64)
        kept[self._sets] = np.diff(self.user_offsets)
        some = {user for i in self._sets.tolist() for user in shared.owners[i]}
        degree = np.array([len(members) for members in shared.owners])
        text = self.schema.kind == "tokens"
        return Bounding(
            self._limit,
            shared.num_users,
            shared.num_users - len(some),
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
        int(store.records(np.arange(low, min(low + _BLOCK, store.num_examples)))["length"].sum())
        for low in range(0, store.num_examples, _BLOCK)
    )


def whole_of(store: Any) -> SharedStore | None:
    """What knows the owners of a store's records; None if its users are people."""
    if isinstance(store, BoundedStore):
        return store.shared
    known = told_apart(store)
    return known if isinstance(known, SharedStore) else None


def bounding_of(store: Any) -> Bounding | None:
    """What was left out of data whose examples have several owners; None of other data."""
    return store.bounding if isinstance(store, BoundedStore) else None


def by_set(store: Any) -> Any:
    """A store whose users are sets of owners, of one that knows them apart; any other as it is."""
    return store.sets if isinstance(store, SharedStore) else store


def people(store: Any) -> set[str]:
    """Everybody who owns a record of a store, whose users may be sets of owners."""
    names = by_set(store).user_ids(range(by_set(store).num_users))
    return {own for name in names for own in name.split(SEPARATOR)}
