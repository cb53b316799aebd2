"""Noise that is correlated between steps: K^-1 Z for a banded lower-triangular Toeplitz matrix K.

Source: Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization" (arXiv 2306.08153),
Algorithm 9; strategies of McKenna 2024 (arXiv 2405.15913). With c the first column of K (b numbers)
and g_t the bounded sum of step t:

    y_t = c_0 g_t + c_1 g_{t-1} + ... + c_{b-1} g_{t-b+1} + z_t       # the only noise: independent
    x_t = (y_t - c_1 x_{t-1} - ... - c_{b-1} x_{t-b+1}) / c_0         # = g_t + (K^-1 Z)_t

What is noised is K G, in the order in which its rows are known; all that follows is computed from
what is noised. So noise is drawn, and added, as if it were independent: exactly (``exact``). To add
K^-1 Z itself would round numbers of the size of the noise next to people's data.

Both windows, of sums and of what was released, are kept: 2 (b - 1) numbers a parameter, split over
devices like it. Past noise could be drawn again from its keys, but K^-1 has no bands: step t would
draw that of all steps before it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpfl_jax.errors import BadInputError
from dpfl_jax.noise.correlated import correlated
from dpfl_jax.noise.transform import Noise, transformation


def banded(
    noise: Noise, column: tuple[float, ...], divisor: float
) -> optax.GradientTransformationExtraArgs:
    """Adds K^-1 Z over the steps, where ``noise`` draws Z, and divides.

    Args:
      noise: of each row of K G; its ``rows`` must be the number of bands, and its standard
        deviation and the clip norm the same at every step, as rows mix several.
      column: c; (1.0,) is independent noise.
      divisor: expected number of units, a constant.

    Returns:
      As ``correlated``, with arrays [bands - 1, ...], in which step t stands at t modulo
      (bands - 1).

    Raises:
      BadInputError: ``rows`` of the noise is not the number of bands.
    """
    if column == (1.0,):
        return transformation(noise, divisor)
    if noise.rows != len(column):
        raise BadInputError(
            f"banded: the noise is for {noise.rows} rows, but there are {len(column)} bands: give "
            f"Noise(..., rows={len(column)})"
        )
    window = len(column) - 1
    later = jnp.asarray(column[1:], jnp.float32)
    first = np.float32(column[0])

    def past(kept: jax.Array, step: jax.Array) -> jax.Array:
        """c_1 kept_{t-1} + ... + c_{b-1} kept_{t-b+1}: one after the other, alike everywhere."""

        def more(i: jax.Array, total: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_index_in_dim(kept, (step - 1 - i) % window, keepdims=False)
            return total + later[i] * row

        return jax.lax.fori_loop(0, window, more, jnp.zeros_like(kept[0]))

    def encode(g: jax.Array, kept: jax.Array, step: jax.Array) -> tuple[jax.Array, None]:
        return first * g + past(kept, step), None

    def decode(y: jax.Array, kept: jax.Array, step: jax.Array) -> jax.Array:
        return (y - past(kept, step)) / first

    def keep(kept: jax.Array, new: jax.Array, step: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(kept, new, step % window, 0)

    return correlated(noise, divisor, (window, window), encode, decode, keep)
