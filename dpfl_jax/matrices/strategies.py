"""Strategy matrices K whose noise K^-1 Z has the least mean square in a workload.

K is lower triangular and Toeplitz, so its first column determines it.

``banded_strategy``: K has b bands. Choquette-Choo et al. 2023, "(Amplified) Banded Matrix
Factorization" (arXiv 2306.08153); McKenna 2024 (arXiv 2405.15913).

``inverse_strategy``: K^-1 has b bands; its first column is 1, -f_1, ..., -f_{b-1} with all f >= 0.
Kalinin, McKenna, Upadhyay and Lampert 2025, "Back to square roots" (arXiv 2505.12128), take the
bands of a square root (BISR); here the bands are optimised for the run.

``buffered_strategy``: with decays d and scales w of B buffers the first column of K is
1, sum w_i, sum w_i d_i, sum w_i d_i^2, ... (a buffered linear Toeplitz matrix, BLT). Dvijotham et
al. 2024 (arXiv 2404.16706); McMahan, Xu and Xu 2024, "A hassle-free algorithm for private learning
in practice" (arXiv 2408.08868), for users who take part several times.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import optimize, signal, special

from dpfl_jax.accounting.cells import StrategyMatrix
from dpfl_jax.errors import at_least, require
from dpfl_jax.matrices.workload import PREFIX_SUMS, Workload

MOST_BANDS = 64
MOST_BUFFERS = 16

Buffers = tuple[tuple[float, ...], tuple[float, ...]]
"""Decays and scales, one of each per buffer; float32 represents them exactly."""


@functools.lru_cache(maxsize=256)
def banded_strategy(bands: int, steps: int, workload: Workload = PREFIX_SUMS) -> tuple[float, ...]:
    """Returns the first column of the K of b bands whose noise has the least mean square.

    Its sensitivity, a column's norm, is 1. As in McKenna 2024 it is found by gradient descent, with
    O(steps bands) operations for each gradient.

    Args:
      bands: b, the number of entries of the column that are not 0.
      steps: T, rows and columns of K.
      workload: how the optimiser adds up the noise.

    Returns:
      b float32 numbers, of norm 1 up to rounding.

    Raises:
      BadInputError: there are more bands than steps.

    Examples:
      >>> from dpfl_jax.matrices import banded_strategy
      >>> column = banded_strategy(bands=2, steps=16)
      >>> len(column), round(sum(x**2 for x in column), 3)
      (2, 1.0)
    """
    wanted = f"at least 1 and at most the {steps} steps"
    require(1 <= bands <= steps, "mechanism.bands", bands, wanted)
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
        if not np.isfinite(error * (change @ change)):  # the step was too long: K^-1 explodes
            return 1e3, np.zeros(bands - 1)
        weighted = columns.pulled(columns.weights * moved)
        slope = np.array([(weighted[j:] * change[:-j]).sum() for j in range(1, bands)])
        return np.log(error * norm), 2 * later / norm - 2 * slope / error

    if workload == PREFIX_SUMS:  # start at the optimum for b = T (Fichtenberger et al. 2023)
        k = np.arange(1, bands)
        start = np.cumprod((2 * k - 1) / (2 * k))
    else:  # start at the optimum for prefix sums, so that the result is never worse
        plain = np.array(banded_strategy(bands, steps))
        start = plain[1:] / plain[0]
    tight = {"ftol": 1e-14, "gtol": 1e-9, "maxiter": 500}
    with np.errstate(over="ignore", invalid="ignore"):
        best = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=tight).x
    column = np.r_[1.0, best]
    return tuple(np.asarray(column / np.linalg.norm(column), np.float32).tolist())


def prefix_error(column: tuple[float, ...], steps: int, workload: Workload = PREFIX_SUMS) -> float:
    """Returns ``Workload.error`` of the K with first column ``column``, over ``steps`` steps.

    Examples:
      >>> from dpfl_jax.matrices import banded_strategy, prefix_error
      >>> prefix_error(banded_strategy(4, 64), steps=64) < prefix_error((1.0,), steps=64)
      True
    """
    return workload.error(signal.lfilter([1.0], column, workload.response(steps)))


def best_banded(steps: int, separation: int | None, *, bands: int = 4) -> StrategyMatrix:
    """Returns the K of b bands that is best for prefix sums over ``steps`` steps.

    Examples:
      >>> from dpfl_jax.matrices import best_banded
      >>> len(best_banded(64, separation=16, bands=4).column)
      4
    """
    return StrategyMatrix(banded_strategy(bands, steps), "banded")


def inverse_column(coefficients: tuple[float, ...], steps: int) -> np.ndarray:
    """Returns the first column of the K whose inverse has these f, float64 [steps].

    Examples:
      >>> from dpfl_jax.matrices import inverse_column
      >>> inverse_column((0.5,), steps=4).round(4).tolist()
      [1.0, 0.5, 0.25, 0.125]
    """
    return np.asarray(signal.lfilter([1.0], _inverse(coefficients), np.eye(1, steps)[0]))


def inverse_bound(coefficients: tuple[float, ...], steps: int) -> np.ndarray:
    """Returns the first column of K rounded up to one that does not increase, float64 [steps].

    So accounting by it for users who take part at least some number of steps apart gives a bound,
    which is exact if K's column does not increase.

    Args:
      coefficients: f, numbers >= 0 with a sum of at most 1.
      steps: T, at least 1.

    Examples:
      >>> from dpfl_jax.matrices import inverse_bound
      >>> inverse_bound((0.5,), steps=4).round(4).tolist()
      [1.0, 0.5, 0.25, 0.125]
    """
    column = inverse_column(coefficients, steps)
    # These are sums of products of numbers >= 0, whose relative errors add up over the steps.
    upwards = 1 + (steps * (len(coefficients) + 2) + 8) * 2.0**-52
    column = np.r_[1.0, np.minimum(column[1:] * upwards, 1.0)]
    return np.maximum.accumulate(column[::-1])[::-1]


def inverse_error(
    coefficients: tuple[float, ...], steps: int, workload: Workload = PREFIX_SUMS
) -> float:
    """Returns ``Workload.error`` of the K whose inverse has these f, over ``steps`` steps.

    Examples:
      >>> from dpfl_jax.matrices import inverse_error
      >>> inverse_error((0.5,), steps=64) < 1.0
      True
    """
    return workload.error(signal.lfilter(_inverse(coefficients), [1.0], workload.response(steps)))


@functools.lru_cache(maxsize=256)
def inverse_strategy(
    bands: int, steps: int, separation: int, workload: Workload = PREFIX_SUMS
) -> tuple[float, ...]:
    """Returns the bands of the K^-1 whose noise has the least mean square, at fixed sensitivity.

    The sensitivity is that of a user who takes part in every ``separation``-th step from the first.

    Args:
      bands: b, at least 2.
      steps: T.
      separation: s.
      workload: how the optimiser adds up the noise.

    Returns:
      f: b - 1 float32 numbers >= 0 whose sum is below 1.

    Raises:
      BadInputError: there are too few or too many bands.

    Examples:
      >>> from dpfl_jax.matrices import inverse_strategy
      >>> len(inverse_strategy(3, 64, 16))
      2
    """
    at_least("mechanism.bands", bands, 2, most=MOST_BANDS)
    columns, responses = workload.columns(steps), workload.response(steps)
    participation = _participation(steps, separation)
    delays = np.arange(1, bands)

    def parse(given: np.ndarray) -> tuple[float, np.ndarray]:
        """The sum of f, and each number's share of it."""
        return float(special.expit(given[0])), special.softmax(given[1:])

    def noise_slope(weighted: np.ndarray) -> np.ndarray:
        """-d noise / d f_j, summed over all noise with its weights."""
        if workload == PREFIX_SUMS:
            return np.r_[np.cumsum(weighted[::-1])[::-1], np.zeros(bands)][delays]
        return np.array([(weighted[j:] * responses[: max(steps - j, 0)]).sum() for j in delays])

    def loss(given: np.ndarray) -> tuple[float, np.ndarray]:
        """Logarithm of error times sensitivity, squared, and its gradient."""
        total, shares = parse(given)
        inverse = _inverse(tuple(total * shares))
        noise = columns.moved(signal.lfilter(inverse, [1.0], responses))
        moved = signal.lfilter([1.0], inverse, participation)
        change = signal.lfilter([1.0], inverse, moved)  # d moved / d f_j, delayed by j
        error, reach = (columns.weights * noise**2).sum(), (moved**2).sum()
        weighted = columns.pulled(columns.weights * noise)
        lost = noise_slope(weighted)
        gained = [(moved[j:] * change[: steps - j]).sum() for j in delays]
        slope = 2 * (np.array(gained) / reach - lost / error)
        mean = (slope * shares).sum()
        by_total = mean * total * (1 - total)
        return math.log(error * reach), np.r_[by_total, total * shares * (slope - mean)]

    start = np.cumprod((2 * delays - 1) / (2 * delays)) / (2 * delays - 1)  # the bands of BISR
    if workload != PREFIX_SUMS:  # start at the optimum for prefix sums, so as to be never worse
        start = np.maximum(inverse_strategy(bands, steps, separation), 1e-6)
    best = _minimise(loss, np.r_[special.logit(min(start.sum(), 0.999)), np.log(start)])
    total, shares = parse(best.x)
    numbers = [_rounded(min(total, 0.999) * share) for share in shares]
    return tuple(np.asarray(numbers, np.float32).tolist())


def best_banded_inverse(steps: int, separation: int, *, bands: int = 3) -> StrategyMatrix:
    """Returns the K with b bands in K^-1 that is best for prefix sums over ``steps`` steps.

    Examples:
      >>> from dpfl_jax.matrices import best_banded_inverse
      >>> best_banded_inverse(64, separation=16, bands=3).kind
      'full'
    """
    return inverse_matrix(inverse_strategy(bands, steps, separation), steps)


def inverse_matrix(coefficients: tuple[float, ...], steps: int) -> StrategyMatrix:
    """Returns the K whose inverse has these f, with its bounding column.

    Examples:
      >>> from dpfl_jax.matrices import inverse_matrix
      >>> inverse_matrix((0.5,), steps=3).column
      (1.0, 0.5, 0.25)
    """
    column, bound = inverse_column(coefficients, steps), inverse_bound(coefficients, steps)
    return StrategyMatrix(tuple(column.tolist()), "full", tuple(bound.tolist()))


def _inverse(coefficients: tuple[float, ...]) -> np.ndarray:
    """The first column of K^-1 without its trailing zeros."""
    return np.r_[1.0, -np.asarray(coefficients, float)]


def _participation(steps: int, separation: int) -> np.ndarray:
    """1 at every ``separation``-th step, else 1e-100: with 0, slow subnormal numbers appear."""
    row = np.full(steps, 1e-100)
    row[::separation] = 1.0
    return row


def _minimise(loss: Callable[[np.ndarray], tuple[float, np.ndarray]], start: np.ndarray) -> Any:
    options = {"ftol": 1e-13, "gtol": 1e-8, "maxiter": 1000, "maxcor": 20}
    return optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=options)


def _rounded(number: float) -> float:
    """Four digits: the rest depends on the machine and hardly changes the error."""
    return float(f"{number:.4g}")


def buffered_column(buffers: Buffers, steps: int) -> np.ndarray:
    """Returns the first column of K, rounded up, float64 [steps]; it does not increase.

    Args:
      buffers: decays in [0, 1], and scales >= 0 with a sum of at most 1.
      steps: T, at least 1.

    Examples:
      >>> from dpfl_jax.matrices import buffered_column
      >>> buffered_column(((0.5,), (0.25,)), steps=4).round(4).tolist()
      [1.0, 0.25, 0.125, 0.0625]
    """
    column = np.zeros(steps)
    for decay, scale in zip(*buffers, strict=True):
        column[1:] += scale * np.cumprod(np.r_[1.0, np.full(max(steps - 2, 0), decay)])[: steps - 1]
    # Each entry is a sum of products of at most steps + 1 numbers. No entry is above 1.
    upwards = 1 + (steps + len(buffers[0]) + 8) * 2.0**-52
    return np.r_[1.0, np.minimum(column[1:] * upwards, 1.0)]


def buffered_error(buffers: Buffers, steps: int, workload: Workload = PREFIX_SUMS) -> float:
    """Returns ``Workload.error`` of the K with these buffers, over ``steps`` steps.

    Examples:
      >>> from dpfl_jax.matrices import buffered_error
      >>> buffered_error(((0.5,), (0.25,)), steps=64) < 1.0
      True
    """
    decays, scales = map(np.asarray, buffers)
    return workload.error(_divided(decays, scales, workload.response(steps)))


@functools.lru_cache(maxsize=256)
def buffered_strategy(
    buffers: int, steps: int, separation: int, workload: Workload = PREFIX_SUMS
) -> Buffers:
    """Returns the buffers whose noise has the least mean square, at fixed sensitivity.

    The sensitivity is that of a user who takes part in every ``separation``-th step from the first
    (McMahan et al. 2024, section 3). Filters compute it in O(steps buffers).

    Args:
      buffers: B, at least 1.
      steps: T.
      separation: s.
      workload: how the optimiser adds up the noise.

    Raises:
      BadInputError: there are too few or too many buffers.

    Examples:
      >>> from dpfl_jax.matrices import buffered_strategy
      >>> decays, scales = buffered_strategy(2, 64, 16)
      >>> len(decays), len(scales)
      (2, 2)
    """
    at_least("mechanism.buffers", buffers, 1, most=MOST_BUFFERS)
    if steps == 1:
        return (0.5,) * buffers, (0.0,) * buffers
    columns, responses = workload.columns(steps), workload.response(steps)
    participation = _participation(steps, separation)

    def parse(given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Decays, and scales with a sum below 1: the inverse of ``_searched``."""
        odds = np.exp(given[buffers:])
        return special.expit(given[:buffers]), odds / (1 + odds.sum())

    def loss(given: np.ndarray) -> tuple[float, np.ndarray]:
        """Logarithm of error times sensitivity, squared, and its gradient."""
        decays, scales = parse(given)
        first = _divided(decays, scales, responses)
        change = _divided(decays, scales, first)  # -d first / d column_j, delayed by j
        parts = [_delayed(decay, participation) for decay in decays]
        moved = participation + sum(scale * part for scale, part in zip(scales, parts, strict=True))
        # Sums instead of dot products, whose threads would only wait for each other.
        noise = columns.moved(first)
        error, reach = (columns.weights * noise**2).sum(), (moved**2).sum()
        weighted = columns.pulled(columns.weights * noise)
        slopes = np.zeros((2, buffers))
        for i, (decay, part) in enumerate(zip(decays, parts, strict=True)):
            late = _delayed(decay, change)
            later = (_delayed(decay, late), _delayed(decay, part))
            for row, (up, down) in enumerate([later, (late, part)]):
                gained, paid = (moved * down).sum() / reach, (weighted * up).sum() / error
                slopes[row, i] = 2 * (gained - paid)
        slopes[0] *= scales * decays * (1 - decays)
        slopes[1] = scales * (slopes[1] - (scales * slopes[1]).sum())
        return math.log(error * reach), slopes.ravel()

    # The sooner users return, the shorter the best memory.
    spans = sorted({min(separation, steps), min(10 * separation, steps)})
    starts = [_start(buffers, steps, span) for span in spans]
    if workload != PREFIX_SUMS:  # start at the optimum for prefix sums, too, to be never worse
        decays, scales = map(np.array, buffered_strategy(buffers, steps, separation))
        decays, scales = np.clip(decays, 1e-6, 1 - 1e-9), np.maximum(scales, 1e-6)
        starts.append(_searched(decays, scales, 0.999))
    results = (_minimise(loss, start) for start in starts)
    best = min(results, key=lambda result: float(result.fun))
    decays, scales = parse(best.x)
    scales *= min(1.0, 0.999 / scales.sum())  # at most 1 when they are rounded
    pairs = ((1 - _rounded(1 - d), _rounded(w)) for d, w in zip(decays, scales, strict=True))
    numbers = np.array(sorted(pairs, reverse=True), np.float32).T
    return tuple(numbers[0].tolist()), tuple(numbers[1].tolist())


def best_buffered(steps: int, separation: int, *, buffers: int = 2) -> StrategyMatrix:
    """Returns the K of B buffers that is best for prefix sums over ``steps`` steps.

    Examples:
      >>> from dpfl_jax.matrices import best_buffered
      >>> best_buffered(64, separation=16, buffers=2).kind
      'full'
    """
    chosen = buffered_strategy(buffers, steps, separation)
    return StrategyMatrix(tuple(buffered_column(chosen, steps).tolist()), "full")


def _start(buffers: int, steps: int, span: int) -> np.ndarray:
    """Buffers near the best column for one participation (Fichtenberger et al. 2023)."""
    decays = 1 - np.geomspace(0.6, 1 / max(span, 2), buffers)
    if buffers == 1:
        decays = np.array([1 - max(span, 2) ** -0.5])
    j = np.arange(1, steps)
    column = np.cumprod((2 * j - 1) / (2 * j))
    weight = np.sqrt(column)[:, None]
    scales, _ = optimize.nnls(decays ** (j[:, None] - 1) / weight, weight[:, 0])
    return _searched(decays, np.maximum(scales, 1e-3 / buffers), 0.9)


def _searched(decays: np.ndarray, scales: np.ndarray, most: float) -> np.ndarray:
    """The variables of the search: logits of decays, and log(scale / (1 - sum of scales)).

    Scales whose sum is above ``most`` are shrunk to it.
    """
    scales = scales * min(1.0, most / scales.sum())
    return np.r_[special.logit(decays), np.log(scales / (1 - scales.sum()))]


def _delayed(decay: float, rows: np.ndarray) -> np.ndarray:
    """The content of a buffer before each row."""
    return np.asarray(signal.lfilter([0.0, 1.0], [1.0, -decay], rows))


def _divided(decays: np.ndarray, scales: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """K^-1 times rows, by one factor (1 - d_i x) / (1 - e_i x) of 1 / K after the other.

    The poles e are eigenvalues of a symmetric matrix and lie between the d, so that no factor
    grows. Multiplied out, the polynomials would lose all their digits.
    """
    order, root = np.argsort(decays), np.sqrt(scales)
    poles = np.linalg.eigvalsh(np.diag(decays) - np.outer(root, root))
    for decay, pole in zip(decays[order], poles, strict=True):
        rows = signal.lfilter([1.0, -decay], [1.0, -pole], rows)
    return rows
