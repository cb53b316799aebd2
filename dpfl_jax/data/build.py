"""Building stores on disk: group by user out of core, encode in parallel, finish atomically.

Three phases in a folder ``OUT.building`` beside the result:

1. *spill*: stream the rows once and append each to the spill file of its partition, a range of the
   hash of its user id (so partitions are ranges of store order and of about equal size);
2. *encode*: per partition, sort by user (PyArrow), tokenise, cut, write one shard and a side file
   that describes it. Partitions are independent: several processes, or the workers of a pipeline
   engine, run them at once, with the memory of one partition each;
3. *finish*: join the side files into index and manifest, rename the folder into place.

Run again after an interruption, the build goes on where it stopped if nothing it was made from
changed, else it starts over.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.ipc

from dpfl_jax.data.build_plan import (
    BuildPlan,
    Progress,
    Row,
    default_num_shards,
    disk_error,
    write_text,
)
from dpfl_jax.data.chunking import encode_user, none_usable
from dpfl_jax.data.grouping import group_rows, grouped_users
from dpfl_jax.data.records import FORMATS, write_records
from dpfl_jax.data.rows import BadRows
from dpfl_jax.data.shards import USERS, FileEntry, Manifest, ShardStore
from dpfl_jax.data.store import SEPARATOR, Store, combine_digests, unit_key_of, user_digest
from dpfl_jax.data.tokenizers import load_tokenizer
from dpfl_jax.errors import BadInputError

_DROPPED = "dropped"
NO_FIRST_OF_SHARED = (
    "some records have several owners, so that nobody has first ones: leave out "
    "max_examples_per_user; mechanism.group_size says how many of each owner's are used"
)


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
      rows: called when the rows must be read (not if an earlier, interrupted build already read
        them all); yields (user id, sequence number, data). A user's rows are put in the order of
        their sequence numbers. ``data`` is UTF-8 text, or packed records if the plan has no
        tokeniser.
      out: folder of the store; must not exist.
      plan: layout and settings.
      sources: identifies the rows (paths, sizes, times): an interrupted build of other sources is
        thrown away.
      workers: processes that encode.
      progress: called with (phase, done, total); total is 0 if unknown.
      bad: what ``rows`` tells of bad rows; how many it left out goes into the manifest.

    Raises:
      BadInputError: if ``out`` exists, a row is bad, nothing is usable, or the disk is full.
    """
    out = pathlib.Path(out)
    staging = prepare(out, plan, sources or {})
    group_rows(_counted(rows, bad or BadRows(), staging), staging, progress)
    encode_partitions(staging, plan, workers, progress)
    return finish(staging, out, plan, sources or {})


def _counted(
    rows: Callable[[], Iterable[Row]], bad: BadRows, staging: pathlib.Path
) -> Iterator[Row]:
    """The rows; at their end notes, for a build that is interrupted, how many were left out."""
    yield from rows()
    write_text(staging / _DROPPED, str(bad.dropped))


def prepare(out: pathlib.Path, plan: BuildPlan, sources: dict[str, Any]) -> pathlib.Path:
    """Returns the staging folder: a resumable one of the same build, or a new one."""
    if out.exists():
        raise BadInputError(f"{out} exists: give another --out or remove it")
    staging = out.with_name(out.name + ".building")
    identity = json.dumps({"plan": plan.to_json(), "sources": sources}, sort_keys=True)
    marker = staging / "build.json"
    try:
        if staging.exists() and not (marker.is_file() and marker.read_text() == identity):
            shutil.rmtree(staging)
        if any(path.is_symlink() for path in (staging, *staging.rglob("*"))):
            raise BadInputError(
                f"{staging}, which an interrupted build would have left, holds links, and what "
                "they lead to would be written over: remove it"
            )
        if not staging.exists():
            staging.parent.mkdir(parents=True, exist_ok=True)
            staging.mkdir(mode=0o700)  # it holds what its rows do, which may be closed to others
            write_text(marker, identity)
    except OSError as error:
        raise BadInputError(f"cannot write {staging}: {error.strerror or error}") from error
    return staging


def encode_partition(
    users: Iterable[tuple[str, list[bytes]]], staging: pathlib.Path, plan: BuildPlan, shard: int
) -> int:
    """Phase 2 for one partition: writes its shard and the side file that describes it.

    Args:
      users: (user, data in order), in store order.
      staging: the folder of the build.
      plan: the build.
      shard: which partition.

    Returns:
      The number of examples.
    """
    tokenizer = load_tokenizer(plan.tokenizer) if plan.tokenizer else None
    schema, limit = plan.schema, plan.max_examples_per_user
    names: list[str] = []
    counts: list[int] = []
    digests: list[bytes] = []
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
                digests.append(user_digest(user, records))
                yield records

    path = _shard_path(staging, plan, shard)
    total = write_records(path, plan.shard_format, schema, blocks())
    side = {
        "entry": dataclasses.asdict(FileEntry.of(path, len(names), total)),
        "users": names,
        "counts": counts,
        "digests": [d.hex() for d in digests],
        "dropped": bad.dropped,
    }
    try:
        write_text(side_path(staging, plan, shard), json.dumps(side))
    except OSError as error:
        raise disk_error(staging, error) from error
    return total


def _shard_path(staging: pathlib.Path, plan: BuildPlan, shard: int) -> pathlib.Path:
    return staging / (plan.shard_stem(shard) + FORMATS[plan.shard_format])


def side_path(staging: pathlib.Path, plan: BuildPlan, shard: int) -> pathlib.Path:
    """Returns the file that describes a finished shard; it is there only if the shard is."""
    return staging / (plan.shard_stem(shard) + ".json")


def _encode_grouped(staging: pathlib.Path, plan: BuildPlan, shard: int, workers: int) -> int:
    try:
        users = grouped_users(staging, plan, shard, workers)
        return encode_partition(users, staging, plan, shard)
    except duckdb.Error as error:
        raise disk_error(staging, error) from error


def encode_partitions(
    staging: pathlib.Path, plan: BuildPlan, workers: int = 1, progress: Progress | None = None
) -> None:
    """Phase 2: encodes the partitions that are not finished, in ``workers`` processes."""
    todo = [s for s in range(plan.num_shards) if not side_path(staging, plan, s).exists()]
    done = plan.num_shards - len(todo)

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress("encoding", done, plan.num_shards)

    if workers <= 1 or len(todo) <= 1:
        for shard in todo:
            _encode_grouped(staging, plan, shard, 1)
            tick()
        return
    # Forking a process that has threads (Arrow, a tokeniser) can hang: start fresh ones.
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
    of_sets: bool = False,
) -> ShardStore:
    """Phase 3: writes index and manifest, removes what only the build needed, renames.

    ``of_sets``: users are sets of owners, even if each has one: others decided what is kept.
    """
    noted = staging / _DROPPED
    dropped = int(noted.read_text()) if noted.exists() else 0
    entries, names, counts, digests = [], [], [], []
    for shard in range(plan.num_shards):
        side = json.loads(side_path(staging, plan, shard).read_text())
        path = _shard_path(staging, plan, shard)
        if side["entry"]["examples"]:
            entries.append(FileEntry(**side["entry"] | {"file": path.name}))
        else:
            path.unlink(missing_ok=True)
        names += side["users"]
        counts += side["counts"]
        digests += side["digests"]
        dropped += side["dropped"]
    if not names:
        shutil.rmtree(staging)
        raise none_usable(plan.schema)
    try:
        users = pa.table({"user": pa.array(names, pa.large_string()), "examples": counts})
        with pa.ipc.new_file(os.fspath(staging / USERS), users.schema) as writer:
            writer.write_table(users)
        index = FileEntry.of(staging / USERS)
        manifest = Manifest(
            plan.schema,
            plan.shard_format,
            len(names),
            sum(counts),
            combine_digests(plan.schema, map(bytes.fromhex, digests)),
            tuple(entries),
            index,
            of_sets or any(SEPARATOR in name for name in names),
            {
                "sources": sources,
                "max_examples_per_user": plan.max_examples_per_user,
                "dropped_rows": dropped,
            },
        )
        manifest.write(staging)
        keep = {e.file for e in (*entries, index)} | {"manifest.json"}
        for path in staging.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in keep:
                path.unlink()
        staging.rename(out)
    except OSError as error:
        raise disk_error(staging, error) from error
    return ShardStore(out)


def write_store(store: Store, out: str | os.PathLike[str], format: str = "arrow") -> ShardStore:
    """Writes a store that is already grouped (in memory, or a view) to disk, in bounded memory.

    Raises:
      BadInputError: if ``out`` exists or cannot be written.
    """
    size = store.num_examples * store.schema.record_dtype.itemsize
    plan = BuildPlan(store.schema, format, default_num_shards(size), tokenizer=None)
    sources = {"fingerprint": store.fingerprint, "unit_key": unit_key_of(store)}
    staging = prepare(pathlib.Path(out), plan, sources)
    users = enumerate(store.user_ids(range(store.num_users)))
    upcoming = next(users, None)
    for shard in range(plan.num_shards):

        def members(shard: int = shard) -> Iterator[tuple[str, list[bytes]]]:
            nonlocal upcoming
            while upcoming is not None and plan.partition(upcoming[1]) == shard:
                u, name = upcoming
                positions = np.arange(store.user_offsets[u], store.user_offsets[u + 1])
                yield name, [store.records(positions).tobytes()]
                upcoming = next(users, None)

        encode_partition(members(), staging, plan, shard)
    of_sets = getattr(store, "of_sets", False)
    return finish(staging, pathlib.Path(out), plan, sources, of_sets)
