"""The loss of a Gaussian sum in which a unit takes part in one of t steps, uniformly.

Without the unit the outputs are N(0, 1) each, in units of the noise; with it that of one step, I,
has mean s = 1 / sigma. The ratio of the densities is the mean of t independent X = e^(s y - s^2/2),
each of which has mean 1 without the unit (Feldman and Shenfeld 2026, arXiv 2602.17284). Adaptive
steps leak no more: whatever came before, a step of theirs can be computed from y alone.

With S the ratio, both divergences are expectations of convex functions of S without the unit:
removing E max(0, S - e^eps), adding E max(0, 1 - e^eps S). So they are bounded from above by any
mean-preserving spread of S, and a mean of two spreads is a spread of the mean. That is all the
rounding here: a value between two points of a grid goes to both, and keeps its mean; what lies off
the grid goes to its end and to 0, or to its end and to infinity.

On a grid of log S, log((e^a + e^b) / 2) is a plus a function of b - a: a mean of two costs as many
vector operations as there are differences. Means of 2, 4, 8, ... are made of each other.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from scipy import special

from dpfl_jax.accounting.discretize import Atoms, StepLoss

_COARSE = 0.4
_MOST_CELLS = 6000  # of a table: a mean of two takes its square


@dataclasses.dataclass(frozen=True)
class _Ratio:
    """A spread of the mean of some X.

    Attributes:
      terms: how many.
      grid: step of log S.
      low: index of the first value: its log is ``low * grid``.
      probs: float64 [n], without the unit.
      zero: probability of S = 0, without the unit.
      infinity: of S infinite, with the unit.
    """

    terms: int
    grid: float
    low: int
    probs: np.ndarray
    zero: float
    infinity: float

    @property
    def logs(self) -> np.ndarray:
        """float64 [n], log S."""
        return (self.low + np.arange(len(self.probs))) * self.grid

    def finer(self, times: int) -> _Ratio:
        """The same values on a finer grid."""
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
        # To the end with all of the mean, and to zero.
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
    # Of outputs: without the unit, and with it; both tails without cancellation.
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
    """A spread of the mean of all terms of both, on a grid ``times`` finer than theirs."""
    a, b, n, m = one.probs, other.probs, len(one.probs), len(other.probs)
    terms, grid, alike = one.terms + other.terms, one.grid / times, one is other
    share = other.terms / terms
    apart = np.arange(0 if alike else 1 - n, m) + other.low - one.low
    # proof: allocation-event-2
    # log S - log a for each difference of their logs, in cells of the grid.
    moved = np.logaddexp(math.log1p(-share), math.log(share) + apart * one.grid)
    cell = np.floor(moved / grid).astype(int)
    up = np.clip(np.expm1(moved - cell * grid) / math.expm1(grid), 0.0, 1.0)
    first = min(one.low, other.low) * times - 1
    probs = np.zeros(max(one.low + n, other.low + m) * times + 2 - first)
    for k, j in enumerate((apart + one.low - other.low).tolist()):
        low, high = max(0, -j), min(n, m - j)
        both = a[low:high] * b[low + j : high + j]
        if alike and j:  # and the other way round
            both *= 2.0
        start = (one.low + low) * times + int(cell[k]) - first
        stop = start + (len(both) - 1) * times + 1
        upper = up[k] * both
        both -= upper
        probs[start:stop:times] += both
        probs[start + 1 : stop + 1 : times] += upper
    # The mean of 0 and S is spread over 0 and S.
    zero = one.zero * other.zero
    for ratio, weight in ((one, other.zero * (1.0 - share)), (other, one.zero * share)):
        start = ratio.low * times - first
        probs[start : start + (len(ratio.probs) - 1) * times + 1 : times] += weight * ratio.probs
    zero += one.zero * (1.0 - share) * float(b.sum()) + other.zero * share * float(a.sum())
    infinity = (1.0 - share) * one.infinity + share * other.infinity
    return _Ratio(terms, grid, first, probs, zero, infinity)


def allocated(sigma: float, taken: int, steps: int, spacing: float, log_tail: float) -> StepLoss:
    """The loss of all steps together, in cells of about this size, or larger ones if need be.

    Args:
      sigma: noise multiplier of a step, at least 0.1.
      taken: r, at least 1, the number of steps so far.
      steps: t, in one of which, uniformly, a unit takes part.
      spacing: length of a cell, in standard deviations of log S.
      log_tail: log of the probability that may become an infinite loss.

    Returns:
      Losses of both directions.
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
    """As ``allocated``, and the number of cells of the largest table.

    Cells are a quarter of the spacing, as many means round.
    """
    shift, spacing = 1.0 / sigma, 0.25 * spacing
    lost = math.exp(log_tail) / (2.0 * taken.bit_length() + 2.0)

    def mean(one: _Ratio, other: _Ratio) -> _Ratio:
        """The mean of both, on a grid that fits the deviation of log S, a power of two finer."""
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
    # Sums of as many products as there are values, and their logs, rounded upwards.
    probs, slack = whole.probs * (1.0 + 1e-11), 1e-12
    logs, rest, part = whole.logs, (steps - taken) / steps, taken / steps
    missing = math.inf  # the loss where S is 0
    if rest > 0.0:  # with this probability the unit's step is a later one, and S is 1
        logs, missing = np.logaddexp(math.log(rest), math.log(part) + logs), -math.log(rest)
    remove = Atoms(logs + slack, probs * np.exp(logs), part * whole.infinity)
    add = Atoms(slack - logs, probs, 0.0)
    if rest > 0.0:
        remove = remove.with_atom(-missing, whole.zero * rest)
        add = add.with_atom(missing, whole.zero)
    else:
        add = dataclasses.replace(add, infinity=whole.zero)
    return StepLoss(remove, add), max(cells)
