"""Gaussian noise in float32: the same numbers for every sharding and device count.

It is what mechanism.arithmetic=float adds, and what simulations draw; only the noise of ``exact``
withstands attacks on the grid of float32 values. Noise is drawn under ``jit`` and outside
``shard_map``, so that each device draws its slice of one global array. Inside ``shard_map`` with
one key every device would draw the same numbers: after a reduction, a noise vector with a wrong
standard deviation.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from dpfl_jax.errors import require

PyTree = Any

# jax.random.normal in float32 is built from 23 random bits and never exceeds about 5.2 standard
# deviations: a worst-case observer of one coordinate sees the edge with probability 1e-7 a step,
# more than the delta of most runs. The scaled sum of two draws reaches 7.3 standard deviations
# (the edge has probability 1e-14). That mends the tails only: the release still lies on a float32
# grid that reveals something of the clean sum (Mironov 2012; Haney et al. 2022, arXiv 2207.13793,
# whose attacks several draws do not stop). Guarantees say so: IDEALISED_FLOAT.

# JAX's own threefry draws these words as well, but on a CPU its loop over the rounds goes through
# memory and takes four times as long. It compiles faster, so small arrays use it.
_WRITTEN_OUT = 1 << 17


@dataclasses.dataclass(frozen=True)
class GaussianNoise:
    """Independent N(0, stddev^2) noise on every coordinate of the clipped sum.

    Attributes:
      stddev: standard deviation of the noise on the *sum* (noise multiplier x sensitivity).

    Examples:
      >>> from dpfl_jax.noise import GaussianNoise
      >>> GaussianNoise(stddev=1.5).stddev
      1.5
    """

    stddev: float

    def __post_init__(self) -> None:
        good = math.isfinite(self.stddev) and self.stddev >= 0
        require(good, "the noise standard deviation", self.stddev, "finite and >= 0")

    def sample(self, key: jax.Array, like: PyTree) -> PyTree:
        """Draws noise with the shapes of ``like``.

        Args:
          key: this step's key; never use it for anything else.
          like: pytree of arrays or ShapeDtypeStructs.

        Returns:
          Pytree of float32 arrays.
        """
        leaves, treedef = jax.tree.flatten(like)
        drawn = []
        for i, leaf in enumerate(leaves):
            words = threefry(jax.random.bits(jax.random.fold_in(key, i), (2,)), leaf.shape)
            first, second = map(_of_variance_half, words)
            drawn.append(self.stddev * (first + second))
        return jax.tree.unflatten(treedef, drawn)


def _of_variance_half(words: jax.Array) -> jax.Array:
    """Float32 draws of N(0, 1/2), from 23 bits of each word."""
    uniform = (words >> 9).astype(jnp.float32) * 2.0**-22 - (1 - 2.0**-23)
    return jax.lax.erf_inv(uniform)


def threefry(key: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns two uint32 arrays of random words (Threefry-2x32-20, 2011); ``key`` is uint32 [2]."""
    # The counter is the index along the last axis and the index over the other axes, one word each.
    y = jax.lax.broadcasted_iota(jnp.uint32, shape or (1,), max(len(shape) - 1, 0)).reshape(shape)
    x, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in range(len(shape) - 2, -1, -1):
        x += jnp.uint32(stride) * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        stride *= shape[axis]
    if math.prod(shape) < _WRITTEN_OUT:
        return threefry2x32_p.bind(key[0], key[1], x, y)
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = x + keys[0], y + keys[1]
    for group in range(5):
        for by in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = x + y
            y = ((y << by) | (y >> (32 - by))) ^ x
        x, y = x + keys[(group + 1) % 3], y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y
