"""``dpfl bench clipping``: bounded gradients against training without privacy and against peers."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._clipping_models import MODELS, workload
from dpfl_jax.accounting import NoiseLaw
from dpfl_jax.cli.options import Options, add_options
from dpfl_jax.clipping import clipped_grad
from dpfl_jax.clipping.jaxprs import count_flops
from dpfl_jax.errors import BadInputError
from dpfl_jax.noise import Noise

HELP = "time, memory and arithmetic of bounded gradients over the non-private gradient"
DESCRIPTION = """\
Measures each strategy of clipped_grad, the non-private gradient in one batch and in microbatches of
every size, JAX-Privacy's clipped_grad (where installed), Optax's per-example DP-SGD, and the two
laws of noise alone, all in one process, in random order, and prints medians. Time and memory ratios
are over the fastest non-private variant, FLOP ratios over one batch. Time is CPU seconds on a CPU,
wall time elsewhere. Memory is the compiler's temporary and output memory.

examples:
  dpfl bench clipping
  dpfl bench clipping --unit user --group-size 4
  dpfl bench clipping --model lm-350m --dtype bfloat16 --batch 8 --json
"""

PyTree = Any
Variant = Callable[[PyTree, PyTree], Any]


@dataclasses.dataclass
class Row:
    """One variant's measurements; times in seconds, memory in bytes."""

    strategy: str
    private: bool
    run: Any
    memory: int
    flops: float
    error: float | None
    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)

    @property
    def times(self) -> list[float]:
        """CPU seconds on a CPU, which others of a machine disturb less; wall time elsewhere."""
        return self.cpu if jax.default_backend() == "cpu" else self.wall


def seconds(row: Row) -> float:
    """Median time."""
    return statistics.median(row.times)


def wall(row: Row) -> float:
    """Median wall time."""
    return statistics.median(row.wall)


def machine() -> dict[str, str]:
    """What was measured on."""
    return {
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "clock": "cpu seconds" if jax.default_backend() == "cpu" else "wall seconds",
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--model", choices=MODELS, default="lm-small")
    parser.add_argument("--unit", choices=("example", "user"), default="example")
    parser.add_argument("--batch", type=int, default=32, help="examples a step (default 32)")
    parser.add_argument("--group-size", type=int, default=4, help="examples of a user (default 4)")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each variant")
    parser.add_argument(
        "--only",
        help="of the private variants, only those with one of these (comma between) in their name",
    )
    parser.add_argument("--seed", type=int, default=0)
    add_options(parser, Options)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures and prints."""
    if args.batch < 1 or args.group_size < 1 or args.seq_len < 2 or args.rounds < 1:
        raise BadInputError(
            "bench clipping: --batch, --group-size and --rounds must be at least 1, --seq-len 2"
        )
    users = args.unit == "user"
    if users and args.batch % args.group_size:
        raise BadInputError(
            f"bench clipping: --batch {args.batch} is not a multiple of --group-size "
            f"{args.group_size}"
        )
    units = args.batch // args.group_size if users else args.batch
    work = workload(args.model, args.unit, units, args.group_size, args.seq_len, args.dtype)
    key = jax.random.key(args.seed)
    params, batch = work.init(key), work.batch(jax.random.fold_in(key, 1))
    example = workload(args.model, "example", args.batch, 1, args.seq_len, args.dtype)
    flat = jax.tree.map(lambda x: x.reshape(args.batch, *x.shape[2:]), batch) if users else batch

    rows = []
    for name, (private, function, data) in _variants(work, example, units, batch, flat).items():
        if private and args.only and not any(part in name for part in args.only.split(",")):
            continue
        try:
            loops = 1
            if name.startswith("jax-privacy, microbatch"):  # its loop has no static length
                loops = units // int(name.split()[-1])
            rows.append(prepare(name, private, function, params, data, loops))
        except jax.errors.JaxRuntimeError as error:  # out of memory
            sys.stderr.write(f"{name}: left out: {str(error).splitlines()[0]}\n")
    _errors(rows, work, params, batch, units)
    measure(rows, args.rounds, args.seed)
    result = _report(rows, args)
    _print(result, args.json)
    return result


def _variants(
    work: Any, example: Any, units: int, batch: PyTree, flat: PyTree
) -> dict[str, tuple[bool, Variant, PyTree]]:
    out: dict[str, tuple[bool, Variant, PyTree]] = {}
    total = jax.tree.leaves(flat)[0].shape[0]
    sizes = [m for m in (1, 2, 4, 8, 16, 32) if m < total and total % m == 0]
    out["non-private, one batch"] = (False, non_private(example.loss, None), flat)
    for m in sizes:
        out[f"non-private, microbatch {m}"] = (False, non_private(example.loss, m), flat)
    for m in sizes:  # on some machines batched small products are faster than one large one
        f = non_private(example.loss, m, mapped=True)
        out[f"non-private, mapped, microbatch {m}"] = (False, f, flat)
    for strategy in ("auto", "ghost", "scan", "vmap"):
        out[strategy] = (True, clipped_grad(work.loss, clip_norm=1.0, strategy=strategy), batch)
    sizes = [m for m in (2, 4, 8, 16) if m < units and units % m == 0]
    for m in sizes:
        f = clipped_grad(work.loss, clip_norm=1.0, strategy="ghost", microbatch_size=m)
        out[f"ghost, microbatch {m}"] = (True, f, batch)
    for m in sizes:
        f = clipped_grad(work.loss, clip_norm=1.0, strategy="scan", microbatch_size=m)
        out[f"scan, microbatch {m}"] = (True, f, batch)
    try:
        peer = importlib.import_module("jax_privacy.clipping")
    except ImportError:
        peer = None
    for size in [None, 1, *sizes] if peer is not None else []:
        assert peer is not None
        f = peer.clipped_grad(
            work.loss,
            l2_clip_norm=1.0,
            batch_argnums=1,
            keep_batch_dim=False,
            microbatch_size=size,
        )
        out["jax-privacy" + (f", microbatch {size}" if size else "")] = (True, f, batch)
    out["optax.contrib"] = (True, _optax(work.loss), batch)
    for law in get_args(NoiseLaw):
        out[f"noise alone, {law}"] = (True, _noise(Noise(1.0, 1.0, law)), batch)
    return out


def _noise(noise: Noise) -> Variant:
    """What noise adds to any of the private variants: a sum of zeros is noised."""

    def add(params: PyTree, batch: PyTree) -> PyTree:
        some = jax.tree.leaves(batch)[0].ravel()[0].astype(jnp.uint32)  # known when it runs
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return noise.add(jnp.arange(8, dtype=jnp.uint32) + some, zeros)

    return add


def non_private(loss: Any, microbatch: int | None, mapped: bool = False) -> Variant:
    """Sum of gradients, as fast as one can without privacy.

    Args:
      loss: of one example.
      microbatch: examples at a time; None: all.
      mapped: sum the mapped gradients instead of differentiating the summed loss.
    """

    def batch_loss(params: PyTree, batch: PyTree) -> jax.Array:
        return jnp.sum(jax.vmap(loss, in_axes=(None, 0))(params, batch))

    def mapped_gradient(params: PyTree, batch: PyTree) -> PyTree:
        gradients = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch)
        return jax.tree.map(lambda g: jnp.einsum("n...->...", g), gradients)

    gradient = mapped_gradient if mapped else jax.grad(batch_loss)
    if microbatch is None:
        return gradient

    def accumulated(params: PyTree, batch: PyTree) -> PyTree:
        chunks = jax.tree.map(lambda x: x.reshape(-1, microbatch, *x.shape[1:]), batch)

        def body(total: PyTree, chunk: PyTree) -> tuple[PyTree, None]:
            return jax.tree.map(jnp.add, total, gradient(params, chunk)), None

        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), chunks)[0]

    return accumulated


def _optax(loss: Any) -> Variant:
    from optax import contrib

    aggregate = contrib.differentially_private_aggregate(1.0, 0.0, 0)

    def run(params: PyTree, batch: PyTree) -> PyTree:
        gradients = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, batch)
        return aggregate.update(gradients, aggregate.init(params), params)[0]

    return run


def prepare(
    name: str, private: bool, function: Variant, params: PyTree, data: PyTree, loops: int
) -> Row:
    """Compiles a variant; ``loops``: of what length a loop is whose length the program lacks."""
    compiled = jax.jit(function).lower(params, data).compile()
    memory: Any = compiled.memory_analysis()
    size = int(memory.temp_size_in_bytes + memory.output_size_in_bytes)
    flops = count_flops(function, params, data, loop_length=loops)

    def call() -> Any:
        return jax.block_until_ready(compiled(params, data))

    return Row(name, private, call, size, flops, None)


def _errors(rows: list[Row], work: Any, params: PyTree, batch: PyTree, units: int) -> None:
    """Fills in the largest relative error of each parameter's sum against a float32 reference."""
    del units
    f = clipped_grad(work.loss, clip_norm=1.0, strategy="scan")
    want = jax.tree.leaves(jax.jit(f)(params, batch).sum)
    for row in rows:
        if not row.private or row.strategy.startswith("noise"):
            continue
        out = row.run()
        got = jax.tree.leaves(out.sum if hasattr(out, "sum") else out)
        scale = 1.0
        if row.strategy.startswith("optax"):  # returns a mean
            scale = float(jax.tree.leaves(batch)[0].shape[0])
        row.error = max(
            float(np.linalg.norm((np.asarray(g, np.float32) * scale - np.asarray(w)).ravel()))
            / max(float(np.linalg.norm(np.asarray(w).ravel())), 1e-30)
            for g, w in zip(got, want, strict=True)
        )


# What is shorter is run again and again: clocks, caches and other work move a few milliseconds.
_SLICE = 0.05


def measure(rows: list[Row], rounds: int, seed: int) -> None:
    """Times each row so many times, in random order, each time for long enough to be told apart."""
    order = random.Random(seed)
    calls = []
    for row in rows:
        row.run()
        start = time.perf_counter()
        row.run()
        calls.append(max(1, math.ceil(_SLICE / (time.perf_counter() - start))))
    for _ in range(rounds):
        for row, count in order.sample(list(zip(rows, calls)), len(rows)):
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                row.run()
            row.cpu.append((time.process_time() - cpu) / count)
            row.wall.append((time.perf_counter() - wall) / count)


def _report(rows: list[Row], args: argparse.Namespace) -> dict[str, Any]:
    plain = [r for r in rows if not r.private]
    best = min(plain, key=seconds)
    memory = best.memory
    one_batch = plain[0]
    out = []
    for row in rows:
        times = row.times
        quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
        out.append(
            {
                "strategy": row.strategy,
                "unit": args.unit,
                "private": row.private,
                "time_ratio": round(seconds(row) / seconds(best), 4),
                "time_ratio_one_batch": round(seconds(row) / seconds(one_batch), 4),
                "memory_ratio": round(row.memory / max(memory, 1), 4),
                "memory_ratio_one_batch": round(row.memory / max(one_batch.memory, 1), 4),
                "flops_ratio": round(row.flops / one_batch.flops, 4),
                "max_rel_err": row.error,
                "seconds": round(seconds(row), 5),
                "wall_seconds": round(wall(row), 5),
                "spread": round((quartiles[2] - quartiles[0]) / seconds(row), 4),
                "temp_bytes": row.memory,
            }
        )
    return {
        "machine": machine(),
        "model": args.model,
        "batch": args.batch,
        "group_size": args.group_size if args.unit == "user" else 1,
        "seq_len": args.seq_len,
        "dtype": args.dtype,
        "best_non_private": best.strategy,
        "rows": out,
    }


def _print(result: dict[str, Any], to_stderr: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{result['model']}, {result['batch']} examples, length {result['seq_len']}, "
        f"{result['dtype']}; ratios over: {result['best_non_private']}"
    )
    table = Table(title=title)
    for column in ("variant", "time", "/ one batch", "memory", "/ one batch", "flops", "error"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    table.add_column(result["machine"]["clock"], justify="right")
    table.add_column("spread", justify="right")
    for row in result["rows"]:
        error = "" if row["max_rel_err"] is None else f"{row['max_rel_err']:.1e}"
        table.add_row(
            row["strategy"],
            f"{row['time_ratio']:.2f}",
            f"{row['time_ratio_one_batch']:.2f}",
            f"{row['memory_ratio']:.2f}",
            f"{row['memory_ratio_one_batch']:.2f}",
            f"{row['flops_ratio']:.2f}",
            error,
            f"{row['seconds']:.4f}",
            f"{100 * row['spread']:.0f} %",
        )
    Console(stderr=to_stderr).print(table)
