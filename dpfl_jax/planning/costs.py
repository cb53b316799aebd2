"""What the cells of a plan cost: operations, chip-hours, money, and whether they fit a device.

``Chip`` turns operations into hours by the stated or measured speed of a chip. ``this_machine``
measures this speed: it fits a line through the times of two batch sizes, because a step takes some
time per row of units, and some that does not depend on them (noise, optimiser). Seconds are CPU
seconds of all cores together on a CPU, and wall-clock seconds on other devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Any

import jax
from scipy import stats

from dpfl_jax.clipping.cost import PEAK
from dpfl_jax.config import RunConfig
from dpfl_jax.errors import BadInputError, positive, probability, require
from dpfl_jax.mechanisms import Mechanism
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.mesh import make_mesh
from dpfl_jax.planning.candidates import CANDIDATES, at_budget, draws_examples, plain
from dpfl_jax.randomness import RootKey
from dpfl_jax.training import slices

# Memory of one GPU, in bytes (NVIDIA's data sheets; the smaller A100).
GPU_BYTES = {"a100": 40 * 10**9, "h100": 80 * 10**9, "h200": 141 * 10**9}


@dataclasses.dataclass(frozen=True)
class Chip:
    """The speed and price of one chip.

    Attributes:
      peak: peak FLOP/s of one chip.
      mfu: share of the peak that a run reaches, in (0, 1].
      price: price of one chip-hour, in any currency; None: no money is stated.
      watts: power of one chip in watts; None: no energy is stated.
      step_seconds: seconds of a step that do not depend on its batch: noise, optimiser, dispatch.
    """

    peak: float
    mfu: float = 0.4
    price: float | None = None
    watts: float | None = None
    step_seconds: float = 0.0

    def __post_init__(self) -> None:
        positive("the FLOP/s of a chip", self.peak)
        probability("the MFU", self.mfu, zero=False, advice="it is a share of the peak")
        for name in ("price", "watts"):
            value = getattr(self, name)
            good = value is None or 0 <= value < math.inf
            require(good, f"the {name} of a chip", value, "finite and 0 or more")

    @classmethod
    def named(cls, name: str, **rest: float | None) -> Chip:
        """Returns the chip with this name in ``PEAK``, or with this number of FLOP/s.

        Args:
          name: a name, or FLOP/s written as a number.
          **rest: other fields; None: the default.

        Raises:
          BadInputError: ``name`` is neither.
        """
        try:
            peak = PEAK[name] if name in PEAK else float(name)
        except ValueError:
            raise BadInputError(
                f"--chip is {name!r}, but it must be one of {', '.join(PEAK)}, or FLOP/s such as "
                "2e14"
            ) from None
        return cls(peak, **{key: value for key, value in rest.items() if value is not None})

    def bill(self, flops: float, steps: int = 0) -> dict[str, float]:
        """Returns ``flops``, ``chip_hours``, and ``money`` and ``kwh`` if they can be known."""
        hours = (flops / (self.peak * self.mfu) + steps * self.step_seconds) / 3600.0
        costs = {"flops": flops, "chip_hours": hours}
        if self.price is not None:
            costs["money"] = hours * self.price
        if self.watts is not None:
            costs["kwh"] = hours * self.watts / 1000.0
        return costs

    def largest_budget(self, hours: float, flops_per_gradient: float, steps: int) -> int:
        """Returns the largest power-of-two compute budget that so many chip-hours pay for.

        Raises:
          BadInputError: they do not pay for one gradient a step.
        """
        one = self.bill(flops_per_gradient * steps)["chip_hours"]
        if not hours >= one:
            raise BadInputError(
                f"{hours:g} chip-hours do not pay for one gradient a step ({one:.3g}): give more, "
                "or take fewer steps"
            )
        return 2 ** int(math.log2(hours / one) + 1e-9)


def expected_rows(size: float, row: int) -> float:
    """Returns the mean number of rows of ``row`` units for Poisson draws of mean ``size``."""
    if size > 1e4:
        return size / row + 0.5
    most = int(size + 12 * math.sqrt(size) + 12)
    drawn = range(1, most + 1)
    probs = stats.poisson.pmf(drawn, size)
    return float(sum(p * -(-n // row) for n, p in zip(drawn, probs, strict=True)))


_WARM = 2  # first steps, which compile and are not timed


def time_steps(
    config: RunConfig, data: Any, model: Any, params: Any, mechanism: Mechanism, steps: int
) -> tuple[float, int]:
    """Takes training steps as ``dpfl train`` does, and discards the result.

    Returns:
      Seconds of ``steps`` steps without compilation, and the number of rows of units in them.
    """
    from dpfl_jax.training.fitting import algorithm_of
    from dpfl_jax.training.optimizers import make_optimizer
    from dpfl_jax.training.start import trained_by_name

    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    calibrated = mechanism.calibrate(
        mechanism.participation.population(data.train.user_offsets),
        steps + _WARM,
        noise_multiplier=1.0,
        delta=1e-5,
    )
    mesh = make_mesh(**config.execution.mesh.axes)
    plan = Plan(calibrated, data.train, config.execution.unpacked, mesh)
    optimizer = make_optimizer(config.optimizer, steps + _WARM)
    trainable = trained_by_name(config.model, model)
    algorithm = algorithm_of(model.loss, params, plan, optimizer, trainable)
    state, running = algorithm.init(), algorithm.begin(RootKey.from_seed(0), 0)
    rows, start = 0, 0.0
    for number, batch in running.inputs():
        if number == _WARM + 1:
            jax.block_until_ready(state)
            rows, start = 0, clock()
        state, _ = running.step(state, batch)
        rows += sum(bucket.num_rows for bucket in batch.buckets)
    jax.block_until_ready(state)
    return clock() - start, rows


def this_machine(
    config: RunConfig,
    data: Any,
    model: Any,
    params: Any,
    flops_per_gradient: float,
    steps: int = 6,
    **rest: float | None,
) -> Chip:
    """Returns this machine as a chip whose peak is the speed that steps of the model reach here.

    Args:
      config: configuration of the run.
      data: its data set, as read.
      model: its model.
      params: any parameters of the model.
      flops_per_gradient: FLOPs of one gradient evaluation.
      steps: number of steps to time, at each of two batch sizes.
      **rest: price and watts.
    """
    mechanism: Any = config.mechanism
    group, row = mechanism.participation.unit_examples or 1, config.execution.microbatch_size
    times: dict[int, list[tuple[float, int]]] = {row: [], 4 * row: []}
    for _ in range(3):  # alternates, so that other load on the machine disturbs both sizes
        for size, timed in times.items():
            one = at_budget(mechanism, mechanism.kind, float(size * group), mechanism.group_size)
            timed.append(time_steps(config, data, model, params, one, steps))
    (short, few), (long, many) = (sorted(timed)[1] for timed in times.values())
    per_row = max(long - short, 0.05 * long) / max(many - few, 1)
    per_step = max(short - few * per_row, 0.0) / steps
    speed = flops_per_gradient * row * group / per_row
    given = {name: value for name, value in rest.items() if value is not None}
    return Chip(speed, mfu=1.0, step_seconds=per_step, **given)


_COMPILED = 3  # how many rows at the top of the table are compiled


@dataclasses.dataclass(frozen=True)
class LazyStart:
    """The data, model and starting parameters of a configuration, read once and only if needed."""

    config: Any
    console: Any

    @functools.cached_property
    def data(self) -> Any:
        """The data set and the model."""
        # Imported here because most plans read no data, and this import takes half a second.
        from dpfl_jax.training.central_run import read_data

        return read_data(self.config, self.console)

    @functools.cached_property
    def params(self) -> Any:
        """The parameters before the first step."""
        from dpfl_jax.training.start import starting_params

        data, model = self.data
        return starting_params(self.config, data, model, make_mesh(), self.console)[0]


def prices(
    start: LazyStart,
    chip_name: str,
    console: Any,
    *,
    mfu: float | None = None,
    price: float | None = None,
    watts: float | None = None,
    vocab: int | None = None,
) -> Any:
    """Returns, by plain candidate, the chip and the FLOPs of a gradient evaluation.

    Args:
      start: data, model and parameters of the configuration.
      chip_name: a name for ``Chip.named``, or ``"here"`` to time this machine.
      console: shows progress.
      mfu: as for ``Chip``.
      price: as for ``Chip``.
      watts: as for ``Chip``.
      vocab: size of the vocabulary, if the tokeniser is not at hand.

    Raises:
      BadInputError: this machine is to be timed, but there are no data.
    """
    config, is_here = start.config, chip_name == "here"
    if is_here and config.population is not None:
        raise BadInputError("--chip here needs data, but this configuration has none: name a chip")
    flops, chips = {}, {}
    more: dict[str, Any] = {"price": price, "watts": watts}
    if is_here:
        (data, model), params = start.data, start.params
    else:
        chip = Chip.named(chip_name, mfu=mfu, **more)
    with console.status("counting the operations of a step"):
        for kind in (plain(examples=False), plain(examples=True)):
            group = getattr(config.mechanism, "group_size", 1)
            cell = _with_cell(config, kind, group)
            flops[kind] = slices.gradient_cost(cell, vocab)["flops_per_gradient"]
            if is_here:  # the speed that is reached depends on the algorithm
                chip = this_machine(cell, data, model, params, flops[kind], **more)
                console.print(
                    f"this machine, {CANDIDATES[kind].name}: {chip.peak:.3g} FLOP/s reached, and "
                    f"{chip.step_seconds:.2g} s more per step"
                )
            chips[kind] = chip
    return chips, flops


def add_bills(result: dict[str, Any], price: Any, row: int) -> None:
    """Adds ``bill`` to each option of a plan's JSON; ``row`` is the microbatch size."""
    chips, each = price
    for option in (result["best"], *result["options"]):
        kind = plain(draws_examples(option["kind"]))  # has the same gradients as the option
        units = expected_rows(option["size"], row) * row
        flops = each[kind] * units * option["gradients"] * result["steps"]
        option["bill"] = chips[kind].bill(flops, result["steps"])


def add_memory(
    result: dict[str, Any],
    config: Any,
    topology: str,
    console: Any,
    *,
    chip_name: str | None = None,
    vocab: int | None = None,
) -> None:
    """Adds ``memory`` to the options that share a program with one of the table's first rows.

    It holds a device's ``peak_bytes``, its ``limit_bytes`` and whether it ``fits``; the last two
    are None if the limit is not known.
    """
    mesh = slices.slice_mesh(topology, config.execution.mesh.axes)
    limit = slices.memory_of(topology) or GPU_BYTES.get(chip_name or "")
    wanted = dict.fromkeys(_program(option) for option in in_order(result)[:_COMPILED])
    memory: dict[Any, dict[str, Any]] = {}
    for kind, group, bands in wanted:
        with console.status(f"compiling {kind} G={group}"):
            cell = _with_cell(config, kind, group, bands)
            size = slices.vocabulary(cell, vocab)
            measured = slices.measure(cell, size, topology, mesh, baseline=False)
        fits = measured["fits"]
        if fits is None and limit is not None:
            fits = measured["peak_bytes"] <= limit
        memory[kind, group, bands] = {
            "peak_bytes": measured["peak_bytes"],
            "limit_bytes": limit,
            "fits": fits,
            "topology": topology,
        }
    for option in (result["best"], *result["options"]):
        if _program(option) in memory:
            option["memory"] = memory[_program(option)]


def in_order(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the options in the order of the table: by predicted loss, or without it by noise."""
    by = "loss" if "prediction" in result else "noise"
    return sorted(result["options"], key=lambda option: option[by])


def _program(option: dict[str, Any]) -> tuple[str, int, int]:
    """What an option's compiled program depends on; with drawn examples not the group size."""
    return option["kind"], option["gradients"], option["bands"]


def _with_cell(config: Any, kind: str, group: int, bands: int = 1) -> Any:
    budget = max(config.mechanism.compute_budget, group)
    mechanism = at_budget(config.mechanism, kind, budget, group, bands=bands)
    return config.model_copy(update={"mechanism": mechanism})
