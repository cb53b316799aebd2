"""User ids, and key expressions: how a row names its user.

A key expression has one of four forms, none of which evaluates code given as text:

- ``author`` or ``meta.author``: a column, or a field within it;
- ``{play}/{speaker}``: several columns in a template;
- ``domain(url)``: a function of a column, one of ``FUNCTIONS``;
- ``package.module:function``: your own function of the whole row (a dict).

All but a template may give a list: a record with several owners (``owners``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import unicodedata
import uuid
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from dpfl_jax.errors import BadInputError, imported
from dpfl_jax.task import EACH_ROW

# Separates the owners of a record in the id of their set, which takes a user's place (``owners``).
SEPARATOR = "\x1f"


# How people and libraries write a missing value, in lower case.
_MISSING = frozenset(
    {"", "nan", "none", "null", "na", "n/a", "#n/a", "<na>", "nat", "\\n", "?", "-", "--", "."}
)


def is_missing(value: object) -> bool:
    """Whether a cell is empty, blank (U+00A0 is a blank) or a word for a missing value."""
    return str(value).strip().casefold() in _MISSING


def no_sets(where: str) -> BadInputError:
    """Returns the error for an id that would be read as a set of owners."""
    return BadInputError(
        f"{where}: a user id holds U+001F, which separates the owners of a record: give owners as "
        "a list, or leave the character out"
    )


def check_user_id(user_id: object, where: str = "") -> str:
    """Returns ``user_id`` if it is a text that names somebody.

    A missing id must never become a user ("None", "nan", ""): all rows without an id would then be
    protected as one person.

    Raises:
      BadInputError: naming ``where``, if the id is missing or not text.
    """
    place = f" ({where})" if where else ""
    if is_missing(user_id):
        raise BadInputError(
            f"a user id is {user_id!r}{place}: every row needs a user id; drop such rows or give "
            "each another id"
        )
    if not isinstance(user_id, str):
        kind = _KINDS.get(type(user_id), type(user_id).__name__)
        raise BadInputError(f"a user id is {kind}{place}: store ids as text or whole numbers")
    return user_id


_KINDS = {bool: "true or false", float: "a number with decimals", dict: "an object"}


def base_domain(url: str) -> str:
    """Returns the host of a URL in lower case, without ``www.`` and port ("" if there is none).

    Dataset Grouper (Charles et al. 2023) groups CC-News by this "base domain".
    """
    host = urlsplit(url if "//" in url else "//" + url).hostname or ""
    return host.removeprefix("www.")


FUNCTIONS: dict[str, Callable[[str], str]] = {
    "domain": base_domain,
    "lower": str.lower,
    "strip": str.strip,
    "nfc": functools.partial(unicodedata.normalize, "NFC"),
}


def value_to_id(value: Any, where: str) -> str:
    """Turns one value into a user id: text and UUIDs as they are, integers in decimal."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            raise BadInputError(f"{where}: the user id is not UTF-8") from error
    if isinstance(value, (list, tuple)):
        raise BadInputError(
            f"{where}: there is a list where one name is needed: only the user of a row may be a "
            "list of owners, by a column or a function"
        )
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        raise BadInputError(
            f"{where}: the user id is a floating-point number, which mixes up large ids: store ids "
            "as integers or text"
        )
    if isinstance(value, str) and re.fullmatch(r"\d+\.0+", value):
        raise BadInputError(
            f"{where}: the user id is a number with decimals, as in a column with gaps; the same "
            "person may also be written without: store ids as integers or text"
        )
    if isinstance(value, str) and re.fullmatch(r"\d([.,]\d+)?[eE]\+\d+", value.strip()):
        raise BadInputError(
            f"{where}: the user id is a number in powers of ten, as a spreadsheet writes long ids, "
            "and many ids are then written alike: store ids as text"
        )
    if isinstance(value, str) and SEPARATOR in value:
        raise no_sets(where)
    return check_user_id(value, where)


def owners_to_id(value: Any, where: str, each: Callable[[str], str] = str) -> str:
    """Turns one user, or a list of the owners of a record, into an id (``value_to_id``).

    Args:
      value: a user, or several: their order does not matter, and repeated owners count once.
      where: the row, for errors.
      each: applied to every owner's id.
    """
    if isinstance(value, np.ndarray) and value.ndim:
        value = value.tolist()
    if not isinstance(value, (list, tuple, set, frozenset)):
        return each(value_to_id(value, where))
    if not value:
        raise BadInputError(
            f"{where}: the list of owners is empty: every record needs one; drop such rows or name "
            "an owner"
        )
    return SEPARATOR.join(sorted({each(value_to_id(owner, where)) for owner in value}))


def names_function(expression: str) -> bool:
    """Whether a key expression is ``package.module:function``."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", expression) is not None


def key_name(expression: str | None) -> str:
    """Returns how a guarantee names a key: ``column visit_id``, or ``key domain(url)``.

    Args:
      expression: a key expression; None if every row is a user.
    """
    if expression is None:
        return EACH_ROW
    return f"{'key' if re.search(r'[{(:]', expression) else 'column'} {expression}"


@dataclasses.dataclass(frozen=True)
class UserKey:
    """A parsed key expression; call it with a row and a description of where the row is.

    Raises:
      BadInputError: an empty expression, or an unknown function.
    """

    expression: str

    def __post_init__(self) -> None:
        if not self.expression:
            raise BadInputError("the user column is empty: give a column or a key expression")
        call = self._call
        if call and call[0] not in FUNCTIONS:
            raise BadInputError(
                f"unknown function in the key {self.expression!r}: use {', '.join(FUNCTIONS)}"
            )
        if names_function(self.expression):
            _ = self._function

    @functools.cached_property
    def _call(self) -> tuple[str, str] | None:
        match = re.fullmatch(r"(\w+)\(([^()]+)\)", self.expression)
        return (match[1], match[2]) if match else None

    @functools.cached_property
    def _template(self) -> list[str]:
        return re.findall(r"\{([^{}]+)\}", self.expression)

    @property
    def columns(self) -> list[str] | None:
        """Top-level columns that the key reads; None if it needs the whole row."""
        if names_function(self.expression):
            return None
        paths = self._template or [self._call[1] if self._call else self.expression]
        return list(dict.fromkeys(p.split(".")[0] for p in paths))

    @functools.cached_property
    def _function(self) -> Callable[[Mapping[str, Any]], Any]:
        return imported(self.expression, "the user column")

    def __call__(self, row: Mapping[str, Any], where: str) -> str:
        """Returns the id of a row's user, or of the set of its owners.

        Raises:
          BadInputError: naming ``where``, if a column is missing or an id is null.
        """
        if names_function(self.expression):
            return owners_to_id(self._function(row), where)
        if self._template:
            parts = {p: value_to_id(_look_up(row, p, where), where) for p in self._template}
            return re.sub(r"\{([^{}]+)\}", lambda m: parts[m[1]], self.expression)
        if self._call:
            name, path = self._call

            def each(text: str) -> str:
                return check_user_id(FUNCTIONS[name](text), f"{where}, {self.expression}")

            return owners_to_id(_look_up(row, path, where), where, each)
        return owners_to_id(_look_up(row, self.expression, where), where)


def _look_up(row: Mapping[str, Any], path: str, where: str) -> Any:
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise BadInputError(
                f"{where}: there is no column {path!r}; the columns are {sorted(row)}"
            )
        value = value[part]
    return value
