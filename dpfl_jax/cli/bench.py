"""``dpfl bench``: one sub-command per module of ``benchmarks``, in a checkout."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from typing import Any

from dpfl_jax.cli._checkout import from_checkout
from dpfl_jax.errors import BadInputError

DESCRIPTION = """\
Measure a part of the library on this machine. Prints a table and, with --json, one JSON object
{"machine": ..., "rows": [...]}. Ratios are between things measured in the same run.

Benchmarks are not part of the installed package: run this in a checkout of the repository.

examples:
  dpfl bench clipping --unit user
  dpfl bench accounting --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one sub-command per module of ``benchmarks``."""
    try:
        benchmarks = from_checkout("benchmarks")
    except BadInputError as missing:  # --help is for everybody
        parser.add_argument("bench", metavar="WHAT", nargs=argparse.REMAINDER, help=str(missing))
        parser.set_defaults(run_bench=lambda _: from_checkout("benchmarks"))
        return
    commands = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    for info in pkgutil.iter_modules(benchmarks.__path__):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"benchmarks.{info.name}")
        sub = commands.add_parser(
            info.name,
            help=module.HELP,
            description=module.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
        sub.set_defaults(run_bench=module.run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the chosen benchmark."""
    return args.run_bench(args)
