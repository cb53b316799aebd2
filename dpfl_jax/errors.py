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
    """Refuses an argument that is not of type ``kind``.

    Raises:
      BadInputError: says what ``name`` is, and what is ``wanted``.
    """
    if not isinstance(value, kind):
        text = "" if _holds_data(value) else f"{' '.join(repr(value).split())[:60]} "
        raise BadInputError(f"{name} is {text}({type(value).__name__}): give {wanted}")


def require(good: object, name: str, value: object, wanted: str, advice: str = "") -> None:
    """Refuses a value that is not good: "``name`` is ``value``, but it must be ``wanted``".

    ``positive``, ``at_least``, ``probability`` and ``one_of`` below are its common cases. They
    accept None, which means "not given".

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
    """Refuses values that are not finite numbers above 0.

    Raises:
      BadInputError: the value is refused, as by ``require``.
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
      BadInputError: the value is refused, as by ``require``.
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
    """Refuses values outside [0, 1]; ``zero=False`` or ``one=False`` refuses that end, too.

    Raises:
      BadInputError: the value is refused, as by ``require``.
    """
    good = value is None or (
        0 <= _number(value) <= 1 and (zero or value > 0) and (one or value < 1)
    )
    bounds = f"{'at least' if zero else 'above'} 0 and {'at most' if one else 'below'} 1"
    require(good, name, value, bounds, advice)


def one_of(name: str, value: object, options: Iterable[object], advice: str = "") -> None:
    """Refuses a value that is not among the options; the message names them all.

    Raises:
      BadInputError: the value is refused, as by ``require``.
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
    """A Python number, as a NumPy float16 would be compared in float16; NaN if it is no number."""
    if isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0:
        return value if isinstance(value, int) else float(value)
    return math.nan


def _holds_data(value: object) -> bool:
    """Whether the value is an array, a table or a list, whose contents may be private."""
    is_array = hasattr(value, "__array__") and getattr(value, "ndim", 1) > 0
    return is_array or isinstance(value, list | tuple)


# Unicode categories of control characters, direction marks, surrogates and line breaks.
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
    """The first of ``names`` that occurs a second time; None if all differ."""
    seen = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a dict of the pairs of a JSON object (``object_pairs_hook`` of ``json.loads``).

    Raises:
      ValueError: a key occurs twice, so that it is unknown which value was meant.
    """
    if (twice := repeated(name for name, _ in pairs)) is not None:
        raise ValueError(f"the key {twice!r} occurs twice")
    return dict(pairs)


def imported(place: str, setting: str) -> Any:
    """Imports the object ``package.module:NAME``; callers make sure that its code may run.

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
            f"{setting} is {place!r}, which is in Python's standard library: name something in a "
            "module of your own"
        )
    try:
        with _current_folder_on_path():
            return getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a module of the user's does
        raise BadInputError(f"{setting} is {place!r}, which cannot be used: {error}") from error


@contextlib.contextmanager
def _current_folder_on_path() -> Iterator[None]:
    """Searches the current folder after all others, and only inside this context.

    Libraries try to import optional packages: a folder from somebody else could hold modules of
    these names.
    """
    added = "" not in sys.path
    if added:
        sys.path.append("")
    try:
        yield
    finally:
        if added:
            sys.path.remove("")


@contextlib.contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Turns the error of an import in the block into one sentence, with the extra that mends it.

    Args:
      name: the extra, one of ``project.optional-dependencies`` in pyproject.toml.
      what: what needs it, in words.

    Raises:
      BadInputError: a package could not be imported.
    """
    try:
        yield
    except ImportError as error:
        package = "" if error.name is None else f" {error.name.partition('.')[0]}"
        raise BadInputError(
            f"{what} needs the package{package}: pip install 'dpfl_jax[{name}]'"
        ) from error


def ignore_matplotlibrc() -> None:
    """Keeps matplotlib from reading a matplotlibrc of the current folder, which may run TeX."""
    if os.path.lexists("matplotlibrc"):
        with contextlib.chdir(os.sep), contextlib.suppress(ImportError):
            importlib.import_module("matplotlib")


class StoppedError(Exception):
    """Work stopped before its end at the user's wish, with everything done so far saved."""


class UnreachableError(Exception):
    """Storage that was used before cannot be reached from this process; trying later may help."""


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
            "repeat the command; a run resumes from its run directory"
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
