"""Rows of columns as texts, by a template, and back: ``<label> | <title> | <text>``.

What a column may hold is declared (``data.categories``, ``data.ranges``) and never taken from rows:
a text is read back, and a model's text is judged, by public knowledge alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpfl_jax.data.keys import is_missing
from dpfl_jax.data.rows import no_column, text_of
from dpfl_jax.data.table import as_category, read_number
from dpfl_jax.errors import BadInputError, repeated

_COLUMN = re.compile(r"<([^<>]*)>")
_NUMBER = re.compile(r"-?\d*\.?\d*")
_NEXT_ROW = "\n"
_MISSING = 0.2  # of random cells that may be missing


@dataclasses.dataclass(frozen=True)
class TemplateColumn:
    """A column of a template; without words and range it holds any text.

    Attributes:
      name: its name.
      words: the words that it may hold.
      range: its least and largest number.
      decimals: of numbers.
      may_be_missing: whether it may be empty.
    """

    name: str
    words: tuple[str, ...] = ()
    range: tuple[float, float] | None = None
    decimals: int = 0
    may_be_missing: bool = False

    @property
    def is_text(self) -> bool:
        """Whether it holds any text."""
        return not self.words and self.range is None

    def write(self, row: Mapping[str, Any], where: str, decimal: str) -> str:
        """Returns the cell of a row as text.

        Raises:
          BadInputError: it holds what was not declared; the cell, which is private, is not quoted.
        """
        if self.name not in row:
            raise no_column(where, self.name, sorted(row))
        cell = row[self.name]
        # "none" is a word where it is listed, as in tables.
        listed = cell is not None and as_category(cell) in self.words
        if not listed and is_missing(cell):
            if self.may_be_missing:
                return ""
            raise BadInputError(
                f"{where}: {self.name!r} has no value: name it in data.missing, or leave such rows "
                "out, data.on_bad_row=drop"
            )
        if self.is_text:
            return text_of(row, self.name, where) if isinstance(cell, str | bytes) else str(cell)
        if self.words:
            text = as_category(cell)
            key = "categories"
        else:
            number = read_number(cell, decimal)
            text = number if isinstance(number, str) else self._format(number)
            key = "ranges"
        if not self.accepts(text):
            raise BadInputError(
                f"{where}: {self.name!r} holds what data.{key} does not allow: correct that, or "
                "leave such rows out, data.on_bad_row=drop"
            )
        return text

    def _format(self, number: float) -> str:
        text = f"{number:.{self.decimals}f}"
        return text.removeprefix("-") if float(text) == 0 else text

    def accepts(self, text: str) -> bool:
        """Whether it may hold what a text says."""
        if not text or self.is_text:
            return bool(text) or self.may_be_missing
        if self.words:
            return text in self.words
        assert self.range is not None
        if not _NUMBER.fullmatch(text) or not text.strip("-."):
            return False
        return text == self._format(float(text)) and self.range[0] <= float(text) <= self.range[1]

    def value(self, text: str) -> Any:
        """What an accepted text says: a word, a number, or None for a missing value."""
        if not text:
            return None
        if self.range is None:
            return text
        return float(text) if self.decimals else int(text)

    def draw(self, generator: np.random.Generator) -> str:
        """Returns a cell, each that is declared as likely as any other."""
        if self.may_be_missing and generator.random() < _MISSING:
            return ""
        if self.words:
            return self.words[generator.integers(len(self.words))]
        assert self.range is not None
        low, high = (round(bound * 10**self.decimals) for bound in self.range)
        return self._format(int(generator.integers(low, high, endpoint=True)) / 10**self.decimals)

    def may_begin(self, text: str, end: str) -> bool:
        """Whether a value and ``end`` may begin with ``text``, in which ``end`` is not yet."""
        if self.is_text:
            return True
        if self.words:
            words = (*self.words, "") if self.may_be_missing else self.words
            return any(f"{word}{end}".startswith(text) for word in words)
        for size in range(min(len(end), len(text)), 0, -1):
            if text.endswith(end[:size]) and self.accepts(text[:-size]):
                return True
        return _NUMBER.fullmatch(text) is not None


@dataclasses.dataclass(frozen=True)
class RowTemplate:
    """A template, with what its columns may hold.

    Attributes:
      columns: its columns, in order.
      between: what is before, between and after them.
      rows: most rows in a text, one in a line.

    Examples:
      >>> from dpfl_jax.data.templates import RowTemplate
      >>> template = RowTemplate.parse("<kind> | <text>", categories={"kind": ["joke", "ode"]})
      >>> template.write([{"kind": "ode", "text": "O wind"}], "row 1")
      'ode | O wind'
      >>> template.read("ode | O wind")
      [{'kind': 'ode', 'text': 'O wind'}]
    """

    columns: tuple[TemplateColumn, ...]
    between: tuple[str, ...]
    rows: int = 1

    @classmethod
    def parse(
        cls,
        template: str,
        categories: Mapping[str, Sequence[Any]] | None = None,
        ranges: Mapping[str, tuple[float, float]] | None = None,
        missing: Sequence[str] = (),
        rows: int = 1,
    ) -> RowTemplate:
        """Reads a template; the arguments are keys of the section ``data``.

        Raises:
          BadInputError: texts could not be read back, or a setting names no column of it.
        """
        categories, ranges = categories or {}, ranges or {}
        names = _COLUMN.findall(template)
        between = tuple(_COLUMN.split(template)[::2])
        shown = f"data.template is {template!r:.80}"
        if not names:
            raise BadInputError(
                f"{shown}, which names no column: write each as <NAME>, as in '<label> | <text>'"
            )
        if blank := [name for name in names if name != name.strip() or not name]:
            raise BadInputError(
                f"{shown}, in which a column is called {blank[0]!r}: write its name without blanks "
                "around it"
            )
        if (twice := repeated(names)) is not None:
            raise BadInputError(f"{shown}, which names {twice!r} twice: leave one out")
        for left, right, text in zip(names, names[1:], between[1:]):
            if not text:
                raise BadInputError(
                    f"{shown}, in which nothing is between {left!r} and {right!r}: write something "
                    "that ends the first, as in '<label> | <text>'"
                )
        if rows > 1 and any(_NEXT_ROW in text for text in between):
            raise BadInputError(
                f"{shown}, which has line breaks, but with data.rows_per_text={rows} they lie "
                "between rows: leave them out"
            )
        for key, named in (("categories", categories), ("ranges", ranges), ("missing", missing)):
            if unknown := [name for name in named if name not in names]:
                raise BadInputError(
                    f"data.{key} names {unknown[0]!r}, but data.template has the columns {names}: "
                    "correct one of them"
                )
        if both := [name for name in categories if name in ranges]:
            raise BadInputError(
                f"both data.categories and data.ranges name {both[0]!r}: keep the one that fits"
            )
        columns = tuple(
            _column(name, end, categories.get(name), ranges.get(name), name in missing)
            for name, end in zip(names, _ends(between, rows), strict=True)
        )
        return cls(columns, between, rows)

    @property
    def ends_in_text(self) -> bool:
        """Whether the last column is free text, any beginning of which may stand for all."""
        return self.columns[-1].is_text and not self.between[-1]

    def write(self, rows: Sequence[Mapping[str, Any]], where: str, decimal: str = "point") -> str:
        """Returns the text of rows of one person.

        Raises:
          BadInputError: naming ``where``, if a row could not be read back.
        """
        lines = []
        for row in rows:
            parts = [self.between[0]]
            for column, end, text in zip(
                self.columns, _ends(self.between, self.rows), self.between[1:], strict=True
            ):
                cell = column.write(row, where, decimal)
                if end and end in cell + end[:-1]:
                    raise BadInputError(
                        f"{where}: {column.name!r} holds {end!r}, which ends it in data.template: "
                        "choose other separators, or leave such rows out, data.on_bad_row=drop"
                    )
                parts += [cell, text]
            lines.append("".join(parts))
        return _NEXT_ROW.join(lines)

    def draw(self, generator: np.random.Generator) -> str:
        """Returns a text of random rows: it follows from what is declared, and is public.

        Raises:
          BadInputError: a column is free text.
        """
        if free := [column.name for column in self.columns if column.is_text]:
            raise BadInputError(
                f"data.public=template draws words and numbers, but {free[0]!r} holds any text: "
                "list its words in data.categories, or name a public text"
            )
        rows = [{c.name: c.draw(generator) for c in self.columns} for _ in range(self.rows)]
        return self.write(rows, "a random row")

    def joined(self, texts: Sequence[str]) -> list[str]:
        """The texts that one-row texts of a person make, in their order."""
        return [
            _NEXT_ROW.join(texts[first : first + self.rows])
            for first in range(0, len(texts), self.rows)
        ]

    def fault(self, text: str, ended: bool) -> int | None:
        """Where the first column, or what is between two, begins that no such text can have.

        None if a text of this template begins so (``ended``: is so). What follows the text does not
        change the answer.
        """
        return self._walk(text, ended)[0]

    def read(self, text: str) -> list[dict[str, Any]]:
        """Returns the rows of a text without ``fault``; a last column of free text may be cut."""
        fault, rows = self._walk(text, True)
        if fault is not None:
            raise ValueError("the text is not of this template")
        return rows

    def _walk(self, text: str, ended: bool) -> tuple[int | None, list[dict[str, Any]]]:
        place, rows = 0, list[dict[str, Any]]()
        while True:
            row: dict[str, Any] = {}
            for column, before, end in zip(
                self.columns, self.between, _ends(self.between, self.rows)
            ):
                if (reached := self._past(text, place, before, ended)) is None or reached < 0:
                    return (None if reached is None else place), rows
                place = reached
                stop = text.find(end, place) if end else -1
                if stop < 0:
                    is_last = column is self.columns[-1] and not self.between[-1]
                    if not (ended and is_last):
                        good = not ended and column.may_begin(text[place:], end)
                        return (None if good else place), rows
                    stop = len(text)
                if not column.accepts(text[place:stop]):
                    return place, rows
                row[column.name] = column.value(text[place:stop])
                place = stop
            if (reached := self._past(text, place, self.between[-1], ended)) is None or reached < 0:
                return (None if reached is None else place), rows
            place = reached
            rows.append(row)
            if place == len(text):
                return None, rows
            if text[place] != _NEXT_ROW or len(rows) == self.rows:
                return place, rows
            place += 1

    @staticmethod
    def _past(text: str, place: int, part: str, ended: bool) -> int | None:
        """The place after a part; None if the text ends within it, -1 if it is not there."""
        found = text[place : place + len(part)]
        if found == part:
            return place + len(part)
        return None if not ended and part.startswith(found) else -1

    def prompt(self, label: str | None = None) -> str:
        """How texts begin; with ``label`` those whose first column holds it."""
        return self.between[0] + ("" if label is None else label + self.between[1])


def _ends(between: Sequence[str], rows: int) -> tuple[str, ...]:
    """What ends each column; "": the end of the text."""
    return (*between[1:-1], between[-1] or (_NEXT_ROW if rows > 1 else ""))


def _column(
    name: str,
    end: str,
    words: Sequence[Any] | None,
    bounds: tuple[float, float] | None,
    may_be_missing: bool,
) -> TemplateColumn:
    if words is not None:
        given = tuple(str(word).strip() for word in words)
        what = f"data.categories of {name!r}"
        if not given or "" in given:
            raise BadInputError(f"{what} lists no words, or an empty one: list all of its words")
        if (twice := repeated(given)) is not None:
            raise BadInputError(f"{what} lists {twice!r} twice: list it once")
        if wrong := [word for word in given if end and end in word + end[:-1]]:
            raise BadInputError(
                f"{what} lists {wrong[0]!r}, which holds {end!r}, the end of that column in "
                "data.template: choose another separator"
            )
        return TemplateColumn(name, given, may_be_missing=may_be_missing)
    if bounds is None:
        return TemplateColumn(name, may_be_missing=may_be_missing)
    low, high = bounds
    decimals = max(0 if isinstance(x, int) else len(repr(x).partition(".")[2]) for x in bounds)
    plain = all(abs(x) < 1e15 and "e" not in repr(x) and x == x for x in bounds)
    if not plain or low > high:
        raise BadInputError(
            f"data.ranges of {name!r} is [{low}, {high}], but it must be the least and the largest "
            "number, written without exponents: [18, 65] for whole numbers, [15.0, 55.0] with one "
            "decimal"
        )
    if end[:1] and end[0] in "-.0123456789":
        raise BadInputError(
            f"data.template goes on with {end!r} after the number {name!r}: put a blank or a word "
            "between them"
        )
    return TemplateColumn(name, (), (low, high), decimals, may_be_missing)
