"""The private training step: bounded sum over microbatches, one reduction, noise, optimiser.

    step(state, units, mask, num_microbatches, noise_key, frozen) -> state, stats

``units`` is a buffer of fixed shape [capacity, parts * microbatch, ...], of which the first
``num_microbatches`` rows hold this step's units: a Poisson draw of any size runs without
recompiling, and rows that hold only padding cost nothing. Each device sums its own share of every
row; the sums meet in one reduction after the loop (``sums``). Units of several shapes (users with
few and with many examples) come as tuples of such buffers, one after the other. Parameters that are
not trained are an argument of their own: split over devices like the others, but never
differentiated, noised or updated.

The sum and the update (noise, optimiser) are two programs: what is checked before the first step
(``sum_check``) is the very program that sums in every step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from dpfl_jax.clipping.result import StepStats
from dpfl_jax.mechanisms import Calibrated
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches
from dpfl_jax.mesh import parameter_shardings
from dpfl_jax.noise import NoiseState, compiler_options
from dpfl_jax.run.state import TrainState, shardings_of

PyTree = Any


class TrainStep:
    """``(state, units, mask, num_microbatches, noise_key, frozen=None) -> (state, StepStats)``.

    Attributes:
      sum: compiled ``(params, units, mask, num_microbatches, frozen) -> (sum, StepStats)``.
      update: compiled ``(state, sum, noise_key) -> state``; the state given to it is donated.
      whole: both as one program, as the call; not compiled: for what a step costs.
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
    """The clip norm of this step, where it adapts: else nothing, as the check gives the sum."""
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
      calibrated: what is sampled, bounded and noised.
      loss_fn: ``(params, example) -> scalar`` for one example.
      optimizer: any Optax transformation; it sees only the noised, averaged gradient, and is told
        the stddev of the noise on it, ``noise_stddev``.
      mesh: from ``mesh.make_mesh``.
      whole: as in ``clipped_sum_over_microbatches``; the same as of the state.
      **options: passed to ``clipping.clipped_grad`` (e.g. ``strategy``, ``trainable``).

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
    told = optax.with_extra_args_support(optimizer)

    def update(state: TrainState, total: PyTree, noise_key: jax.Array) -> TrainState:
        noise, before = calibrated.noise_transform(), NoiseState(state.step, state.noise)
        # proof: noise-2
        gradient, after = noise.update(total, before, state.params, noise_key=noise_key)
        chex.assert_trees_all_equal_shapes_and_dtypes(gradient, state.params)
        # Each device draws the noise of its own part of the sum: the numbers are the same for every
        # layout, and no device holds them all.
        gradient = jax.lax.with_sharding_constraint(
            gradient, parameter_shardings(gradient, mesh, whole or ())
        )
        stddev = jnp.asarray(calibrated.noise_on_gradients, jnp.float32)[state.step]
        for clip_norm in _adapting(state):
            stddev *= clip_norm
        updates, opt_state = told.update(
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
