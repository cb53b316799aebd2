"""Central training: the compiled step, and the steps of a plan over one data set as an algorithm.

    step(state, units, mask, num_microbatches, noise_key, frozen) -> state, stats

``units`` is a buffer of fixed shape [capacity, parts * microbatch, ...], of which the first
``num_microbatches`` rows hold this step's units: a Poisson draw of any size runs without
recompiling, and rows that hold only padding cost nothing. Each device sums its own share of every
row; the sums meet in one reduction after the loop (``sums``). Units of several shapes (users with
few and with many examples) come as tuples of such buffers, one after the other. Parameters that are
not trained are the argument ``frozen``: split over devices like the others, but never
differentiated, noised or updated.

The sum and the update (noise, optimiser) are two programs: what is checked before the first step
(``sum_check``) is the very program that sums in every step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from dpfl_jax import accounting
from dpfl_jax.clipping import Trainable, join, split
from dpfl_jax.clipping.jaxprs import convolution_kernels, count_flops
from dpfl_jax.clipping.result import StepStats
from dpfl_jax.data.pipeline import StepBatch
from dpfl_jax.mechanisms import Calibrated, Mechanism, NoNoise, non_private
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.mechanisms.plan.batches import (
    check_packed_loss,
    draw_digest,
    step_arguments,
    units_of,
)
from dpfl_jax.mechanisms.plan.sum_check import check_sum
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches, microbatched
from dpfl_jax.mesh import FSDP_AXIS, parameter_shardings, place, splits_parameters
from dpfl_jax.noise import NoiseState, compiler_options
from dpfl_jax.randomness import RootKey, key_argument, with_any_key
from dpfl_jax.run.algorithm import Algorithm, StepOutput, Steps
from dpfl_jax.run.state import TrainState, content_digest, init_state, shardings_of
from dpfl_jax.run.terms import Terms, secret_of_code, training_digest
from dpfl_jax.training.modules import check_one_example
from dpfl_jax.training.optimizers import check_optimizer

PyTree = Any


class TrainStep:
    """``(state, units, mask, num_microbatches, noise_key, frozen=None) -> (state, StepStats)``.

    Attributes:
      sum: compiled ``(params, units, mask, num_microbatches, frozen) -> (sum, StepStats)``.
      update: compiled ``(state, sum, noise_key) -> state``; the state given to it is donated.
      whole: both in one function that is not compiled, to count what a step costs.
    """

    def __init__(
        self, summed: Callable[..., Any], update: Callable[..., TrainState], mesh: Mesh
    ) -> None:
        self.sum = jax.jit(summed)
        self.update = jax.jit(update, donate_argnums=0, compiler_options=compiler_options(mesh))

        def whole(
            state: TrainState, units: PyTree, mask: Any, rows: Any, noise_key: Any, frozen: PyTree
        ) -> tuple[TrainState, StepStats]:
            total, stats = summed(state.params, units, mask, rows, frozen, *_adapting(state))
            return update(state, total, noise_key), stats

        self.whole = whole

    def __call__(
        self,
        state: TrainState,
        units: PyTree,
        mask: Any,
        num_microbatches: Any,
        noise_key: Any,
        frozen: PyTree = None,
    ) -> tuple[TrainState, StepStats]:
        adapting = _adapting(state)
        total, stats = self.sum(state.params, units, mask, num_microbatches, frozen, *adapting)
        if adapting:  # a copy: the state is donated
            stats = dataclasses.replace(stats, clip_norm=jnp.copy(adapting[0]))
        return self.update(state, total, noise_key), stats


def _adapting(state: TrainState) -> tuple[jax.Array, ...]:
    """The clip norm of this step if it adapts, else () (as in the check before the first step)."""
    return (state.noise.clip_norm,) if hasattr(state.noise, "clip_norm") else ()


def make_train_step(
    calibrated: Calibrated,
    loss_fn: Callable[..., jax.Array],
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    whole: Collection[str] | None = None,
    **options: Any,
) -> TrainStep:
    """Returns the compiled step; the state given to it is donated.

    Args:
      calibrated: the mechanism with its noise.
      loss_fn: ``(params, example) -> scalar`` for one example.
      optimizer: any Optax transformation; it sees only the noised, averaged gradient, and gets
        the stddev of the noise on it, ``noise_stddev``.
      mesh: from ``mesh.make_mesh``.
      whole: as in ``clipped_sum_over_microbatches``, and as given to ``init_state``.
      **options: as in ``clipped_sum_over_microbatches`` (e.g. ``strategy``, ``trainable``).

    Returns:
      ``step(state, units, mask, num_microbatches, noise_key, frozen=None) -> (state, StepStats)``
      with state.params and frozen the parts of ``clipping.split(params, trainable)``, units
      [capacity, parts * microbatch, ...] and mask bool [capacity, parts * microbatch], both split
      over the mesh's unit axes, num_microbatches int32 scalar <= capacity, and noise_key that of
      ``Plan.noise_key``, used for this step alone. The first three may be tuples of equal length,
      for units of several shapes.

    Examples:
      >>> import jax
      >>> import optax
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.training import data_parallel_mesh, make_train_step
      >>> people = dpfl.Population(num_users=1000, num_examples=9000, num_units=1000)
      >>> mechanism = dpfl.uls(group_size=4, cohort_size=64)
      >>> calibrated = mechanism.calibrate(people, steps=100, epsilon=4.0, delta=1e-5)
      >>> mesh = data_parallel_mesh(jax.devices()[:1])
      >>> step = make_train_step(calibrated, lambda w, e: w @ e["x"], optax.sgd(0.1), mesh)
      >>> callable(step)
      True
    """
    update_with_noise = optax.with_extra_args_support(optimizer).update

    def update(state: TrainState, total: PyTree, noise_key: jax.Array) -> TrainState:
        noise, before = calibrated.noise_transform(), NoiseState(state.step, state.noise)
        # proof: noise-2
        gradient, after = noise.update(total, before, state.params, noise_key=noise_key)
        chex.assert_trees_all_equal_shapes_and_dtypes(gradient, state.params)
        # Each device draws the noise of its part of the sum: the numbers are the same for every
        # layout, and no device holds them all.
        gradient = jax.lax.with_sharding_constraint(
            gradient, parameter_shardings(gradient, mesh, whole or ())
        )
        stddev = jnp.asarray(calibrated.noise_on_gradients, jnp.float32)[state.step]
        for clip_norm in _adapting(state):
            stddev *= clip_norm
        updates, opt_state = update_with_noise(
            gradient, state.opt_state, state.params, noise_stddev=stddev
        )
        params = optax.apply_updates(state.params, updates)
        new = TrainState(params, opt_state, after.step, after.memory)
        places = shardings_of(params, optimizer, mesh, whole or (), after.memory)
        return jax.lax.with_sharding_constraint(new, places)

    summed = clipped_sum_over_microbatches(
        calibrated.mechanism, loss_fn, mesh, whole=whole, **options
    )
    return TrainStep(summed, update, mesh)


# ---- the algorithm -------------------------------------------------------------------------------


class Central(Algorithm):
    """Steps of a mechanism over one data set, on any mesh."""

    def __init__(
        self,
        loss_fn: Callable[..., jax.Array],
        params: PyTree,
        plan: Plan,
        optimizer: optax.GradientTransformation,
        trainable: Trainable = None,
    ) -> None:
        """See ``fit``."""
        self.loss_fn, self.plan = loss_fn, plan
        self.data, self.mechanism = plan.data, plan.mechanism
        self.optimizer, self.steps, self.delta = optimizer, plan.steps, plan.delta
        self.mesh, self.trainable, self.given = plan.mesh, trainable, params
        self.private = plan.mechanism.private
        self.can_reshard_on_resume = not plan.calibrated.is_stateful
        self.random, self.shipped = plan.key_argument_of(loss_fn), plan.shipped_loss(loss_fn)
        if plan.execution.packing:
            check_packed_loss(loss_fn, plan.data, params)
        self.traced = with_any_key(loss_fn, key_argument(loss_fn))
        check_one_example(self.traced, params, plan.example)
        self.copied = (
            convolution_kernels(self.traced, params, plan.example)
            if splits_parameters(self.mesh)
            else ()
        )
        self.trained, frozen = split(params, trainable)
        check_optimizer(optimizer, self.trained)
        places = parameter_shardings(frozen, self.mesh, self.copied)
        self.frozen = place(frozen, places, copy=False)
        how = plan.execution
        more: list[Any] = [how.packing] if how.packing else []
        more += [how.sum_over_fsdp] if how.sum_over_fsdp != "auto" else []
        layout = [how.strategy, how.cut, how.group_buckets, *more, how.microbatch_size]
        self.layout_fingerprint = [self.hardware, *layout]
        users = (
            ", set execution.examples_at_once" if self.mechanism.participation.unit_examples else ""
        )
        self.memory_hint = (
            f"lower execution.microbatch_size and eval.batch_size{users}, split parameters over "
            "devices (execution.mesh.fsdp), or train adapters (model.lora)"
        )

    def terms(self) -> Terms:
        """The stated mechanism, population, delta and steps; digests of all else."""
        return Terms(
            stated=self.plan.stated,
            secret={
                **secret_of_code(self.plan.code_outside),
                "data": self.plan.data_digest,
                "frozen": lambda root: content_digest(self.frozen, root),
                "computation": training_digest(
                    self.traced, self.trained, self.frozen, self.plan.example, self.optimizer
                ),
            },
        )

    def init(self) -> TrainState:
        noise = self.plan.calibrated.noise_transform().init(self.trained)
        return init_state(self.trained, self.optimizer, self.mesh, self.copied, noise.memory)

    def params(self, state: TrainState) -> PyTree:
        return join(state.params, self.frozen)

    @functools.cached_property
    def _flops_per_example(self) -> float:
        """A forward pass, as much for what flows back, and as much for what is trained."""
        forward = count_flops(self.traced, self.given, self.plan.example)
        sizes = [sum(x.size for x in jax.tree.leaves(tree)) for tree in (self.trained, self.given)]
        return forward * (2 + sizes[0] / sizes[1])

    def flops(self, examples: float, tokens: int) -> float:
        if tokens:  # padding is not needed
            examples = tokens / self.plan.example["mask"].size
        return examples * self._flops_per_example

    def row(self, stats: StepStats) -> dict[str, Any]:
        return {"outside_guarantee": stats.row(self.private)}

    def epsilons(self, counts: Sequence[int]) -> Sequence[float]:
        return self.plan.epsilons(counts)

    def guarantee(self, steps: int, caveats: tuple[str, ...] = ()) -> accounting.Guarantee:
        """The plan's guarantee after ``steps`` steps."""
        return self.plan.with_public_inputs(self.plan.calibrated.guarantee(steps, caveats))

    def begin(self, key: RootKey, start: int) -> CentralSteps:
        return CentralSteps(self, key, start)

    def without_privacy(self) -> Central:
        """The baseline from the same start, without noise; user updates are still clipped."""
        plan = self.plan
        execution = plan.execution.model_copy(
            update={"examples_at_once": None, "split_users": False}
        )
        offsets = plan.data.user_offsets
        budget = min(plan.mechanism.compute_budget, float(offsets[-1] - offsets[0]))
        mechanism: Mechanism = non_private(batch_size=budget)
        if plan.mechanism.clips_user_updates:
            # The optimiser expects user updates, not gradients; they stay clipped.
            mechanism = dataclasses.replace(plan.mechanism, noise=NoNoise(), budget=None)
        population = mechanism.participation.population_of(plan.data)
        calibrated = mechanism.calibrate(population, plan.steps, delta=plan.delta)
        plain = Plan(calibrated, plan.data, execution, plan.mesh)
        return Central(self.loss_fn, self.given, plain, self.optimizer, self.trainable)


class CentralSteps(Steps):
    """Batches from a pipeline, through the compiled step."""

    def __init__(self, run: Central, key: RootKey, start: int) -> None:
        self.run, self.key, self.start = run, key, start
        how = run.plan.execution
        self.loss_fn = run.shipped
        self.options: dict[str, Any] = {"strategy": how.strategy, "trainable": run.trainable}
        self.compiled: TrainStep = make_train_step(
            run.plan.calibrated,
            self.loss_fn,
            run.optimizer,
            run.mesh,
            whole=run.copied,
            sum_over_fsdp=how.sum_over_fsdp,
            **self.options,
            **how.cut,
        )
        self.sampler = run.plan.sampler(key)
        self.pipeline = run.plan.pipeline(self.sampler, key if run.random else None)
        self.pieces = microbatched(run.mechanism, run.mesh, **how.cut)

    def agreed(self) -> dict[str, Any]:
        """Processes that split a batch differently would count units twice, or never."""
        run, how = self.run, self.run.plan.execution
        return {
            "mechanism": repr(run.plan.calibrated),
            "draw": draw_digest(self.sampler, self.key, self.start),
            "size of a microbatch": [
                how.microbatch_size,
                self.pipeline.row,
                repr(how.group_buckets),
                repr(self.pipeline.shapes),
            ],
            "strategy": [how.strategy, how.cut, how.sum_over_fsdp],
            "set of trained parameters": [
                [jax.tree_util.keystr(path), list(leaf.shape)]
                for path, leaf in jax.tree_util.tree_leaves_with_path(run.trained)
            ],
        }

    def check(self, state: TrainState, say: Callable[[str], object] = str) -> None:
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
            say=say,
        )

    def clipping(self) -> dict[str, Any] | None:
        run = self.run
        units = run.plan.execution.microbatch_size
        units *= run.mesh.shape[FSDP_AXIS] if splits_parameters(run.mesh) else 1
        bounded = run.mechanism.clipped_grad(self.loss_fn, **self.options, **self.pieces)
        largest = self.pipeline.first_units(1, self.sampler.group_size)[-1]
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (units, *x.shape[2:]), jax.dtypes.canonicalize_dtype(x.dtype)
            ),
            units_of(run.mechanism, largest),
        )
        return bounded.explain(run.given, shapes).to_json(units)

    def inputs(self) -> Iterator[tuple[int, StepBatch]]:
        for batch in self.pipeline.iterate(self.start, self.run.steps):
            yield batch.step + 1, batch

    def step(self, state: TrainState, inputs: StepBatch) -> tuple[TrainState, StepOutput]:
        run = self.run
        arguments = step_arguments(run.mechanism, inputs)
        noise_key = run.plan.noise_key(self.key, inputs.step)
        state, stats = self.compiled(state, *arguments, noise_key, run.frozen)
        read = (inputs.columns, self.pipeline.row)
        tokens = (inputs.num_tokens, inputs.num_places)
        return state, StepOutput(stats, inputs.num_examples, *tokens, read)
