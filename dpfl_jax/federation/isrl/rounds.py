"""ISRL rounds as an algorithm for ``run.driver``, in blocks of rounds, and their evaluation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpfl_jax import accounting
from dpfl_jax.accounting import REPLACE
from dpfl_jax.config import RunConfig
from dpfl_jax.federation.isrl.algorithms import (
    Method,
    accelerated,
    ball,
    last_weights,
    minibatch_sgd,
    multi_stage,
    step_weights,
    strongly_convex_weights,
    uniform_weights,
)
from dpfl_jax.federation.isrl.losses import LinearLoss
from dpfl_jax.federation.isrl.message import (
    MessageSpec,
    SiloData,
    loss_name,
    make_messages,
    mean_message,
)
from dpfl_jax.federation.isrl.parameters import Parameters
from dpfl_jax.federation.isrl.privacy import at_one_delta
from dpfl_jax.federation.isrl.schedule import make_schedule
from dpfl_jax.mesh import DATA_AXIS, place, replicated
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.algorithm import Algorithm, StepOutput, Steps
from dpfl_jax.run.state import TrainState
from dpfl_jax.run.terms import Terms, value_digest
from dpfl_jax.training.evaluate import auc_of


def make_method(config: RunConfig, parameters: Parameters) -> Method:
    """Returns the algorithm of a configuration."""
    rounds, mu = parameters.rounds, config.model.regularization
    project = ball(config.model.radius)
    if config.mechanism.kind == "minibatch_sgd":
        last = config.mechanism.average_last
        if last is not None:
            weights = last_weights(rounds, last)
        elif mu:
            weights = strongly_convex_weights(rounds, mu, parameters.step_size)
        else:
            weights = uniform_weights(rounds)
        return minibatch_sgd(jnp.full(rounds, parameters.step_size, jnp.float32), weights, project)
    if config.mechanism.kind == "multi_stage":
        return multi_stage(parameters.stages, mu, project)
    smoothness = parameters.problem.smoothness
    steps = step_weights(rounds, smoothness, parameters.variance, parameters.distance)
    # mu = 0, even with a regulariser: a single stage runs Algorithm 1 for convex losses.
    return accelerated(*steps, 0.0, project)


def schedule_of(config: RunConfig, parameters: Parameters, sizes: np.ndarray, key: RootKey) -> Any:
    """Returns the run's schedule; in one pass, silos stay silent once their records are used."""
    one_pass = parameters.batches if config.mechanism.sampling == "disjoint" else None
    return make_schedule(
        key,
        parameters.rounds,
        sizes,
        available=config.federation.answering,
        one_pass_batch=one_pass,
        most_rounds=config.mechanism.most_rounds,
    )


def objective_mean(config: RunConfig, w: jax.Array, sent: jax.Array, row: Any) -> jax.Array:
    """Returns the mean of the messages plus the regulariser's gradient, which needs no records."""
    weights = config.federation.weights
    shares = None if weights is None else jnp.asarray(weights, jnp.float32)
    return mean_message(sent, row["present"], shares) + config.model.regularization * w


class CompiledRound:
    """A round in three compiled programs, which are the same for local and for remote silos.

    Attributes:
      where: ``(state, values) -> w``, the point at which the server asks for gradients.
      messages: ``(w, row, data, rank) -> [N, ...]``, the silos' messages; only this reads records.
      server: ``(state, values, w, sent, row) -> state``, the server's step.
    """

    def __init__(
        self, config: RunConfig, loss: LinearLoss, parameters: Parameters, method: Method
    ) -> None:
        def where(state: Any, values: Any) -> jax.Array:
            asked: list[jax.Array] = []

            def oracle(w: jax.Array, row: Any) -> jax.Array:
                asked.append(w)
                return jnp.zeros_like(w)

            method.step(oracle, None, state, values)
            return asked[0]

        def messages(w: jax.Array, row: Any, data: SiloData, rank: jax.Array) -> jax.Array:
            # Data are arguments, because records that are captured would be written into the
            # program, and so into every cache of compiled programs.
            return make_messages(
                loss.train_loss,
                MessageSpec(config.mechanism.sampling, config.mechanism.arithmetic),
                data,
                batch=jnp.asarray(parameters.batches, jnp.float32),
                clip_norm=jnp.asarray(parameters.clip_norms, jnp.float32),
                stddev=jnp.asarray(parameters.stddevs, jnp.float32),
                rank=rank,
            )(w, row)

        def server(state: Any, values: Any, w: jax.Array, sent: jax.Array, row: Any) -> Any:
            mean = objective_mean(config, w, sent, row)
            return method.step(lambda *_: mean, None, state, values)

        self.where, self.messages = jax.jit(where), jax.jit(messages)
        self.server = jax.jit(server)


class IsrlAlgorithm(Algorithm):
    """The rounds of a prepared configuration; each step of the driver is a block of rounds."""

    word = "rounds"
    # The schedule is drawn once for the whole run, so that a run cannot resume with another layout.
    can_reshard_on_resume = False
    memory_hint = "spread the silos over more devices"

    def __init__(
        self,
        config: RunConfig,
        loss: LinearLoss,
        data: SiloData,
        parameters: Parameters,
        mesh: Mesh,
    ) -> None:
        self.config, self.loss, self.data, self.parameters = config, loss, data, parameters
        self.mesh, self.method = mesh, make_method(config, parameters)
        self.layout_fingerprint = [self.hardware, config.execution.model_dump()]
        self.steps, self.private = parameters.rounds, parameters.noise is not None
        self.delta = max((z.budget.delta for z in parameters.noise or []), default=1.0)

    def terms(self) -> Terms:
        """Returns the terms: algorithm, sampling, rounds and noise, and secret digests."""
        config, parameters, mechanism = self.config, self.parameters, self.config.mechanism
        start = jax.ShapeDtypeStruct(self.loss.shape, jnp.float32)
        # Other values of the algorithm are functions of these sections.
        computation = [
            loss_name(self.loss.train_loss, start, self.data),
            self.method.values,
            dataclasses.asdict(mechanism),
            config.federation.model_dump(),
            config.model.model_dump(),
        ]
        noise = parameters.noise or []
        return Terms(
            stated={
                "algorithm": mechanism.kind,
                "sampling": mechanism.sampling,
                "rounds": parameters.rounds,
                "batches": parameters.batches.tolist(),
                "clip_norms": parameters.clip_norms.tolist(),
                "noise_multipliers": [float(z.noise_multiplier) for z in noise],
                "budgets": [dataclasses.asdict(z.budget) for z in noise],
            },
            secret={"data": value_digest(self.data), "computation": value_digest(computation)},
        )

    def init(self) -> TrainState:
        start = self.method.start(jnp.zeros(self.loss.shape))
        return self.packed(self.everywhere(start), 0)

    def everywhere(self, tree: Any) -> Any:
        """Returns a pytree replicated over the devices of the mesh."""
        return place(tree, replicated(self.mesh))

    def packed(self, state: Any, done: int) -> TrainState:
        """Returns the state of a run after ``done`` rounds."""
        step = self.everywhere(np.int32(done))
        return TrainState(self.method.output(state, done), {"state": state}, step)

    def params(self, state: TrainState) -> jax.Array:
        return state.params

    def row(self, stats: tuple[int, float]) -> dict[str, Any]:
        messages, loss = stats
        return {"messages": messages, "outside_guarantee": {"train_loss": loss}}

    def epsilons(self, counts: Sequence[int]) -> Sequence[float]:
        noise = self.parameters.noise
        if not noise:
            return [math.inf] * len(counts)
        curves = []
        for one in {(z.event, z.budget): z for z in at_one_delta(noise)}.values():
            if one.sampling == "disjoint":  # a record is in one round, however many there are
                curves.append([one.epsilon] * len(counts))
                continue
            event = dataclasses.replace(one, rounds=1).event
            taken = [min(count, one.rounds) for count in counts]
            coarse = accounting.epsilon_curve(event, taken, one.budget.delta, relation=REPLACE)
            curves.append([min(e, one.epsilon) for e in coarse])
        return np.max(curves, axis=0).tolist()

    def begin(self, key: RootKey, start: int) -> IsrlSteps:
        return IsrlSteps(self, key, start)


_take = jax.jit(lambda tree, r: jax.tree.map(lambda x: x[r], tree))


def blocks(start: int, rounds: int, size: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yields blocks of up to ``size`` rounds as (end, (begin, end))."""
    for begin in range(start, rounds, size):
        end = min(begin + size, rounds)
        yield end, (begin, end)


class IsrlSteps(Steps):
    """Runs the schedule in blocks of rounds."""

    def __init__(self, run: IsrlAlgorithm, key: RootKey, start: int) -> None:
        self.run, self.start = run, start
        sizes = np.asarray(run.data.sizes)
        self.schedule = run.everywhere(schedule_of(run.config, run.parameters, sizes, key))
        self.round = CompiledRound(run.config, run.loss, run.parameters, run.method)
        self.present = np.asarray(self.schedule.present)
        self.batch = float(run.parameters.batches.mean())
        parts = run.mesh.size
        split = NamedSharding(run.mesh, PartitionSpec(DATA_AXIS))
        by_silo = split if run.data.num_silos % parts == 0 else replicated(run.mesh)
        self.data = place(run.data, by_silo)
        evaluate = make_evaluation(run.loss, self.data)
        self.train_loss = lambda w: float(evaluate(w)["loss_by_silo"])

    def inputs(self) -> Iterator[tuple[int, tuple[int, int]]]:
        size, rounds = self.run.config.execution.rounds_per_block, self.run.steps
        yield from blocks(self.start, rounds, size)

    def step(self, state: TrainState, inputs: tuple[int, int]) -> tuple[TrainState, StepOutput]:
        run, (begin, end) = self.run, inputs
        now, rows = state.opt_state["state"], self.schedule.rows()
        for r in range(begin, end):
            values, row = _take((run.method.values, rows), r)
            w = self.round.where(now, values)
            sent = self.round.messages(w, row, self.data, self.schedule.rank)
            # Each device has all messages, and sums them in their order.
            sent = place(sent, replicated(run.mesh), copy=False)
            now = self.round.server(now, values, w, sent, row)
        state = run.packed(now, end)
        answered = int(self.present[begin:end].sum())
        stats = (answered, self.train_loss(state.params))
        return state, StepOutput(stats, round(answered * self.batch))


def make_evaluation(loss: LinearLoss, data: SiloData) -> Callable[[jax.Array], dict[str, Any]]:
    """Returns ``w -> dict`` with mean loss over records and silos, worst silo, and accuracy."""

    def per_silo(value: Any, w: jax.Array, data: SiloData) -> jax.Array:
        real = jnp.arange(data.capacity)[None, :] < data.sizes[:, None]
        each = jax.vmap(jax.vmap(value, (None, 0)), (None, 0))(w, data.examples)
        return jnp.where(real, each, 0.0).sum(1)

    # Data are an argument, because what is captured would be written into the compiled program.
    def measured(w: jax.Array, data: SiloData) -> tuple[jax.Array, jax.Array, jax.Array]:
        hits = jnp.zeros(data.num_silos) if loss.hit is None else per_silo(loss.hit, w, data)
        return per_silo(loss.eval_loss, w, data), hits, data.sizes

    # Replicated on every device, so that each process has all losses.
    held: Any = data.sizes.sharding
    whole = None if held.is_fully_addressable else replicated(held.mesh)
    compiled = jax.jit(measured, out_shardings=whole)

    def evaluate(w: jax.Array) -> dict[str, Any]:
        losses, hits, sizes = (np.asarray(v, np.float64) for v in compiled(w, data))
        accuracy = None if loss.hit is None else float(hits.sum() / sizes.sum())
        return {
            "loss": float(losses.sum() / sizes.sum()),
            "loss_by_silo": float((losses / sizes).mean()),
            "worst_silo": float((losses / sizes).max()),
            "accuracy": accuracy,
            "examples": int(sizes.sum()),
        }

    return evaluate


def make_scores(loss: LinearLoss, data: SiloData) -> Callable[[jax.Array], dict[str, Any]]:
    """Returns ``make_evaluation`` with base rates and AUC, as ``training.evaluate`` has them."""
    evaluate = make_evaluation(loss, data)
    if loss.hit is None:
        return evaluate
    real = np.arange(data.capacity) < np.asarray(data.sizes)[:, None]
    x, labels = (np.asarray(data.examples[name])[real] for name in "xy")
    shares = np.unique(labels, return_counts=True)[1] / len(labels)
    positive = (labels > 0.5).astype(int)  # labels are 0 and 1, or -1 and 1

    def scored(w: jax.Array) -> dict[str, Any]:
        scores = {**evaluate(w), "majority_accuracy": float(shares.max())}
        if loss.shape[:-1] not in ((), (2,)):
            return scores
        rows = np.asarray(w)
        margins = x @ (rows if rows.ndim == 1 else rows[1] - rows[0])
        return scores | {"base_rate": float(positive.mean()), "auc": auc_of(margins, positive)}

    return scored
