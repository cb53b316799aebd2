"""The private training step: bounded sum over microbatches, one reduction, noise, optimiser.

    step(state, units, mask, num_microbatches, noise_key) -> state, stats

``units`` is a buffer of fixed shape [capacity, devices * microbatch, ...], of which the first
``num_microbatches`` rows hold this step's units: a Poisson draw of any size runs without
recompiling, and rows that hold only padding cost nothing. Each device sums its own share of every
row; the sums meet in one reduction after the loop. Units of several shapes (users with few and with
many examples) come as tuples of such buffers, one after the other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from dpfl_jax.mechanisms import Mechanism
from dpfl_jax.training.state import DATA_AXIS, TrainState

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepStats:
    """Sums over the units of one step. Computed from private data without noise.

    Attributes (float32 scalars):
      units: units drawn.
      loss: sum of unit losses over finite ones.
      clipped: units whose gradient norm was above the clip norm.
      norm: sum of unit gradient norms.
      nonfinite: units whose gradient had a NaN or infinity and was replaced by zero.
    """

    units: jax.Array
    loss: jax.Array
    clipped: jax.Array
    norm: jax.Array
    nonfinite: jax.Array


TrainStep = Callable[..., tuple[TrainState, StepStats]]


def bounded_sum_over_microbatches(
    mechanism: Mechanism, loss_fn: Callable[..., jax.Array], mesh: Mesh, **options: Any
) -> Callable[..., tuple[PyTree, StepStats]]:
    """Returns ``(params, units, mask, num_microbatches) -> (sum, stats)``, the sum before noise.

    Args:
      mechanism: bounds the gradients.
      loss_fn: ``(params, example) -> scalar`` for one example.
      mesh: a mesh with the axis ``"data"``; units are split over it, parameters are not.
      **options: passed to ``clipping.bounded_grad``.
    """
    bounded_grad = mechanism.bounded_grad(loss_fn, **options)
    rows = PartitionSpec(None, DATA_AXIS)
    clip_norm = mechanism.clip_norm

    def local(
        params: PyTree, units: PyTree, mask: Any, num_microbatches: Any
    ) -> tuple[PyTree, StepStats]:
        # Without this cast, the gradient with respect to replicated parameters is summed over
        # devices *before* clipping, and the sensitivity becomes the number of devices.
        params = jax.tree.map(lambda p: jax.lax.pcast(p, DATA_AXIS, to="varying"), params)

        def body(
            i: jax.Array, carry: tuple[PyTree, StepStats], units: PyTree, mask: jax.Array
        ) -> tuple[PyTree, StepStats]:
            total, stats = carry
            row = jax.tree.map(lambda u: jax.lax.dynamic_index_in_dim(u, i, keepdims=False), units)
            row_mask = jax.lax.dynamic_index_in_dim(mask, i, keepdims=False)
            bounded = bounded_grad(params, row, row_mask)
            real = row_mask.astype(jnp.float32)
            finite = real * (1.0 - bounded.nonfinite)
            stats = StepStats(
                units=stats.units + real.sum(),
                loss=stats.loss + jnp.where(finite > 0, bounded.losses, 0.0).sum(),
                clipped=stats.clipped + (finite * (bounded.norms > clip_norm)).sum(),
                norm=stats.norm + (finite * bounded.norms).sum(),
                nonfinite=stats.nonfinite + (real * bounded.nonfinite).sum(),
            )
            return jax.tree.map(jnp.add, total, bounded.sum), stats

        zero = jnp.zeros((), jnp.float32)
        carry = (
            jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
            StepStats(units=zero, loss=zero, clipped=zero, norm=zero, nonfinite=zero),
        )
        carry = jax.tree.map(lambda x: jax.lax.pcast(x, DATA_AXIS, to="varying"), carry)
        if not isinstance(mask, tuple):
            units, mask, num_microbatches = (units,), (mask,), (num_microbatches,)
        for part, part_mask, rows in zip(units, mask, num_microbatches, strict=True):
            loop = functools.partial(body, units=part, mask=part_mask)
            carry = jax.lax.fori_loop(0, rows, loop, carry)
        return jax.lax.psum(carry, DATA_AXIS)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), rows, rows, PartitionSpec()),
        out_specs=PartitionSpec(),
        axis_names={DATA_AXIS},
    )


def make_train_step(
    mechanism: Mechanism,
    loss_fn: Callable[..., jax.Array],
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    **options: Any,
) -> TrainStep:
    """Returns the jit-compiled step; the state given to it is donated.

    Args:
      mechanism: what is sampled, bounded and noised; its noise multiplier must be set.
      loss_fn: ``(params, example) -> scalar`` for one example.
      optimizer: any Optax transformation; it sees only the noised, averaged gradient.
      mesh: a mesh with the axis ``"data"``.
      **options: passed to ``clipping.bounded_grad`` (e.g. ``strategy``).

    Returns:
      ``step(state, units, mask, num_microbatches, noise_key) -> (state, StepStats)`` with units
      [capacity, devices * microbatch, ...], mask bool [capacity, devices * microbatch],
      num_microbatches int32 scalar <= capacity, and noise_key a JAX key used for this step alone.
      The first three may be tuples of equal length, for units of several shapes.
    """
    bounded_sum = bounded_sum_over_microbatches(mechanism, loss_fn, mesh, **options)
    noise, divisor = mechanism.noise, mechanism.divisor

    def step(
        state: TrainState,
        units: PyTree,
        mask: Any,
        num_microbatches: Any,
        noise_key: jax.Array,
    ) -> tuple[TrainState, StepStats]:
        total, stats = bounded_sum(state.params, units, mask, num_microbatches)
        noised = noise.add(noise_key, total)
        gradient = jax.tree.map(lambda g, p: (g / divisor).astype(p.dtype), noised, state.params)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params=params, opt_state=opt_state, step=state.step + 1), stats

    return jax.jit(step, donate_argnums=0)
