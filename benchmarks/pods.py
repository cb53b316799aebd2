"""``dpfl bench pods``: which fine-tuning jobs fit on which TPU slices, without a slice."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import yaml

from dpfl_jax.cli.options import Options, add_options
from dpfl_jax.errors import BadInputError

HELP = "fine-tuning jobs compiled for TPU slices: what fits, what it costs"
DESCRIPTION = """\
Compile the real train step of each job for each slice, on a machine that has none, and tabulate:

  split     copies x parts of the parameters (mesh.data x execution.mesh.fsdp)
  fits      whether it fits at one unit a device, and the memory of one device it takes then
  largest   the largest microbatch that fits (units a device, a power of two; with --suggest)
  FLOPs     over the same step without privacy, at that microbatch
  sent      bytes a device sends and receives once a step, and in each microbatch, by kind

Jobs are fine-tuning at --seq-len tokens, of all parameters (full: float32) or of adapters of rank
16 on the attention's projections (lora: the rest frozen, in bfloat16); bfloat16 compute with
float32 norms, sums and noise, blocks recomputed in the backward pass, Adafactor. Parameters are
copied where they take less than an eighth of a device (a quarter, where frozen), else split over as
many devices as that needs.

A unit is an example (els) or a user (uls). A user's --group-size examples are processed at once
where the parameters are copied. Where they are split, adapters take them one at a time
(execution.examples_at_once=1), and full fine-tuning shares the --split-group-size examples of a
user out to the devices that share the parameters (execution.split_users). --users forces one of the
three.

Each row is compiled in a process of its own and appended to --out, so that an interrupted table
goes on where it stopped. A row takes one to several minutes of one core. Needs the TPU compiler:
pip install libtpu.

examples:
  dpfl bench pods --out rows.jsonl                                  # everything: hours
  dpfl bench pods --count-only --topologies v5e:4x4                 # FLOPs alone: minutes
  dpfl bench pods --models gpt2-124m --units els --topologies v5e:4x4 --suggest
  dpfl bench pods --out rows.jsonl --markdown table.md --time-limit 0   # only what is there
"""

# Shapes of well-known families, as this library's transformer has them.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2-124m": {
        "vocab_size": 50257, "num_layers": 12, "embed_dim": 768, "num_heads": 12,
        "norm": "layer", "positions": "learned", "use_bias": True,
    },
    "350m": {"vocab_size": 32000, "num_layers": 24, "embed_dim": 1024, "num_heads": 16},
    "llama-1b": {
        "vocab_size": 128256, "num_layers": 16, "embed_dim": 2048, "num_heads": 32,
        "num_kv_heads": 8, "mlp_dim": 8192, "activation": "swiglu",
    },
    "gemma-2b": {
        "vocab_size": 256000, "num_layers": 18, "embed_dim": 2048, "num_heads": 8,
        "num_kv_heads": 1, "head_dim": 256, "mlp_dim": 16384, "activation": "geglu",
    },
    "llama-8b": {
        "vocab_size": 128256, "num_layers": 32, "embed_dim": 4096, "num_heads": 32,
        "num_kv_heads": 8, "mlp_dim": 14336, "activation": "swiglu", "tie_embeddings": False,
    },
}  # fmt: skip
TOPOLOGIES = ("v5e:4x4", "v5e:16x16", "v6e:4x4", "v5p:4x4x4", "v3:16x16")
USERS = ("auto", "whole", "pieces", "split")


@dataclasses.dataclass(frozen=True)
class Job:
    """One row of the table."""

    model: str
    trains: str
    unit: str
    topology: str
    seq_len: int
    group_size: int
    microbatch: int
    strategy: str
    examples_at_once: int | None
    split_users: bool
    suggest: bool
    count_only: bool
    remat: str
    attention: str
    clipping: str

    @property
    def config(self) -> dict[str, Any]:
        """Its configuration; data and calibrated noise do not matter to the compiler."""
        size = {"cohort_size": 1024}
        if self.unit == "els":
            size = {"batch_size": 1024 * self.group_size}
        adapters: dict[str, Any] = {"lora": {"rank": 16}, "frozen_dtype": "bfloat16"}
        return {
            "name": "pods",
            "data": {"source": "jsonl", "path": "unread", "seq_len": self.seq_len},
            "model": {
                **(adapters if self.trains == "lora" else {}),
                "size": "tiny",
                "overrides": {
                    **MODELS[self.model],
                    "dtype": "bfloat16",
                    "remat": self.remat,
                    "scan_layers": True,
                },
            },
            "mechanism": {
                "kind": self.unit,
                "clipping": self.clipping,
                "group_size": self.group_size,
                **size,
            },
            "privacy": {"noise_multiplier": 1.0},
            "optimizer": {"name": "adafactor", "learning_rate": 1e-4},
            "train": {"steps": 10},
            "execution": {
                "microbatch_size": self.microbatch,
                "strategy": self.strategy,
                "attention": self.attention,
                "examples_at_once": self.examples_at_once,
                "split_users": self.split_users,
            },
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the choice of rows."""
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME")
    parser.add_argument("--train", nargs="+", default=["full", "lora"], choices=["full", "lora"])
    parser.add_argument("--units", nargs="+", default=["els", "uls"], choices=["els", "uls"])
    parser.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES), metavar="KIND:SHAPE")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--group-size", type=int, default=4, help="examples of a user (uls)")
    parser.add_argument(
        "--split-group-size", type=int, default=16, help="the same where devices share a user"
    )
    parser.add_argument("--users", default="auto", choices=USERS, help="how a user is processed")
    parser.add_argument("--fsdp", type=int, help="parts of the parameters (default: as needed)")
    parser.add_argument("--microbatch", type=int, default=1, help="units a device (default 1)")
    parser.add_argument("--strategy", default="auto", help="as execution.strategy")
    parser.add_argument("--attention", default="auto", help="as execution.attention")
    parser.add_argument("--clipping", default="normalized", help="as mechanism.clipping")
    parser.add_argument(
        "--remat", default="light", help="as model.overrides.remat: full for long sequences"
    )
    parser.add_argument("--count-only", action="store_true", help="count FLOPs, compile nothing")
    parser.add_argument("--suggest", action="store_true", help="look for the largest microbatch")
    parser.add_argument("--out", help="append rows to this file, and skip those it holds")
    parser.add_argument("--markdown", help="write the table here, too")
    parser.add_argument(
        "--time-limit", type=float, default=3600.0, help="seconds for one row; 0 compiles nothing"
    )
    add_options(parser, Options)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compiles every row that is not known yet, and prints the table."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # beside libtpu, JAX would look for chips here
    from rich.console import Console

    from dpfl_jax.training.slices import kind_of

    unknown = [name for name in args.models if name not in MODELS]
    if unknown:
        raise BadInputError(f"bench pods: model {unknown[0]!r} is not one of {', '.join(MODELS)}")
    for topology in args.topologies:
        kind_of(topology)
        _devices(topology)
    console = Console(stderr=args.json)
    out = pathlib.Path(args.out) if args.out else None
    known = {} if out is None or not out.exists() else _known(out)
    rows = []
    for job in _jobs(args):
        key = json.dumps([dataclasses.asdict(job), args.fsdp], sort_keys=True)
        row = known.get(key)
        if row is None and args.time_limit > 0:
            console.print(f"compiling {job.model} {job.trains} {job.unit} for {job.topology}")
            row = compile_job(job, args.fsdp, args.time_limit)
            if out is not None and "error" not in row:
                with out.open("a") as file:
                    file.write(json.dumps({"key": key, "row": row}) + "\n")
        if row is not None:
            rows.append(row)
    text = to_markdown(rows)
    if args.markdown:
        pathlib.Path(args.markdown).write_text(text)
    console.print(text, highlight=False, soft_wrap=True, markup=False)
    return {"rows": rows}


def _jobs(args: argparse.Namespace) -> Iterator[Job]:
    choices = itertools.product(args.models, args.train, args.units, args.topologies)
    for model, trains, unit, topology in choices:
        job = Job(
            model,
            trains,
            unit,
            topology,
            args.seq_len,
            args.group_size if unit == "uls" else 1,
            args.microbatch,
            args.strategy,
            None,
            False,
            args.suggest,
            args.count_only,
            args.remat,
            args.attention,
            args.clipping,
        )
        if unit == "uls":
            way = _way(job, args.fsdp) if args.users == "auto" else args.users
            if way == "pieces":
                job = dataclasses.replace(job, examples_at_once=1)
            elif way == "split":
                job = dataclasses.replace(job, split_users=True, group_size=args.split_group_size)
        yield job


def _way(job: Job, fsdp: int | None) -> str:
    """How the job's users are processed: their activations, or gradients, are the largest thing."""
    if _parts(job, fsdp) == 1:
        return "whole"
    return "split" if job.trains == "full" else "pieces"


def _known(path: pathlib.Path) -> dict[str, Any]:
    found = {}
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut short by an interruption
        found[record["key"]] = record["row"]
    return found


def parts_needed(parameters: int, trains: str, memory: int, devices: int) -> int:
    """Into how many parts the parameters must be split: a power of two.

    Where all are trained they are float32, and so are their sum of gradients, the noise and the
    update: a device that spends an eighth of its memory on its part of the parameters has half left
    for activations. Frozen ones take two bytes, once.
    """
    size, room = (4, memory / 8) if trains == "full" else (2, memory / 4)
    parts = 1
    while size * parameters / parts > room and parts < devices:
        parts *= 2
    return parts


def _parts(job: Job, fsdp: int | None) -> int:
    """Into how many its parameters are split: ``fsdp``, or as needed."""
    from dpfl_jax.training.slices import HBM, kind_of

    if fsdp:
        return fsdp
    memory = HBM.get(kind_of(job.topology), 16) * 2**30
    parameters = _parameters(job.model, job.seq_len)
    return parts_needed(parameters, job.trains, memory, _devices(job.topology))


def compile_job(job: Job, fsdp: int | None, time_limit: float) -> dict[str, Any]:
    """Compiles in another process: the compiler keeps what it has taken."""
    row: dict[str, Any] = dataclasses.asdict(job)
    parts = _parts(job, fsdp)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "pods.yaml"
        path.write_text(yaml.safe_dump(job.config))
        asked = {
            "config": str(path),
            "overrides": [f"execution.mesh.fsdp={parts}"],
            "topology": job.topology,
            "vocab": MODELS[job.model]["vocab_size"],
            "suggest": job.suggest,
            "count_only": job.count_only,
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks._pod_row"],
                input=json.dumps(asked),
                cwd=pathlib.Path(__file__).parents[1],
                capture_output=True,
                text=True,
                timeout=time_limit,
                env=os.environ | {"XLA_FLAGS": ""},
            )
        except subprocess.TimeoutExpired:
            return {**row, "error": f"not compiled within {time_limit:.0f} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {**row, "error": last}
    return {**row, **json.loads(done.stdout.splitlines()[-1]), "asked_strategy": job.strategy}


def _devices(topology: str) -> int:
    kind, _, shape = topology.partition(":")
    count = 1
    for side in shape.split("x"):
        if not side.isdigit():
            raise BadInputError(f"bench pods: topology {topology!r} is not like v5e:4x4")
        count *= int(side)
    return count * (2 if kind in ("v2", "v3") else 1)  # two devices a chip


@functools.cache
def _parameters(model: str, seq_len: int) -> int:
    from dpfl_jax.models import LanguageModel, transformer_config

    fields = MODELS[model] | {"max_seq_len": seq_len}
    return LanguageModel(transformer_config("tiny", **fields)).num_params


def to_markdown(rows: list[dict[str, Any]]) -> str:
    """The table, one line per job."""
    lines = [
        "| model | trained | unit | slice | split | fits | memory a device, GiB | microbatch "
        "| FLOPs over non-private | sent once a step, MiB | sent each microbatch, MiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        unit = "example" if row["unit"] == "els" else f"user of {row['group_size']}"
        name = row["model"]
        if "parameters" in row:
            name += f" ({row['parameters'] / 1e6:,.0f} M)"
        trains = row["trains"]
        if row.get("asked_strategy", "auto") != "auto":
            trains += f", {row['asked_strategy']}"
        if row.get("clipping") == "per_layer":
            trains += ", per layer"
        if row.get("examples_at_once"):
            trains += f", {row['examples_at_once']} at once"
        if row.get("split_users"):
            trains += ", users split"
        start = f"| {name} | {trains} | {unit} | {row['topology']} "
        if "error" in row:
            lines.append(f"{start}| | {row['error']} | | | | | |")
            continue
        mesh = row["mesh"]
        split = f"{mesh.get('data', 1)} x {mesh.get('fsdp', 1)}"
        largest = row["largest_microbatch_size"]
        size = str(row["microbatch_size"])
        if largest is not None:
            size = f"{largest} (the largest)" if largest else f"{size} (none fits)"
        memory, fits = "", ""
        if row["peak_bytes"] is not None:
            memory = f"{row['peak_bytes'] / 2**30:.1f}"
            if row["hbm_bytes"] is not None:
                memory += f" of {row['hbm_bytes'] / 2**30:.0f}"
                fits = "yes" if row["fits"] else "no"
        lines.append(
            f"{start}| {split} | {fits} | {memory} | {size} "
            f"| {row['flops_ratio']:.2f} | {_sent(row, False)} | {_sent(row, True)} |"
        )
    return "\n".join(lines) + "\n"


def _sent(row: dict[str, Any], in_loop: bool) -> str:
    if row["collectives"] is None:
        return "not readable"
    if row["fits"] is False and not row["collectives"]:
        return ""
    parts = [
        f"{c['kind']} {c['bytes'] / 2**20:,.1f}"
        for c in row["collectives"]
        if c["in_loop"] is in_loop and c["bytes"] >= 2**14
    ]
    return ", ".join(parts) or ("" if row["peak_bytes"] is None else "nothing")
