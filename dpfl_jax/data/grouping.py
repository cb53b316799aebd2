"""Grouping rows by user on one machine: DuckDB sorts them, within a stated memory."""

from __future__ import annotations

import itertools
import operator
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import duckdb
import pyarrow as pa

from dpfl_jax.data.build_plan import BuildPlan, Progress, Row, disk_error, write_text
from dpfl_jax.data.store import user_order_key
from dpfl_jax.errors import BadInputError

MEMORY = 384  # MiB that DuckDB may take; what does not fit goes to the staging folder
_ROWS = pa.schema(
    [("key", pa.uint64()), ("user", pa.binary()), ("seq", pa.int64()), ("data", pa.binary())]
)
_BATCH_BYTES, _BATCH_ROWS = 2**22, 2**13


def group_rows(
    rows: Iterable[Row], staging: pathlib.Path, progress: Progress | None = None
) -> None:
    """Phase 1: sorts all rows by user and sequence number, into a table of the staging folder.

    Raises:
      BadInputError: if a row is bad (the staging folder is removed: nothing of it can be used), or
        if the disk is full (it is kept).
    """
    count, stopped = 0, None

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal count, stopped
        try:
            for part in _parts(rows):
                yield part
                count += part.num_rows
                if progress is not None:
                    progress("reading", count, 0)
        except BaseException as error:  # which DuckDB would tell as one of its own
            stopped = error
            raise

    done = staging / "grouped"
    if done.exists():
        return
    database = staging / "rows.duckdb"
    for stale in staging.glob(database.name + "*"):
        stale.unlink()
    try:
        with _connect(database) as connection:
            connection.register("incoming", pa.RecordBatchReader.from_batches(_ROWS, batches()))
            connection.execute(
                'CREATE TABLE "rows" AS SELECT * FROM incoming ORDER BY key, "user", seq'
            )
        if not count:
            raise BadInputError("the data hold no users: there is not one row")
        write_text(done, str(count))
    except BadInputError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    except (duckdb.Error, OSError) as error:
        if isinstance(stopped, BadInputError):
            shutil.rmtree(staging, ignore_errors=True)
        if stopped is not None:
            raise stopped from None
        raise disk_error(staging, error) from error
    if progress is not None:
        progress("reading", count, count)


def _parts(rows: Iterable[Row]) -> Iterator[pa.RecordBatch]:
    waiting: list[tuple[int, bytes, int, bytes]] = []
    size = 0

    def batch() -> pa.RecordBatch:
        columns = zip(*waiting, strict=True)
        return pa.record_batch(list(map(pa.array, columns, _ROWS.types)), schema=_ROWS)

    for user, seq, data in rows:
        key, _ = user_order_key(user)
        waiting.append((int.from_bytes(key, "big"), user.encode(), seq, data))
        size += len(data)
        if size > _BATCH_BYTES or len(waiting) == _BATCH_ROWS:
            yield batch()
            waiting, size = [], 0
    if waiting:
        yield batch()


def grouped_users(
    staging: pathlib.Path, plan: BuildPlan, shard: int, workers: int = 1
) -> Iterator[tuple[str, list[bytes]]]:
    """Yields each user of a partition with its data, in store order."""
    low, high = plan.keys(shard)
    with _connect(staging / "rows.duckdb", workers) as connection:
        found = connection.sql(
            f'SELECT "user", data FROM "rows" WHERE key BETWEEN {low}::UBIGINT AND '
            f'{high}::UBIGINT ORDER BY key, "user", seq'
        ).to_arrow_reader(_BATCH_ROWS)
        yield from by_user(
            (user.decode(), data)
            for batch in found
            for user, data in zip(*(column.to_pylist() for column in batch.columns))
        )


def by_user(rows: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, list[bytes]]]:
    """Yields (user, list of data) of sorted rows."""
    for user, mine in itertools.groupby(rows, operator.itemgetter(0)):
        yield user, [data for _, data in mine]


def _connect(path: pathlib.Path, workers: int = 0) -> duckdb.DuckDBPyConnection:
    """Opens the table of a build: no other file is read, and no extension loaded.

    ``workers``: how many processes read it at once; 0: this one writes it.
    """
    settings: dict[str, Any] = {
        "memory_limit": f"{max(128, MEMORY // max(1, workers))}MiB",
        "threads": 1 if workers else min(4, os.cpu_count() or 1),
        "temp_directory": f"{path}.{os.getpid()}.sorting",
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    connection = duckdb.connect(os.fspath(path), read_only=workers > 0, config=settings)
    connection.execute("SET enable_external_access = false; SET lock_configuration = true")
    return connection
