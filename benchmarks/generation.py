"""``dpfl bench generation``: tokens a second that a model writes, and that transformers does."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

HELP = "tokens a second of generation, beside transformers.generate"
DESCRIPTION = """\
Draws texts of one length from a checkpoint, at temperature 1, and counts the tokens a second of
wall time: the median over the rounds, after a first one that compiles. Nothing ends a text early.
With --peer, `transformers.generate` does the same in that Python, which has torch and transformers:
the same checkpoint, prompts and batch, a process of its own, after ours.

examples:
  dpfl bench generation
  dpfl bench generation --peer torch/bin/python
  taskset -c 0 dpfl bench generation --checkpoint checkpoints/llama --peer torch/bin/python --json
"""
# Given the checkpoint, batch size, tokens, rounds and prompts, it prints the seconds of each round.
PEER = """\
import json, sys, time, torch, transformers
folder, batch, tokens, rounds, prompts = json.load(sys.stdin)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
torch.manual_seed(0)
seconds = []
for turn in range(rounds + 1):
    start = time.perf_counter()
    for i in range(0, len(prompts), batch):
        ids = torch.tensor(prompts[i : i + batch])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, pad_token_id=0,
            min_new_tokens=tokens, max_new_tokens=tokens)
        assert made.shape == (len(ids), ids.shape[1] + tokens)
    seconds.append(time.perf_counter() - start)
row = {"library": f"transformers {transformers.__version__}", "threads": torch.get_num_threads()}
print(json.dumps({**row, "seconds": seconds[1:]}))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    from dpfl_jax.cli.options import Options, add_options

    parser.add_argument("--checkpoint", default="bundled:quickstart", metavar="NAME_OR_FOLDER")
    parser.add_argument("--peer", metavar="PYTHON", help="a Python with torch and transformers")
    parser.add_argument("--batch", type=int, default=32, help="texts at once (default 32)")
    parser.add_argument("--texts", type=int, default=128, help="in a round (default 128)")
    parser.add_argument("--tokens", type=int, default=64, help="drawn for a text (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements (default 5)")
    add_options(parser, Options)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures and prints."""
    from rich.console import Console
    from rich.table import Table

    from benchmarks.clipping import machine
    from dpfl_jax.models.checkpoint import checkpoint_dir, load_model

    folder = checkpoint_dir(args.checkpoint)
    model, params = load_model(folder)
    vocabulary = model.config.vocab_size
    prompts = np.random.default_rng(0).integers(0, vocabulary, (args.texts, 8)).tolist()
    seconds = timed(ours(model, params, prompts, args), args)
    rows: list[dict[str, Any]] = [{"library": "dpfl_jax", "seconds": seconds}]
    if args.peer is not None:
        given = json.dumps([str(folder), args.batch, args.tokens, args.rounds, prompts])
        done = subprocess.run(
            [args.peer, "-c", PEER], input=given, stdout=subprocess.PIPE, text=True, check=True
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    table = Table("", "tokens a second", "slowest round")
    for row in rows:
        drawn = args.texts * args.tokens
        row["tokens_per_second"] = drawn / statistics.median(row["seconds"])
        slowest = drawn / max(row["seconds"])
        table.add_row(row["library"], f"{row['tokens_per_second']:,.0f}", f"{slowest:,.0f}")
    Console(stderr=args.json).print(table)
    return {"machine": machine(), "checkpoint": args.checkpoint, "batch": args.batch, "rows": rows}


def ours(model: Any, params: Any, prompts: list[list[int]], args: argparse.Namespace) -> Any:
    """A round of this library."""
    import jax

    from dpfl_jax.models.generate import Sampling, generate_texts

    def round_(turn: int) -> None:
        texts = generate_texts(
            model, params, prompts, max_tokens=args.tokens, key=jax.random.key(turn),
            sampling=Sampling(), batch_size=args.batch,
        )  # fmt: skip
        assert all(len(text.tokens) == args.tokens for text in texts)

    return round_


def timed(round_: Callable[[int], None], args: argparse.Namespace) -> list[float]:
    """Seconds of each round but the first."""
    seconds = []
    for turn in range(args.rounds + 1):
        start = time.perf_counter()
        round_(turn)
        seconds.append(time.perf_counter() - start)
        sys.stderr.write(f"round {turn} of {args.rounds}: {seconds[-1]:.2f} s\n")
    return seconds[1:]
