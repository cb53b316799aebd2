"""Files that somebody else may have sent: where they lie, and how much of them is read."""

from __future__ import annotations

import csv
import io
import os
import pathlib
import stat
from collections.abc import Iterable, Sequence
from typing import Any

from dpfl_jax.errors import BadInputError

_MOST_BYTES = 2**26  # of a file that is read whole: reports of the largest federations are below
_FORMULA = ("=", "+", "-", "@", "'", "\t", "\r")  # and the sign that says that it is none


def within(folder: pathlib.Path, name: str) -> pathlib.Path:
    """``folder / name``, once it is sure that it is nothing outside of the folder.

    Links may lead to what the folder holds and, in the Hugging Face cache, to its repository.

    Raises:
      BadInputError: it lies elsewhere, or is a link to elsewhere: in a folder that somebody sent,
        that would be another of our files.
    """
    path = folder / name
    try:
        inside, real = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # links that lead to each other
        raise BadInputError(f"{path} cannot be reached: {error}") from None
    # Of a repository the hub's cache holds snapshots/REVISION/NAME, a link to blobs/DIGEST.
    blobs = [parent.parent / "blobs" for parent in inside.parents if parent.name == "snapshots"]
    if inside not in real.parents and real.parent not in blobs:
        raise BadInputError(
            f"{path} is {real}, outside of the folder {folder}: put a copy in its place, or remove "
            "it"
        )
    return path


def check_links(folder: pathlib.Path) -> None:
    """Raises BadInputError if an entry of a folder that is written into is a link out of it."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.is_symlink():
            within(folder, entry.name)


def read_text(path: pathlib.Path) -> str:
    """The text of a regular file of bounded size: devices and pipes never end.

    Raises:
      OSError: it cannot be read.
      BadInputError: it is something else, or too large.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
        raise BadInputError(
            f"{path} must be a regular file of at most {_MOST_BYTES >> 20} MiB: bring it back"
        )
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8") as file:
        return file.read(_MOST_BYTES)


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV, in whose texts no spreadsheet sees a formula: ``unquoted`` brings them back."""
    text = io.StringIO()
    csv.writer(text).writerows(
        [f"'{v}" if isinstance(v, str) and v.startswith(_FORMULA) else v for v in row]
        for row in rows
    )
    return text.getvalue()


def unquoted(cell: str) -> str:
    """What a cell of ``csv_text`` was."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(_FORMULA) else cell


def save_figure(figure: Any, path: pathlib.Path, dpi: int = 150) -> None:
    """Writes a figure of Matplotlib.

    Raises:
      BadInputError: it cannot be written there.
    """
    try:
        figure.savefig(path, dpi=dpi)
    except (OSError, ValueError) as error:
        raise BadInputError(f"the plot cannot be written to {path}: {error}") from error
