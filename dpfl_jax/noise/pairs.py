"""Sums of 48 bits, as pairs of float32 numbers: what rows of correlated noise are encoded with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp


def plus(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A sum as float32, and what is left of it: exactly (Knuth's)."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def times(number: Any, large: jax.Array, small: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``number`` times (large + small): as float32, and what is left of it, to 48 bits.

    Products of halves are exact. What their sum leaves is kept: rounded, it would add up over the
    steps that long memory has, and neighbours' rows would round apart.
    """
    top, half = _first_half(number), _first_half(large)
    product, first = plus(top * half, top * (large - half))
    product, second = plus(product, (number - top) * half)
    rest = (number - top) * (large - half) + number * small
    return product, (first + second) + rest


def plus_products(
    total: jax.Array, numbers: Iterable[Any], large: jax.Array, small: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``total`` and each number times its pair: as float32, and what is left of it.

    Args:
      total: float32 array.
      numbers: few: one is added after the other, alike everywhere.
      large: float32 [numbers, ...].
      small: likewise.
    """
    row, rest = total, jnp.zeros_like(total)
    for number, first, second in zip(numbers, large, small, strict=True):
        product, more = times(number, first, second)
        row, left = plus(row, product)
        rest = rest + (left + more)
    return row, rest


def _first_half(x: Any) -> jax.Array:
    """The first 12 of 24 bits: a product of two such numbers is one of float32."""
    bits = jax.lax.bitcast_convert_type(jnp.asarray(x, jnp.float32), jnp.uint32)
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFF000), jnp.float32)
