"""``dpfl show``: prints the report of a run again."""

from __future__ import annotations

import argparse
import os
import pathlib
import shlex
from typing import Annotated, Any

from rich.markdown import Markdown
from rich.table import Table

from dpfl_jax import buckets
from dpfl_jax.cli import options
from dpfl_jax.cli.options import Flag
from dpfl_jax.cli.train import in_short
from dpfl_jax.errors import BadInputError
from dpfl_jax.run.console import Console, draws

_WIDE = 200  # columns off a terminal, whose width is unknown, so that no table is cut

DESCRIPTION = """\
Print the report of a run: guarantee, held-out losses, throughput, environment.

A run that has not written a report yet (still going, or killed) is described by its last line of
metrics.

With --records: what each record of a run with personal budgets (mechanism.kind=rpdp) asked for, the
rate it was sampled with, after how many rounds it left and what it has spent. That table belongs to
the silos: do not publish it.

examples:
  dpfl show runs/mine
  dpfl show runs/mine --records
  dpfl show runs/mine --json
"""


class Options(options.Options):
    """A report.

    Attributes:
      run: run directory.
      full: print the whole guarantee, and how gradients were clipped.
      records: print the table of records of a run with personal budgets (private).
      limit: number of records shown with --records.
    """

    run: Annotated[str, Flag("RUN", is_positional=True, in_buckets=True)]
    full: bool = False
    records: bool = False
    limit: Annotated[int, Flag("N")] = 20


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Prints the report, or the last step of an unfinished run."""
    import json

    from dpfl_jax.run.directory import stated_report
    from dpfl_jax.run.report import as_text, render_markdown

    console = Console(stderr=args.json)
    if not draws(console) and "COLUMNS" not in os.environ:
        console.width = _WIDE
    directory = buckets.folder(args.run)
    if args.records:
        return _records(directory, args.limit, console)
    if (directory / "report.json").exists():
        stated, report = stated_report(directory)
        report |= {"meaning": stated.in_words()}
        try:
            text = render_markdown(report if args.full else _in_short(report))
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise BadInputError(f"{directory / 'report.json'} is damaged: {error!r}") from error
        if not args.full:
            short = "\n".join(f"- {as_text(line)}" for line in in_short(report))
            text = text.replace(
                as_text(report["guarantee"]), f"{short}\n- the whole guarantee: --full"
            )
        console.print(Markdown(text, hyperlinks=False))
        return report
    if not (directory / "config.yaml").exists():
        raise BadInputError(f"{directory} is not a run directory: it has no config.yaml")
    rows = []
    metrics = directory / "metrics.jsonl"
    if metrics.is_file():
        rows = [line for line in metrics.read_text().splitlines() if line.endswith("}")]
    last = json.loads(rows[-1]) if rows else None
    state = f"at step {last['step']}" if last else "before its first step"
    console.print(
        f"{directory}: unfinished, {state}; `dpfl train` with its configuration and "
        f"--run-dir {shlex.quote(str(directory))} resumes it"
    )
    return {"status": "unfinished", "run_dir": str(directory), "last": last}


def _in_short(report: dict[str, Any]) -> dict[str, Any]:
    """Removes how gradients were clipped, unless there is a warning."""
    warning = (report.get("clipping") or {}).get("warning")
    return report | {"clipping": {"summary": None, "warning": warning} if warning else None}


def _records(directory: pathlib.Path, limit: int, console: Console) -> dict[str, Any]:
    from dpfl_jax.accounting.guarantee import rounded_up
    from dpfl_jax.federation.personal import COLUMNS, read_records
    from dpfl_jax.run.directory import RECORDS

    summary, rows = read_records(directory)
    console.print(
        f"{summary['records']} records after {summary['rounds']} rounds, policy "
        f"{summary['policy']}; {summary['over_budget']} over their budget, "
        f"{summary['never_sampled']} never sampled, {summary['left_early']} left early"
    )
    spent, budget = summary["epsilon_spent"], summary["budget"]
    least, most = rounded_up(spent["least"], 4), rounded_up(spent["most"], 4)
    console.print(
        f"epsilon spent from {least} to {most} (budgets "
        f"from {float(budget['least']):.4g} to {float(budget['most']):.4g}); at most "
        f"{float(summary['largest_share_of_budget']):.1%} of a budget"
    )
    console.print("private: this table belongs to the silos", style="bold")
    table = Table(*COLUMNS)
    for row in rows[: max(limit, 0)]:
        numbers = (f"{float(row[name]):.6g}" for name in COLUMNS[1:])
        table.add_row(row[COLUMNS[0]], *numbers)
    console.print(table)
    if limit < len(rows):
        console.print(f"{len(rows) - limit} more in {directory / RECORDS}")
    return {"summary": summary, "records": rows}
