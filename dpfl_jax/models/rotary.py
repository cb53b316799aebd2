"""Rotary positions (Su et al. 2021), halves convention, and the scalings for long contexts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.models.config import RopeScaling


def frequencies(width: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Radians per position of each pair of coordinates, float64 [width / 2]."""
    found = theta ** (-np.arange(0, width, 2) / width)
    if scaling is None:
        return found
    if scaling.kind == "linear":
        return found / scaling.factor
    # Llama 3.1: long wavelengths are stretched, short ones kept, those between interpolated.
    turns = scaling.original_max_len * found / (2 * math.pi)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = np.clip(share, 0.0, 1.0)
    return (1 - share) * found / scaling.factor + share * found


def tables(length: int, freqs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of positions 0 to length - 1, float32 [length, width / 2] each."""
    angles = np.arange(length)[:, None] * freqs
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: jax.Array, cos: jax.Array | np.ndarray, sin: jax.Array | np.ndarray) -> jax.Array:
    """Turns x [heads, length, width] by angles given as cos and sin [length, width / 2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
