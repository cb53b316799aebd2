"""Reads tables: rows of CSV, TSV, Parquet, Arrow or JSONL files as inputs and a target.

No error quotes a cell, which is private. Categories, date formats and what a missing cell counts as
are declared and never taken from the rows: which words occur is information about people.
"""

from __future__ import annotations

import collections
import datetime
import fnmatch
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dpfl_jax.data.keys import UserKey, is_missing, value_to_id
from dpfl_jax.data.rows import BadRows, LocatedRow, expand_paths, no_column, read_file_rows
from dpfl_jax.data.sections import SourceConfig
from dpfl_jax.data.store import FAR, FAR_SHARE
from dpfl_jax.errors import BadInputError, repeated
from dpfl_jax.task import Table, Task

# ---- cells ---------------------------------------------------------------------------------------


LARGEST = float(np.finfo(np.float32).max)
# How pandas and R call the column of row numbers that they write.
_ROW_NUMBERS = re.compile(r"|Unnamed: \d+(\.\d+)*|__index_level_\d+__")
_DATE = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([T ]\d.*)?")
_COMMAS = re.compile(r"[+-]?[\d.' ]*\d,\d[\d,. ]*")
_EPOCH = datetime.datetime(2000, 1, 1)
_YEAR = datetime.timedelta(days=365.25)

# Kind of problem -> (sentence, remedy).
_PROBLEMS = {
    "words": (
        "words, not numbers, in {column}",
        "list those of each as data.categories={{{first}: [...]}}, in quotes, from what is known "
        "without these data (of the column that says who holds a record: data.silo_column)",
    ),
    "dates": ("dates in {column}", "say how they are written: data.dates={{{first}: '%Y-%m-%d'}}"),
    "commas": (
        "numbers with commas in {column}",
        "set data.decimal=comma if decimals begin there, or write thousands without commas",
    ),
    "points": (
        "numbers with points in {column}, with data.decimal=comma",
        "leave that setting out, or write thousands without points",
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
    "no numbers": ("cells that are not numbers in {column}", "mend the rows"),
    "counts": (
        "numbers of rows, from which nothing is learned, in {column}",
        "leave them out (if a column is elapsed time, declare its data.scale)",
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


class TableProblems:
    """The problems of a table, by kind and column, each with the place where it was first seen.

    Args:
      classes: number of classes of the target.
      remedies: whether the sentence says which settings would help.
    """

    def __init__(self, classes: int = 0, remedies: bool = True) -> None:
        self._seen: dict[str, dict[str, str]] = {}
        self._classes, self._remedies = classes, remedies

    def add(self, kind: str, column: str, where: str = "") -> None:
        """Notes a bad cell or column."""
        self._seen.setdefault(kind, {}).setdefault(column, where)

    def __bool__(self) -> bool:
        return bool(self._seen)

    def error(self) -> BadInputError:
        """One sentence if one column has a problem, else a line for each."""
        lines = []
        for kind, columns in self._seen.items():
            what, remedy = _PROBLEMS[kind]
            for column, where in columns.items():
                seen = f" (first: {where})" if where else ""
                sentence = what.format(column=repr(column), last=self._classes - 1)
                lines.append(f"- {sentence}{seen}")
            if self._remedies:
                lines.append(f"  {remedy.format(first=next(iter(columns)))}")
        end = "or name the columns to learn from as data.input_columns"
        if not self._remedies:
            end = "mend the rows, whose columns are read as they were in training"
        if sum(map(len, self._seen.values())) == 1:
            sentence = ": ".join(line.lstrip("- ") for line in lines)
            return BadInputError(f"the table has {sentence}; {end}")
        return BadInputError("\n".join(["the table has", *lines, end]))


def input_names(
    patterns: Sequence[str] | None, columns: Sequence[str], used: Sequence[str], where: str
) -> tuple[str, ...]:
    """Columns that are inputs, in the order of ``patterns`` (names and shell patterns; None: all).

    ``columns`` are those that the file declares; ``used`` ones and pandas' row numbers are not
    inputs.

    Raises:
      BadInputError: a pattern matches nothing or is ``used``, or no column is left.
    """
    inputs: dict[str, None] = {}
    for pattern in ("*",) if patterns is None else patterns:
        if pattern in used:
            raise BadInputError(
                f"data.input_columns names {pattern!r}, which is the target, an id, a silo or a "
                "budget, and so cannot be an input: remove it"
            )
        named = [pattern] if pattern in columns else _matching(pattern, columns)
        if not named and patterns is not None:
            raise no_column(where, pattern, list(columns))
        inputs |= dict.fromkeys(name for name in named if name not in used)
    if not inputs:
        raise BadInputError(f"{where}: no column is left to learn from besides {list(used)}")
    return tuple(inputs)


def _matching(pattern: str, columns: Iterable[str]) -> list[str]:
    return [c for c in columns if fnmatch.fnmatchcase(c, pattern) and not _ROW_NUMBERS.fullmatch(c)]


def missing_inputs(patterns: Sequence[str], inputs: Sequence[str]) -> tuple[str, ...]:
    """The inputs that ``data.missing`` names.

    Raises:
      BadInputError: a pattern matches none.
    """
    matched: dict[str, None] = {}
    for pattern in patterns:
        named = [pattern] if pattern in inputs else _matching(pattern, inputs)
        if not named:
            raise BadInputError(
                f"data.missing names {pattern!r}, but the inputs are {list(inputs)}: correct the "
                "name"
            )
        matched |= dict.fromkeys(named)
    return tuple(matched)


def read_cell(cell: Any, column: str, table: Table) -> float | str:
    """Returns a cell as a number (a category as its index, -1: none), or the kind of problem."""
    if (words := table.categories.get(column)) is not None:
        if (text := as_category(cell)) in words:
            return float(words.index(text))
        if not is_missing(cell):
            return "unlisted"
        if "" in words:
            return float(words.index(""))
        return -1.0 if column in table.missing else _missing_kind(column, table)
    if column in table.dates:
        value = _date(cell, table.dates[column])
    else:
        value = read_number(cell, table.decimal)
    if isinstance(value, str):
        if not is_missing(cell):
            return value
        if column not in table.missing:
            return _missing_kind(column, table)
        return table.scale[column][0]
    middle, half_width = table.scale.get(column, (0.0, 1.0))
    return value if abs((value - middle) / half_width) <= LARGEST else "infinite"


def _missing_kind(column: str, table: Table) -> str:
    return "no target" if column == table.target else "gaps"


def as_category(cell: Any) -> str:
    """A cell as a category: stripped; a whole number without decimals."""
    if isinstance(cell, float | np.floating) and cell == np.floor(cell) and np.isfinite(cell):
        return str(int(cell))
    return str(cell).strip()


def read_number(cell: Any, decimal: str) -> float | str:
    """Returns a cell as a number, or the kind of problem."""
    if isinstance(cell, str):
        cell = cell.strip()
        if decimal == "comma":
            if "." in cell and (
                _COMMAS.fullmatch(cell) or isinstance(read_number(cell, "point"), float)
            ):
                return "points"
            cell = cell.replace(",", ".")
        if "_" in cell:  # Python reads it as a separator
            return _why_no_number(cell)
    elif isinstance(cell, datetime.date | np.datetime64):
        return _date(cell, "")
    try:
        value = float(cell)
    except (TypeError, ValueError, OverflowError):
        return _why_no_number(cell)
    if math.isfinite(value):
        return value
    return "infinite" if math.isinf(value) else "no numbers"


def _why_no_number(cell: Any) -> str:
    """The kind of problem of a cell that is not a number."""
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


def input_array(table: Table, cells: np.ndarray) -> np.ndarray:
    """Makes ``x`` float32 [n, numbers] of cells [n, inputs] that ``read_cell`` read."""
    parts = []
    for column, name in enumerate(table.inputs):
        if (words := table.categories.get(name)) is not None:
            parts.append(cells[:, column, None] == np.arange(len(words)))
        else:
            parts.append(scaled(table, cells[:, column, None], name))
    return np.concatenate(parts, axis=1).astype(np.float32)


def scaled(table: Table, values: np.ndarray, column: str) -> np.ndarray:
    """Values of a column, scaled to order 1."""
    middle, half_width = table.scale.get(column, (0.0, 1.0))
    return (values - middle) / half_width


def read_inputs(table: Table, rows: Iterable[LocatedRow]) -> np.ndarray:
    """Reads ``x`` float32 [n, numbers] of rows that need no target.

    Raises:
      BadInputError: it lists all that is wrong.
    """
    values, problems = [], TableProblems(remedies=False)
    for where, row in rows:
        if absent := [name for name in table.inputs if name not in row]:
            raise BadInputError(
                f"{where}: there is no column {absent[0]!r}, which the model was trained on: it "
                f"takes {list(table.inputs)}"
            )
        values.append(read_row(row, table.inputs, table, where, problems))
    if problems:
        raise problems.error()
    return input_array(table, np.array(values, np.float64).reshape(len(values), len(table.inputs)))


def read_row(
    row: Mapping[str, Any],
    columns: Sequence[str],
    table: Table,
    where: str,
    problems: TableProblems,
) -> list[float]:
    """The cells of a row as numbers; a bad cell becomes NaN and is noted in ``problems``."""
    numbers = []
    for name in columns:
        value = read_cell(row[name], name, table)
        if isinstance(value, str):
            problems.add(value, name, where)
            value = math.nan
        numbers.append(value)
    return numbers


# ---- tables --------------------------------------------------------------------------------------


Users = dict[str, dict[str, np.ndarray]]
# Formats without a header: only the rows, which are private, name columns.
_UNDECLARED = ("jsonl", "rows")


def read_table(
    config: SourceConfig,
    keep: Sequence[str] = (),
    rows: Iterable[LocatedRow] | None = None,
    bad: BadRows | None = None,
) -> tuple[Users, Task]:
    """Reads the files of a configuration as a table.

    Statistics of the columns are information about people that no guarantee counts: columns are
    scaled by what ``config.scale`` declares, and refused if they would need it and it is missing.

    Args:
      config: ``source`` is the files' format; ``target_column`` is set.
      keep: further columns of numbers that examples carry, such as a budget; never inputs.
      rows: rows to read instead of files.
      bad: takes rows with a bad number, class or user; default: they are errors.

    Returns:
      users: by user ``x`` float32 [n, numbers], ``label`` float32 or int32 [n], ``silo`` int32 [n]
        (index of the silo's name among all) if there is a silo column, and float64 [n] of ``keep``.
      task: what is learned.

    Raises:
      BadInputError: naming the file, the row and the columns.
    """
    target, silo = config.target_column, config.silo_column
    assert target is not None
    key = user_key(config.user_column)
    ids = key.columns if isinstance(key, UserKey) else []
    others = [c for c in (target, silo, *keep) if c is not None]
    if repeated(others) is not None:
        raise BadInputError(f"one column has two uses: {others} (target, silo, budget)")
    if ids is None and config.input_columns is None:
        raise BadInputError(
            f"it is unknown which columns the function {config.user_column} reads, and an id must "
            "not be an input: name the inputs as data.input_columns"
        )
    ids, bad = ids or [], bad or BadRows()
    if rows is None:
        paths = expand_paths(config.path)
        rows = read_file_rows(paths, config.source, csv=config.csv, bad=bad)
    declared = config.source not in _UNDECLARED
    patterns = config.input_columns
    header_decides = patterns is None or any(set(name) & set("*?[") for name in patterns)
    if not declared and header_decides:
        raise BadInputError(
            "JSON lines and dictionaries have no header, so that the first person's row would "
            "choose the inputs for all: name them as data.input_columns, without * ? or ["
        )
    table: Table | None = None
    header: list[str] = []
    numbers: list[str] = []
    problems, no_id, classes = TableProblems(), None, 0
    users: dict[str, list[int]] = {}
    cells: list[list[float]] = []
    silos: list[str] = []
    for where, row in rows:
        if table is None:
            header = list(row)
            named = header if declared else list(config.input_columns or ())
            table = declared_table(
                config, input_names(config.input_columns, named, [*others, *ids], where)
            )
            classes = num_classes(config, table)
            numbers = [*table.inputs, target, *keep]
            problems = TableProblems(classes)
        if header_decides and list(row) != header:  # one row must not choose for all
            raise BadInputError(_other_header(where, list(row), header))
        of_row = TableProblems(classes) if bad.drops else problems
        try:
            if ids and not set(ids) & set(row):
                raise BadInputError(
                    f"{where}: there is no column {config.user_column!r}: set data.user_column to "
                    f"one of {sorted(row)}, or to null if every row is another person"
                )
            for name in (*numbers, silo):
                if name is not None and name not in row:
                    raise no_column(where, name, list(row))
            values = read_row(row, numbers, table, where, of_row)
            label = values[len(table.inputs)]
            if classes and not (label == label // 1 and 0 <= label < classes) and label == label:
                of_row.add("classes", target, where)
            if bad.drops and of_row:
                raise of_row.error()
            home = "" if silo is None else value_to_id(row[silo], f"{where}, silo")
            owner = key(row, where)
        except BadInputError as error:
            if not bad.drops and problems:
                no_id = no_id or error
                continue
            bad(error)
            continue
        users.setdefault(owner, []).append(len(cells))
        cells.append(values)
        silos.append(home)
    if table is None or not (cells or problems):
        raise bad.none_left("the table has no rows")
    matrix = np.array(cells, np.float64).reshape(len(cells), len(numbers))
    _check_sizes(config, table, matrix, problems)
    if problems:
        raise problems.error() if no_id is None else BadInputError(f"{problems.error()}; {no_id}")
    last = len(table.inputs)
    columns = {"x": input_array(table, matrix[:, :last])}
    if classes:
        columns["label"] = matrix[:, last].astype(np.int32)
    else:
        columns["label"] = scaled(table, matrix[:, last], target).astype(np.float32)
    if silo is not None:
        columns["silo"] = _indices(silos)
    columns |= {name: matrix[:, last + 1 + i] for i, name in enumerate(keep)}
    task = Task(
        "classes" if classes else "regression",
        columns["x"].shape[1:],
        classes,
        scaled=bool(table.scale),
        table=table,
    )
    return {u: {n: a[rows] for n, a in columns.items()} for u, rows in users.items()}, task


def declared_table(config: SourceConfig, inputs: tuple[str, ...]) -> Table:
    """Makes the ``Table`` that a configuration declares, with these inputs.

    Raises:
      BadInputError: it names unknown columns, or its settings contradict each other.
    """
    target = config.target_column or ""
    words = {name: tuple(map(as_category, given)) for name, given in config.categories.items()}
    table = Table(
        inputs,
        target,
        {name: (float(a), float(b)) for name, (a, b) in config.scale.items()},
        words,
        missing_inputs(config.missing, inputs),
        dict(config.dates),
        config.decimal,
    )
    for setting in ("scale", "categories", "dates"):
        if unknown := sorted({*getattr(table, setting)} - {*inputs, target}):
            raise BadInputError(
                f"data.{setting} names {unknown}, but the inputs and the target are "
                f"{[*inputs, target]}: correct the name"
            )
    for name, listed in words.items():
        if len(listed) < 2 or repeated(listed) is not None:
            raise BadInputError(
                f"data.categories of {name!r} lists {list(listed)}: it must be two words or more, "
                "each of them once"
            )
    for setting in ("scale", "dates"):
        if both := sorted({*getattr(table, setting)} & {*words}):
            raise BadInputError(
                f"data.{setting} names {both[0]!r}, whose values are words of data.categories: "
                "remove it"
            )
    if num_classes(config, table) and target in table.scale:
        raise BadInputError(f"data.scale names {target!r}, whose values are classes: remove it")
    for name in table.missing:
        if name not in words and name not in table.scale:
            raise BadInputError(
                f"data.missing names {name!r}: an empty cell counts as the middle of the column, "
                f"so declare data.scale={{{name}: [middle, half width]}}"
            )
    return table


def num_classes(config: SourceConfig, table: Table) -> int:
    """The number of classes of the target; 0 if it is a number.

    Raises:
      BadInputError: two settings contradict each other.
    """
    names = len(table.categories.get(table.target, ()))
    if names and config.classes not in (None, names):
        raise BadInputError(
            f"data.classes is {config.classes}, but data.categories lists {names} words of the "
            f"target {table.target!r}: remove data.classes"
        )
    return names or config.classes or 0


def _check_sizes(
    config: SourceConfig, table: Table, cells: np.ndarray, problems: TableProblems
) -> None:
    """Notes columns whose numbers are too large for private training.

    The data never choose a scale: the run stops, and the user declares one.
    """
    public = config.public_fraction is not None and not table.scale  # public records set the scale
    for column, name in enumerate([*table.inputs, table.target]):
        known = cells[:, column][np.isfinite(cells[:, column])]
        if name in table.categories or not len(known):
            continue
        middle, half = table.scale.get(name, (0.0, 1.0))
        large = np.count_nonzero(np.abs(known - middle) > FAR * half)
        if name in table.scale:
            if (middle, half) != (0.0, 1.0) and large > max(1, FAR_SHARE * len(known)):
                problems.add("outside", name)
            continue
        if name == table.target:
            if config.classes:
                continue
            values = set(np.unique(known).tolist())
            two = len(values) == 2 and values <= {-1.0, 0.0, 1.0, 2.0}
            if config.classes is None and len(known) > 9 and two:
                problems.add("two values", name)
        elif _counts(known):
            problems.add("counts", name)
            continue
        if not public and large > max(1, FAR_SHARE * len(known)):
            problems.add("far", name)


def _counts(values: np.ndarray) -> bool:
    """Whether a column numbers the rows; some may be missing, and each file may begin anew."""
    steps = np.diff(values)
    return len(values) > 19 and (steps == 1).mean() > 0.9 and values.max() >= len(values) / 2


def _other_header(where: str, names: list[str], header: list[str]) -> str:
    if sorted(names) == sorted(header):
        return (
            f"{where}: the columns have another order than in the first file: name the inputs as "
            "data.input_columns"
        )
    return (
        f"{where}: the columns are {names}, but those of the first row are {header}: name the "
        "inputs as data.input_columns"
    )


def user_key(user_column: str | None) -> Callable[[Mapping[str, Any], str], str]:
    """Returns ``(row, where) -> user``, to be called with all rows in order.

    Args:
      user_column: as in ``SourceConfig``. None: every row is a user, named by its content, as its
        position depends on other people's rows.
    """
    if user_column is not None:
        return UserKey(user_column)
    copies: collections.Counter[str] = collections.Counter()

    def content_name(row: Mapping[str, Any], where: str) -> str:
        text = json.dumps([[name, str(row[name])] for name in sorted(row)])
        name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        copies[name] += 1
        return f"row {name}" + (f" #{copies[name]}" if copies[name] > 1 else "")

    return content_name


def _indices(names: list[str]) -> np.ndarray:
    """Index of each name among all sorted names (numbers by value), int32 [n]."""
    known = set(names)
    all_numbers = all(name.isdecimal() for name in known)
    order = {n: i for i, n in enumerate(sorted(known, key=int if all_numbers else str))}
    return np.array([order[name] for name in names], np.int32)
