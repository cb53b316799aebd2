"""Composition of privacy losses by FFT, tilted so that small deltas keep their relative accuracy.

A plain FFT has an absolute error of about (number of steps) * 1e-16, which swamps small deltas.
Multiplying every step's distribution by e^(theta * loss) before the FFT, and undoing it after, puts
the accuracy where the answer is (exponential tilting, as in saddle-point approximations). What is
cut off or may have been lost to rounding is added to delta, so that answers stay upper bounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import fft, optimize

from dpfl_jax.accounting.discretize import LossPmf
from dpfl_jax.errors import BadInputError

# About 0.25 GB of temporary arrays, and half a second of FFT.
MAX_POINTS = 1 << 21
_LOG_CUT = math.log(1e-18)


class TableTooLargeError(BadInputError):
    """The composed table would not fit in memory on this grid."""


def _log_sum_exp(values: np.ndarray) -> float:
    """SciPy's, without its checks, which cost more than the sum on these short arrays."""
    top = float(values.max())
    return top + math.log(float(np.exp(values - top).sum()))


@dataclasses.dataclass(frozen=True)
class Part:
    """One kind of step: its loss distribution and how often it is run."""

    pmf: LossPmf
    count: int


class Composition:
    """One direction of adjacency of a sequence of steps (adaptive composition of PLDs)."""

    def __init__(self, parts: Sequence[Part]):
        """Args: parts: steps on one common grid, at least one."""
        self._parts = tuple(parts)
        self.grid = parts[0].pmf.grid
        self.steps = sum(part.count for part in parts)
        log_finite = sum(p.count * math.log1p(-min(p.pmf.infinity, 1.0 - 1e-16)) for p in parts)
        self.infinity = -math.expm1(log_finite)
        with np.errstate(divide="ignore"):
            self._logs = [np.log(part.pmf.probs) for part in parts]
        self._losses = [part.pmf.losses for part in parts]
        mean, variance = self._moments(0.0)
        self.mean, self.sd = mean, math.sqrt(max(variance, self.grid**2))

    def _cumulant(self, theta: float) -> float:
        return sum(
            part.count * _log_sum_exp(logs + theta * losses)
            for part, logs, losses in zip(self._parts, self._logs, self._losses)
        )

    def _moments(self, theta: float) -> tuple[float, float]:
        mean = variance = 0.0
        for part, logs, losses in zip(self._parts, self._logs, self._losses):
            tilted = logs + theta * losses
            weights = np.exp(tilted - _log_sum_exp(tilted))
            first = float(weights @ losses)
            mean += part.count * first
            variance += part.count * float(weights @ (losses - first) ** 2)
        return mean, variance

    def _best_tilt(self, objective: Callable[[float], float]) -> float:
        """Minimises over theta > 0, on a log scale around 1 / sd."""
        scale = math.log(1.0 / self.sd)
        found = optimize.minimize_scalar(
            lambda u: objective(math.exp(u)),
            bounds=(scale - 8.0, scale + 8.0),
            method="bounded",
            options={"xatol": 0.02},
        )
        return math.exp(found.x)

    def _edges(self, theta: float) -> tuple[float, float, float]:
        """Window [low, high] that holds all but e^_LOG_CUT of the tilted law on either side."""
        base = self._cumulant(theta)
        sd = math.sqrt(max(self._moments(theta)[1], self.grid**2))
        speeds = math.sqrt(-2 * _LOG_CUT) / sd * np.geomspace(0.1, 2.0, 7)
        largest = sum(p.count * float(x[-1]) for p, x in zip(self._parts, self._losses))
        smallest = sum(p.count * float(x[0]) for p, x in zip(self._parts, self._losses))
        high = min((self._cumulant(theta + s) - base - _LOG_CUT) / s for s in speeds)
        low = max(-(self._cumulant(theta - s) - base - _LOG_CUT) / s for s in speeds)
        return base, max(low, smallest), min(high, largest)

    def _tilted_law(self, theta: float) -> tuple[float, np.ndarray, np.ndarray, float]:
        """Returns log M(theta), losses [n], tilted probabilities [n], and the cut upper mass."""
        base, low, high = self._edges(theta)
        first = math.floor(low / self.grid)
        size = math.ceil(high / self.grid) - first + 2
        if size > MAX_POINTS:
            raise TableTooLargeError(
                f"this accounting would need a table of {size:.2g} points: the noise is far too "
                "small (or the steps too many) for a meaningful guarantee; raise the noise "
                "multiplier or lower the number of steps"
            )
        size = fft.next_fast_len(size, real=True)
        spectrum = np.ones(size // 2 + 1, dtype=complex)
        offset = 0
        for part, logs, losses in zip(self._parts, self._logs, self._losses):
            tilted = logs + theta * losses
            weights = np.exp(tilted - _log_sum_exp(tilted))
            folded = np.zeros(-(-len(weights) // size) * size)
            folded[: len(weights)] = weights
            spectrum *= fft.rfft(folded.reshape(-1, size).sum(axis=0)) ** part.count
            offset += part.pmf.low * part.count
        law = np.roll(fft.irfft(spectrum, size), (offset - first) % size)
        losses = (first + np.arange(size)) * self.grid
        return base, losses, np.maximum(law, 0.0), math.exp(_LOG_CUT)

    def _curve(
        self, theta: float
    ) -> tuple[np.ndarray, float, np.ndarray, np.ndarray, np.ndarray, float]:
        """Arrays for delta(eps): losses, suffix sums of mass and of discounted mass, slack."""
        base, losses, law, cut = self._tilted_law(theta)
        log_weight = np.minimum(base - theta * losses, 690.0)
        mass = law * np.exp(log_weight)
        centre = float(losses[len(losses) // 2])
        discounted = law * np.exp(np.minimum(log_weight - (losses - centre), 690.0))
        upper = np.append(np.cumsum(mass[::-1])[::-1], 0.0)
        lower = np.append(np.cumsum(discounted[::-1])[::-1], 0.0)
        rounding = 1e-15 * (4.0 * self.steps + 100.0)
        slack = np.exp(log_weight) * rounding
        lost = self.infinity + cut * math.exp(min(base - theta * losses[-1], 690.0))
        return losses, centre, upper, lower, slack, lost

    def delta(self, epsilon: float) -> float:
        """Upper bound on the hockey-stick divergence at ``epsilon`` >= 0."""
        if epsilon <= self.mean:
            theta = 0.0
        else:
            theta = self._best_tilt(lambda t: self._cumulant(t) - t * epsilon)
        losses, centre, upper, lower, slack, lost = self._curve(theta)
        j = int(np.searchsorted(losses, epsilon, side="right"))
        if j >= len(losses):
            return min(1.0, lost + float(slack[-1]))
        spread = upper[j] - math.exp(epsilon - centre) * lower[j]
        return float(min(1.0, max(spread, 0.0) + slack[max(j - 1, 0)] + lost))

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon >= 0 whose upper bound on delta is at most ``delta``; inf if none."""
        if self.infinity >= delta:
            return math.inf
        theta = self._best_tilt(lambda t: (self._cumulant(t) - math.log(delta)) / t)
        for _ in range(24):
            answer = self._solve(theta, delta)
            if isinstance(answer, float):
                return answer
            if answer == "above":
                theta *= 1.5
            else:
                theta = theta / 2 if theta * self.sd > 1e-3 else 0.0
        return math.inf

    def _solve(self, theta: float, delta: float) -> float | str:
        """The epsilon, or on which side of this tilt's window it lies."""
        losses, centre, upper, lower, slack, lost = self._curve(theta)
        values = upper[1:] - np.exp(np.minimum(losses - centre, 700.0)) * lower[1:]
        values = np.maximum(values, 0.0) + slack + lost
        inside = np.flatnonzero(values <= delta)
        if len(inside) == 0:
            return "above" if theta > 0.0 else math.inf
        j = int(inside[0])
        if losses[j] <= 0.0:
            return 0.0
        if j == 0:
            return "below" if theta > 0.0 else max(float(losses[0]), 0.0)
        # Between losses[j-1] and losses[j] the curve is upper[j] - e^eps * lower[j] + constants.
        excess = upper[j] + slack[j - 1] + lost - delta
        if excess <= 0 or lower[j] <= 0:
            return max(float(losses[j - 1]), 0.0)
        answer = centre + math.log(excess) - math.log(lower[j])
        return float(max(min(max(answer, losses[j - 1]), losses[j]), 0.0))
