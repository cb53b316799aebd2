"""Safe reading of files that come from others, cached answers, names on the Hugging Face hub."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib.util
import io
import json
import os
import pathlib
import re
import stat
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from dpfl_jax.errors import BadInputError

_MOST_BYTES = 2**26  # more than the reports of the largest federations
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(?!/|$)(.*)", re.DOTALL)
_FORMULA = ("=", "+", "-", "@", "'", "\t", "\r")  # and the quotation mark that csv_text adds


def on_disk(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path of a file or folder, which somebody named; every such path comes through here.

    Raises:
      BadInputError: it is an address (``scheme://...``): as a path it would lead to a folder
        ``scheme:`` of this machine, and end with it.
    """
    if match := _ADDRESS.match(os.fspath(path)):
        raise BadInputError(
            f"{match[1]}://{match[2]} is an address, and only files and folders of this machine "
            "can be used here: give a path, of a disk that outlives the machine if it must"
        )
    return pathlib.Path(path)


def within(folder: pathlib.Path, name: str) -> pathlib.Path:
    """``folder / name``, unless it leads out of the folder.

    Links may lead to what the folder holds and, in the Hugging Face cache, to its repository.

    Raises:
      BadInputError: it leads out of the folder; somebody else's could lead to any file of ours.
    """
    path = folder / name
    try:
        inside, real = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # links that lead to each other
        raise BadInputError(f"{path} cannot be reached: {error}") from None
    # In the hub's cache, snapshots/REVISION/NAME is a link to blobs/DIGEST.
    blobs = [parent.parent / "blobs" for parent in inside.parents if parent.name == "snapshots"]
    if inside not in real.parents and real.parent not in blobs:
        raise BadInputError(
            f"{path} links to {real}, outside of the folder {folder}: put a copy in its place, or "
            "remove it"
        )
    return path


def check_links(folder: pathlib.Path) -> None:
    """Raises BadInputError if an entry of a folder to write into is a link out of it."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.is_symlink():
            within(folder, entry.name)


def read_text(path: pathlib.Path) -> str:
    """The text of a regular file of bounded size (devices and pipes never end).

    Raises:
      OSError: the file cannot be read.
      BadInputError: it is not a regular file, or too large.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
        raise BadInputError(
            f"{path} must be a regular file of at most {_MOST_BYTES >> 20} MiB: bring it back"
        )
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8") as file:
        return file.read(_MOST_BYTES)


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as CSV in which no spreadsheet sees a formula; ``unquoted`` restores a cell."""
    text = io.StringIO()
    csv.writer(text).writerows(
        [f"'{v}" if isinstance(v, str) and v.startswith(_FORMULA) else v for v in row]
        for row in rows
    )
    return text.getvalue()


def unquoted(cell: str) -> str:
    """Restores a cell of ``csv_text``."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(_FORMULA) else cell


def can_draw() -> bool:
    """Whether Matplotlib is installed (extra ``plots``); without it a run has no pictures."""
    return importlib.util.find_spec("matplotlib") is not None


def save_figure(figure: Any, path: pathlib.Path, dpi: int = 150) -> None:
    """Writes a figure of Matplotlib.

    Raises:
      BadInputError: it cannot be written there.
    """
    try:
        figure.savefig(on_disk(path), dpi=dpi)
    except (OSError, ValueError) as error:
        raise BadInputError(f"the plot cannot be written to {path}: {error}") from error


def default_cache_dir() -> pathlib.Path:
    """``$DPFL_CACHE_DIR``, or dpfl_jax in the user's cache folder."""
    if "DPFL_CACHE_DIR" in os.environ:
        return on_disk(os.environ["DPFL_CACHE_DIR"])
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return on_disk(base) / "dpfl_jax"


def answer_file(kind: str, *content: str) -> pathlib.Path | None:
    """The file that caches the answer for ``content``, or None without a cache.

    ``DPFL_CACHE_DIR`` names the folder, or turns the cache off (``off``, or empty).
    """
    if os.environ.get("DPFL_CACHE_DIR", "on").strip().lower() in ("", "off", "none", "0"):
        return None
    key = hashlib.sha256("\n".join(content).encode()).hexdigest()
    try:
        return default_cache_dir().expanduser() / kind / key[:2] / f"{key}.json"
    except RuntimeError:  # no home directory
        return None


def write_answer(file: pathlib.Path | None, answer: Any) -> None:
    """Writes to a temporary file and renames it, so that a reader never sees part of a file.

    If the folder cannot be written, nothing is cached.
    """
    if file is None:
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as opened:
                json.dump(answer, opened)
            os.replace(temporary, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


# ---- names of the Hugging Face hub ---------------------------------------------------------------


_PREFIX = "hf:"
_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:/(.*))?")
# A path with one of these suffixes is a missing file, not a name on the hub.
_FILES = {".arrow", ".csv", ".gz", ".json", ".jsonl", ".model", ".parquet", ".tsv", ".txt"}


def local_path(path: str | os.PathLike[str], kind: Literal["model", "dataset"]) -> str:
    """The local path of a file, or of a name on the hub; nothing is downloaded.

    Args:
      path: a path, returned as it is; or ``hf:org/name``, the newest snapshot in the cache, or
        ``hf:org/name/part``, a part of it. A mistyped path is never taken for a name.
      kind: of the repository.

    Raises:
      BadInputError: the cache does not hold it; the sentence has the command that downloads it.
    """
    text = os.fspath(path)
    on_hub = text.startswith(_PREFIX)
    match = _NAME.fullmatch(text.removeprefix(_PREFIX))
    if on_hub and (match is None or ".." in (match[2] or "").split("/")):
        raise BadInputError(f"{text!r} is not a name on the Hugging Face hub: write hf:org/name")
    if not on_hub:
        is_name = match is not None and not match[2] and os.path.splitext(text)[1] not in _FILES
        if is_name and not text.startswith(".") and not os.path.lexists(text):
            raise BadInputError(
                f"there is no file or folder {text}: if it is a name on the Hugging Face hub, "
                f"write hf:{text}"
            )
        on_disk(text)
        return text
    assert match is not None
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(match[1], repo_type=kind, local_files_only=True)
    except ImportError as error:
        raise BadInputError(
            f"{text} is a name on the Hugging Face hub: pip install huggingface_hub, which knows "
            "where its cache is"
        ) from error
    except (OSError, ValueError) as error:
        of = "" if kind == "model" else " --repo-type dataset"
        raise BadInputError(
            f"{text}: the local Hugging Face cache does not hold it, and nothing is "
            f"downloaded here: `hf download {match[1]}{of}` does that"
        ) from error
    return os.path.join(folder, match[2]) if match[2] else folder
