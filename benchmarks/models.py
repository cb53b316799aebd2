"""``dpfl bench models``: models of other libraries, privately and not."""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import multiprocessing
from typing import Any

import jax
import numpy as np

from benchmarks._clipping_models import workload
from benchmarks._third_party import MODELS, TRAINED
from benchmarks.clipping import Row, machine, measure, non_private, prepare, seconds, wall
from dpfl_jax.cli.main import add_json_flag
from dpfl_jax.clipping import BoundedSum, bounded_grad, join, split
from dpfl_jax.errors import BadInputError

HELP = "models of other libraries: error, time and memory over the non-private step"
DESCRIPTION = """\
For each model: the bounded sum with the strategy that `auto` takes, against plain vmap(grad) (error
of norms and of the sum, the largest of any parameter), and its time and memory, as a training step
takes it (without each parameter's own norms), over the fastest non-private gradient. (A gradient
that is zero up to rounding, such as that of an attention's key biases, counts as 1e-5 of all of
them together.) Time is CPU seconds on a CPU, wall time elsewhere; `wall` is wall time everywhere,
which leaves out what threads do while others wait for them, and which other work disturbs more.
Each model has a process of its own, in which all variants but vmap run in random order. Models
whose library is not installed are left out: the group `models` has tunix, qwix and keras-hub (uv
sync --group models).

examples:
  dpfl bench models
  dpfl bench models --only nnx,tunix-qwen3,qwix-lora --json
"""
OWN = ("cnn", "lstm", "mlp")
PyTree = Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--only", help=f"of {', '.join([*MODELS, *OWN])} (comma between)")
    parser.add_argument("--batch", type=int, default=32, help="examples a step (default 32)")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each variant")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures and prints."""
    names = [*MODELS, *OWN] if args.only is None else args.only.split(",")
    if unknown := set(names) - {*MODELS, *OWN}:
        raise BadInputError(f"bench models: --only has {min(unknown)!r}, which is none of these")
    rows, absent = [], {}
    # A process for each: what one model leaves of the heap would make the next one's steps slower.
    alone = multiprocessing.get_context("spawn")
    for name in names:
        try:
            with concurrent.futures.ProcessPoolExecutor(1, alone) as pool:
                rows.append(pool.submit(_one, name, args.batch, args.rounds).result())
        except ImportError as missing:
            absent[name] = str(missing)
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


def _one(name: str, size: int, rounds: int) -> dict[str, Any]:
    params, loss, batch = _model(name, size)
    trainable = TRAINED.get(name)
    trained, frozen = split(params, trainable)

    def part(trained: PyTree, example: PyTree) -> jax.Array:
        return loss(join(trained, frozen), example)

    gradient = bounded_grad(loss, clip_norm=1.0, trainable=trainable)
    reference = bounded_grad(loss, clip_norm=1.0, trainable=trainable, strategy="vmap")
    sizes = [m for m in (1, 4, 8, 16) if m < size and size % m == 0]
    plain = [
        prepare(str(m), False, non_private(part, m), trained, batch, 1) for m in (None, *sizes)
    ]
    private = prepare("private", True, _as_taken(gradient), params, batch, 1)
    formed = prepare("vmap", True, _as_taken(reference), params, batch, 1)
    measure([*plain, private], rounds, 0)
    # Behind: what copies of all parameters leave of the heap makes every later step slower.
    measure([formed], rounds, 0)
    got, want = jax.jit(gradient)(params, batch), jax.jit(reference)(params, batch)
    best = min(plain, key=seconds)
    told = gradient.explain(params, batch)

    def over(row: Row) -> dict[str, float]:
        return {
            "time_ratio": round(seconds(row) / seconds(best), 3),
            "wall_ratio": round(wall(row) / min(wall(x) for x in plain), 3),
            "memory_ratio": round(row.memory / max(best.memory, 1), 3),
        }

    return {
        "model": name,
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "trained": sum(x.size for x in jax.tree.leaves(trained)),
        "strategy": told.strategy,
        "microbatch_size": told.microbatch_size,
        "methods": dict(collections.Counter(leaf.method for leaf in told.leaves)),
        "norm_error": float(np.max(np.abs(got.norms / want.norms - 1))),
        "sum_error": _error(jax.tree.leaves(got.sum), jax.tree.leaves(want.sum)),
        **over(private),
        "vmap": over(formed),
        "seconds": seconds(private),
        "spread": round(
            float(np.subtract(*np.percentile(private.times, [75, 25]))) / seconds(private), 3
        ),
    }


def _as_taken(gradient: Any) -> Any:
    """What a training step takes of a bounded sum: not the norms of single parameters."""

    def taken(params: PyTree, batch: PyTree) -> BoundedSum:
        return dataclasses.replace(gradient(params, batch), leaf_norms=None)

    return taken


def _error(got: list[Any], want: list[Any]) -> float:
    """The largest relative error; a gradient that is rounding alone counts as 1e-5 of them all."""
    norms = [float(np.linalg.norm(np.ravel(w).astype(np.float32))) for w in want]
    least = max(1e-5 * float(np.linalg.norm(norms)), 1e-30)
    return max(
        float(np.linalg.norm(np.ravel(g - w).astype(np.float32))) / max(norm, least)
        for g, w, norm in zip(got, want, norms, strict=True)
    )


def _print(result: dict[str, Any], to_stderr: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['batch']} examples; ratios over the fastest non-private gradient")
    table.add_column("model")
    for column in (
        "parameters",
        "norms by",
        "norms",
        "sums",
        "time",
        "wall",
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
            f"{row['time_ratio']:.2f}",
            f"{row['wall_ratio']:.2f}",
            f"{row['memory_ratio']:.2f}",
            f"{row['vmap']['time_ratio']:.2f}",
            f"{row['vmap']['memory_ratio']:.2f}",
        )
    console = Console(stderr=to_stderr)
    if not console.is_terminal:
        console.width = 140
    console.print(table)
    for name, why in result["not_installed"].items():
        console.print(f"{name}: left out ({why})")
