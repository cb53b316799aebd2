"""ChaCha12 (Bernstein 2008; laid out as RFC 8439): random words from a 256-bit key and a counter.

It has twelve rounds instead of RFC 8439's twenty: noise costs a third less, and the best known
attack reaches seven (Aumasson 2019, "Too Much Crypto"). Subkeys, which are few, take twenty.

Every place (a counter's value) has a block of 16 words, which depends on the key and the place
alone. So each device computes the blocks of its shard, and the numbers do not depend on the layout.
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
# From so many numbers on, rounds are unrolled: a block is then one loop over the places in
# registers. A loop over the rounds goes through memory, but compiles faster.
_WRITTEN_OUT = 1 << 12


def block(key: jax.Array, place: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the 16 words of each place.

    Args:
      key: uint32 [8].
      place: 4 uint32 arrays of one shape (in RFC 8439 the counter and the nonce's three words).
        Equal places under one key have equal words.

    Returns:
      16 arrays uint32 of that shape.
    """
    first = _start(key, place)
    return [a + b for a, b in zip(_rounds(first, ROUNDS), first, strict=True)]


def uniform(key: jax.Array, count: int) -> jax.Array:
    """Returns uniform multiples of 2^-23 in [0, 1), float32 [count].

    Each is made from the first word of a place that nothing else uses.

    Args:
      key: uint32 [8].
      count: number of draws.
    """
    place, zeros = jnp.arange(count, dtype=jnp.uint32), jnp.zeros(count, jnp.uint32)
    words = block(key, [place, zeros, zeros, zeros + 1])[0]
    return (words >> 9).astype(jnp.float32) * 2.0**-23


def subkey(key: jax.Array, words: jax.Array) -> jax.Array:
    """Returns a separate key for each use, by HChaCha20 (Arciszewski, draft-irtf-cfrg-xchacha).

    Args:
      key: uint32 [8], used for subkeys only.
      words: uint32 [4], which name the use.

    Returns:
      uint32 [8].
    """
    last = _rounds(_start(key, list(words)), 20)
    return jnp.stack(last[:4] + last[12:])


def _start(key: jax.Array, place: Sequence[jax.Array]) -> list[jax.Array]:
    # Let all words vary over the mesh as the key does, because a loop's state must not change that.
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
