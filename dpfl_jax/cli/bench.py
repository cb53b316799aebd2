"""``dpfl bench``: one sub-command per module of ``benchmarks``, in a checkout."""

from __future__ import annotations

import argparse
import importlib
import pathlib
import pkgutil
import sys
from types import ModuleType
from typing import Any

import dpfl_jax
from dpfl_jax.errors import BadInputError

DESCRIPTION = """\
Measure a part of the library on this machine. Prints a table and, with --json, one JSON object
{"machine": ..., "rows": [...]}. Ratios are between things measured in the same run.

Benchmarks are not part of the installed package: run this in a checkout of the repository.

examples:
  dpfl bench clipping --unit user
  dpfl bench accounting --json
"""


def from_checkout(name: str) -> ModuleType:
    """Imports a module of ``reproductions`` or ``benchmarks``.

    The checkout is the folder that holds the running ``dpfl_jax``; the current folder is not
    searched.

    Args:
      name: e.g. "benchmarks" or "reproductions.registry".

    Raises:
      BadInputError: there is no checkout.
    """
    top = name.partition(".")[0]
    root = pathlib.Path(dpfl_jax.__file__).parents[1]
    # A folder of installed packages may hold benchmarks too, but no pyproject.toml.
    if not all((root / part).is_file() for part in ("pyproject.toml", f"{top}/__init__.py")):
        raise BadInputError(
            f"{top} are not part of the installed package: clone the repository, and run "
            "`uv run dpfl` in it"
        )
    if sys.path[0] != str(root):
        sys.path.insert(0, str(root))
    return importlib.import_module(name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one sub-command per module of ``benchmarks``."""
    try:
        benchmarks = from_checkout("benchmarks")
    except BadInputError as missing:  # --help must work without a checkout, too
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
