"""``dpfl init``: writes one of the shipped configurations, as a file to change."""

from __future__ import annotations

import argparse
import itertools
import pathlib
import re
import shlex
from typing import Annotated, Any

from rich.table import Table

import dpfl_jax
from dpfl_jax.cli import options
from dpfl_jax.cli.options import Flag
from dpfl_jax.errors import BadInputError, nearest
from dpfl_jax.run.console import Console

_LEDGER = "ledger.jsonl"
DESCRIPTION = """\
Write a configuration to start from: one of those shipped, comments included, into the current
folder. Its runs are charged to ledger.jsonl next to it, so that what several of them spend adds up;
privacy.account names whose records they are. No file is ever overwritten.

examples:
  dpfl init                                 # quickstart.yaml
  dpfl init --list
  dpfl init subject/quickstart --out mine.yaml

exit status: 0 written or listed; 2 bad input (no such name, the file exists); 1 anything else.
"""


class Options(options.Options):
    """A new configuration.

    Attributes:
      name: which shipped configuration.
      list: print the names, write nothing.
      out: default: the last part of NAME, with .yaml, in this folder.
    """

    name: Annotated[str, Flag("NAME", is_positional=True)] = "quickstart"
    list: bool = False
    out: Annotated[str | None, Flag("FILE")] = None


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Writes a configuration, or lists all."""
    console = Console(stderr=args.json)
    known = shipped()
    if args.list:
        return _list(console, known)
    if args.name not in known:
        raise BadInputError(
            f"there is no configuration {args.name!r}: {nearest(args.name, known)} (dpfl init "
            "--list shows all)"
        )
    source = known[args.name]
    text = with_ledger(source.read_text(encoding="utf-8"))
    out = pathlib.Path(args.out or source.name)
    try:
        with out.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
    except FileExistsError:
        raise BadInputError(f"{out} exists: name another file with --out") from None
    except OSError as error:
        raise BadInputError(f"{out} cannot be written: {error.strerror}") from None
    console.print(
        f"{args.name} written to {out}, with a ledger ({_LEDGER}) that every run of it is charged "
        f"to; next: dpfl train {shlex.quote(str(out))}",
        highlight=False,
    )
    return {"name": args.name, "file": str(out)}


def with_ledger(text: str) -> str:
    """Adds a ledger, in the same folder, to the text of a shipped configuration.

    Shipped ones name no ledger, as a run from the package's folder would write it there.
    """
    entries = f"ledger: {_LEDGER}", "account: people"
    comment = [
        "# What these people have spent over all runs, in a file beside this one. `account` is",
        "# their name there, the same in every configuration on them; `budget: 8` would limit it.",
        "",
    ]
    block = "\n  ".join(["privacy:", *entries])
    text, blocks = re.subn(r"^privacy:(?=[ ]*(#.*)?$)", block, text, flags=re.M)
    flow = rf"privacy: {{\1, {', '.join(entries)}}}"
    text, flows = re.subn(r"^privacy: \{([^#\n]*)\}", flow, text, flags=re.M)
    assert blocks + flows == 1
    return re.sub(r"^(?=privacy:)", "\n".join(comment), text, flags=re.M)


def shipped() -> dict[str, pathlib.Path]:
    """Name -> file of every shipped configuration, e.g. "isrl/quickstart"."""
    package = pathlib.Path(dpfl_jax.__file__).parent
    # An installed package contains them; in a checkout they are next to it.
    folder = next(x for x in (package / "configs", package.parent / "configs") if x.is_dir())
    files = sorted(folder.rglob("*.yaml"), key=lambda file: (len(file.parts), file))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def _list(console: Console, known: dict[str, pathlib.Path]) -> dict[str, Any]:
    table = Table("name", "what")
    rows = []
    for name, file in known.items():
        rows.append({"name": name, "about": _about(file.read_text(encoding="utf-8"))})
        table.add_row(name, rows[-1]["about"])
    console.print(table)
    return {"configs": rows}


def _about(text: str) -> str:
    comment = itertools.takewhile(lambda line: line.startswith("# "), text.splitlines())
    return re.split(r"\.(?: (?=[A-Z])|$)", " ".join(line[2:] for line in comment))[0]
