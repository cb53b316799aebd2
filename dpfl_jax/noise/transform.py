"""Noise as an Optax transformation: adds it to a clipped sum, and divides by the expected size.

    noise = transformation(GaussianNoise(stddev), divisor)
    state = noise.init(params)
    gradient, state = noise.update(total, state, params, noise_key=key)

The key of a step is an argument, used once: so it is in no state that could be kept, and no
constant of a compiled program. Noise that is drawn afresh at every step counts its steps alone;
noise that is correlated between steps keeps what it needs in ``memory``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from dpfl_jax.noise.gaussian import GaussianNoise

PyTree = Any


class NoiseState(NamedTuple):
    """What noise knows between steps.

    Attributes:
      step: int32 scalar, steps noised so far.
      memory: pytree of arrays, in checkpoints: nothing that is more secret than these belongs here
        (past noise can be drawn again from its key).
    """

    step: jax.Array
    memory: PyTree = ()


def transformation(noise: GaussianNoise, divisor: float) -> optax.GradientTransformationExtraArgs:
    """Independent noise at every step.

    Args:
      noise: on the sum.
      divisor: expected number of units, a constant.

    Returns:
      ``init(params) -> NoiseState`` and ``update(sum, state, params=None, *, noise_key) ->
      (gradient, state)``, to be chained with any optimiser, and compiled with it or alone. The sum
      is float32; the gradient has the dtypes of ``params`` if they are given; noise_key is uint32
      [2], a threefry key for this step alone.
    """

    def init(params: PyTree) -> NoiseState:
        del params
        return NoiseState(jnp.zeros((), jnp.int32))

    def update(
        total: PyTree,
        state: NoiseState,
        params: PyTree | None = None,
        *,
        noise_key: jax.Array,
        **others: Any,
    ) -> tuple[PyTree, NoiseState]:
        del others
        chex.assert_shape(noise_key, (2,))
        chex.assert_type(noise_key, jnp.uint32)  # another key would be another law of noise
        noised = noise.add(jax.random.wrap_key_data(noise_key, impl="threefry2x32"), total)
        gradient = jax.tree.map(
            lambda g, p: None if g is None else (g / divisor).astype(p.dtype),
            noised,
            noised if params is None else params,
            is_leaf=lambda x: x is None,  # parameters that are not trained have no sum
        )
        return gradient, state._replace(step=state.step + 1)

    return optax.GradientTransformationExtraArgs(init, update)
