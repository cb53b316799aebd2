"""User-partitioned stores: random access to examples that lie together user by user.

A store fixes an order of users and gives every example a position: user u owns positions
``user_offsets[u]:user_offsets[u + 1]``. The index costs 8 bytes a user and nothing per example.
Stores of the same users and examples have the same fingerprint, in memory or on disk.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dpfl_jax.data.keys import SEPARATOR, check_user_id, no_sets
from dpfl_jax.data.schema import Schema
from dpfl_jax.errors import BadInputError
from dpfl_jax.task import Task


class Readable(Protocol):
    """The interface that training needs of a store."""

    @property
    def user_offsets(self) -> np.ndarray:
        """int64 [num_users + 1]: user u owns positions offsets[u]:offsets[u+1]."""

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples at ``positions`` [m] as arrays [m, ...]."""


class Store(abc.ABC):
    """Examples by user; subclasses give schema, user_offsets, records and user ids.

    Attributes:
      schema: layout of an example.
      user_offsets: int64 [num_users + 1].
      users_are_sets: whether its users are sets of owners (``owners``), not people.
      unit_key: the column or key that makes a user, for the guarantee.
      task: what is learned from it, if known.
      immutable: records never change, so that the fingerprint is computed once.

    Examples:
      >>> import numpy as np
      >>> import dpfl_jax as dpfl
      >>> x = np.eye(3, dtype="float32")
      >>> store = dpfl.from_arrays({"x": x, "label": np.arange(3)}, users=["ann", "ann", "bob"])
      >>> store.read(np.array([2]))["label"].tolist()  # bob's only example
      [1]
    """

    schema: Schema
    user_offsets: np.ndarray
    users_are_sets: bool = False
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
        """int64 [num_users], how many examples each user has."""
        return np.diff(self.user_offsets)

    @abc.abstractmethod
    def user_ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """Returns the ids of the users with these indices."""

    @abc.abstractmethod
    def records(self, positions: np.ndarray) -> np.ndarray:
        """Returns the stored records at ``positions`` (see ``Schema.record_dtype``)."""

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples at ``positions`` as arrays with leading axis len(positions).

        Raises:
          IndexError: a position is outside 0..num_examples-1. Negative ones are, too: -1 marks
            padding in a draw, which must be masked and never read.
        """
        return self.schema.unpack(self.records(self._check(positions)))

    # Whether ``lengths`` reads no records.
    has_lengths: bool = True

    def lengths(self, positions: np.ndarray) -> np.ndarray:
        """Returns how many tokens the examples at ``positions`` have (``Schema.lengths``)."""
        return self.schema.lengths(self.records(self._check(positions)))

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
        return content_fingerprint(self, self._known_digests())

    def _known_digests(self) -> np.ndarray | None:
        """uint8 [num_users, 32], each user's ``user_digest`` if it is known without reading, or 0.

        None if none is.
        """
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(users={self.num_users}, examples={self.num_examples})"


def user_order_key(user_id: str) -> tuple[bytes, str]:
    """The order of users in every store: by a hash of the id, then the id.

    A hash order needs no global sort (shards are ranges of the hash, built independently and of
    equal size in expectation), and a user's index says nothing about the user.
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
    """Fingerprint of a store, from its schema and the digests of its users in order."""
    total = hashlib.sha256(json.dumps(dataclasses.asdict(schema), sort_keys=True).encode())
    for digest in digests:
        total.update(digest)
    return total.hexdigest()


_BLOCK = 2**16  # examples per read


def content_fingerprint(store: Store, known: np.ndarray | None = None) -> str:
    """Computes a store's fingerprint, from the records of users whose digest is not ``known``."""
    if known is None:
        return combine_digests(store.schema, _digests(store, np.arange(store.num_users)))
    missing = np.flatnonzero(~known.any(axis=1))
    for user, digest in zip(missing, _digests(store, missing)):
        known[user] = np.frombuffer(digest, np.uint8)
    return combine_digests(store.schema, [known.tobytes()])


def _digests(store: Store, users: np.ndarray) -> Iterator[bytes]:
    """The digests of some users, in order; reads some of them at a time."""
    first, counts = store.user_offsets[users], np.diff(store.user_offsets)[users]
    ends, low = np.cumsum(counts), 0
    while low < len(users):
        read = int(ends[low] - counts[low])
        high = max(low + 1, int(np.searchsorted(ends, read + _BLOCK, side="right")))
        ranges = zip(first[low:high], counts[low:high])
        block = store.records(np.concatenate([np.arange(f, f + n) for f, n in ranges]))
        names = store.user_ids(users[low:high])
        for name, records in zip(names, np.split(block, ends[low : high - 1] - read)):
            yield user_digest(name, records)
        low = high


def check_offsets(offsets: np.ndarray) -> None:
    """Raises BadInputError unless ``user_offsets`` give users examples that no two share."""
    array = np.asarray(offsets)
    if array.ndim != 1 or not len(array) or not np.issubdtype(array.dtype, np.integer):
        raise BadInputError(
            f"the store's user_offsets are {array.dtype} of shape {array.shape}, but they must be "
            "whole numbers [num_users + 1]"
        )
    if array[0] < 0 or (np.diff(array) < 0).any():
        raise BadInputError(
            "the store's user_offsets decrease, so that users would share examples: user u owns "
            "positions user_offsets[u] to user_offsets[u + 1]"
        )


def fingerprint_of(records: Any, count: int) -> str:
    """Identifies the content of any store: its ``fingerprint``, or a digest of all records.

    Args:
      records: the store, which has ``read(positions)``.
      count: number of its records.
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


class ArrayStore(Store):
    """A store whose records are one array, in memory or memory-mapped.

    Examples:
      >>> import numpy as np
      >>> import dpfl_jax as dpfl
      >>> x = np.eye(3, dtype="float32")
      >>> store = dpfl.from_arrays({"x": x, "label": np.arange(3)}, users=["ann", "ann", "bob"])
      >>> store.num_users, store.examples_per_user.tolist()
      (2, [1, 2])
    """

    immutable = True

    def __init__(
        self, schema: Schema, ids: Sequence[str], user_offsets: np.ndarray, records: np.ndarray
    ):
        """Takes arrays in store order (``from_users`` sorts); copies records that may change.

        Args:
          schema: layout of an example.
          ids: user ids in the order of ``user_order_key``.
          user_offsets: int64 [num_users + 1].
          records: [num_examples] of ``schema.record_dtype``.
        """
        self.schema = schema
        self.user_offsets = np.ascontiguousarray(user_offsets, dtype=np.int64)
        self._ids = ids
        if records.flags.writeable:  # records must not change once they are fingerprinted
            records = records.copy()
            records.flags.writeable = False
        self._records = records
        if len(ids) != self.num_users or self.num_examples != len(records):
            raise ValueError("user ids, offsets and records disagree in length")
        self.users_are_sets = any(SEPARATOR in name for name in ids)

    @classmethod
    def from_users(
        cls,
        users: Iterable[tuple[str, Mapping[str, Any]]],
        schema: Schema | None = None,
        allow_sets: bool = False,
    ) -> ArrayStore:
        """Builds a store from (user id, arrays with a leading axis of examples).

        Args:
          users: each user once; users without examples are left out.
          schema: layout; None: plain arrays, as the first user has them.
          allow_sets: whether an id may name a set of owners (``owners.store_from_users``).

        Raises:
          BadInputError: there is no example, a user occurs twice or has no id, or arrays do not fit
            the schema.
        """
        packed: dict[str, np.ndarray] = {}
        for name, batch in users:
            if schema is None:
                schema = Schema.arrays(batch, leading_axis=True)
            records = schema.pack(batch)
            if name in packed:
                raise BadInputError(f"user {name!r} occurs twice: give all its examples at once")
            if len(records):
                packed[name] = records
        if schema is None:
            raise BadInputError("there are no users to build a store from")
        return cls.from_records(packed, schema, allow_sets)

    @classmethod
    def from_records(
        cls, packed: Mapping[str, np.ndarray], schema: Schema, allow_sets: bool = False
    ) -> ArrayStore:
        """Builds a store from the records of each user (``Schema.pack``); sorts the users."""
        for name in packed:
            check_user_id(name)
            if SEPARATOR in name and not allow_sets:
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
        return [self._ids[int(i)] for i in indices]

    def records(self, positions: np.ndarray) -> np.ndarray:
        return self._records[positions]

    def lengths(self, positions: np.ndarray) -> np.ndarray:
        return self._lengths[self._check(positions)]

    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        return self.schema.lengths(self._records)


class UserView(Store):
    """Some users of another store, and a range of examples of each.

    Splits and limits are views: nothing is copied, and positions are numbered from 0.

    Examples:
      >>> import numpy as np
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.data import UserView
      >>> x = np.eye(3, dtype="float32")
      >>> store = dpfl.from_arrays({"x": x, "label": np.arange(3)}, users=["ann", "ann", "bob"])
      >>> UserView(store, users=np.array([0])).num_examples
      1
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
          parent: the store that is read.
          users: int64 [k], increasing indices of users of ``parent``.
          first: int64 [k], leading examples of each user to leave out (default 0).
          counts: int64 [k], examples of each user to keep (default: all that follow). Users left
            without examples are dropped.
          every: 2 keeps every second example of a range.

        Raises:
          BadInputError: a negative number: users would then share examples.
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
        nonempty = keep > 0
        self._is_whole = (keep == size)[nonempty]
        self.parent, self._every = parent, every
        self.users_are_sets = getattr(parent, "users_are_sets", False)
        self.unit_key = unit_key_of(parent)
        self.task = getattr(parent, "task", None)
        self.immutable = getattr(parent, "immutable", False)
        self.schema = parent.schema
        self._users = users[nonempty]
        self._first = (begin + skip)[nonempty]
        self.user_offsets = np.zeros(len(self._users) + 1, np.int64)
        np.cumsum(keep[nonempty], out=self.user_offsets[1:])

    def user_ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        return self.parent.user_ids(self._users[np.asarray(indices, dtype=np.int64)])

    def records(self, positions: np.ndarray) -> np.ndarray:
        return self.parent.records(self._in_parent(positions))

    def _known_digests(self) -> np.ndarray | None:
        known = self.parent._known_digests()
        return None if known is None else known[self._users] * self._is_whole[:, None]

    @property
    def has_lengths(self) -> bool:  # type: ignore[override]
        return self.parent.has_lengths

    def lengths(self, positions: np.ndarray) -> np.ndarray:
        return self.parent.lengths(self._in_parent(self._check(positions)))

    def _in_parent(self, positions: np.ndarray) -> np.ndarray:
        user = np.searchsorted(self.user_offsets, positions, side="right") - 1
        place = self._every * (positions - self.user_offsets[user])
        return self._first[user] + place


def unit_key_of(store: Any) -> str:
    """What makes a user of a store; "" if the store does not say."""
    return str(getattr(store, "unit_key", ""))


def with_unit_key(store: Any, unit_key: str, task: Task | None = None) -> Any:
    """Notes in a store what makes a user, and what is learned; returns the store."""
    for part in (store, getattr(store, "sets", store)):  # splits of a shared store are of its sets
        part.unit_key, part.task = unit_key, task
    return store


def expect_store(data: Any, name: str) -> None:
    """Raises BadInputError if ``data`` is not a store."""
    # Properties are not evaluated: one that raises later has a better message.
    if not all(hasattr(type(data), n) or hasattr(data, n) for n in ("user_offsets", "read")):
        raise BadInputError(
            f"{name} is {type(data).__name__}, but it must be a store of users' examples: "
            "load_dataset(...).train, from_pandas, from_texts or from_arrays make one"
        )


# ---- labels that are not classes, and numbers far from order 1 -----------------------------------

# Reading a whole store from disk may take longer than training on it.
_LABELS_PER_READ, _MAX_LABELS = 2**12, 2**18
# Numbers are far from order 1 if more than this share of them is larger than FAR.
FAR, FAR_SHARE = 10.0, 0.01
_SCALE_EXAMPLES = 256  # only the first ones are checked


def are_classes(labels: np.ndarray, classes: int) -> bool:
    """Whether all labels are whole numbers from 0 to ``classes - 1``, of whatever type."""
    if labels.dtype.kind not in "biuf":
        return False
    return bool(((labels >= 0) & (labels < classes) & (labels == np.floor(labels))).all())


def check_labels(store: Readable, classes: int) -> None:
    """Raises BadInputError if a ``label`` in a store's first 2^18 examples is not a class."""
    first = int(store.user_offsets[0])
    stop = min(int(store.user_offsets[-1]), first + _MAX_LABELS)
    for start in range(first, stop, _LABELS_PER_READ):
        labels = store.read(np.arange(start, min(start + _LABELS_PER_READ, stop))).get("label")
        if labels is not None and not are_classes(np.asarray(labels), classes):
            hint = "the model has one output: two classes need two. " if classes == 1 else ""
            raise BadInputError(
                f"a label is not a whole number from 0 to {classes - 1}, one for each class of the "
                f"model: {hint}number the classes from 0 "
                "(np.unique(labels, return_inverse=True)[1]), or predict a number "
                '("regression")'
            )


def scale_warning(store: Any) -> str | None:
    """Returns a warning, for the terminal only, if inputs or labels are far from order 1.

    Tables are checked where they are read.
    """
    store = getattr(store, "sets", store)  # records may have several owners
    task = getattr(store, "task", None)
    if task is not None and task.table is not None:
        return None
    first = int(store.user_offsets[0])
    stop = min(int(store.user_offsets[-1]), first + _SCALE_EXAMPLES)
    examples: Any = store.read(np.arange(first, stop)) if first < stop else {}
    far = []
    for name in ("x", "label"):
        values = np.asarray(examples.get(name, 0) if isinstance(examples, Mapping) else 0)
        # Vectors are checked number by number, images as a whole.
        axis = 0 if values.ndim == 2 else None
        if values.dtype.kind == "f" and ((np.abs(values) > FAR).mean(axis) > FAR_SHARE).any():
            far.append(name)
    if not far:
        return None
    return (
        f"numbers of {' and '.join(far)} are far from order 1, which leaves little of a clipped "
        "gradient to learn from: unless the model scales them, bring them to order 1 by constants "
        "known without these data (images of 0 to 255: divide by 255)"
    )
