"""``dpfl reproduce``: a paper's figure or table, with a verdict on each of its claims."""

from __future__ import annotations

import argparse
import os
import pathlib
import time
from typing import Annotated, Any

from rich.table import Table
from rich.text import Text

from dpfl_jax.cli import options
from dpfl_jax.cli.bench import from_checkout
from dpfl_jax.cli.options import Flag
from dpfl_jax.errors import BadInputError, at_least
from dpfl_jax.run.console import Console, default_signal_handling

DESCRIPTION = """\
Reproduce a figure or a table of a paper: what it claims, what is measured, whether it holds, and
the figure as a PNG. Reproductions on real data read them from the folder in DPFL_DATA_DIR and fall
back to smaller, bundled data (which the notes then say).

Each claim has a source: the paper (with its words and their place), its authors' code, arithmetic,
or this project ("ours"). That one mean lies below another is a paired test over seeds, at an error
rate of 5 % a figure (Holm). A claim of a paper about trained models fails at the paper's own size
and with a power of 80 % only, and only if all arms are tuned alike: else it is undecided at this
size.

Reproductions are not part of the installed package: run this in a checkout of the repository.

Of several figures, PAPER/all or `all`, each runs in a process of its own, in its quick form unless
--full is given. The command says beforehand how long it should take, and writes manifest.json
(commit, versions, hardware, times, fingerprints of data, every number and verdict) next to the
figures; given again it resumes an interrupted one. --full goes as far as two cores go: to the
paper's size where no network is trained, and below it where one is.

examples:
  dpfl reproduce list
  dpfl reproduce subject/audit --quick
  dpfl reproduce all --jobs 2                        # quick; again: only what has changed
  dpfl reproduce isrl/all --full --out figures --json
  dpfl reproduce userlevel/figure-4,userlevel/figure-6 --jobs 2
  dpfl reproduce rpdp/mnist --seeds 2 --minutes 60   # finished trainings are kept: go on later
  dpfl reproduce rpdp/mnist --minutes 0              # tables of what is finished

exit status: 0 done, whether the papers' claims hold or not; 3 a claim of arithmetic or of ours does
not hold; 2 bad input; 1 anything else.
"""


class Options(options.Options):
    """A reproduction.

    Attributes:
      figure: PAPER/FIGURE, several of them (comma between), PAPER/all, all, or list.
      quick: a short form, of minutes.
      full: the longest form, of all figures, too.
      out: folder for the figures.
      seeds: seeds per training, where the figure has several (default: as in the paper).
      minutes: start no training after so many minutes, if finished trainings are kept.
      replication: a number above 0 changes all seeds.
      jobs: figures at once, if there are several (default 1).
    """

    figure: Annotated[str, Flag("FIGURE", is_positional=True)]
    quick: Annotated[bool, Flag(group="size")] = False
    full: Annotated[bool, Flag(group="size")] = False
    out: Annotated[str, Flag("DIR")] = "figures"
    seeds: Annotated[int | None, Flag("N")] = None
    minutes: Annotated[float | None, Flag("M")] = None
    replication: Annotated[int, Flag("R")] = 0
    jobs: Annotated[int | None, Flag("N")] = None


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Lists the reproductions, or runs the named ones."""
    registry = from_checkout("reproductions.registry")
    console = Console(stderr=args.json)
    known = registry.figures()
    if args.figure == "list":
        return _list(console, {name: registry.load(name) for name in known})
    names = args.figure.split(",")
    many = len(names) > 1
    if args.figure.rpartition("/")[2] == "all":
        many, paper = True, args.figure.removesuffix("all")
        names = [name for name in known if name.startswith(paper)]
        if not names:
            raise BadInputError(f"there is no paper {paper.rstrip('/')!r}: see dpfl reproduce list")
    modules = {name: registry.load(name) for name in names}
    out = pathlib.Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"the folder {out} cannot be made: {error.strerror}") from None
    _check(args, modules, many)
    result = _all(args, modules, out, console) if many else _one(args, names[0], out, console)
    _tally(console, result["tally"])
    return result


def _one(args: argparse.Namespace, name: str, out: pathlib.Path, console: Console) -> Any:
    registry = from_checkout("reproductions.registry")
    from_checkout("reproductions._seeds").replicate(args.replication)
    data = os.environ.get("DPFL_DATA_DIR")
    module = registry.load(name)
    console.rule(f"{name}: {module.TITLE}")
    console.print(module.SOURCE, style="dim")
    start = time.perf_counter()
    folder = pathlib.Path(data) if data else None
    settings = registry.Settings(args.quick, out, console, folder, args.seeds, args.minutes)
    with default_signal_handling():
        outcome = module.run(settings)
    result = outcome.to_json(name) | {"seconds": round(time.perf_counter() - start, 1)}
    _print(console, result)
    claims = result["claims"]
    failed = any(map(registry.broken, claims))
    return {**result, "tally": registry.tally(claims), "holds": not failed}


def _all(
    args: argparse.Namespace, modules: dict[str, Any], out: pathlib.Path, console: Console
) -> dict[str, Any]:
    runner = from_checkout("reproductions.runner")
    jobs = []
    for name, module in modules.items():
        heeded = getattr(module, "OPTIONS", ())
        settings = {o: getattr(args, o) for o in ("seeds", "minutes") if o in heeded}
        jobs.append(runner.Job(name, not args.full, **settings, replication=args.replication))
    made: dict[str, Any] = runner.run_all(jobs, out, console, 1 if args.jobs is None else args.jobs)
    for name in made["failed"]:
        console.print(f"{name} failed: see {out / 'logs'}", style="red")
    console.print(f"{out / 'manifest.json'}")
    return {**made, "holds": made["holds"] and not made["failed"]}


def _check(args: argparse.Namespace, modules: dict[str, Any], many: bool) -> None:
    at_least("--replication", args.replication, 0)
    if args.jobs is not None and not many:
        raise BadInputError("--jobs is for several figures: omit it")
    at_least("--seeds", args.seeds, 1)
    at_least("--minutes", args.minutes, 0)
    for option in ("seeds", "minutes"):
        heeded = any(option in getattr(m, "OPTIONS", ()) for m in modules.values())
        if getattr(args, option) is not None and not heeded:
            raise BadInputError(f"--{option} is given, but {args.figure} does not use it: omit it")


def _list(console: Console, modules: dict[str, Any]) -> dict[str, Any]:
    table = Table("figure", "what", "source")
    rows = []
    for name, module in modules.items():
        table.add_row(name, module.TITLE, module.SOURCE)
        rows.append({"figure": name, "title": module.TITLE, "source": module.SOURCE})
    console.print(table)
    return {"figures": rows}


def _print(console: Console, result: dict[str, Any]) -> None:
    table = Table("claim", "source", "measured", "expected", "verdict")
    for claim in result["claims"]:
        style = {True: "green", False: "red", None: "yellow"}[claim["holds"]]
        verdict = Text(claim["verdict"], style=style)
        values = (_text(claim[key]) for key in ("measured", "expected"))
        table.add_row(claim["claim"], claim["source"], *values, verdict)
    console.print(table)
    for note in result["notes"]:
        console.print(f"note: {note}")
    files = ", ".join(result["files"])
    console.print(f"{files} ({result['seconds']} s)")


def _tally(console: Console, tally: dict[str, dict[str, int]]) -> None:
    table = Table("source", *next(iter(tally.values()), {}))
    for source, counts in tally.items():
        table.add_row(source, *map(str, counts.values()))
    console.print(table)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
