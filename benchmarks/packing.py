"""``dpfl bench packing``: places without a token, and what a step costs, packed and not."""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.clipping import machine
from dpfl_jax.cli.options import Options, add_options
from dpfl_jax.config.execution import Execution
from dpfl_jax.data import ArrayStore, Schema, Store, UserView, from_texts, load_tokenizer
from dpfl_jax.data.build import write_store
from dpfl_jax.data.packing import choose_shapes
from dpfl_jax.data.pipeline import Pipeline
from dpfl_jax.data.rows import guess_format, read_rows
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import Mechanism, els, uls
from dpfl_jax.mechanisms.plan.batches import step_arguments
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches
from dpfl_jax.models import LanguageModel, TransformerConfig
from dpfl_jax.randomness import RootKey

HELP = "short texts in rows of a few shapes: places for tokens, and the step's cost"
DESCRIPTION = """\
For texts of people, and each length of a row: which part of the places for tokens that a step
computes on holds one, and the CPU seconds of the clipped sum of a step, with every text in a row of
its own and packed (execution.packing), for ULS and for ELS. The largest difference between the two
sums is relative to the sum. Of --steps steps each; the model is a transformer.

Without --texts the data are synthetic: users of up to 32 sequences, whose lengths are log-normal
with median 60 and 99th percentile 4,000, cut at the longest.

With --processes nothing is computed: for each number of processes it says what one of them reads of
a packed ULS step: bytes, examples, and CPU seconds on one thread.

examples:
  dpfl bench packing
  dpfl bench packing --processes 1,2,4,8 --seq-len 1024 --users 256
  dpfl bench packing --texts speeches.jsonl --user speaker --seq-len 128,512,1024 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--texts", type=pathlib.Path, help="JSONL, CSV or Parquet file")
    parser.add_argument("--user", default="user", help="its column of the user (default user)")
    parser.add_argument("--text", default="text", help="its column of the text (default text)")
    parser.add_argument("--seq-len", default="4096", help="tokens of a row (comma between)")
    parser.add_argument("--shapes", type=int, default=8, help="at most so many (default 8)")
    parser.add_argument("--users", type=int, default=64, help="of a step, ULS (default 64)")
    parser.add_argument("--group-size", type=int, default=16, help="texts of each (default 16)")
    parser.add_argument("--batch", type=int, default=512, help="texts of a step, ELS (default 512)")
    parser.add_argument("--width", type=int, default=64, help="of the model (default 64)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default 2)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--processes", default="", help="count what each reads (comma between)")
    parser.add_argument("--places-only", action="store_true", help="count, and compute nothing")
    add_options(parser, Options)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures and prints."""
    rows = []
    if args.processes:
        return _of_processes(args)
    for text in args.seq_len.split(","):
        if not text.isdigit() or int(text) < 2:
            raise BadInputError(f"bench packing: --seq-len has {text!r}, which is no length")
        store = _store(args, int(text))
        at_a_time: dict[str, Any] = {"clip_norm": 1.0}
        users = uls(group_size=args.group_size, cohort_size=args.users, **at_a_time)
        examples = els(group_size=10**6, batch_size=args.batch, **at_a_time)
        for mechanism, at_once in ((users, 1), (examples, 16)):
            rows.append(_one(args, store, int(text), mechanism, at_once))
            sys.stderr.write(f"{rows[-1]}\n")
    result = {"machine": machine(), "rows": rows}
    _print(result, args.json)
    return result


def _store(args: argparse.Namespace, seq_len: int) -> Store:
    if args.texts is None:
        return _synthetic(seq_len)
    format = guess_format(args.texts)
    found = read_rows(args.texts, format, (args.user, args.text))
    pairs = ((row[args.user], row[args.text]) for _, row in found)
    return from_texts((pair for pair in pairs if pair[1]), load_tokenizer("bytes"), seq_len=seq_len)


def _synthetic(seq_len: int) -> Store:
    rng, spread = np.random.default_rng(0), np.log(4000 / 60) / 2.326

    def one() -> dict[str, np.ndarray]:
        count = rng.integers(1, 33)
        lengths = np.clip(rng.lognormal(np.log(60), spread, count), 1, seq_len)
        mask = np.arange(seq_len) < lengths.astype(int)[:, None]
        return {"tokens": np.where(mask, rng.integers(2, 256, mask.shape), 0), "mask": mask}

    return ArrayStore.from_users(
        ((f"u{u}", one()) for u in range(300)), Schema.tokens(seq_len, 259)
    )


def _one(
    args: argparse.Namespace, store: Any, seq_len: int, mechanism: Mechanism, at_once: int
) -> dict[str, Any]:
    vocab_size = store.schema.vocab_size
    config = TransformerConfig(
        vocab_size=vocab_size,
        max_seq_len=seq_len,
        embed_dim=args.width,
        num_layers=args.layers,
        num_heads=max(1, args.width // 32),
    )
    model = LanguageModel(config)
    row: dict[str, Any] = {
        "unit": mechanism.kind,
        "seq_len": seq_len,
        "examples": store.num_examples,
    }
    sums = []
    for name, shapes in (("plain", 0), ("packed", args.shapes)):
        how = Execution(microbatch_size=at_once, packing=shapes)
        plan = mechanism.plan(
            store, steps=args.steps, noise_multiplier=1.0, delta=1e-6, execution=how
        )
        pipeline = plan.pipeline(plan.sampler(RootKey.from_seed(0)))
        batches = [pipeline.build(step) for step in range(args.steps)]
        tokens, places = (sum(getattr(b, n) for b in batches) for n in ("num_tokens", "num_places"))
        row[f"{name}_fraction"] = round(tokens / places, 4)
        row[f"{name}_shapes"] = pipeline.num_buckets
        if args.places_only:
            continue
        loss = plan.shipped_loss(model.loss if shapes else lambda p, e: model.loss(p, e))
        summed = jax.jit(clipped_sum_over_microbatches(mechanism, loss, plan.mesh))
        params = jax.jit(model.init)(jax.random.key(0))
        begun = time.perf_counter()
        sums.append(summed(params, *step_arguments(mechanism, batches[0]))[0])
        jax.block_until_ready(sums)
        row[f"{name}_first_seconds"] = round(time.perf_counter() - begun, 2)
        begun = time.process_time()
        for batch in batches:
            jax.block_until_ready(summed(params, *step_arguments(mechanism, batch)))
        row[f"{name}_seconds"] = round((time.process_time() - begun) / args.steps, 4)
    if sums:
        row["cost"] = round(row["packed_seconds"] / row["plain_seconds"], 4)
        off, whole = (
            sum(float(np.square(x).sum()) for x in jax.tree.leaves(tree))
            for tree in (jax.tree.map(np.subtract, *sums), sums[0])
        )
        row["error"] = float(np.sqrt(off / whole))
    return row


def _of_processes(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(_store(args, int(args.seq_len)), f"{folder}/store")
        users = uls(group_size=args.group_size, cohort_size=args.users, clip_norm=1.0)
        rows = [
            {"processes": n, **reads(store, users, n, args.shapes, args.steps)}
            for n in map(int, args.processes.split(","))
        ]
    for row in rows:
        Console(stderr=args.json).print(row)
    return {"machine": machine(), "rows": rows}


def reads(
    store: Any, mechanism: Mechanism, processes: int, shapes: int = 8, steps: int = 2
) -> dict[str, float]:
    """Bytes and examples that the last of so many processes reads in some packed steps, and time.

    Args:
      store: a store on disk.
      mechanism: samples units.
      processes: number of processes, with a device each.
      shapes: most shapes of packed rows.
      steps: number of steps.
    """
    bytes_read, examples = 0, 0

    class Counting(UserView):
        def records(self, positions: np.ndarray) -> np.ndarray:
            nonlocal bytes_read, examples
            result = super().records(positions)
            bytes_read, examples = bytes_read + result.nbytes, examples + len(positions)
            return result

    class Share(Pipeline):
        def _columns(self, shape: Any = None) -> np.ndarray:
            return np.array_split(super()._columns(shape), processes)[-1]

    counting = Counting(store, np.arange(store.num_users))
    sampler = mechanism.sampler(counting.user_offsets, RootKey.from_seed(0))
    chosen, _ = choose_shapes(
        counting, sampler.group_size, sampler.expected_size, 8, processes, shapes
    )
    pipeline = Share(counting, sampler, 8, shapes=chosen)
    bytes_read, examples, begun = 0, 0, time.process_time()
    for step in range(steps):
        pipeline.build(step)
    seconds = round((time.process_time() - begun) / steps, 4)
    return {"bytes": bytes_read, "examples": examples, "seconds_per_step": seconds}


def _print(result: dict[str, Any], to_stderr: bool) -> None:
    table = Table(title="Packed rows against a row for each text")
    columns = {
        "unit": "unit",
        "row": "seq_len",
        "real tokens": "plain_fraction",
        "packed": "packed_fraction",
        "shapes": "packed_shapes",
        "s a step": "plain_seconds",
        "packed ": "packed_seconds",
        "cost": "cost",
        "error": "error",
    }
    for name in columns:
        table.add_column(name, justify="right")
    for row in result["rows"]:
        cells = [row.get(name, "") for name in columns.values()]
        table.add_row(*(f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells))
    Console(stderr=to_stderr).print(table)
