"""Files of records: ArrayRecord, and ragged files for memory mapping.

A record is one item of a structured NumPy type (``Schema.record_dtype``). Files hold each item
without its trailing zero bytes (padding costs nothing), which the reader puts back. A ragged file
is the items one behind the other, as many zero bytes as a whole item has, then where each item
ends (uint32, or uint64 beyond 4 GiB), and the bytes of all items and of such an end, two int64.
"""

from __future__ import annotations

import os
import pathlib
import uuid
from typing import Any, Protocol

import numpy as np

from dpfl_jax.errors import BadInputError

FORMATS = {"arrayrecord": ".array_record", "ragged": ".ragged"}
READABLE = (*FORMATS, "flat")  # items of full width, as were once written

# Eight records are compressed together: a third of the size of single ones for text, and the
# reader's index stays at a few bits an example; a random read costs about the same.
ARRAY_RECORD_OPTIONS = "group_size:8,zstd:1"


class RecordReader(Protocol):
    """Random access to the records of one file."""

    def read(self, positions: np.ndarray) -> np.ndarray:
        """Returns the records at ``positions``."""


def write_records(path: pathlib.Path, format: str, blocks: Any) -> int:
    """Writes blocks of records to a new file, durably.

    Args:
      path: the file; replaced if there.
      format: a key of ``FORMATS``.
      blocks: iterable of structured arrays.

    Returns:
      The number of records.

    Raises:
      BadInputError: if the disk is full or the file cannot be written.
    """
    # A name of its own: two workers may try the same shard.
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    write = _write_array_record if format == "arrayrecord" else write_ragged
    try:
        count = write(partial, blocks)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(path)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise BadInputError(
            f"cannot write {path} ({reason}): free space, then run the same command again; it goes "
            "on with the first shard that is not finished"
        ) from error
    return count


def write_ragged(path: pathlib.Path, blocks: Any) -> int:
    """Writes a shard of records of any length; returns how many."""
    sizes, width = [np.zeros(0, np.int64)], 0  # of no records: no bytes behind them, either
    with path.open("wb") as file:
        for block in blocks:
            items = np.ascontiguousarray(block).view(np.uint8).reshape(len(block), -1)
            width = items.shape[1]
            real = items != 0
            size = np.where(real.any(1), width - real[:, ::-1].argmax(1), 0)
            file.write(items[np.arange(width) < size[:, None]].data)
            sizes.append(size)
        ends = np.cumsum(np.concatenate(sizes))
        total = int(ends[-1]) if len(ends) else 0
        ends = ends.astype("<u4" if total < 2**32 else "<u8")
        file.write(bytes(width if len(ends) else 0) + ends.tobytes())
        file.write(np.array([total, ends.itemsize], "<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())
    return len(ends)


def _write_array_record(path: pathlib.Path, blocks: Any) -> int:
    from array_record.python import array_record_module

    writer = array_record_module.ArrayRecordWriter(os.fspath(path), ARRAY_RECORD_OPTIONS)
    count = 0
    try:
        for block in blocks:
            items = np.ascontiguousarray(block).view(np.uint8).reshape(len(block), -1)
            width = items.shape[1]
            data = items.tobytes()
            for begin in range(0, len(data), width):
                # At least one byte: an empty record could not be told from a missing one.
                writer.write(data[begin : begin + width].rstrip(b"\0") or b"\0")
            count += len(block)
        healthy = writer.ok()
    finally:
        writer.close()
    if not healthy:
        raise RuntimeError("the ArrayRecord writer failed")
    # The C++ writer reports some failures only in the log: count what can be read back.
    reader = array_record_module.ArrayRecordReader(os.fspath(path), _READER_OPTIONS)
    try:
        if reader.num_records() != count:
            raise RuntimeError(f"{reader.num_records()} of {count} records arrived on disk")
    finally:
        reader.close()
    return count


_READER_OPTIONS = "index_storage_option:in_memory"


def open_records(path: pathlib.Path, format: str, dtype: np.dtype[Any], count: int) -> RecordReader:
    """Opens one file of records.

    Raises:
      BadInputError: naming the file, if it cannot be read or does not hold ``count`` records.
    """
    try:
        if format == "arrayrecord":
            return _ArrayRecordReader(path, dtype, count)
        return (_RaggedReader if format == "ragged" else _FlatReader)(path, dtype, count)
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, BadInputError):
            raise
        reason = str(error).splitlines()[0]
        raise BadInputError(f"{path} is damaged ({reason}): build the store again") from error


class _RaggedReader:
    def __init__(self, path: pathlib.Path, dtype: np.dtype[Any], count: int):
        self._path, self._dtype, width = path, dtype, dtype.itemsize
        whole = np.memmap(path, np.uint8, mode="r")
        total, entry = (int(x) for x in whole[-16:].view("<i8"))
        index = len(whole) - 16 - entry * count
        if entry not in (4, 8) or total < 0 or index != total + (width if count else 0):
            raise ValueError(f"its index is not that of {count} records")
        self._ends = np.frombuffer(whole, f"<u{entry}", count, index)
        # A full width from every byte on: what comes after an item's end is taken away.
        self._from = np.lib.stride_tricks.as_strided(
            whole, (total + 1 if count else 0, width), (1, 1)
        )

    def read(self, positions: np.ndarray) -> np.ndarray:
        ends = self._ends[positions].astype(np.int64)
        starts = np.where(positions > 0, self._ends[positions - 1], 0).astype(np.int64)
        sizes, width = ends - starts, self._dtype.itemsize
        if ((sizes < 0) | (sizes > width) | (ends >= len(self._from))).any():
            raise BadInputError(f"{self._path} is damaged (its index): build the store again")
        rows = self._from[starts]
        narrow = np.uint16 if width < 2**16 else np.uint32  # compared several to an instruction
        rows *= np.arange(width, dtype=narrow) < sizes.astype(narrow)[:, None]
        return rows.view(self._dtype).reshape(len(positions))


class _FlatReader:
    def __init__(self, path: pathlib.Path, dtype: np.dtype[Any], count: int):
        self._dtype = dtype
        self._rows = np.memmap(path, np.uint8, mode="r").reshape(-1, dtype.itemsize)
        if len(self._rows) != count:
            raise ValueError(f"{len(self._rows)} records, expected {count}")

    def read(self, positions: np.ndarray) -> np.ndarray:
        # Rows of bytes: `take` copies them several times faster than structured items.
        rows = np.take(self._rows, positions, axis=0)
        return rows.view(self._dtype).reshape(len(positions))


class _ArrayRecordReader:
    def __init__(self, path: pathlib.Path, dtype: np.dtype[Any], count: int):
        from array_record.python import array_record_module

        self._path = path
        self._dtype = dtype
        self._reader = array_record_module.ArrayRecordReader(os.fspath(path), _READER_OPTIONS)
        if self._reader.num_records() != count:
            raise ValueError(f"{self._reader.num_records()} records, expected {count}")

    def read(self, positions: np.ndarray) -> np.ndarray:
        width = self._dtype.itemsize
        try:
            items = self._reader.read(positions.tolist()) if len(positions) else []
        except (RuntimeError, ValueError, IndexError) as error:
            reason = str(error).splitlines()[0]
            raise BadInputError(
                f"{self._path} is damaged ({reason}): build the store again"
            ) from error
        data = b"".join([item.ljust(width, b"\0") for item in items])
        if len(data) != width * len(positions):
            raise BadInputError(f"{self._path} is damaged (a record is too long): build it again")
        return np.frombuffer(data, self._dtype)
