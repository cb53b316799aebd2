"""Buffered Toeplitz matrices K whose noise K^-1 Z has the least mean square in a workload.

Source: Dvijotham et al. 2024 (arXiv 2404.16706); McMahan, Xu and Xu 2024, "A hassle-free algorithm
for private learning in practice" (arXiv 2408.08868), for users who take part several times. K is
lower triangular; with decays d and scales w of B buffers its first column is
1, sum w_i, sum w_i d_i, sum w_i d_i^2, ...
"""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy import optimize, signal, special

from dpfl_jax.accounting.cells import StrategyMatrix
from dpfl_jax.errors import BadInputError
from dpfl_jax.matrices.workload import PREFIX_SUMS, Workload

MOST_BUFFERS = 16

Buffers = tuple[tuple[float, ...], tuple[float, ...]]
"""Decays and scales, one of each for every buffer; numbers that float32 has."""


def buffered_column(buffers: Buffers, steps: int) -> np.ndarray:
    """The first column of K, float64 [steps], rounded upwards; no number is above the one before.

    Args:
      buffers: decays in [0, 1], and scales of 0 or more that add up to 1 at most.
      steps: T, at least 1.
    """
    column = np.zeros(steps)
    for decay, scale in zip(*buffers, strict=True):
        column[1:] += scale * np.cumprod(np.r_[1.0, np.full(max(steps - 2, 0), decay)])[: steps - 1]
    # Each is a sum of products of steps + 1 numbers at most. None of them is above 1.
    upwards = 1 + (steps + len(buffers[0]) + 8) * 2.0**-52
    return np.r_[1.0, np.minimum(column[1:] * upwards, 1.0)]


def buffered_error(buffers: Buffers, steps: int, workload: Workload = PREFIX_SUMS) -> float:
    """``Workload.error`` of these buffers, in ``steps`` steps."""
    decays, scales = map(np.asarray, buffers)
    return workload.error(_divided(decays, scales, workload.response(steps)))


@functools.lru_cache(maxsize=256)
def buffered_strategy(
    buffers: int, steps: int, separation: int, workload: Workload = PREFIX_SUMS
) -> Buffers:
    """The buffers whose noise has the least mean square in a workload, at one sensitivity.

    That of a user who takes part at every ``separation``-th step from the first on (McMahan et al.
    2024, section 3). All is computed by filters, in O(steps buffers).

    Args:
      buffers: B, at least 1.
      steps: T.
      separation: s.
      workload: what an optimiser makes of the noise.

    Raises:
      BadInputError: too few or too many buffers.
    """
    if not 1 <= buffers <= MOST_BUFFERS:
        raise BadInputError(
            f"mechanism.buffers is {buffers}, but it must be at least 1 and at most {MOST_BUFFERS}"
        )
    if steps == 1:
        return (0.5,) * buffers, (0.0,) * buffers
    columns, responses = workload.columns(steps), workload.response(steps)
    turns = np.full(steps, 1e-100)  # not 0, on which filters end in subnormal numbers: slow
    turns[::separation] = 1.0

    def loss(given: np.ndarray) -> tuple[float, np.ndarray]:
        """Logarithm of error times sensitivity, squared, and its gradient."""
        decays, odds = special.expit(given[:buffers]), np.exp(given[buffers:])
        scales = odds / (1 + odds.sum())
        first = _divided(decays, scales, responses)
        change = _divided(decays, scales, first)  # -d first / d column_j, delayed by j
        parts = [_delayed(decay, turns) for decay in decays]
        moved = turns + sum(scale * part for scale, part in zip(scales, parts, strict=True))
        # Sums, not products of vectors: threads for so little work only wait for each other.
        noise = columns.moved(first)
        error, reach = (columns.weights * noise**2).sum(), (moved**2).sum()
        weighted = columns.pulled(columns.weights * noise)
        slopes = np.zeros((2, buffers))
        for i, (decay, part) in enumerate(zip(decays, parts, strict=True)):
            late = _delayed(decay, change)
            for row, up, down in (
                (1, late, part),
                (0, _delayed(decay, late), _delayed(decay, part)),
            ):
                gained, paid = (moved * down).sum() / reach, (weighted * up).sum() / error
                slopes[row, i] = 2 * (gained - paid)
        slopes[0] *= scales * decays * (1 - decays)
        slopes[1] = scales * (slopes[1] - (scales * slopes[1]).sum())
        return math.log(error * reach), slopes.ravel()

    # Users who come back soon want short memories.
    spans = sorted({min(separation, steps), min(10 * separation, steps)})
    starts = [_start(buffers, steps, span) for span in spans]
    if workload != PREFIX_SUMS:  # than the best of which it is never worse
        starts.append(_searched(buffered_strategy(buffers, steps, separation)))
    best = min(
        (
            optimize.minimize(
                loss,
                start,
                jac=True,
                method="L-BFGS-B",
                options={"ftol": 1e-13, "gtol": 1e-8, "maxiter": 1000, "maxcor": 20},
            )
            for start in starts
        ),
        key=lambda found: float(found.fun),
    )
    decays, odds = special.expit(best.x[:buffers]), np.exp(best.x[buffers:])
    scales = odds / (1 + odds.sum())
    scales *= min(1.0, 0.999 / scales.sum())  # at most 1 when they are rounded
    # Four digits: the error hardly feels them, and what a search ends with depends on the machine.
    pairs = ((1 - _rounded(1 - d), _rounded(w)) for d, w in zip(decays, scales, strict=True))
    numbers = np.array(sorted(pairs, reverse=True), np.float32).T
    return tuple(numbers[0].tolist()), tuple(numbers[1].tolist())


def best_buffered(steps: int, separation: int, *, buffers: int = 2) -> StrategyMatrix:
    """K of the buffered noise that is best for sums over these steps."""
    chosen = buffered_strategy(buffers, steps, separation)
    return StrategyMatrix(tuple(buffered_column(chosen, steps).tolist()), "toeplitz")


def _start(buffers: int, steps: int, span: int) -> np.ndarray:
    """Buffers near the best column for one participation (Fichtenberger et al. 2023)."""
    decays = 1 - np.geomspace(0.6, 1 / max(span, 2), buffers)
    if buffers == 1:
        decays = np.array([1 - max(span, 2) ** -0.5])
    j = np.arange(1, steps)
    column = np.cumprod((2 * j - 1) / (2 * j))
    weight = np.sqrt(column)[:, None]
    scales, _ = optimize.nnls(decays ** (j[:, None] - 1) / weight, weight[:, 0])
    scales = np.maximum(scales, 1e-3 / buffers)
    scales *= min(1.0, 0.9 / scales.sum())
    return np.r_[special.logit(decays), np.log(scales / (1 - scales.sum()))]


def _searched(found: Buffers) -> np.ndarray:
    """As what is searched over: logits of decays, and logarithms of scales over what they leave."""
    decays = np.clip(found[0], 1e-6, 1 - 1e-9)
    scales = np.maximum(found[1], 1e-6)
    scales *= min(1.0, 0.999 / scales.sum())
    return np.r_[special.logit(decays), np.log(scales / (1 - scales.sum()))]


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


def _delayed(decay: float, rows: np.ndarray) -> np.ndarray:
    """What a buffer holds before each row."""
    return np.asarray(signal.lfilter([0.0, 1.0], [1.0, -decay], rows))


def _divided(decays: np.ndarray, scales: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """K^-1 times rows, one factor (1 - d_i x) / (1 - e_i x) of 1 / K after the other.

    The poles e are eigenvalues of a symmetric matrix, and lie between the d: which is why no factor
    grows, where polynomials of all of them would lose their digits.
    """
    order, root = np.argsort(decays), np.sqrt(scales)
    poles = np.linalg.eigvalsh(np.diag(decays) - np.outer(root, root))
    for decay, pole in zip(decays[order], poles, strict=True):
        rows = signal.lfilter([1.0, -decay], [1.0, -pole], rows)
    return rows
