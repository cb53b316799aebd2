"""Times the train step on this machine, for the bill.

A step takes a time for each row of units and one of its own (noise, optimiser): a line through two
sizes. On a CPU seconds are those of all its cores together, elsewhere those of the clock.
"""

from __future__ import annotations

import time
from typing import Any

import jax

from dpfl_jax.config import RunConfig
from dpfl_jax.mechanisms import Mechanism
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.mesh import make_mesh
from dpfl_jax.planning.bill import Chip
from dpfl_jax.planning.candidates import at_budget
from dpfl_jax.randomness import RootKey
from dpfl_jax.training.fitting import algorithm_of
from dpfl_jax.training.optimizers import make_optimizer
from dpfl_jax.training.start import trained_by_name

_WARM = 2  # first steps, which compile


def time_steps(
    config: RunConfig, data: Any, model: Any, params: Any, mechanism: Mechanism, steps: int
) -> tuple[float, int]:
    """Takes steps as ``dpfl train`` does, and forgets what they lead to.

    Returns:
      Seconds of ``steps`` steps after the program is compiled, and the rows of units they had.
    """
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
    """A chip that is this machine at this model's step; its peak is what was reached.

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
    for _ in range(3):  # turn about: a busy machine disturbs both
        for size, found in times.items():
            one = at_budget(mechanism, mechanism.kind, float(size * group), mechanism.group_size)
            found.append(time_steps(config, data, model, params, one, steps))
    (short, few), (long, many) = (sorted(found)[1] for found in times.values())
    per_row = max(long - short, 0.05 * long) / max(many - few, 1)
    own = max(short - few * per_row, 0.0) / steps
    speed = flops_per_gradient * row * group / per_row
    given = {name: value for name, value in rest.items() if value is not None}
    return Chip(speed, mfu=1.0, step_seconds=own, **given)
