"""``dpfl bench``: one sub-command per module of ``dpfl_jax.bench``."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from typing import Any

DESCRIPTION = """\
Measure a part of the library on this machine. Prints a table and, with --json, one JSON object
{"machine": ..., "rows": [...]}. Ratios are between things measured in the same run.

examples:
  dpfl bench clipping --unit user
  dpfl bench accounting --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one sub-command per module of ``dpfl_jax.bench``."""
    from dpfl_jax import bench

    commands = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    for info in pkgutil.iter_modules(bench.__path__):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"dpfl_jax.bench.{info.name}")
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
