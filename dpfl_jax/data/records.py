"""Files of records: Arrow, memory-mapped for random access, and ArrayRecord, compressed.

A record is one item of a structured NumPy type (``Schema.record_dtype``). In an Arrow file each
field is a column: tokens are a list of the real ones, other arrays are numbers or lists of fixed
size. All record batches of a file but the last have the same number of rows, so that a record is
located by division and read without Arrow's objects. In an ArrayRecord file a record is the bytes
of the item without trailing zeros.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from dpfl_jax.data.cached import CachedFile
from dpfl_jax.data.schema import Schema
from dpfl_jax.errors import BadInputError

STORE_FORMATS = {"arrow": ".arrow", "arrayrecord": ".array_record"}
_BATCH_BYTES = 2**24  # size of a batch of records at full width

# Eight records are compressed together: a third of the size of single ones for text, and the
# reader's index stays at a few bits an example; a random read costs about the same.
ARRAY_RECORD_OPTIONS = "group_size:8,zstd:1"


class RecordReader(Protocol):
    """Random access to the records of one file."""

    def read(self, positions: np.ndarray) -> np.ndarray:
        """Returns the records at ``positions``, int64 [n]."""


def disk_error(path: pathlib.Path, error: Exception) -> BadInputError:
    """Returns the error to raise when a build cannot write."""
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    return BadInputError(
        f"cannot write {path} ({reason}): free space, then run the same command "
        "again; it resumes where it stopped"
    )


def write_records(
    path: pathlib.Path, format: str, schema: Schema, blocks: Iterable[np.ndarray]
) -> int:
    """Writes blocks of records to a new file, durably; returns the number of records.

    Raises:
      BadInputError: the disk is full, or the file cannot be written.
    """
    # A unique name: two workers may write the same shard.
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    write = _write_array_record if format == "arrayrecord" else _write_arrow
    try:
        count = write(partial, schema, blocks)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(path)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        raise disk_error(path, error) from error
    return count


def open_records(path: pathlib.Path, format: str, schema: Schema, count: int) -> RecordReader:
    """Opens a file of records.

    Raises:
      BadInputError: naming the file, if it cannot be read or does not hold ``count`` records.
    """
    try:
        if format != "arrow":
            return _ArrayRecordReader(path, schema, count)
        mapped = pa.memory_map(os.fspath(path)).read_buffer()
        layout = _layout_of(mapped, schema, count)
        return _ArrowReader(path, schema, layout, np.frombuffer(mapped, np.uint8))
    except (OSError, ValueError, RuntimeError) as error:
        raise _damaged(path, str(error).splitlines()[0]) from error


def open_cached(file: CachedFile, schema: Schema, layout: Layout) -> RecordReader:
    """Opens an Arrow file in a bucket, of which only the blocks that hold a record are read.

    Raises:
      BadInputError: the layout is not that of such a file.
    """
    if len(file.bytes) < schema.record_dtype.itemsize:  # it is copied
        file.need(np.zeros(1, np.int64), len(file.bytes))
    try:
        return _ArrowReader(file.path, schema, layout, file.bytes, file.need)
    except (ValueError, LookupError) as error:
        raise _damaged(file.path, f"its layout: {error}") from error


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where an Arrow file has its values, so that a part of it can be read.

    Attributes:
      rows: number of rows of each record batch but the last.
      columns: for each column, three numbers of each record batch: the byte at which its values
        begin, the place of its lists' ends (in int32; none if its lists have a fixed size), and how
        many values it has.
    """

    rows: int
    columns: dict[str, tuple[list[int], list[int], list[int]]]


def layout_of(path: pathlib.Path, schema: Schema, count: int) -> Layout:
    """The layout of an Arrow file of ``count`` records."""
    return _layout_of(pa.memory_map(os.fspath(path)).read_buffer(), schema, count)


def _damaged(path: pathlib.Path, reason: str) -> BadInputError:
    return BadInputError(f"{path} is damaged ({reason}): build the store again")


def _write_arrow(path: pathlib.Path, schema: Schema, blocks: Iterable[np.ndarray]) -> int:
    count, rows = 0, max(1, _BATCH_BYTES // max(1, schema.record_dtype.itemsize))
    with (
        pa.OSFile(os.fspath(path), "wb") as file,
        pa.ipc.new_file(file, arrow_schema(schema)) as writer,
    ):
        for records in _rebatch(blocks, rows):
            writer.write_batch(to_arrow(records, schema))
            count += len(records)
    return count


def _rebatch(blocks: Iterable[np.ndarray], rows: int) -> Iterator[np.ndarray]:
    pending: list[np.ndarray] = []
    count = 0
    for block in blocks:
        pending.append(block)
        count += len(block)
        if count >= rows:
            merged = np.concatenate(pending)
            for start in range(0, count - rows + 1, rows):
                yield merged[start : start + rows]
            pending, count = [merged[count // rows * rows :]], count % rows
    if count:
        yield np.concatenate(pending)


def arrow_schema(schema: Schema) -> pa.Schema:
    """The columns of an Arrow file of records."""
    columns = {}
    for name in _columns(schema):
        dtype = schema.record_dtype[name]
        *shape, base = (*dtype.shape, dtype.base)
        if schema.kind == "arrays":
            base, more = _storage_type(base)
            shape += more
        else:
            shape[-1] = -1  # of any length
        column = pa.from_numpy_dtype(base)
        for size in reversed(shape):
            column = pa.list_(column, size)
        columns[name] = column
    return pa.schema(columns)


def _columns(schema: Schema) -> list[str]:
    """Names of the columns; the length of a text is the length of its list."""
    names = schema.record_dtype.names or ()
    return list(names[1:] if schema.kind == "tokens" else names)


def _storage_type(base: np.dtype[Any]) -> tuple[np.dtype[Any], list[int]]:
    """The type in which Arrow stores one that it lacks: integers of its size, or bytes."""
    size = base.itemsize
    if base.kind in "iuf" and base.type.__module__ == "numpy" and size <= 8:
        return base, []
    return (np.dtype(f"<u{size}"), []) if size in (1, 2, 4, 8) else (np.dtype("u1"), [size])


def to_arrow(records: np.ndarray, schema: Schema) -> pa.RecordBatch:
    """Turns records into an Arrow record batch."""
    columns, arrow = [], arrow_schema(schema)
    for name, kind in zip(arrow.names, arrow.types):
        values = records[name]
        if schema.kind == "arrays":
            flat = np.ascontiguousarray(values).reshape(-1)
            column = pa.array(flat.view(_storage_type(flat.dtype)[0]))
        else:
            rows = values.reshape(-1, values.shape[-1])
            if schema.kind == "tokens":
                sizes = records["length"].astype(np.int32)
            else:
                real = rows != 0
                sizes = np.where(real.any(1), rows.shape[1] - real[:, ::-1].argmax(1), 0)
            ends = np.cumsum(np.concatenate([[0], sizes]), dtype=np.int32)
            tokens = rows[np.arange(rows.shape[1]) < sizes[:, None]]
            column = pa.ListArray.from_arrays(ends, pa.array(tokens))
        columns.append(_nest(column, kind))
    return pa.RecordBatch.from_arrays(columns, schema=arrow)


def _nest(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type == kind:
        return column
    return pa.FixedSizeListArray.from_arrays(_nest(column, kind.value_type), kind.list_size)


def _layout_of(mapped: pa.Buffer, schema: Schema, count: int) -> Layout:
    """Raises ValueError if it is not such a file."""
    file = pa.ipc.open_file(mapped)
    if file.schema != arrow_schema(schema):
        raise ValueError("its columns are not those of its manifest")
    batches = [file.get_batch(i) for i in range(file.num_record_batches)]
    for batch in batches:
        batch.validate()
    sizes = [batch.num_rows for batch in batches]
    rows = sizes[0] if sizes else 1
    if sum(sizes) != count or any(size != rows for size in sizes[:-1]):
        raise ValueError(f"it holds {sum(sizes)} records, expected {count}")
    columns = {
        name: _places([batch.column(name) for batch in batches], mapped)
        for name in _columns(schema)
    }
    return Layout(rows, columns)


def _places(arrays: list[pa.Array], mapped: pa.Buffer) -> tuple[list[int], list[int], list[int]]:
    """Of a column; raises ValueError if a value is missing, or not in the file (compressed)."""
    values, ends, counts = [], [], []
    for array in arrays:
        lists = None
        while hasattr(array, "values"):
            if array.null_count:
                raise ValueError("a value is missing")
            lists = array if isinstance(array, pa.ListArray) else lists
            array = array.values
        if array.null_count:
            raise ValueError("a value is missing")
        values.append(_offset_in(array.buffers()[1], mapped))
        counts.append(len(array))
        if lists is not None:
            ends.append(_offset_in(lists.buffers()[1], mapped) // 4)
    return values, ends, counts


Need = Callable[[np.ndarray, np.ndarray | int], None]


class _ArrowReader:
    def __init__(
        self,
        path: pathlib.Path,
        schema: Schema,
        layout: Layout,
        raw: np.ndarray,
        need: Need = lambda begin, size: None,
    ):
        self._path, self._dtype, self._rows = path, schema.record_dtype, layout.rows
        self._is_text = schema.kind == "tokens"
        self._columns = {
            name: _Column(layout, name, raw, self._dtype[name], need) for name in _columns(schema)
        }

    def read(self, positions: np.ndarray) -> np.ndarray:
        batch, row = np.divmod(positions, self._rows)
        records = np.empty(len(positions), self._dtype)
        try:
            for name, column in self._columns.items():
                lengths = column.read(batch, row, records[name])
                if self._is_text:
                    records["length"] = lengths
        except ValueError as error:
            raise _damaged(self._path, str(error)) from error
        return records


class _Column:
    """A column of all record batches of a mapped file: the offsets of its values in the file."""

    def __init__(
        self, layout: Layout, name: str, raw: np.ndarray, dtype: np.dtype[Any], need: Need
    ):
        self._values, self._ends, self._counts = map(np.array, layout.columns[name])
        self._need = need
        self._ints = raw[: len(raw) // 4 * 4].view("<i4")
        # At every byte of the file, a view of as many bytes as the longest value has.
        self._lists = np.arange(math.prod(dtype.shape[:-1]) if len(self._ends) else 1)
        size = dtype.itemsize // len(self._lists)
        self._bytes = raw if len(raw) >= size else np.pad(raw, (0, size))
        self._last = len(self._bytes) - size
        self._from = np.lib.stride_tricks.as_strided(self._bytes, (self._last + 1, size), (1, 1))

    def read(self, batch: np.ndarray, row: np.ndarray, out: np.ndarray) -> np.ndarray | None:
        """Fills ``out`` [n, ...]; pads lists with zeros, and returns their lengths [n].

        Raises:
          ValueError: the lengths of lists lead out of the column.
        """
        item = out.dtype.itemsize
        if not len(self._ends):
            begin = self._values[batch] + self._from.shape[1] * row
            self._need(begin, self._from.shape[1])
            values = self._read_bytes(begin)
            out[...] = values.view(out.dtype).reshape(out.shape)
            return None
        at = (self._ends[batch] + len(self._lists) * row)[:, None] + self._lists
        self._need(4 * at[:, 0], 4 * (len(self._lists) + 1))
        start, stop = self._ints[at].astype(np.int64), self._ints[at + 1]
        lengths, width = stop - start, out.shape[-1]
        past = stop > self._counts[batch][:, None]
        if ((start < 0) | (lengths < 0) | (lengths > width) | past).any():
            raise ValueError("the lengths of its lists")
        begin = (self._values[batch][:, None] + item * start).reshape(-1)
        self._need(begin, item * lengths.reshape(-1))
        values = self._read_bytes(begin)
        # Zero what follows a list. (Narrow integers compare several to an instruction.)
        narrow = np.uint16 if width < 2**16 else np.uint32
        real = np.arange(width, dtype=narrow) < lengths.astype(narrow)[:, :, None]
        np.multiply(values.view(out.dtype).reshape(out.shape), real.reshape(out.shape), out=out)
        return lengths[:, 0]

    def _read_bytes(self, begin: np.ndarray) -> np.ndarray:
        values = self._from[np.minimum(begin, self._last)]
        for i in np.flatnonzero(begin > self._last):
            rest = self._bytes[begin[i] :]
            values[i, : len(rest)] = rest
        return values


def _offset_in(buffer: pa.Buffer | None, mapped: pa.Buffer) -> int:
    if buffer is None or not buffer.size:
        return 0
    offset = int(buffer.address - mapped.address)
    if not 0 <= offset <= mapped.size - buffer.size or offset % 8:
        raise ValueError("it is compressed")
    return offset


def _write_array_record(path: pathlib.Path, schema: Schema, blocks: Iterable[np.ndarray]) -> int:
    from array_record.python import array_record_module

    writer = array_record_module.ArrayRecordWriter(os.fspath(path), ARRAY_RECORD_OPTIONS)
    count, width = 0, schema.record_dtype.itemsize
    try:
        for block in blocks:
            data = np.ascontiguousarray(block).tobytes()
            for begin in range(0, len(data), width):
                # At least one byte: an empty record would look like a missing one.
                writer.write(data[begin : begin + width].rstrip(b"\0") or b"\0")
            count += len(block)
        healthy = writer.ok()
    finally:
        writer.close()
    if not healthy:
        raise RuntimeError("the ArrayRecord writer failed")
    # The C++ writer only logs some failures: count what can be read back.
    reader = array_record_module.ArrayRecordReader(os.fspath(path), _READER_OPTIONS)
    try:
        if reader.num_records() != count:
            raise RuntimeError(f"{reader.num_records()} of {count} records arrived on disk")
    finally:
        reader.close()
    return count


_READER_OPTIONS = "index_storage_option:in_memory"


class _ArrayRecordReader:
    # Not Grain's ArrayRecordDataSource: it takes twice the time for 256 random records (it starts
    # threads for every batch, and looks up each position in Python), logs an error for groups of
    # several records, and does not compare the number of records with the manifest.
    def __init__(self, path: pathlib.Path, schema: Schema, count: int):
        from array_record.python import array_record_module

        self._path = path
        self._dtype = schema.record_dtype
        self._reader = array_record_module.ArrayRecordReader(os.fspath(path), _READER_OPTIONS)
        if self._reader.num_records() != count:
            raise ValueError(f"{self._reader.num_records()} records, expected {count}")

    def read(self, positions: np.ndarray) -> np.ndarray:
        width = self._dtype.itemsize
        try:
            items = self._reader.read(positions.tolist()) if len(positions) else []
        except (RuntimeError, ValueError, IndexError) as error:
            raise _damaged(self._path, str(error).splitlines()[0]) from error
        data = b"".join([item.ljust(width, b"\0") for item in items])
        if len(data) != width * len(positions):
            raise _damaged(self._path, "a record is too long")
        return np.frombuffer(data, self._dtype)
