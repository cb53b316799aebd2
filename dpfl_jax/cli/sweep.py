"""``dpfl sweep``: one run per cell of a grid."""

from __future__ import annotations

import argparse
import pathlib
from typing import Annotated, Any

from rich.table import Table

from dpfl_jax.cli.options import Configured, Flag
from dpfl_jax.errors import BadInputError
from dpfl_jax.run.console import Console

NO_GUARANTEE = (
    "the choice among these runs has no guarantee: no epsilon of a run covers it, and none covers "
    "who is held out (--private chooses with one epsilon for all)"
)
DESCRIPTION = """\
Run one training per cell of a grid: compute budget, epsilon, group and cohort size, clip norm,
learning rate, or any other key of the configuration. Every finished cell is kept, so that the same
command resumes after an interruption; `--rank R --of N` takes every N-th cell, for array jobs that
share the folder. At the end: table.parquet, table.jsonl, best.jsonl and sweep.png in the folder,
made of whatever cells are finished (`--collect` only makes these).

Axes: kind, budget, epsilon, group_size, cohort_size, clip_norm, learning_rate, steps, or
section.key. With `--tune AXIS` the best value of that axis is taken at every combination of the
others; `--repeats` runs each cell several times and adds 90 % intervals of the mean. Every run has
a secret key of its own; `--grid seed=0,1,2` makes the noise public instead, which the tables then
say. The same can be written in the configuration:

  sweep: {grid: {epsilon: [1, 8], learning_rate: [0.001, 0.01]}, tune: [learning_rate], repeats: 3}

Choosing by held-out loss over many private runs has no guarantee, whatever each run has: sweep on
public data, account for all runs (with privacy.ledger every cell is charged to the one account, and
the first that would exceed privacy.budget is refused; what is finished stays), or use --private.

With `--private` privacy.epsilon is that of the whole sweep, for those who are trained on and those
who are held out: a random number of runs (Papernot and Steinke 2022), each of a random cell, scored
by a noisy held-out loss. Only the best is kept, in DIR/best; the number of runs stays secret, so do
not tell how long the sweep took. The ledger is charged once.

examples:
  dpfl sweep configs/quickstart.yaml --grid epsilon=1,4,16 --grid kind=els,uls --out sweeps/eps
  dpfl sweep configs/quickstart.yaml --grid group_size=1,2,4 --grid cohort_size=64,128,256 \\
    --grid learning_rate=0.002,0.005 --tune learning_rate --repeats 3 --out sweeps/heat
  dpfl sweep configs/quickstart.yaml --grid learning_rate=0.002,0.005,0.01 --private \\
    --expected-runs 10 --out sweeps/chosen
  dpfl sweep CONFIG --out sweeps/big --rank $SLURM_ARRAY_TASK_ID --of 64
"""


class Options(Configured):
    """A sweep.

    Attributes:
      grid: values of one axis; repeat for more (default: the configuration's sweep section).
      tune: take the best value of this axis.
      repeats: runs of each cell (default: 1).
      out: folder of the sweep.
      rank: number of this process, from 0.
      of: number of processes.
      collect: run nothing, only tabulate.
      dry_run: list the cells, run nothing.
      keep_runs: keep the cells' checkpoints.
      private: release only the best run, with one epsilon for all.
      expected_runs: with --private, mean of the random number of runs (default: 10).
      loss_bound: with --private, a public bound that a person's mean loss is clipped to (default:
        the logarithm of the number of tokens or classes).
    """

    lists_keys = True

    grid: Annotated[tuple[str, ...], Flag("AXIS=V1,V2,...", several=True)] = ()
    tune: Annotated[tuple[str, ...], Flag("AXIS", several=True)] = ()
    repeats: int | None = None
    out: Annotated[pathlib.Path, Flag("DIR")]
    rank: int = 0
    of: int = 1
    collect: bool = False
    dry_run: bool = False
    keep_runs: bool = False
    private: bool = False
    expected_runs: Annotated[float | None, Flag("N")] = None
    loss_bound: Annotated[float | None, Flag("B")] = None


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs this process's cells, then tabulates all."""
    from dpfl_jax.accounting import LedgerError
    from dpfl_jax.files import can_draw

    console = Console(stderr=args.json)
    sweep = _sweep(args)
    if args.private:
        return _run_private(args, sweep, console)
    for name in ("expected_runs", "loss_bound"):
        if getattr(args, name) is not None:
            raise BadInputError(f"--{name.replace('_', '-')} is for a private sweep: add --private")
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
        except LedgerError as error:  # finished cells are tabulated first
            refused = error
    files = sweep.write_tables()
    best = sweep.best()
    fixed = [axis for axis in sweep.axes if axis not in sweep.tuned]
    if best and can_draw():
        from dpfl_jax.planning.figures import draw_sweep

        figure = sweep.directory / "sweep.png"
        draw_sweep(best, fixed, figure)
        files.append(figure)
    caveats = list(dict.fromkeys(text for row in best for text in row["caveats"]))
    _print(console, best, fixed, sweep, caveats)
    if refused is not None:
        raise refused
    result = sweep.table()
    return {
        "status": "finished" if len(result) == len(cells) else "unfinished",
        "cells": len(cells),
        "ran": ran,
        "results": len(result),
        "infeasible": sum(row["status"] == "infeasible" for row in result),
        "best": best,
        "guarantee": NO_GUARANTEE,
        "caveats": caveats,
        "files": [str(file) for file in files],
    }


def _run_private(args: argparse.Namespace, sweep: Any, console: Any) -> dict[str, Any]:
    from dpfl_jax.planning.private_sweep import BEST, PrivateSweep

    for asked, name, why in (
        (bool(sweep.tuned), "--tune", "one run is chosen among all cells"),
        (sweep.repeats > 1, "--repeats", "a cell is drawn as often as it is: see --expected-runs"),
        (args.of > 1, "--of", "the number of runs must stay secret, and one process runs them all"),
        (args.collect, "--collect", "nothing of the other runs is kept"),
        (args.keep_runs, "--keep-runs", "nothing of the other runs is kept"),
    ):
        if asked:
            raise BadInputError(f"leave out {name} with --private: {why}")
    expected = 10.0 if args.expected_runs is None else args.expected_runs
    private = PrivateSweep(sweep, expected, args.loss_bound)
    if args.dry_run:
        guarantee, cells = private.priced()
        console.print(str(guarantee), highlight=False)
        return {"status": "dry run", "cells": cells, "privacy": guarantee.to_json()}
    report = private.run(console)
    chosen = report["selection"]
    values = ", ".join(f"{axis} {value}" for axis, value in chosen["cell"].items())
    console.print(
        f"best: {values}: noisy held-out loss {chosen['noisy_score']:.4f} (stddev of the noise "
        f"{chosen['noise_of_scores']:.2g}), in {sweep.directory / BEST}",
        highlight=False,
    )
    console.print(report["guarantee"], highlight=False)
    return {
        "status": "finished",
        "cells": len(sweep.cells()),
        "best": chosen,
        "privacy": report["privacy"],
        "guarantee": report["guarantee"],
        "run": report["run_dir"],
    }


def _sweep(args: argparse.Namespace) -> Any:
    from dpfl_jax.config import load_config
    from dpfl_jax.planning.sweep import Sweep

    declared = getattr(load_config(args.config, args.overrides, args.allow_code), "sweep", None)
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
        args.allow_code,
    )


def _axis(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if not (name and equals and values):
        raise BadInputError(f"--grid {text!r} must look like epsilon=1,4,16")
    from dpfl_jax.config.load import read_yaml

    return name, read_yaml(f"[{values}]", f"--grid {text!r}", one_value=True)


def _print(
    console: Any, best: list[dict[str, Any]], fixed: list[str], sweep: Any, caveats: list[str]
) -> None:
    public = any(row["seed"] is not None for row in best) and "seed" not in sweep.axes
    columns = [*fixed, *sweep.tuned, *["public seed"] * public, "held-out loss", "90 % interval"]
    table = Table(*columns, title="best cells")
    for row in sorted(best, key=lambda row: tuple(str(row[a]) for a in fixed)):
        interval = "" if row["low"] is None else f"{row['low']:.4f} to {row['high']:.4f}"
        tuned = [f"{row[a]}{' (edge)' if a in row['edge'] else ''}" for a in sweep.tuned]
        tuned += [str(row["seed"])] * public
        table.add_row(*(str(row[a]) for a in fixed), *tuned, f"{row['loss']:.4f}", interval)
    console.print(table)
    console.print(NO_GUARANTEE, highlight=False)
    for caveat in caveats:
        console.print(f"caveat: {caveat}", highlight=False)
    for row in sweep.table():
        if row["status"] == "infeasible":
            values = ", ".join(f"{axis} {row[axis]}" for axis in sweep.axes)
            console.print(f"infeasible: {values}: {row['reason']}", highlight=False)
