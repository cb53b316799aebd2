"""``dpfl verify``: checks a guarantee.json."""

from __future__ import annotations

import argparse
import importlib
import pathlib
from typing import Annotated, Any

from dpfl_jax import buckets
from dpfl_jax.cli import options
from dpfl_jax.cli.options import Flag
from dpfl_jax.errors import BadInputError, imported
from dpfl_jax.run.console import Console

DESCRIPTION = """\
Check that the guarantee of a run is what it says.

A run writes guarantee.json: unit, adjacency, epsilon and delta, and also the mechanism, the public
numbers of the data and the events that follow from them. This command

  1. makes the mechanism again from the file, and with it events, unit, adjacency, trust, sampling,
     assumptions and caveats: the file must say the same;
  2. computes epsilon of the events at the stated delta: it must not be above the stated one; where
     dp_accounting's own privacy-loss distributions know the event, their lower bound must not be
     either;
  3. compares the text with the numbers;
  4. given a folder, compares the files in it with the digests in guarantee.json: config.yaml and
     checkpoints of a run, all files of an export. Those that are not there are named, and so are
     checkpoints of earlier steps, which a run keeps to resume from and takes no digest of;
  5. compares the file with the advisories that this version of dpfl_jax knows, or with those of a
     newer file, too (--advisories): which versions stated a wrong guarantee, for which runs, and
     what is true. An advisory that applies to this guarantee is a failure; one that may apply,
     which the file cannot show, is named with what to check.

It needs nothing but the file, and nothing in the file is private. It cannot show that this
mechanism is what ran, nor that the data are as the assumptions say, nor who wrote it: digests tie
files together, and sign nothing. What only the run knows (what makes a unit, what was taken as
public, a public seed, an interruption) is printed apart, as the file could leave it out. A
report.json and a report.md in the same folder, if that folder or the former is given, must state
the same guarantee.

examples:
  dpfl verify runs/mine
  dpfl verify guarantee.json --json
  dpfl verify runs/own --mechanism my_package.my_file:EveryUser
  dpfl verify runs/of_last_year --advisories advisories.json

exit status: 0 all of it holds (also: that there is no guarantee); 3 something does not hold, each
in a sentence; 2 unreadable: no such file, no JSON, a version not known here; 1 anything else.
"""

_SYSTEMS = {
    "central": "dpfl_jax.training.central_statement",
    "selection": "dpfl_jax.planning.selection",
    "federated": "dpfl_jax.federation.guarantee",
    "personal": "dpfl_jax.federation.personal",
    "isrl": "dpfl_jax.federation.isrl.privacy",
    "client": "dpfl_jax.federation.client",
}


class Options(options.Options):
    """A check of a guarantee.

    Attributes:
      file: guarantee.json, the report.json of a run, or a run directory.
      mechanism: code of a mechanism that is not the library's; it is imported.
      advisories: file of further advisories, newer than those that came with this version.
    """

    file: Annotated[str, Flag("FILE", is_positional=True, in_buckets=True)]
    mechanism: Annotated[str | None, Flag("PACKAGE.MODULE:CLASS")] = None
    advisories: Annotated[str | None, Flag("FILE")] = None


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Verifies; ``holds`` in the result is the verdict."""
    from dpfl_jax.accounting import advisories, digests, statement
    from dpfl_jax.accounting.versions import is_newer

    if args.mechanism is not None:
        imported(args.mechanism, "--mechanism")
    known = advisories.known(*filter(None, (args.advisories,)))
    given = pathlib.Path(args.file)
    if buckets.address(given) is not None:
        given = buckets.folder(args.file)
    folder = given if given.is_dir() else given.parent
    is_run = given.is_dir() or given.name == "report.json"
    stated = statement.read(folder / statement.NAME if is_run else given)
    failures, own_caveats = statement.differences(stated, _restate)
    opinion = None
    if stated.privacy.private and not failures:
        opinion, doubt = statement.second_opinion(stated)
        failures += doubt
    if is_run and (folder / "report.json").exists():
        failures += _unlike_report(folder, stated)
    files = digests.Comparison([], [], [], [])
    if is_run and stated.digests is not None:
        if exported := stated.digests.exported:
            files = digests.compare_export(folder, exported, statement.NAME)
        else:
            files = digests.compare(folder, stated.digests.run)
        failures += files.changed
    met = advisories.met(stated, known) if stated.privacy.private else []
    failures += [str(one) for one in met if one.certain]
    result = {
        "holds": not failures,
        "failures": failures,
        "file": str(given),
        "version": stated.version,
        "library": stated.library,
        "library_is_newer": is_newer(stated.library),
        "advisories": [one.to_json() for one in met],
        "privacy": stated.privacy.to_json(),
        "compared": files.same,
        "missing": files.missing,
        "untied": files.untied,
        "caveats_of_the_run": [] if failures else own_caveats,
        "dp_accounting_epsilon": None if opinion is None else list(opinion),
    }
    _print(Console(stderr=args.json), stated, result, met)
    return result


def _restate(basis: dict[str, Any]) -> Any:
    if "histogram" in basis:  # of labels, beside a run
        name = "dpfl_jax.synthesis.histogram"
        return importlib.import_module(name).restate(basis)
    name = basis["system"]
    if name not in _SYSTEMS:
        raise BadInputError(f"basis.system is {name!r}, and should be one of {', '.join(_SYSTEMS)}")
    return importlib.import_module(_SYSTEMS[name]).restate(basis)


def _unlike_report(folder: pathlib.Path, stated: Any) -> list[str]:
    """A sentence for each report of a run that states another guarantee."""
    from dpfl_jax.accounting.statement import read_report
    from dpfl_jax.files import read_text

    def plain(text: str) -> str:  # without the escapes of Markdown
        return " ".join(text.replace("\\", "").split())

    result = [sentence for sentence in [read_report(folder, stated)[1]] if sentence]
    file = folder / "report.md"
    if file.exists():
        paragraphs = [plain(paragraph) for paragraph in read_text(file).split("\n\n")]
        same = paragraphs[2:4] == ["## Guarantee", plain(stated.text)]
        if not same or not paragraphs[1].startswith(f"**{plain(stated.privacy.summary())}"):
            result.append(f"{file} states another guarantee than guarantee.json")
    return result


def _print(console: Console, stated: Any, result: dict[str, Any], met: list[Any]) -> None:
    from dpfl_jax.accounting.versions import this_version

    def say(text: str, **style: Any) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False, **style)

    say(stated.privacy.summary())
    if not result["holds"]:
        say("DOES NOT HOLD:", style="bold red")
        for failure in result["failures"]:
            say(f"- {failure}")
    if result["library_is_newer"]:
        say(
            f"made by {stated.library}, which is newer than the {this_version()} here: this "
            "version does not know its advisories; give a newer file with --advisories",
            style="bold",
        )
    possible = [one for one in met if not one.certain]
    if possible:
        say(f"made by {stated.library}, to which advisories may apply:", style="bold")
        for one in possible:
            say(f"- {one}")
    if not result["holds"]:
        return
    if not stated.privacy.private:
        say("holds: it states NO guarantee, whatever else it says", style="bold")
        return
    say("holds: the mechanism costs no more than stated; the text agrees with it", style="bold")
    if result["dp_accounting_epsilon"] is not None:
        low, high = result["dp_accounting_epsilon"]
        say(f"dp_accounting's own accountant: between {low:.4g} and {high:.4g}")
    privacy = stated.privacy
    if stated.digests is None:
        say("nothing ties a model or a configuration to this file: it has no digests")
    elif result["compared"]:
        say(f"its digests are those of {', '.join(result['compared'])}")
    else:
        say("no model or configuration was compared with it: give the folder that holds them")
    if result["missing"]:
        say(f"not here, and not compared: {', '.join(result['missing'])}", style="bold")
    if result["untied"]:
        say(
            "checkpoints that this file has no digest of (a run takes one of its last, and of its "
            f"best): nothing shows what model they hold: {', '.join(result['untied'])}"
        )
    say(f"one {privacy.unit}: {privacy.unit_key or 'the file does not say what makes one'}")
    say("assumed to be public, and not protected, which no file can show:")
    for name in privacy.public_inputs or ["the file lists nothing"]:
        say(f"- {name}")
    say("caveats of the run itself, which its file cannot show to be all, or true:")
    for caveat in result["caveats_of_the_run"] or ["none"]:
        say(f"- {caveat}")
