"""The banded matrix K whose noise K^-1 Z has the least mean square in a workload.

Source: Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization" (arXiv 2306.08153);
McKenna 2024 (arXiv 2405.15913). K is lower triangular and Toeplitz, with b numbers in a column.
"""

from __future__ import annotations

import functools

import numpy as np
from scipy import optimize, signal

from dpfl_jax.accounting.cells import StrategyMatrix
from dpfl_jax.errors import BadInputError
from dpfl_jax.matrices.workload import PREFIX_SUMS, Workload


@functools.lru_cache(maxsize=256)
def strategy(bands: int, steps: int, workload: Workload = PREFIX_SUMS) -> tuple[float, ...]:
    """The first column of the K whose noise has the least mean square in a workload.

    At sensitivity 1 (a column's norm). McKenna 2024 finds it by gradients, in O(steps bands) each.

    Args:
      bands: b, numbers of the column that are not 0.
      steps: T, rows and columns of K.
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
        if not np.isfinite(error * (change @ change)):  # so long a step that K^-1 explodes
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
    """``Workload.error`` of the K with first column ``column``, in ``steps`` steps."""
    return workload.error(signal.lfilter([1.0], column, workload.response(steps)))


def best_banded(steps: int, separation: int | None, *, bands: int = 4) -> StrategyMatrix:
    """K of the banded noise that is best for sums over these steps."""
    del separation
    return StrategyMatrix(strategy(bands, steps), "banded")
