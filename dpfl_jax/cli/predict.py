"""``dpfl predict``: predicts for new rows with the model of a run."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import pathlib
import tempfile
from typing import Annotated, Any, Literal

from dpfl_jax import buckets
from dpfl_jax.cli import options
from dpfl_jax.cli.data import csv_format
from dpfl_jax.cli.options import Flag
from dpfl_jax.errors import BadInputError, imported
from dpfl_jax.run.console import Console

DESCRIPTION = """\
Predict for new rows with the model of a finished run, or with one that `dpfl export` wrote.

The columns that the model was trained on are found by name, checked, and read and scaled as in
training; the target may be missing. The output has the rows as they are, with `prediction` and, for
classes, `probability_NAME` of each. A model of arrays (images, say) takes an array, x.npy.
Predictions follow from the model: the guarantee of the run covers them, but it covers nobody whose
row is predicted for.

With --held-out, FILE must be the file that the run was trained from, and only rows of people whom
it held out and evaluated are written: their scores are those of its report.

examples:
  dpfl predict runs/visits new.csv --out predicted.csv
  dpfl predict runs/visits visits.csv --held-out --out held_out.csv
  dpfl predict exported new.parquet --out predicted.parquet
  dpfl predict exported new.csv --delimiter ';' --encoding cp1252 --out predicted.csv
  dpfl predict runs/digits x.npy --out predicted.csv
"""


class Options(options.MayRunCode):
    """Predictions.

    Attributes:
      run: directory of a finished run, or of an export.
      rows: file with rows: .csv, .tsv, .parquet, .arrow, .jsonl, .npy.
      out: new file: .csv, .tsv or .parquet.
      held_out: only the rows that the run held out and evaluated.
      delimiter: between cells of CSV files, --out too (default: the run's; for an export ,).
      encoding: encoding of CSV files, --out too (default: the run's; for an export UTF-8).
      which: the last or the best checkpoint, as in `dpfl export`.
      module: the function of model.module, if it built the model; it is imported.
    """

    run: Annotated[str, Flag("RUN", is_positional=True, in_buckets=True)]
    rows: Annotated[str, Flag("FILE", is_positional=True)]
    out: Annotated[str, Flag("FILE")]
    held_out: bool = False
    delimiter: str | None = None
    encoding: str | None = None
    which: Literal["last", "best"] = "last"
    module: Annotated[str | None, Flag("PACKAGE.MODULE:BUILD")] = None


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Reads rows, predicts for them with the model of a run or export, and writes a file."""
    import numpy as np

    from dpfl_jax.data.rows import CsvFormat

    folder, source, out = buckets.folder(args.run), pathlib.Path(args.rows), pathlib.Path(args.out)
    if out.exists() or out.suffix not in (".csv", ".tsv", ".parquet"):
        raise BadInputError(f"--out is {out}: give a new file, .csv, .tsv or .parquet")
    build = None if args.module is None else imported(args.module, "--module")
    config, model = _load(folder, args.which, build)
    form = csv_format(args)
    if config is not None:
        data = config.data
        form = CsvFormat(form.delimiter or data.delimiter, form.encoding or data.encoding)
    if source.suffix == ".npy":
        if args.held_out:
            raise BadInputError(
                "--held-out is for tables: an array does not say whose its rows are"
            )
        try:
            given = np.load(source, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise BadInputError(f"{source} cannot be read as an array: {error}") from None
        columns: dict[str, Any] = {}
    else:
        given = _rows(source, form, config, args)
        columns = {name: [row.get(name) for row in given] for name in dict.fromkeys(given[0])}
    result = model.predict(given)
    if both := sorted({*columns} & {*result}):
        raise BadInputError(f"{source} already has a column {both[0]!r}: rename it")
    table = model.task.table if model.task is not None else None
    _write(out, {**columns, **result}, form, "point" if table is None else table.decimal)
    console = Console(stderr=args.json)
    console.print(f"{len(given)} rows with {', '.join(result)} written to {out}", markup=False)
    console.print(model.guarantee.summary(), highlight=False, markup=False)
    return {"out": str(out), "rows": len(given), "columns": list(result)}


def _rows(source: pathlib.Path, form: Any, config: Any, args: argparse.Namespace) -> list[Any]:
    from dpfl_jax.config.load import refuse_code_of_data
    from dpfl_jax.data.rows import expand_paths, guess_format, read_file_rows

    (path,) = expand_paths(str(source))
    rows = read_file_rows([path], guess_format(path), csv=form)
    if args.held_out:
        if config is not None and not args.allow_code:
            refuse_code_of_data(config, str(args.run))
        rows = _held_out(rows, source, form, config)
    result = [row for _, row in rows]
    if not result:
        raise BadInputError(
            f"{source} has no row of a person whom the run held out: give the run's file"
        )
    return result


def _held_out(rows: Any, source: pathlib.Path, form: Any, config: Any) -> Any:
    """The rows of a run's file that it evaluated."""
    from dpfl_jax.data import limit_store, load_dataset
    from dpfl_jax.data.owners import grouped_by_owner_set
    from dpfl_jax.data.table import read_table, user_key
    from dpfl_jax.federation.federated_run import read_subjects

    by_user = config is not None and config.variant != "isrl" and config.data.split == "by_user"
    if not by_user or config.data.records_per_user is not None:
        raise BadInputError(
            "--held-out is for runs (not exports) that hold out people with all their rows "
            "(data.split=by_user), not for ISRL and synthetic users"
        )
    here = {"path": str(source), "delimiter": form.delimiter, "encoding": form.encoding}
    config = config.model_copy(update={"data": dataclasses.replace(config.data, **here)})
    if config.variant == "central":
        store = getattr(load_dataset(config.data), config.eval.split)
    else:
        store = read_subjects(config).held_out
    if store is None:
        raise BadInputError("the run held out nobody: leave out --held-out")
    store = limit_store(
        grouped_by_owner_set(store), config.eval.max_users, config.eval.max_examples_per_user
    )
    left = dict(zip(store.user_ids(range(store.num_users)), store.examples_per_user.tolist()))
    key = user_key(config.data.user_column)
    for where, row in rows:
        if config.data.on_bad_row == "drop":
            try:
                read_table(config.data, rows=[(where, row)])
            except BadInputError:
                continue  # as the run did
        if left.get(owner := key(row, where), 0) > 0:
            left[owner] -= 1  # only the first rows of a person are evaluated
            yield where, row


def _write(out: pathlib.Path, columns: dict[str, Any], form: Any, decimal: str) -> None:
    """Writes in the format of the file that was read, so that the same programs read it."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet

    def cell(value: Any) -> Any:
        if isinstance(value, float) and decimal == "comma":
            return repr(value).replace(".", ",")
        return value

    try:
        if out.suffix == ".parquet":
            pa.parquet.write_table(pa.table(columns), out)
            return
        lists = [v.tolist() if isinstance(v, np.ndarray) else v for v in columns.values()]
        with out.open("x", newline="", encoding=form.encoding or "utf-8") as file:
            usual = "\t" if out.suffix == ".tsv" else ","
            writer = csv.writer(file, delimiter=form.delimiter or usual)
            writer.writerow(columns)
            writer.writerows(map(cell, row) for row in zip(*lists, strict=True))
    except (OSError, UnicodeError, csv.Error, pa.ArrowException) as error:
        if not isinstance(error, FileExistsError):
            out.unlink(missing_ok=True)  # a part of it
        raise BadInputError(f"{out} cannot be written: {error}") from error


def _load(folder: pathlib.Path, which: Any, build: Any) -> tuple[Any, Any]:
    """The configuration of a run (None for an export), and the model.

    The model of a run is exported to a temporary folder, which checks the run.
    """
    from dpfl_jax.training.export import export, read_run
    from dpfl_jax.training.exported import load_exported

    if not (folder / "config.yaml").exists():
        return None, load_exported(folder, like=build)
    config = read_run(folder, which).config
    if config is not None and config.variant == "central" and config.model.is_transformer:
        raise BadInputError(
            f"the run in {folder} trained a language model, which continues a prompt: "
            f"dpfl sample {folder}"
        )
    with tempfile.TemporaryDirectory() as place:
        export(folder, place, which=which, build=build)
        return config, load_exported(place, like=build)
