"""Gaussian noise in float32: the same numbers for every sharding and device count.

It is what mechanism.noise=float adds, and what simulations draw; the noise of ``exact`` withstands
attacks on the grid of float32 values, too. Noise is drawn under ``jit`` and outside ``shard_map``:
JAX's partitionable threefry then gives each device its slice of one global array. Inside
``shard_map`` with one key every device would draw the same numbers, which after a reduction is one
noise vector with a wrong standard deviation.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax.errors import BadInputError

PyTree = Any

# jax.random.normal in float32 is built from 23 random bits and never exceeds about 5.2 standard
# deviations: a worst-case observer of one coordinate sees the edge with probability 1e-7 a step,
# more than the delta of most runs. The scaled sum of two draws reaches 7.3 standard deviations
# (the edge has probability 1e-14). It is for the tails alone: what is released still lies on a
# float32 grid that tells of the clean sum (Mironov 2012; Haney et al. 2022, arXiv 2207.13793, whose
# attacks several draws do not stop). Guarantees say so: IDEALISED_FLOAT.
DRAWS = 2


@dataclasses.dataclass(frozen=True)
class GaussianNoise:
    """Independent N(0, stddev^2) noise on every coordinate of the bounded sum.

    Attributes:
      stddev: standard deviation of the noise on the *sum* (noise multiplier x sensitivity).
    """

    stddev: float

    def __post_init__(self) -> None:
        """Validates the standard deviation."""
        if not (math.isfinite(self.stddev) and self.stddev >= 0):
            raise BadInputError(
                f"the noise standard deviation is {self.stddev}, but it must be finite and >= 0"
            )

    def sample(self, key: jax.Array, like: PyTree) -> PyTree:
        """Draws noise of the shapes of ``like``.

        Args:
          key: this step's key; never use it for anything else.
          like: pytree of arrays or ShapeDtypeStructs.

        Returns:
          Pytree of float32 arrays.
        """
        leaves, treedef = jax.tree.flatten(like)
        keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
        scale = self.stddev / math.sqrt(DRAWS)

        def one(leaf_key: jax.Array, leaf: Any) -> jax.Array:
            draws = jax.random.normal(leaf_key, (DRAWS, *leaf.shape), jnp.float32)
            return scale * draws.sum(axis=0)

        drawn = [one(k, leaf) for k, leaf in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(treedef, drawn)
