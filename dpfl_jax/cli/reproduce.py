"""``dpfl reproduce``: a paper's figure or table, with a verdict on each of its claims."""

from __future__ import annotations

import argparse
import os
import pathlib
import time
from typing import Any

from rich.console import Console

from dpfl_jax.cli._checkout import from_checkout
from dpfl_jax.cli.main import add_json_flag
from dpfl_jax.errors import BadInputError

DESCRIPTION = """\
Reproduce a figure or a table of a paper: what it claims, what is measured, whether it holds, and
the figure as a PNG. Reproductions on real data read them from the folder in DPFL_DATA_DIR and fall
back to smaller, bundled data (which the notes then say).

Each claim has a source: the paper, its authors' code, arithmetic, or this project ("ours"). That
one mean lies below another is a paired test over seeds, at an error rate of 5 % a figure (Holm); it
holds, does not hold, or is undecided at so many seeds.

Reproductions are not part of the installed package: run this in a checkout of the repository.

examples:
  dpfl reproduce list
  dpfl reproduce subject/audit --quick
  dpfl reproduce subject/all --quick --out figures --json
  dpfl reproduce rpdp/mnist --seeds 2 --minutes 60   # finished trainings are kept: go on later
  dpfl reproduce rpdp/mnist --minutes 0              # tables of what is finished

exit status: 0 done, whether the papers' claims hold or not; 3 a claim of arithmetic or of ours does
not hold; 2 bad input; 1 anything else.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("figure", metavar="FIGURE", help="PAPER/FIGURE, PAPER/all, or list")
    parser.add_argument("--quick", action="store_true", help="reduced size, for a laptop")
    parser.add_argument(
        "--out", metavar="DIR", default="figures", help="folder for the figures (default: figures)"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help="seeds per training, where the figure has several (default: as in the paper)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="start no training after so many minutes, where finished trainings are kept",
    )
    add_json_flag(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Lists, or runs."""
    registry = from_checkout("reproductions.registry")
    console = Console(stderr=args.json)
    known = registry.figures()
    if args.figure == "list":
        return _list(console, {name: registry.load(name) for name in known})
    names = [args.figure]
    if args.figure.endswith("/all"):
        paper = args.figure.removesuffix("all")
        names = [name for name in known if name.startswith(paper)]
        if not names:
            raise BadInputError(f"there is no paper {paper.rstrip('/')!r}: see dpfl reproduce list")
    modules = {name: registry.load(name) for name in names}
    out = pathlib.Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"the folder {out} cannot be made: {error.strerror}") from None
    data = os.environ.get("DPFL_DATA_DIR")
    _check(args, modules)
    settings = registry.Settings(
        args.quick, out, console, pathlib.Path(data) if data else None, args.seeds, args.minutes
    )
    results = []
    for name, module in modules.items():
        console.rule(f"{name}: {module.TITLE}")
        console.print(f"[dim]{module.SOURCE}[/dim]")
        start = time.perf_counter()
        outcome = module.run(settings)
        result = outcome.to_json(name) | {"seconds": round(time.perf_counter() - start, 1)}
        _print(console, result)
        results.append(result)
    claims = [claim for result in results for claim in result["claims"]]
    found = results[0] if len(names) == 1 else {"figures": results}
    failed = [c for c in claims if c["source"] in ("arithmetic", "ours") and c["holds"] is False]
    return {**found, "tally": _tally(console, registry, claims), "holds": not failed}


def _check(args: argparse.Namespace, modules: dict[str, Any]) -> None:
    if args.seeds is not None and args.seeds < 1:
        raise BadInputError(f"--seeds is {args.seeds}, but it must be at least 1")
    if args.minutes is not None and not args.minutes >= 0:
        raise BadInputError(f"--minutes is {args.minutes}, but it must be at least 0")
    for option in ("seeds", "minutes"):
        heeded = any(option in getattr(m, "OPTIONS", ()) for m in modules.values())
        if getattr(args, option) is not None and not heeded:
            raise BadInputError(f"--{option} is given, but {args.figure} does not use it: omit it")


def _list(console: Console, modules: dict[str, Any]) -> dict[str, Any]:
    from rich.table import Table

    table = Table("figure", "what", "source")
    rows = []
    for name, module in modules.items():
        table.add_row(name, module.TITLE, module.SOURCE)
        rows.append({"figure": name, "title": module.TITLE, "source": module.SOURCE})
    console.print(table)
    return {"figures": rows}


def _print(console: Console, result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("claim", "source", "measured", "expected", "verdict")
    for claim in result["claims"]:
        style = {True: "green", False: "red", None: "yellow"}[claim["holds"]]
        verdict = f"[{style}]{claim['verdict']}[/{style}]"
        found = (_text(claim[key]) for key in ("measured", "expected"))
        table.add_row(claim["claim"], claim["source"], *found, verdict)
    console.print(table)
    for note in result["notes"]:
        console.print(f"note: {note}")
    files = ", ".join(result["files"])
    console.print(f"{files} ({result['seconds']} s)")


def _tally(console: Console, registry: Any, claims: list[dict[str, Any]]) -> dict[str, Any]:
    from rich.table import Table

    found: dict[str, Any] = registry.tally(claims)
    table = Table("source", *registry.VERDICTS.values())
    for source, counts in found.items():
        table.add_row(source, *map(str, counts.values()))
    console.print(table)
    return found


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
