"""``fit``: central training. Sampling, noise and accounting are the mechanism's."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console

from dpfl_jax import accounting
from dpfl_jax.clipping import Trainable, join, self_check, split
from dpfl_jax.data.example_keys import key_argument, with_any_key
from dpfl_jax.data.pipeline import Pipeline, StepBatch
from dpfl_jax.data.store import Readable, check_offsets, fingerprint_of
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import Mechanism
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.algorithm import Algorithm, Steps, StepStats, Taken
from dpfl_jax.run.content import content_digest
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.driver import Hooks, RunResult, drive
from dpfl_jax.run.mesh import (
    FSDP_AXIS,
    data_parallel_mesh,
    parameter_shardings,
    place,
    splits_parameters,
)
from dpfl_jax.run.state import TrainState, init_state
from dpfl_jax.run.terms import Terms, training_digest
from dpfl_jax.training import convolutions
from dpfl_jax.training.batches import (
    draw_digest,
    example_loss,
    step_arguments,
    training_pipeline,
    units_of,
)
from dpfl_jax.training.evaluate import Evaluation, Evaluator
from dpfl_jax.training.step import TrainStep, make_train_step
from dpfl_jax.training.sum_check import check_sum
from dpfl_jax.training.sums import in_pieces

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitResult(RunResult):
    """What ``fit`` returns.

    Attributes:
      guarantee: what holds for everything the run has released.
      initial: evaluation before the first step, if there was validation data.
      final: evaluation after the last step; None if the run was interrupted.
    """

    guarantee: accounting.Guarantee
    initial: Evaluation | None
    final: Evaluation | None


@dataclasses.dataclass(frozen=True)
class Execution:
    """How steps are computed. Nothing here changes what is guaranteed.

    Attributes:
      microbatch_size: units per device processed at once.
      strategy: how bounded gradients are computed.
      group_buckets: process users with few examples in buffers with a smaller group axis, instead
        of padding them to the group size (ULS): less work, a longer compilation.
      examples_at_once: examples of a user that a device processes at once (ULS); the gradients of
        the rest are accumulated before the user's norm is taken. None: all.
      split_users: on a mesh with fsdp, share out each user's examples (ULS) to those devices,
        instead of one user a device.
    """

    microbatch_size: int = 16
    strategy: str = "auto"
    group_buckets: bool = False
    examples_at_once: int | None = None
    split_users: bool = False

    @property
    def cut(self) -> dict[str, Any]:
        """How users are cut up."""
        return {"examples_at_once": self.examples_at_once, "split_users": self.split_users}


class Central(Algorithm):
    """Steps of a mechanism over one data set, on any mesh."""

    def __init__(
        self,
        *,
        loss_fn: Callable[..., jax.Array],
        params: PyTree,
        data: Readable,
        mechanism: Mechanism,
        optimizer: optax.GradientTransformation,
        steps: int,
        delta: float,
        mesh: Mesh,
        trainable: Trainable = None,
        execution: Execution,
    ) -> None:
        """See ``fit``; the mechanism is calibrated."""
        self.loss_fn, self.data, self.mechanism = loss_fn, data, mechanism
        self.optimizer, self.steps, self.delta = optimizer, steps, delta
        self.mesh, self.trainable, self.execution = mesh, trainable, execution
        self.given = params
        self.population = mechanism.population(data.user_offsets)
        self.private = mechanism.private
        self.random = key_argument(loss_fn)
        self.example = jax.tree.map(lambda x: x[0], data.read(np.asarray(data.user_offsets)[:1]))
        self.traced = with_any_key(loss_fn, self.random)
        self.copied = (
            convolutions.kernels(self.traced, params, self.example)
            if splits_parameters(mesh)
            else ()
        )
        self.trained, frozen = split(params, trainable)
        self.frozen = place(frozen, parameter_shardings(frozen, mesh, self.copied), copy=False)
        more = (execution.strategy, execution.cut, execution.group_buckets)
        self.layout = [self.hardware, *more, execution.microbatch_size]
        users = ", set train.examples_at_once" if mechanism.kind == "uls" else ""
        self.smaller = (
            f"lower train.microbatch_size and eval.batch_size{users}, split parameters over "
            "devices (mesh.fsdp), or train adapters (model.lora)"
        )

    def terms(self) -> Terms:
        """Mechanism, population, delta, steps; data, frozen parameters and computation."""
        offsets = np.asarray(self.data.user_offsets, np.int64)
        digest = hashlib.sha256(offsets.tobytes())
        digest.update(fingerprint_of(self.data, int(offsets[-1])).encode())
        return Terms(
            stated={
                "mechanism": {"kind": self.mechanism.kind, **dataclasses.asdict(self.mechanism)},
                "population": dataclasses.asdict(self.population),
                "delta": self.delta,
                "steps": self.steps,
            },
            secret={
                "data": digest.hexdigest(),
                "frozen": content_digest(self.frozen),
                "computation": training_digest(
                    self.traced, self.trained, self.frozen, self.example, self.optimizer
                ),
            },
        )

    def init(self) -> TrainState:
        """First parameters and optimiser state, split over the mesh."""
        return init_state(self.trained, self.optimizer, self.mesh, self.copied)

    def params(self, state: TrainState) -> PyTree:
        """All parameters, frozen ones too."""
        return join(state.params, self.frozen)

    def row(self, stats: StepStats) -> dict[str, Any]:
        """A step's metrics."""
        return {"outside_guarantee": stats.row(self.private)}

    def epsilons(self, counts: Sequence[int]) -> Sequence[float]:
        """From one per-step loss distribution."""
        if not self.private:
            return [np.inf] * len(counts)
        event = self.mechanism.event(self.population, 1)
        curve = accounting.epsilon_curve(event, list(counts), self.delta)
        # The curve is coarse; what all steps cost is known more finely.
        total = self.mechanism.guarantee(self.population, self.steps, self.delta).epsilon
        return np.minimum(curve, total).tolist()

    def begin(self, key: RootKey, start: int) -> CentralSteps:
        """The steps after the first ``start``."""
        return CentralSteps(self, key, start)


class CentralSteps(Steps):
    """Batches from a pipeline, through the compiled step."""

    def __init__(self, run: Central, key: RootKey, start: int) -> None:
        self.run, self.key, self.start = run, key, start
        how = run.execution
        self.loss_fn = example_loss(run.loss_fn, run.data)
        self.options: dict[str, Any] = {"strategy": how.strategy, "trainable": run.trainable}
        self.compiled: TrainStep = make_train_step(
            run.mechanism,
            self.loss_fn,
            run.optimizer,
            run.mesh,
            whole=run.copied,
            **self.options,
            **how.cut,
        )
        self.sampler = run.mechanism.sampler(run.data.user_offsets, key)
        self.pipeline: Pipeline = training_pipeline(
            self.sampler,
            run.data,
            run.mesh,
            how.microbatch_size,
            how.group_buckets,
            key if run.random else None,
        )
        self.pieces = in_pieces(run.mechanism, run.mesh, **how.cut)

    def agreed(self) -> dict[str, Any]:
        """Processes that cut a batch apart differently would count units twice, or never."""
        run, how = self.run, self.run.execution
        return {
            "mechanism": repr(run.mechanism),
            "draw": draw_digest(self.sampler, self.key, self.start),
            "size of a microbatch": [
                how.microbatch_size,
                self.pipeline.row,
                repr(how.group_buckets),
            ],
            "strategy": [how.strategy, how.cut],
            "set of trained parameters": [
                [jax.tree_util.keystr(path), list(leaf.shape)]
                for path, leaf in jax.tree_util.tree_leaves_with_path(run.trained)
            ],
        }

    def check(self, state: TrainState) -> None:
        """Compares the compiled sum with one device, and the strategy's norms with plain ones."""
        run = self.run
        check_sum(
            self.compiled.sum,
            run.mechanism,
            self.loss_fn,
            state.params,
            run.frozen,
            self.pipeline,
            self.sampler.group_size,
            trainable=run.trainable,
        )
        if run.execution.strategy not in ("vmap", "scan") and not self.pieces:
            # Norms that no gradient was formed for; each shape of units has a plan of its own.
            bounded = run.mechanism.bounded_grad(self.loss_fn, **self.options)
            for some in self.pipeline.first_units(2, self.sampler.group_size):
                rows = jax.tree.map(lambda leaf: leaf[0], units_of(run.mechanism, some))
                self_check(bounded, run.given, rows)

    def clipping(self) -> dict[str, Any] | None:
        """How norms are computed, for the largest units."""
        run = self.run
        units = run.execution.microbatch_size
        units *= run.mesh.shape[FSDP_AXIS] if splits_parameters(run.mesh) else 1
        bounded = run.mechanism.bounded_grad(self.loss_fn, **self.options, **self.pieces)
        largest = self.pipeline.first_units(1, self.sampler.group_size)[-1]
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((units, *x.shape[2:]), x.dtype),
            units_of(run.mechanism, largest),
        )
        return bounded.explain(run.given, shapes).to_json(units)

    def inputs(self) -> Iterator[tuple[int, StepBatch]]:
        """Batches, read ahead."""
        for batch in self.pipeline.iterate(self.start, self.run.steps):
            yield batch.step + 1, batch

    def step(self, state: TrainState, inputs: StepBatch) -> tuple[TrainState, Taken]:
        """Sum, noise, update."""
        run = self.run
        arguments = step_arguments(run.mechanism, inputs)
        noise_key = self.key.jax("noise", inputs.step)
        state, stats = self.compiled(state, *arguments, noise_key, run.frozen)
        read = (inputs.columns, self.pipeline.row)
        return state, Taken(stats, inputs.num_examples, inputs.num_tokens, read)


def fit(
    *,
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    data: Readable,
    mechanism: Mechanism,
    optimizer: optax.GradientTransformation,
    steps: int,
    trainable: Trainable = None,
    epsilon: float | None = None,
    delta: float | None = None,
    key: RootKey | None = None,
    validation: Readable | None = None,
    microbatch_size: int = 16,
    mesh: Mesh | None = None,
    strategy: str = "auto",
    group_buckets: bool = False,
    examples_at_once: int | None = None,
    split_users: bool = False,
    run_dir: RunDirectory | None = None,
    checkpoint_every: int = 50,
    keep_checkpoints: int = 2,
    eval_every: int = 0,
    eval_batch_size: int = 64,
    log_every: int = 1,
    caveats: tuple[str, ...] = (),
    charge: Callable[[str], Any] | None = None,
    console: Console | None = None,
    hooks: Hooks | None = None,
) -> FitResult:
    """Trains ``params`` with a mechanism.

    Args:
      loss_fn: ``(params, example) -> float32 scalar`` for one example. If it also takes ``rng`` (or
        ``key``), with default None, each example of each training step gets a key of its own there;
        evaluation is without.
      params: pytree of arrays, split over the mesh already if they should never be whole; not
        modified.
      data: a store: ``user_offsets`` and ``read(positions)``.
      mechanism: ELS, ULS, NonPrivate, ...; calibrated here if it has no noise multiplier.
      optimizer: any Optax transformation.
      steps: number of steps T.
      trainable: which parameters are trained: a function of their name (``blocks/mlp/up/kernel``),
        or a tree of bools that is a prefix of the parameters; default all. Only these have
        gradients, norms, noise, optimiser state and checkpoints.
      epsilon: target, if the mechanism has no noise multiplier.
      delta: default (number of examples) ** -1.1.
      key: root key of sampling and noise; default a fresh secret one (or the run directory's). Of
        a secret one, runs that differ in anything (data, mechanism, steps, delta, loss, optimiser,
        first parameters, strategy, devices) draw independently; the same run draws the same again.
      validation: held-out users, evaluated before, during and after.
      microbatch_size: units per device processed at once.
      mesh: default: data parallel over all devices.
      strategy: how bounded gradients are computed.
      group_buckets: process users with few examples in buffers with a smaller group axis, instead
        of padding them to the group size (ULS): less work, a longer compilation.
      examples_at_once: examples of a user that a device processes at once (ULS); the gradients of
        the rest are accumulated before the user's norm is taken. None: all.
      split_users: on a mesh with fsdp, share out each user's examples (ULS) to those devices,
        instead of one user a device.
      run_dir: where to log and checkpoint; an unfinished one is resumed.
      checkpoint_every: steps between checkpoints.
      keep_checkpoints: checkpoints kept.
      eval_every: steps between evaluations; 0 for before and after only.
      eval_batch_size: examples per device and evaluation batch.
      log_every: steps between rows of metrics.
      caveats: further sentences for the guarantee.
      charge: see ``run.driver.drive``.
      console: where the progress bar goes; None for none.
      hooks: functions that are called on the way.

    Returns:
      A FitResult.

    Raises:
      BadInputError: unusable arguments (see the mechanism, and ``accounting``).
      clipping.SelfCheckError: the sum on this mesh, or the strategy's norms, disagree with plain
        per-unit gradients, or units mix; no step was taken.
    """
    if steps < 1:
        raise BadInputError(f"the number of steps is {steps}, but at least 1 is needed")
    check_offsets(data.user_offsets)
    mesh = data_parallel_mesh() if mesh is None else mesh
    population = mechanism.population(data.user_offsets)
    if population.num_units == 0:
        raise BadInputError("the training set has no usable example: check the data section")
    delta = population.default_delta() if delta is None else delta
    mechanism.sampling_probability(population)
    if mechanism.private and mechanism.noise_multiplier is None:
        if epsilon is None:
            raise BadInputError("neither epsilon nor the mechanism's noise_multiplier is set")
        mechanism = mechanism.calibrate(population, steps, epsilon, delta)
    key_argument(loss_fn, needed_without=None if validation is None else "evaluation")
    held_out = Evaluator(loss_fn, mesh, eval_batch_size)

    def evaluate(params: PyTree) -> dict[str, Any]:
        assert validation is not None
        return held_out(params, validation).to_json()

    algorithm = Central(
        loss_fn=loss_fn,
        params=params,
        data=data,
        mechanism=mechanism,
        optimizer=optimizer,
        steps=steps,
        delta=delta,
        mesh=mesh,
        trainable=trainable,
        execution=Execution(
            microbatch_size, strategy, group_buckets, examples_at_once, split_users
        ),
    )
    result = drive(
        algorithm,
        key=key,
        run_dir=run_dir,
        evaluate=None if validation is None else evaluate,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        log_every=log_every,
        charge=charge,
        console=console,
        hooks=hooks,
    )
    initial, final = result.evaluation(0), result.evaluation(steps)
    return FitResult(
        **{field.name: getattr(result, field.name) for field in dataclasses.fields(result)},
        guarantee=mechanism.guarantee(
            population, max(result.steps, 1), delta, (*caveats, *result.caveats)
        ),
        initial=None if initial is None else Evaluation(**initial),
        final=None if final is None else Evaluation(**final),
    )
