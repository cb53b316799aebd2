"""``dpfl predict``: what a run's model says of new rows."""

from __future__ import annotations

import argparse
import pathlib
import tempfile
from typing import Any

from dpfl_jax.cli.data import csv_format
from dpfl_jax.cli.main import add_json_flag
from dpfl_jax.errors import BadInputError, imported

DESCRIPTION = """\
Predict for new rows: with the model of a finished run, or of what `dpfl export` wrote.

The columns that the model was trained on are found by name, read and scaled as they were in
training, and checked; the target need not be there. Written are the rows as they came, with
`prediction` and, for classes, `probability_NAME` of each. A model of arrays (images, say) takes an
array, x.npy. Predictions follow from the model: the guarantee of the run covers them, but it covers
nobody whose row is predicted for.

examples:
  dpfl predict runs/visits new.csv --out predicted.csv
  dpfl predict exported new.parquet --out predicted.parquet
  dpfl predict exported new.csv --delimiter ';' --encoding cp1252 --out predicted.csv
  dpfl predict runs/digits x.npy --out predicted.csv
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("run", metavar="RUN", help="run directory, finished, or an export's")
    parser.add_argument("rows", metavar="FILE", help=".csv, .tsv, .parquet, .arrow, .jsonl, .npy")
    parser.add_argument("--out", required=True, metavar="FILE", help=".csv or .parquet, a new one")
    parser.add_argument("--delimiter", help="between cells of CSV files, --out too (default: ,)")
    parser.add_argument("--encoding", help="of CSV files (default: UTF-8)")
    parser.add_argument(
        "--which", choices=["last", "best"], default="last", help="checkpoint, as of `dpfl export`"
    )
    parser.add_argument(
        "--module",
        metavar="PACKAGE.MODULE:BUILD",
        help="the function of model.module, where that built the model; it is imported",
    )
    add_json_flag(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Reads, predicts, writes."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    from dpfl_jax.run.console import Console

    source, out = pathlib.Path(args.rows), pathlib.Path(args.out)
    if out.exists() or out.suffix not in (".csv", ".parquet"):
        raise BadInputError(f"--out is {out}: give a new file, .csv or .parquet")
    build = None if args.module is None else imported(args.module, "--module")
    model = _load(pathlib.Path(args.run), args.which, build)
    if source.suffix == ".npy":
        try:
            given = np.load(source, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise BadInputError(f"{source} cannot be read as an array: {error}") from None
        columns: dict[str, Any] = {}
    else:
        given = _rows(source, args)
        columns = {name: [row.get(name) for row in given] for name in dict.fromkeys(given[0])}
    found = model.predict(given)
    if both := sorted({*columns} & {*found}):
        raise BadInputError(f"{source} has a column {both[0]!r} of its own: rename it")
    try:
        table = pa.table({**columns, **found})
        if out.suffix == ".csv":
            form = pa.csv.WriteOptions(delimiter=args.delimiter or ",")
            pa.csv.write_csv(table, out, form)
        else:
            pa.parquet.write_table(table, out)
    except (OSError, pa.ArrowException) as error:
        raise BadInputError(f"{out} cannot be written: {error}") from error
    console = Console(stderr=args.json)
    console.print(f"{len(given)} rows with {', '.join(found)} written to {out}", markup=False)
    console.print(model.guarantee.summary(), highlight=False, markup=False)
    return {"out": str(out), "rows": len(given), "columns": list(found)}


def _rows(source: pathlib.Path, args: argparse.Namespace) -> list[Any]:
    from dpfl_jax.data.documents import expand_paths, read_file_rows
    from dpfl_jax.data.rows import guess_format

    (path,) = expand_paths(str(source))
    form = csv_format(args)
    return [row for _, row in read_file_rows([path], guess_format(path), csv=form)]


def _load(folder: pathlib.Path, which: Any, build: Any) -> Any:
    """The model; that of a run is exported for the moment, which checks the run."""
    from dpfl_jax.config import RunConfig
    from dpfl_jax.training.export import export
    from dpfl_jax.training.exported import load_exported
    from dpfl_jax.training.trained import read_run

    if not (folder / "config.yaml").exists():
        return load_exported(folder, like=build)
    kept = read_run(folder, which)
    if isinstance(kept.config, RunConfig) and kept.config.model.is_transformer:
        raise BadInputError(
            f"the run in {folder} trained a language model, which goes on with a prompt: "
            f"dpfl sample {folder}"
        )
    with tempfile.TemporaryDirectory() as place:
        export(folder, place, which=which, build=build)
        return load_exported(place, like=build)
