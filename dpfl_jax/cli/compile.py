"""``dpfl compile``: the real train step, compiled for a TPU slice that is not there."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from dpfl_jax.cli._hlo import Collective, collectives
from dpfl_jax.cli._slices import (
    Compiled,
    Step,
    Units,
    kind_of,
    largest_that_fits,
    memory_of,
    slice_mesh,
)
from dpfl_jax.cli.main import add_code_flag, add_json_flag
from dpfl_jax.errors import BadInputError

HELP = "compile the train step for a TPU slice, without one"
DESCRIPTION = """\
Compile the train step of a configuration for a TPU slice, on a machine that has none, and say
whether it fits, what it costs over the same step without privacy, and what it sends.

FLOPs are those of matrix products and convolutions of one microbatch on one chip, the lengths of
loops included. Temporary memory is the compiler's. The data are not read; only shapes matter.
Needs the TPU compiler: pip install libtpu.

examples:
  dpfl compile configs/userlevel/stackoverflow_uls.yaml --topology v5e:4x4
  dpfl compile CONFIG execution.microbatch_size=4 --topology v3:16x16 --json
  dpfl compile CONFIG execution.mesh.fsdp=16 --suggest    # the largest microbatch that fits
  dpfl compile CONFIG --topology cpu:8          # this machine's own compiler, 8 devices
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("config", metavar="CONFIG", help="YAML configuration file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override any key")
    parser.add_argument("--topology", default="v5e:4x4", help="e.g. v5e:4x4, v3:16x16, cpu:8")
    parser.add_argument(
        "--vocab-size", type=int, help="where the configuration's tokeniser is not at hand"
    )
    parser.add_argument(
        "--suggest",
        action="store_true",
        help="look for the largest execution.microbatch_size (a power of two) that fits",
    )
    parser.add_argument(
        "--no-baseline",
        action="store_true",
        help="do not compile the step without privacy (its FLOPs are counted all the same)",
    )
    parser.add_argument(
        "--count-only", action="store_true", help="count FLOPs and compile nothing: seconds"
    )
    add_code_flag(parser)
    add_json_flag(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compiles the step with and without privacy, and compares."""
    kind_of(args.topology)
    from dpfl_jax.config import RunConfig, load_config

    config = load_config(args.config, args.overrides, args.allow_code)
    if not isinstance(config, RunConfig):
        raise BadInputError("compile: federated configurations are not compiled for slices yet")
    if config.model.dpo is not None:
        raise BadInputError("compile: the loss of preference pairs (model.dpo) is not compiled yet")
    mesh = slice_mesh(args.topology, config.execution.mesh.axes)
    result = measure(
        config,
        vocabulary(config, args.vocab_size),
        args.topology,
        mesh,
        suggest=args.suggest,
        baseline=not args.no_baseline,
        count_only=args.count_only,
    )
    _print(result, args.json)
    return result


def measure(
    config: Any,
    vocab: int,
    topology: str,
    mesh: Any,
    *,
    suggest: bool = False,
    baseline: bool = True,
    count_only: bool = False,
    read: Callable[[str], list[Collective]] = collectives,
) -> dict[str, Any]:
    """Compiles the step of a configuration for a slice.

    Args:
      config: a RunConfig.
      vocab: size of the vocabulary.
      topology: e.g. v5e:4x4.
      mesh: over its devices.
      suggest: look for the largest microbatch that fits.
      baseline: compile the step without privacy too.
      count_only: compile nothing.
      read: from the text of a compiled module to what it sends.
    """
    from dpfl_jax.clipping import OwnBound
    from dpfl_jax.mechanisms import Population, non_private
    from dpfl_jax.mesh import unit_parts
    from dpfl_jax.training.start import (
        build_transformer,
        check_trainable,
        make_optimizer,
        trained_by_name,
    )

    model = build_transformer(config, vocab, bos_id=1)
    execution = config.execution

    def any_noise(mechanism: Any) -> Any:
        """Any number of people and any noise: the same step."""
        some = Population(*[math.ceil(mechanism.participation.divisor)] * 3)
        noise = config.privacy.noise_multiplier or 1.0
        return mechanism.calibrate(some, config.train.steps, noise_multiplier=noise, delta=1e-5)

    calibrated = any_noise(config.mechanism)
    mechanism = calibrated.mechanism
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    platform = "cpu" if kind_of(topology) == "cpu" else "tpu"
    trainable, low = trained_by_name(config.model, model), config.model.frozen_dtype
    limit, size = memory_of(topology), execution.microbatch_size
    options = {
        "strategy": execution.strategy,
        "platform": platform,
        "trainable": trainable,
        # What the choice of a strategy finds on the device itself.
        "memory_limit": None if limit is None else limit / 2,
    }
    cut, group = execution.cut, mechanism.participation.unit_examples
    parts, length = unit_parts(mesh), config.data.seq_len
    bounds = isinstance(mechanism.rule, OwnBound)
    step = Step(calibrated, model, optimizer, mesh, options | cut, read, low)
    compiled: dict[int, Compiled] = {}

    def at(size: int) -> Compiled:
        if size not in compiled:
            compiled[size] = step.compile(Units(parts, size, group, length, bounds))
        return compiled[size]

    largest = None
    if count_only:
        units = Units(parts, size, group, length, bounds)
        compiled[size] = Compiled(step.flops(units), 0, 0, 0, 0, [], 0.0)
        suggest, baseline, limit = False, False, None
    if suggest and limit is not None:

        def peak(size: int) -> int | None:
            return None if at(size).refused else at(size).peak_bytes

        largest, _ = largest_that_fits(peak, limit, start=size)
        size = largest or min(compiled)
    private, units = at(size), Units(parts, size, group, length, bounds)
    plain_step = Step(
        any_noise(non_private(batch_size=mechanism.compute_budget)),
        model, optimizer, mesh, {"trainable": trainable}, read, low,
    )  # fmt: skip
    plain_units = Units(parts, size * (group or 1), None, length)
    plain = plain_step.compile(plain_units) if baseline else None
    plain_flops = plain_step.flops(plain_units) if plain is None else plain.flops
    return {
        "topology": topology,
        "devices": mesh.size,
        "mesh": dict(mesh.shape),
        "parameters": model.num_params,
        "trained_parameters": check_trainable(config.model, model),
        "mechanism": mechanism.kind,
        "group_size": group,
        "microbatch_size": size,
        "largest_microbatch_size": largest,
        "seq_len": length,
        "fits": None if limit is None else not private.refused and private.peak_bytes <= limit,
        "peak_bytes": None if count_only else private.peak_bytes,
        "hbm_bytes": limit,
        "flops": private.flops,
        "flops_ratio": round(private.flops / plain_flops, 4),
        "temp_bytes": private.temp_bytes,
        "temp_ratio": None
        if plain is None
        else round(private.temp_bytes / max(plain.temp_bytes, 1), 4),
        "collectives": private.collectives,
        "non_private_collectives": None if plain is None else plain.collectives,
        "compile_seconds": round(private.seconds, 1),
        "strategy": _explain(mechanism, model, mesh, units, options, cut).splitlines(),
    }


def vocabulary(config: Any, given: int | None) -> int:
    """Its size: given, or the configuration's, or its tokeniser's."""
    from dpfl_jax.data import load_tokenizer

    if config.model.checkpoint is not None:
        return given or 1  # its own vocabulary
    declared = given or config.model.overrides.get("vocab_size")
    return declared or load_tokenizer(config.data.tokenizer).vocab_size


def _explain(
    mechanism: Any, model: Any, mesh: Any, units: Units, options: Any, cut: dict[str, Any]
) -> str:
    import jax

    from dpfl_jax.mechanisms.sums import in_pieces

    pieces = in_pieces(mechanism, mesh, **cut)
    bounded = mechanism.clipped_grad(model.loss, **options, **pieces)
    if not hasattr(bounded, "explain"):
        return "not private"
    params = jax.eval_shape(model.init, jax.random.key(0))
    return str(bounded.explain(params, units.shapes(units.microbatch)))


def _print(result: dict[str, Any], to_stderr: bool) -> None:
    from rich.table import Table

    from dpfl_jax.run.console import Console

    console = Console(stderr=to_stderr)
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
    largest = result["largest_microbatch_size"]
    if largest is not None:
        table.add_row("largest microbatch", str(largest or "not even one unit fits"))
    if result["collectives"] is None:
        table.add_row("collectives", "not readable: libtpu and jaxlib do not fit together")
    for c in result["collectives"] or []:
        where = "in a loop" if c["in_loop"] else "once a step"
        table.add_row(c["kind"], f"{c['count']} {where}, {c['bytes'] / 2**20:.1f} MiB in all")
    table.add_row("compiled in", f"{result['compile_seconds']} s")
    console.print(table)
    for line in result["strategy"]:
        console.print(line, highlight=False)
