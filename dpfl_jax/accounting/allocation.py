"""The privacy loss of random allocation: a unit takes part in one of t Gaussian sums, uniformly.

In units of the noise, without the unit every output y is N(0, 1); with it the output of one step
has mean s = 1 / sigma. The likelihood ratio is the mean of t independent X = e^(s y - s^2/2), each
of which has mean 1 without the unit (Feldman and Shenfeld 2026, arXiv 2602.17284). Adaptive steps
leak no more, because each of them can be computed from y and the steps before it.

With S the ratio, both divergences are expectations of convex functions of S without the unit:
E max(0, S - e^eps) for removing it, E max(0, 1 - e^eps S) for adding it. So any mean-preserving
spread of S bounds them from above, and a mean of two spreads is a spread of the mean. All rounding
here is such a spread: a value between two points of a grid is split between both so that its mean
stays, and a value off the grid between the grid's end and 0, or the grid's end and infinity.

On a grid of log S, log((e^a + e^b) / 2) is a plus a function of b - a, so a mean of two ratios
costs as many vector operations as there are differences. Means of 2, 4, 8, ... terms are computed
by doubling.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from scipy import special

from dpfl_jax.accounting.discretize import Atoms, StepLoss

_COARSE = 0.4
_MOST_CELLS = 6000  # of a table; a mean of two ratios takes the square of this


@dataclasses.dataclass(frozen=True)
class _Ratio:
    """A spread of the mean S of several X.

    Attributes:
      terms: number of X.
      grid: step of log S.
      low: index of the first value, whose log is ``low * grid``.
      probs: float64 [n], probabilities of the values without the unit.
      zero: probability of S = 0 without the unit.
      infinity: probability of infinite S with the unit.
    """

    terms: int
    grid: float
    low: int
    probs: np.ndarray
    zero: float
    infinity: float

    @property
    def logs(self) -> np.ndarray:
        """log S, float64 [n]."""
        return (self.low + np.arange(len(self.probs))) * self.grid

    def finer(self, times: int) -> _Ratio:
        """The ratio on a grid that is finer by a factor ``times``; values stay."""
        probs = np.zeros((len(self.probs) - 1) * times + 1)
        probs[::times] = self.probs
        return dataclasses.replace(self, grid=self.grid / times, low=self.low * times, probs=probs)

    def trimmed(self, lost: float) -> _Ratio:
        """Cuts off ends of probability ``lost``: the lower without the unit, the upper with it."""
        logs, here = self.logs, self.probs
        there = here * np.exp(logs)
        first = int(np.searchsorted(np.cumsum(here), lost, side="right"))
        end = len(here) - int(np.searchsorted(np.cumsum(there[::-1]), lost, side="right"))
        end = max(end, first + 1)
        kept = here[first:end].copy()
        # Split the lower end between the first value kept, with all of the mean, and zero.
        up = float((here[:first] * np.exp(logs[:first] - logs[first])).sum())
        kept[0] += up
        kept[-1] += here[end:].sum()
        zero = self.zero + max(float(here[:first].sum()) - up, 0.0)
        infinity = self.infinity - float((there[end:] * np.expm1(logs[end - 1] - logs[end:])).sum())
        return _Ratio(self.terms, self.grid, self.low + first, kept, zero, infinity)


def _single(shift: float, grid: float, lost: float) -> _Ratio:
    """A spread of X itself."""
    reach = -float(special.ndtri_exp(math.log(lost)))
    low = math.floor((-0.5 * shift - reach) * shift / grid)
    high = math.ceil((0.5 * shift + reach) * shift / grid)
    logs = np.arange(low, high + 1) * grid
    # Probabilities of cells of y, without the unit and with it; tails without cancellation.
    cells = []
    for mean in (0.0, shift):
        y = logs / shift + 0.5 * shift - mean
        below, above = special.ndtr(y), special.ndtr(-y)
        inside = np.where(y[:-1] > 0.0, above[:-1] - above[1:], below[1:] - below[:-1])
        cells.append(np.concatenate([[below[0]], inside, [above[-1]]]))
    here, there = cells
    edge = np.exp(logs)
    up = np.clip((there[1:-1] / edge[:-1] - here[1:-1]) / math.expm1(grid), 0.0, here[1:-1])
    probs = np.zeros(len(logs))
    probs[:-1] += here[1:-1] - up
    probs[1:] += up
    probs[0] += there[0] / edge[0]
    probs[-1] += here[-1]
    zero = max(here[0] - there[0] / edge[0], 0.0)
    infinity = max(there[-1] - here[-1] * edge[-1], 0.0)
    return _Ratio(1, grid, low, probs, zero, infinity)


def _mean(one: _Ratio, other: _Ratio, times: int) -> _Ratio:
    """A spread of the mean of all terms of both, on a grid finer by a factor ``times``."""
    a, b, n, m = one.probs, other.probs, len(one.probs), len(other.probs)
    terms, grid, alike = one.terms + other.terms, one.grid / times, one is other
    share = other.terms / terms
    apart = np.arange(0 if alike else 1 - n, m) + other.low - one.low
    # proof: allocation-event-2
    # log S - log a for each difference between the logs of b and a, in cells of the finer grid.
    moved = np.logaddexp(math.log1p(-share), math.log(share) + apart * one.grid)
    cell = np.floor(moved / grid).astype(int)
    up = np.clip(np.expm1(moved - cell * grid) / math.expm1(grid), 0.0, 1.0)
    first = min(one.low, other.low) * times - 1
    probs = np.zeros(max(one.low + n, other.low + m) * times + 2 - first)
    for k, j in enumerate((apart + one.low - other.low).tolist()):
        low, high = max(0, -j), min(n, m - j)
        both = a[low:high] * b[low + j : high + j]
        if alike and j:  # a and b exchanged
            both *= 2.0
        start = (one.low + low) * times + int(cell[k]) - first
        stop = start + (len(both) - 1) * times + 1
        upper = up[k] * both
        both -= upper
        probs[start:stop:times] += both
        probs[start + 1 : stop + 1 : times] += upper
    # Spread the mean of 0 and S over 0 and S.
    zero = one.zero * other.zero
    for ratio, weight in ((one, other.zero * (1.0 - share)), (other, one.zero * share)):
        start = ratio.low * times - first
        probs[start : start + (len(ratio.probs) - 1) * times + 1 : times] += weight * ratio.probs
    zero += one.zero * (1.0 - share) * float(b.sum()) + other.zero * share * float(a.sum())
    infinity = (1.0 - share) * one.infinity + share * other.infinity
    return _Ratio(terms, grid, first, probs, zero, infinity)


def allocated(sigma: float, taken: int, steps: int, spacing: float, log_tail: float) -> StepLoss:
    """Returns the loss of the first ``taken`` steps together, in both directions.

    Args:
      sigma: noise multiplier of a step, at least 0.1.
      taken: r, the number of steps so far, at least 1.
      steps: t, the number of steps of which a unit takes part in one, uniformly.
      spacing: approximate length of a cell, in standard deviations of log S; larger if the table
        would have too many cells.
      log_tail: log of the probability that may be counted as an infinite loss.
    """
    coarse, cells = _allocated(sigma, taken, steps, _COARSE, log_tail)
    least = _COARSE * cells / _MOST_CELLS
    if spacing >= _COARSE or least >= _COARSE:
        return coarse
    return _allocated(sigma, taken, steps, max(spacing, least), log_tail)[0]


@functools.lru_cache(maxsize=64)
def _allocated(
    sigma: float, taken: int, steps: int, spacing: float, log_tail: float
) -> tuple[StepLoss, int]:
    """The result of ``allocated``, and the number of cells of the largest table.

    A cell is a quarter of ``spacing``, because each of many means rounds.
    """
    shift, spacing = 1.0 / sigma, 0.25 * spacing
    lost = math.exp(log_tail) / (2.0 * taken.bit_length() + 2.0)

    def mean(one: _Ratio, other: _Ratio) -> _Ratio:
        """The mean of both, on a grid finer by a power of two that fits the spread of log S."""
        deviation = math.sqrt(math.log1p(math.expm1(shift**2) / (one.terms + other.terms)))
        finer = max(0, round(math.log2(one.grid / (spacing * deviation))))
        whole = _mean(one, other, 2**finer).trimmed(lost)
        cells.append(len(whole.probs))
        return whole

    cells: list[int] = []
    power, whole, bits = _single(shift, spacing * min(shift, 1.0), lost), None, taken
    while True:
        if bits & 1:
            if whole is None:
                whole = power
            else:
                whole = mean(whole.finer(round(whole.grid / power.grid)), power)
        bits >>= 1
        if not bits:
            break
        power = mean(power, power)
    assert whole is not None
    cells.append(len(whole.probs))
    # Round upwards for the errors of the sums of products, and of their logs.
    probs, slack = whole.probs * (1.0 + 1e-11), 1e-12
    logs, rest, part = whole.logs, (steps - taken) / steps, taken / steps
    missing = math.inf  # the loss where S is 0
    if rest > 0.0:  # the probability that the unit's step is a later one, so that S is 1
        logs, missing = np.logaddexp(math.log(rest), math.log(part) + logs), -math.log(rest)
    remove = Atoms(logs + slack, probs * np.exp(logs), part * whole.infinity)
    add = Atoms(slack - logs, probs, 0.0)
    if rest > 0.0:
        remove = remove.with_atom(-missing, whole.zero * rest)
        add = add.with_atom(missing, whole.zero)
    else:
        add = dataclasses.replace(add, infinity=whole.zero)
    return StepLoss(remove, add), max(cells)
