"""Noise that is correlated between all steps, by a few buffers: K^-1 Z for a buffered Toeplitz K.

Source: Dvijotham et al. 2024, "Efficient and near-optimal noise generation for streaming
differential privacy" (arXiv 2404.16706); McMahan, Xu and Xu 2024, "A hassle-free algorithm for
private learning in practice" (arXiv 2408.08868), for users who take part several times. K is lower
triangular and Toeplitz; with decays d and scales w of B buffers its first column is
1, sum w_i, sum w_i d_i, sum w_i d_i^2, ...

    y_t = g_t + w_1 a_1 + ... + w_B a_B + z_t,  then  a_i = d_i a_i + g_t     # independent noise
    x_t = y_t - w_1 r_1 - ... - w_B r_B,        then  r_i = d_i r_i + x_t     # = g_t + (K^-1 Z)_t

So 3 B numbers are kept for each parameter (the a are pairs), whatever the number of steps, and
split like it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpfl_jax.matrices import Buffers
from dpfl_jax.noise.correlated import correlated
from dpfl_jax.noise.pairs import plus, plus_products, times
from dpfl_jax.noise.transform import Noise


def buffered(
    noise: Noise, buffers: Buffers, divisor: float
) -> optax.GradientTransformationExtraArgs:
    """Adds K^-1 Z over the steps, where ``noise`` draws Z, and divides.

    Buffers of sums have 48 bits, as two numbers, and so have rows: in 24, what a unit adds would be
    rounded with the sum of all units of all steps before, and not be forgotten as decays say.

    Args:
      noise: of each row of K G; its ``rows`` are four times the steps of the run, all of which a
        unit may move, and its standard deviation and the clip norm are the same at every step.
      buffers: decays and scales.
      divisor: expected number of units, a constant.

    Returns:
      As ``correlated``, with arrays [2 buffers, ...] of sums, and [buffers, ...] of what was
      released.
    """
    decays, scales = (np.asarray(numbers, np.float32) for numbers in buffers)
    number = len(scales)

    def encode(g: jax.Array, kept: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        del step
        return plus_products(g, scales, kept[:number], kept[number:])

    def decode(y: jax.Array, kept: jax.Array, step: jax.Array) -> jax.Array:
        del step
        return y - sum(scale * row for scale, row in zip(scales, kept, strict=True))

    def keep(kept: jax.Array, new: jax.Array, step: jax.Array) -> jax.Array:
        del step
        if len(kept) == number:
            return jnp.stack([d * row + new for d, row in zip(decays, kept, strict=True)])
        large, small = [], []
        for i, decay in enumerate(decays):
            product, more = times(decay, kept[i], kept[number + i])
            row, left = plus(product, new)
            row, left = plus(row, left + more)
            large.append(row)
            small.append(left)
        return jnp.stack([*large, *small])

    return correlated(noise, divisor, (2 * number, number), encode, decode, keep)
