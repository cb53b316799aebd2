"""ChaCha12 (Bernstein 2008; laid out as RFC 8439): random words from 256-bit keys, by place.

Twelve rounds, not RFC 8439's twenty: noise costs a third less, and the best attack known reaches
seven (Aumasson 2019, "Too Much Crypto"). Keys of keys are few, and take twenty.

One block of 16 words belongs to every place, and is computed from the key and the place alone: each
device computes those of its own part, and the numbers are the same for every layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

ROUNDS = 12
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # "expand 32-byte k"
_QUARTERS = (
    *((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)),
    *((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)),
)
# Written out, a block is one loop over the places, in registers; a loop over the rounds would go
# through memory, but compiles sooner.
_WRITTEN_OUT = 1 << 12


def block(key: jax.Array, place: Sequence[jax.Array]) -> list[jax.Array]:
    """The 16 words of each place.

    Args:
      key: uint32 [8].
      place: 4 arrays uint32 of one shape (RFC 8439: the counter, and the nonce's three words). Two
        equal places under one key have the same words.

    Returns:
      16 arrays uint32 of that shape.
    """
    first = _start(key, place)
    return [a + b for a, b in zip(_rounds(first, ROUNDS), first, strict=True)]


def uniform(key: jax.Array, count: int) -> jax.Array:
    """float32 [count], uniform multiples of 2^-23 from 0 to below 1.

    Each is the first word of a place that ``block`` has for nothing else.

    Args:
      key: uint32 [8].
      count: how many.
    """
    place, zeros = jnp.arange(count, dtype=jnp.uint32), jnp.zeros(count, jnp.uint32)
    words = block(key, [place, zeros, zeros, zeros + 1])[0]
    return (words >> 9).astype(jnp.float32) * 2.0**-23


def subkey(key: jax.Array, words: jax.Array) -> jax.Array:
    """HChaCha20 (Arciszewski, draft-irtf-cfrg-xchacha): another key for each use of a key.

    Args:
      key: uint32 [8], used for nothing but subkeys.
      words: uint32 [4], the use.

    Returns:
      uint32 [8].
    """
    last = _rounds(_start(key, list(words)), 20)
    return jnp.stack(last[:4] + last[12:])


def _start(key: jax.Array, place: Sequence[jax.Array]) -> list[jax.Array]:
    # All words vary over a mesh as the key does: a loop's state may not change in that.
    words = [jnp.uint32(c) + 0 * key[0] for c in _CONSTANTS] + [key[i] for i in range(8)]
    return [jnp.broadcast_to(x, place[0].shape) for x in [*words, *(p + 0 * key[0] for p in place)]]


def _rounds(words: list[jax.Array], rounds: int) -> list[jax.Array]:
    if math.prod(words[0].shape) < _WRITTEN_OUT:
        return jax.lax.fori_loop(0, rounds // 2, lambda _, state: _two_rounds(state), words)
    for _ in range(rounds // 2):
        words = _two_rounds(words)
    return words


def _two_rounds(words: list[jax.Array]) -> list[jax.Array]:
    words = list(words)
    for a, b, c, d in _QUARTERS:
        for x, y, z, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            words[x] = words[x] + words[y]
            mixed = words[z] ^ words[x]
            words[z] = (mixed << by) | (mixed >> (32 - by))
    return words
