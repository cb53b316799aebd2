"""Reads rows of JSONL, Parquet, CSV, TSV, Arrow and Hugging Face files.

Each row comes as (where it is, its columns): every later error names the place.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import glob
import gzip
import io
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from csv import Error as CsvError
from csv import field_size_limit
from csv import reader as csv_reader
from typing import IO, Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from dpfl_jax.errors import BadInputError, repeated, unrepeated
from dpfl_jax.files import local_path

LocatedRow = tuple[str, dict[str, Any]]

field_size_limit(2**31 - 1)  # by default a text has at most 128 KiB
_BATCH_ROWS = 1024  # rows that are converted to Python objects at once
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".arrow": "arrow",
}


def guess_format(path: pathlib.Path) -> str:
    """Returns the format that a file's name implies (``"folder"`` for a folder).

    Raises:
      BadInputError: the name implies none.
    """
    if path.is_dir():
        return "folder"
    suffix = pathlib.Path(path.name.removesuffix(".gz")).suffix
    if suffix not in _SUFFIXES:
        known = ", ".join(sorted({*_SUFFIXES.values(), "folder", "huggingface"}))
        raise BadInputError(f"cannot tell the format of {path} from its name: give it ({known})")
    return _SUFFIXES[suffix]


def open_binary(path: pathlib.Path) -> IO[bytes]:
    """Opens a file, through gzip if its name ends in ``.gz``.

    Raises:
      BadInputError: it cannot be opened, or is empty.
    """
    try:
        if path.stat().st_size == 0:
            raise BadInputError(f"the data file {path} is empty")
        return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")  # type: ignore[return-value]
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror or error}") from error


def text_of(row: Mapping[str, Any], column: str, where: str) -> str:
    """Returns the text of a row (bytes are decoded).

    Raises:
      BadInputError: naming ``where``, if the column is missing, null, not text or not UTF-8.
    """
    if column not in row:
        raise no_column(where, column, sorted(row))
    text = row[column]
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise BadInputError(f"{where}: the text is not UTF-8 ({error.reason})") from error
    if not isinstance(text, str):
        raise BadInputError(f"{where}: {column!r} holds {type(text).__name__}, not text")
    return text


def is_number(text: str) -> bool:
    """Whether a text is one number and nothing else."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def no_column(where: str, column: str, names: Sequence[str]) -> BadInputError:
    """Returns the error for a missing column."""
    more = ""
    if column == "text":  # the default name: perhaps the file holds no text
        more = (
            ": name the text's as text_column (--text-column); of a table of numbers name the "
            "target as data.target_column (`dpfl train` reads it as it is, no store is needed)"
        )
    return BadInputError(f"{where}: there is no column {column!r}; the columns are {names}{more}")


class BadRows:
    """What to do with rows that cannot be used, each judged by itself.

    Attributes:
      drops: leave them out and count them; else they are errors.
      dropped: how many were left out.
    """

    def __init__(self, drop: bool = False) -> None:
        self.drops, self.dropped = drop, 0
        self._first: BadInputError | None = None

    def __call__(self, error: BadInputError) -> None:
        """Counts a bad row, or raises ``error``, which says what is wrong with it."""
        if not self.drops:
            raise error
        self._first = self._first or error
        self.dropped += 1

    def none_left(self, otherwise: str) -> BadInputError:
        """The error of data without a usable row."""
        if self._first is None:
            return BadInputError(otherwise)
        return BadInputError(f"no row can be used, {self.dropped} were left out: {self._first}")


@dataclasses.dataclass(frozen=True)
class CsvFormat:
    """How CSV and TSV files are written.

    Attributes:
      delimiter: between cells; default ``,`` (in TSV files a tab).
      encoding: Python's name of it; default UTF-8, or UTF-16 if the file begins with its mark.
    """

    delimiter: str | None = None
    encoding: str | None = None


PLAIN_CSV = CsvFormat()


def read_rows(
    path: pathlib.Path,
    format: str,
    columns: Sequence[str] | None = None,
    csv: CsvFormat = PLAIN_CSV,
    bad: BadRows | None = None,
) -> Iterator[LocatedRow]:
    """Streams the rows of one file.

    ``columns`` must exist, and only they are read from tables; None for all. ``bad`` takes lines
    that are not JSON objects: in other formats a damaged row damages the file, which is an error.

    Raises:
      BadInputError: naming the file and the line or row.
    """
    bad = bad or BadRows()
    readers: dict[str, Callable[..., Iterator[LocatedRow]]] = {
        "jsonl": functools.partial(_jsonl, bad=bad),
        "parquet": _parquet,
        "csv": functools.partial(_csv, format=csv),
        "tsv": functools.partial(_csv, format=csv, delimiter="\t"),
        "arrow": _arrow,
    }
    if format not in readers:
        raise BadInputError(f"unknown data format {format!r}: use one of {', '.join(readers)}")
    empty, dropped = True, bad.dropped
    try:
        for located in readers[format](path, columns):
            empty = False
            yield located
    except (pa.ArrowInvalid, pa.ArrowTypeError, OSError, EOFError) as error:
        kind = "the text is not UTF-8" if "UTF8" in str(error) else f"not a readable {format} file"
        raise BadInputError(f"{path}: {kind} ({error})") from error
    if empty and bad.dropped == dropped:
        raise BadInputError(f"the data file {path} is empty")


def _jsonl(path: pathlib.Path, columns: Sequence[str] | None, bad: BadRows) -> Iterator[LocatedRow]:
    with open_binary(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = _json_object(line.removeprefix(codecs.BOM_UTF8), where)
            except BadInputError as error:
                bad(error)
                continue
            yield where, row


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        text = line.decode()
        row = json.loads(text, object_pairs_hook=unrepeated)
        if "\\u" in text:  # an escaped lone surrogate is not text
            json.dumps(row, ensure_ascii=False).encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise BadInputError(f"{where}: the text is not UTF-8 ({error.reason})") from error
    except (ValueError, RecursionError) as error:  # also for a number with thousands of digits
        reason = getattr(
            error, "msg", "nested too deeply" if isinstance(error, RecursionError) else error
        )
        raise BadInputError(f"{where}: not a JSON object ({reason})") from error
    if not isinstance(row, dict):
        raise BadInputError(f"{where}: not a JSON object but {type(row).__name__}")
    return row


def _table(
    batches: Iterable[pa.RecordBatch], path: pathlib.Path, columns: Sequence[str] | None
) -> Iterator[LocatedRow]:
    number = 0
    for batch in batches:
        where = f"{path}, rows {number + 1} to {number + batch.num_rows}"
        # Arrow checks that text is UTF-8 only when asked to.
        try:
            chosen = batch if columns is None else batch.select(list(columns))
            chosen.validate(full=True)
            # Piece by piece: a batch of a few bytes may hold millions of nulls.
            for start in range(0, chosen.num_rows, _BATCH_ROWS):
                for row in chosen.slice(start, _BATCH_ROWS).to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            kind = "the text is not UTF-8" if "UTF" in str(error).upper() else "damaged"
            raise BadInputError(f"{where}: {kind} ({error})") from error


def _check_columns(names: Sequence[str], columns: Sequence[str] | None, path: pathlib.Path) -> None:
    twice = repeated(names)
    if twice is not None:
        raise BadInputError(f"{path}: two columns are called {twice!r}: rename one")
    for column in columns or ():
        if column not in names:
            raise no_column(str(path), column, names)


def _parquet(path: pathlib.Path, columns: Sequence[str] | None) -> Iterator[LocatedRow]:
    open_binary(path).close()
    with pa.parquet.ParquetFile(path) as file:
        _check_columns(file.schema_arrow.names, columns, path)
        yield from _table(file.iter_batches(_BATCH_ROWS, columns=columns), path, columns)


def _arrow(path: pathlib.Path, columns: Sequence[str] | None) -> Iterator[LocatedRow]:
    open_binary(path).close()
    with pa.memory_map(str(path)) as source:
        try:
            reader = pa.ipc.open_stream(source)
            batches: Iterable[pa.RecordBatch] = reader
        except pa.ArrowInvalid:
            reader = pa.ipc.open_file(source)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        _check_columns(reader.schema.names, columns, path)
        yield from _table(batches, path, columns)


def _csv(
    path: pathlib.Path, columns: Sequence[str] | None, format: CsvFormat, delimiter: str = ","
) -> Iterator[LocatedRow]:
    """Yields cells as text: ids keep their leading zeros, and an empty cell stays empty."""
    delimiter, encoding = format.delimiter or delimiter, format.encoding
    with open_binary(path) as binary:
        if encoding is None:
            encoding = "utf-16" if binary.read(2) in _UTF16 else "utf-8-sig"
            binary.seek(0)
        try:
            text = io.TextIOWrapper(binary, encoding, newline="")
        except LookupError:
            raise BadInputError(f"data.encoding={encoding} is not known: use utf-8, say") from None
        # Strict: a quotation that is never closed would turn all later rows into one text.
        lines = csv_reader(text, delimiter=delimiter, strict=True)
        try:
            names = next(lines, [])
            if names:  # a byte-order mark, in whatever encoding
                names[0] = names[0].removeprefix("\ufeff")
            if not any(name.strip() for name in names):
                raise BadInputError(
                    f"{path}: the first line must name the columns, but it is blank"
                )
            for sign, kind in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars"), (",", "commas")):
                if len(names) == 1 and sign in names[0] and sign != delimiter:
                    remedy = "data.source=tsv" if sign == "\t" else f"'data.delimiter=\"{sign}\"'"
                    remedy += f" (with `dpfl predict` and `dpfl data`: --delimiter '{sign}')"
                    raise BadInputError(f"{path}: cells seem to lie between {kind}: set {remedy}")
            _check_columns(names, columns, path)
            chosen = [(name, names.index(name)) for name in columns or names]
            rows = (cells for cells in lines if cells)  # skips blank lines
            for number, cells in enumerate(rows, start=1):
                if len(cells) != len(names):
                    raise BadInputError(
                        f"{path}, line {lines.line_num}: {len(cells)} cells, but there are "
                        f"{len(names)} columns"
                    )
                yield f"{path}, row {number}", {name: cells[at] for name, at in chosen}
        except CsvError as error:
            raise BadInputError(
                f"{path}: the row that ends in line {lines.line_num} cannot be read ({error}): is "
                "a quotation mark not closed?"
            ) from error
        except UnicodeError as error:
            wanted = "UTF-8" if encoding == "utf-8-sig" else encoding
            raise BadInputError(
                f"{path}, after line {lines.line_num}: the text is not {wanted} "
                f"({getattr(error, 'reason', error)}): set data.encoding, for example to cp1252 or "
                "latin-1 for files from Windows"
            ) from error


FORMATS = ("jsonl", "parquet", "csv", "tsv", "arrow", "folder", "huggingface")


def expand_paths(path: str | os.PathLike[str] | Sequence[str] | None) -> list[pathlib.Path]:
    """Returns the files that a path, a list of paths or glob patterns name, sorted per pattern.

    Raises:
      BadInputError: a path is missing or named twice, or a pattern matches nothing.
    """
    if path is None or path == () or path == "":
        raise BadInputError("no data files are given: set data.path (or --input) to them")
    patterns = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    files: list[pathlib.Path] = []
    for given in patterns:
        pattern = local_path(given, "dataset")
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
        if not matches:
            raise BadInputError(f"the data file {pattern} does not exist")
        files.extend(map(pathlib.Path, matches))
    twice = repeated(path.resolve() for path in files)
    if twice is not None:
        raise BadInputError(f"the data file {twice} is given twice: its people would count double")
    return files


def read_file_rows(
    paths: Iterable[pathlib.Path],
    format: str,
    columns: Sequence[str] | None = None,
    csv: CsvFormat = PLAIN_CSV,
    bad: BadRows | None = None,
) -> Iterator[LocatedRow]:
    """Streams the rows of files one after another; arguments as in ``read_rows``."""
    for path in paths:
        if format != "huggingface":
            yield from read_rows(path, format, columns, csv, bad)
            continue
        for file in huggingface_files(path):
            yield from read_rows(file, guess_format(file), columns)


def huggingface_files(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a Hugging Face data set on disk (one split), in order.

    Reads what ``Dataset.save_to_disk`` writes (``state.json`` gives the order) and folders of
    Parquet or Arrow files, without the ``datasets`` library.
    """
    if not path.is_dir():
        return [path]
    state = path / "state.json"
    if state.is_file():
        try:
            names = [entry["filename"] for entry in json.loads(state.read_text())["_data_files"]]
            if any(pathlib.Path(name).name != name for name in names):
                raise ValueError("it names a file outside its folder")
            return [path / name for name in names]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise BadInputError(f"{state}: not the state of a saved data set ({error})") from error
    files = sorted((*path.glob("*.arrow"), *path.glob("*.parquet")))
    if not files:
        raise BadInputError(
            f"{path} holds no .arrow or .parquet files: give the folder of one split"
        )
    return files
