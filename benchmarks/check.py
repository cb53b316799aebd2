"""``dpfl bench check``: memory of the check before the first step, and of the step it checks."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from typing import Any

from rich.table import Table

from benchmarks.clipping import machine
from dpfl_jax.cli.options import Options, add_options
from dpfl_jax.config.load import make_config
from dpfl_jax.run.console import Console
from dpfl_jax.training.slices import slice_mesh, step_of

HELP = "memory of the check before the first step, next to the step's"
DESCRIPTION = """\
Compile the step of some configurations of a transformer, and what it is compared with before a run
(plain gradients of one unit, one example after the other), for CPU devices, and print the bytes
that a device holds in each: the state of training, results, temporaries, and the batches that steps
read ahead. Where parameters are split, so are those of the check; a run compares with one device
instead where twice what that takes is free on it.

examples:
  dpfl bench check
  dpfl bench check --only fsdp --json
"""
_BASE = {
    "name": "check",
    "data": {"source": "jsonl", "path": "unread.jsonl", "seq_len": 256},
    "model": {"size": "1m", "overrides": {"vocab_size": 259}},
    "mechanism": {"kind": "uls", "group_size": 16, "cohort_size": 64, "clip_norm": 1.0},
    "privacy": {"noise_multiplier": 1.0},
    "optimizer": {"name": "adam", "learning_rate": 1e-3},
    "train": {"steps": 10},
    "execution": {"microbatch_size": 1},
}
_ELS = [
    "mechanism={kind: els, batch_size: 64, group_size: 8, clip_norm: 1.0}",
    "execution.microbatch_size=16",
]
_LORA = ["model.lora={rank: 8, alpha: 16, targets: ['*/attention/*']}"]
_LLAMA = [  # the shapes of Llama 3.2 1B
    "model.overrides={num_layers: 16, embed_dim: 2048, num_heads: 32, num_kv_heads: 8, mlp_dim: "
    "8192, activation: swiglu, remat: full, vocab_size: 128256, dtype: bfloat16}",
    "model.frozen_dtype=bfloat16",
    "data.seq_len=1024",
    *_LORA,
]
_EXAMPLE_BYTES = 9  # of a token: its id, its segment, and whether it is there
# Name, settings, and the length of packed rows (0: a row is an example).
CASES: tuple[tuple[str, list[str], int], ...] = (
    ("els", _ELS, 0),
    ("els vmap", [*_ELS, "execution.strategy=vmap"], 0),
    ("els one at a time", [*_ELS, "execution.microbatch_size=1"], 0),
    ("els lora", [*_ELS, *_LORA], 0),
    ("uls", [], 0),
    ("uls 4 users at once", ["execution.microbatch_size=4"], 0),
    ("uls ghost", ["execution.strategy=ghost"], 0),
    ("uls scan", ["execution.strategy=scan", "execution.microbatch_size=4"], 0),
    ("uls remat", ["model.overrides.remat=full"], 0),
    ("uls 1 example at once", ["execution.examples_at_once=1"], 0),
    ("uls 4 examples at once", ["execution.examples_at_once=4"], 0),
    ("uls lora", _LORA, 0),
    ("uls lora 1 example at once", [*_LORA, "execution.examples_at_once=1"], 0),
    ("uls packed, 4 rows of 64", ["mechanism.group_size=4"], 64),
    ("uls packed, a row of 256", ["mechanism.group_size=1"], 256),
    ("uls fsdp", ["model.size=10m", "execution.mesh.fsdp=4"], 0),
    (
        "uls fsdp split users",
        ["model.size=10m", "execution.mesh.fsdp=4", "execution.split_users=true"],
        0,
    ),
    ("uls lora fsdp", ["model.size=10m", "execution.mesh.fsdp=4", *_LORA], 0),
    ("llama-1b lora 1 example at once", [*_LLAMA, "execution.examples_at_once=1"], 0),
    (
        "llama-1b lora 1 example at once fsdp",
        [*_LLAMA, "execution.examples_at_once=1", "execution.mesh.fsdp=4"],
        0,
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--only", default="", help="cases whose name contains this")
    add_options(parser, Options)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compiles and prints."""
    rows: list[dict[str, Any]] = []
    slice_mesh("cpu:4", {})  # the first call says how many devices there are
    for name, settings, packed in CASES:
        if args.only in name:
            rows.append({"case": name, **measure(settings, packed)})
            sys.stderr.write(f"{rows[-1]}\n")
    table = Table("case", "step, MiB", "check, MiB")
    for row in rows:
        table.add_row(row["case"], *(f"{row[of] / 2**20:,.1f}" for of in ("step", "check")))
    Console(stderr=args.json).print(table)
    return {"machine": machine(), "rows": rows}


def measure(settings: list[str], packed: int = 0) -> dict[str, int]:
    """Bytes that the step of ``_BASE`` with ``settings`` and its check need on a device.

    Args:
      settings: keys of the configuration.
      packed: length of packed rows; 0: a row is an example.
    """
    config = make_config(copy.deepcopy(_BASE), settings, "check.yaml")
    fsdp = config.execution.mesh.fsdp
    topology = f"cpu:{fsdp}"
    mesh = slice_mesh(topology, config.execution.mesh.axes)
    step, units = step_of(config, config.model.overrides["vocab_size"], topology, mesh)
    if packed:
        units = dataclasses.replace(units, length=packed, packed=True)
    compiled, check = step.compile(units), step.compile_check(units)
    cohort = config.mechanism.participation.divisor / units.parts
    ahead = 2 * cohort * (units.group or 1) * units.length * 2  # two batches, two bytes a token
    one = check.temp_bytes + check.output_bytes  # which takes the place of the sums so far
    return {
        "step": compiled.peak_bytes + int(ahead),
        "check": compiled.argument_bytes + one + _EXAMPLE_BYTES * units.length,
    }
