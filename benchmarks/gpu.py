"""``dpfl bench gpu``: what privacy costs on one GPU, within minutes that are given."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from benchmarks._gpu_cells import SIZES, Measuring, cells
from dpfl_jax.cli.options import Options, add_options
from dpfl_jax.errors import BadInputError

HELP = "language models on one GPU: step time, tokens/s, MFU and memory, beside others"
DESCRIPTION = """\
The clipped sum of gradients of language models with 350 M and 1.2 B parameters (float32, computed
in bfloat16) on one GPU: all of them trained (full) or adapters (lora), by example (els) or by user
of four examples (uls), at several lengths. Of each such cell, by turns in one process:

  non-private     the same batch, without clipping
  flat            clipped_grad as `auto` takes it
  flat, ...       by the kernel that forms a gradient with its norm; by Gram matrices; half of the
                  units at once, in less memory (full)
  ..., cuDNN      both of the first with cuDNN's attention, whose operations are not in the FLOPs
  tunix           the gradient of tunix's trainer, of its Llama 3 of these sizes (full, by example)
  jax-privacy     JAX-Privacy's clipped_grad, about 1,024 tokens at once, and all at once
  vmap            gradients of all units, formed and clipped
  noise alone     of the exact law, once for each kind of model

then, where torch and opacus are installed, Opacus's ghost mode on models of the same sizes (by
example), beside the same torch model without privacy. Time is wall time, the median of --rounds.
Memory is the compiled program's, arguments and results included (Opacus: what torch has
allocated). MFU is the products that a step without privacy needs, over the GPU's stated peak.

Cells come in order of importance; none is begun that --minutes do not pay for, and what runs then
is ended. A cell's rows are printed, and written to --out, when it is done; what needs too much
memory is a row that says so. A second call with the same --out continues with the cells that it
lacks, and with JAX_COMPILATION_CACHE_DIR set compiles nothing again. --lower needs no GPU: every
program is traced and lowered for CUDA, with its FLOPs.

examples:
  dpfl bench gpu --out gpu.jsonl --json
  dpfl bench gpu --minutes 5 --train full --units els --out gpu.jsonl      # twice: 10 minutes
  dpfl bench gpu --tiny                                  # ready? on any machine, in minutes
  dpfl bench gpu --lower                                 # the real sizes, without a GPU
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--minutes", type=float, default=8.5, help="of everything (default 8.5)")
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument(
        "--seq-lens", nargs="+", type=int, help="default 1024 128 4096 2048; with --tiny 16"
    )
    parser.add_argument("--train", nargs="+", default=["full", "lora"], choices=["full", "lora"])
    parser.add_argument("--units", nargs="+", default=["els", "uls"], choices=["els", "uls"])
    parser.add_argument(
        "--tokens", type=int, help="of a step, about (default 8,192; with --tiny 128)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each variant")
    parser.add_argument("--tiny", action="store_true", help="models of some thousand parameters")
    parser.add_argument("--lower", action="store_true", help="lower for CUDA, and run nothing")
    parser.add_argument("--out", type=pathlib.Path, help="write rows here as JSON lines, too")
    add_options(parser, Options)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures in processes of their own, and prints."""
    tokens = (128 if args.tiny else 8192) if args.tokens is None else args.tokens
    lengths = args.seq_lens or ([16] if args.tiny else [1024, 128, 4096, 2048])
    if min(lengths) < 2 or args.rounds < 1 or tokens < 1 or not args.minutes > 0:
        raise BadInputError(
            "bench gpu: --rounds and --tokens must be at least 1, --seq-lens 2, --minutes above 0"
        )
    begun = time.monotonic()
    known = {_cell(row) for row in _rows(args.out) if row["variant"] == "non-private"}
    wanted = cells(args.models, lengths, args.train, args.units, tokens)
    wanted = tuple(cell for cell in wanted if _cell(dataclasses.asdict(cell)) not in known)
    missing = [name for name in ("torch", "opacus") if importlib.util.find_spec(name) is None]
    missing += [name for name in ("jax_privacy", "tunix") if importlib.util.find_spec(name) is None]
    opacus = not args.lower and "els" in args.units and not {"torch", "opacus"} & {*missing}
    result: dict[str, Any] = {"machine": None, "rows": [], "not_installed": missing}
    reached = set()
    # A process gives all its memory on the device back: one after the other.
    shares = [("_gpu_cells", 0.8 if opacus else 1.0), *([("_gpu_opacus", 1.0)] if opacus else [])]
    for module, share in shares:
        left = (60 * args.minutes - (time.monotonic() - begun)) * share
        asked = Measuring(wanted, args.tiny, args.rounds, left / 60, args.lower)
        for row in _lines(module, asked, left):
            if "machine" in row:
                result |= row
                continue
            result["rows"].append(row)
            if module == "_gpu_cells":
                reached.add(_cell(row))
            stream = sys.stderr if args.json else sys.stdout
            stream.write(_told(row) + "\n")
            stream.flush()
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    result["not_reached"] = [
        told for cell in wanted if _cell(told := dataclasses.asdict(cell)) not in reached
    ]
    result["seconds"] = round(time.monotonic() - begun, 1)
    for told in result["not_reached"]:
        name = " ".join(map(str, _cell(told)))
        sys.stderr.write(f"not reached in {args.minutes:g} minutes: {name}\n")
    if missing:
        sys.stderr.write(f"left out, not installed: {', '.join(missing)}\n")
    return result


def _rows(out: pathlib.Path | None) -> Iterator[dict[str, Any]]:
    """What an earlier call has written; a last line that was cut short does not count."""
    for line in [] if out is None or not out.exists() else out.read_text().splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def _cell(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "seq_len", "trains", "unit"))


def _lines(module: str, asked: Measuring, seconds: float) -> Iterator[dict[str, Any]]:
    """What a process writes, until it ends, or is ended after so many seconds."""
    child = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{module}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=pathlib.Path(__file__).parents[1],
        env={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **os.environ},
    )
    late = threading.Timer(max(seconds, 1.0), child.kill)
    late.start()
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(dataclasses.asdict(asked)))
        child.stdin.close()
        for line in child.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if child.wait() > 0:
            sys.stderr.write(f"bench gpu: {module} failed; its message is above\n")
    finally:
        late.cancel()
        child.kill()
        child.wait()


def _told(row: dict[str, Any]) -> str:
    """A row as a line."""
    name = (
        f"{row['model']:>5} T={row['seq_len']:<5}{row['trains']:>5} {row['unit']} "
        f"{row['examples']:>4} examples  {row['variant']:<26}"
    )
    if "error" in row:
        return f"{name}{row['error']}"
    if "seconds" not in row:
        return f"{name}FLOPs x{row['flops_ratio']:.3f}, lowered in {row['compile_seconds']:.1f} s"
    parts = [f"{1e3 * row['seconds']:9.2f} ms"]
    if "over_non_private" in row:
        parts.append(f"x{row['over_non_private']:.3f}")
    if "tokens_per_second" in row:
        parts.append(f"{row['tokens_per_second']:11,.0f} tokens/s")
    if row.get("mfu") is not None:
        parts.append(f"MFU {row['mfu']:.1%}")
    if "peak_bytes" in row:
        parts.append(f"{row['peak_bytes'] / 2**30:.2f} GiB")
    return name + "  ".join(parts)
