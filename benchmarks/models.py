"""``dpfl bench models``: models of other libraries, privately and not."""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import ctypes
import multiprocessing
import os
import random
import statistics
import sys
import time
from typing import Any, Literal

import jax
import numpy as np

from benchmarks._clipping_models import workload
from benchmarks._third_party import MODELS, TRAINED
from benchmarks.clipping import machine, non_private, prepare
from dpfl_jax.cli.options import Options, add_options
from dpfl_jax.clipping import clipped_grad, join, split
from dpfl_jax.errors import BadInputError

HELP = "models of other libraries: error, time and memory over the non-private step"
DESCRIPTION = """\
For each model: the bounded sum with the strategy that `auto` takes, against plain vmap(grad) (error
of norms and of the sum, the largest of any parameter), and its time and memory, as a training step
takes it (without each parameter's own norms), over those of the gradient without privacy: first as
one writes it, of the whole batch, then of so many examples at a time as are fastest for that model.
(A gradient that is zero up to rounding, such as that of an attention's key biases, counts as 1e-5
of all of them together.) `time` is wall time. `cpu` is CPU seconds, of which some are threads that
wait for others: where the program may use one core alone (`taskset -c 0`), neither counts any
waiting.

Each variant has a process of its own (three, of which the median counts, where a step takes less
than 10 ms), in which it is compiled and called once before anything is timed; then they take turns,
in random order. Ratios are medians over the rounds. (A TPU, which one process takes for itself,
cannot be measured so.) Models whose library is not installed are left out: the group `models` has
tunix, qwix and keras-hub (uv sync --group models).

examples:
  dpfl bench models
  taskset -c 0 dpfl bench models
  dpfl bench models --only nnx,tunix-qwen3,qwix-lora --json
"""
OWN = ("cnn", "lstm", "mlp")
SIZES = (None, 1, 4, 8, 16)  # examples at a time without privacy; None: all
PyTree = Any
How = int | Literal["auto", "vmap"] | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--only", help=f"of {', '.join([*MODELS, *OWN])} (comma between)")
    parser.add_argument("--batch", type=int, default=32, help="examples a step (default 32)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each variant (default 9)")
    add_options(parser, Options)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures and prints."""
    names = [*MODELS, *OWN] if args.only is None else args.only.split(",")
    if unknown := set(names) - {*MODELS, *OWN}:
        raise BadInputError(f"bench models: --only has {min(unknown)!r}, which is none of these")
    rows, absent = [], {}
    for name in names:
        try:
            rows.append(_one(name, args.batch, args.rounds))
        except ImportError as missing:
            absent[name] = str(missing)
        else:
            sys.stderr.write(f"{name}: {rows[-1]['time_ratio']:.2f}\n")
    result = {"machine": machine(), "batch": args.batch, "rows": rows, "not_installed": absent}
    _print(result, args.json)
    return result


def _model(name: str, batch: int) -> tuple[PyTree, Any, PyTree]:
    key = jax.random.key(0)
    if name in OWN:
        own = workload(name, "example", batch, 1, 128, "float32")
        return own.init(key), own.loss, own.batch(key)
    params, loss, make = MODELS[name]()
    return params, loss, make(key, batch)


class Variant:
    """What a process of its own times. What another leaves of the heap makes a step slower."""

    here: Variant  # in that process

    def __init__(self, name: str, size: int, how: How) -> None:
        params, loss, batch = _model(name, size)
        trainable = TRAINED.get(name)
        trained, frozen = split(params, trainable)
        self.told: dict[str, Any] = {}
        if isinstance(how, str):
            gradient = clipped_grad(loss, clip_norm=1.0, trainable=trainable, strategy=how)
            self.row = prepare(how, True, _as_taken(gradient), params, batch, 1)
            told = gradient.explain(params, batch)
            self.told = {
                "parameters": sum(x.size for x in jax.tree.leaves(params)),
                "trained": sum(x.size for x in jax.tree.leaves(trained)),
                "strategy": told.strategy,
                "microbatch_size": told.microbatch_size,
                "methods": dict(collections.Counter(leaf.method for leaf in told.leaves)),
            }
        else:
            part = lambda trained, example: loss(join(trained, frozen), example)  # noqa: E731
            self.row = prepare(str(how), False, non_private(part, how), trained, batch, 1)

    @staticmethod
    def begin(name: str, size: int, how: How) -> tuple[int, dict[str, Any]]:
        """Prepares this process; bytes of memory and what ``explain`` tells."""
        _keep_pages()
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a GPU is shared
        Variant.here = Variant(name, size, how)
        Variant.here.row.run()
        return Variant.here.row.memory, Variant.here.told

    @staticmethod
    def turn() -> tuple[float, float]:
        """Wall and CPU seconds of a call, among as many as make a slice."""
        row = Variant.here.row
        row.run()  # what the others left of the cache is not of this one's time
        calls, start, used = 0, time.perf_counter(), time.process_time()
        while (taken := time.perf_counter() - start) < _SLICE:
            row.run()
            calls += 1
        return taken / calls, (time.process_time() - used) / calls

    @staticmethod
    def result() -> tuple[Any, list[Any]]:
        """The norms and the sums of a private variant."""
        total, norms, *_ = Variant.here.row.run()
        return np.asarray(norms), [np.asarray(x) for x in jax.tree.leaves(total)]


def _keep_pages() -> None:
    """Has the C library (glibc) keep what a step frees and the next one takes.

    By default it returns what is free at the end of the heap, beyond a threshold that grows with
    what was freed before: whether a step's 10 MB are fetched anew from the system, page by page,
    is then chance, of any two programs. What exceeds 32 MiB is fetched anew, as by default.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(-1, 2**30)  # M_TRIM_THRESHOLD
        set_option(-3, 2**25)  # M_MMAP_THRESHOLD: where its growth ends by default


# Of some milliseconds one call says little, and a process that was waiting takes some to be fast.
_SLICE = 0.5
# A shorter step is as fast as its process is lucky with where its memory lies (of one program two
# processes differed by 10 %), so the median of some counts.
_QUICK, _PROCESSES = 0.01, 3


def _one(name: str, size: int, rounds: int) -> dict[str, Any]:
    plain = [m for m in SIZES if m is None or (m < size and size % m == 0)]
    variants: list[How] = [*plain, "auto", "vmap"]
    with contextlib.ExitStack() as stack:
        alone = multiprocessing.get_context("forkserver")
        alone.set_forkserver_preload(["dpfl_jax", __name__])  # or each would import them again

        def start() -> concurrent.futures.ProcessPoolExecutor:
            return stack.enter_context(concurrent.futures.ProcessPoolExecutor(1, alone))

        pools = {how: [start()] for how in variants}
        begun = {how: pools[how][0].submit(Variant.begin, name, size, how) for how in variants}
        memory = {how: future.result()[0] for how, future in begun.items()}
        once = {how: pools[how][0].submit(Variant.turn).result()[0] for how in plain}
        if min(once.values()) < _QUICK:
            near: list[How] = [m for m in plain if m is None or once[m] < 1.5 * min(once.values())]
            more = [(how, start()) for how in [*near, "auto"] for _ in range(_PROCESSES - 1)]
            for ready in [pool.submit(Variant.begin, name, size, how) for how, pool in more]:
                ready.result()
            for how, pool in more:
                pools[how].append(pool)
        turns: dict[Any, list[tuple[float, float]]] = {how: [] for how in variants}
        order = random.Random(0)
        for k in range(rounds):
            # Copies take hundreds of times as long, and nobody needs to know that to a percent.
            now = variants if k < 3 else variants[:-1]
            for how in order.sample(now, len(now)):
                taken = [pool.submit(Variant.turn).result() for pool in pools[how]]
                turns[how].append(tuple(map(statistics.median, zip(*taken))))
        norms, sums = pools["auto"][0].submit(Variant.result).result()
        want_norms, want_sums = pools["vmap"][0].submit(Variant.result).result()
    wall = {how: [t[0] for t in taken] for how, taken in turns.items()}
    cpu = {how: [t[1] for t in taken] for how, taken in turns.items()}
    median = statistics.median
    fastest, least = (min(plain, key=lambda m: median(of[m])) for of in (wall, cpu))

    def over(how: How, by_wall: How = None, by_cpu: How = None) -> dict[str, float]:
        return {
            "time_ratio": round(_ratio(wall[how], wall[by_wall]), 3),
            "cpu_ratio": round(_ratio(cpu[how], cpu[by_cpu]), 3),
            "memory_ratio": round(memory[how] / max(memory[by_wall], 1), 3),
        }

    quartiles = np.percentile(wall["auto"], [25, 75])
    return {
        "model": name,
        **begun["auto"].result()[1],
        "norm_error": float(np.max(np.abs(norms / want_norms - 1))),
        "sum_error": _error(sums, want_sums),
        **over("auto"),
        "over_fastest": over("auto", fastest, least),
        "fastest_at_a_time": fastest,
        "vmap": over("vmap"),
        "seconds": median(wall["auto"]),
        "spread": round(float(np.diff(quartiles)[0]) / median(wall["auto"]), 3),
    }


def _ratio(times: list[float], others: list[float]) -> float:
    """Of turns side by side, because the machine's speed changes from one round to another."""
    return statistics.median(a / b for a, b in zip(times, others))


def _as_taken(gradient: Any) -> Any:
    """What a training step takes of a bounded sum: no weights, nor norms of single parameters."""

    def taken(params: PyTree, batch: PyTree) -> tuple[PyTree, jax.Array, jax.Array, jax.Array]:
        out = gradient(params, batch)
        return out.sum, out.norms, out.losses, out.nonfinite

    return taken


def _error(got: list[Any], want: list[Any]) -> float:
    """The largest relative error; a gradient that is rounding alone counts as 1e-5 of them all."""
    norms = [float(np.linalg.norm(np.ravel(w).astype(np.float32))) for w in want]
    least = max(1e-5 * float(np.linalg.norm(norms)), 1e-30)
    return max(
        float(np.linalg.norm(np.ravel(g - w).astype(np.float32))) / max(norm, least)
        for g, w, norm in zip(got, want, norms, strict=True)
    )


def _ratios(of: dict[str, float]) -> list[float]:
    return [of[name] for name in ("time_ratio", "cpu_ratio", "memory_ratio")]


def _print(result: dict[str, Any], to_stderr: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['batch']} examples; ratios over the gradient without privacy")
    table.add_column("model")
    for column in (
        "parameters",
        "norms by",
        "norms",
        "sums",
        "time",
        "cpu",
        "memory",
        "fastest: time",
        "cpu",
        "memory",
        "vmap: time",
        "memory",
    ):
        table.add_column(column, justify="left" if column == "norms by" else "right")
    for row in result["rows"]:
        methods = ", ".join(f"{n} {method}" for method, n in row["methods"].items())
        how = methods or f"{row['strategy']}, {row['microbatch_size']} at a time"
        table.add_row(
            row["model"],
            f"{row['parameters']:,}",
            how,
            f"{row['norm_error']:.0e}",
            f"{row['sum_error']:.0e}",
            *(f"{x:.2f}" for x in (*_ratios(row), *_ratios(row["over_fastest"]))),
            f"{row['vmap']['time_ratio']:.2f}",
            f"{row['vmap']['memory_ratio']:.2f}",
        )
    console = Console(stderr=to_stderr)
    if not console.is_terminal:
        console.width = 160
    console.print(table)
    for name, why in result["not_installed"].items():
        console.print(f"{name}: left out ({why})")
