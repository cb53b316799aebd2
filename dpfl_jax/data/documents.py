"""Reading (user, text) documents from files and folders, with errors that say where.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet

from dpfl_jax.data.keys import UserKey
from dpfl_jax.errors import BadInputError

Document = tuple[str, str]

FORMATS = ("jsonl", "parquet", "csv", "folder", "huggingface")


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
      user_column: column of the user id, or a key expression (see ``keys``); integers become their
        decimal text.
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
        elif kind == "huggingface":
            yield from read_huggingface(path, user_column, text_column)
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


def read_jsonl(
    path: pathlib.Path, user_column: str = "user", text_column: str = "text"
) -> Iterator[Document]:
    """Streams the documents of one JSON-lines file (gzip too); blank lines are skipped."""
    number, key = 0, UserKey(user_column)
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
            user, text = key(row, where), text_of(row, text_column, where)
            try:
                text.encode()
                user.encode()
            except UnicodeEncodeError as error:  # an escaped lone surrogate
                raise BadInputError(f"{where}: the text is not UTF-8 ({error.reason})") from error
            yield user, text
    if number == 0:
        raise BadInputError(f"the data file {path} is empty")


def text_of(row: Mapping[str, Any], column: str, where: str) -> str:
    """Returns the text of a row (bytes are decoded).

    Raises:
      BadInputError: naming ``where``, if the column is missing, null, not text or not UTF-8.
    """
    if column not in row:
        raise BadInputError(
            f"{where}: there is no column {column!r}; the columns are {sorted(row)}"
        )
    text = row[column]
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise BadInputError(f"{where}: the text is not UTF-8 ({error.reason})") from error
    if not isinstance(text, str):
        raise BadInputError(f"{where}: the text in {column!r} is {text!r}, not text")
    return text


def _columns(
    names: Sequence[str], key: UserKey, text_column: str, path: pathlib.Path
) -> list[str] | None:
    """Returns the columns to read (None: all), after checking that they are there."""
    for column in [*(key.columns or ()), text_column]:
        if column not in names:
            raise BadInputError(f"{path}: there is no column {column!r}; the columns are {names}")
    return None if key.columns is None else list(dict.fromkeys([*key.columns, text_column]))


def _table_rows(
    batches: Iterable[pa.RecordBatch], path: pathlib.Path, key: UserKey, text_column: str
) -> Iterator[Document]:
    number = 0
    for batch in batches:
        # Invalid UTF-8 would surface only when a value is used: check whole columns first.
        try:
            batch.validate(full=True)
            rows = batch.to_pylist()
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            kind = "the text is not UTF-8" if "UTF" in str(error).upper() else "damaged"
            last = number + batch.num_rows
            raise BadInputError(f"{path}, rows {number + 1} to {last}: {kind} ({error})") from error
        for row in rows:
            number += 1
            where = f"{path}, row {number}"
            yield key(row, where), text_of(row, text_column, where)
    if number == 0:
        raise BadInputError(f"the data file {path} is empty")


def read_parquet(
    path: pathlib.Path, user_column: str = "user", text_column: str = "text"
) -> Iterator[Document]:
    """Streams the documents of one Parquet file."""
    open_binary(path).close()
    key = UserKey(user_column)
    try:
        with pa.parquet.ParquetFile(path) as file:
            columns = _columns(file.schema_arrow.names, key, text_column, path)
            batches = file.iter_batches(1024, columns=columns)
            yield from _table_rows(batches, path, key, text_column)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OSError) as error:
        raise BadInputError(f"{path}: not a readable Parquet file ({error})") from error


def read_huggingface(
    path: pathlib.Path, user_column: str = "user", text_column: str = "text"
) -> Iterator[Document]:
    """Streams a Hugging Face data set on disk: one split's folder of Arrow or Parquet files.

    Both what ``Dataset.save_to_disk`` writes (``state.json`` gives the order of files) and a folder
    of Parquet or Arrow files are read, without the ``datasets`` library.
    """
    files = [path]
    if path.is_dir():
        state = path / "state.json"
        if state.is_file():
            names = json.loads(state.read_text())["_data_files"]
            files = [path / entry["filename"] for entry in names]
        else:
            files = sorted((*path.glob("*.arrow"), *path.glob("*.parquet")))
        if not files:
            raise BadInputError(
                f"{path} holds no .arrow or .parquet files: give the folder of one split"
            )
    key = UserKey(user_column)
    for file in files:
        if file.suffix == ".parquet":
            yield from read_parquet(file, user_column, text_column)
            continue
        open_binary(file).close()
        try:
            with pa.memory_map(str(file)) as source:
                try:
                    reader = pa.ipc.open_stream(source)
                    batches: Iterable[pa.RecordBatch] = reader
                except pa.ArrowInvalid:
                    reader = pa.ipc.open_file(source)
                    batches = map(reader.get_batch, range(reader.num_record_batches))
                _columns(reader.schema.names, key, text_column, file)
                yield from _table_rows(batches, file, key, text_column)
        except (pa.ArrowInvalid, OSError) as error:
            raise BadInputError(f"{file}: not a readable Arrow file ({error})") from error


def read_csv(
    path: pathlib.Path, user_column: str = "user", text_column: str = "text"
) -> Iterator[Document]:
    """Streams the documents of one CSV file with a header line (gzip too; quoted newlines)."""
    with open_binary(path) as binary:
        header = binary.readline().decode(errors="replace")
    if not header.strip():
        raise BadInputError(f"{path}: the first line must name the columns, but it is blank")
    names = pa.csv.read_csv(io.BytesIO(header.encode()), _csv_options()).column_names
    key = UserKey(user_column)
    columns = _columns(names, key, text_column, path) or names
    convert = pa.csv.ConvertOptions(
        include_columns=columns,
        column_types={name: pa.string() for name in columns},
        # An empty cell is a missing user; nothing else is read as null.
        null_values=[],
        strings_can_be_null=False,
    )
    parse = pa.csv.ParseOptions(newlines_in_values=True)
    try:
        with open_binary(path) as binary:
            reader = pa.csv.open_csv(binary, _csv_options(), parse, convert)
            yield from _table_rows(reader, path, key, text_column)
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
