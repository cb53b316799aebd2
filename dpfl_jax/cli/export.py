"""``dpfl export``: the model of any run, its guarantee beside it."""

from __future__ import annotations

import argparse
from typing import Any

from dpfl_jax.cli.main import add_json_flag
from dpfl_jax.errors import imported

DESCRIPTION = """\
Write the model of a finished run (central, federated, ISRL or `fit`) as a directory for others,
with guarantee.json, which says what holds for it (`dpfl verify` checks it), and run.json: steps,
base, date.

A language model of a known family becomes what `transformers` opens: config.json, safetensors
files, and the tokeniser of the checkpoint that it came from, adapters merged; with --adapter, the
adapters alone, which `peft` opens. Any other model becomes model.json and safetensors files, which
`dpfl_jax.load_exported` reads.

examples:
  dpfl export runs/mine exported
  dpfl export runs/mine exported --which best               # trained with train.keep_best
  dpfl export runs/mine adapter --adapter
  dpfl export runs/mine exported --dtype bfloat16 --max-file-size 2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("run", metavar="RUN", help="run directory, finished")
    parser.add_argument("out", metavar="DIR", help="a directory that does not exist or is empty")
    parser.add_argument(
        "--which",
        choices=["last", "best"],
        default="last",
        help="checkpoint: the last, or the one with the lowest held-out loss (train.keep_best)",
    )
    parser.add_argument("--adapter", action="store_true", help="adapters alone, as peft has them")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--max-file-size", type=float, default=5.0, metavar="GB", help="of a weights file"
    )
    parser.add_argument(
        "--module",
        metavar="PACKAGE.MODULE:BUILD",
        help="code of model.module, where some of what it builds was not trained; it is imported",
    )
    add_json_flag(parser)


_READ_BY = {
    "huggingface": "opened by transformers, or dpfl_jax.load_exported",
    "peft": "opened by peft",
    "named": "read by dpfl_jax.load_exported",
}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Reads the run and writes the directory."""
    from dpfl_jax.run.console import Console
    from dpfl_jax.training.export import export

    console = Console(stderr=args.json)
    size = int(args.max_file_size * 1e9)
    build = None if args.module is None else imported(args.module, "--module")
    result = export(args.run, args.out, args.dtype, size, args.which, args.adapter, build)
    console.print(
        f"{result['parameters']:,} parameters of {args.run} after {result['step']} steps written "
        f"to {result['out']} ({_READ_BY[result['layout']]})"
    )
    console.print(result["guarantee"], highlight=False)
    return result
