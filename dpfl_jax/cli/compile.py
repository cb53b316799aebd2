"""``dpfl compile``: the real train step, compiled for a TPU slice that is not there."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import time
from typing import Any

from dpfl_jax.cli.main import add_json_flag
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
  dpfl compile CONFIG train.microbatch_size=4 --topology v3:16x16 --json
  dpfl compile CONFIG --topology cpu:8          # this machine's own compiler, 8 devices
"""

# Memory of one device, in GiB. A v3 chip has two devices, which JAX shows apart.
_HBM = {"v2": 8, "v3": 16, "v4": 32, "v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 96}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("config", metavar="CONFIG", help="YAML configuration file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override any key")
    parser.add_argument("--topology", default="v5e:4x4", help="e.g. v5e:4x4, v3:16x16, cpu:8")
    parser.add_argument(
        "--vocab-size", type=int, help="where the configuration's tokeniser is not at hand"
    )
    add_json_flag(parser)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One compiled step: bytes and operations of one device."""

    flops: float
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    collectives: list[dict[str, Any]]
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """Arguments, results that do not reuse them, and temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compiles the step with and without privacy, and compares."""
    kind, _, shape = args.topology.partition(":")
    if kind not in (*_HBM, "cpu") or not shape:
        raise BadInputError(
            f"compile: topology is {args.topology!r}, but it must be KIND:SHAPE with KIND one of "
            f"{', '.join(_HBM)} or cpu, e.g. v5e:4x4"
        )
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ["JAX_PLATFORMS"] = "cpu"
    from dpfl_jax.config import RunConfig, config_to_dict, load_config
    from dpfl_jax.training.experiment import build_mechanism
    from dpfl_jax.training.start import build_model, make_optimizer, trained_by_name

    config = load_config(args.config, args.overrides)
    if not isinstance(config, RunConfig):
        raise BadInputError("compile: federated configurations are not compiled for slices yet")
    mesh = _mesh(kind, shape, args.topology, config_to_dict(config.mesh))
    if config.model.checkpoint is not None:
        model = build_model(config, args.vocab_size or 1)  # its own vocabulary
    else:
        vocab = args.vocab_size or config.model.overrides.get("vocab_size") or _vocab(config)
        model = build_model(config, vocab)
    mechanism = build_mechanism(config.mechanism)
    if mechanism.private and mechanism.noise_multiplier is None:
        mechanism = dataclasses.replace(mechanism, noise_multiplier=1.0)  # any value: same step
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    platform = "cpu" if kind == "cpu" else "tpu"
    trainable = trained_by_name(config.model, model.config)
    options = {"strategy": config.train.strategy, "platform": platform, "trainable": trainable}

    group = config.mechanism.uls.group_size if config.mechanism.kind == "uls" else None
    size, length = config.train.microbatch_size, config.data.seq_len
    from dpfl_jax.training.mesh import unit_parts

    parts = unit_parts(mesh)
    units = _Units(parts, size, group, length)
    low = config.model.frozen_dtype
    private = _compile(mechanism, model, optimizer, mesh, units, options, low)
    plain_units = _Units(parts, size * (group or 1), None, length)
    plain_mechanism = build_mechanism(config.mechanism.model_copy(update={"kind": "none"}))
    plain_options = {"trainable": trainable}
    plain = _compile(plain_mechanism, model, optimizer, mesh, plain_units, plain_options, low)
    chosen = _explain(mechanism, model, units, options)
    result = _report(args, config, model, mesh, kind, private, plain, chosen)
    _print(result, args.json)
    return result


@dataclasses.dataclass(frozen=True)
class _Units:
    parts: int
    microbatch: int
    group: int | None
    length: int

    def shapes(self, *lead: int) -> Any:
        """Shapes of a batch of units with these leading axes."""
        import jax
        import jax.numpy as jnp

        lead = lead if self.group is None else (*lead, self.group)
        example = {
            "tokens": jax.ShapeDtypeStruct((*lead, self.length), jnp.int32),
            "mask": jax.ShapeDtypeStruct((*lead, self.length), jnp.bool_),
        }
        if self.group is None:
            return example
        return {"examples": example, "mask": jax.ShapeDtypeStruct(lead, jnp.bool_)}


def _mesh(kind: str, shape: str, topology: str, axes: dict[str, Any]) -> Any:
    import jax

    from dpfl_jax.training.mesh import make_mesh

    if kind == "cpu":
        if not shape.isdigit() or shape == "0":
            raise BadInputError(f"compile: topology {topology!r} needs a number of devices")
        with contextlib.suppress(RuntimeError):  # JAX is running already, with what it has
            jax.config.update("jax_num_cpu_devices", int(shape))
        if len(jax.devices()) < int(shape):
            raise BadInputError(
                f"compile: {topology} needs {shape} devices, but this process has "
                f"{len(jax.devices())}"
            )
        return make_mesh(**axes, devices=jax.devices()[: int(shape)])
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInputError(
            f"compile: no TPU compiler for {topology} ({first}): install libtpu, and give a shape "
            "that exists"
        ) from error
    return make_mesh(**axes, devices=list(found.devices))


def _vocab(config: Any) -> int:
    from dpfl_jax.data import load_tokenizer

    return load_tokenizer(config.data.tokenizer).vocab_size


def _compile(
    mechanism: Any,
    model: Any,
    optimizer: Any,
    mesh: Any,
    units: _Units,
    options: dict[str, Any],
    frozen_dtype: str = "float32",
) -> Compiled:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from dpfl_jax.bench._flops import count_flops
    from dpfl_jax.cli._hlo import collectives
    from dpfl_jax.clipping import split
    from dpfl_jax.training.mesh import parameter_shardings, replicated, unit_axes
    from dpfl_jax.training.state import TrainState, shardings_of
    from dpfl_jax.training.step import make_train_step

    capacity = 2  # any number of microbatches runs in the same loop
    rows = NamedSharding(mesh, PartitionSpec(None, unit_axes(mesh)))
    whole = replicated(mesh)

    def place(tree: Any, sharding: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    params, frozen = split(jax.eval_shape(model.init, jax.random.key(0)), options.get("trainable"))
    frozen = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, frozen_dtype, sharding=place),
        frozen,
        parameter_shardings(frozen, mesh),
    )
    state = TrainState(
        params=params,
        opt_state=jax.eval_shape(optimizer.init, params),
        step=jax.ShapeDtypeStruct((), jnp.int32),  # type: ignore[arg-type]
    )
    lead = (capacity, units.parts * units.microbatch)
    arguments = (
        jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            state,
            shardings_of(params, optimizer, mesh),
        ),
        place(units.shapes(*lead), rows),
        place(jax.ShapeDtypeStruct(lead, jnp.bool_), rows),
        place(jax.ShapeDtypeStruct((), jnp.int32), whole),
        place(jax.eval_shape(lambda: jax.random.key(0)), whole),
        frozen,
    )
    step = make_train_step(mechanism, model.loss, optimizer, mesh, **options)
    start = time.perf_counter()
    flops = count_flops(step, *arguments)
    try:
        compiled = step.lower(*arguments).compile()  # type: ignore[attr-defined]
    except jax.errors.JaxRuntimeError as error:
        needed = re.search(r"temporaries \(([\d.]+)([KMG])\)", str(error))
        if needed is None:
            raise
        size = int(float(needed[1]) * 2 ** {"K": 10, "M": 20, "G": 30}[needed[2]])
        return Compiled(flops, size, 0, 0, 0, [], time.perf_counter() - start)
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return Compiled(
        flops=flops,
        temp_bytes=int(memory.temp_size_in_bytes),
        argument_bytes=int(memory.argument_size_in_bytes),
        output_bytes=int(memory.output_size_in_bytes),
        alias_bytes=int(memory.alias_size_in_bytes),
        collectives=[dataclasses.asdict(c) for c in collectives(compiled.as_text())],
        seconds=seconds,
    )


def _explain(mechanism: Any, model: Any, units: _Units, options: dict[str, Any]) -> str:
    import jax

    bounded = mechanism.bounded_grad(model.loss, **options)
    if not hasattr(bounded, "explain"):
        return "not private"
    params = jax.eval_shape(model.init, jax.random.key(0))
    return str(bounded.explain(params, units.shapes(units.microbatch)))


def _report(
    args: argparse.Namespace,
    config: Any,
    model: Any,
    mesh: Any,
    kind: str,
    private: Compiled,
    plain: Compiled,
    chosen: str,
) -> dict[str, Any]:
    from dpfl_jax.training.start import check_trainable

    limit = None if kind == "cpu" else _HBM[kind] * 2**30
    return {
        "topology": args.topology,
        "devices": mesh.size,
        "mesh": dict(mesh.shape),
        "parameters": model.num_params,
        "trained_parameters": check_trainable(config.model, model),
        "mechanism": config.mechanism.kind,
        "microbatch_size": config.train.microbatch_size,
        "seq_len": config.data.seq_len,
        "fits": None if limit is None else private.peak_bytes <= limit,
        "peak_bytes": private.peak_bytes,
        "hbm_bytes": limit,
        "flops": private.flops,
        "flops_ratio": round(private.flops / plain.flops, 4),
        "temp_bytes": private.temp_bytes,
        "temp_ratio": round(private.temp_bytes / max(plain.temp_bytes, 1), 4),
        "collectives": private.collectives,
        "non_private_collectives": plain.collectives,
        "compile_seconds": round(private.seconds, 1),
        "strategy": chosen.splitlines(),
    }


def _print(result: dict[str, Any], to_stderr: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=to_stderr)
    table = Table(
        title=f"{result['parameters']:,} parameters on {result['topology']}", show_header=False
    )
    fits = {True: "yes", False: "NO", None: "unknown"}[result["fits"]]
    limit = "" if result["hbm_bytes"] is None else f" of {result['hbm_bytes'] / 2**30:.0f} GiB"
    table.add_row("fits", f"{fits}: {result['peak_bytes'] / 2**30:.2f} GiB{limit} a device")
    table.add_row(
        "FLOPs", f"{result['flops']:.3e} a microbatch, {result['flops_ratio']:.3f} x non-private"
    )
    table.add_row(
        "temporary memory",
        f"{result['temp_bytes'] / 2**30:.2f} GiB, {result['temp_ratio']:.2f} x non-private",
    )
    for c in result["collectives"]:
        where = "in a loop" if c["in_loop"] else "once a step"
        table.add_row(c["kind"], f"{c['count']} {where}, {c['bytes'] / 2**20:.1f} MiB in all")
    table.add_row("compiled in", f"{result['compile_seconds']} s")
    console.print(table)
    for line in result["strategy"]:
        console.print(line, highlight=False)
