"""Matrices K whose inverse has few bands, with the least noise K^-1 Z in a workload.

Source: Kalinin, McKenna, Upadhyay and Lampert 2025, "Back to square roots" (arXiv 2505.12128),
whose bands are those of a square root (BISR); here they are the best for a run. K is lower
triangular and Toeplitz; with f_1, ..., f_{b-1} of 0 or more, K^-1 has the first column 1, -f_1,
..., -f_{b-1}.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy import optimize, signal, special

from dpfl_jax.accounting.cells import StrategyMatrix
from dpfl_jax.errors import BadInputError
from dpfl_jax.matrices.workload import PREFIX_SUMS, Workload

MOST_BANDS = 64


def inverse_column(taken: tuple[float, ...], steps: int) -> np.ndarray:
    """The first column of K, float64 [steps], rounded upwards to one that never grows.

    No number is below that of K, and none below a later one: what is accounted by it for users who
    take part some steps apart or more is a bound, and exact where K's own column never grows.

    Args:
      taken: f, numbers of 0 or more that add up to 1 at most.
      steps: T, at least 1.
    """
    column = signal.lfilter([1.0], _bands(taken), np.eye(1, steps)[0])
    # Sums of products of numbers >= 0: each is off by its own operations and those before it.
    upwards = 1 + (steps * (len(taken) + 2) + 8) * 2.0**-52
    column = np.r_[1.0, np.minimum(column[1:] * upwards, 1.0)]
    return np.maximum.accumulate(column[::-1])[::-1]


def inverse_error(taken: tuple[float, ...], steps: int, workload: Workload = PREFIX_SUMS) -> float:
    """``Workload.error`` of these bands, in ``steps`` steps."""
    return workload.error(signal.lfilter(_bands(taken), [1.0], workload.response(steps)))


@functools.lru_cache(maxsize=256)
def inverse_strategy(
    bands: int, steps: int, separation: int, workload: Workload = PREFIX_SUMS
) -> tuple[float, ...]:
    """The bands whose noise has the least mean square in a workload, at one sensitivity.

    That of a user who takes part at every ``separation``-th step from the first on.

    Args:
      bands: b, at least 2.
      steps: T.
      separation: s.
      workload: what an optimiser makes of the noise.

    Returns:
      b - 1 numbers that float32 has, all 0 or more, which add up to less than 1.

    Raises:
      BadInputError: too few or too many bands.
    """
    if not 2 <= bands <= MOST_BANDS:
        raise BadInputError(
            f"mechanism.bands is {bands}, but it must be at least 2 and at most {MOST_BANDS}"
        )
    columns, responses = workload.columns(steps), workload.response(steps)
    turns = np.full(steps, 1e-100)  # not 0, on which filters end in subnormal numbers: slow
    turns[::separation] = 1.0
    delays = np.arange(1, bands)

    def taken_of(given: np.ndarray) -> tuple[float, np.ndarray]:
        """What is taken back in all, and the share of each step in it."""
        return float(special.expit(given[0])), special.softmax(given[1:])

    def reached(weighted: np.ndarray) -> np.ndarray:
        """-d noise / d f_j, of all noise together."""
        if workload == PREFIX_SUMS:
            return np.r_[np.cumsum(weighted[::-1])[::-1], np.zeros(bands)][delays]
        return np.array([(weighted[j:] * responses[: max(steps - j, 0)]).sum() for j in delays])

    def loss(given: np.ndarray) -> tuple[float, np.ndarray]:
        """Logarithm of error times sensitivity, squared, and its gradient."""
        whole, shares = taken_of(given)
        filtered = _bands(tuple(whole * shares))
        noise = columns.moved(signal.lfilter(filtered, [1.0], responses))
        moved = signal.lfilter([1.0], filtered, turns)
        change = signal.lfilter([1.0], filtered, moved)  # d moved / d f_j, delayed by j
        error, reach = (columns.weights * noise**2).sum(), (moved**2).sum()
        weighted = columns.pulled(columns.weights * noise)
        left = reached(weighted)
        gained = [(moved[j:] * change[: steps - j]).sum() for j in delays]
        slope = 2 * (np.array(gained) / reach - left / error)
        mean = (slope * shares).sum()
        own = mean * whole * (1 - whole)
        return math.log(error * reach), np.r_[own, whole * shares * (slope - mean)]

    start = np.cumprod((2 * delays - 1) / (2 * delays)) / (2 * delays - 1)  # of BISR
    if workload != PREFIX_SUMS:  # than the best of which it is never worse
        start = np.maximum(inverse_strategy(bands, steps, separation), 1e-6)
    best = optimize.minimize(
        loss,
        np.r_[special.logit(min(start.sum(), 0.999)), np.log(start)],
        jac=True,
        method="L-BFGS-B",
        options={"ftol": 1e-13, "gtol": 1e-8, "maxiter": 1000, "maxcor": 20},
    )
    whole, shares = taken_of(best.x)
    # Four digits: the error hardly feels them, and what a search ends with depends on the machine.
    numbers = [float(f"{min(whole, 0.999) * share:.4g}") for share in shares]
    return tuple(np.asarray(numbers, np.float32).tolist())


def best_banded_inverse(steps: int, separation: int, *, bands: int = 3) -> StrategyMatrix:
    """K of the noise with few bands of K^-1 that is best for sums over these steps."""
    taken = inverse_strategy(bands, steps, separation)
    return StrategyMatrix(tuple(inverse_column(taken, steps).tolist()), "toeplitz")


def _bands(taken: tuple[float, ...]) -> np.ndarray:
    """The first column of K^-1, as far as it is not 0."""
    return np.r_[1.0, -np.asarray(taken, float)]
