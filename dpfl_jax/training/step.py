"""The private training step: bounded sum over microbatches, one reduction, noise, optimiser.

    step(state, units, mask, num_microbatches, noise_key, frozen) -> state, stats

``units`` is a buffer of fixed shape [capacity, parts * microbatch, ...], of which the first
``num_microbatches`` rows hold this step's units: a Poisson draw of any size runs without
recompiling, and rows that hold only padding cost nothing. Each device sums its own share of every
row; the sums meet in one reduction after the loop (``sums``). Units of several shapes (users with
few and with many examples) come as tuples of such buffers, one after the other. Parameters that are
not trained are an argument of their own: split over devices like the others, but never
differentiated, noised or updated.

The sum and the update are two programs: what is checked before the first step (``sum_check``) is
the very program that sums in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from dpfl_jax.mechanisms import Mechanism
from dpfl_jax.run.algorithm import StepStats
from dpfl_jax.run.mesh import parameter_shardings
from dpfl_jax.run.state import TrainState, shardings_of
from dpfl_jax.training.sums import bounded_sum_over_microbatches

PyTree = Any


class TrainStep:
    """``(state, units, mask, num_microbatches, noise_key, frozen=None) -> (state, StepStats)``.

    Attributes:
      sum: compiled ``(params, units, mask, num_microbatches, frozen) -> (sum, StepStats)``.
      update: compiled ``(state, sum, noise_key) -> state``; the state given to it is donated.
    """

    def __init__(self, summed: Callable[..., Any], update: Callable[..., TrainState]) -> None:
        self.sum = jax.jit(summed)
        self.update = jax.jit(update, donate_argnums=0)

    def __call__(
        self,
        state: TrainState,
        units: PyTree,
        mask: Any,
        num_microbatches: Any,
        noise_key: jax.Array,
        frozen: PyTree = None,
    ) -> tuple[TrainState, StepStats]:
        """Takes one step."""
        total, stats = self.sum(state.params, units, mask, num_microbatches, frozen)
        return self.update(state, total, noise_key), stats


def make_train_step(
    mechanism: Mechanism,
    loss_fn: Callable[..., jax.Array],
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    whole: Collection[str] = (),
    **options: Any,
) -> TrainStep:
    """Returns the compiled step; the state given to it is donated.

    Args:
      mechanism: what is sampled, bounded and noised; its noise multiplier must be set.
      loss_fn: ``(params, example) -> scalar`` for one example.
      optimizer: any Optax transformation; it sees only the noised, averaged gradient.
      mesh: from ``mesh.make_mesh``.
      whole: as in ``mesh.parameter_shardings``; the same as of the state.
      **options: passed to ``clipping.bounded_grad`` (e.g. ``strategy``, ``trainable``).

    Returns:
      ``step(state, units, mask, num_microbatches, noise_key, frozen=None) -> (state, StepStats)``
      with state.params and frozen the parts of ``clipping.split(params, trainable)``, units
      [capacity, parts * microbatch, ...] and mask bool [capacity, parts * microbatch], both split
      over the mesh's unit axes, num_microbatches int32 scalar <= capacity, and noise_key a JAX key
      used for this step alone. The first three may be tuples of equal length, for units of several
      shapes.
    """
    noise, divisor = mechanism.noise, mechanism.divisor

    def update(state: TrainState, total: PyTree, noise_key: jax.Array) -> TrainState:
        # Each device draws the noise of its own part of the sum: the numbers are the same for every
        # layout, and no device holds them all.
        noised = jax.lax.with_sharding_constraint(
            noise.add(noise_key, total), parameter_shardings(total, mesh, whole)
        )
        gradient = jax.tree.map(lambda g, p: (g / divisor).astype(p.dtype), noised, state.params)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = TrainState(params=params, opt_state=opt_state, step=state.step + 1)
        return jax.lax.with_sharding_constraint(new, shardings_of(params, optimizer, mesh, whole))

    summed = bounded_sum_over_microbatches(mechanism, loss_fn, mesh, whole=whole, **options)
    return TrainStep(summed, update)
