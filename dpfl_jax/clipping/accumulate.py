"""Adding up sums of many microbatches in float32.

Each addition rounds by half a unit in the last place of the sum so far, and which way depends on
every unit before. Over many microbatches that adds up to more than a unit may contribute: then the
rounding errors are added up beside the sum (Neumaier 1974), at the price of one more accumulator.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
# Rounding may move a sum by this share of the clip norm; typically it moves it far less.
_TOLERANCE = 2.0**-7


def needs_compensation(num_units: int, num_additions: int) -> bool:
    """Whether plain float32 would move a sum of unit contributions by too much.

    Args:
      num_units: most units in the sum, each of norm at most 1 (in units of the clip norm).
      num_additions: most partial sums that are added one after the other.
    """
    half = float(jnp.finfo(jnp.float32).eps) / 2
    return num_units * math.sqrt(num_additions) * half > _TOLERANCE


def add(sums: PyTree, errors: PyTree, more: PyTree) -> tuple[PyTree, PyTree]:
    """(sums, errors) with ``more`` added; the sum is ``sums + errors``. ``errors`` may be None."""
    if errors is None:
        return jax.tree.map(jnp.add, sums, more), None
    total = jax.tree.map(jnp.add, sums, more)

    def lost(a: jax.Array, b: jax.Array, s: jax.Array, e: jax.Array) -> jax.Array:
        seen = s - a
        return e + ((a - (s - seen)) + (b - seen))

    return total, jax.tree.map(lost, sums, more, total, errors)


def start(sums: PyTree, compensated: bool) -> PyTree:
    """The errors of empty sums: zeros, or None where they are not kept."""
    return jax.tree.map(lambda x: x * 0, sums) if compensated else None


def finish(sums: PyTree, errors: PyTree) -> PyTree:
    """What was added up."""
    return sums if errors is None else jax.tree.map(jnp.add, sums, errors)
