"""What the cells of a plan cost: operations, chip-hours, money, and whether they fit a device.

``Chip`` turns operations into hours by what a chip is stated, or was measured, to do.
``this_machine`` measures it: a step takes some time for each row of units, and some that does not
depend on them (noise, optimiser): a line through two sizes. Seconds are those of all cores together
on a CPU, and wall-clock seconds on other devices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Any

import jax
from scipy import stats

from dpfl_jax.config import RunConfig
from dpfl_jax.errors import BadInputError, positive, probability, require
from dpfl_jax.mechanisms import Mechanism
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.mesh import make_mesh
from dpfl_jax.planning.candidates import CANDIDATES, at_budget, draws_examples, plain
from dpfl_jax.randomness import RootKey
from dpfl_jax.training import slices

# Peak bfloat16 FLOP/s of one chip, dense: Google Cloud's TPU pages, NVIDIA's data sheets.
PEAK = {
    "v2": 45e12,
    "v3": 123e12,
    "v4": 275e12,
    "v5e": 197e12,
    "v5p": 459e12,
    "v6e": 918e12,
    "tpu7x": 2307e12,
    "a100": 312e12,
    "h100": 989e12,
    "h200": 989e12,
}
# Memory of one GPU, in bytes (NVIDIA's data sheets; the smaller A100).
GPU_BYTES = {"a100": 40 * 10**9, "h100": 80 * 10**9, "h200": 141 * 10**9}


@dataclasses.dataclass(frozen=True)
class Chip:
    """What pays for operations.

    Attributes:
      peak: FLOP/s of one chip.
      mfu: share of the peak that a run reaches, in (0, 1].
      price: of one chip for an hour, in any currency; None: no money.
      watts: of one chip; None: no energy.
      step_seconds: of a step, whatever its batch: noise, optimiser, dispatch.
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
        """By its name in ``PEAK``, or by its FLOP/s written as a number.

        Raises:
          BadInputError: neither.
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
        """Chip-hours of so many operations and steps; money and kWh where price and watts are."""
        hours = (flops / (self.peak * self.mfu) + steps * self.step_seconds) / 3600.0
        costs = {"flops": flops, "chip_hours": hours}
        if self.price is not None:
            costs["money"] = hours * self.price
        if self.watts is not None:
            costs["kwh"] = hours * self.watts / 1000.0
        return costs

    def largest_budget(self, hours: float, flops_per_gradient: float, steps: int) -> int:
        """The largest power-of-two compute budget whose run takes at most so many chip-hours.

        Raises:
          BadInputError: not even one gradient a step is paid for.
        """
        one = self.bill(flops_per_gradient * steps)["chip_hours"]
        if not hours >= one:
            raise BadInputError(
                f"{hours:g} chip-hours do not pay for one gradient a step ({one:.3g}): give more, "
                "or take fewer steps"
            )
        return 2 ** int(math.log2(hours / one) + 1e-9)


def expected_rows(size: float, row: int) -> float:
    """Mean number of rows of ``row`` units that a Poisson draw of ``size`` expected units needs."""
    if size > 1e4:
        return size / row + 0.5
    most = int(size + 12 * math.sqrt(size) + 12)
    drawn = range(1, most + 1)
    probs = stats.poisson.pmf(drawn, size)
    return float(sum(p * -(-n // row) for n, p in zip(drawn, probs, strict=True)))


_WARM = 2  # first steps, which compile


def time_steps(
    config: RunConfig, data: Any, model: Any, params: Any, mechanism: Mechanism, steps: int
) -> tuple[float, int]:
    """Takes training steps as ``dpfl train`` does, and discards the result.

    Returns:
      Seconds of ``steps`` steps after the program is compiled, and the rows of units they had.
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
    """This machine as a chip, measured at a model's step: its peak is the speed that was reached.

    Args:
      config: the run's.
      data: read.
      model: of the data's task.
      params: any parameters of it.
      flops_per_gradient: of one gradient evaluation.
      steps: timed, at each of two sizes.
      **rest: price and watts.
    """
    mechanism: Any = config.mechanism
    group, row = mechanism.participation.unit_examples or 1, config.execution.microbatch_size
    times: dict[int, list[tuple[float, int]]] = {row: [], 4 * row: []}
    for _ in range(3):  # alternated: a busy machine disturbs both
        for size, timed in times.items():
            one = at_budget(mechanism, mechanism.kind, float(size * group), mechanism.group_size)
            timed.append(time_steps(config, data, model, params, one, steps))
    (short, few), (long, many) = (sorted(timed)[1] for timed in times.values())
    per_row = max(long - short, 0.05 * long) / max(many - few, 1)
    per_step = max(short - few * per_row, 0.0) / steps
    speed = flops_per_gradient * row * group / per_row
    given = {name: value for name, value in rest.items() if value is not None}
    return Chip(speed, mfu=1.0, step_seconds=per_step, **given)


_COMPILED = 3  # rows of the table, from the top, that are compiled


@dataclasses.dataclass(frozen=True)
class LazyStart:
    """Data, model and starting parameters of a configuration, read once and only if needed."""

    config: Any
    console: Any

    @functools.cached_property
    def data(self) -> Any:
        """(data set, model)."""
        # Most plans read no data: what trains (and Orbax) takes half a second to import.
        from dpfl_jax.training.central_run import read_data

        return read_data(self.config, self.console)

    @functools.cached_property
    def params(self) -> Any:
        """Parameters before the first step."""
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
    """By plain candidate, the chip and a gradient evaluation's FLOPs.

    Args:
      start: of the configuration.
      chip_name: as of ``Chip.named``, or here: this machine, timed.
      console: for people.
      mfu: as of ``Chip``.
      price: as of ``Chip``.
      watts: as of ``Chip``.
      vocab: size of the vocabulary, where the tokeniser is not at hand.

    Raises:
      BadInputError: this machine is to be timed, but there are no data.
    """
    config, is_here = start.config, chip_name == "here"
    if is_here and config.population is not None:
        raise BadInputError("--chip here takes steps, but this configuration has statistics alone")
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
            if is_here:  # what is reached depends on the algorithm
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
        kind = plain(draws_examples(option["kind"]))  # whose gradients are all the others'
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
    """Adds ``memory`` to the options whose programs are those of the table's first rows.

    ``peak_bytes`` of a device, its ``limit_bytes`` (None: not known) and ``fits`` (likewise).
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
    """The options as they are listed: by predicted loss, else by noise."""
    by = "loss" if "prediction" in result else "noise"
    return sorted(result["options"], key=lambda option: option[by])


def _program(option: dict[str, Any]) -> tuple[str, int, int]:
    """What an option's program depends on: of drawn examples not the group size."""
    return option["kind"], option["gradients"], option["bands"]


def _with_cell(config: Any, kind: str, group: int, bands: int = 1) -> Any:
    budget = max(config.mechanism.compute_budget, group)
    mechanism = at_budget(config.mechanism, kind, budget, group, bands=bands)
    return config.model_copy(update={"mechanism": mechanism})
