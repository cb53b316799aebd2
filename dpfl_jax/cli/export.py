"""``dpfl export``: writes the model of any run, with its guarantee."""

from __future__ import annotations

import argparse
import datetime
import pathlib
from typing import Annotated, Any, Literal

from dpfl_jax.cli import options
from dpfl_jax.cli.options import Flag
from dpfl_jax.errors import BadInputError, imported
from dpfl_jax.run.console import Console

DESCRIPTION = """\
Write the model of a finished run (central, federated, ISRL or `fit`) as a directory for others,
with guarantee.json, which says what holds for it (`dpfl verify` checks it), and run.json: steps,
base, date.

A language model of a known family becomes what `transformers` opens: config.json, safetensors
files, and the tokeniser of the checkpoint that it came from, adapters merged; with --adapter, the
adapters alone, which `peft` opens. Any other model becomes model.json and safetensors files, which
`dpfl_jax.load_exported` reads.

--registry writes a draft of an entry for a public registry of deployments (arXiv 2509.13509): what
guarantee.json says is filled in, and the rest is marked.

examples:
  dpfl export runs/mine exported
  dpfl export runs/mine exported --which best               # trained with train.keep_best
  dpfl export runs/mine adapter --adapter
  dpfl export runs/mine exported --dtype bfloat16 --max-file-size 2
  dpfl export runs/mine exported --registry registry.yaml
"""


class Options(options.Options):
    """An export.

    Attributes:
      run: directory of a finished run.
      out: a directory that does not exist or is empty.
      which: the last checkpoint, or the one with the lowest held-out loss (train.keep_best).
      adapter: only the adapters, in the layout of peft.
      dtype: type of the weights.
      max_file_size: largest size of a weights file, in GB.
      registry: file for the registry's entry; not in DIR, whose files the guarantee lists.
      module: code of model.module, if some of what it builds was not trained; it is imported.
    """

    run: Annotated[str, Flag("RUN", is_positional=True, in_buckets=True)]
    out: Annotated[str, Flag("DIR", is_positional=True, in_buckets=True)]
    which: Literal["last", "best"] = "last"
    adapter: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_file_size: Annotated[float, Flag("GB")] = 5.0
    registry: Annotated[str | None, Flag("FILE")] = None
    module: Annotated[str | None, Flag("PACKAGE.MODULE:BUILD")] = None


_READ_BY = {
    "huggingface": "opened by transformers, or dpfl_jax.load_exported",
    "peft": "opened by peft",
    "named": "read by dpfl_jax.load_exported",
}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Reads the run and writes the directory."""
    from dpfl_jax.training.export import export

    console = Console(stderr=args.json)
    if args.registry is not None:
        _check_place(pathlib.Path(args.registry), pathlib.Path(args.out))
    size = int(args.max_file_size * 1e9)
    build = None if args.module is None else imported(args.module, "--module")
    result = export(args.run, args.out, args.dtype, size, args.which, args.adapter, build)
    console.print(
        f"{result['parameters']:,} parameters of {args.run} after {result['step']} steps written "
        f"to {result['out']} ({_READ_BY[result['layout']]})"
    )
    console.print(result["guarantee"], highlight=False)
    if args.registry is not None:
        _write_entry(pathlib.Path(args.registry), pathlib.Path(result["out"]))
        console.print(f"written: {args.registry}, in which some entries begin with TO FILL IN")
    return result


def _check_place(file: pathlib.Path, folder: pathlib.Path) -> None:
    if folder.resolve() in file.resolve().parents:
        raise BadInputError(
            f"--registry is {file}, in the folder of the model, all of whose files the guarantee "
            "lists: write the entry somewhere else"
        )
    if not file.resolve().parent.is_dir():
        raise BadInputError(f"--registry is {file}, but there is no such folder: make it")


def _write_entry(file: pathlib.Path, folder: pathlib.Path) -> None:
    from dpfl_jax.accounting import statement
    from dpfl_jax.accounting.registry import registry_record, write_record

    stated = statement.read(folder / statement.NAME)
    record = registry_record(stated, folder.resolve().name, datetime.date.today())
    file.write_text(write_record(record), encoding="utf-8")
