"""``dpfl bench quality``: which choices give the better model at an epsilon, by task."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.clipping import machine

HELP = "the better model for an epsilon: features, averages, optimisers, clip rules, adapters"
DESCRIPTION = """\
Trains each task at each epsilon with each choice (an arm), and compares the models on people who
were held out. The learning rate of an arm is chosen with a seed and held-out people of its own,
then the arm is run with --seeds other seeds. The table has the mean and a 95 % interval (Student's
t). Data and seeds are public.

Each run is a process of its own, whose CPU seconds are counted, and a line of OUT/rows.jsonl: the
same command goes on after an interruption, and ends by itself after --minutes. MNIST and the
patients are read from $DPFL_DATA_DIR.

examples:
  dpfl bench quality --out bench/quality --task quickstart --seeds 1   # a screening
  dpfl bench quality --out bench/quality --minutes 120 --markdown docs/results/quality.md
"""
ROOT = pathlib.Path(__file__).parents[1]
_TUNING_SEED = 1000


@dataclasses.dataclass(frozen=True)
class Arm:
    """One choice.

    Attributes:
      name: in the table.
      overrides: of the task's configuration.
      rates: learning rates that are tried, one or several; the best is taken.
    """

    name: str
    overrides: tuple[str, ...]
    rates: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
      title: in the table.
      config: under configs/.
      metric: of the report's evaluation: accuracy (more is better) or loss.
      epsilons: targets.
      arms: choices; the first is what the others are compared with.
      overrides: of all runs.
      tuning: of the runs that choose a rate: other held-out people than those of the table.
      published: (epsilon, value, source) of others.
    """

    title: str
    config: str
    metric: str
    epsilons: tuple[float, ...]
    arms: tuple[Arm, ...]
    overrides: tuple[str, ...] = ()
    tuning: tuple[str, ...] = ()
    published: tuple[tuple[float, float, str], ...] = ()


_OTHER_HELD_OUT = ("data.test_fraction=0.1", "eval.split=test")
_CONSTANT = "optimizer.schedule=constant"
_FEW = ("mechanism.cohort_size=256", "train.steps=12", _CONSTANT, "optimizer.options={b1: 0.6}")
_LORA = "model.lora={rank: 8, targets: [query, key, value, out, gate, up, down]}"
_AUTOMATIC = "mechanism={{{}, group_size: 1, {}, clip: {{kind: automatic}}}}".format
_PATIENTS = "mechanism={kind: uls, group_size: 1, cohort_size: 100}"
_PIXELS = ("data.features=none", "model.kind=small_cnn", "optimizer.schedule=constant")
TASKS = {
    "mnist": Task(
        "MNIST, each image protected, delta 1e-5",
        "mnist/scattering",
        "accuracy",
        (1.0, 3.0),
        (
            Arm("scattering, linear model", (), (1.0,)),
            Arm("the same, average: ema", ("train.average=ema", _CONSTANT), (0.5,)),
            Arm("the same, automatic clipping",
                (_AUTOMATIC("kind: els", "batch_size: 4096"),), (1.0,)),
            Arm("pixels, small CNN", _PIXELS, (0.5, 1.0)),
        ),
        (),
        ("data.validation_fraction=0.15", "eval.split=validation"),
        (
            (2.93, 0.987, "Tramèr and Boneh 2021, scattering and a CNN"),
            (2.93, 0.981, "Papernot et al. 2021, tanh CNN"),
        ),
    ),
    "mnist-users": Task(
        "MNIST dealt to 6,000 made-up people of 10 images, each person protected, delta 1e-5",
        "mnist/scattering",
        "accuracy",
        (1.0, 3.0),
        (
            Arm("uls, group size 10", ("mechanism={kind: uls, group_size: 10, cohort_size: 400}",),
                (0.5, 1.0, 2.0)),
            Arm("els, group size 10", ("mechanism={kind: els, group_size: 10, batch_size: 4096}",),
                (0.25, 0.5, 1.0)),
        ),
        ("train.steps=150", "data.records_per_user=10"),
        ("data.validation_fraction=0.15", "eval.split=validation"),
    ),
    "patients": Task(
        "Heart disease, each of 589 patients protected, delta 1e-3; loss on 151 others",
        "table/uls",
        "loss",
        (1.0, 3.0, 8.0),
        (
            Arm("uls, tail average", ("train.average=tail",), (0.3, 1.0, 3.0)),
            Arm("the same without the average", (), (0.3, 1.0, 3.0)),
            Arm("the same, automatic clipping",
                (_AUTOMATIC("kind: uls", "cohort_size: 100"),), (0.3, 1.0, 3.0)),
        ),
        (
            "data={source: heart_disease, path: '${DPFL_DATA_DIR}/heart_disease', "
            "validation_fraction: 0.2}",
            _PATIENTS,
            "privacy.delta=1e-3", "model.kind=logistic", "train.steps=60",
        ),
        ("data.test_fraction=0.2", "eval.split=test"),
    ),
    "quickstart": Task(
        "The quickstart: Shakespeare by speaking role, held-out loss, delta 1e-4",
        "quickstart",
        "loss",
        (2.0, 8.0),
        (
            Arm("25 steps of 128 people, Adam, cosine", (), (5e-3, 1e-2)),
            Arm("12 steps of 256 people, b1 = 0.6, constant rate", _FEW, (5e-3, 7.5e-3)),
            Arm("the same, DP-AdamBC", (*_FEW, "optimizer.name=dp_adam_bc"), (5e-3, 7.5e-3)),
            Arm("the same, average: ema", (*_FEW, "train.average=ema"), (7.5e-3,)),
            Arm("the same, average: tail", (*_FEW, "train.average=tail"), (7.5e-3,)),
            Arm("the same, automatic clipping",
                (*_FEW[1:], _AUTOMATIC("kind: uls", "cohort_size: 256")), (7.5e-3,)),
            Arm("the same, LoRA of rank 8", (*_FEW, _LORA), (1e-2, 2e-2)),
            Arm("the same, FFA-LoRA of rank 8",
                (*_FEW, _LORA, 'model.trainable=["*/lora_b"]'), (1e-2, 2e-2)),
            Arm("the same, norms alone",
                (*_FEW, 'model.trainable=["*norm*/scale"]'), (2e-2, 5e-2)),
        ),
        ("eval.baseline=false",),
        _OTHER_HELD_OUT,
    ),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    from dpfl_jax.cli.options import Options, add_options

    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the rows")
    parser.add_argument("--task", action="append", choices=TASKS, help="default: all; repeatable")
    parser.add_argument("--seeds", type=int, default=5, help="of each arm (default 5)")
    parser.add_argument("--minutes", type=float, default=120, help="no run begins after that")
    parser.add_argument("--markdown", type=pathlib.Path, help="page to write the tables to")
    parser.add_argument("--png", type=pathlib.Path, help="picture of the tables")
    add_options(parser, Options)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs what is missing, and prints."""
    from rich.console import Console

    console = Console(stderr=True)
    end = time.monotonic() + 60 * args.minutes
    tasks = args.task or list(TASKS)
    rows, ended = Rows(args.out), True
    for number, (name, epsilon, arm, seed, rate) in enumerate(cells(tasks, args.seeds, rows), 1):
        if time.monotonic() > end:
            console.print(f"{args.minutes:g} minutes are over: the same command goes on")
            ended = False
            break
        row = rows.train(name, epsilon, arm, seed, rate)
        what = f"{name}, epsilon {epsilon:g}, {arm.name}, rate {rate:g}, seed {seed}"
        cost = f"{row['cpu_seconds']:.0f} CPU s"
        console.print(f"{number}: {what}: {row['value']:.4f} ({cost})", markup=False)
    table = [summary for name in tasks for summary in summaries(name, rows, args.seeds)]
    show(table, console)
    if args.markdown is not None:
        args.markdown.write_text(page(table, args.seeds), encoding="utf-8")
    if args.png is not None:
        draw(table, args.png)
    return {"machine": machine(), "ended": ended, "rows": table}


def cells(tasks: list[str], seeds: int, rows: Rows) -> Iterator[tuple[str, float, Arm, int, float]]:
    """(task, epsilon, arm, seed, rate) of what is missing: rates, then all arms seed by seed."""
    each = [(n, e, arm) for n in tasks for e in TASKS[n].epsilons for arm in TASKS[n].arms]
    for name, epsilon, arm in each:
        for rate in arm.rates if len(arm.rates) > 1 else ():
            if rows.get(name, epsilon, arm, _TUNING_SEED, rate) is None:
                yield name, epsilon, arm, _TUNING_SEED, rate
    for seed in range(seeds):
        for name, epsilon, arm in each:
            rate = rows.best_rate(name, epsilon, arm)
            if rows.get(name, epsilon, arm, seed, rate) is None:
                yield name, epsilon, arm, seed, rate


class Rows:
    """The runs that have ended, one line each of ``rows.jsonl``."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Reads those of before; a line that was cut off is left out."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, folder / "rows.jsonl"
        self.rows: dict[str, dict[str, Any]] = {}
        for line in self.file.read_text().splitlines() if self.file.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            self.rows[row["key"]] = row

    def get(
        self, task: str, epsilon: float, arm: Arm, seed: int, rate: float
    ) -> dict[str, Any] | None:
        """The row of a run, or None."""
        return self.rows.get(_key(task, epsilon, arm, seed, rate))

    def best_rate(self, task: str, epsilon: float, arm: Arm) -> float:
        """The rate that was best with the seed that is for that."""
        if len(arm.rates) < 2:
            return arm.rates[0]
        sign = 1 if TASKS[task].metric == "loss" else -1
        tried = {r: self.get(task, epsilon, arm, _TUNING_SEED, r) for r in arm.rates}
        known = {r: row["value"] for r, row in tried.items() if row is not None}
        return min(known, key=lambda r: sign * known[r])

    def train(self, name: str, epsilon: float, arm: Arm, seed: int, rate: float) -> dict[str, Any]:
        """Trains in a process of its own; writes and returns the row."""
        task, folder = TASKS[name], self.folder / "running"
        shutil.rmtree(folder, ignore_errors=True)
        config = str(ROOT / f"configs/{task.config}.yaml")
        command = [sys.executable, "-m", "dpfl_jax", "train", config, *task.overrides]
        command += [*arm.overrides, f"privacy.epsilon={epsilon}", f"seed={seed}"]
        command += [f"optimizer.learning_rate={rate}"]
        command += task.tuning if seed == _TUNING_SEED else ()
        command += ["--run-dir", str(folder), "--json"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
        report = json.loads((folder / "report.json").read_text())
        row = {
            "key": _key(name, epsilon, arm, seed, rate),
            "value": report["eval"]["final"][task.metric],
            "epsilon": report["privacy"]["epsilon"],
            "rate": rate,
            "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        }
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows[row["key"]] = row
        shutil.rmtree(folder)
        return row


def _key(task: str, epsilon: float, arm: Arm, seed: int, rate: float) -> str:
    # With the overrides: an arm that changed is run again.
    return json.dumps([task, epsilon, arm.name, *TASKS[task].overrides, *arm.overrides, rate, seed])


def summaries(name: str, rows: Rows, seeds: int) -> Iterator[dict[str, Any]]:
    """Mean and interval of every arm that has a row, and how it differs from the first by seeds."""
    task = TASKS[name]
    for epsilon in task.epsilons:
        first: dict[int, float] = {}
        for arm in task.arms:
            try:
                rate = rows.best_rate(name, epsilon, arm)
            except ValueError:  # no rate was tried yet
                continue
            done = {s: rows.get(name, epsilon, arm, s, rate) for s in range(seeds)}
            kept = [row for row in done.values() if row is not None]
            values = {s: row["value"] for s, row in done.items() if row is not None}
            if not kept:
                continue
            first = first or values
            paired = [values[s] - first[s] for s in values.keys() & first.keys()]
            yield {
                "task": name,
                "epsilon": epsilon,
                "arm": arm.name,
                "rate": rate,
                "seeds": len(kept),
                "mean": float(np.mean(list(values.values()))),
                "half_width": _half_width(list(values.values())),
                "difference": float(np.mean(paired)) if values is not first else 0.0,
                "difference_half_width": _half_width(paired) if values is not first else 0.0,
                "cpu_seconds": float(np.mean([row["cpu_seconds"] for row in kept])),
            }


def _half_width(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def verdict(row: dict[str, Any]) -> str:
    """Whether an arm is better than the task's first one."""
    half = row["difference_half_width"]
    if row["difference"] == 0.0 and half == 0.0:
        return ""
    if half is None:
        return "one seed"
    if abs(row["difference"]) <= half:
        return "no difference seen"
    better = (row["difference"] < 0) == (TASKS[row["task"]].metric == "loss")
    return "better" if better else "worse"


def _number(mean: float, half: float | None, metric: str) -> str:
    scale, digits = (100, 2) if metric == "accuracy" else (1, 3)
    text = f"{scale * mean:.{digits}f}"
    return text if not half else f"{text} ± {scale * half:.{digits}f}"


def show(table: list[dict[str, Any]], console: Any) -> None:
    """Prints a table for each task."""
    from rich.table import Table

    for name in dict.fromkeys(row["task"] for row in table):
        metric = TASKS[name].metric
        shown = Table("epsilon", "choice", f"{metric}", "against the first", "", "rate", "seeds",
                      "CPU s", title=TASKS[name].title)  # fmt: skip
        for row in (row for row in table if row["task"] == name):
            difference = _number(row["difference"], row["difference_half_width"], metric)
            shown.add_row(
                f"{row['epsilon']:g}", row["arm"], _number(row["mean"], row["half_width"], metric),
                difference, verdict(row), f"{row['rate']:g}", str(row["seeds"]),
                f"{row['cpu_seconds']:.0f}",
            )  # fmt: skip
        console.print(shown)


def page(table: list[dict[str, Any]], seeds: int) -> str:
    """docs/results/quality.md."""
    lines = [
        "# The best model for an epsilon",
        "",
        "Held-out accuracy (in percent) or loss by task, epsilon and choice: mean and 95 %",
        f"interval over up to {seeds} seeds. The learning rate of each choice was tuned with",
        "another seed and other held-out people. *Against the first* is the mean difference over",
        "the same seeds.",
        "[The guide](../guides/better.md) explains the choices.",
        "",
        "![The same as a picture](quality.png)",
        "",
    ]
    for name in dict.fromkeys(row["task"] for row in table):
        task = TASKS[name]
        head = f"| epsilon | choice | {task.metric} | against the first | | rate | seeds | CPU s |"
        lines += [f"## {task.title}", "", head, "|---" * 8 + "|"]
        for row in (row for row in table if row["task"] == name):
            cell = _number(row["mean"], row["half_width"], task.metric)
            difference = _number(row["difference"], row["difference_half_width"], task.metric)
            lines.append(
                f"| {row['epsilon']:g} | {row['arm']} | {cell} | {difference} | {verdict(row)} | "
                f"{row['rate']:g} | {row['seeds']} | {row['cpu_seconds']:.0f} |"
            )
        lines.append("")
        for epsilon, value, source in task.published:
            shown = _number(value, None, task.metric)
            lines.append(f"Published: {shown} at epsilon {epsilon:g} ({source}).")
        lines.append("")
    lines += [
        "```sh",
        "dpfl bench quality --out bench/quality --markdown docs/results/quality.md \\",
        "  --png docs/results/quality.png",
        "```",
        "",
    ]
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def draw(table: list[dict[str, Any]], file: pathlib.Path) -> None:
    """A panel for each task: each arm's mean and interval over epsilon."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["task"] for row in table))
    figure = Figure(figsize=(6 * len(names), 4.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for index, arm in enumerate(TASKS[name].arms):
            some = [r for r in table if r["task"] == name and r["arm"] == arm.name]
            shift = 1 + 0.02 * (index - len(TASKS[name].arms) / 2)
            axes.errorbar(
                [row["epsilon"] * shift for row in some],
                [row["mean"] for row in some],
                [row["half_width"] or 0.0 for row in some],
                fmt="o-", capsize=2, label=arm.name, markersize=4,
            )  # fmt: skip
        for epsilon, value, source in TASKS[name].published:
            axes.plot(epsilon, value, "k*")
            axes.annotate(source, (epsilon, value), fontsize=6)
        axes.set(xscale="log", xlabel="epsilon", ylabel=TASKS[name].metric, title=name)
        axes.set_xticks(TASKS[name].epsilons, [f"{e:g}" for e in TASKS[name].epsilons])
        axes.minorticks_off()
        axes.legend(fontsize=7)
    figure.savefig(file, dpi=120)
