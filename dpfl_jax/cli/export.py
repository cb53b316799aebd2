"""``dpfl export``: a run's model in the Hugging Face layout, its guarantee beside it."""

from __future__ import annotations

import argparse
from typing import Any

from dpfl_jax.cli.main import add_json_flag

DESCRIPTION = """\
Write the model of a finished run as a directory that `transformers` opens: config.json,
safetensors files, the tokeniser of the checkpoint it came from, guarantee.json, which says what
holds for it (`dpfl verify` checks it), and run.json: steps, base, date. Adapters are merged into
the projections.

A model that was not fine-tuned from a checkpoint is written too if it is of the GPT-2, Llama or
Gemma family.

examples:
  dpfl export runs/mine exported
  dpfl export runs/mine exported --which best               # trained with train.keep_best
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
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--max-file-size", type=float, default=5.0, metavar="GB", help="of a weights file"
    )
    add_json_flag(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Reads the run and writes the directory."""
    from rich.console import Console

    from dpfl_jax.training.export import export

    console = Console(stderr=args.json)
    result = export(args.run, args.out, args.dtype, int(args.max_file_size * 1e9), args.which)
    console.print(
        f"{result['parameters']:,} parameters of {args.run} after {result['step']} steps written "
        f"to {result['out']}"
    )
    console.print(result["guarantee"], highlight=False)
    return result
