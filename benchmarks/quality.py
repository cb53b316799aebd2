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
      library: another library, which trains by ``_quality_peers.py``; empty: ours.
    """

    name: str
    overrides: tuple[str, ...]
    rates: tuple[float, ...]
    library: str = ""


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
      title: in the table.
      command: of ``dpfl``, which trains.
      metric: of the report's evaluation: accuracy (more is better) or loss.
      epsilons: targets, and overrides of the runs at each.
      arms: choices; the first is what the others are compared with.
      overrides: of all runs.
      tuning: of the runs that choose a rate: other held-out people than those of the table.
      published: (epsilon, value, source) of others.
      is_screened: whether an arm whose first seed is not better than the first arm's runs no more.
      digits: of a loss.
    """

    title: str
    command: tuple[str, ...]
    metric: str
    epsilons: dict[float, tuple[str, ...]]
    arms: tuple[Arm, ...]
    overrides: tuple[str, ...]
    tuning: tuple[str, ...]
    published: tuple[tuple[float, float, str], ...] = ()
    is_screened: bool = True
    digits: int = 3


_OTHER_HELD_OUT = ("data.test_fraction=0.1", "eval.split=test")
_OTHER_ROWS = ("data.test_fraction=0.2", "eval.split=test")
_OTHER_IMAGES = ("data.validation_fraction=0.15", "eval.split=validation")
_CONSTANT = "optimizer.schedule=constant"


def _clip(kind: str, size: str, rule: str) -> str:
    return f"mechanism={{kind: {kind}, group_size: 1, {size}, clip: {{kind: {rule}}}}}"


# What configs/mnist/scattering.yaml was before averages were found to help there.
_LAST = ("train.average=none", "optimizer.schedule=linear")
_CNN = ("data.features=null", "model.kind=small_cnn", _CONSTANT)
_CNN_STEPS = "train.steps=60"
_COPIES = "model.augmentation={copies: 4, shift: 1, flip: false}"
_OLD = (
    "mechanism.cohort_size=128",
    "train.steps=25",
    "optimizer={name: adam, schedule: cosine}",
)
_ROLES = (
    "finetune",
    "bundled:quickstart",
    "dpfl_jax/data/shakespeare/speeches.jsonl.gz",
    "--user-column",
    "{play}/{speaker}",
)
_LINEAR, _ATTENTION = ["*/attention/*", "*/mlp/*"], ["*/attention/*"]


def _lora(rank: int, targets: list[str]) -> str:
    return f"model.lora={{rank: {rank}, alpha: {2 * rank}, targets: {json.dumps(targets)}}}"


def _trains(*names: str) -> tuple[str, ...]:
    return "model.lora=null", f"model.trainable={json.dumps(names)}"


def _table(title: str, delta: str, cohort: int, data: str, *overrides: str) -> Task:
    size, rates, lower = f"cohort_size: {cohort}", (0.1, 0.3, 1.0), (0.01, 0.03, 0.1, 0.3)
    return Task(
        title,
        ("train", "configs/table/uls.yaml"),
        "loss",
        {1.0: (), 3.0: ()},
        (
            Arm("the last iterate", (), rates),
            Arm("average: tail", ("train.average=tail",), rates),
            Arm("automatic clipping", (_clip("uls", size, "automatic"),), lower),
            Arm("adaptive clipping", (_clip("uls", size, "adaptive, clip_norm: 1.0"),), rates),
        ),
        (
            f"data={{{data}, validation_fraction: 0.2}}",
            f"privacy.delta={delta}",
            f"mechanism={{kind: uls, group_size: 1, {size}}}",
            "train.steps=60",
            "train.eval_every=60",
            *overrides,
        ),
        _OTHER_ROWS,
        digits=4,
    )


TASKS = {
    "mnist": Task(
        "MNIST, each image protected, delta 1e-5",
        ("train", "configs/mnist/scattering.yaml"),
        "accuracy",
        {1.0: ("train.steps=300",), 3.0: ("train.steps=600",)},
        (
            Arm("scattering, a linear model", (), (1.0,)),
            Arm("average: ema", ("train.average=ema", _CONSTANT), (0.5,)),
            Arm("automatic clipping", (_clip("els", "batch_size: 4096", "automatic"),), (1.0,)),
            Arm("pixels, a small CNN", (*_CNN, _CNN_STEPS), (1.0,)),
            Arm("the same in Opacus", (_CNN_STEPS,), (1.0,), "opacus"),
            Arm("the same in JAX-Privacy", (_CNN_STEPS,), (1.0,), "jax-privacy"),
        ),
        _LAST,
        _OTHER_IMAGES,
        (
            (2.93, 0.987, "Tramèr and Boneh 2021, scattering and a CNN"),
            (2.93, 0.981, "Papernot et al. 2021, tanh CNN"),
        ),
    ),
    "mnist-users": Task(
        "The price of the unit: 10,000 images of MNIST, ten for each made-up person, delta 1e-4",
        ("train", "configs/mnist/scattering.yaml"),
        "accuracy",
        {1.0: (), 3.0: ()},
        (
            Arm("each image protected",
                ("data.records_per_user=1", "data.max_users=10000",
                 "mechanism={kind: els, group_size: 1, batch_size: 1000}"), (1.0,)),
            Arm("each person protected, ULS", ("mechanism={kind: uls, group_size: 10, "
                "cohort_size: 100}",), (1.0,)),
            Arm("each person protected, ELS", ("mechanism={kind: els, group_size: 10, "
                "batch_size: 1000}",), (0.5,)),
        ),
        (*_LAST, "data.records_per_user=10", "data.max_users=1000", "privacy.delta=1e-4",
         "train.steps=100", "execution.microbatch_size=50"),
        _OTHER_IMAGES,
        is_screened=False,
    ),
    "digits": Task(
        "Digits of 8 x 8 pixels, each of 1,430 images protected, delta 1e-4",
        ("train", "configs/mnist/scattering.yaml"),
        "accuracy",
        {3.0: (), 8.0: ()},
        (
            Arm("scattering, a linear model", (), (0.5, 1.0)),
            Arm("pixels, a CNN", (*_CNN, "model.kind=cnn"), (0.1, 0.3)),
            Arm("the same, four shifted copies of an image",
                (*_CNN, "model.kind=cnn", _COPIES), (0.1, 0.3)),
        ),
        (*_LAST, "data={source: digits, features: scattering, validation_fraction: 0.2}",
         "eval.split=validation", "privacy.delta=1e-4", "train.steps=100",
         "mechanism.batch_size=512", "execution.microbatch_size=128"),
        _OTHER_ROWS,
    ),
    "patients": _table(
        "Heart disease, each of 589 patients protected, delta 1e-3", "1e-3", 100,
        "source: heart_disease, path: '${DPFL_DATA_DIR}/heart_disease'", "model.kind=logistic",
    ),
    "insurance": _table(
        "Medical costs, each of about 1,070 people protected, delta 1e-4", "1e-4", 200,
        "source: csv, path: '${DPFL_DATA_DIR}/insurance/insurance.csv', user_column: null, "
        "target_column: charges, scale: {age: [41, 23], bmi: [30, 15], children: [2.5, 2.5], "
        "charges: [25000, 25000]}, categories: {sex: [female, male], smoker: ['no', 'yes'], "
        "region: [northeast, northwest, southeast, southwest]}",
    ),
    "quickstart": Task(
        "The quickstart: Shakespeare by speaking role, all parameters, delta 1e-4",
        ("train", "configs/quickstart.yaml"),
        "loss",
        {2.0: (), 8.0: ()},
        (
            Arm("12 steps of 256 people, DP-AdamBC", (), (5e-3, 7.5e-3)),
            Arm("Adam", ("optimizer.name=adam",), (5e-3, 7.5e-3)),
            Arm("25 steps of 128 people, Adam, momentum 0.9, cosine", _OLD, (5e-3, 1e-2)),
            Arm("correlated noise: BandMF, 3 bands",
                ("mechanism={kind: bandmf, group_size: 1, cohort_size: 256, bands: 3, "
                 "clip_norm: 0.5, clipping: normalized}",), (7.5e-3, 1.5e-2)),
            Arm("average: ema", ("train.average=ema",), (7.5e-3,)),
            Arm("average: tail", ("train.average=tail",), (7.5e-3,)),
            Arm("automatic clipping", (_clip("uls", "cohort_size: 256", "automatic"),), (7.5e-3,)),
            Arm("adaptive clipping",
                (_clip("uls", "cohort_size: 256", "adaptive, clip_norm: 0.5"),), (7.5e-3,)),
        ),
        ("eval.baseline=false",),
        _OTHER_HELD_OUT,
    ),
    "finetune": Task(
        "dpfl finetune: a small checkpoint, 12 steps of 128 speaking roles, delta 1e-4",
        _ROLES,
        "loss",
        {2.0: (), 8.0: ()},
        (
            Arm("rank 4 on all linear layers, DP-AdamBC", (_lora(4, _LINEAR),), (1e-2, 2e-2, 3e-2)),
            Arm("defaults of before: rank 16 on attention, Adam, 1e-3 falling to 0",
                (_lora(16, _ATTENTION),
                 "optimizer={name: adam, schedule: linear, warmup_steps: 1}"), (1e-3,)),
            Arm("rank 16 on all linear layers", (_lora(16, _LINEAR),), (1e-2, 3e-2)),
            Arm("rank 16 on attention", (_lora(16, _ATTENTION),), (1e-2, 3e-2)),
            Arm("rank 4 on all linear layers, FFA-LoRA",
                (_lora(4, _LINEAR), 'model.trainable=["*/lora_b"]'), (1e-2, 3e-2, 6e-2)),
            Arm("norms alone", _trains("*norm*/scale"), (3e-2, 1e-1, 3e-1)),
            Arm("all parameters", _trains("*"), (5e-3, 1e-2)),
        ),
        ("privacy.delta=1e-4", "data.seq_len=48", "mechanism.group_size=1",
         "mechanism.cohort_size=128", "mechanism.clip_norm=0.5", "train.steps=12",
         "train.checkpoint_every=100", "execution.packing=0", "execution.microbatch_size=32",
         "execution.strategy=vmap", "model.overrides={remat: none, scan_layers: false}",
         "eval.max_examples_per_user=4",
         "optimizer={name: dp_adam_bc, schedule: constant, options: {b1: 0.6}}"),
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
    parser.add_argument(
        "--peers", metavar="PYTHON", help="a Python that has opacus, torch and jax-privacy"
    )
    parser.add_argument("--markdown", type=pathlib.Path, help="page to write the tables to")
    parser.add_argument("--png", type=pathlib.Path, help="picture of the tables")
    add_options(parser, Options)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs what is missing, and prints."""
    from rich.console import Console

    console = Console(stderr=True)
    end = time.monotonic() + 60 * args.minutes
    tasks = args.task or list(TASKS)
    rows, ended = Rows(args.out, args.peers), True
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
    for name in tasks:
        epsilon = max(TASKS[name].epsilons)
        for arm in TASKS[name].arms:
            for rate in arm.rates if len(arm.rates) > 1 else ():
                if rows.get(name, epsilon, arm, _TUNING_SEED, rate) is None:
                    yield name, epsilon, arm, _TUNING_SEED, rate
    each = [(n, e, arm) for n in tasks for e in TASKS[n].epsilons for arm in TASKS[n].arms]
    each = [cell for cell in each if rows.peers or not cell[2].library]
    for seed in range(seeds):
        for name, epsilon, arm in each:
            rate = rows.best_rate(name, arm)
            if seed and rows.is_screened_out(name, epsilon, arm):
                continue
            if rows.get(name, epsilon, arm, seed, rate) is None:
                yield name, epsilon, arm, seed, rate


class Rows:
    """The runs that have ended, one line each of ``rows.jsonl``."""

    def __init__(self, folder: pathlib.Path, peers: str | None = None) -> None:
        """Reads those of before; a line that was cut off is left out."""
        self.peers = peers
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, folder / "rows.jsonl"
        self.rows: dict[str, dict[str, Any]] = {}
        text = self.file.read_text() if self.file.exists() else ""
        if text and not text.endswith("\n"):
            self.file.write_text(f"{text}\n")  # the next row begins a line
        for line in text.splitlines():
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

    def best_rate(self, task: str, arm: Arm) -> float:
        """The rate that was best at the largest epsilon, with the seed that is for that."""
        if len(arm.rates) < 2:
            return arm.rates[0]
        sign, epsilon = 1 if TASKS[task].metric == "loss" else -1, max(TASKS[task].epsilons)
        tried = {r: self.get(task, epsilon, arm, _TUNING_SEED, r) for r in arm.rates}
        known = {r: row["value"] for r, row in tried.items() if row is not None}
        return min(known, key=lambda r: sign * known[r])

    def is_screened_out(self, name: str, epsilon: float, arm: Arm) -> bool:
        """Whether the first seed of an arm is no better than that of the task's first arm."""
        task, first = TASKS[name], TASKS[name].arms[0]
        if not task.is_screened or arm is first:
            return False
        one, other = (self.get(name, epsilon, a, 0, self.best_rate(name, a)) for a in (arm, first))
        if one is None or other is None:
            return False
        gain = one["value"] - other["value"]
        return gain >= 0 if task.metric == "loss" else gain <= 0

    def train(self, name: str, epsilon: float, arm: Arm, seed: int, rate: float) -> dict[str, Any]:
        """Trains in a process of its own; writes and returns the row."""
        task, folder = TASKS[name], (self.folder / "running").resolve()
        shutil.rmtree(folder, ignore_errors=True)
        run = folder / "run"
        command = [sys.executable, "-m", "dpfl_jax", *task.command]
        command += [*task.overrides, *task.epsilons[epsilon], *arm.overrides]
        command += [f"privacy.epsilon={epsilon}", f"seed={seed}", f"optimizer.learning_rate={rate}"]
        command += task.tuning if seed == _TUNING_SEED else ()
        command += ["--out", str(folder)] if "finetune" in task.command else ["--run-dir", str(run)]
        if arm.library:
            command = [str(self.peers), "benchmarks/_quality_peers.py", arm.library]
            command += [str(epsilon), str(seed), str(rate), *arm.overrides]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [*command, "--json"], capture_output=True, text=True, check=False, cwd=ROOT
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
        if arm.library:
            found = json.loads(done.stdout.splitlines()[-1])
        else:
            report = json.loads((run / "report.json").read_text())
            found = {
                "value": report["eval"]["final"][task.metric],
                "epsilon": report["privacy"]["epsilon"],
            }
        row = {
            "key": _key(name, epsilon, arm, seed, rate),
            **found,
            "rate": rate,
            "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        }
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows[row["key"]] = row
        shutil.rmtree(folder, ignore_errors=True)
        return row


def _key(task: str, epsilon: float, arm: Arm, seed: int, rate: float) -> str:
    # By what is run, not by names: an arm that changed is run again.
    overrides = [*TASKS[task].overrides, *TASKS[task].epsilons[epsilon], *arm.overrides]
    library = [arm.library] if arm.library else []
    return json.dumps([task, epsilon, *library, *overrides, rate, seed])


def summaries(name: str, rows: Rows, seeds: int) -> Iterator[dict[str, Any]]:
    """Mean and interval of every arm that has a row, and how it differs from the first by seeds."""
    task = TASKS[name]
    for epsilon in task.epsilons:
        first: dict[int, float] = {}
        for arm in task.arms:
            try:
                rate = rows.best_rate(name, arm)
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
    task, half = TASKS[row["task"]], row["difference_half_width"]
    if row["arm"] == task.arms[0].name:
        return ""
    if half is not None and abs(row["difference"]) <= half:
        return "no difference seen"
    gain = row["difference"] * (-1 if task.metric == "loss" else 1)
    better = "better" if gain > 0 else "worse" if half is not None else "not better"
    return better if half is not None else f"{better}, one seed"


def _number(mean: float, half: float | None, task: Task) -> str:
    scale, digits = (100, 2) if task.metric == "accuracy" else (1, task.digits)
    text = f"{scale * mean:.{digits}f}"
    return text if not half else f"{text} ± {scale * half:.{digits}f}"


def show(table: list[dict[str, Any]], console: Any) -> None:
    """Prints a table for each task."""
    from rich.table import Table

    for name in dict.fromkeys(row["task"] for row in table):
        task = TASKS[name]
        shown = Table("epsilon", "choice", task.metric, "against the first", "", "rate", "seeds",
                      "CPU s", title=task.title)  # fmt: skip
        for row in (row for row in table if row["task"] == name):
            difference = _number(row["difference"], row["difference_half_width"], task)
            shown.add_row(
                f"{row['epsilon']:g}", row["arm"], _number(row["mean"], row["half_width"], task),
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
        f"interval over up to {seeds} seeds. A choice differs in one thing from the first of its",
        "table. *Against the first* is the mean difference over the same seeds; what was no better",
        "with the first seed was run no more. The learning rate of each choice was tuned at the",
        "largest epsilon, with another seed and other held-out people.",
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
            cell = _number(row["mean"], row["half_width"], task)
            difference = _number(row["difference"], row["difference_half_width"], task)
            lines.append(
                f"| {row['epsilon']:g} | {row['arm']} | {cell} | {difference} | {verdict(row)} | "
                f"{row['rate']:g} | {row['seeds']} | {row['cpu_seconds']:.0f} |"
            )
        lines.append("")
        for epsilon, value, source in task.published:
            shown = _number(value, None, task)
            lines.append(f"Published: {shown} at epsilon {epsilon:g} ({source}).")
        lines.append("")
    lines += [
        "Opacus and JAX-Privacy train the small CNN on the same images, with the same steps, batch",
        "and clip norm, from other initial values (`--peers`). [What they have](peers.md).",
        "",
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
    lines = -(-len(names) // 2)
    figure = Figure(figsize=(12, 4.5 * lines), layout="constrained")
    panels = figure.subplots(lines, 2, squeeze=False).ravel()
    for axes in panels[len(names) :]:
        axes.remove()
    for axes, name in zip(panels, names, strict=False):
        for index, arm in enumerate(TASKS[name].arms):
            some = [r for r in table if r["task"] == name and r["arm"] == arm.name]
            if not some:
                continue
            shift = 1 + 0.02 * (index - len(TASKS[name].arms) / 2)
            axes.errorbar(
                [row["epsilon"] * shift for row in some],
                [row["mean"] for row in some],
                [row["half_width"] or 0.0 for row in some],
                fmt="o-", capsize=2, label=arm.name, markersize=4,
            )  # fmt: skip
        for epsilon, value, source in TASKS[name].published:
            axes.plot(epsilon, value, "k*")
            axes.annotate(f"{source}  ", (epsilon, value), fontsize=6, ha="right")
        axes.set(xscale="log", xlabel="epsilon", ylabel=TASKS[name].metric, title=name)
        axes.set_xticks(list(TASKS[name].epsilons), [f"{e:g}" for e in TASKS[name].epsilons])
        axes.minorticks_off()
        axes.legend(fontsize=7)
    figure.savefig(file, dpi=120)
