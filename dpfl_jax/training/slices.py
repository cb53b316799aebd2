"""Compiles the real train step for absent devices, to read memory, FLOPs and collectives."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import time
from collections.abc import Callable
from typing import Any

from dpfl_jax.errors import BadInputError

MOST_UNITS = 256  # largest microbatch that is tried
# Memory of one device, in GiB. A v3 chip is two devices for JAX.
HBM = {"v2": 8, "v3": 16, "v4": 32, "v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 96}


_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
_BYTES |= {"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
_LINE = re.compile(rf"= (?P<shape>.*?) (?P<kind>{'|'.join(_KINDS)})(?P<start>-start)?\(")
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CALLED = re.compile(
    r"(?:(?:body|condition|calls|to_apply)=%?|branch_computations=\{)((?<=\{)[\w.\-, %]+|[\w.\-]+)"
)
_ENDS = 'custom_call_target="AsyncCollectiveDone"'
# Groups of devices are written one by one, as a grid, or as axes of a mesh.
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{(?P<first>[\d,]+)\}|\[\d+,(?P<size>\d+)\]<="
    r"|mesh\[(?P<mesh>.*?)\] \{(?P<axes>.*?)\})"
)
# Slices send to each other through their hosts.
_BETWEEN = re.compile(r"= \((?P<shape>.*?), u32.* send\(.*\"xla_megascale_runtime\"")
BETWEEN_SLICES = "between slices"

Lines = dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of collective in a module.

    A loop whose length the module says counts as often as it turns; the loop over microbatches,
    whose length varies, once.

    Attributes:
      kind: e.g. ``all-reduce``.
      in_loop: whether it runs in every iteration of a loop.
      count: number of instructions (one may carry many arrays).
      bytes: size of all arrays of those instructions (before they are scattered, or after they are
        gathered), per device.
      sent: bytes that a device sends for them, to its neighbours in a ring.
    """

    kind: str
    in_loop: bool
    count: int
    bytes: int
    sent: int


def collectives(hlo: str) -> list[Collective]:
    """Lists the collectives of a module (its text) by kind, and by whether they run in a loop."""
    bodies: Lines = {}
    current = ""
    for line in hlo.splitlines():
        opened = _COMPUTATION.match(line)
        if opened:
            current = opened.group(1)
        bodies.setdefault(current, []).append(line)
    looped = _reached_from_loops(bodies)
    turns = _turns(bodies)
    result: dict[tuple[str, bool], list[tuple[int, int]]] = {}
    for name, lines in bodies.items():
        # An asynchronous collective is listed where it starts, continues and ends: count the start.
        if name.startswith("async_collective_fusion") or any(_ENDS in line for line in lines):
            continue
        for line in lines:
            if match := _LINE.search(line):
                kind, size, sent = _measured(match, line, name)
            elif match := _BETWEEN.search(line):
                kind, size = BETWEEN_SLICES, _size(match["shape"])
                sent = size
            else:
                continue
            pair = (size * turns[name], sent * turns[name])
            result.setdefault((kind, name in looped), []).append(pair)
    return [
        Collective(*key, len(pairs), sum(size for size, _ in pairs), sum(sent for _, sent in pairs))
        for key, pairs in sorted(result.items())
    ]


def _measured(match: re.Match[str], line: str, computation: str) -> tuple[str, int, int]:
    """The kind of a collective, the size of its arrays, and the bytes that a device sends."""
    kind, size = match["kind"], _size(match["shape"])
    groups = _GROUPS.search(line)
    devices = 0 if groups is None else _group_size(groups)
    if match["start"] and kind != "all-reduce":
        size //= 2  # the shape holds operands and results
    if kind == "reduce-scatter":
        size *= devices or 1  # the shape is that of the result
    # How TPUs write one: a reduction, of which each device keeps its part.
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    if kind == "collective-permute":
        return kind, size, size
    passes = 2 if kind == "all-reduce" else 1  # scattered, and gathered
    return kind, size, round(passes * size * (1 - 1 / devices)) if devices else passes * size


def _group_size(groups: re.Match[str]) -> int:
    """The number of devices that a collective joins."""
    if groups["axes"] is not None:  # of mesh['data'=4,'fsdp'=4]: {'fsdp'}, or a part, {'fsdp':(1)2}
        sizes = dict(axis.split("=") for axis in groups["mesh"].split(","))
        axes = [axis.partition(":") for axis in groups["axes"].split(",")]
        return math.prod(int(part.rpartition(")")[2] or sizes[name]) for name, _, part in axes)
    return int(groups["size"] or groups["first"].count(",") + 1)


_CONSTANT = re.compile(r"%([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_COMPARED = re.compile(r"ROOT .* compare\(.*%([\w.\-]+)\), direction=LT")
_TRIPS = re.compile(r'known_trip_count"?[:=]\s*\{"?n"?[:=]"?(\d+)')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")


def _turns(bodies: Lines) -> dict[str, int]:
    """How often each computation runs: the product of the known lengths of the loops around it."""
    callers: dict[str, set[tuple[str, int]]] = {}
    for name, lines in bodies.items():
        for line in lines:
            count = _trips(line, bodies) if " while(" in line else 1
            for callee in callees(line):
                callers.setdefault(callee, set()).add((name, count))

    @functools.cache
    def of(name: str) -> int:
        return max((n * of(caller) for caller, n in callers.get(name, ())), default=1)

    return {name: of(name) for name in bodies}


def _trips(line: str, bodies: Lines) -> int:
    """How often a loop turns; 1 where the module does not say.

    Some compilers write it beside the loop; else its condition compares a counter from 0 with it.
    """
    if written := _TRIPS.search(line):
        return int(written[1])
    condition = _CONDITION.search(line)
    text = "\n".join(bodies.get(condition[1], [])) if condition else ""
    compared = _COMPARED.search(text)
    return int(dict(_CONSTANT.findall(text)).get(compared[1], 1)) if compared else 1


def callees(line: str) -> list[str]:
    """The computations that an instruction calls."""
    return [name.strip(" %") for group in _CALLED.findall(line) for name in group.split(",")]


def _size(shape: str) -> int:
    total = 0
    for kind, dims in _SHAPE.findall(shape):
        count = math.prod(int(dim) for dim in dims.split(",") if dim)
        total += count * _BYTES.get(kind, 4 if kind not in ("token",) else 0)
    return total


def _reached_from_loops(bodies: Lines) -> set[str]:
    calls = {name: {c for line in lines for c in callees(line)} for name, lines in bodies.items()}
    loops = [line for lines in bodies.values() for line in lines if " while(" in line]
    todo, seen = {name for line in loops for name in callees(line)}, set[str]()
    while todo:
        name = todo.pop()
        seen.add(name)
        todo |= calls.get(name, set()) - seen
    return seen


# ---- the step ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One compiled step: bytes and operations of one device.

    Attributes:
      flops: operations of products and convolutions of one microbatch.
      temp_bytes: the compiler's temporaries; all that it needs, if ``refused``.
      argument_bytes: state, with the average of the iterates, and a buffer of two microbatches.
      output_bytes: the new state.
      alias_bytes: results that reuse the memory of arguments.
      collectives: fields of each ``Collective``; None if the TPU compiler is newer than jaxlib,
        which then cannot read its output.
      seconds: time to compile.
      refused: whether memory did not suffice.
    """

    flops: float
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    collectives: list[dict[str, Any]] | None
    seconds: float
    refused: bool = False

    @property
    def peak_bytes(self) -> int:
        """Arguments, results that do not reuse them, and temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


@dataclasses.dataclass(frozen=True)
class Units:
    """Shape of one microbatch: ``parts`` devices with ``microbatch`` units each.

    A unit has ``group`` examples (None: it is one) of ``length`` tokens, and a bound if ``bounds``;
    with ``packed`` the examples are rows of several.
    """

    parts: int
    microbatch: int
    group: int | None
    length: int
    bounds: bool = False
    packed: bool = False

    def shapes(self, *lead: int) -> Any:
        """Shapes of a batch of units with these leading axes."""
        import jax
        import jax.numpy as jnp

        bounds = {"bound": jax.ShapeDtypeStruct(lead, jnp.float32)} if self.bounds else {}
        lead = lead if self.group is None else (*lead, self.group)
        example = {
            "tokens": jax.ShapeDtypeStruct((*lead, self.length), jnp.int32),
            "mask": jax.ShapeDtypeStruct((*lead, self.length), jnp.bool_),
        }
        if self.packed:
            example["segments"] = example["tokens"]
        if self.group is None:
            return example | bounds
        counts = {"count": jax.ShapeDtypeStruct(lead[:-1], jnp.int32)} if self.packed else {}
        mask = jax.ShapeDtypeStruct(lead, jnp.bool_)
        return {"examples": example, "mask": mask} | counts | bounds


def kind_of(topology: str) -> str:
    """The kind of device of a topology such as ``v5e:4x4``.

    Raises:
      BadInputError: the topology is not KIND:SHAPE.
    """
    kind, _, shape = topology.partition(":")
    if kind not in (*HBM, "cpu") or not shape:
        raise BadInputError(
            f"compile: topology is {topology!r}, but it must be KIND:SHAPE with KIND one of "
            f"{', '.join(HBM)} or cpu, e.g. v5e:4x4"
        )
    return kind


def memory_of(topology: str) -> int | None:
    """Bytes of memory of one device, or None for a CPU."""
    kind = kind_of(topology)
    return None if kind == "cpu" else HBM[kind] * 2**30


def slice_mesh(topology: str, axes: dict[str, Any], slices: int = 1) -> Any:
    """A mesh over the devices of TPU slices; must come before JAX's first use of a device.

    Args:
      topology: e.g. v5e:4x4, or cpu:8.
      axes: the axes of the configuration's mesh section.
      slices: number of slices, each of this topology.

    Raises:
      BadInputError: there is no such slice, no compiler for it, or the axes do not fit.
    """
    kind, shape = kind_of(topology), topology.partition(":")[2]
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # No chip is touched, so others may compile (or train) here at the same time.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from dpfl_jax.mesh import make_mesh

    if kind == "cpu":
        if slices > 1:
            raise BadInputError("compile: slices are of TPUs: leave --slices out with cpu")
        if not shape.isdigit() or shape == "0":
            raise BadInputError(f"compile: topology {topology!r} needs a number of devices")
        with contextlib.suppress(RuntimeError):  # JAX is already running, and keeps its devices
            jax.config.update("jax_num_cpu_devices", int(shape))
        if len(jax.devices()) < int(shape):
            raise BadInputError(
                f"compile: {topology} needs {shape} devices, but this process has "
                f"{len(jax.devices())}"
            )
        return make_mesh(**axes, devices=jax.devices()[: int(shape)])
    from jax.experimental import topologies

    try:
        result = topologies.get_topology_desc(
            platform="tpu", topology_name=topology, num_slices=slices
        )
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInputError(
            f"compile: no TPU compiler for {topology} ({first}): pip install libtpu, "
            "and give a shape that exists"
        ) from error
    return make_mesh(**axes, devices=list(result.devices))


@dataclasses.dataclass(frozen=True)
class Step:
    """A train step that can be compiled at any microbatch size.

    Attributes:
      calibrated, model, optimizer, mesh: what the step is made of.
      options: options of the clipped gradient; ``trainable`` says which parameters are trained.
      frozen_dtype: dtype of parameters that are not trained.
      averages: whether the run keeps an average of the iterates, which is no argument of the step.
    """

    calibrated: Any
    model: Any
    optimizer: Any
    mesh: Any
    options: dict[str, Any]
    frozen_dtype: str = "float32"
    averages: bool = False

    def flops(self, units: Units) -> float:
        """Operations of one microbatch on one device, counted before compilation."""
        from dpfl_jax.clipping.jaxprs import count_flops
        from dpfl_jax.mesh import splits_parameters

        step, arguments = self._lowerable(units)
        counted = count_flops(step, *arguments)
        # If the compiler splits the parameters, the count is for all devices together.
        return counted / self.mesh.size if splits_parameters(self.mesh) else counted

    def compile(self, units: Units) -> Compiled:
        """Compiles the step for units of these shapes."""
        step, arguments = self._lowerable(units)
        return self._compiled(step, arguments, self.flops(units))

    def compile_check(self, units: Units) -> Compiled:
        """Compiles the plain gradient that the step is compared with before a run, on the mesh."""
        import numpy as np

        from dpfl_jax.mechanisms.plan.sum_check import Reference

        _, (state, *_, frozen) = self._lowerable(units)
        mechanism, loss_fn = self.calibrated.mechanism, self.model.loss
        trainable = self.options.get("trainable")
        given = (mechanism, loss_fn, state.params, frozen, self.mesh, trainable)
        reference = Reference.on_mesh(*given)
        example, weight = dataclasses.replace(units, group=None).shapes(), np.float32(1)
        arguments = (state.params, frozen, example, weight, reference.nothing)
        return self._compiled(reference.add, arguments, math.nan)

    def _compiled(self, program: Any, arguments: tuple[Any, ...], flops: float) -> Compiled:
        import jax

        start = time.perf_counter()
        try:
            compiled = program.lower(*arguments).compile()
        except jax.errors.JaxRuntimeError as error:
            needed = re.search(r"temporaries \(([\d.]+)([KMG])\)", str(error))
            needed = needed or re.search(r"[Uu]sed ([\d.]+)([KMG]) of", str(error))
            if needed is None:
                raise
            size = int(float(needed[1]) * 2 ** {"K": 10, "M": 20, "G": 30}[needed[2]])
            seconds = time.perf_counter() - start
            return Compiled(flops, size, 0, 0, 0, [], seconds, refused=True)
        seconds = time.perf_counter() - start
        memory = compiled.memory_analysis()
        return Compiled(
            flops=flops,
            temp_bytes=int(memory.temp_size_in_bytes),
            argument_bytes=int(memory.argument_size_in_bytes) + self._average_bytes(arguments[0]),
            output_bytes=int(memory.output_size_in_bytes),
            alias_bytes=int(memory.alias_size_in_bytes),
            collectives=self._sent(compiled),
            seconds=seconds,
        )

    def _average_bytes(self, state: Any) -> int:
        """Bytes of the average on each device; ``state`` has the shapes of the parameters."""
        import jax

        from dpfl_jax.run.average import started

        if not self.averages:
            return 0
        kept = jax.tree.leaves(jax.eval_shape(started, state.params))
        return sum(
            math.prod(p.sharding.shard_shape(p.shape)) * average.dtype.itemsize
            for p, average in zip(jax.tree.leaves(state.params), kept, strict=True)
        )

    def _sent(self, compiled: Any) -> list[dict[str, Any]] | None:
        import jax

        try:
            return [dataclasses.asdict(found) for found in collectives(compiled.as_text())]
        except jax.errors.JaxRuntimeError:
            return None

    def _lowerable(self, units: Units) -> tuple[Any, tuple[Any, ...]]:
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        from dpfl_jax.clipping import split
        from dpfl_jax.mesh import parameter_shardings, replicated, unit_axes
        from dpfl_jax.run.state import TrainState, shardings_of
        from dpfl_jax.training.central import make_train_step

        capacity = 2  # any number of microbatches runs in the same loop
        rows = NamedSharding(self.mesh, PartitionSpec(None, unit_axes(self.mesh)))
        whole = replicated(self.mesh)

        def place(tree: Any, sharding: Any) -> Any:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
            )

        shapes = jax.eval_shape(self.model.init, jax.random.key(0))
        params, frozen = split(shapes, self.options.get("trainable"))
        frozen = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, self.frozen_dtype, sharding=place),
            frozen,
            parameter_shardings(frozen, self.mesh),
        )
        state = TrainState(
            params=params,
            opt_state=jax.eval_shape(self.optimizer.init, params),
            step=jax.ShapeDtypeStruct((), jnp.int32),  # type: ignore[arg-type]
            noise=jax.eval_shape(self.calibrated.noise_transform().init, params).memory,
        )
        lead = (capacity, units.parts * units.microbatch)
        words = 8 * self.calibrated.mechanism.noise.keys_per_step + 3
        arguments = (
            jax.tree.map(
                lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                state,
                shardings_of(params, self.optimizer, self.mesh, noise=state.noise),
            ),
            place(units.shapes(*lead), rows),
            place(jax.ShapeDtypeStruct(lead, jnp.bool_), rows),
            place(jax.ShapeDtypeStruct((), jnp.int32), whole),
            place(jax.ShapeDtypeStruct((words,), jnp.uint32), whole),
            frozen,
        )
        step = make_train_step(
            self.calibrated, self.model.loss, self.optimizer, self.mesh, **self.options
        )
        # A run's step is two programs, the sum and the update; together they cost as much as this.
        return jax.jit(step.whole, donate_argnums=0), arguments


def largest_that_fits(peak: Callable[[int], int | None], limit: int, start: int = 1) -> int:
    """The largest microbatch size, ``start`` times a power of two, at which a step fits.

    Args:
      peak: bytes needed at a microbatch size; None if it does not compile.
      limit: bytes of one device.
      start: size to try first.

    Returns:
      The largest size that was tried and fits; 0 if not even one unit fits.
    """

    def fits(size: int) -> bool:
        memory = peak(size)
        return memory is not None and memory <= limit

    size = start
    if fits(size):
        while 2 * size <= MOST_UNITS and fits(2 * size):
            size *= 2
        return size
    while size > 1:
        size //= 2
        if fits(size):
            return size
    return 0


def step_of(config: Any, vocab: int, topology: str, mesh: Any) -> tuple[Step, Units]:
    """Returns the step of a configuration, and its units; arguments as in ``measure``."""
    from dpfl_jax.clipping import OwnBound
    from dpfl_jax.mesh import unit_parts
    from dpfl_jax.training.start import build_transformer, make_optimizer, trained_by_name

    model, execution = build_transformer(config, vocab, bos_id=1), config.execution
    calibrated = _with_any_noise(config, config.mechanism)
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    limit = memory_of(topology)
    options = {
        "strategy": execution.strategy,
        "platform": "cpu" if kind_of(topology) == "cpu" else "tpu",
        "trainable": trained_by_name(config.model, model),
        # The choice of a strategy would otherwise ask the local device.
        "memory_limit": None if limit is None else limit / 2,
        "sum_over_fsdp": execution.sum_over_fsdp,
        **execution.cut,
    }
    frozen_dtype, averages = config.model.frozen_dtype, config.train.average != "none"
    step = Step(calibrated, model, optimizer, mesh, options, frozen_dtype, averages)
    mechanism = calibrated.mechanism
    return step, Units(
        unit_parts(mesh),
        execution.microbatch_size,
        mechanism.participation.unit_examples,
        config.data.seq_len,
        isinstance(mechanism.rule, OwnBound),
    )


def _with_any_noise(config: Any, mechanism: Any) -> Any:
    """The mechanism, calibrated: the compiled step does not depend on the people or the noise."""
    from dpfl_jax.mechanisms import Population

    # As many as any mechanism needs: banded noise draws of a part of them in each step.
    some = Population(*[math.ceil(mechanism.participation.divisor) * config.train.steps] * 3)
    noise = config.privacy.noise_multiplier or 1.0
    return mechanism.calibrate(some, config.train.steps, noise_multiplier=noise, delta=1e-5)


def measure(
    config: Any,
    vocab: int,
    topology: str,
    mesh: Any,
    *,
    suggest: bool = False,
    baseline: bool = True,
    count_only: bool = False,
) -> dict[str, Any]:
    """Compiles the step of a configuration for a slice.

    Args:
      config: a RunConfig.
      vocab: size of the vocabulary.
      topology: e.g. v5e:4x4.
      mesh: mesh over the devices of the topology.
      suggest: whether to look for the largest microbatch that fits.
      baseline: whether to compile the step without privacy, too.
      count_only: whether to compile nothing, and only count operations.
    """
    from dpfl_jax.mechanisms import non_private
    from dpfl_jax.training.start import check_attention, check_trainable

    if not count_only:
        check_attention(config, mesh)
    step, first = step_of(config, vocab, topology, mesh)
    model, mechanism, options = step.model, step.calibrated.mechanism, step.options
    limit, size, group = memory_of(topology), first.microbatch, first.group
    compiled: dict[int, Compiled] = {}

    def sized(size: int) -> Units:
        return dataclasses.replace(first, microbatch=size)

    def at(size: int) -> Compiled:
        if size not in compiled:
            compiled[size] = step.compile(sized(size))
        return compiled[size]

    largest = None
    if count_only:
        compiled[size] = Compiled(step.flops(first), 0, 0, 0, 0, [], 0.0)
        suggest, baseline, limit = False, False, None
    if suggest and limit is not None:

        def peak(size: int) -> int | None:
            return None if at(size).refused else at(size).peak_bytes

        largest = largest_that_fits(peak, limit, start=size)
        size = largest or min(compiled)
    private, units = at(size), sized(size)
    plain_step = dataclasses.replace(
        step,
        calibrated=_with_any_noise(config, non_private(batch_size=mechanism.compute_budget)),
        options={"trainable": options["trainable"]},
    )
    plain_units = Units(units.parts, size * (group or 1), None, units.length)
    plain = plain_step.compile(plain_units) if baseline else None
    plain_flops = plain_step.flops(plain_units) if plain is None else plain.flops
    return {
        "topology": topology,
        "devices": mesh.size,
        "mesh": dict(mesh.shape),
        "unit_parts": units.parts,
        "parameters": model.num_params,
        "trained_parameters": check_trainable(config.model, model),
        "mechanism": mechanism.kind,
        "group_size": group,
        "microbatch_size": size,
        "largest_microbatch_size": largest,
        "seq_len": units.length,
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
        "strategy": _explain(step, units).splitlines(),
    }


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """The fastest layout that fits, by estimate.

    Attributes:
      overrides: the settings, as overrides of the configuration.
      seconds: of one step, if sending overlaps with nothing.
      sent_bytes: bytes that a device sends in one step.
      result: of ``measure`` for this layout.
    """

    overrides: list[str]
    seconds: float
    sent_bytes: float
    result: dict[str, Any]


def suggest(
    config: Any, vocab: int, topology: str, slices: int = 1, say: Callable[[str], object] = str
) -> Suggestion:
    """Finds the parts of the parameters and the microbatch with which a step is fastest.

    A larger microbatch sends parameters and gradients less often. More parts leave more memory for
    it, but are slower to gather. So parts are doubled until that no longer helps.

    Args:
      config: a RunConfig.
      vocab: size of the vocabulary.
      topology: e.g. v5e:4x4.
      slices: number of slices.
      say: called with what is tried.

    Raises:
      BadInputError: nothing fits.
    """
    axes = config.execution.mesh.axes
    best: Suggestion | None = None
    most = slice_mesh(topology, axes | {"data": None, "fsdp": 1}, slices).size // slices
    parts = 1

    def tried(parts: int, sum_over_fsdp: str, start: int) -> Suggestion | None:
        overrides = {"microbatch_size": start, "sum_over_fsdp": sum_over_fsdp}
        split = {"data": None, "fsdp": parts}
        execution = config.execution.model_copy(
            update=overrides | {"mesh": config.execution.mesh.model_copy(update=split)}
        )
        changed = config.model_copy(update={"execution": execution})
        mesh = slice_mesh(topology, execution.mesh.axes, slices)
        say(f"execution.mesh.fsdp={parts} execution.sum_over_fsdp={sum_over_fsdp}")
        result = measure(changed, vocab, topology, mesh, suggest=True, baseline=False)
        if not result["largest_microbatch_size"]:
            return None
        return _rated(config, result, parts, sum_over_fsdp)

    while parts * axes["tensor"] * axes["sequence"] <= most:
        start = best.result["microbatch_size"] if best else config.execution.microbatch_size
        found = tried(parts, "auto", start)
        if found and best and found.seconds > best.seconds:
            break
        best = found or best
        parts *= 2
    if best is None:
        raise BadInputError(
            f"compile: no layout fits on {topology}, not even one unit a device: take more or "
            "larger devices, train adapters (model.lora), or shorten data.seq_len"
        )
    parts = best.result["mesh"].get("fsdp", 1)
    if parts > 1 and (once := tried(parts, "step", best.result["microbatch_size"])):
        best = min(best, once, key=lambda found: found.seconds)
    return best


def _rated(config: Any, result: dict[str, Any], parts: int, sum_over_fsdp: str) -> Suggestion:
    from dpfl_jax.clipping.cost import machine_for

    machine = machine_for("tpu")
    units = result["unit_parts"] * result["microbatch_size"]
    rows = math.ceil(config.mechanism.participation.divisor / units)
    found = result["collectives"] or []
    loop, once = (sum(c["sent"] for c in found if c["in_loop"] is where) for where in (True, False))
    sent = rows * loop + once
    seconds = rows * result["flops"] / machine.flops + machine.sending(sent)
    overrides = [
        f"execution.mesh.fsdp={parts}",
        f"execution.microbatch_size={result['microbatch_size']}",
        f"execution.sum_over_fsdp={sum_over_fsdp}",
    ]
    return Suggestion(overrides, seconds, sent, result)


def gradient_cost(config: Any, vocab: int | None) -> dict[str, float]:
    """``flops_per_gradient`` of the configuration's step, and ``parameters`` of its model."""
    from dpfl_jax.mesh import make_mesh

    result = measure(config, vocabulary(config, vocab), "cpu:1", make_mesh(), count_only=True)
    flops = result["flops"] / (result["microbatch_size"] * (result["group_size"] or 1))
    return {"flops_per_gradient": flops, "parameters": result["parameters"]}


def vocabulary(config: Any, given: int | None) -> int:
    """The size of the vocabulary: given, or the configuration's, or its tokeniser's."""
    from dpfl_jax.data import load_tokenizer

    if config.model.checkpoint is not None:
        return given or 1  # its own vocabulary
    declared = given or config.model.overrides.get("vocab_size")
    return declared or load_tokenizer(config.data.tokenizer).vocab_size


def _explain(step: Step, units: Units) -> str:
    import jax

    from dpfl_jax.mechanisms.plan.sums import microbatched

    mechanism, options = step.calibrated.mechanism, dict(step.options)
    cut = {name: options.pop(name) for name in ("examples_at_once", "split_users")}
    del options["sum_over_fsdp"]
    pieces = microbatched(mechanism, step.mesh, **cut)
    bounded = mechanism.clipped_grad(step.model.loss, **options, **pieces)
    if not hasattr(bounded, "explain"):
        return "not private"
    params = jax.eval_shape(step.model.init, jax.random.key(0))
    return str(bounded.explain(params, units.shapes(units.microbatch)))
