"""Noise as an Optax transformation: adds it to a clipped sum, and divides by the expected size.

    noise = transformation(GaussianNoise(stddev), divisor, keys)
    state = noise.init(params)
    gradient, state = noise.update(total, state, params)

Noise that is drawn afresh at every step counts its steps alone; noise that is correlated between
steps keeps what it needs in ``memory``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpfl_jax.noise.gaussian import GaussianNoise

PyTree = Any


class NoiseState(NamedTuple):
    """What noise knows between steps.

    Attributes:
      keys: uint32 [steps, 2], a threefry key for each step. Secret: never in a checkpoint (a run
        has them from its root key) and never a constant of a compiled program.
      step: int32 scalar, steps noised so far.
      memory: pytree of arrays, in checkpoints: nothing that is more secret than these belongs here
        (past noise can be drawn again from its key).
    """

    keys: jax.Array
    step: jax.Array
    memory: PyTree = ()


def transformation(
    noise: GaussianNoise, divisor: float, keys: jax.Array | np.ndarray
) -> optax.GradientTransformation:
    """Independent noise at every step.

    Args:
      noise: on the sum.
      divisor: expected number of units, a constant.
      keys: uint32 [steps, 2].

    Returns:
      ``init(params) -> NoiseState`` and ``update(sum, state, params=None) -> (gradient, state)``,
      to be chained with any optimiser, and compiled with it or alone. The sum is float32; the
      gradient has the dtypes of ``params`` if they are given. Beyond the last step it is NaN: there
      is no noise left that was not used.
    """

    def init(params: PyTree) -> NoiseState:
        del params
        return NoiseState(jnp.asarray(keys, jnp.uint32), jnp.zeros((), jnp.int32))

    def update(
        total: PyTree, state: NoiseState, params: PyTree | None = None
    ) -> tuple[PyTree, NoiseState]:
        chex.assert_shape(state.keys, (None, 2))
        chex.assert_type(state.keys, jnp.uint32)  # another key would be another law of noise
        words = jnp.take(state.keys, state.step, axis=0, mode="clip")
        noised = noise.add(jax.random.wrap_key_data(words, impl="threefry2x32"), total)
        # Divided by NaN, not multiplied by 1: with steps left, the numbers are those of a division.
        by = jnp.where(state.step < state.keys.shape[0], jnp.float32(divisor), jnp.nan)
        like = noised if params is None else params
        gradient = jax.tree.map(lambda g, p: (g / by).astype(p.dtype), noised, like)
        return gradient, state._replace(step=state.step + 1)

    return optax.GradientTransformation(init, update)
