"""Tables of numbers: rows of CSV, TSV, Parquet, Arrow or JSONL files as inputs and a target."""

from __future__ import annotations

import collections
import fnmatch
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dpfl_jax.data.documents import expand_paths, read_file_rows
from dpfl_jax.data.keys import UserKey, value_to_id
from dpfl_jax.data.rows import BadRows, LocatedRow, no_column
from dpfl_jax.data.sections import SourceConfig
from dpfl_jax.errors import BadInputError, repeated
from dpfl_jax.task import Task

Users = dict[str, dict[str, np.ndarray]]
# Formats in which only the rows, which are people's own, say what columns there are.
_UNDECLARED = ("jsonl", "rows")
_LARGEST = float(np.finfo(np.float32).max)


def read_table(
    config: SourceConfig,
    keep: Sequence[str] = (),
    rows: Iterable[LocatedRow] | None = None,
    bad: BadRows | None = None,
) -> tuple[Users, Task]:
    """Reads the files of a configuration as a table.

    Statistics of the columns are information about people that no guarantee counts: numbers are
    scaled by what ``config.scale`` declares, or stay as they are.

    Args:
      config: ``source`` is the files' format; ``target_column`` is set.
      keep: further columns of numbers that examples carry, such as a budget; never inputs.
      rows: instead of files.
      bad: told of rows that hold what is no number, no class, or no user; default: they are errors.

    Returns:
      users: by user ``x`` float32 [n, inputs], ``label`` float32 or int32 [n], ``silo`` int32 [n]
        (place of the silo's name among all) if there is a silo column, and float64 [n] of ``keep``.
      task: what is learned.

    Raises:
      BadInputError: naming the file and the row.
    """
    target, silo = config.target_column, config.silo_column
    assert target is not None
    key = None if config.user_column is None else UserKey(config.user_column)
    ids = (key.columns or []) if key is not None else []
    others = [c for c in (target, silo, *keep) if c is not None]
    if repeated(others) is not None:
        raise BadInputError(f"one column has two uses: {others} (target, silo, budget)")
    if key is not None and key.columns is None and config.input_columns is None:
        raise BadInputError(
            f"what columns the function {config.user_column} reads is not known, and an id must be "
            "no input: name the inputs as data.input_columns"
        )
    bad = bad or BadRows()
    if rows is None:
        paths = expand_paths(config.path)
        rows = read_file_rows(paths, config.source, csv=config.csv, bad=bad)
    declared = config.source not in _UNDECLARED
    if not declared and (
        config.input_columns is None or any(map(_is_pattern, config.input_columns))
    ):
        raise BadInputError(
            "rows that are objects of their own declare no columns, so that the first person would "
            "choose those of all: name the inputs as data.input_columns, without * ? or ["
        )
    inputs: tuple[str, ...] | None = None
    users: dict[str, list[int]] = {}
    x: list[list[float]] = []
    more: dict[str, list[Any]] = {name: [] for name in others}
    there: set[str] = set()
    alike: collections.Counter[str] = collections.Counter()
    for where, row in rows:
        if inputs is None:
            named = list(row) if declared else list(config.input_columns or ())
            inputs = input_names(config.input_columns, named, [*others, *ids], where)
            there = set(row)
        if config.input_columns is None and set(row) != there:  # else one person chose for all
            raise BadInputError(
                f"{where}: the columns are {sorted(row)}, but those of the first row are "
                f"{sorted(there)}: name the inputs as data.input_columns"
            )
        try:
            if ids and not set(ids) & set(row):
                raise BadInputError(
                    f"{where}: there is no column {config.user_column!r}: set data.user_column to "
                    f"one of {sorted(row)}, or to null if every row is a person of its own"
                )
            numbers = [_number(row, name, where, config.scale) for name in inputs]
            cells: dict[str, Any] = {
                name: value_to_id(row.get(name), where)
                if name == silo
                else _number(row, name, where, config.scale)
                for name in others
            }
            if config.classes is not None:
                _check_class(cells[target], config.classes, where, target)
            owner = None if key is None else key(row, where)
        except BadInputError as error:
            bad(error)
            continue
        users.setdefault(owner or _own_name(row, alike), []).append(len(x))
        x.append(numbers)
        for name, cell in cells.items():
            more[name].append(cell)
    if not x or inputs is None:
        raise bad.none_left("the table has no rows")
    unknown = sorted({*config.scale} - {*inputs, target})
    if unknown:
        raise BadInputError(
            f"data.scale names {unknown}, but the inputs and the target are "
            f"{[*inputs, target]}: correct the name"
        )
    if config.classes is not None and target in config.scale:
        raise BadInputError(f"data.scale names {target!r}, whose values are classes: remove it")
    columns = {"x": _scaled(np.array(x), inputs, config.scale).astype(np.float32)}
    if config.classes is None:
        label = _scaled(np.array(more[target])[:, None], (target,), config.scale)[:, 0]
        columns["label"] = label.astype(np.float32)
    else:
        columns["label"] = np.array(more[target], np.int32)
    if silo is not None:
        columns["silo"] = _numbered(more[silo])
    columns |= {name: np.array(more[name], np.float64) for name in keep}
    task = Task(
        "regression" if config.classes is None else "classes",
        (len(inputs),),
        config.classes or 0,
        scaled=bool(config.scale),
    )
    return {u: {n: a[rows] for n, a in columns.items()} for u, rows in users.items()}, task


def read_coded(
    rows: Iterable[LocatedRow], columns: Mapping[str, Sequence[str] | None]
) -> Iterator[list[float]]:
    """Yields each row as numbers; words of a column count by their place in its list."""
    for where, row in rows:
        numbers = []
        for name, words in columns.items():
            if words is None:
                numbers.append(_number(row, name, where))
            elif row[name] in words:
                numbers.append(float(words.index(row[name])))
            else:
                raise BadInputError(f"{where}: {name} is {row[name]!r}, not one of {list(words)}")
        yield numbers


def _own_name(row: Mapping[str, Any], alike: collections.Counter[str]) -> str:
    """A name made of the row alone: where it stands depends on other rows, and so would they."""
    text = json.dumps([[name, str(row[name])] for name in sorted(row)])
    name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    alike[name] += 1
    return f"row {name}" + (f" #{alike[name]}" if alike[name] > 1 else "")


def _is_pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def input_names(
    patterns: Sequence[str] | None, columns: Sequence[str], used: Sequence[str], where: str
) -> tuple[str, ...]:
    """Columns that are inputs, in an order that does not depend on that of ``columns``.

    Args:
      patterns: names and shell patterns, in this order; those of a pattern in alphabetical order.
        None: all columns.
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
        exact = [pattern] if pattern in columns else []
        named = exact or sorted(fnmatch.filter(columns, pattern))
        if not named and patterns is not None:
            raise no_column(where, pattern, list(columns))
        found |= dict.fromkeys(name for name in named if name not in used)
    if not found:
        raise BadInputError(f"{where}: no column is left to learn from beside {list(used)}")
    return tuple(found)


def _number(
    row: Mapping[str, Any],
    name: str,
    where: str,
    scale: Mapping[str, tuple[float, float]] | None = None,
) -> float:
    """A cell; it and what ``scale`` makes of it are finite in float32."""
    if name not in row:
        raise no_column(where, name, sorted(row))
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise BadInputError(
            f"{where}: the column {name!r} holds {row[name]!r}, not a number: mend the row, or "
            "name the columns to use in data.input_columns (who holds a record: data.silo_column)"
        )
    middle, half_width = (scale or {}).get(name, (0.0, 1.0))
    if not abs((value - middle) / half_width) <= _LARGEST:
        raise BadInputError(
            f"{where}: the column {name!r} holds {row[name]!r}, which float32 cannot hold: mend "
            "the row, or declare its range in data.scale"
        )
    return value


def _check_class(value: float, classes: int, where: str, column: str) -> None:
    if not (value == int(value) and 0 <= value < classes):
        raise BadInputError(
            f"{where}: {column} is {value:g}, but the labels of data.classes={classes} are whole "
            f"numbers from 0 to {classes - 1}: without data.classes it is a number to predict"
        )


def _scaled(
    values: np.ndarray, names: Sequence[str], scale: Mapping[str, tuple[float, float]]
) -> np.ndarray:
    middle, width = np.array([scale.get(name, (0.0, 1.0)) for name in names]).T
    return (values - middle) / width


def _numbered(names: list[str]) -> np.ndarray:
    """Place of each name among all, numbers in their order, int32 [n]."""
    known = set(names)
    whole = all(name.isdecimal() for name in known)
    order = {n: i for i, n in enumerate(sorted(known, key=int if whole else str))}
    return np.array([order[name] for name in names], np.int32)
