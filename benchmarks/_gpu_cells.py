"""What ``dpfl bench gpu`` measures in JAX: cells, and in each of them variants by turns."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

from benchmarks._third_party import tunix_step
from benchmarks.clipping import machine, non_private
from benchmarks.pods import MODELS
from dpfl_jax.clipping import clipped_grad, join, split
from dpfl_jax.clipping.cost import peak_flops
from dpfl_jax.clipping.jaxprs import count_flops, jaxpr_flops
from dpfl_jax.models import LanguageModel, transformer_config
from dpfl_jax.models.params import is_adapter
from dpfl_jax.noise import Noise

PyTree = Any
GROUP_SIZE = 4  # examples of a user
TUNIX = "tunix, non-private"
RANK = 16  # of adapters
SIZES: dict[str, dict[str, Any]] = {"1.2b": MODELS["llama-1b"], "350m": MODELS["350m"]}
_NARROW = {"vocab_size": 64, "num_layers": 2, "embed_dim": 32, "num_heads": 4}
TINY = {
    "350m": SIZES["350m"] | _NARROW,
    "1.2b": SIZES["1.2b"] | _NARROW | {"num_kv_heads": 2, "mlp_dim": 64},
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A job, of which all variants are measured by turns.

    Attributes:
      model: a name in ``SIZES``.
      seq_len: tokens of an example.
      trains: ``full``, or ``lora`` (adapters of rank 16 on the attention, the rest in bfloat16).
      unit: ``els`` (an example) or ``uls`` (a user of four).
      examples: of a step.
    """

    model: str
    seq_len: int
    trains: str
    unit: str
    examples: int

    @property
    def units(self) -> int:
        """Of a step."""
        return self.examples if self.unit == "els" else self.examples // GROUP_SIZE


@dataclasses.dataclass(frozen=True)
class Measuring:
    """What is measured, as the parent process writes it.

    Attributes:
      cells: in order of importance.
      tiny: models of a few thousand parameters in the place of those named.
      rounds: times of each variant.
      minutes: no cell is begun that would end later, if it took as long as the longest.
      compile_only: lower every program for CUDA, and run none.
    """

    cells: tuple[Cell, ...]
    tiny: bool
    rounds: int
    minutes: float
    compile_only: bool

    @classmethod
    def parse(cls, text: str) -> Measuring:
        """From JSON."""
        told = json.loads(text)
        return cls(**told | {"cells": tuple(Cell(**cell) for cell in told["cells"])})


def cells(
    models: list[str], lengths: list[int], trains: list[str], units: list[str], tokens: int
) -> tuple[Cell, ...]:
    """Jobs by what is asked about most, then lengths, then models, as they are given."""
    jobs = [("full", "els"), ("lora", "uls"), ("full", "uls"), ("lora", "els")]
    jobs = [(t, u) for t, u in jobs if t in trains and u in units]
    least = {"els": 4, "uls": 2 * GROUP_SIZE}  # whole users
    return tuple(
        Cell(model, length, t, u, max(least[u], tokens // length // least[u] * least[u]))
        for (t, u), length, model in itertools.product(jobs, lengths, models)
    )


def work(cell: Cell, tiny: bool, **overrides: Any) -> tuple[Any, Any, PyTree, Any]:
    """Makers of parameters (trained, frozen) and of a batch, the loss of one example, the shape.

    The loss takes the trained part, then (the frozen part, the example).
    """
    fields: dict[str, Any] = {"lora": {"rank": RANK}} if cell.trains == "lora" else {}
    config = transformer_config(
        "tiny",
        **{**(TINY if tiny else SIZES)[cell.model], "max_seq_len": cell.seq_len},
        **{"dtype": "bfloat16", **fields, **overrides},
    )
    model = LanguageModel(config)
    trainable = is_adapter if cell.trains == "lora" else None

    def init(key: jax.Array) -> tuple[PyTree, PyTree]:
        trained, frozen = split(model.init(key), trainable)
        return trained, jax.tree.map(lambda x: x.astype(jnp.bfloat16), frozen)

    def batch(key: jax.Array) -> PyTree:
        shape = (cell.examples, cell.seq_len)
        tokens = jax.random.randint(key, shape, 3, config.vocab_size)
        return {"tokens": tokens, "mask": jnp.ones(shape, bool)}

    def loss(trained: PyTree, frozen: PyTree, example: PyTree) -> jax.Array:
        return model.loss(join(trained, frozen), example)

    return init, batch, loss, config


def variants(cell: Cell, loss: Any, platform: str) -> dict[str, tuple[Callable[..., Any], int]]:
    """Functions of (trained, (frozen, batch)), and the lengths of loops that do not tell theirs."""
    n = cell.units
    at_once = max(1, 1024 * n // (cell.examples * cell.seq_len))  # units of about 1,024 tokens
    at_once = next(m for m in range(min(at_once, n), 0, -1) if n % m == 0)

    def of_units(frozen: PyTree) -> Any:
        def unit_loss(trained: PyTree, unit: PyTree) -> jax.Array:
            if cell.unit == "els":
                return loss(trained, frozen, unit)
            return jnp.mean(jax.vmap(lambda e: loss(trained, frozen, e))(unit))

        return unit_loss

    def grouped(batch: PyTree) -> PyTree:
        lead = (n,) if cell.unit == "els" else (n, GROUP_SIZE)
        return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), batch)

    def plain(trained: PyTree, data: Any) -> PyTree:
        frozen, batch = data
        return non_private(lambda t, e: loss(t, frozen, e), None)(trained, batch)

    def ours(**how: Any) -> Callable[..., Any]:
        def run(trained: PyTree, data: Any) -> PyTree:
            frozen, batch = data
            made = clipped_grad(of_units(frozen), platform=platform, **how)
            return made(trained, grouped(batch)).sum

        return run

    found: dict[str, tuple[Callable[..., Any], int]] = {
        "non-private": (plain, 1),
        "flat": (ours(clip_norm=1.0), 1),
    }
    if cell.trains == "full":
        kernel = ours(clip_norm=1.0, strategy="ghost", kernel=True)
        gram = ours(clip_norm=1.0, strategy="ghost", norm_method="gram")
        found |= {"flat, by the kernel": (kernel, 1), "flat, Gram matrices": (gram, 1)}
        half = ours(clip_norm=1.0, microbatch_size=n // 2)
        found["flat, half at once"] = (half, 1)
    try:
        peer = importlib.import_module("jax_privacy.clipping")
    except ImportError:
        peer = None
    sizes = [] if peer is None else [at_once, *([None] if at_once < n else [])]
    for size in sizes:

        def clipped(trained: PyTree, data: Any, size: int | None = size) -> PyTree:
            frozen, batch = data
            assert peer is not None
            made = peer.clipped_grad(
                of_units(frozen),
                l2_clip_norm=1.0,
                batch_argnums=1,
                keep_batch_dim=False,
                microbatch_size=size,
            )
            return made(trained, grouped(batch))

        name = "jax-privacy" + (f", {size} at once" if size else "")
        found[name] = (clipped, 1 if size is None else n // size)
    found["vmap"] = (ours(clip_norm=1.0, strategy="vmap"), 1)
    return found


def absent_gpu() -> contextlib.AbstractContextManager[Any]:
    """A context in which kernels are lowered for a GPU that is not there."""
    told: dict[str, Any] = {"device_kind": "NVIDIA H100", "num_cores": None, "platform": "gpu"}
    known = inspect.signature(AbstractDevice).parameters  # JAX 0.10 knows no platform
    device = AbstractDevice(**{name: x for name, x in told.items() if name in known})
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def _noise(trained: PyTree, data: Any) -> PyTree:
    """What exact noise adds to any of the private variants."""
    some = data[1]["tokens"].ravel()[0].astype(jnp.uint32)  # known when it runs
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
    return Noise(1.0, 1.0, "exact").add(jnp.arange(8, dtype=jnp.uint32) + some, zeros)


def rows(asked: Measuring) -> Iterator[dict[str, Any]]:
    """Measures; one row for each variant of each cell, the cell's together."""
    begun, noised, longest = time.perf_counter(), set(), 0.0
    for cell in asked.cells:
        started = time.perf_counter()
        if started - begun + longest > 60 * asked.minutes:
            return
        with_noise = (cell.model, cell.trains) not in noised and not asked.compile_only
        noised.add((cell.model, cell.trains))
        yield from _measured(cell, asked, with_noise)
        longest = max(longest, time.perf_counter() - started)


def _measured(cell: Cell, asked: Measuring, with_noise: bool) -> Iterator[dict[str, Any]]:
    platform = "gpu" if asked.compile_only else jax.default_backend()
    init, make_batch, loss, config = work(cell, asked.tiny)
    key = jax.random.key(0)
    trained, frozen = jax.eval_shape(init, key)
    batch = jax.eval_shape(make_batch, key)
    needed = _needed_flops(cell, asked.tiny)
    found = variants(cell, loss, platform)
    if jax.default_backend() == "gpu":  # its kernel cannot be lowered without one
        fused = variants(cell, work(cell, asked.tiny, attention="fused")[2], platform)
        found |= {f"{name}, cuDNN attention": fused[name] for name in ("non-private", "flat")}
    own: dict[str, Callable[[jax.Array], PyTree]] = {}  # makers of parameters that are not ours
    if (cell.trains, cell.unit) == ("full", "els"):
        with contextlib.suppress(ImportError):
            own[TUNIX], step = tunix_step(config)
            found[TUNIX] = (step, 1)
    if with_noise:
        found["noise alone, exact"] = (_noise, 1)
    shared = {
        **dataclasses.asdict(cell),
        "parameters": sum(x.size for x in jax.tree.leaves((trained, frozen))),
        "trained": sum(x.size for x in jax.tree.leaves(trained)),
        "needed_flops": needed,
    }

    # Tiny models show that all of it runs: nothing is gained by optimising them.
    fast = {"xla_backend_optimization_level": 0} if asked.tiny else None

    programs: dict[str, str] = {}

    def ready(name: str) -> dict[str, Any]:
        function, loops = found[name]
        started = time.perf_counter()
        row = {**shared, "variant": name}
        params = trained
        if name in own:
            params = jax.eval_shape(own[name], key)
            row["parameters"] = row["trained"] = sum(x.size for x in jax.tree.leaves(params))
        try:
            with absent_gpu() if asked.compile_only else contextlib.nullcontext():
                traced = jax.jit(function).trace(params, (frozen, batch))
                same = programs.setdefault(str(traced.jaxpr), name)
                if same != name:
                    raise ValueError(f"the same program as {same}")
                row["flops"] = jaxpr_flops(traced.jaxpr.jaxpr, loops)
                if asked.compile_only:
                    row["lowered_bytes"] = len(traced.lower(lowering_platforms=("cuda",)).as_text())
                else:
                    row["compiled"] = traced.lower().compile(fast)
        except Exception as error:  # one variant's, and not the end of all others
            row["error"] = _told(error)
        row["compile_seconds"] = round(time.perf_counter() - started, 2)
        told = f"{cell.model} T={cell.seq_len} {cell.trains} {cell.unit}, {name}"
        sys.stderr.write(f"{told}: ready in {row['compile_seconds']:.1f} s\n")
        return row

    with ThreadPoolExecutor(len(found)) as pool:
        made = list(pool.map(ready, found))
    if not asked.compile_only:
        makers = [jax.jit(f, compiler_options=fast) for f in (init, make_batch)]
        values = jax.block_until_ready((*makers[0](key), makers[1](key)))
        others = {name: jax.jit(f, compiler_options=fast)(key) for name, f in own.items()}
        _time([row for row in made if "compiled" in row], values, others, asked.rounds)
        del values, others
    base = made[0]
    for row in made:
        row.pop("compiled", None)
        if "flops" in base and "flops" in row:
            row["flops_ratio"] = row["flops"] / base["flops"]
        if "seconds" in row and not row["variant"].startswith("noise"):
            row["tokens_per_second"] = cell.examples * cell.seq_len / row["seconds"]
            peak = peak_flops(jax.devices()[0].device_kind)
            row["mfu"] = None if peak is None else needed / row["seconds"] / peak
        if "seconds" in row and "seconds" in base:
            row["over_non_private"] = row["seconds"] / base["seconds"]
        yield row


def _needed_flops(cell: Cell, tiny: bool) -> float:
    """Products of a step without privacy of which nothing is computed twice."""
    init, make_batch, loss, _ = work(cell, tiny, remat="none", attention="plain")
    key = jax.random.key(0)
    trained, frozen = jax.eval_shape(init, key)
    return count_flops(variants(cell, loss, "cpu")["non-private"][0], trained,
                       (frozen, jax.eval_shape(make_batch, key)))  # fmt: skip


def _time(found: list[dict[str, Any]], values: Any, others: dict[str, PyTree], rounds: int) -> None:
    """Fills in seconds and memory, or the error; variants by turns, in random order.

    Args:
      found: rows with compiled programs.
      values: trained and frozen parameters, and the batch.
      others: parameters of variants that have their own.
      rounds: times of each variant.
    """
    trained, frozen, batch = values
    params = {row["variant"]: others.get(row["variant"], trained) for row in found}
    given = {name: (x, (frozen, batch)) for name, x in params.items()}
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    times: dict[str, list[float]] = {}

    def once(row: dict[str, Any]) -> None:
        wall = time.perf_counter()
        try:
            jax.block_until_ready(row["compiled"](*given[row["variant"]]))
        except jax.errors.JaxRuntimeError as error:
            row["error"] = _told(error)
            return
        times.setdefault(row["variant"], []).append(time.perf_counter() - wall)

    for row in found:
        memory: Any = row["compiled"].memory_analysis()
        held = sum(x.nbytes for x in jax.tree.leaves(given[row["variant"]]))
        row["peak_bytes"] = held + int(memory.temp_size_in_bytes + memory.output_size_in_bytes)
        if limit is not None and row["peak_bytes"] > limit:
            row["error"] = (
                f"out of memory: {row['peak_bytes'] / 2**30:.1f} of {limit / 2**30:.1f} GiB"
            )
            continue
        once(row)
    times.clear()  # the first does not count
    order = random.Random(0)
    for _ in range(rounds):
        for row in order.sample(found, len(found)):
            if "error" not in row:
                once(row)
    for row in found:
        if "error" not in row:
            row["seconds"] = statistics.median(times[row["variant"]])
            row["spread"] = max(times[row["variant"]]) / min(times[row["variant"]]) - 1


def _told(error: Exception) -> str:
    first = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return f"out of memory: {first}" if "RESOURCE_EXHAUSTED" in first else first


def write(line: dict[str, Any]) -> None:
    """A line for the process that has asked."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Reads what to measure, and writes a line of JSON for each row."""
    asked = Measuring.parse(sys.stdin.read())
    told = {
        "machine": machine() | {"clock": "wall seconds"},
        "peak_flops": peak_flops(jax.devices()[0].device_kind),
    }
    write(told)
    for row in rows(asked):
        write(row)


if __name__ == "__main__":
    main()
