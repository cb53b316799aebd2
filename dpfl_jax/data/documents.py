"""(user, text) documents from files and folders, in file order.

Nothing is guessed: a null user, a missing column or bytes that are not UTF-8 stop the reading.
"""

from __future__ import annotations

import glob
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence

from dpfl_jax.data.chats import Conversations
from dpfl_jax.data.keys import UserKey
from dpfl_jax.data.rows import (
    PLAIN_CSV,
    BadRows,
    CsvFormat,
    LocatedRow,
    guess_format,
    is_number,
    read_rows,
    text_of,
)
from dpfl_jax.errors import BadInputError, repeated
from dpfl_jax.files import within
from dpfl_jax.hub import local_path

Document = tuple[str, str]

FORMATS = ("jsonl", "parquet", "csv", "tsv", "arrow", "folder", "huggingface")


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
        pattern = local_path(given, "dataset")
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))
        if not matches:
            raise BadInputError(f"the data file {pattern} does not exist")
        found.extend(map(pathlib.Path, matches))
    twice = repeated(path.resolve() for path in found)
    if twice is not None:
        raise BadInputError(f"the data file {twice} is given twice: its people would count double")
    return found


def read_documents(
    paths: Iterable[pathlib.Path],
    format: str | None = None,
    user_column: str = "user",
    text_column: str = "text",
    csv: CsvFormat = PLAIN_CSV,
    bad: BadRows | None = None,
    conversations: Conversations | None = None,
) -> Iterator[Document]:
    """Streams the documents of files one after another.

    Args:
      paths: files (``expand_paths``).
      format: one of ``FORMATS``, or None to tell by each file's name.
      user_column: column of the user id, or a key expression (see ``keys``); integers become their
        decimal text.
      text_column: column of the text.
      csv: how CSV files are written.
      bad: told of rows without a user or a text; default: they are errors.
      conversations: what is read in the place of a text, as its documents.

    Raises:
      BadInputError: naming the file and the line or row; or all texts of CSV files are numbers.
    """
    key, bad, some, words = UserKey(user_column), bad or BadRows(), False, False
    held = [text_column] if conversations is None else conversations.columns
    columns = None if key.columns is None else list(dict.fromkeys([*key.columns, *held]))
    for path in paths:
        kind = format or guess_format(path)
        if kind not in FORMATS:
            raise BadInputError(f"unknown data format {kind!r}: use one of {', '.join(FORMATS)}")
        if kind == "folder":
            if conversations is not None:
                raise BadInputError(f"the folder {path} holds texts, which have no columns")
            yield from read_folder(path)
            continue
        for where, row in read_file_rows([path], kind, columns, csv, bad):
            try:
                user = key(row, where)
                if conversations is not None:
                    document = user, conversations.document(row, where)
                else:
                    document = user, text_of(row, text_column, where)
            except BadInputError as error:
                bad(error)
                continue
            # Cells of CSV files are text, also where they are meant as numbers.
            some, words = True, words or kind not in ("csv", "tsv") or not is_number(document[1])
            yield document
    if bad.dropped and not some:
        raise bad.none_left("the data are empty")
    if some and not words:
        raise BadInputError(
            f"every text in the column {text_column!r} is a number: set data.text_column to the "
            "texts, or data.target_column to predict numbers"
        )


def read_file_rows(
    paths: Iterable[pathlib.Path],
    format: str,
    columns: Sequence[str] | None = None,
    csv: CsvFormat = PLAIN_CSV,
    bad: BadRows | None = None,
) -> Iterator[LocatedRow]:
    """Streams the rows of files one after another, with where each is; see ``rows.read_rows``."""
    for path in paths:
        if format != "huggingface":
            yield from read_rows(path, format, columns, csv, bad)
            continue
        for file in huggingface_files(path):
            yield from read_rows(file, guess_format(file), columns)


def huggingface_files(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a Hugging Face data set on disk (one split), in order.

    Both what ``Dataset.save_to_disk`` writes (``state.json`` gives the order) and a folder of
    Parquet or Arrow files are understood, without the ``datasets`` library.
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


def read_folder(root: pathlib.Path) -> Iterator[Document]:
    """Streams the text files of a folder; a user is a first-level file or first-level folder.

    Hidden files are skipped. Every other file must be UTF-8 text, and no link to another place.
    """
    some = False
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if any(part.startswith(".") for part in parts):
            continue
        if path.is_symlink():
            within(root, os.path.join(*parts))
        if not path.is_file():
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
        raise BadInputError(f"the folder {root} holds no files: each entry in it is a user")
