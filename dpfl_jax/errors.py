"""The errors a user can cause and mend.

Every message is one sentence that says what is wrong, where, and what to do about it.
The command line turns these into exit code 2 without a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")


class BadInputError(ValueError):
    """Something the user gave (a config key, a file, an argument) cannot be used as it is."""


def expect(value: object, kind: type | tuple[type, ...], name: str, wanted: str) -> None:
    """Refuses an argument of another type.

    Raises:
      BadInputError: what ``name`` is, and what is ``wanted``.
    """
    if not isinstance(value, kind):
        # What arrays, tables and lists hold may be somebody's.
        data = isinstance(value, list | tuple) or hasattr(value, "__array__")
        shown = "" if data else f"{' '.join(repr(value).split())[:60]} "
        raise BadInputError(f"{name} is {shown}({type(value).__name__}): give {wanted}")


# Escapes that move the cursor, letters that turn the direction of writing, and breaks of lines.
_UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def plain(text: str) -> str:
    """``text`` with control and invisible characters, which terminals obey, replaced by ``?``."""
    if text.isprintable():
        return text
    return "".join(
        "?" if unicodedata.category(letter) in _UNSEEN and letter not in "\n\t" else letter
        for letter in text
    )


def one_line(text: str) -> str:
    """``plain`` text in which line breaks and tabs are replaced, too, so that it stays one line."""
    return plain(text.replace("\n", "?").replace("\t", "?"))


def repeated(names: Iterable[_T]) -> _T | None:
    """The first of ``names`` that comes a second time, if any does."""
    seen = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, as the ``object_pairs_hook`` of ``json.loads``.

    Raises:
      ValueError: a key stands there twice: which value was meant, nobody can tell.
    """
    if (twice := repeated(name for name, _ in pairs)) is not None:
        raise ValueError(f"the key {twice!r} stands there twice")
    return dict(pairs)


def imported(place: str, setting: str) -> Any:
    """What ``package.module:NAME`` names: the caller has made sure that its code may run.

    Modules of the current folder are found, behind all others, until the import is done.

    Raises:
      BadInputError: it cannot be had; ``setting`` is what named it.
    """
    module, colon, name = place.partition(":")
    if not colon:
        raise BadInputError(f"{setting} is {place!r}: write package.module:NAME")
    if module.partition(".")[0] in sys.stdlib_module_names:
        # `subprocess:getoutput` would run what a row of the data, or an option, says.
        raise BadInputError(
            f"{setting} is {place!r}, of Python's standard library, which was not written to be "
            "called from here: name something in a module of your own"
        )
    try:
        with _current_folder_on_path():
            return getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a module of the user's does
        raise BadInputError(f"{setting} is {place!r}, which cannot be used: {error}") from error


@contextlib.contextmanager
def _current_folder_on_path() -> Iterator[None]:
    """Behind all others, so that a module there hides none; and no longer than needed.

    Libraries try to import what may be installed beside them: a folder that somebody sent could
    hold modules of these names.
    """
    added = "" not in sys.path
    if added:
        sys.path.append("")
    try:
        yield
    finally:
        if added:
            sys.path.remove("")


def ignore_matplotlibrc() -> None:
    """That of the current folder, in this process: it is read first, and may have TeX run."""
    if os.path.lexists("matplotlibrc"):
        with contextlib.chdir(os.sep):
            importlib.import_module("matplotlib")


class StoppedError(Exception):
    """Work stopped before its end at the user's wish, with everything done so far saved."""


class TooLittleMemoryError(BadInputError):
    """The work does not fit into the memory of the device, or of the host."""


FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def room_on_disk() -> Iterator[None]:
    """Turns a full disk inside into one sentence.

    Raises:
      BadInputError: something could not be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise BadInputError(
            f"{error.filename or 'a file'} cannot be written, as the disk is full: free space, and "
            "do the same again; a run goes on with its run directory"
        ) from error


_SIZE = re.compile(r"(\d[\d.]*) ?([KMGTP]i?B|[KMGT]\b|bytes)")


@contextlib.contextmanager
def too_little_memory(what: str, advice: str) -> Iterator[None]:
    """Turns running out of memory inside into one sentence.

    Args:
      what: what was being done, e.g. "a training step".
      advice: what to change.

    Raises:
      TooLittleMemoryError: memory did not suffice.
    """
    try:
        yield
    except Exception as error:
        asked = _asked_for(error)
        if asked is None:
            raise
        raise TooLittleMemoryError(
            f"{asked[0]} has too little memory for {what}{asked[1]}: {advice}"
        ) from error


def _asked_for(error: Exception) -> tuple[str, str] | None:
    """Where, and how much memory was not to be had, in words; None for another error."""
    where = "the host" if isinstance(error, MemoryError) else "a device"
    text = str(error)
    # By name: this module knows nothing of JAX.
    if where == "a device" and not (
        type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
        and "RESOURCE_EXHAUSTED" in text
    ):
        return None
    found = _SIZE.search(text)
    if found is None:
        return where, ""
    size = found[0]
    if found[2] == "bytes":
        size = f"{float(found[1]) / 2**30:,.1f} GiB"
    return where, f" ({size} more were asked for)"
