"""Noise that is correlated between steps: C^-1 Z for a banded lower-triangular Toeplitz matrix C.

Source: Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization" (arXiv 2306.08153),
Algorithm 9; strategies of McKenna 2024 (arXiv 2405.15913). With c the first column of C (b numbers)
and g_t the bounded sum of step t:

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

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import optimize, signal

from dpfl_jax.errors import BadInputError
from dpfl_jax.noise.correlated import correlated
from dpfl_jax.noise.transform import Noise, transformation
from dpfl_jax.noise.workload import PREFIX_SUMS, Workload


@functools.lru_cache(maxsize=256)
def strategy(bands: int, steps: int, workload: Workload = PREFIX_SUMS) -> tuple[float, ...]:
    """The first column of the C whose noise has the least mean square in a workload.

    At sensitivity 1 (a column's norm). McKenna 2024 finds it by gradients, in O(steps bands) each.

    Args:
      bands: b, numbers of the column that are not 0.
      steps: T, rows and columns of C.
      workload: what an optimiser makes of the noise.

    Returns:
      b float32 numbers, of norm 1 up to rounding.

    Raises:
      BadInputError: more bands than steps.
    """
    if not 1 <= bands <= steps:
        raise BadInputError(
            f"mechanism.bands is {bands}, but it must be at least 1 and at most the {steps} steps"
        )
    if bands == 1:
        return (1.0,)
    columns, given = workload.columns(steps), workload.response(steps)

    def loss(later: np.ndarray) -> tuple[float, np.ndarray]:
        """Logarithm of error times norm of (1, later), and its gradient."""
        column = np.r_[1.0, later]
        first = signal.lfilter([1.0], column, given)  # as in prefix_error
        change = signal.lfilter([1.0], column, first)  # -d first / d column_j, delayed by j
        moved = columns.moved(first)
        error, norm = np.vdot(columns.weights, moved**2), column @ column
        if not np.isfinite(error * (change @ change)):  # so long a step that C^-1 explodes
            return 1e3, np.zeros(bands - 1)
        weighted = columns.pulled(columns.weights * moved)
        slope = np.array([(weighted[j:] * change[:-j]).sum() for j in range(1, bands)])
        return np.log(error * norm), 2 * later / norm - 2 * slope / error

    if workload == PREFIX_SUMS:  # from the best with as many bands as steps (Fichtenberger 2023)
        k = np.arange(1, bands)
        start = np.cumprod((2 * k - 1) / (2 * k))
    else:  # from the best of prefix sums, which is never worse
        plain = np.array(strategy(bands, steps))
        start = plain[1:] / plain[0]
    tight = {"ftol": 1e-14, "gtol": 1e-9, "maxiter": 500}
    with np.errstate(over="ignore", invalid="ignore"):
        best = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=tight).x
    column = np.r_[1.0, best]
    return tuple(np.asarray(column / np.linalg.norm(column), np.float32).tolist())


def prefix_error(column: tuple[float, ...], steps: int, workload: Workload = PREFIX_SUMS) -> float:
    """``Workload.error`` of the C with first column ``column``, in ``steps`` steps."""
    return workload.error(signal.lfilter([1.0], column, workload.response(steps)))


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
      As ``correlated``, with arrays [bands - 1, ...], in which step t stands at t modulo
      (bands - 1).

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

    def past(kept: jax.Array, step: jax.Array) -> jax.Array:
        """c_1 kept_{t-1} + ... + c_{b-1} kept_{t-b+1}: one after the other, alike everywhere."""

        def more(i: jax.Array, total: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_index_in_dim(kept, (step - 1 - i) % window, keepdims=False)
            return total + later[i] * row

        return jax.lax.fori_loop(0, window, more, jnp.zeros_like(kept[0]))

    def encode(g: jax.Array, kept: jax.Array, step: jax.Array) -> tuple[jax.Array, None]:
        return first * g + past(kept, step), None

    def decode(y: jax.Array, kept: jax.Array, step: jax.Array) -> jax.Array:
        return (y - past(kept, step)) / first

    def keep(kept: jax.Array, new: jax.Array, step: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(kept, new, step % window, 0)

    return correlated(noise, divisor, (window, window), encode, decode, keep)
