"""Summation over many microbatches in float32.

Each addition rounds by half a unit in the last place of the sum so far, in a direction that depends
on all earlier units. Over many microbatches that adds up to more than a unit may contribute. Then a
second accumulator sums the rounding errors (Neumaier 1974).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
# Rounding may move a sum by this share of the clip norm; usually it moves a sum far less.
_TOLERANCE = 2.0**-7


def needs_compensation(num_units: int, num_additions: int) -> bool:
    """Returns whether rounding in plain float32 would move a sum of contributions too far.

    Args:
      num_units: most units in the sum, each of norm at most 1 (in units of the clip norm).
      num_additions: most partial sums that are added one after the other.
    """
    half = float(jnp.finfo(jnp.float32).eps) / 2
    return num_units * math.sqrt(num_additions) * half > _TOLERANCE


def add(sums: PyTree, errors: PyTree, more: PyTree) -> tuple[PyTree, PyTree]:
    """Returns (sums, errors) with ``more`` added; the total is ``sums + errors``, or ``sums``."""
    if errors is None:
        return jax.tree.map(jnp.add, sums, more), None
    total = jax.tree.map(jnp.add, sums, more)

    def lost(a: jax.Array, b: jax.Array, s: jax.Array, e: jax.Array) -> jax.Array:
        seen = s - a
        return e + ((a - (s - seen)) + (b - seen))

    return total, jax.tree.map(lost, sums, more, total, errors)


def start(sums: PyTree, compensated: bool) -> PyTree:
    """Returns the errors of empty sums: zeros, or None without compensation."""
    return jax.tree.map(lambda x: x * 0, sums) if compensated else None


def finish(sums: PyTree, errors: PyTree) -> PyTree:
    """Returns ``sums`` with their errors added."""
    return sums if errors is None else jax.tree.map(jnp.add, sums, errors)


def over_microbatches(
    one: Callable[[PyTree, jax.Array], tuple[PyTree, PyTree]],
    zeros: tuple[PyTree, PyTree],
    units: PyTree,
    mask: Any,
    num_microbatches: Any,
    *,
    compensated: bool = False,
    parts: int = 1,
) -> tuple[PyTree, PyTree]:
    """Adds up the sums and statistics of microbatches, each of which is a row of a buffer.

    Args:
      one: ``(row, mask) -> (sum, stats)`` for one microbatch.
      zeros: the sum and the stats of no units.
      units: pytree of [rows, row, ...], or a tuple of several such buffers.
      mask: bool [rows, row], or a tuple with one for each buffer.
      num_microbatches: number of rows in use, or a tuple with one number for each buffer.
      compensated: whether rounding errors are summed even where the sums are short.
      parts: number of devices that share a row, each with separate sums.

    Returns:
      (sums, stats).
    """
    if not isinstance(mask, tuple):
        units, mask, num_microbatches = (units,), (mask,), (num_microbatches,)
    most = sum(m.size for m in mask) // parts, sum(m.shape[0] for m in mask)
    sums, stats = zeros
    compensated |= needs_compensation(*most)
    state = (sums, start(sums, compensated), stats)

    def body(i: jax.Array, state: Any, units: PyTree, mask: jax.Array) -> Any:
        sums, errors, stats = state
        row = jax.tree.map(lambda u: jax.lax.dynamic_index_in_dim(u, i, keepdims=False), units)
        more, seen = one(row, jax.lax.dynamic_index_in_dim(mask, i, keepdims=False))
        return (*add(sums, errors, more), jax.tree.map(jnp.add, stats, seen))

    for part, part_mask, rows in zip(units, mask, num_microbatches, strict=True):
        state = jax.lax.fori_loop(
            0, rows, functools.partial(body, units=part, mask=part_mask), state
        )
    sums, errors, stats = state
    return finish(sums, errors), stats
