"""Noise that is correlated between steps: C^-1 Z for a banded lower-triangular Toeplitz matrix C.

Source: Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization" (arXiv 2306.08153),
Algorithm 9; strategies of McKenna 2024 (arXiv 2405.15913), by the library jax-privacy. With c the
first column of C (b numbers) and g_t the bounded sum of step t:

    y_t = c_0 g_t + c_1 g_{t-1} + ... + c_{b-1} g_{t-b+1} + z_t       # the only noise: independent
    x_t = (y_t - c_1 x_{t-1} - ... - c_{b-1} x_{t-b+1}) / c_0         # = g_t + (C^-1 Z)_t

What is noised is C G, in the order in which its rows are known; all that follows is computed from
what is noised. So noise is drawn, and added, as if it were independent: exactly (``exact``). To add
C^-1 Z itself would round numbers of the size of the noise next to people's data.

Both windows, of sums and of what was released, are kept: 2 (b - 1) numbers a parameter, split over
devices like it. Past noise could be drawn again from its keys, but C^-1 has no bands: step t would
draw that of all steps before it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import signal

from dpfl_jax.accounting import cache
from dpfl_jax.errors import BadInputError
from dpfl_jax.noise.transform import Noise, NoiseState, divided, transformation

PyTree = Any
_TURNS = 30  # of the optimiser: the error no longer changes after ten, also at 10,000 steps


@functools.lru_cache(maxsize=256)
def strategy(bands: int, steps: int) -> tuple[float, ...]:
    """The first column of the C whose noise has the least mean square in prefix sums.

    Optimised by jax-privacy for sensitivity 1 (a column's norm), and kept on disk.

    Args:
      bands: b, numbers of the column that are not 0.
      steps: T, rows and columns of C.

    Returns:
      b float32 numbers, of norm 1 up to rounding.

    Raises:
      BadInputError: more bands than steps, or jax-privacy is not installed.
    """
    if not 1 <= bands <= steps:
        raise BadInputError(
            f"mechanism.bands is {bands}, but it must be at least 1 and at most the {steps} steps"
        )
    if bands == 1:
        return (1.0,)
    try:
        from jax_privacy.matrix_factorization import toeplitz
    except ImportError as error:
        raise BadInputError(
            "correlated noise needs the package jax-privacy: pip install 'dpfl_jax[correlated]', "
            "or give mechanism.strategy"
        ) from error
    key = cache.key_of("banded toeplitz", bands, steps, _TURNS)
    found = (cache.read(key) or {}).get("strategy")
    # Sound whatever is on disk: what is accounted is the norm of what runs.
    if isinstance(found, list) and len(found) == bands:
        return tuple(map(float, found))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        made = toeplitz.optimize_banded_toeplitz(steps, bands, max_optimizer_steps=_TURNS)
    found = np.asarray(made, np.float32).tolist()
    cache.write(key, {"strategy": found})
    return tuple(found)


def prefix_error(column: tuple[float, ...], steps: int) -> float:
    """Root mean square of the noise in prefix sums, over that of independent noise.

    Both for noise of standard deviation 1 in C G (independent: in G).

    Args:
      column: c.
      steps: T.
    """
    # The sums are A C^-1 Z; that matrix is Toeplitz, and this is its first column.
    first = signal.lfilter([1.0], column, np.ones(steps))
    return math.sqrt(np.cumsum(first**2).mean() / ((steps + 1) / 2))


def unbanded(bands: int) -> tuple[float, ...]:
    """The first numbers of the strategy that is best with as many bands as steps, at norm 1.

    Fichtenberger et al. 2023, known in closed form; noisier than ``strategy`` by a tenth.
    """
    k = np.arange(1, bands)
    column = np.cumprod(np.r_[1.0, (2 * k - 1) / (2 * k)])
    return tuple(map(float, column / np.linalg.norm(column)))


def banded(
    noise: Noise, column: tuple[float, ...], divisor: float
) -> optax.GradientTransformationExtraArgs:
    """Adds C^-1 Z over the steps, where ``noise`` draws Z, and divides.

    Args:
      noise: of each row of C G; its ``rows`` must be the number of bands, and its standard
        deviation and the clip norm the same at every step, as rows mix several.
      column: c; (1.0,) is independent noise.
      divisor: expected number of units, a constant.

    Returns:
      As ``transformation``. The state's memory is {"sums", "released"}, trees like the parameters
      of float32 [bands - 1, ...], in which step t stands at t modulo (bands - 1). ``noise_key`` is
      uint32 [9]: the last is the step. If the state's is another, a step was left out or the state
      lost, and what would be released could show sums without noise: it is NaN.

    Raises:
      BadInputError: ``rows`` of the noise is not the number of bands.
    """
    if column == (1.0,):
        return transformation(noise, divisor)
    if noise.rows != len(column):
        raise BadInputError(
            f"banded: the noise is for {noise.rows} rows, but there are {len(column)} bands: give "
            f"Noise(..., rows={len(column)})"
        )
    window = len(column) - 1
    later = jnp.asarray(column[1:], jnp.float32)
    first = np.float32(column[0])

    def init(params: PyTree) -> NoiseState:
        def empty() -> PyTree:
            return jax.tree.map(lambda p: np.zeros((window, *p.shape), np.float32), params)

        memory = {"sums": empty(), "released": empty()}
        return NoiseState(jnp.zeros((), jnp.int32), memory)

    def past(kept: jax.Array, step: jax.Array) -> jax.Array:
        """c_1 kept_{t-1} + ... + c_{b-1} kept_{t-b+1}: one after the other, alike everywhere."""

        def more(i: jax.Array, total: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_index_in_dim(kept, (step - 1 - i) % window, keepdims=False)
            return total + later[i] * row

        return jax.lax.fori_loop(0, window, more, jnp.zeros_like(kept[0]))

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
        alike = noise_key[8] == step.astype(jnp.uint32)
        # Windows begin at zero, so that rows before the first step add nothing.
        encoded = jax.tree.map(lambda g, kept: first * g + past(kept, step), total, sums)
        # proof: bandmf-noise-1
        noised = noise.add(noise_key[:8], encoded)
        plain = jax.tree.map(
            lambda y, kept: jnp.where(alike, (y - past(kept, step)) / first, jnp.nan),
            noised,
            released,
        )

        def keep(kept: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(kept, new, step % window, 0)

        memory = {
            "sums": jax.tree.map(keep, sums, total),
            "released": jax.tree.map(keep, released, plain),
        }
        return divided(plain, divisor, params), NoiseState(step + 1, memory)

    return optax.GradientTransformationExtraArgs(init, update)
