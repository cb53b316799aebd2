"""User-partitioned stores: random access to examples that lie together user by user.

A store fixes an order of users and gives every example a position, so that the examples of user u
are the positions ``user_offsets[u]:user_offsets[u + 1]``. The index costs 8 bytes a user and
nothing per example. Stores built from the same users and examples have the same fingerprint,
whatever they are made of (memory, files) and however they were built.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dpfl_jax.data.keys import SEPARATOR, check_user_id, no_sets
from dpfl_jax.data.schema import Schema
from dpfl_jax.errors import BadInputError
from dpfl_jax.task import Task


class Readable(Protocol):
    """The least that training needs of a store; anything with these two will do."""

    @property
    def user_offsets(self) -> np.ndarray:
        """int64 [num_users + 1]: user u owns positions offsets[u]:offsets[u+1]."""

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples at ``positions`` [m] as arrays [m, ...]."""


@runtime_checkable
class Store(Readable, Protocol):
    """What every store gives; samplers need no more than ``user_offsets``."""

    @property
    def schema(self) -> Schema:
        """Layout of an example."""

    @property
    def num_users(self) -> int:
        """Number of users."""

    @property
    def num_examples(self) -> int:
        """Number of examples of all users."""

    @property
    def examples_per_user(self) -> np.ndarray:
        """int64 [num_users]."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of users, examples and schema."""

    def user_ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Returns the ids of the users with these indices."""

    def records(self, positions: np.ndarray) -> np.ndarray:
        """Returns the stored records at ``positions`` (see ``Schema.record_dtype``)."""


def user_order_key(user_id: str) -> tuple[bytes, str]:
    """The order of users in every store: by a hash of the id, then the id.

    A hash order needs no global sort (shards are ranges of the hash, built independently and of
    equal size in expectation) and puts no meaning into a user's index.
    """
    return hashlib.blake2b(user_id.encode(), digest_size=8).digest(), user_id


def user_digest(user_id: str, records: np.ndarray) -> bytes:
    """32-byte digest of one user: id, number of examples and records in order."""
    name = user_id.encode()
    digest = hashlib.sha256(len(name).to_bytes(8, "little") + name)
    digest.update(len(records).to_bytes(8, "little"))
    digest.update(np.ascontiguousarray(records).view(np.uint8).data)
    return digest.digest()


def combine_digests(schema: Schema, digests: Iterable[bytes]) -> str:
    """Fingerprint of a store from its schema and its users' digests in order."""
    total = hashlib.sha256(json.dumps(schema.to_json(), sort_keys=True).encode())
    for digest in digests:
        total.update(digest)
    return total.hexdigest()


_BLOCK = 2**16  # examples read at once


def content_fingerprint(store: Store) -> str:
    """Computes a store's fingerprint from what it holds, some users at a time."""
    offsets = store.user_offsets

    def digests() -> Iterable[bytes]:
        low = 0
        while low < store.num_users:
            first = int(offsets[low])
            high = int(np.searchsorted(offsets, first + _BLOCK, side="right")) - 1
            high = max(high, low + 1)
            block = store.records(np.arange(first, int(offsets[high]), dtype=np.int64))
            for i, name in enumerate(store.user_ids(range(low, high))):
                begin, end = offsets[low + i] - first, offsets[low + i + 1] - first
                yield user_digest(name, block[begin:end])
            low = high

    return combine_digests(store.schema, digests())


def check_offsets(offsets: np.ndarray) -> None:
    """Raises BadInputError unless ``user_offsets`` give every user examples of their own."""
    found = np.asarray(offsets)
    if found.ndim != 1 or not len(found) or not np.issubdtype(found.dtype, np.integer):
        raise BadInputError(
            f"the store's user_offsets are {found.dtype} of shape {found.shape}, but they must be "
            "whole numbers [num_users + 1]"
        )
    if found[0] < 0 or (np.diff(found) < 0).any():
        raise BadInputError(
            "the store's user_offsets decrease, so that users would share examples: user u owns "
            "positions user_offsets[u] to user_offsets[u + 1]"
        )


def fingerprint_of(records: Any, count: int) -> str:
    """Identifies what somebody else's store holds: its own ``fingerprint``, or a digest of it all.

    Args:
      records: has ``read(positions)``; every record is read, unless it has a ``fingerprint``.
      count: records it holds.
    """
    if known := getattr(records, "fingerprint", None):
        return str(known)
    total = hashlib.sha256()
    for low in range(0, count, _BLOCK):
        block = records.read(np.arange(low, min(low + _BLOCK, count), dtype=np.int64))
        for name, array in sorted(block.items()):
            array = np.ascontiguousarray(array)
            total.update(json.dumps([name, str(array.dtype), array.shape]).encode())
            total.update(array.tobytes())
    return total.hexdigest()


class StoreBase:
    """What stores share; subclasses give ``schema``, ``user_offsets``, ``records``, ids.

    Attributes:
      of_sets: whether its users are sets of owners (``data/owners.py``), not people.
      unit_key: what makes a user of it, for the guarantee: the column or key of their ids.
      task: what is learned from it, where that is known.
      immutable: whether records stay as they are, so that a fingerprint is computed once.
    """

    schema: Schema
    user_offsets: np.ndarray
    of_sets: bool = False
    unit_key: str = ""
    task: Task | None = None
    immutable: bool = False

    @property
    def num_users(self) -> int:
        """Number of users."""
        return len(self.user_offsets) - 1

    @property
    def num_examples(self) -> int:
        """Number of examples of all users."""
        return int(self.user_offsets[-1])

    @property
    def examples_per_user(self) -> np.ndarray:
        """int64 [num_users]."""
        return np.diff(self.user_offsets)

    def user_ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Returns the ids of the users with these indices."""
        raise NotImplementedError

    def records(self, positions: np.ndarray) -> np.ndarray:
        """Returns the stored records at ``positions``."""
        raise NotImplementedError

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples at ``positions`` as arrays with leading axis len(positions).

        Raises:
          IndexError: if a position is outside 0..num_examples-1 (negative ones too: -1 marks an
            absent example in a draw and must be masked, never read).
        """
        return self.schema.unpack(self.records(self._check(positions)))

    def _check(self, positions: np.ndarray) -> np.ndarray:
        positions = np.asarray(positions, dtype=np.int64)
        if positions.ndim != 1:
            raise IndexError(f"positions must be a vector, got shape {positions.shape}")
        if len(positions) and not 0 <= positions.min() <= positions.max() < self.num_examples:
            raise IndexError(f"a position lies outside 0..{self.num_examples - 1}")
        return positions

    @property
    def fingerprint(self) -> str:
        """Hex digest of users, examples and schema."""
        return self._fingerprint if self.immutable else content_fingerprint(self)

    @functools.cached_property
    def _fingerprint(self) -> str:
        return content_fingerprint(self)

    def __repr__(self) -> str:
        """Kind and counts, never contents."""
        return f"{type(self).__name__}(users={self.num_users}, examples={self.num_examples})"


class ArrayStore(StoreBase):
    """A store whose records are one array, in memory or memory-mapped.

    Attributes:
      schema: layout of an example.
      user_offsets: int64 [num_users + 1].
    """

    immutable = True

    def __init__(
        self, schema: Schema, ids: Sequence[str], user_offsets: np.ndarray, records: np.ndarray
    ):
        """Takes arrays in canonical order (``from_users`` sorts); copies records that may change.

        Args:
          schema: layout of an example.
          ids: user ids in the order of ``user_order_key``.
          user_offsets: int64 [num_users + 1].
          records: [num_examples] of ``schema.record_dtype``.
        """
        self.schema = schema
        self.user_offsets = np.ascontiguousarray(user_offsets, dtype=np.int64)
        self._ids = ids
        if records.flags.writeable:  # what is fingerprinted must stay as it is
            records = records.copy()
            records.flags.writeable = False
        self._records = records
        if len(ids) != self.num_users or self.num_examples != len(records):
            raise ValueError("user ids, offsets and records disagree in length")
        self.of_sets = any(SEPARATOR in name for name in ids)

    @classmethod
    def from_users(
        cls,
        users: Iterable[tuple[str, Mapping[str, Any]]],
        schema: Schema | None = None,
        sets: bool = False,
    ) -> ArrayStore:
        """Builds a store from (user id, dict of arrays with leading axis = examples).

        Args:
          users: each user once; users without examples are left out.
          schema: layout; inferred from the first user as plain arrays if None.
          sets: whether a name may be that of a set of owners (``owners.store_of`` is the door).

        Raises:
          BadInputError: if there is no example, a user id comes twice or is not a non-empty string,
            or arrays disagree with the schema.
        """
        packed: dict[str, np.ndarray] = {}
        for name, batch in users:
            if schema is None:
                schema = Schema.arrays(batch, leading_axis=True)
            records = schema.pack(batch)
            if name in packed:
                raise BadInputError(f"user {name!r} comes twice: give all its examples at once")
            if len(records):
                packed[name] = records
        if schema is None:
            raise BadInputError("there are no users to build a store from")
        return cls.from_records(packed, schema, sets)

    @classmethod
    def from_records(
        cls, packed: Mapping[str, np.ndarray], schema: Schema, sets: bool = False
    ) -> ArrayStore:
        """Builds a store from each user's records (``Schema.pack``); sorts the users."""
        for name in packed:
            check_user_id(name)
            if SEPARATOR in name and not sets:
                raise no_sets(repr(name))
        ids = sorted((u for u in packed if len(packed[u])), key=user_order_key)
        if not ids:
            raise BadInputError("there are no usable examples to build a store from")
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum([len(packed[u]) for u in ids], out=offsets[1:])
        records = np.empty(int(offsets[-1]), schema.record_dtype)
        for u, begin, end in zip(ids, offsets[:-1], offsets[1:]):
            records[begin:end] = packed[u]
        records.flags.writeable = False
        return cls(schema, ids, offsets, records)

    def user_ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Returns the ids of the users with these indices."""
        return [self._ids[int(i)] for i in indices]

    def records(self, positions: np.ndarray) -> np.ndarray:
        """Returns the stored records at ``positions``."""
        return self._records[positions]


class UserView(StoreBase):
    """Some users of another store, and of each a range of its examples.

    Splits and limits are views: nothing is copied, and positions are renumbered from 0.
    """

    def __init__(
        self,
        parent: Store,
        users: np.ndarray,
        first: np.ndarray | None = None,
        counts: np.ndarray | None = None,
        every: int = 1,
    ):
        """Selects users and ranges.

        Args:
          parent: the store looked into.
          users: int64 [k], indices of users of ``parent``, increasing.
          first: int64 [k], number of each user's leading examples left out (default 0).
          counts: int64 [k], number of examples kept (default: all that follow). Users left without
            an example are dropped.
          every: 2 keeps every second one of a range.

        Raises:
          BadInputError: a number below 0: users would then share examples.
        """
        for name, values in (("first", first), ("counts", counts)):
            if values is not None and np.any(np.asarray(values) < 0):
                raise BadInputError(f"{name} of a user's examples must be 0 or more")
        users = np.asarray(users, dtype=np.int64)
        begin = parent.user_offsets[users]
        size = parent.user_offsets[users + 1] - begin
        skip = np.zeros_like(size) if first is None else np.minimum(first, size)
        keep = -(-(size - skip) // every)
        keep = keep if counts is None else np.minimum(counts, keep)
        some = keep > 0
        self.parent, self._every = parent, every
        self.of_sets = getattr(parent, "of_sets", False)
        self.unit_key = unit_key_of(parent)
        self.task = getattr(parent, "task", None)
        self.immutable = getattr(parent, "immutable", False)
        self.schema = parent.schema
        self._users = users[some]
        self._first = (begin + skip)[some]
        self.user_offsets = np.zeros(len(self._users) + 1, np.int64)
        np.cumsum(keep[some], out=self.user_offsets[1:])

    def user_ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Returns the ids of the users with these indices."""
        return self.parent.user_ids(self._users[np.asarray(indices, dtype=np.int64)])

    def records(self, positions: np.ndarray) -> np.ndarray:
        """Returns the stored records at ``positions``."""
        user = np.searchsorted(self.user_offsets, positions, side="right") - 1
        place = self._every * (positions - self.user_offsets[user])
        return self.parent.records(self._first[user] + place)


def unit_key_of(store: Any) -> str:
    """What makes a user of a store; "" of somebody else's that does not say."""
    return str(getattr(store, "unit_key", ""))


def keyed(store: Any, unit_key: str, task: Task | None = None) -> Any:
    """``store``, of which it is now known what makes a user, and what is learned."""
    for one in (store, getattr(store, "sets", store)):  # a shared store is split by its sets
        one.unit_key, one.task = unit_key, task
    return store


def expect_store(data: Any, name: str) -> None:
    """Raises BadInputError if ``data`` is no store."""
    # What the class has is not asked for here: it may be refused later, in better words.
    if not all(hasattr(type(data), n) or hasattr(data, n) for n in ("user_offsets", "read")):
        raise BadInputError(
            f"{name} is {type(data).__name__}, but it must be a store of users' examples: "
            "load_dataset(...).train, from_pandas, from_texts or from_arrays make one"
        )


# ---- labels and numbers that train nothing -------------------------------------------------------

# Reading all of a store that lies on a disk may take longer than training on it.
_AT_ONCE, _MOST = 2**12, 2**18
_FAR, _SHARE, _LOOKED_AT = 10.0, 0.01, 256  # as of tables (``table``), of the first examples


def are_classes(labels: np.ndarray, classes: int) -> bool:
    """Whether all labels are whole numbers from 0 to ``classes - 1``, of whatever type."""
    if labels.dtype.kind not in "biuf":
        return False
    return bool(((labels >= 0) & (labels < classes) & (labels == np.floor(labels))).all())


def check_labels(store: Readable, classes: int) -> None:
    """Raises BadInputError if a ``label`` among a store's first 2^18 examples is no class."""
    first = int(store.user_offsets[0])
    stop = min(int(store.user_offsets[-1]), first + _MOST)
    for start in range(first, stop, _AT_ONCE):
        labels = store.read(np.arange(start, min(start + _AT_ONCE, stop))).get("label")
        if labels is not None and not are_classes(np.asarray(labels), classes):
            few = "the model has one output: two classes need two. " if classes == 1 else ""
            raise BadInputError(
                f"a label is none of the whole numbers from 0 to {classes - 1}, one for each class "
                f"that the model tells apart: {few}number the classes from 0 "
                "(np.unique(labels, return_inverse=True)[1]), or predict a number "
                '("regression")'
            )


def far_from_order_1(store: Any) -> str | None:
    """What to tell before training if numbers are far from order 1; for the terminal alone.

    Tables are checked where they are read.
    """
    store = getattr(store, "sets", store)  # of records with several owners
    task = getattr(store, "task", None)
    if task is not None and task.table is not None:
        return None
    first = int(store.user_offsets[0])
    stop = min(int(store.user_offsets[-1]), first + _LOOKED_AT)
    found: Any = store.read(np.arange(first, stop)) if first < stop else {}
    far = []
    for name in ("x", "label"):
        values = np.asarray(found[name] if isinstance(found, Mapping) and name in found else 0)
        # Of vectors each number by itself, of images all.
        axis = 0 if values.ndim == 2 else None
        if values.dtype.kind == "f" and ((np.abs(values) > _FAR).mean(axis) > _SHARE).any():
            far.append(name)
    if not far:
        return None
    return (
        f"numbers of {' and '.join(far)} are far from order 1, which leaves little of a clipped "
        "gradient to learn from: unless the model scales them, bring them to order 1 by constants "
        "known without these data (images of 0 to 255: divide by 255)"
    )
