"""Tables: rows of CSV, TSV, Parquet, Arrow or JSONL files as inputs and a target."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dpfl_jax.data.columns import (
    Wrong,
    input_names,
    inputs_of,
    is_pattern,
    missing_in,
    read_row,
    scaled,
    word_of,
)
from dpfl_jax.data.documents import expand_paths, read_file_rows
from dpfl_jax.data.keys import UserKey, value_to_id
from dpfl_jax.data.rows import BadRows, LocatedRow, no_column
from dpfl_jax.data.sections import SourceConfig
from dpfl_jax.errors import BadInputError, repeated
from dpfl_jax.task import Table, Task

Users = dict[str, dict[str, np.ndarray]]
# Formats in which only the rows, which are people's own, say what columns there are.
_UNDECLARED = ("jsonl", "rows")
# Numbers are far from order 1 where more than this share of them, and of two or more, is larger.
_FAR, _SHARE = 10.0, 0.01


def read_table(
    config: SourceConfig,
    keep: Sequence[str] = (),
    rows: Iterable[LocatedRow] | None = None,
    bad: BadRows | None = None,
) -> tuple[Users, Task]:
    """Reads the files of a configuration as a table.

    Statistics of the columns are information about people that no guarantee counts: numbers are
    scaled by what ``config.scale`` declares, and columns that would need it are refused without.

    Args:
      config: ``source`` is the files' format; ``target_column`` is set.
      keep: further columns of numbers that examples carry, such as a budget; never inputs.
      rows: instead of files.
      bad: told of rows that hold what is no number, no class, or no user; default: they are errors,
        all of them in one sentence.

    Returns:
      users: by user ``x`` float32 [n, numbers], ``label`` float32 or int32 [n], ``silo`` int32 [n]
        (place of the silo's name among all) if there is a silo column, and float64 [n] of ``keep``.
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
            f"what columns the function {config.user_column} reads is not known, and an id must be "
            "no input: name the inputs as data.input_columns"
        )
    ids, bad = ids or [], bad or BadRows()
    if rows is None:
        paths = expand_paths(config.path)
        rows = read_file_rows(paths, config.source, csv=config.csv, bad=bad)
    declared = config.source not in _UNDECLARED
    found_in_header = config.input_columns is None or any(map(is_pattern, config.input_columns))
    if not declared and found_in_header:
        raise BadInputError(
            "rows that are objects of their own declare no columns, so that the first person would "
            "choose those of all: name the inputs as data.input_columns, without * ? or ["
        )
    table: Table | None = None
    header: list[str] = []
    numbers: list[str] = []
    wrong, no_id, classes = Wrong(), None, 0
    users: dict[str, list[int]] = {}
    cells: list[list[float]] = []
    silos: list[str] = []
    for where, row in rows:
        if table is None:
            header = list(row)
            named = header if declared else list(config.input_columns or ())
            table = table_of(
                config, input_names(config.input_columns, named, [*others, *ids], where)
            )
            classes = classes_of(config, table)
            numbers = [*table.inputs, target, *keep]
            wrong = Wrong(classes)
        if found_in_header and list(row) != header:  # else one person chose for all
            raise BadInputError(_other_header(where, list(row), header))
        mine = Wrong(classes) if bad.drops else wrong
        try:
            if ids and not set(ids) & set(row):
                raise BadInputError(
                    f"{where}: there is no column {config.user_column!r}: set data.user_column to "
                    f"one of {sorted(row)}, or to null if every row is a person of its own"
                )
            for name in (*numbers, silo):
                if name is not None and name not in row:
                    raise no_column(where, name, list(row))
            values = read_row(row, numbers, table, where, mine)
            label = values[len(table.inputs)]
            if classes and not (label == label // 1 and 0 <= label < classes) and label == label:
                mine.add("classes", target, where)
            if bad.drops and mine:
                raise mine.error()
            home = "" if silo is None else value_to_id(row[silo], f"{where}, silo")
            owner = key(row, where)
        except BadInputError as error:
            if not bad.drops and wrong:
                no_id = no_id or error
                continue
            bad(error)
            continue
        users.setdefault(owner, []).append(len(cells))
        cells.append(values)
        silos.append(home)
    if table is None or not (cells or wrong):
        raise bad.none_left("the table has no rows")
    whole = np.array(cells, np.float64).reshape(len(cells), len(numbers))
    _check_sizes(config, table, whole, wrong)
    if wrong:
        raise wrong.error() if no_id is None else BadInputError(f"{wrong.error()}; {no_id}")
    last = len(table.inputs)
    columns = {"x": inputs_of(table, whole[:, :last])}
    if classes:
        columns["label"] = whole[:, last].astype(np.int32)
    else:
        columns["label"] = scaled(table, whole[:, last], target).astype(np.float32)
    if silo is not None:
        columns["silo"] = _numbered(silos)
    columns |= {name: whole[:, last + 1 + i] for i, name in enumerate(keep)}
    task = Task(
        "classes" if classes else "regression",
        columns["x"].shape[1:],
        classes,
        scaled=bool(table.scale),
        table=table,
    )
    return {u: {n: a[rows] for n, a in columns.items()} for u, rows in users.items()}, task


def table_of(config: SourceConfig, inputs: tuple[str, ...]) -> Table:
    """What a configuration declares of a table with these inputs.

    Raises:
      BadInputError: it names other columns, or declares what does not go together.
    """
    target = config.target_column or ""
    words = {name: tuple(map(word_of, given)) for name, given in config.categories.items()}
    table = Table(
        inputs,
        target,
        {name: (float(a), float(b)) for name, (a, b) in config.scale.items()},
        words,
        missing_in(config.missing, inputs),
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
    if classes_of(config, table) and target in table.scale:
        raise BadInputError(f"data.scale names {target!r}, whose values are classes: remove it")
    for name in table.missing:
        if name not in words and name not in table.scale:
            raise BadInputError(
                f"data.missing names {name!r}: an empty cell counts as the middle of the column, "
                f"so declare data.scale={{{name}: [middle, half width]}}"
            )
    return table


def classes_of(config: SourceConfig, table: Table) -> int:
    """How many classes the target has; 0 if it is a number.

    Raises:
      BadInputError: two settings say different numbers.
    """
    names = len(table.categories.get(table.target, ()))
    if names and config.classes not in (None, names):
        raise BadInputError(
            f"data.classes is {config.classes}, but data.categories lists {names} words of the "
            f"target {table.target!r}: remove data.classes"
        )
    return names or config.classes or 0


def _check_sizes(config: SourceConfig, table: Table, cells: np.ndarray, wrong: Wrong) -> None:
    """Tells ``wrong`` of columns that no private training gets far with as they are.

    Nothing is chosen by what is found: the run stops, and whoever starts it declares something.
    """
    public = config.public_fraction is not None and not table.scale  # whose records set the scale
    for column, name in enumerate([*table.inputs, table.target]):
        known = cells[:, column][np.isfinite(cells[:, column])]
        if name in table.categories or not len(known):
            continue
        middle, half = table.scale.get(name, (0.0, 1.0))
        large = np.count_nonzero(np.abs(known - middle) > _FAR * half)
        if name in table.scale:
            if (middle, half) != (0.0, 1.0) and large > max(1, _SHARE * len(known)):
                wrong.add("outside", name)
            continue
        if name == table.target:
            if config.classes:
                continue
            if config.classes is None and len(known) > 9 and _two_values(known):
                wrong.add("two values", name)
        elif _counts(known):
            wrong.add("counts", name)
            continue
        if not public and large > max(1, _SHARE * len(known)):
            wrong.add("far", name)


def _two_values(values: np.ndarray) -> bool:
    return len(np.unique(values)) == 2 and bool(np.isin(values, (-1.0, 0.0, 1.0, 2.0)).all())


def _counts(values: np.ndarray) -> bool:
    """Whether a column numbers the rows; some may be left out, and a file may begin anew."""
    steps = np.diff(values)
    return len(values) > 19 and (steps == 1).mean() > 0.9 and values.max() >= len(values) / 2


def _other_header(where: str, names: list[str], header: list[str]) -> str:
    if sorted(names) == sorted(header):
        return (
            f"{where}: the columns stand in another order than in the first file: name the inputs "
            "as data.input_columns"
        )
    return (
        f"{where}: the columns are {names}, but those of the first row are {header}: name the "
        "inputs as data.input_columns"
    )


def user_key(user_column: str | None) -> Callable[[Mapping[str, Any], str], str]:
    """Returns ``(row, where) -> user``, to be called with all rows in their order.

    Args:
      user_column: as of ``SourceConfig``. None: a row is named by what it holds; where it stands
        depends on other rows, and so would they.
    """
    if user_column is not None:
        return UserKey(user_column)
    alike: collections.Counter[str] = collections.Counter()

    def own_name(row: Mapping[str, Any], where: str) -> str:
        text = json.dumps([[name, str(row[name])] for name in sorted(row)])
        name = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        alike[name] += 1
        return f"row {name}" + (f" #{alike[name]}" if alike[name] > 1 else "")

    return own_name


def _numbered(names: list[str]) -> np.ndarray:
    """Place of each name among all, numbers in their order, int32 [n]."""
    known = set(names)
    whole = all(name.isdecimal() for name in known)
    order = {n: i for i, n in enumerate(sorted(known, key=int if whole else str))}
    return np.array([order[name] for name in names], np.int32)
