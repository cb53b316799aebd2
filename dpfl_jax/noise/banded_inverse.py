"""Noise that is correlated between all steps, by few of its own: K^-1 Z where K^-1 has b bands.

Source: Kalinin, McKenna, Upadhyay and Lampert 2025, "Back to square roots" (arXiv 2505.12128),
whose bands are those of a square root (BISR); here they are the best for a run. K is lower
triangular and Toeplitz; with f_1, ..., f_{b-1} of 0 or more, K^-1 has the first column 1, -f_1,
..., -f_{b-1}: of the noise of a step these parts are taken back in the steps that follow.

    h_t = g_t + f_1 h_{t-1} + ... + f_{b-1} h_{t-b+1}                  # = (K G)_t
    y_t = h_t + z_t                                                    # independent noise
    x_t = y_t - f_1 y_{t-1} - ... - f_{b-1} y_{t-b+1}                  # = g_t + (K^-1 Z)_t

So 3 (b - 1) numbers are kept for each parameter (the h are pairs), as for b - 1 buffers. Or none:

    x_t = g_t + (z_t - floor(f_1 z_{t-1} + ... + f_{b-1} z_{t-b+1}))   # all of it in integers

with past noise drawn again from its keys (``redrawn``). It is next to people's data only as
integers; docs/theory/banded_inverse.md says why what is rounded down tells nothing.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpfl_jax.noise.correlated import correlated
from dpfl_jax.noise.pairs import plus, plus_products
from dpfl_jax.noise.transform import Noise, NoiseState, divided, goes_on


def banded_inverse(
    noise: Noise, taken: tuple[float, ...], divisor: float
) -> optax.GradientTransformationExtraArgs:
    """Adds K^-1 Z over the steps, where ``noise`` draws Z, and divides.

    Rows without noise are pairs of numbers, of 48 bits, as ``buffered`` has them and why.

    Args:
      noise: of each row of K G; as for ``buffered``.
      taken: f.
      divisor: expected number of units, a constant.

    Returns:
      As ``correlated``, with arrays [2 (b - 1), ...] of rows without noise, the newest first, in
      ``sums``, and [b - 1, ...] of noised rows in ``released``.
    """
    numbers = np.asarray(taken, np.float32)
    window = len(numbers)

    def encode(g: jax.Array, kept: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        del step
        return plus(*plus_products(g, numbers, kept[:window], kept[window:]))

    def past(kept: jax.Array) -> jax.Array:
        return sum((f * row for f, row in zip(numbers, kept)), start=jnp.zeros_like(kept[0]))

    def decode(y: jax.Array, kept: jax.Array, step: jax.Array) -> jax.Array:
        del step
        return y - past(kept)

    def keep(kept: jax.Array, new: jax.Array, step: jax.Array) -> jax.Array:
        if len(kept) == window:  # what was released, of which the noised row is made again
            return jnp.concatenate([(new + past(kept))[None], kept[:-1]])
        row, rest = encode(new, kept, step)
        large, small = kept[: window - 1], kept[window:-1]
        return jnp.concatenate([row[None], large, rest[None], small])

    return correlated(noise, divisor, (2 * window, window), encode, decode, keep)


def redrawn(
    noise: Noise, taken: tuple[float, ...], divisor: float
) -> optax.GradientTransformationExtraArgs:
    """As ``banded_inverse``, with noise of b steps drawn at every step, and nothing kept.

    Args:
      noise: of each row of K G; its ``rows`` are ``redrawn_rows``.
      taken: f, multiples of 2^-16.
      divisor: expected number of units, a constant.

    Returns:
      As ``transformation``. ``noise_key`` is uint32 [8 b + 3]: the keys of the step and of the
      b - 1 steps before it, the latest first, its step and its run, which alone the state's memory
      is. If the state's are others, what is released is NaN (``correlated``).
    """
    parts = np.asarray(taken, float) * 2**16
    whole = parts.astype(np.uint32)
    assert (whole == parts).all()

    def init(params: Any) -> NoiseState:
        del params
        return NoiseState(jnp.zeros((), jnp.int32), {"run": np.zeros(2, np.uint32)})

    def update(
        total: Any, state: NoiseState, params: Any = None, *, noise_key: jax.Array, **others: Any
    ) -> tuple[Any, NoiseState]:
        del others
        keys, told = noise_key[:-3].reshape(-1, 8), noise_key[-3:]
        alike, run = goes_on(state.step, state.memory["run"], told)
        there = jnp.arange(1, len(keys), dtype=jnp.uint32) <= told[0]  # none is before the first
        # proof: redrawn-noise-1
        noised = noise.add(keys[0], total, earlier=(keys[1:], jnp.where(there, whole, 0)))
        noised = jax.tree.map(lambda x: jnp.where(alike, x, jnp.nan), noised)
        return divided(noised, divisor, params), NoiseState(state.step + 1, {"run": run})

    return optax.GradientTransformationExtraArgs(init, update)


def redrawn_rows(column: np.ndarray) -> int:
    """Rows of noise for rounding that K passes on: 2 at every step, and K is no more than its sum.

    Args:
      column: first of K, [T], numbers of 0 or more.
    """
    # proof: redrawn-rows-1
    return math.ceil(4 * len(column) * column.sum() ** 2)
