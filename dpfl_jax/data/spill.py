"""Grouping rows by user out of core: spill files by hash range, then a sort of one at a time."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from dpfl_jax.data.build_plan import BuildPlan, Progress, Row, disk_error, write_text
from dpfl_jax.data.store import user_order_key
from dpfl_jax.errors import BadInputError

SPILL_SCHEMA = pa.schema(
    [("key", pa.binary(8)), ("user", pa.string()), ("seq", pa.int64()), ("data", pa.large_binary())]
)
_SPILL_BYTES = 2**19  # buffered per partition before it is written


class _Spill:
    """The open spill file of one partition and the rows not yet written to it."""

    def __init__(self, path: pathlib.Path):
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        self._file = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_stream(self._file, SPILL_SCHEMA, options=options)
        self._rows: list[tuple[bytes, str, int, bytes]] = []
        self._bytes = 0

    def add(self, row: tuple[bytes, str, int, bytes]) -> None:
        self._rows.append(row)
        self._bytes += len(row[3]) + 64
        if self._bytes > _SPILL_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            columns = [pa.array(c, t) for c, t in zip(zip(*self._rows), SPILL_SCHEMA.types)]
            self._writer.write_batch(pa.record_batch(columns, schema=SPILL_SCHEMA))
        self._rows, self._bytes = [], 0

    def close(self) -> None:
        self.flush()
        self._writer.close()
        self._file.close()


def spill_rows(
    rows: Iterable[Row], staging: pathlib.Path, plan: BuildPlan, progress: Progress | None = None
) -> None:
    """Phase 1: distributes rows over the partitions' spill files.

    Raises:
      BadInputError: if a row is bad (the staging folder is removed: nothing of it can be used), or
        if the disk is full (it is kept).
    """
    files: dict[int, _Spill] = {}
    count = 0
    for stale in staging.glob("*.spill"):
        stale.unlink()
    try:
        for user, seq, data in rows:
            shard = plan.partition(user)
            if shard not in files:
                files[shard] = _Spill(_spill_path(staging, plan, shard))
            files[shard].add((user_order_key(user)[0], user, seq, data))
            count += 1
            if progress is not None and count % 5000 == 0:
                progress("reading", count, 0)
        for file in files.values():
            file.close()
        if not count:
            raise BadInputError("the data hold no users: there is not one row")
        write_text(staging / "spilled", str(count))
    except BadInputError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    except OSError as error:
        raise disk_error(staging, error) from error
    if progress is not None:
        progress("reading", count, count)


def _spill_path(staging: pathlib.Path, plan: BuildPlan, shard: int) -> pathlib.Path:
    return staging / (plan.shard_stem(shard) + ".spill")


def spilled_users(staging: pathlib.Path, plan: BuildPlan, shard: int) -> Iterator[tuple[str, Any]]:
    """Yields each user of a partition with its data, in store order."""
    path = _spill_path(staging, plan, shard)
    if not path.exists():
        return
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_stream(source).read_all()
    table = table.sort_by([("key", "ascending"), ("user", "ascending"), ("seq", "ascending")])
    yield from group_sorted(table["user"], table["data"])


def group_sorted(users: Any, data: Any) -> Iterator[tuple[str, list[bytes]]]:
    """Yields (user, list of data) for runs of equal users in two Arrow columns."""
    codes = (
        users.combine_chunks().dictionary_encode() if hasattr(users, "combine_chunks") else users
    )
    indices = codes.indices.to_numpy(zero_copy_only=False)
    bounds = np.r_[0, np.flatnonzero(np.diff(indices)) + 1, len(indices)]
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
        if end > begin:
            yield (
                codes.dictionary[indices[begin]].as_py(),
                data.slice(begin, end - begin).to_pylist(),
            )
