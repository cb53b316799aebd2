"""Rounds in blocks: resumable, logged, and the same whatever stops them."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from dpfl_jax import accounting
from dpfl_jax.accounting import REPLACE
from dpfl_jax.config.isrl import IsrlConfig
from dpfl_jax.federation.isrl.accelerated import accelerated, step_weights
from dpfl_jax.federation.isrl.algorithm import Algorithm
from dpfl_jax.federation.isrl.arms import SiloNoise, at_one_delta
from dpfl_jax.federation.isrl.message import MessageSpec, SiloData, loss_name, make_oracle
from dpfl_jax.federation.isrl.minibatch_sgd import (
    ball,
    last_weights,
    minibatch_sgd,
    strongly_convex_weights,
    uniform_weights,
)
from dpfl_jax.federation.isrl.multi_stage import multi_stage
from dpfl_jax.federation.isrl.runs.parameters import Parameters
from dpfl_jax.federation.isrl.runs.tasks import Task
from dpfl_jax.federation.isrl.schedule import make_schedule
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.checkpoint import Checkpoints
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.interrupt import StopRequest
from dpfl_jax.run.mesh import data_parallel_mesh
from dpfl_jax.run.progress import StepProgress
from dpfl_jax.run.state import TrainState, hardware
from dpfl_jax.run.terms import Terms, begin, value_digest
from dpfl_jax.training.loop import MOVED_CAVEAT, PUBLIC_KEY_CAVEAT

_MILESTONES = 20


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run returns.

    Attributes:
      w: the algorithm's output after the rounds taken.
      rounds: taken in all.
      metrics: one row a block and an evaluation.
      interrupted: name of the signal that stopped it, or None.
      caveats: what the run itself adds to the guarantee's.
      seconds, messages: wall time of this process's blocks after the first, and messages sent.
    """

    w: jax.Array
    rounds: int
    metrics: list[dict[str, Any]]
    interrupted: str | None
    caveats: tuple[str, ...]
    seconds: float
    messages: int

    def evaluation(self, step: int) -> dict[str, Any] | None:
        """The evaluation logged after ``step`` rounds, if there is one."""
        return next((r["eval"] for r in self.metrics if r["step"] == step and "eval" in r), None)


def make_algorithm(config: IsrlConfig, parameters: Parameters) -> Algorithm:
    """The algorithm that a configuration names."""
    rounds, mu = parameters.rounds, config.model.regularization
    project = ball(config.model.radius)
    if config.isrl.algorithm == "minibatch_sgd":
        last = config.isrl.average_last
        if last is not None:
            weights = last_weights(rounds, last)
        elif mu:
            weights = strongly_convex_weights(rounds, mu, parameters.step_size)
        else:
            weights = uniform_weights(rounds)
        return minibatch_sgd(jnp.full(rounds, parameters.step_size, jnp.float32), weights, project)
    if config.isrl.algorithm == "multi_stage":
        return multi_stage(parameters.stages, mu, project)
    smoothness = parameters.problem.smoothness
    steps = step_weights(rounds, smoothness, parameters.variance, parameters.distance)
    # The paper's mu is the objective's; a single stage runs Algorithm 1 as for convex losses.
    return accelerated(*steps, 0.0, project)


def schedule_of(config: IsrlConfig, parameters: Parameters, sizes: np.ndarray, key: RootKey) -> Any:
    """The run's schedule; one-pass silos fall silent when their records are used."""
    one_pass = parameters.batches if config.isrl.sampling == "disjoint" else None
    return make_schedule(
        key,
        parameters.rounds,
        sizes,
        available=config.isrl.available,
        one_pass_batch=one_pass,
        most_rounds=config.isrl.most_rounds,
    )


def objective_oracle(
    config: IsrlConfig, task: Task, data: SiloData, parameters: Parameters, rank: jax.Array
) -> Callable[[jax.Array, Any], jax.Array]:
    """Mean of the messages, plus the regulariser's gradient, which depends on no record.

    To be made inside ``jit``, of arguments: captured records would be written into the program, and
    with it wherever compiled programs are kept.
    """
    section = config.isrl
    weights = section.silo_weights
    oracle = make_oracle(
        task.train_loss,
        MessageSpec(section.sampling),
        data,
        batch=jnp.asarray(parameters.batches, jnp.float32),
        clip_norm=jnp.asarray(parameters.clip_norms, jnp.float32),
        stddev=jnp.asarray(parameters.stddevs, jnp.float32),
        rank=rank,
        silo_weights=None if weights is None else jnp.asarray(weights, jnp.float32),
        batch_capacity=int(parameters.batches.max()),
    )
    mu = config.model.regularization
    return lambda w, row: oracle(w, row) + mu * w


def solve(
    config: IsrlConfig, task: Task, data: SiloData, parameters: Parameters, key: RootKey
) -> jax.Array:
    """All rounds at once, without a run directory; returns the algorithm's output."""
    algorithm = make_algorithm(config, parameters)
    terms = _terms(config, task, data, parameters, algorithm)
    key, _ = begin(terms, key, None, "", None, str)
    schedule = schedule_of(config, parameters, np.asarray(data.sizes), key)
    block = _block(config, task, parameters, algorithm)
    start = algorithm.start(jnp.zeros(task.shape))
    state = block(start, schedule.rows(), algorithm.values, data, schedule.rank)
    return algorithm.output(state, parameters.rounds)


def _block(
    config: IsrlConfig, task: Task, parameters: Parameters, algorithm: Algorithm
) -> Callable[..., Any]:
    """``(state, rows, values, data, rank) -> state`` after these rounds, compiled."""

    @jax.jit
    def block(state: Any, rows: Any, values: Any, data: SiloData, rank: jax.Array) -> Any:
        oracle = objective_oracle(config, task, data, parameters, rank)

        def one(carry: Any, x: Any) -> tuple[Any, None]:
            return algorithm.step(oracle, x[0], carry, x[1]), None

        return jax.lax.scan(one, state, (rows, values))[0]

    return block


def _terms(
    config: IsrlConfig, task: Task, data: SiloData, parameters: Parameters, algorithm: Algorithm
) -> Terms:
    """The terms of a run; it starts from zero."""
    section, noise = config.isrl, parameters.noise or []
    start = jax.ShapeDtypeStruct(task.shape, jnp.float32)
    trained = loss_name(task.train_loss, start, data)
    return Terms(
        stated={
            "algorithm": section.algorithm,
            "sampling": section.sampling,
            "rounds": parameters.rounds,
            "batches": parameters.batches.tolist(),
            "clip_norms": parameters.clip_norms.tolist(),
            "noise_multipliers": [float(z.noise_multiplier) for z in noise],
            "budgets": [dataclasses.asdict(z.budget) for z in noise],
        },
        secret={
            "data": value_digest(data),
            # What an algorithm takes is a function of the rest of its configuration.
            "computation": value_digest([trained, algorithm.values, config.model_dump()]),
        },
    )


class Spent:
    """An upper bound on every silo's epsilon, at the largest delta, after any number of rounds."""

    def __init__(self, noise: list[SiloNoise] | None, rounds: int) -> None:
        """Prices some numbers of rounds; ``rounds`` is R."""
        self._at = np.unique(np.ceil(np.linspace(0, rounds, _MILESTONES + 1)[1:]).astype(int))
        self._epsilons = np.full(len(self._at), math.inf)
        if not noise or noise[0].sampling == "with_replacement":
            return
        curves = []
        for one in {(z.event, z.budget): z for z in at_one_delta(noise)}.values():
            if one.sampling == "disjoint":  # a record is in one round, whichever
                curves.append([one.epsilon] * len(self._at))
                continue
            event = dataclasses.replace(one, rounds=1).event
            counts = [min(int(m), one.rounds) for m in self._at]
            coarse = accounting.epsilon_curve(event, counts, one.budget.delta, relation=REPLACE)
            curves.append([min(e, one.epsilon) for e in coarse])
        self._epsilons = np.max(curves, axis=0)

    def __call__(self, rounds: int) -> float | None:
        """After that many rounds; None if nothing is established."""
        if rounds == 0:
            return 0.0
        epsilon = float(self._epsilons[int(np.searchsorted(self._at, rounds))])
        return epsilon if math.isfinite(epsilon) else None


def run_rounds(
    config: IsrlConfig,
    task: Task,
    data: SiloData,
    parameters: Parameters,
    *,
    run_dir: RunDirectory,
    evaluate: Callable[[jax.Array], dict[str, Any]],
    train_loss: Callable[[jax.Array], float],
    console: Console | None = None,
) -> Result:
    """Runs (or goes on with) a prepared configuration.

    Args:
      config: the configuration.
      task: its loss.
      data: training records.
      parameters: its numbers, noise included.
      run_dir: where to log and checkpoint.
      evaluate: ``w -> dict`` with at least ``loss``; before, during and after.
      train_loss: for the part of the metrics that is not private.
      console: where the progress bar goes; None for none.
    """
    root, sizes = run_dir.root_key, np.asarray(data.sizes)
    algorithm = make_algorithm(config, parameters)
    checkpoints = Checkpoints(run_dir.path / "checkpoints", config.train.keep_checkpoints)
    resumed, here = checkpoints.latest_step(), hardware(data_parallel_mesh(jax.devices()[:1]))
    terms = _terms(config, task, data, parameters, algorithm)
    # Records' turns are drawn once for the whole run: it cannot go on as another computation.
    key, sealed = begin(terms, root, run_dir, None, resumed, str)
    schedule = schedule_of(config, parameters, sizes, key)
    block = _block(config, task, parameters, algorithm)
    rounds, train = parameters.rounds, config.train
    state = algorithm.start(jnp.zeros(task.shape))
    done = 0

    def packed(taken: int) -> TrainState:
        return TrainState(algorithm.output(state, taken), {"state": state}, jnp.int32(taken))

    private = parameters.noise is not None
    caveats = (PUBLIC_KEY_CAVEAT,) if root.public and private else ()
    if run_dir.computed_with(here)[1:]:
        caveats = (*caveats, MOVED_CAVEAT)
    if resumed is not None:
        restored = checkpoints.restore(packed(0), root, sealed)
        kept, done = jax.tree.leaves(restored.opt_state["state"]), int(restored.step)
        state = jax.tree.unflatten(jax.tree.structure(state), kept)
    run_dir.drop_metrics_after(done)
    metrics = run_dir.read_metrics()

    def log(row: dict[str, Any]) -> None:
        metrics.append(row)
        run_dir.append_metrics(row)

    def evaluated(taken: int) -> None:
        if not any(r["step"] == taken and "eval" in r for r in metrics):
            log({"step": taken, "eval": evaluate(algorithm.output(state, taken))})

    if done == 0:
        evaluated(0)
    spent, present = Spent(parameters.noise, rounds), np.asarray(schedule.present)
    seconds, messages, blocks = 0.0, 0, -(-done // train.rounds_per_block)
    quiet = Console(quiet=True)
    with StopRequest() as stop, StepProgress(console or quiet, "rounds", rounds, done) as bar:
        first = True
        while done < rounds:
            stop_at = min(done + train.rounds_per_block, rounds)
            began = time.perf_counter()
            values = jax.tree.map(lambda x, a=done, b=stop_at: x[a:b], algorithm.values)
            rows = schedule.rows(done, stop_at)
            state = jax.block_until_ready(block(state, rows, values, data, schedule.rank))
            if not first:  # which compiles
                seconds += time.perf_counter() - began
                messages += int(present[done:stop_at].sum())
            first, blocks = False, blocks + 1
            answered = int(present[done:stop_at].sum())
            done = stop_at
            loss, epsilon = train_loss(algorithm.output(state, done)), spent(done)
            log(
                {
                    "step": done,
                    "epsilon_spent": epsilon,
                    "messages": answered,
                    "outside_guarantee": {"train_loss": loss},
                }
            )
            shown = "" if epsilon is None or not private else f"  ε ≤ {epsilon:.2f}"
            bar.update(done, f"loss {loss:.4f}{shown}")
            last = done == rounds
            if train.eval_every and blocks % train.eval_every == 0 and not last:
                evaluated(done)
            if last or stop.requested or blocks % train.checkpoint_every == 0:
                delta = max(z.budget.delta for z in parameters.noise) if parameters.noise else None
                checkpoints.save(packed(done), root, {"epsilon": epsilon, "delta": delta}, sealed)
            if stop.requested:
                break
    checkpoints.close()
    if done == rounds:
        evaluated(done)
    return Result(
        algorithm.output(state, done),
        done,
        metrics,
        None if done == rounds else stop.requested,
        caveats,
        seconds,
        messages,
    )
