"""``dpfl bench data``: does sampling, reading and batching keep ahead of the step?"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import pathlib
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dpfl_jax.cli.options import Options, add_options
from dpfl_jax.errors import BadInputError

HELP = "sampling, reading and batching from a large store"
DESCRIPTION = """\
Make (or reuse) a synthetic store of heavy-tailed users, then measure, for example-level sampling
(ELS) and user-level sampling (ULS):

  n           examples in a step
  draw, read  drawing and reading alone, on one thread
  serial      one step's draw, read, pad and ship, on one thread
  ahead       time per step through the prefetching pipeline, nothing else running
  cpu         processor time of all threads per step
  wait        how long a step of --step-ms waits for its batch (sleeping in between, as a host
              does while an accelerator computes)

"raw" ships the stored records and leaves unpacking to the device (Pipeline(compact=True));
"buckets" does so with users sorted by how many examples they hold. A step is sampled by the Poisson
law over all examples or users of the store; ELS first limits every
user to --limit examples.

examples:
  dpfl bench data
  dpfl bench data --users 20000 --examples 500000 --formats arrow
  dpfl bench data --store STORE --step-ms 5 --json
"""
BENCH_SEQ_LEN = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the sizes."""
    parser.add_argument("--users", type=int, default=300_000)
    parser.add_argument("--examples", type=int, default=10_000_000)
    parser.add_argument("--seq-len", type=int, default=BENCH_SEQ_LEN)
    parser.add_argument("--formats", nargs="+", default=["arrow", "arrayrecord"])
    parser.add_argument("--store", help="measure this store instead of a synthetic one")
    parser.add_argument("--work-dir", help="keep synthetic stores here, and reuse them")
    parser.add_argument("--batch", type=int, default=1024, help="ELS: expected examples")
    parser.add_argument("--limit", type=int, default=32, help="ELS: examples of a user, at most")
    parser.add_argument("--cohort", type=int, default=256, help="ULS: expected users")
    parser.add_argument("--group-size", type=int, default=16, help="ULS: examples of a user")
    parser.add_argument("--row", type=int, default=64, help="units per microbatch")
    parser.add_argument("--step-ms", type=float, default=1.0, help="time of a step")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--host-only", action="store_true", help="leave JAX out: NumPy batches")
    add_options(parser, Options)


def heavy_tailed_counts(users: int, examples: int, seed: int = 0) -> np.ndarray:
    """Returns examples per user: log-normal with sigma 1.8 (median about 6 for 300 k users)."""
    if examples < users:
        raise BadInputError(f"{examples} examples are too few for {users} users")
    raw = np.random.default_rng(seed).lognormal(0.0, 1.8, users)
    counts = 1 + np.floor(raw / raw.sum() * (examples - users)).astype(np.int64)
    counts[: examples - int(counts.sum())] += 1
    return counts


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a new process, so that memory measured there is its own."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(function, *arguments).result()


def build_synthetic(
    out: pathlib.Path, users: int, examples: int, seq_len: int, format: str
) -> dict[str, Any]:
    """Builds a synthetic token store from rows in random order and says what that took."""
    from dpfl_jax.data.build import BuildPlan, build_store, default_num_shards
    from dpfl_jax.data.schema import Schema

    started, cpu = time.perf_counter(), time.process_time()
    schema = Schema.tokens(seq_len, 259)
    shards = default_num_shards(examples * schema.record_dtype.itemsize)
    plan = BuildPlan(schema, format, shards, tokenizer=None)
    counts = heavy_tailed_counts(users, examples)

    def rows() -> Iterator[tuple[str, bytes]]:
        rng = np.random.default_rng(0)
        # Words of a fixed random text: compressible as text is.
        text = rng.integers(100, 125, 1 << 16).astype(schema.record_dtype["tokens"].base)
        owners = rng.permutation(np.repeat(np.arange(users, dtype=np.int32), counts))
        for first in range(0, examples, 4096):
            mine = owners[first : first + 4096].tolist()
            records = np.empty(len(mine), schema.record_dtype)
            starts = rng.integers(0, len(text) - seq_len, len(mine))
            records["tokens"] = text[starts[:, None] + np.arange(seq_len)]
            records["length"] = rng.integers(seq_len // 2, seq_len + 1, len(mine))
            padding = np.arange(seq_len) >= records["length"][:, None]
            records["tokens"][padding] = 0
            for user, record in zip(mine, records):
                yield f"user-{user:07d}", record.tobytes()

    build_store(rows, out, plan, sources={"synthetic": [users, examples]})
    return {
        "build_s": round(time.perf_counter() - started, 1),
        "build_cpu_s": round(time.process_time() - cpu, 1),
        "peak_rss_mb": peak_rss_mb(),
    }


def peak_rss_mb() -> int:
    """Returns the largest resident memory of this process so far, in MB."""
    try:
        # ru_maxrss begins at the parent's, whose memory-mapped stores would be counted.
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith("VmHWM"))
        return int(line.split()[1]) // 1024
    except (OSError, StopIteration):
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def current_rss() -> int:
    """Returns resident memory of this process in bytes (0 where /proc is not there)."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def measure_open(path: pathlib.Path) -> dict[str, Any]:
    """Opens a store and touches every shard; returns time and memory (of this process)."""
    from array_record.python import array_record_module  # noqa: F401  (its own memory, not ours)

    from dpfl_jax.data.shards import ShardStore

    before, started = current_rss(), time.perf_counter()
    store = ShardStore(path)
    opened = time.perf_counter() - started
    # The first record of every shard: opens every reader, with its index.
    store.read(np.cumsum([0, *(s.examples for s in store.manifest.shards)])[:-1])
    ready = time.perf_counter() - started
    grown = max(0, current_rss() - before)
    return {
        "open_s": round(opened, 3),
        "open_all_shards_s": round(ready, 3),
        "index_bytes_per_example": round(grown / store.num_examples, 2),
        "disk_mb": sum(s.bytes for s in store.manifest.shards) // 10**6,
    }


def measure_pipeline(pipeline: Any, steps: int, step_s: float) -> dict[str, Any]:
    """Measures one pipeline: serial, free running, and against steps of a fixed time."""
    warm = 10
    serial = []
    for step in range(warm + min(steps, 100)):
        started = time.perf_counter()
        pipeline.build(step)
        serial.append(time.perf_counter() - started)
    batches = pipeline.iterate(0, warm + steps)
    examples = 0
    for step, batch in enumerate(batches):
        if step == warm:
            started, cpu = time.perf_counter(), time.process_time()
        examples += batch.num_examples if step >= warm else 0
    free, free_cpu = time.perf_counter() - started, time.process_time() - cpu
    waits = []
    batches = iter(pipeline.iterate(0, warm + steps))
    for step in range(warm + steps):
        started = time.perf_counter()
        next(batches)
        waited = time.perf_counter() - started
        if step >= warm:
            waits.append(waited)
        time.sleep(step_s)
    return {
        "examples_per_step": round(examples / steps),
        "serial_ms": round(1e3 * float(np.median(serial[warm:])), 3),
        "pipeline_ms": round(1e3 * free / (steps - 1), 3),
        "pipeline_cpu_ms": round(1e3 * free_cpu / (steps - 1), 3),
        "wait_median_ms": round(1e3 * float(np.median(waits)), 3),
        "wait_mean_ms": round(1e3 * float(np.mean(waits)), 3),
        "keeps_ahead": bool(free / (steps - 1) <= step_s),
    }


def parts_of_serial(store: Any, sampler: Any, repeats: int = 40) -> dict[str, float]:
    """Times the draw and the read alone (median, ms): they say what bounds a slow pipeline."""
    draw_s, read_s = [], []
    for step in range(repeats):
        started = time.perf_counter()
        draw = sampler.draw(step)
        draw_s.append(time.perf_counter() - started)
        positions = draw.positions[draw.example_mask]
        started = time.perf_counter()
        store.read(positions)
        read_s.append(time.perf_counter() - started)
    return {
        "draw_ms": round(1e3 * float(np.median(draw_s)), 3),
        "read_ms": round(1e3 * float(np.median(read_s)), 3),
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Builds, opens, measures; prints a table."""
    from rich.console import Console

    from dpfl_jax.data.shards import ShardStore

    console = Console(stderr=args.json)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        work = pathlib.Path(args.work_dir or temporary)
        for format in [None] if args.store else args.formats:
            path, built = _store_path(args, work, format, console)
            opened = in_fresh_process(measure_open, path)
            store = ShardStore(path)
            for kind, sampler, sizes, compact in _samplers(store, args):
                pipeline = _pipeline(store, sampler, sizes, compact, args)
                rows.append(
                    {
                        "format": store.manifest.shard_format,
                        "sampling": kind,
                        **measure_pipeline(pipeline, args.steps, args.step_ms / 1e3),
                        **parts_of_serial(store, sampler),
                        **opened,
                        **built,
                        "users": store.num_users,
                        "examples": store.num_examples,
                    }
                )
    _print(rows, args, console)
    machine = {"cpu_count": os.cpu_count(), "platform": platform.platform()}
    return {"machine": machine, "step_ms": args.step_ms, "rows": rows}


def _store_path(
    args: argparse.Namespace, work: pathlib.Path, format: str | None, console: Any
) -> tuple[pathlib.Path, dict[str, Any]]:
    if args.store:
        return pathlib.Path(args.store), {}
    assert format is not None
    path = work / f"synthetic-{args.users}-{args.examples}-{args.seq_len}-{format}"
    if path.exists():
        return path, {}
    console.print(f"building {args.examples:,} examples of {args.users:,} users ({format}) ...")
    built = in_fresh_process(build_synthetic, path, args.users, args.examples, args.seq_len, format)
    console.print(f"  {built['build_s']} s, peak memory {built['peak_rss_mb']} MB")
    return path, built


def _samplers(store: Any, args: argparse.Namespace) -> Iterator[tuple[str, Any, Any, bool]]:
    from dpfl_jax.data.pipeline import bucket_group_sizes
    from dpfl_jax.randomness import RootKey
    from dpfl_jax.sampling import ExampleSampler, Poisson, UserSampler, limit_contributions

    key = RootKey.from_seed(0)
    kept = limit_contributions(key.numpy("contribution"), store.user_offsets, args.limit)
    examples = ExampleSampler(Poisson(min(1.0, args.batch / len(kept))), kept, key)
    yield "ELS", examples, None, False
    yield "ELS, raw", examples, None, True
    prob = min(1.0, args.cohort / store.num_users)
    users = UserSampler(Poisson(prob), store.user_offsets, args.group_size, key)
    yield "ULS", users, None, False
    yield "ULS, raw", users, None, True
    yield "ULS, buckets", users, bucket_group_sizes(args.group_size), True


def _pipeline(store: Any, sampler: Any, sizes: Any, compact: bool, args: argparse.Namespace) -> Any:
    from dpfl_jax.data.pipeline import Pipeline

    mesh = None
    if not args.host_only:
        import jax
        from jax.sharding import AxisType

        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    return Pipeline(
        store,
        sampler,
        args.row,
        sizes,
        mesh,
        compact=compact,
        threads=args.threads,
        ahead=2 * args.threads + 2,
    )


def _print(rows: list[dict[str, Any]], args: argparse.Namespace, console: Any) -> None:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        title=f"against a step of {args.step_ms:g} ms (times in ms per step)",
    )
    columns = {
        "format": "format",
        "sampling": "sampling",
        "examples_per_step": "n",
        "draw_ms": "draw",
        "read_ms": "read",
        "serial_ms": "serial",
        "pipeline_ms": "ahead",
        "pipeline_cpu_ms": "cpu",
        "wait_median_ms": "wait",
        "keeps_ahead": "keeps up",
    }
    for name in columns.values():
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [row[name] for name in columns]
        cells[-1] = "yes" if cells[-1] else "no"
        table.add_row(*(f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells))
    console.print(table)
    for row in {r["format"]: r for r in rows}.values():
        console.print(
            f"{row['format']}: {row['examples']:,} examples, {row['disk_mb']} MB on disk, opened "
            f"in {row['open_s']} s ({row['open_all_shards_s']} s with all shards), "
            f"{row['index_bytes_per_example']} bytes of memory an example"
        )
    for row in rows:
        if not row["keeps_ahead"]:
            parts = {
                "reading records": row["read_ms"],
                "drawing": row["draw_ms"],
                "padding and shipping": row["serial_ms"] - row["read_ms"] - row["draw_ms"],
            }
            part = max(parts, key=lambda name: parts[name])
            console.print(
                f"{row['format']}, {row['sampling']}: {row['pipeline_ms']} ms a step; most of it "
                f"is {part} ({parts[part]:.2f} of {row['serial_ms']} ms on one thread)"
            )
