"""What all noise that is correlated between steps does: K^-1 Z for a lower-triangular matrix K.

With G the bounded sums, row by row, what is noised is K G: so noise is drawn, and added, as if it
were independent. What is released of a row is computed from noised rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpfl_jax.noise.transform import Noise, NoiseState, divided, goes_on

PyTree = Any


def correlated(
    noise: Noise,
    divisor: float,
    lengths: tuple[int, int],
    encode: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]],
    decode: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    keep: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> optax.GradientTransformationExtraArgs:
    """Adds K^-1 Z over the steps, where ``noise`` draws Z, and divides.

    Args:
      noise: of each row of K G.
      divisor: expected number of units, a constant.
      lengths: of what is kept for each parameter, of earlier sums and of what was released.
      encode: (sum, kept float32 [length, ...], step) -> the row of K G, and what float32 has no
        room for of it, or None.
      decode: (noised row, kept, step) -> the row of G + K^-1 Z.
      keep: (kept, new row, step) -> kept.

    Returns:
      As ``transformation``. The state's memory is {"sums", "released"}, trees like the parameters
      of float32 [length, ...], and {"run"}. ``noise_key`` is uint32 [11]: behind the key its step
      and run. If the state's are others, a step was left out, the state lost or the plan changed,
      and what would be released could show sums without noise: it is NaN.
    """

    def init(params: PyTree) -> NoiseState:
        def empty(length: int) -> PyTree:
            return jax.tree.map(lambda p: np.zeros((length, *p.shape), np.float32), params)

        memory = {"sums": empty(lengths[0]), "released": empty(lengths[1])}
        memory["run"] = np.zeros(2, np.uint32)
        return NoiseState(jnp.zeros((), jnp.int32), memory)

    def update(
        total: PyTree,
        state: NoiseState,
        params: PyTree | None = None,
        *,
        noise_key: jax.Array,
        **others: Any,
    ) -> tuple[PyTree, NoiseState]:
        del others
        step, sums, released = state.step, state.memory["sums"], state.memory["released"]
        alike, run = goes_on(step, state.memory["run"], noise_key[8:])
        # What is kept begins at zero, so that rows before the first step add nothing.
        both = jax.tree.map(lambda g, kept: encode(g, kept, step), total, sums)
        encoded = jax.tree.map(lambda _, pair: pair[0], total, both)
        rest = jax.tree.map(lambda _, pair: pair[1], total, both)
        # proof: correlated-noise-1
        noised = noise.add(noise_key[:8], encoded, rest if jax.tree.leaves(rest) else None)
        plain = jax.tree.map(
            lambda y, kept: jnp.where(alike, decode(y, kept, step), jnp.nan), noised, released
        )
        memory = {
            "sums": jax.tree.map(lambda kept, g: keep(kept, g, step), sums, total),
            "released": jax.tree.map(lambda kept, x: keep(kept, x, step), released, plain),
            "run": run,
        }
        return divided(plain, divisor, params), NoiseState(step + 1, memory)

    return optax.GradientTransformationExtraArgs(init, update)
