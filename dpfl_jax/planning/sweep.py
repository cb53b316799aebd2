"""Sweeps: one run per cell of a grid, resumable, over any number of processes.

A sweep is a folder. ``cells/`` holds a run directory per cell; interrupted runs are resumed.
``results/`` holds one small file per finished cell, from which the table is made. Processes do not
communicate: process r of n runs every n-th cell.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import pathlib
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from rich.console import Console
from scipy import stats

from dpfl_jax.accounting import LedgerError
from dpfl_jax.config import RunConfig, config_fingerprint, load_config
from dpfl_jax.data import load_dataset
from dpfl_jax.errors import BadInputError, StoppedError, at_least
from dpfl_jax.files import check_links, on_disk, within
from dpfl_jax.planning.candidates import at_budget
from dpfl_jax.run.console import StepProgress
from dpfl_jax.run.directory import finished_report, write_atomically
from dpfl_jax.run.pipeline import keep_programs, run_experiment
from dpfl_jax.training.central_run import prepare

# Short names of the axes of a compute-budget study; any other key of a configuration works too.
ALIASES = {
    "epsilon": "privacy.epsilon",
    "clip_norm": "mechanism.clip_norm",
    "learning_rate": "optimizer.learning_rate",
    "steps": "train.steps",
}
# Axes that together determine the mechanism.
SIZES = ("kind", "budget", "group_size", "cohort_size")


# Cells are compared with each other; a baseline for each would double the work.
_NO_BASELINE = ("eval.baseline=false", "eval.prompt=null")


@dataclasses.dataclass(frozen=True)
class SweepCell:
    """One run: a value for each axis, and a repetition.

    Attributes:
      values: the value for each axis, as given.
      repeat: number of the repetition, from 0; each has its own key.
    """

    values: Mapping[str, Any]
    repeat: int

    def overrides(self, config: RunConfig) -> list[str]:
        """Returns what the cell changes in the base configuration, as ``key=value``."""
        out = [
            f"{ALIASES.get(axis, axis)}={json.dumps(value)}"
            for axis, value in self.values.items()
            if axis not in SIZES
        ]
        if any(axis in self.values for axis in SIZES):
            out.insert(0, f"mechanism={json.dumps(self.mechanism(config.mechanism).to_section())}")
        return [*out, "sweep=null"]

    def mechanism(self, chosen: Any) -> Any:
        """Returns ``chosen`` with this cell's kind, budget, group size and cohort size."""
        kind = self.values.get("kind", chosen.kind)
        group = self.values.get("group_size", chosen.group_size)
        budget = self.values.get("budget", chosen.compute_budget)
        if "cohort_size" in self.values:
            one = at_budget(chosen, kind, 1.0, group)
            budget = self.values["cohort_size"] * (one.participation.unit_examples or 1)
        return at_budget(chosen, kind, budget, group)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A grid of runs.

    Attributes:
      directory: folder of the sweep.
      config: YAML file of the base configuration.
      axes: values by axis: a key of the configuration, an alias (``ALIASES``), ``group_size`` or
        ``cohort_size`` (users or examples per step).
      overrides: changes to the base configuration for all cells, as ``key=value``.
      repeats: runs of each cell, each with its own secret key for sampling and noise.
      tuned: axes whose best value is taken at every combination of the others.
      keep_runs: whether checkpoints of finished cells are kept.
      allow_code: whether the configuration may name code (``load_config``).
    """

    directory: pathlib.Path
    config: pathlib.Path
    axes: Mapping[str, Sequence[Any]]
    overrides: tuple[str, ...] = ()
    repeats: int = 1
    tuned: tuple[str, ...] = ()
    keep_runs: bool = False
    allow_code: bool = False

    def __post_init__(self) -> None:
        on_disk(self.directory)
        if not self.axes or any(not values for values in self.axes.values()):
            raise BadInputError("a sweep needs at least one axis, with at least one value each")
        if {"cohort_size", "budget"} <= set(self.axes):
            raise BadInputError("cohort_size and budget set the same number: keep one of the axes")
        at_least("the number of repeats", self.repeats, 1)
        for axis in self.tuned:
            if axis not in self.axes:
                raise BadInputError(
                    f"{axis!r} is to be tuned, but the sweep has no such axis: add it to the axes, "
                    "or do not tune it"
                )

    @functools.cached_property
    def base(self) -> RunConfig:
        """The base configuration.

        Raises:
          BadInputError: it is wrong, is not of a central run, or repeats runs with one seed.
        """
        config = load_config(self.config, [*self.overrides, *_NO_BASELINE], self.allow_code)
        if config.variant != "central":
            raise BadInputError(
                "a sweep needs the configuration of a central run, but this is of a federation: "
                "give another configuration"
            )
        if self.repeats > 1 and (config.seed is not None or "seed" in self.axes):
            raise BadInputError(
                f"{self.repeats} repeats with one seed would be the same run: leave seed unset, or "
                "give the seeds as an axis (seed=0,1,2) without repeats; then their noise is public"
            )
        return config

    def cells(self) -> list[SweepCell]:
        """Returns all cells, in a fixed order that spreads cheap and costly ones over processes."""
        grid = itertools.product(*self.axes.values())
        cells = [
            SweepCell(dict(zip(self.axes, values)), repeat)
            for values in grid
            for repeat in range(self.repeats)
        ]
        return sorted(cells, key=self.digest)

    def cell_config(self, cell: SweepCell) -> RunConfig:
        """Returns the configuration of a cell.

        Raises:
          BadInputError: an axis is no key of the configuration, or a value does not fit it.
        """
        overrides = [*self.overrides, *_NO_BASELINE, *cell.overrides(self.base)]
        return load_config(self.config, overrides, self.allow_code)

    def digest(self, cell: SweepCell) -> str:
        """Returns the name of a cell's files: a digest of its configuration, whatever the grid."""
        content = json.dumps([config_fingerprint(self.base), dict(cell.values), cell.repeat])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    # ---- running ---------------------------------------------------------------------------

    def run(self, console: Console, rank: int = 0, of: int = 1) -> int:
        """Runs the cells of one process that have no result yet; returns how many it ran.

        A cell that is not possible (a cohort larger than the population, an unreachable epsilon) is
        recorded with the reason. With ``privacy.ledger`` every cell is charged to the account once,
        before its first step.

        Raises:
          LedgerError: the ledger refuses the next cell. Finished cells and the folder of the
            refused one are kept: with a larger ``privacy.budget`` the same call resumes.
          StoppedError: interrupted; the same call resumes.
        """
        if not 0 <= rank < of:
            raise BadInputError(f"rank {rank} of {of} processes: ranks go from 0 to {of - 1}")
        mine = [cell for i, cell in enumerate(self.cells()) if i % of == rank]
        left = [cell for cell in mine if not self._result(cell).exists()]
        for cell in left:  # raises errors in an axis before the first run
            self.cell_config(cell)
        load = functools.lru_cache(maxsize=1)(load_dataset)
        keep_programs()  # cells share most compiled programs
        ledger = self.base.privacy.ledger
        if ledger is not None:
            new = "" if pathlib.Path(ledger).exists() else f"a new ledger is made at {ledger}\n"
            console.print(
                f"{new}ledger {ledger}: each cell is charged to account "
                f"{self.base.privacy.account} in full, before its first step",
                soft_wrap=True,
                markup=False,
                highlight=False,
            )
        with StepProgress(console, "cells", len(mine), len(mine) - len(left)) as bar:
            for number, cell in enumerate(left, len(mine) - len(left) + 1):
                shown = ", ".join(f"{axis} {value}" for axis, value in cell.values.items())
                try:
                    row = self.run_cell(cell, load)
                except LedgerError as error:
                    raise LedgerError(
                        f"the cell {shown} was not run, and finished cells are kept: {error}; "
                        "narrow the grid, or raise privacy.budget, and run the same command again"
                    ) from error
                self._result(cell).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._result(cell), json.dumps(row))
                loss = "infeasible" if row["loss"] is None else f"loss {row['loss']:.4f}"
                bar.update(number, f"{shown}: {loss}")
        return len(left)

    def run_cell(self, cell: SweepCell, load: Any) -> dict[str, Any]:
        """Trains one cell, and returns its row of the table."""
        config = self.cell_config(cell)
        path = within(self.directory, f"cells/{self.digest(cell)}")
        check_links(path)
        row: dict[str, Any] = {**cell.values, "repeat": cell.repeat, "seed": config.seed}
        started = time.perf_counter()
        try:
            # A run that finished before its result was written is not run or charged again.
            report = finished_report(path)
            if report is None:
                quiet = Console(quiet=True)
                report = run_experiment(config, path, quiet, lambda: prepare(config, quiet, load))
        except LedgerError:
            raise
        except BadInputError as error:
            return {**row, "status": "infeasible", "reason": str(error), "loss": None}
        if report["status"] != "finished":
            raise StoppedError("the sweep was stopped; the same command resumes it")
        if not self.keep_runs:
            shutil.rmtree(path / "checkpoints", ignore_errors=True)
        final, initial = report["eval"].get("final"), report["eval"].get("initial")
        if final is None:
            raise BadInputError(
                "a sweep compares held-out losses, but nothing is held out: set "
                "data.validation_fraction"
            )
        return {
            **row,
            "status": "finished",
            "reason": None,
            "loss": final["loss"],
            "loss_by_user": final["loss_by_user"],
            "initial_loss": initial["loss"],
            "epsilon_spent": report["privacy"]["epsilon"],
            "delta": report["privacy"]["delta"],
            "noise_multiplier": report["privacy"]["noise_multiplier"],
            "caveats": report["privacy"]["caveats"],
            "seconds": round(time.perf_counter() - started, 2),
            "run": str(path),
        }

    def _result(self, cell: SweepCell) -> pathlib.Path:
        return within(self.directory, f"results/{self.digest(cell)}.json")

    # ---- results ---------------------------------------------------------------------------

    def table(self) -> list[dict[str, Any]]:
        """Returns the rows of all cells that have a result."""
        files = (self._result(cell) for cell in self.cells())
        return [json.loads(file.read_text()) for file in files if file.exists()]

    def best(self) -> list[dict[str, Any]]:
        """Returns the row with the best tuned values for every combination of the other axes.

        A row holds the axes, ``loss`` (mean over repeats), ``low`` and ``high`` (a 90 % interval of
        the mean, Student's t; None with one repeat), ``repeats``, ``edge`` (tuned axes whose best
        value is the first or last), the public ``seed`` (None: secret keys), and the ``caveats`` of
        the runs' guarantees.
        """
        return best_rows(self.table(), self.axes, self.tuned)

    def write_tables(self) -> list[pathlib.Path]:
        """Writes ``table.parquet``, ``table.jsonl`` and ``best.jsonl``; returns their paths."""
        self.directory.mkdir(parents=True, exist_ok=True)
        check_links(self.directory)
        rows, files = self.table(), []
        for name, content in (("table", rows), ("best", self.best())):
            file = self.directory / f"{name}.jsonl"
            write_atomically(file, "".join(json.dumps(row) + "\n" for row in content))
            files.append(file)
        if rows:
            columns = sorted({key for row in rows for key in row})
            table = pyarrow.table({key: [row.get(key) for row in rows] for key in columns})
            file = self.directory / "table.parquet"
            pyarrow.parquet.write_table(table, file)
            files.append(file)
        return files


def best_rows(
    rows: Iterable[Mapping[str, Any]], axes: Mapping[str, Sequence[Any]], tuned: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns what ``Sweep.best`` returns, from rows of its table."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["loss"] is not None and math.isfinite(row["loss"]):
            groups.setdefault(tuple(row[axis] for axis in axes), []).append(row)
    fixed = [axis for axis in axes if axis not in tuned]
    chosen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for values, group in groups.items():
        losses = [row["loss"] for row in group]
        point = dict(zip(axes, values))
        key = tuple(point[axis] for axis in fixed)
        if key in chosen and chosen[key]["loss"] <= np.mean(losses):
            continue
        low, high = _interval(losses)
        edge = [
            axis
            for axis in tuned
            if len(axes[axis]) > 1 and point[axis] in (axes[axis][0], axes[axis][-1])
        ]
        chosen[key] = {
            **point,
            "loss": float(np.mean(losses)),
            "low": low,
            "high": high,
            "repeats": len(losses),
            "edge": edge,
            "seed": group[0]["seed"],
            "caveats": list(dict.fromkeys(text for row in group for text in row["caveats"])),
        }
    return list(chosen.values())


def _interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    if len(values) < 2:
        return None, None
    half = stats.t.ppf(0.95, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return float(np.mean(values) - half), float(np.mean(values) + half)
