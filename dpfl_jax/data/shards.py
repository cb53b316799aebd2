"""Stores on disk: shards of records, an index by user, a manifest that ties them together.

Layout of a store's folder::

    manifest.json            version, schema, counts, checksums, tokeniser, how it was built
    users.arrow              id and number of examples of each user, in store order
    lengths.arrow            tokens of each example, in store order (sequences of tokens only)
    digests.sha256           digest of each user, in store order: of some users without reading them
    blocks.sha256            SHA-256 of every 256 KiB of the shards, to read parts of them (Arrow)
    shard-00000-of-00016.*   examples, users in store order, no user in two shards

Shards are Arrow files (memory-mapped: the fastest random access) or ArrayRecord files (compressed,
for object stores). Opening reads the manifest and 8 bytes a user; ids and lengths stay on disk. The
manifest is written last, then the folder is renamed into place: a folder that opens is complete.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pydantic

from dpfl_jax.buckets import address
from dpfl_jax.data.cached import CachedFolder, num_blocks
from dpfl_jax.data.keys import key_name
from dpfl_jax.data.owners import SharedStore
from dpfl_jax.data.records import STORE_FORMATS, Layout, RecordReader, open_cached, open_records
from dpfl_jax.data.schema import Schema
from dpfl_jax.data.store import Store, combine_digests, content_fingerprint
from dpfl_jax.errors import BadInputError
from dpfl_jax.files import on_disk, within

MANIFEST = "manifest.json"
KIND = "dpfl_jax user-partitioned store"
VERSION = 3
USERS = "users.arrow"
_DOWNLOADS = 32  # at once
INDEX = pa.schema([("user", pa.large_string()), ("examples", pa.int64())])
LENGTHS = "lengths.arrow"
BLOCKS, DIGESTS = "blocks.sha256", "digests.sha256"
LENGTHS_INDEX = pa.schema([("tokens", pa.uint32())])


def sha256_file(path: pathlib.Path) -> str:
    """Returns the hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """The manifest's entry for a file.

    Attributes:
      file: its name.
      bytes: its size.
      sha256: its digest, in hex.
      examples: number of examples.
      layout: where they are, in an Arrow file.
    """

    file: str
    bytes: int
    sha256: str
    examples: int = 0
    layout: Layout | None = None

    @classmethod
    def of(cls, path: pathlib.Path, examples: int = 0, layout: Layout | None = None) -> FileEntry:
        """Describes an existing file."""
        return cls(path.name, path.stat().st_size, sha256_file(path), examples, layout)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The table of contents of a store.

    Attributes:
      schema: layout of an example.
      shard_format: ``"arrow"`` or ``"arrayrecord"``.
      num_users: users in all shards.
      num_examples: examples in all shards.
      fingerprint: digest of users and examples, the same for every way of storing them.
      shards: entries of the shards, in store order.
      index: entry of ``users.arrow``.
      shared: whether users are sets of owners (``owners``).
      lengths: entry of ``lengths.arrow``; None for arrays and pairs, and in stores that were built
        before there was one.
      digests, blocks: entries of ``digests.sha256`` and ``blocks.sha256``, if there are such files.
      build: facts about the build (sources, settings), which are not part of the content.
    """

    schema: Schema
    shard_format: str
    num_users: int
    num_examples: int
    fingerprint: str
    shards: tuple[FileEntry, ...]
    index: FileEntry
    shared: bool = False
    lengths: FileEntry | None = None
    digests: FileEntry | None = None
    blocks: FileEntry | None = None
    build: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The entries of all files."""
        return (*self.shards, self.index, *filter(None, (self.lengths, self.digests, self.blocks)))

    def write(self, folder: pathlib.Path) -> None:
        """Writes ``manifest.json``, durably and in one step."""
        body = {"kind": KIND, "version": VERSION, **dataclasses.asdict(self)}
        body["checksum"] = _checksum(body)
        partial = folder / (MANIFEST + ".partial")
        with partial.open("w") as file:
            json.dump(body, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(folder / MANIFEST)

    @classmethod
    def read(cls, folder: pathlib.Path) -> Manifest:
        """Reads ``manifest.json``.

        Raises:
          BadInputError: it is missing, damaged, of another kind or of another version.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise BadInputError(
                f"{folder} is not a store: it has no {MANIFEST} (build one with `dpfl data build`)"
            )
        try:
            body = json.loads(path.read_bytes().decode())
            if body.pop("kind") != KIND:
                raise ValueError("another kind of file")
            if (version := body.pop("version")) != VERSION:
                raise BadInputError(
                    f"{path} has version {version}, but this program reads version {VERSION}: "
                    "build the store again"
                )
            if body.pop("checksum") != _checksum({"kind": KIND, "version": VERSION, **body}):
                raise BadInputError(
                    f"{path} was changed after it was written: build the store again"
                )
            return pydantic.TypeAdapter(Manifest).validate_python(body)
        except BadInputError:
            raise
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = str(error).splitlines()[0]
            raise BadInputError(f"{path} is not a readable store manifest ({reason})") from error


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class ShardStore(Store):
    """A store on disk, opened for reading. Thread-safe; can be sent to worker processes.

    Attributes:
      path: the folder.
      manifest: its table of contents.
      user_offsets: int64 [num_users + 1].
    """

    immutable = True

    def __init__(self, path: str | os.PathLike[str]):
        where = address(path)
        self._cached = None if where is None else CachedFolder(where, MANIFEST)
        self._given = where or os.fspath(on_disk(path))
        self.path = pathlib.Path(self._given) if self._cached is None else self._cached.path
        self.manifest = Manifest.read(self.path)
        self.schema, self.users_are_sets = self.manifest.schema, self.manifest.shared
        self.unit_key = _unit_key(self.manifest.build.get("sources", {}))
        if self.manifest.shard_format not in STORE_FORMATS:
            raise BadInputError(
                f"{self.path / MANIFEST}: unknown shard format {self.manifest.shard_format!r}"
            )
        if self.manifest.index.file != USERS:
            raise BadInputError(f"{self.path / MANIFEST} does not list {USERS}")
        for entry in self.manifest.files:
            self._check_size(entry)
        self._file(self.manifest.index)
        self._check_sum(self.manifest.index, "it belongs to another build or was damaged")
        self._ids, counts = _read_users(self.path / USERS)
        self.user_offsets = np.concatenate([[0], np.cumsum(counts)])
        counted = (self.num_users, self.num_examples)
        if counted != (self.manifest.num_users, self.manifest.num_examples):
            raise BadInputError(f"{self.path / USERS}: the index disagrees with {MANIFEST}")
        self._starts = np.cumsum([0, *(s.examples for s in self.manifest.shards)])
        self._readers: dict[int, RecordReader] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Sends the path, not the open files."""
        return type(self), (self._given,)

    def _file(self, entry: FileEntry) -> pathlib.Path:
        """The path of a file, which is downloaded if it is neither here nor in the cache."""
        path = within(self.path, entry.file)
        if self._cached is not None:
            self._cached.file(entry.file, [bytes.fromhex(entry.sha256)]).need(np.zeros(1, int), 1)
        return path

    def _check_size(self, entry: FileEntry) -> None:
        path = within(self.path, entry.file)
        if self._cached is not None:
            size = self._cached.sizes.get(entry.file)
        else:
            size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise BadInputError(f"the store's file {path} is missing: build the store again")
        if size != entry.bytes:
            raise BadInputError(
                f"{path} has {size} bytes, but its manifest says {entry.bytes}: it was truncated "
                "or belongs to another build; build the store again"
            )

    def _check_sum(self, entry: FileEntry, what: str) -> None:
        path = self.path / entry.file
        if sha256_file(path) != entry.sha256:
            raise BadInputError(
                f"{path} does not have the checksum of its manifest: {what}; build the store again"
            )

    @property
    def fingerprint(self) -> str:
        """Hex digest of users, examples and schema, from the manifest."""
        return self.manifest.fingerprint

    def _known_digests(self) -> np.ndarray | None:
        if self.manifest.digests is None:
            return None
        path = self._file(self.manifest.digests)
        found = path.read_bytes()
        fits = len(found) == 32 * self.num_users
        if not fits or combine_digests(self.schema, [found]) != self.fingerprint:
            raise BadInputError(
                f"{path} does not have the digests of the store's users: it belongs to another "
                "build or was damaged; build the store again"
            )
        return np.frombuffer(found, np.uint8).reshape(-1, 32)

    def user_ids(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        chosen = np.fromiter(indices, np.int64, len(indices))
        places = pa.Array.from_buffers(pa.int64(), len(chosen), [None, pa.py_buffer(chosen)])
        return list(self._ids.take(places).to_pylist())

    def _reader(self, shard: int) -> RecordReader:
        reader = self._readers.get(shard)
        if reader is None:
            with self._lock:
                if shard not in self._readers:
                    self._readers[shard] = self._open(self.manifest.shards[shard])
                reader = self._readers[shard]
        return reader

    def _open(self, entry: FileEntry) -> RecordReader:
        if self._cached is not None and entry.layout is not None and self.manifest.blocks:
            first, last = self._blocks_of[entry.file]
            file = self._cached.file(entry.file, self._digests[first:last])
            return open_cached(file, self.schema, entry.layout)
        kind = self.manifest.shard_format
        return open_records(self._file(entry), kind, self.schema, entry.examples)

    @functools.cached_property
    def _digests(self) -> list[bytes]:
        assert self.manifest.blocks is not None
        found = self._file(self.manifest.blocks).read_bytes()
        return [found[i : i + 32] for i in range(0, len(found), 32)]

    @functools.cached_property
    def _blocks_of(self) -> dict[str, tuple[int, int]]:
        """The first block of each shard, and the one after its last."""
        ends = np.cumsum([0, *(num_blocks(entry.bytes) for entry in self.manifest.shards)])
        pairs = zip(ends[:-1].tolist(), ends[1:].tolist())
        return {entry.file: pair for entry, pair in zip(self.manifest.shards, pairs)}

    def records(self, positions: np.ndarray) -> np.ndarray:
        """Returns the stored records at ``positions``.

        Raises:
          BadInputError: naming the shard, if it is found damaged while reading.
        """
        positions = np.asarray(positions, dtype=np.int64)
        if len(self.manifest.shards) == 1:
            return self._reader(0).read(positions)
        out = np.empty(len(positions), self.schema.record_dtype)
        shard = np.searchsorted(self._starts, positions, side="right") - 1
        order = np.argsort(shard, kind="stable")
        bounds = np.searchsorted(shard[order], np.arange(len(self.manifest.shards) + 1))

        def read(s: int) -> None:
            rows = order[bounds[s] : bounds[s + 1]]
            out[rows] = self._reader(s).read(positions[rows] - self._starts[s])

        needed = np.flatnonzero(np.diff(bounds)).tolist()
        # A request takes long, and little of this machine.
        for _ in map(read, needed) if self._cached is None else self._pool.map(read, needed):
            pass
        return out

    @functools.cached_property
    def _pool(self) -> concurrent.futures.ThreadPoolExecutor:
        return concurrent.futures.ThreadPoolExecutor(_DOWNLOADS)

    @property
    def has_lengths(self) -> bool:  # type: ignore[override]
        return self.manifest.lengths is not None

    def lengths(self, positions: np.ndarray) -> np.ndarray:
        if self.manifest.lengths is None:
            return super().lengths(positions)
        return self._lengths[self._check(positions)]

    @functools.cached_property
    def _lengths(self) -> np.ndarray:
        assert self.manifest.lengths is not None
        path = self._file(self.manifest.lengths)
        try:
            table = pa.ipc.open_file(pa.memory_map(os.fspath(path))).read_all()
            if table.schema != LENGTHS_INDEX or table.num_rows != self.num_examples:
                raise ValueError("another number of examples, or other columns than tokens")
            tokens = table.column(0).chunk(0)
            return np.frombuffer(tokens.buffers()[1], "<u4", len(tokens))
        except (OSError, ValueError, IndexError) as error:
            raise BadInputError(f"{path} does not hold the lengths of a store ({error})") from error

    def verify(self) -> None:
        """Reads every file again and compares all checksums, then every record's digest.

        Raises:
          BadInputError: naming the first file that is not what was built.
        """
        for entry in self.manifest.files:
            self._file(entry)
            self._check_sum(entry, "a byte changed or it belongs to another build")
        if content_fingerprint(self) != self.manifest.fingerprint:
            raise BadInputError(
                f"{self.path}: the records are not those of the manifest; build the store again"
            )


def _read_users(path: pathlib.Path) -> tuple[pa.Array, np.ndarray]:
    """Maps ids and counts of ``users.arrow``; avoids Arrow functions that import pandas."""
    try:
        users = pa.ipc.open_file(pa.memory_map(os.fspath(path))).read_all().combine_chunks()
        users.validate()
        if users.schema != INDEX or any(column.null_count for column in users.columns):
            raise ValueError("other columns than user and examples")
        ids, counts = (column.chunk(0) for column in users.columns)
        return ids, np.frombuffer(counts.buffers()[1], "<i8", len(counts))
    except (OSError, ValueError, IndexError) as error:
        raise BadInputError(f"{path} is not the index of a store ({error})") from error


def _unit_key(sources: dict[str, Any]) -> str:
    """The key of the users, from what the manifest says about the sources."""
    if "set" in sources:
        return f"user of data.source={sources['set']}"
    if sources.get("format") != "folder" and "user_column" in sources:
        return key_name(sources["user_column"])
    return str(sources.get("unit_key", ""))


def open_store(path: str | os.PathLike[str]) -> ShardStore | SharedStore:
    """Opens a store's folder; a ``SharedStore`` if records have several owners.

    A folder in a bucket (``gs://``, ``s3://``) is read through the cache of this machine: a block
    of 256 KiB (without ``blocks.sha256``, a shard) is downloaded, and compared with its checksum,
    when one of its records is first asked for.

    Sizes of all files and the checksum of the index are checked; ``ShardStore.verify`` reads the
    rest.

    Raises:
      BadInputError: naming the file that is missing, damaged or of another build.
    """
    store = ShardStore(path)
    return SharedStore(store) if store.manifest.shared else store
