"""Building stores: DuckDB groups rows by user, out of core; processes encode the partitions.

A build writes to a staging folder next to its final place: the table of rows, sorted by user within
``MEMORY``; a shard for each partition, with a side file; at the end index and manifest. Then the
folder is renamed. An interrupted build resumes with the first missing file.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import operator
import os
import pathlib
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pydantic

from dpfl_jax.buckets import address, output
from dpfl_jax.data.cached import block_digests
from dpfl_jax.data.chats import Conversations
from dpfl_jax.data.documents import (
    DocumentFiles,
    encode_user,
    none_usable,
    read_documents,
    text_schema,
)
from dpfl_jax.data.keys import SEPARATOR
from dpfl_jax.data.owners import grouped_by_owner_set
from dpfl_jax.data.records import STORE_FORMATS, disk_error, layout_of, write_records
from dpfl_jax.data.rows import BadRows, expand_paths
from dpfl_jax.data.schema import Schema
from dpfl_jax.data.shards import (
    BLOCKS,
    DIGESTS,
    INDEX,
    LENGTHS,
    LENGTHS_INDEX,
    USERS,
    FileEntry,
    Manifest,
    ShardStore,
)
from dpfl_jax.data.sources import Row, file_source
from dpfl_jax.data.store import Store, combine_digests, unit_key_of, user_digest, user_order_key
from dpfl_jax.data.tokenizers import load_tokenizer
from dpfl_jax.errors import BadInputError, at_least, extra, one_of
from dpfl_jax.files import on_disk

with extra("build", "building a store"):
    import duckdb

PARTITION_BYTES = 256 * 2**20
MEMORY = 384  # MiB that DuckDB may take; what does not fit goes to the staging folder
_ROWS = pa.schema(
    [
        ("key", pa.uint64()),
        ("user", pa.binary()),
        ("seq", pa.int64()),
        ("data", pa.binary()),
        ("large", pa.bool_()),
    ]
)
_BATCH_BYTES, _BATCH_ROWS = 2**22, 2**12
# DuckDB holds thousands of rows of each sorted run in memory: larger data are sorted by offset.
_LARGE_BYTES = 512
_TABLE, _LARGE_FILE, _GROUPED = "rows.duckdb", "rows.large", "grouped"
NO_FIRST_OF_SHARED = (
    "some records have several owners, so that a user's first records are not defined: leave out "
    "max_examples_per_user; mechanism.group_size says how many of each owner's are used"
)
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class BuildPlan:
    """Everything a worker must know to encode a partition; equal plans give equal stores.

    Attributes:
      schema: layout of an example.
      shard_format: ``"arrow"`` or ``"arrayrecord"``.
      num_shards: number of partitions.
      tokenizer: name or file of the tokeniser; None if the rows are packed records.
      max_examples_per_user: keep each user's first examples.
    """

    schema: Schema
    shard_format: str = "arrow"
    num_shards: int = 1
    tokenizer: str | None = "bytes"
    max_examples_per_user: int | None = None

    def __post_init__(self) -> None:
        one_of("the store format", self.shard_format, STORE_FORMATS)
        at_least("the number of shards", self.num_shards, 1, most=100_000)

    @classmethod
    def for_text(
        cls,
        tokenizer: str,
        seq_len: int,
        conversations: Conversations | None = None,
        **settings: Any,
    ) -> BuildPlan:
        """Returns the plan of a store of texts, or of conversations."""
        schema = text_schema(seq_len, load_tokenizer(tokenizer), conversations)
        return cls(schema, tokenizer=tokenizer, **settings)

    def partition(self, user_id: str) -> int:
        """Returns the shard of a user."""
        key = int.from_bytes(user_order_key(user_id)[0], "big")
        return (key * self.num_shards) >> 64

    def keys(self, shard: int) -> tuple[int, int]:
        """Returns the smallest and the largest ``user_order_key`` in a shard."""
        low, end = (-(-((shard + i) << 64) // self.num_shards) for i in (0, 1))
        return low, end - 1


def default_num_shards(total_bytes: int) -> int:
    """Returns a number of partitions that keeps each at about ``PARTITION_BYTES`` of input."""
    return max(1, min(4096, -(-total_bytes // PARTITION_BYTES)))


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a small file in one step."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.rename(path)


def build_store(
    rows: Callable[[], Iterable[Row]],
    out: str | os.PathLike[str],
    plan: BuildPlan,
    *,
    sources: dict[str, Any] | None = None,
    workers: int = 1,
    progress: Progress | None = None,
    bad: BadRows | None = None,
) -> ShardStore:
    """Builds a store from a stream of rows in any order of users.

    Args:
      rows: opens the stream of (user id, data); not called if an interrupted build read all rows. A
        user's rows keep their order. ``data`` is UTF-8 text, or packed records if the plan has no
        tokeniser.
      out: folder of the store, also an address (``gs://``, ``s3://``), which gets the store when it
        is complete; must not exist.
      plan: layout and settings.
      sources: identifies the rows (paths, sizes, times): an interrupted build of other sources is
        thrown away.
      workers: processes that encode.
      progress: called with (phase, done, total); total is 0 if unknown.
      bad: counts the rows that ``rows`` left out, for the manifest.

    Raises:
      BadInputError: ``out`` exists, a row is bad, nothing is usable, or the disk is full.
    """
    progress = progress or (lambda *_: None)
    sources = sources or {}
    with output(out, _identity(plan, sources)) as folder:
        if address(out) is None or not folder.exists():
            staging = prepare(folder, plan, sources)
            group_rows(rows, staging, bad or BadRows(), progress)
            encode_partitions(staging, plan, workers, progress)
            finish(staging, folder, plan, sources)
    return ShardStore(out)


def _identity(plan: BuildPlan, sources: dict[str, Any]) -> str:
    """What an interrupted build must have, to be resumed."""
    known = {"plan": dataclasses.asdict(plan), "sources": sources}
    return json.dumps({**known, "keeps": "lengths, digests, blocks"}, sort_keys=True)


def prepare(out: pathlib.Path, plan: BuildPlan, sources: dict[str, Any]) -> pathlib.Path:
    """Returns the staging folder, of an interrupted build with the same plan or a new one."""
    if out.exists():
        raise BadInputError(f"{out} exists: give another --out or remove it")
    staging = out.with_name(out.name + ".building")
    identity, marker = _identity(plan, sources), staging / "build.json"
    try:
        if staging.exists() and not (marker.is_file() and marker.read_text() == identity):
            shutil.rmtree(staging)
        if any(path.is_symlink() for path in (staging, *staging.rglob("*"))):
            raise BadInputError(
                f"{staging}, the folder of an interrupted build, holds links, and what they lead "
                "to would be overwritten: remove it"
            )
        if not staging.exists():
            staging.parent.mkdir(parents=True, exist_ok=True)
            staging.mkdir(mode=0o700)  # other users may not be allowed to read the rows
            write_text(marker, identity)
    except OSError as error:
        raise BadInputError(f"cannot write {staging}: {error.strerror or error}") from error
    return staging


def group_rows(
    rows: Callable[[], Iterable[Row]], staging: pathlib.Path, bad: BadRows, progress: Progress
) -> None:
    """Phase 1: sorts all rows by user, in their order, into a table of the staging folder.

    Raises:
      BadInputError: a row is bad (the staging folder is removed), or the disk is full (it is kept).
    """
    if (staging / _GROUPED).exists():
        return
    for stale in staging.glob(_TABLE + "*"):
        shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
    count, stopped = 0, None

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal count, stopped
        try:
            with (staging / _LARGE_FILE).open("wb") as large_file:
                for part in _row_batches(rows(), large_file):
                    yield part
                    count += part.num_rows
                    progress("reading", count, 0)
        except (Exception, KeyboardInterrupt) as error:  # DuckDB would raise another error instead
            stopped = error
            raise

    try:
        with _connect(staging) as connection:
            connection.register("incoming", pa.RecordBatchReader.from_batches(_ROWS, batches()))
            connection.execute(
                'CREATE TABLE "rows" AS SELECT * FROM incoming ORDER BY key, "user", seq'
            )
        if not count:
            raise BadInputError("the data hold no users: there is not one row")
        write_text(staging / _GROUPED, str(bad.dropped))
    except (BadInputError, duckdb.Error, OSError) as error:
        cause = stopped or error
        if isinstance(cause, BadInputError):
            shutil.rmtree(staging, ignore_errors=True)
        elif isinstance(cause, duckdb.Error | OSError):
            cause = disk_error(staging, cause)
        raise cause from None
    progress("reading", count, count)


def _row_batches(rows: Iterable[Row], large_file: IO[bytes]) -> Iterator[pa.RecordBatch]:
    """Yields rows as ``_ROWS``; large data go to ``large_file``."""
    waiting: list[tuple[int, bytes, int, bytes, bool]] = []
    size = 0

    def batch() -> pa.RecordBatch:
        columns = zip(*waiting, strict=True)
        return pa.record_batch(list(map(pa.array, columns, _ROWS.types)), schema=_ROWS)

    for seq, (user, data) in enumerate(rows):
        key, _ = user_order_key(user)
        if large := len(data) > _LARGE_BYTES:
            place = struct.pack("<qq", large_file.tell(), len(data))
            large_file.write(data)
            data = place
        waiting.append((int.from_bytes(key, "big"), user.encode(), seq, data, large))
        size += len(data)
        if size > _BATCH_BYTES or len(waiting) == _BATCH_ROWS:
            yield batch()
            waiting, size = [], 0
    if waiting:
        yield batch()


def grouped_users(
    staging: pathlib.Path, plan: BuildPlan, shard: int, workers: int
) -> Iterator[tuple[str, list[bytes]]]:
    """Yields each user of a partition with its data, in store order."""
    low, high = plan.keys(shard)
    with _connect(staging, workers) as connection, (staging / _LARGE_FILE).open("rb") as large_file:

        def load(data: bytes, large: bool) -> bytes:
            if not large:
                return data
            place, size = struct.unpack("<qq", data)
            large_file.seek(place)
            return large_file.read(size)

        batches = connection.sql(
            f'SELECT "user", data, large FROM "rows" WHERE key BETWEEN {low}::UBIGINT AND '
            f'{high}::UBIGINT ORDER BY key, "user", seq'
        ).to_arrow_reader(_BATCH_ROWS)
        yield from group_by_user(
            (user.decode(), load(data, large))
            for batch in batches
            for user, data, large in zip(*(column.to_pylist() for column in batch.columns))
        )


def group_by_user(rows: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, list[bytes]]]:
    """Yields (user, list of data) of sorted rows."""
    for user, group in itertools.groupby(rows, operator.itemgetter(0)):
        yield user, [data for _, data in group]


def _connect(staging: pathlib.Path, readers: int = 0) -> duckdb.DuckDBPyConnection:
    """Opens the table of a build; DuckDB reads no other file and loads no extension.

    Args:
      staging: the folder of the build.
      readers: how many processes read it at once; 0: this one writes it.
    """
    settings: dict[str, Any] = {
        "memory_limit": f"{max(128, MEMORY // max(1, readers))}MiB",
        "threads": 1,  # each further one would hold more rows
        "temp_directory": os.fspath(staging / f"{_TABLE}.{os.getpid()}.sorting"),
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    connection = duckdb.connect(os.fspath(staging / _TABLE), readers > 0, settings)
    connection.execute("SET enable_external_access = false; SET lock_configuration = true")
    return connection


def encode_partition(
    users: Iterable[tuple[str, list[bytes]]], staging: pathlib.Path, plan: BuildPlan, shard: int
) -> int:
    """Phase 2 for one partition: writes its shard and the side file that describes it.

    ``users`` are (user, data in order), in store order. Returns the number of examples.
    """
    tokenizer = load_tokenizer(plan.tokenizer) if plan.tokenizer else None
    schema, limit = plan.schema, plan.max_examples_per_user
    names: list[str] = []
    counts: list[int] = []
    digests: list[bytes] = []
    lengths: list[int] = []
    bad = BadRows()

    def blocks() -> Iterator[np.ndarray]:
        for user, data in users:
            if limit is not None and SEPARATOR in user:
                raise BadInputError(NO_FIRST_OF_SHARED)
            if tokenizer is not None:
                texts = [d.decode() for d in data]
                records = encode_user(texts, tokenizer, schema, limit, bad)
            else:
                records = np.frombuffer(b"".join(data), schema.record_dtype)[:limit]
            if len(records):
                names.append(user)
                counts.append(len(records))
                if schema.has_lengths:
                    lengths.extend(schema.lengths(records).tolist())
                digests.append(user_digest(user, records))
                yield records

    path = _shard_path(staging, plan, shard)
    total = write_records(path, plan.shard_format, schema, blocks())
    layout = layout_of(path, schema, total) if plan.shard_format == "arrow" else None
    side = {
        "entry": dataclasses.asdict(FileEntry.of(path, total, layout)),
        "blocks": block_digests(path).hex() if layout else "",
        "users": names,
        "counts": counts,
        "digests": [d.hex() for d in digests],
        "lengths": lengths,
        "dropped": bad.dropped,
    }
    try:
        write_text(side_path(staging, plan, shard), json.dumps(side))
    except OSError as error:
        raise disk_error(staging, error) from error
    return total


def _shard_path(
    staging: pathlib.Path, plan: BuildPlan, shard: int, suffix: str | None = None
) -> pathlib.Path:
    suffix = STORE_FORMATS[plan.shard_format] if suffix is None else suffix
    return staging / f"shard-{shard:05d}-of-{plan.num_shards:05d}{suffix}"


def side_path(staging: pathlib.Path, plan: BuildPlan, shard: int) -> pathlib.Path:
    """Returns the file that describes a shard; it exists only if the shard is finished."""
    return _shard_path(staging, plan, shard, ".json")


def _encode_grouped(staging: pathlib.Path, plan: BuildPlan, shard: int, workers: int) -> int:
    try:
        users = grouped_users(staging, plan, shard, workers)
        return encode_partition(users, staging, plan, shard)
    except duckdb.Error as error:
        raise disk_error(staging, error) from error


def encode_partitions(
    staging: pathlib.Path, plan: BuildPlan, workers: int, progress: Progress
) -> None:
    """Phase 2: encodes the partitions that are not finished, in ``workers`` processes."""
    todo = [s for s in range(plan.num_shards) if not side_path(staging, plan, s).exists()]
    done = plan.num_shards - len(todo)

    def tick() -> None:
        nonlocal done
        done += 1
        progress("encoding", done, plan.num_shards)

    if workers <= 1 or len(todo) <= 1:
        for shard in todo:
            _encode_grouped(staging, plan, shard, 1)
            tick()
        return
    # Forking a process with threads (Arrow, a tokeniser) can hang: spawn.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(workers, len(todo)), context) as pool:
        futures = [pool.submit(_encode_grouped, staging, plan, shard, workers) for shard in todo]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
                tick()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def finish(
    staging: pathlib.Path,
    out: pathlib.Path,
    plan: BuildPlan,
    sources: dict[str, Any],
    users_are_sets: bool = False,
) -> None:
    """Phase 3: writes index and manifest, removes what only the build needed, renames.

    ``users_are_sets``: users are sets of owners, even if each set has one owner.
    """
    noted = staging / _GROUPED
    dropped = int(noted.read_text()) if noted.exists() else 0
    entries, names, counts, digests = [], [], [], []
    lengths: list[np.ndarray] = []
    block_hashes: list[bytes] = []
    for shard in range(plan.num_shards):
        side = json.loads(side_path(staging, plan, shard).read_text())
        path = _shard_path(staging, plan, shard)
        if side["entry"]["examples"]:
            entry = side["entry"] | {"file": path.name}
            entries.append(pydantic.TypeAdapter(FileEntry).validate_python(entry))
            block_hashes.append(bytes.fromhex(side["blocks"]))
        else:
            path.unlink(missing_ok=True)
        names += side["users"]
        counts += side["counts"]
        digests += side["digests"]
        lengths.append(np.array(side["lengths"], "<u4"))
        dropped += side["dropped"]
    if not names:
        shutil.rmtree(staging)
        raise none_usable(plan.schema)
    try:
        with pa.ipc.new_file(os.fspath(staging / USERS), INDEX) as writer:
            writer.write_table(pa.table([names, counts], schema=INDEX))
        index = FileEntry.of(staging / USERS)
        of_examples = None
        if plan.schema.has_lengths:
            # In one piece, to be mapped.
            tokens = pa.record_batch([np.concatenate(lengths)], schema=LENGTHS_INDEX)
            with pa.ipc.new_file(os.fspath(staging / LENGTHS), LENGTHS_INDEX) as writer:
                writer.write_batch(tokens)
            of_examples = FileEntry.of(staging / LENGTHS)
        (staging / DIGESTS).write_bytes(b"".join(map(bytes.fromhex, digests)))
        of_blocks = None
        if any(block_hashes):
            (staging / BLOCKS).write_bytes(b"".join(block_hashes))
            of_blocks = FileEntry.of(staging / BLOCKS)
        manifest = Manifest(
            plan.schema,
            plan.shard_format,
            len(names),
            sum(counts),
            combine_digests(plan.schema, map(bytes.fromhex, digests)),
            tuple(entries),
            index,
            users_are_sets or any(SEPARATOR in name for name in names),
            of_examples,
            FileEntry.of(staging / DIGESTS),
            of_blocks,
            {
                "sources": sources,
                "max_examples_per_user": plan.max_examples_per_user,
                "dropped_rows": dropped,
            },
        )
        manifest.write(staging)
        keep = {entry.file for entry in manifest.files} | {"manifest.json"}
        for path in staging.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in keep:
                path.unlink()
        staging.rename(out)
    except OSError as error:
        raise disk_error(staging, error) from error


def write_store(store: Store, out: str | os.PathLike[str], format: str = "arrow") -> ShardStore:
    """Writes a grouped store (in memory, or a view) to disk, in bounded memory.

    Raises:
      BadInputError: ``out`` exists or cannot be written.
    """
    store = grouped_by_owner_set(store)
    size = store.num_examples * store.schema.record_dtype.itemsize
    plan = BuildPlan(store.schema, format, default_num_shards(size), tokenizer=None)
    sources = {"fingerprint": store.fingerprint, "unit_key": unit_key_of(store)}
    users = enumerate(store.user_ids(range(store.num_users)))
    upcoming = next(users, None)

    def members(shard: int) -> Iterator[tuple[str, list[bytes]]]:
        nonlocal upcoming
        while upcoming is not None and plan.partition(upcoming[1]) == shard:
            u, name = upcoming
            positions = np.arange(store.user_offsets[u], store.user_offsets[u + 1])
            yield name, [store.records(positions).tobytes()]
            upcoming = next(users, None)

    with output(out) as folder:
        staging = prepare(folder, plan, sources)
        for shard in range(plan.num_shards):
            encode_partition(members(shard), staging, plan, shard)
        finish(staging, folder, plan, sources, getattr(store, "users_are_sets", False))
    return ShardStore(out)


# ---- with Apache Beam ----------------------------------------------------------------------------
# The same build for more rows than one machine takes: files are read in parallel, the runner's
# shuffle groups rows by partition, and the code of the local build encodes every partition. Any
# runner will do whose workers and caller share a file system (a mounted bucket, NFS); the staging
# folder lies next to the result.


_Keyed = tuple[int, tuple[bytes, str, int, bytes]]


def _read(
    item: tuple[int, str], plan: BuildPlan, how: DocumentFiles, todo: frozenset[int]
) -> Iterator[_Keyed]:
    file, path = item
    documents = read_documents([pathlib.Path(path)], how)
    for row, (user, text) in enumerate(documents):
        shard = plan.partition(user)
        if shard in todo:  # the number orders a user's rows by file, and by row in each
            yield shard, (user_order_key(user)[0], user, (file << 40) | row, text.encode())


def _encode(
    group: tuple[int, Iterable[tuple[bytes, str, int, bytes]]], staging: str, plan: BuildPlan
) -> tuple[int, int]:
    shard, rows = group
    ordered = sorted(rows, key=lambda row: row[:3])
    users = group_by_user((user, data) for _, user, _, data in ordered)
    return shard, encode_partition(users, pathlib.Path(staging), plan, shard)


def build_with_beam(
    path: str | Sequence[str],
    out: str | os.PathLike[str],
    plan: BuildPlan,
    how: DocumentFiles | None = None,
    flags: Sequence[str] = (),
) -> ShardStore:
    """Builds a store from files with an Apache Beam runner.

    All paths, also ``out``, must be the same on all workers. ``how`` is as in ``read_documents``;
    ``flags`` go to the runner, e.g. ``["--runner=FlinkRunner", ...]``.

    Raises:
      BadInputError: Beam is not installed, ``out`` exists, or a row is bad.
    """
    with extra("beam", "--engine beam"):
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
    if address(out) is not None:
        raise BadInputError(
            f"--engine beam writes to a folder that all its workers share, and not to {out}: build "
            "in one, and copy it there"
        )
    out, how = on_disk(out).absolute(), how or DocumentFiles()
    paths = [os.fspath(p.absolute()) for p in expand_paths(path)]
    identity = {"engine": "beam", **file_source(paths, how).identity}
    staging = prepare(out, plan, identity)
    todo = frozenset(s for s in range(plan.num_shards) if not side_path(staging, plan, s).exists())
    try:
        with beam.Pipeline(options=PipelineOptions(list(flags))) as pipeline:
            _ = (
                pipeline
                | "Files" >> beam.Create(list(enumerate(paths)))
                | "Spread files" >> beam.Reshuffle()
                | "Read" >> beam.FlatMap(_read, plan, how, todo).with_output_types(_Keyed)
                | "Group by partition" >> beam.GroupByKey()
                | "Encode" >> beam.Map(_encode, os.fspath(staging), plan)
            )
    except Exception as error:
        # Runners wrap what a worker raised; a user's mistake must still be one sentence.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, BadInputError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise BadInputError(str(cause).split(" [while running")[0]) from error
    for shard in sorted(todo):
        if not side_path(staging, plan, shard).exists():  # no row fell into it
            encode_partition((), staging, plan, shard)
    finish(staging, out, plan, identity)
    return ShardStore(out)
