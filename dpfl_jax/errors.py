"""Errors that a user can cause and mend, and the checks of arguments that raise them.

Every message is one sentence: what is wrong, where, and which key or argument to change to what.
The command line prints it without a traceback and exits with code 2.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import math
import numbers
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")


class BadInputError(ValueError):
    """Something the user gave (a config key, a file, an argument) cannot be used as it is.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> try:
      ...     dpfl.uls(group_size=0, cohort_size=8)
      ... except dpfl.BadInputError as error:
      ...     print(error)
      group_size is 0, but it must be at least 1
    """


def expect(value: object, kind: type | tuple[type, ...], name: str, wanted: str) -> None:
    """Refuses an argument of another type.

    Raises:
      BadInputError: what ``name`` is, and what is ``wanted``.
    """
    if not isinstance(value, kind):
        text = "" if _holds_data(value) else f"{' '.join(repr(value).split())[:60]} "
        raise BadInputError(f"{name} is {text}({type(value).__name__}): give {wanted}")


def require(good: object, name: str, value: object, wanted: str, advice: str = "") -> None:
    """Refuses a value: "``name`` is ``value``, but it must be ``wanted``: ``advice``".

    ``positive``, ``at_least``, ``probability`` and ``one_of`` below are its common cases. To all
    four, None is "not given", and fine.

    Args:
      good: whether the value can be used.
      name: the configuration key or the argument, as the user writes it.
      value: what it is. Arrays and lists are not printed, as they may be somebody's data.
      wanted: what it must be.
      advice: what to change, where that is not plain from ``wanted``.

    Raises:
      BadInputError: the value is not good.
    """
    if not good:
        if _holds_data(value):
            text = f"a {type(value).__name__}"
        else:
            text = repr(value)[:60] if isinstance(value, str) else str(value)[:60]
        raise BadInputError(
            f"{name} is {text}, but it must be {wanted}{': ' if advice else ''}{advice}"
        )


def positive(name: str, value: float | None, advice: str = "") -> None:
    """Refuses what is not a finite number above 0.

    Raises:
      BadInputError: as of ``require``.
    """
    good = value is None or 0 < _number(value) < math.inf
    require(good, name, value, "finite and above 0", advice)


def at_least(
    name: str,
    value: float | None,
    least: float,
    *,
    most: float | None = None,
    whole: bool = False,
    advice: str = "",
) -> None:
    """Refuses numbers below ``least``, above ``most`` and, if asked, those that are not whole.

    Raises:
      BadInputError: as of ``require``.
    """
    good = value is None or (
        least <= _number(value) <= (math.inf if most is None else most)
        and not (whole and (isinstance(value, bool) or not isinstance(value, numbers.Integral)))
    )
    bounds = f"at least {least}" + ("" if most is None else f" and at most {most}")
    require(good, name, value, f"a whole number, {bounds}" if whole else bounds, advice)


def probability(
    name: str, value: float | None, *, zero: bool = True, one: bool = True, advice: str = ""
) -> None:
    """Refuses what is not from 0 to 1; without ``zero`` or ``one``, that end itself, too.

    Raises:
      BadInputError: as of ``require``.
    """
    good = value is None or (
        0 <= _number(value) <= 1 and (zero or value > 0) and (one or value < 1)
    )
    bounds = f"{'at least' if zero else 'above'} 0 and {'at most' if one else 'below'} 1"
    require(good, name, value, bounds, advice)


def one_of(name: str, value: object, options: Iterable[object], advice: str = "") -> None:
    """Refuses what is not among the options, which are all named.

    Raises:
      BadInputError: as of ``require``.
    """
    options = list(options)
    good = value is None or value in options
    require(good, name, value, f"one of {', '.join(map(str, options))}", advice)


def nearest(name: str, known: Iterable[str]) -> str:
    """Ends a sentence on an unknown name: "did you mean ...?", or "known: ..." if none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def _number(value: Any) -> float:
    """A Python number, as comparisons with one of NumPy's float16 would be in float16; or NaN."""
    if isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0:
        return value if isinstance(value, int) else float(value)
    return math.nan


def _holds_data(value: object) -> bool:
    """Whether the value is an array, a table or a list, whose contents may be somebody's."""
    is_array = hasattr(value, "__array__") and getattr(value, "ndim", 1) > 0
    return is_array or isinstance(value, list | tuple)


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
      ValueError: a key stands there twice, and which value was meant cannot be known.
    """
    if (twice := repeated(name for name, _ in pairs)) is not None:
        raise ValueError(f"the key {twice!r} stands there twice")
    return dict(pairs)


def imported(place: str, setting: str) -> Any:
    """The object that ``package.module:NAME`` names: callers make sure that its code may run.

    The current folder is searched for the module, too, after all others.

    Raises:
      BadInputError: it cannot be imported; ``setting`` is the key that named it.
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
    """Puts the folder behind all others, so that a module there hides none; and only in here.

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
    """Keeps matplotlib from reading a matplotlibrc of the current folder, which may run TeX."""
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
    """Turns the error of a full disk into one sentence.

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
            "do the same again; a run resumes with its run directory"
        ) from error


_SIZE = re.compile(r"(\d[\d.]*) ?([KMGTP]i?B|[KMGT]\b|bytes)")


@contextlib.contextmanager
def too_little_memory(what: str, advice: str) -> Iterator[None]:
    """Turns the error of running out of memory into one sentence.

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
    """Where memory ran out, and how much was asked for, in words; None for another error."""
    where = "the host" if isinstance(error, MemoryError) else "a device"
    text = str(error)
    # By name, as this module does not import JAX.
    if where == "a device" and not (
        type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
        and "RESOURCE_EXHAUSTED" in text
    ):
        return None
    match = _SIZE.search(text)
    if match is None:
        return where, ""
    size = match[0]
    if match[2] == "bytes":
        size = f"{float(match[1]) / 2**30:,.1f} GiB"
    return where, f" ({size} more were asked for)"
