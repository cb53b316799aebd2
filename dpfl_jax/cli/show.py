"""``dpfl show``: prints the report of a run again."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from dpfl_jax.cli.main import add_json_flag
from dpfl_jax.errors import BadInputError

DESCRIPTION = """\
Print the report of a run: guarantee, held-out losses, throughput, environment.

A run that has not written a report yet (still going, or killed) is described by its last line of
metrics.

examples:
  dpfl show runs/mine
  dpfl show runs/mine --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("run", metavar="RUN", help="run directory")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Prints report.md, or where an unfinished run stands."""
    import json

    console = Console(stderr=args.json)
    directory = pathlib.Path(args.run)
    report_file = directory / "report.json"
    if report_file.exists():
        report = json.loads(report_file.read_text())
        console.print(Markdown((directory / "report.md").read_text()))
        return report
    if not (directory / "config.yaml").exists():
        raise BadInputError(f"{directory} is not a run directory: it has no config.yaml")
    rows = []
    metrics = directory / "metrics.jsonl"
    if metrics.exists():
        rows = [line for line in metrics.read_text().splitlines() if line.endswith("}")]
    last = json.loads(rows[-1]) if rows else None
    state = f"at step {last['step']}" if last else "before its first step"
    console.print(
        f"{directory}: unfinished, {state}; `dpfl train` with its configuration and "
        f"--run-dir {directory} goes on"
    )
    return {"status": "unfinished", "run_dir": str(directory), "last": last}
