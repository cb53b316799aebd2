"""``dpfl compile``: compiles the real train step for a TPU slice, without having one."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from rich.table import Table

from dpfl_jax.cli.options import Configured
from dpfl_jax.errors import BadInputError
from dpfl_jax.run.console import Console
from dpfl_jax.training.slices import kind_of, measure, slice_mesh, suggest, vocabulary

DESCRIPTION = """\
Compile the train step of a configuration for a TPU slice, on a machine that has none, and say
whether it fits, what it costs over the same step without privacy, and what it sends.

FLOPs are those of matrix products and convolutions of one microbatch on one chip, the lengths of
loops included. Temporary memory is the compiler's, messages are what a device sends. The data are
not read; only shapes matter. Needs the TPU compiler: pip install libtpu.

examples:
  dpfl compile configs/userlevel/stackoverflow_uls.yaml --topology v5e:4x4
  dpfl compile CONFIG execution.microbatch_size=4 --topology v3:16x16 --json
  dpfl compile CONFIG --topology v5e:16x16 --slices 2     # copies of the parameters in two slices
  dpfl compile CONFIG --suggest         # the fastest split of the parameters, and microbatch
  dpfl compile CONFIG --topology cpu:8          # this machine's own compiler, 8 devices
"""


class Options(Configured):
    """Compiling.

    Attributes:
      topology: e.g. v5e:4x4, v3:16x16, cpu:8.
      slices: number of TPU slices, each of this topology.
      vocab_size: size of the vocabulary, if the configuration's tokeniser is not at hand.
      suggest: look for the execution.mesh.fsdp and execution.microbatch_size (powers of two) with
        which a step takes the least time, by estimate, among those that fit; minutes for each.
      no_baseline: do not compile the step without privacy (its FLOPs are still counted).
      count_only: count FLOPs and compile nothing, which takes seconds.
    """

    topology: str = "v5e:4x4"
    slices: int = 1
    vocab_size: int | None = None
    suggest: bool = False
    no_baseline: bool = False
    count_only: bool = False


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compiles the step with and without privacy, and compares."""
    kind_of(args.topology)
    from dpfl_jax.config import load_config

    config = load_config(args.config, args.overrides, args.allow_code)
    if config.variant != "central":
        raise BadInputError("compile: federated configurations are not compiled for slices yet")
    if config.model.dpo is not None:
        raise BadInputError("compile: the loss of preference pairs (model.dpo) is not compiled yet")
    vocab, console = vocabulary(config, args.vocab_size), Console(stderr=args.json)
    if args.suggest:
        if args.count_only:
            raise BadInputError("compile: --suggest compiles, --count-only does not: leave one out")
        if args.topology.startswith("cpu:"):
            raise BadInputError("compile: --suggest needs a --topology whose memory is known")
        say = functools.partial(console.print, highlight=False)
        found = suggest(config, vocab, args.topology, args.slices, say)
        result = found.result | {"suggested": found.overrides, "seconds": found.seconds}
    else:
        mesh = slice_mesh(args.topology, config.execution.mesh.axes, args.slices)
        result = measure(
            config,
            vocab,
            args.topology,
            mesh,
            baseline=not args.no_baseline,
            count_only=args.count_only,
        )
    _print(result, console)
    if args.suggest:
        console.print(
            f"fastest that fits: {' '.join(found.overrides)}\n"
            f"about {found.seconds:.2g} s a step, in which a device sends "
            f"{found.sent_bytes / 2**30:.3g} GiB (estimates, if nothing overlaps)",
            highlight=False,
        )
    return result


def _print(result: dict[str, Any], console: Console) -> None:
    table = Table(
        title=f"{result['parameters']:,} parameters on {result['topology']}", show_header=False
    )
    fits = {True: "yes", False: "NO", None: "unknown"}[result["fits"]]
    limit = "" if result["hbm_bytes"] is None else f" of {result['hbm_bytes'] / 2**30:.0f} GiB"
    if result["peak_bytes"] is not None:
        table.add_row("fits", f"{fits}: {result['peak_bytes'] / 2**30:.2f} GiB{limit} a device")
    table.add_row(
        "FLOPs", f"{result['flops']:.3e} a microbatch, {result['flops_ratio']:.3f} x non-private"
    )
    if result["fits"] is False and result["group_size"]:
        console.print(
            "a user's examples may be taken a few at a time (execution.examples_at_once), and "
            "users be shared among devices (execution.mesh.fsdp with execution.split_users)",
            highlight=False,
        )
    ratio = result["temp_ratio"]
    if result["peak_bytes"] is not None:
        table.add_row(
            "temporary memory",
            f"{result['temp_bytes'] / 2**30:.2f} GiB"
            + ("" if ratio is None else f", {ratio:.2f} x non-private"),
        )
    if result["collectives"] is None:
        table.add_row("collectives", "not readable: libtpu is newer than jaxlib")
    for c in result["collectives"] or []:
        where = "in a loop" if c["in_loop"] else "once a step"
        table.add_row(c["kind"], f"{c['count']} {where}, {c['sent'] / 2**20:.1f} MiB sent")
    table.add_row("compiled in", f"{result['compile_seconds']} s")
    console.print(table)
    for line in result["strategy"]:
        console.print(line, highlight=False)
