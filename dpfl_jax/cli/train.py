"""``dpfl train``: trains one configuration in one run directory."""

from __future__ import annotations

import argparse
import datetime
import pathlib
import shlex
from typing import Annotated, Any, ClassVar

from rich.panel import Panel
from rich.table import Table

from dpfl_jax.cli.options import Configured, Flag, overrides
from dpfl_jax.errors import BadInputError, StoppedError
from dpfl_jax.run.console import Console, RunConsole
from dpfl_jax.task import EACH_ROW

DESCRIPTION = """\
Train a model with a privacy guarantee for people.

Reads one YAML configuration, reads the data, pre-trains on the public corpus if the configuration
says so, calibrates the noise to the target epsilon, trains, evaluates on held-out users, and leaves
a run directory:

  config.yaml     the resolved configuration
  metrics.jsonl   one line per step; what is computed from private data is marked
  checkpoints/    everything needed to go on, except the key
  private/        the root key of sampling and noise: never publish it (nor checkpoints/ of bandmf,
                  blt, banded_inverse)
  report.json, report.md, curves.png
  attacks.png     what an attacker may find out
  profile/        with --profile: what the devices did, for xprof; as private as the data
  guarantee.json  what is promised, for `dpfl verify`
  audit.json      what an attack proved, if the configuration asks for one (a section `audit`)

A run that was stopped (Ctrl-C, SIGTERM, kill -9, power) is resumed by the same command with the
same --run-dir; on the same hardware it ends with the parameters it would have ended with. A
finished run is never overwritten.

examples:
  dpfl train configs/quickstart.yaml
  dpfl train configs/quickstart.yaml mechanism.cohort_size=512 privacy.epsilon=2
  dpfl train configs/quickstart.yaml --run-dir runs/mine
  dpfl train configs/userlevel/stackoverflow_uls.yaml --dry-run
  dpfl train configs/subject/quickstart.yaml               # silos
  dpfl train configs/isrl/quickstart.yaml                  # no trusted server

exit status: 0 done; 2 bad input (one sentence on stderr); 1 anything else, interruption included.
"""


class Options(Configured):
    """Training.

    Attributes:
      run_dir: directory of the run; an unfinished run of this configuration is resumed (default: a
        new folder runs/NAME-TIME).
      dry_run: validate and price (parameters, tokens, noise multiplier, epsilon); train nothing.
    """

    keys: ClassVar[dict[str, Any]] = {"execution.profile": None}
    lists_keys = True

    run_dir: Annotated[str | None, Flag("DIR", in_buckets=True)] = None
    dry_run: bool = False


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Trains a configuration; with ``--dry-run`` prints what that would cost and guarantee."""
    from dpfl_jax.config import load_config

    console = RunConsole(stderr=args.json)
    given = [*args.overrides, *overrides(Options, args)]
    config = load_config(args.config, given, args.allow_code)
    return train_or_price(config, args.run_dir, args.dry_run, console)


def train_or_price(
    config: Any, run_dir: Any, dry_run: bool, console: RunConsole
) -> dict[str, Any] | None:
    """Trains in ``run_dir`` (None: a new one), or prints what that would cost and guarantee."""
    from dpfl_jax.run import pipeline

    with console.alive():
        if dry_run:
            price = pipeline.dry_run(config, console)
            if flops := price.get("training_flops"):
                price |= {"chip_hours": _chip_hours(flops)}
            _print_price(console, price)
            return price
        return _train(config, run_dir or _new_run_dir(config.name), console)


def _chip_hours(flops: float) -> dict[str, float]:
    """Chip-hours on common chips, at the share of their peak that ``planning.costs`` assumes."""
    from dpfl_jax.planning.costs import Chip

    return {
        name: float(f"{Chip.named(name).bill(flops)['chip_hours']:.2g}")
        for name in ("v5e", "v5p", "h100")
    }


def _train(config: Any, run_dir: Any, console: Console) -> dict[str, Any] | None:
    """Trains, alone or as one of many processes; only process 0 prints."""
    import jax
    from jax.experimental import multihost_utils

    from dpfl_jax.run import pipeline, processes

    processes.start(config.processes)
    pipeline.keep_programs()  # a run resumed after a kill compiles nothing again
    how = f"--run-dir {shlex.quote(str(run_dir))}"
    with processes.synchronized_shutdown(how, config.processes):
        if not processes.is_primary():
            console = Console(quiet=True)
        run_dir = processes.broadcast(str(run_dir))
        if processes.many():
            console.print(f"{jax.process_count()} processes")
        report = pipeline.run_experiment(config, run_dir, console)
        if processes.is_primary():
            print_report(console, report)
        # A launcher may kill process 0 once another has ended.
        multihost_utils.sync_global_devices("end")
        _check_finished(report)
    return report if processes.is_primary() else None


def _check_finished(report: dict[str, Any]) -> None:
    if report["status"] != "finished":
        # The report is written; the exit code still says that the run is not done.
        raise StoppedError(
            f"stopped after {report['steps']} {_steps(report)}; the same command with --run-dir "
            f"{shlex.quote(report['run_dir'])} resumes from there"
        )


def _new_run_dir(name: str) -> pathlib.Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    base = pathlib.Path("runs") / f"{name}-{stamp}"
    for suffix in ["", *(f"-{i}" for i in range(2, 100))]:
        path = base.with_name(base.name + suffix)
        if not path.exists():
            return path
    raise BadInputError(f"there are too many runs named {base}: give --run-dir")


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Prints what a person wants to see at the end."""
    from rich.text import Text

    from dpfl_jax.accounting import Guarantee
    from dpfl_jax.files import can_draw
    from dpfl_jax.run.report import evaluated, taken

    guarantee = Guarantee.from_json(report["privacy"])
    console.print(guarantee.summary(), style="bold", highlight=False, soft_wrap=True)
    if report["eval"]:
        table = Table(title="held out", title_justify="left")
        unit = "subject" if "silos" in report else "user"
        unit = "row" if report["privacy"].get("unit_key") == EACH_ROW else unit
        unit = "silo" if "parameters" in report else unit
        shown = [
            name
            for name in ("accuracy", "majority_accuracy", "base_rate", "auc", "perplexity")
            if any(v.get(name) is not None for v in report["eval"].values())
        ]
        heads = [name.replace("_", " ").replace("auc", "AUC") for name in shown]
        for column in ["", "loss by example", f"loss by {unit}", *heads]:
            table.add_column(column, justify="left" if not column else "right")
        rows = [(evaluated(report, k), v) for k, v in report["eval"].items()]
        rows += list(report.get("baselines", {}).items())
        for name, value in rows:
            apart = value["loss_by_silo"] if unit == "silo" else value["loss_by_user"]
            cells = [f"{value['loss']:.4f}", f"{apart:.4f}"]
            for column in shown:
                number, digits = value.get(column), 2 if column == "perplexity" else 4
                cells.append("" if number is None else f"{number:,.{digits}f}")
            table.add_row(name, *cells)
        console.print(table)
        if rule := report["data"].get("held_out"):
            console.print(f"held out: {rule}", highlight=False, soft_wrap=True)
    for name, text in report.get("samples", {}).items():
        console.print(Panel(Text(text), title=f"what it writes {name} training"))
    console.print(Panel("\n".join(in_short(report)), title="guarantee"))
    console.print(f"the whole guarantee: dpfl show {report['run_dir']} --full", highlight=False)
    for line in (report.get("audit") or {}).get("summary", ()):
        console.print(f"audit of {line}", highlight=False, soft_wrap=True)
    for line in filter(None, (_in_one_line(report), _got_worse(report))):
        console.print(line, highlight=False)
    picture = "a picture in curves.png" if can_draw() else "no pictures, without dpfl_jax[plots]"
    console.print(
        f"{report['status']} after {taken(report)} {_steps(report)}: "
        f"{report['run_dir']}/report.md, and {picture}"
    )


def in_short(report: dict[str, Any]) -> list[str]:
    """The guarantee of a report, or of a price, in six lines."""
    from dpfl_jax.accounting import Guarantee

    guarantee, meaning = Guarantee.from_json(report["privacy"]), report.get("meaning")
    return guarantee.in_short(meaning[0].split(" (at ")[0] if meaning else "")


def _in_one_line(report: dict[str, Any]) -> str:
    """Losses before, with privacy and without, in a line; "" if one of them is missing."""
    from dpfl_jax.accounting.guarantee import rounded_up

    losses = {name: value["loss"] for name, value in report["eval"].items()}
    baseline = report["outside_guarantee"].get("without_privacy")
    if baseline is None or losses.keys() - {"last_iterate"} != {"initial", "final"}:
        return ""
    privacy = report["privacy"]
    unit = "row" if privacy.get("unit_key") == EACH_ROW else privacy["unit"]
    return (
        f"held-out loss {losses['initial']:.3f} before, {losses['final']:.3f} with privacy "
        f"(epsilon {rounded_up(privacy['epsilon'], 3)} for each {unit}), "
        f"{baseline[-1]['loss']:.3f} without (for comparison only)"
    )


def _got_worse(report: dict[str, Any]) -> str:
    """A warning if the held-out loss rose; "" if it did not."""
    losses = {name: value["loss"] for name, value in report.get("eval", {}).items()}
    known = losses.keys() - {"last_iterate"} == {"initial", "final"}
    if not known or losses["final"] <= losses["initial"]:
        return ""
    return (
        "warning: training made the held-out loss larger: take a "
        "smaller learning rate, or less noise (--dry-run names the key), or, where a table's "
        "columns are not of order 1, declare data.scale"
    )


def _steps(report: dict[str, Any]) -> str:
    return "rounds" if "silos" in report else "steps"


def _in_words(value: Any) -> str:
    """A value of a price without brackets and quotation marks; each of several rows on a line."""
    if isinstance(value, dict):
        if value.keys() == {"value", "from"}:
            return f"{_in_words(value['value'])} ({value['from']})"
        return ", ".join(f"{k.replace('_', ' ')} {_in_words(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        between = "\n" if any(isinstance(item, dict) for item in value) else ", "
        return between.join(map(_in_words, value))
    if isinstance(value, float):
        return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)


def _print_price(console: Console, price: dict[str, Any]) -> None:
    table = Table(title=f"{price['name']} (dry run)", title_justify="left", show_header=False)
    for key, value in price.items():
        if key in ("privacy", "guarantee", "meaning", "status", "name"):
            continue
        table.add_row(key.replace("_", " "), _in_words(value))
    console.print(table)
    console.print(Panel("\n".join(in_short(price)), title="guarantee, if run as configured"))
