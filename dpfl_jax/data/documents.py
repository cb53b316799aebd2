"""Reading (user, text) documents from JSONL, Parquet, CSV and folders, with errors that say where.

Each reader streams ``Document`` tuples in file order; a user's documents keep that order. Nothing
is guessed: a null user, a missing column or bytes that are not UTF-8 stop the reading.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from dpfl_jax.data.store import check_user_id
from dpfl_jax.errors import BadInputError

Document = tuple[str, str]

FORMATS = ("jsonl", "parquet", "csv", "folder")


def expand_paths(path: str | os.PathLike[str] | Sequence[str] | None) -> list[pathlib.Path]:
    """Returns the files that a path, a list of paths or glob patterns name, sorted per pattern.

    Raises:
      BadInputError: if a path is missing or a pattern matches nothing.
    """
    if path is None or path == () or path == "":
        raise BadInputError("no data files are given: set data.path (or --input) to them")
    patterns = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    found: list[pathlib.Path] = []
    for given in patterns:
        pattern = os.fspath(given)
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
        if not matches:
            raise BadInputError(f"the data file {pattern} does not exist")
        found.extend(map(pathlib.Path, matches))
    return found


def guess_format(path: pathlib.Path) -> str:
    """Returns the format that a file's name tells.

    Raises:
      BadInputError: if the name tells none.
    """
    if path.is_dir():
        return "folder"
    name = path.name.removesuffix(".gz")
    for suffix, kind in (
        (".jsonl", "jsonl"),
        (".ndjson", "jsonl"),
        (".json", "jsonl"),
        (".parquet", "parquet"),
        (".csv", "csv"),
    ):
        if name.endswith(suffix):
            return kind
    raise BadInputError(
        f"cannot tell the format of {path} from its name: give it ({', '.join(FORMATS)})"
    )


def read_documents(
    paths: Iterable[pathlib.Path],
    format: str | None = None,
    user_column: str = "user",
    text_column: str = "text",
) -> Iterator[Document]:
    """Streams the documents of files one after another.

    Args:
      paths: files (``expand_paths``).
      format: one of ``FORMATS``, or None to tell by each file's name.
      user_column: key or column of the user id; numbers become their decimal text.
      text_column: key or column of the text; a null text is an error.

    Raises:
      BadInputError: naming the file and the line or row.
    """
    for path in paths:
        kind = format or guess_format(path)
        if kind == "folder":
            yield from read_folder(path)
        elif kind == "jsonl":
            yield from read_jsonl(path, user_column, text_column)
        elif kind == "parquet":
            yield from read_parquet(path, user_column, text_column)
        elif kind == "csv":
            yield from read_csv(path, user_column, text_column)
        else:
            raise BadInputError(f"unknown data format {kind!r}: use one of {', '.join(FORMATS)}")


def open_binary(path: pathlib.Path) -> IO[bytes]:
    """Opens a file, through gzip if its name ends in ``.gz``.

    Raises:
      BadInputError: if it cannot be opened or is empty.
    """
    try:
        if path.stat().st_size == 0:
            raise BadInputError(f"the data file {path} is empty")
        return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")  # type: ignore[return-value]
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror or error}") from error


def user_to_id(value: Any, where: str) -> str:
    """Turns a JSON or table value into a user id; null, NaN, booleans and lists are errors."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return check_user_id(value, where)


def read_jsonl(
    path: pathlib.Path, user_column: str = "user", text_column: str = "text"
) -> Iterator[Document]:
    """Streams the documents of one JSON-lines file (gzip too); blank lines are skipped."""
    number = 0
    with open_binary(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise BadInputError(f"{where}: the text is not UTF-8 ({error.reason})") from error
            except json.JSONDecodeError as error:
                raise BadInputError(f"{where}: not a JSON object ({error.msg})") from error
            if not isinstance(row, dict):
                raise BadInputError(f"{where}: not a JSON object but {type(row).__name__}")
            for column in (user_column, text_column):
                if column not in row:
                    raise BadInputError(
                        f"{where}: there is no column {column!r}; the columns are {sorted(row)}"
                    )
            user = user_to_id(row[user_column], where)
            text = row[text_column]
            if not isinstance(text, str):
                raise BadInputError(f"{where}: the text in {text_column!r} is {text!r}, not text")
            try:
                text.encode()
                user.encode()
            except UnicodeEncodeError as error:  # an escaped lone surrogate
                raise BadInputError(f"{where}: the text is not UTF-8 ({error.reason})") from error
            yield user, text
    if number == 0:
        raise BadInputError(f"the data file {path} is empty")


def _table_rows(
    batches: Iterable[pa.RecordBatch], path: pathlib.Path, user_column: str, text_column: str
) -> Iterator[Document]:
    row = 0
    for batch in batches:
        for user, text in zip(
            batch.column(user_column).to_pylist(), batch.column(text_column).to_pylist()
        ):
            row += 1
            where = f"{path}, row {row}"
            if not isinstance(text, str):
                raise BadInputError(f"{where}: the text in {text_column!r} is {text!r}, not text")
            yield user_to_id(user, where), text
    if row == 0:
        raise BadInputError(f"the data file {path} is empty")


def _check_columns(names: Sequence[str], columns: Sequence[str], path: pathlib.Path) -> None:
    for column in columns:
        if column not in names:
            raise BadInputError(f"{path}: there is no column {column!r}; the columns are {names}")


def read_parquet(
    path: pathlib.Path, user_column: str = "user", text_column: str = "text"
) -> Iterator[Document]:
    """Streams the documents of one Parquet file."""
    open_binary(path).close()
    try:
        with pa.parquet.ParquetFile(path) as file:
            _check_columns(file.schema_arrow.names, (user_column, text_column), path)
            batches = file.iter_batches(1024, columns=[user_column, text_column])
            yield from _table_rows(batches, path, user_column, text_column)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OSError) as error:
        raise BadInputError(f"{path}: not a readable Parquet file ({error})") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: the text is not UTF-8 ({error.reason})") from error


def read_csv(
    path: pathlib.Path, user_column: str = "user", text_column: str = "text"
) -> Iterator[Document]:
    """Streams the documents of one CSV file with a header line (gzip too; quoted newlines)."""
    with open_binary(path) as binary:
        header = binary.readline().decode(errors="replace")
    if not header.strip():
        raise BadInputError(f"{path}: the first line must name the columns, but it is blank")
    names = pa.csv.read_csv(io.BytesIO(header.encode()), _csv_options()).column_names
    _check_columns(names, (user_column, text_column), path)
    convert = pa.csv.ConvertOptions(
        include_columns=[user_column, text_column],
        column_types={user_column: pa.string(), text_column: pa.string()},
        # An empty cell is a missing user; nothing else is read as null.
        null_values=[],
        strings_can_be_null=False,
    )
    parse = pa.csv.ParseOptions(newlines_in_values=True)
    try:
        with open_binary(path) as binary:
            reader = pa.csv.open_csv(binary, _csv_options(), parse, convert)
            yield from _table_rows(reader, path, user_column, text_column)
    except pa.ArrowInvalid as error:
        kind = "the text is not UTF-8" if "UTF8" in str(error) else "not a readable CSV file"
        raise BadInputError(f"{path}: {kind} ({error})") from error


def _csv_options() -> pa.csv.ReadOptions:
    return pa.csv.ReadOptions(use_threads=False)


def read_folder(root: pathlib.Path) -> Iterator[Document]:
    """Streams the text files of a folder; a user is a first-level file or first-level folder.

    Hidden files are skipped. Every other file must be UTF-8 text.
    """
    some = False
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        parts = path.relative_to(root).parts
        if any(part.startswith(".") for part in parts):
            continue
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise BadInputError(f"{path}: the text is not UTF-8 ({error.reason})") from error
        except OSError as error:
            raise BadInputError(f"cannot read {path}: {error.strerror or error}") from error
        some = True
        yield parts[0], text
    if not some:
        raise BadInputError(
            f"the folder {root} holds no files: each file or folder in it is a user"
        )
