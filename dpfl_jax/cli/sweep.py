"""``dpfl sweep``: one run per cell of a grid."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import yaml

from dpfl_jax.cli.main import add_json_flag
from dpfl_jax.errors import BadInputError

HELP = "run a grid of configurations and tabulate the best"
DESCRIPTION = """\
Run one training per cell of a grid: compute budget, epsilon, group and cohort size, clip norm,
learning rate, or any other key of the configuration. Every finished cell is kept, so that the same
command goes on after an interruption; `--rank R --of N` takes every N-th cell, for array jobs that
share the folder. At the end: table.parquet, table.jsonl, best.jsonl and sweep.png in the folder,
made of whatever cells are finished (`--collect` only makes these).

Axes: kind, budget, epsilon, group_size, cohort_size, clip_norm, learning_rate, steps, or
section.key. With `--tune AXIS` the best value of that axis is taken at every combination of the
others; `--repeats` runs each cell several times and adds 90 % intervals of the mean. Every run has
a secret key of its own; `--grid seed=0,1,2` makes the noise public instead, which the tables then
say. The same can be written in the configuration:

  sweep: {grid: {epsilon: [1, 8], learning_rate: [0.001, 0.01]}, tune: [learning_rate], repeats: 3}

Choosing by held-out loss over many private runs is not itself covered by any one run's guarantee:
sweep on public data, or account for all runs: with privacy.ledger every cell is charged to the one
account, and the first that would exceed privacy.budget is refused (what is finished stays).

examples:
  dpfl sweep configs/quickstart.yaml --grid epsilon=1,4,16 --grid kind=els,uls --out sweeps/eps
  dpfl sweep configs/quickstart.yaml --grid group_size=1,2,4 --grid cohort_size=64,128,256 \\
    --grid learning_rate=0.002,0.005 --tune learning_rate --repeats 3 --out sweeps/heat
  dpfl sweep CONFIG --out sweeps/big --rank $SLURM_ARRAY_TASK_ID --of 64
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("config", metavar="CONFIG", help="YAML configuration file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override any key")
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="AXIS=V1,V2,...",
        help="values of one axis; repeat for more (default: the configuration's sweep section)",
    )
    parser.add_argument(
        "--tune", action="append", default=[], metavar="AXIS", help="take the best of this axis"
    )
    parser.add_argument("--repeats", type=int, help="runs of each cell (default: 1)")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="the folder")
    parser.add_argument("--rank", type=int, default=0, help="this process (default: 0)")
    parser.add_argument("--of", type=int, default=1, help="number of processes (default: 1)")
    parser.add_argument("--collect", action="store_true", help="run nothing, only tabulate")
    parser.add_argument("--dry-run", action="store_true", help="list the cells, run nothing")
    parser.add_argument("--keep-runs", action="store_true", help="keep the cells' checkpoints")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs this process's cells, then tabulates all."""
    from rich.console import Console

    from dpfl_jax.accounting import LedgerError
    from dpfl_jax.planning.sweep import draw

    console = Console(stderr=args.json)
    sweep = _sweep(args)
    cells = sweep.cells()
    if args.dry_run:
        for cell in cells:
            sweep.cell_config(cell)
            console.print(" ".join(cell.overrides(sweep.base)))
        return {"status": "dry run", "cells": len(cells)}
    ran, refused = 0, None
    if not args.collect:
        console.print(f"{len(cells)} cells in {sweep.directory}")
        try:
            ran = sweep.run(console, args.rank, args.of)
        except LedgerError as error:  # what is finished is tabulated all the same
            refused = error
    files = sweep.write_tables()
    best = sweep.best()
    fixed = [axis for axis in sweep.axes if axis not in sweep.tuned]
    if best:
        figure = sweep.directory / "sweep.png"
        draw(best, fixed, figure)
        files.append(figure)
    caveats = list(dict.fromkeys(text for row in best for text in row["caveats"]))
    _print(console, best, fixed, sweep, caveats)
    if refused is not None:
        raise refused
    found = sweep.table()
    return {
        "status": "finished" if len(found) == len(cells) else "unfinished",
        "cells": len(cells),
        "ran": ran,
        "results": len(found),
        "infeasible": sum(row["status"] == "infeasible" for row in found),
        "best": best,
        "caveats": caveats,
        "files": [str(file) for file in files],
    }


def _sweep(args: argparse.Namespace) -> Any:
    from dpfl_jax.config import load_config
    from dpfl_jax.planning.sweep import Sweep

    declared = getattr(load_config(args.config, args.overrides), "sweep", None)
    axes = dict(_axis(text) for text in args.grid)
    if not axes and declared is not None:
        axes = dict(declared.grid)
    if not axes:
        raise BadInputError("the grid is empty: give --grid AXIS=V1,V2,... or a sweep section")
    repeats = args.repeats if args.repeats is not None else declared.repeats if declared else 1
    tuned = tuple(args.tune) or (tuple(declared.tune) if declared and not args.grid else ())
    return Sweep(
        args.out.absolute(),
        pathlib.Path(args.config),
        axes,
        tuple(args.overrides),
        repeats,
        tuned,
        args.keep_runs,
    )


def _axis(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if not (name and equals and values):
        raise BadInputError(f"--grid {text!r} must look like epsilon=1,4,16")
    try:
        found = yaml.safe_load(f"[{values}]")
    except yaml.YAMLError:
        raise BadInputError(f"the values of --grid {text!r} are not a list") from None
    return name, found


def _print(
    console: Any, best: list[dict[str, Any]], fixed: list[str], sweep: Any, caveats: list[str]
) -> None:
    from rich.table import Table

    public = any(row["seed"] is not None for row in best) and "seed" not in sweep.axes
    columns = [*fixed, *sweep.tuned, *["public seed"] * public, "held-out loss", "90 % interval"]
    table = Table(*columns, title="best cells")
    for row in sorted(best, key=lambda row: tuple(str(row[a]) for a in fixed)):
        interval = "" if row["low"] is None else f"{row['low']:.4f} to {row['high']:.4f}"
        tuned = [f"{row[a]}{' (edge)' if a in row['edge'] else ''}" for a in sweep.tuned]
        tuned += [str(row["seed"])] * public
        table.add_row(*(str(row[a]) for a in fixed), *tuned, f"{row['loss']:.4f}", interval)
    console.print(table)
    for caveat in caveats:
        console.print(f"caveat: {caveat}", highlight=False)
    for row in sweep.table():
        if row["status"] == "infeasible":
            values = ", ".join(f"{axis} {row[axis]}" for axis in sweep.axes)
            console.print(f"infeasible: {values}: {row['reason']}", highlight=False)
