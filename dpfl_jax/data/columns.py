"""Cells of a table as numbers, for training and for predictions; and what is wrong with a cell.

No sentence holds a cell: it is somebody's. Words, dates and what a gap counts as are declared, and
never found in the rows: which words there are is information about the people in them.
"""

from __future__ import annotations

import datetime
import fnmatch
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dpfl_jax.data.rows import LocatedRow, no_column
from dpfl_jax.data.store import is_missing
from dpfl_jax.errors import BadInputError
from dpfl_jax.task import Table

LARGEST = float(np.finfo(np.float32).max)
# What pandas and R call the numbers of rows that they write beside a table.
_ROW_NUMBERS = re.compile(r"|Unnamed: \d+(\.\d+)*|__index_level_\d+__")
_DATE = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([T ]\d.*)?")
_COMMAS = re.compile(r"[+-]?[\d.' ]*\d,\d[\d,. ]*")
_EPOCH = datetime.datetime(2000, 1, 1)
_YEAR = datetime.timedelta(days=365.25)

# What is wrong with cells of columns, and what helps.
_WRONG = {
    "words": (
        "words, not numbers, in {column}",
        "list those of each as data.categories={{{first}: [...]}}, in quotes, from what is known "
        "without these data (of the column that says who holds a record: data.silo_column)",
    ),
    "dates": ("dates in {column}", "say how they are written: data.dates={{{first}: '%Y-%m-%d'}}"),
    "commas": (
        "numbers with commas in {column}",
        "set data.decimal=comma if that is where decimals begin, or write thousands without",
    ),
    "points": (
        "numbers with points in {column}, beside data.decimal=comma",
        "leave that out, or write thousands without",
    ),
    "gaps": (
        "cells without a value in {column}",
        "let them count as the middle of their column, data.missing=[{first}], or leave such rows "
        "out, data.on_bad_row=drop",
    ),
    "no target": ("rows without the target {column}", "leave them out: data.on_bad_row=drop"),
    "unlisted": (
        "words in {column} that data.categories does not list",
        "list them, or leave such rows out, data.on_bad_row=drop",
    ),
    "undated": ("cells of {column} that are not written as data.dates says", "correct the format"),
    "classes": (
        "labels in {column} that are not whole numbers from 0 to {last}",
        "correct data.classes, or list the names of classes as data.categories, or leave "
        "data.classes out if a number is to be predicted",
    ),
    "infinite": (
        "numbers in {column} that float32 cannot hold",
        "mend the rows, or declare the column's range in data.scale",
    ),
    "no numbers": ("what is no number in {column}", "mend the rows"),
    "counts": (
        "numbers of rows, from which nothing is learned, in {column}",
        "they are no inputs (if it is time that goes on, declare its data.scale)",
    ),
    "far": (
        "numbers far from order 1 in {column}, which would swamp all others",
        "declare what brings each to order 1, known without these data, as "
        "data.scale={{{first}: [middle, half width]}} ([0, 1] leaves a column as it is)",
    ),
    "outside": (
        "numbers of ten half widths and more from the middle of data.scale in {column}",
        "leave such cells empty if they stand for what is missing (-999, say) and name the column "
        "in data.missing, or declare the width that the numbers have",
    ),
    "two values": (
        "two values in {column}",
        "set data.classes=2 if they are the classes 0 and 1 (others: data.categories), or "
        "data.classes=0 if a number is to be predicted",
    ),
}


class Wrong:
    """What is wrong with a table: by kind, columns and where each was first seen."""

    def __init__(self, classes: int = 0, remedies: bool = True) -> None:
        """Nothing yet.

        Args:
          classes: of the target.
          remedies: whether the sentence says which settings would help.
        """
        self._found: dict[str, dict[str, str]] = {}
        self._classes, self._remedies = classes, remedies

    def add(self, kind: str, column: str, where: str = "") -> None:
        """Takes note of a cell."""
        self._found.setdefault(kind, {}).setdefault(column, where)

    def __bool__(self) -> bool:
        """Whether anything is."""
        return bool(self._found)

    def error(self) -> BadInputError:
        """All of it: one sentence on one column, a line for each of several."""
        lines = []
        for kind, columns in self._found.items():
            what, remedy = _WRONG[kind]
            for column, where in columns.items():
                seen = f" (first: {where})" if where else ""
                told = what.format(column=repr(column), last=self._classes - 1)
                lines.append(f"- {told}{seen}")
            if self._remedies:
                lines.append(f"  {remedy.format(first=next(iter(columns)))}")
        end = "or name the columns to learn from as data.input_columns"
        if not self._remedies:
            end = "mend the rows, whose columns are read as they were in training"
        if sum(map(len, self._found.values())) == 1:
            sentence = ": ".join(line.lstrip("- ") for line in lines)
            return BadInputError(f"the table has {sentence}; {end}")
        return BadInputError("\n".join(["the table has", *lines, end]))


def input_names(
    patterns: Sequence[str] | None, columns: Sequence[str], used: Sequence[str], where: str
) -> tuple[str, ...]:
    """Columns that are inputs, in the order of ``columns``; row numbers of pandas are none.

    Args:
      patterns: names and shell patterns; these come in this order. None: all columns.
      columns: what the file, not a row, says that there is.
      used: columns that are no inputs.
      where: for errors.

    Raises:
      BadInputError: a pattern that names none, or one that is ``used``; no column is left.
    """
    found: dict[str, None] = {}
    for pattern in ("*",) if patterns is None else patterns:
        if pattern in used:
            raise BadInputError(
                f"data.input_columns names {pattern!r}, which is the target, an id, a silo or a "
                "budget: an input cannot be"
            )
        named = [pattern] if pattern in columns else _like(pattern, columns)
        if not named and patterns is not None:
            raise no_column(where, pattern, list(columns))
        found |= dict.fromkeys(name for name in named if name not in used)
    if not found:
        raise BadInputError(f"{where}: no column is left to learn from beside {list(used)}")
    return tuple(found)


def is_pattern(name: str) -> bool:
    """Whether a name stands for others."""
    return any(sign in name for sign in "*?[")


def _like(pattern: str, columns: Iterable[str]) -> list[str]:
    return [c for c in columns if fnmatch.fnmatchcase(c, pattern) and not _ROW_NUMBERS.fullmatch(c)]


def missing_in(patterns: Sequence[str], inputs: Sequence[str]) -> tuple[str, ...]:
    """The inputs that ``data.missing`` names.

    Raises:
      BadInputError: a pattern that names none.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        named = [pattern] if pattern in inputs else _like(pattern, inputs)
        if not named:
            raise BadInputError(
                f"data.missing names {pattern!r}, but the inputs are {list(inputs)}: correct the "
                "name"
            )
        found |= dict.fromkeys(named)
    return tuple(found)


def read_cell(cell: Any, column: str, table: Table) -> float | str:
    """A cell as a number, of a word its place (-1: none); or what is wrong with it."""
    if (words := table.categories.get(column)) is not None:
        if (text := word_of(cell)) in words:
            return float(words.index(text))
        if not is_missing(cell):
            return "unlisted"
        if "" in words:
            return float(words.index(""))
        return -1.0 if column in table.missing else _gap(column, table)
    if column in table.dates:
        value = _date(cell, table.dates[column])
    else:
        value = _number(cell, table.decimal)
    if isinstance(value, str):
        if not is_missing(cell):
            return value
        if column not in table.missing:
            return _gap(column, table)
        return table.scale[column][0]
    middle, half_width = table.scale.get(column, (0.0, 1.0))
    return value if abs((value - middle) / half_width) <= LARGEST else "infinite"


def _gap(column: str, table: Table) -> str:
    return "no target" if column == table.target else "gaps"


def word_of(cell: Any) -> str:
    """A cell as a word: without blanks around it; a whole number without decimals."""
    if isinstance(cell, float | np.floating) and cell == np.floor(cell) and np.isfinite(cell):
        return str(int(cell))
    return str(cell).strip()


def _number(cell: Any, decimal: str) -> float | str:
    if isinstance(cell, str):
        cell = cell.strip()
        if decimal == "comma":
            if "." in cell and (
                _COMMAS.fullmatch(cell) or isinstance(_number(cell, "point"), float)
            ):
                return "points"
            cell = cell.replace(",", ".")
        if "_" in cell:  # which Python takes for a separator
            return _kind(cell)
    elif isinstance(cell, datetime.date | np.datetime64):  # no text that could be read otherwise
        return _date(cell, "")
    try:
        value = float(cell)
    except (TypeError, ValueError, OverflowError):
        return _kind(cell)
    if math.isfinite(value):
        return value
    return "infinite" if math.isinf(value) else "no numbers"


def _kind(cell: Any) -> str:
    """What a cell is, which is no number."""
    if not isinstance(cell, str):
        return "no numbers"
    if _DATE.fullmatch(cell):
        return "dates"
    return "commas" if _COMMAS.fullmatch(cell) else "words"


def _date(cell: Any, written: str) -> float | str:
    if isinstance(cell, np.datetime64):
        cell = cell.astype("datetime64[us]").item()
    if isinstance(cell, str):
        try:
            cell = datetime.datetime.strptime(cell.strip(), written)
        except ValueError:
            return "undated"
    if not isinstance(cell, datetime.date) or is_missing(cell):
        return "undated"
    if not isinstance(cell, datetime.datetime):
        cell = datetime.datetime(cell.year, cell.month, cell.day)
    if cell.tzinfo is not None:
        cell = cell.astimezone(datetime.UTC).replace(tzinfo=None)
    return (cell - _EPOCH) / _YEAR


def inputs_of(table: Table, cells: np.ndarray) -> np.ndarray:
    """``x`` float32 [n, numbers] of what ``read_cell`` made of the inputs, [n, inputs]."""
    parts = []
    for column, name in enumerate(table.inputs):
        if (words := table.categories.get(name)) is not None:
            parts.append(cells[:, column, None] == np.arange(len(words)))
        else:
            parts.append(scaled(table, cells[:, column, None], name))
    return np.concatenate(parts, axis=1).astype(np.float32)


def scaled(table: Table, values: np.ndarray, column: str) -> np.ndarray:
    """Values of a column brought to order 1."""
    middle, half_width = table.scale.get(column, (0.0, 1.0))
    return (values - middle) / half_width


def read_inputs(table: Table, rows: Iterable[LocatedRow]) -> np.ndarray:
    """``x`` float32 [n, numbers] of rows that need have no target.

    Raises:
      BadInputError: one sentence on all that is wrong.
    """
    found, wrong = [], Wrong(remedies=False)
    for where, row in rows:
        if absent := [name for name in table.inputs if name not in row]:
            raise BadInputError(
                f"{where}: there is no column {absent[0]!r}, which the model was trained on: it "
                f"takes {list(table.inputs)}"
            )
        found.append(read_row(row, table.inputs, table, where, wrong))
    if wrong:
        raise wrong.error()
    return inputs_of(table, np.array(found, np.float64).reshape(len(found), len(table.inputs)))


def read_row(
    row: Mapping[str, Any], columns: Sequence[str], table: Table, where: str, wrong: Wrong
) -> list[float]:
    """Cells of a row as numbers, NaN where ``wrong`` was told of one."""
    numbers = []
    for name in columns:
        value = read_cell(row[name], name, table)
        if isinstance(value, str):
            wrong.add(value, name, where)
            value = math.nan
        numbers.append(value)
    return numbers
