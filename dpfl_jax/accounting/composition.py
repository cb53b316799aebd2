"""Composition of privacy losses by FFT, tilted so that small deltas keep their relative accuracy.

A plain FFT has an absolute error of about (number of steps) * 1e-16, which swamps small deltas.
Multiplying every step's distribution by e^(theta * loss) before the FFT, and undoing it after, puts
the accuracy where the answer is (exponential tilting, as in saddle-point approximations). What is
cut off or may have been lost to rounding is added to delta, so that answers stay upper bounds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import fft, signal

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


def _distance(answer: float, theta: float, cumulant: float, mean: float) -> float:
    """Of the tilted mean from ``answer``."""
    del theta, cumulant
    return mean - answer


@dataclasses.dataclass(frozen=True)
class Part:
    """One kind of round.

    Attributes:
      pmf: loss distribution of one local step.
      count: number of rounds.
      local_steps: steps in a round that takes place.
      probability: that a round takes place, visibly; if it does not, its loss is 0.
    """

    pmf: LossPmf
    count: int
    local_steps: int = 1
    probability: float = 1.0

    @functools.cached_property
    def losses(self) -> np.ndarray:
        """Losses of a step (nats)."""
        return self.pmf.losses

    @functools.cached_property
    def logs(self) -> np.ndarray:
        """Log probabilities of a step."""
        with np.errstate(divide="ignore"):
            return np.log(self.pmf.probs)

    @property
    def infinity(self) -> float:
        """Probability that a round has an infinite loss."""
        log_finite = self.local_steps * math.log1p(-min(self.pmf.infinity, 1.0 - 1e-16))
        return self.probability * -math.expm1(log_finite)

    def log_moment(self, theta: float) -> float:
        """Log of E e^(theta * loss) of one round, over its finite losses."""
        return self._mixed(self.local_steps * _log_sum_exp(self.logs + theta * self.losses))

    def _mixed(self, log_taking_part: float) -> float:
        if self.probability >= 1.0:
            return log_taking_part
        high = math.log(self.probability) + log_taking_part
        return float(np.logaddexp(math.log1p(-self.probability), high))

    def moments(self, theta: float) -> tuple[float, float, float]:
        """Log moment, and mean and variance of the tilted loss, of one round."""
        tilted = self.logs + theta * self.losses
        log_step = _log_sum_exp(tilted)
        weights = np.exp(tilted - log_step)
        step_mean = float(weights @ self.losses)
        step_variance = float(weights @ (self.losses - step_mean) ** 2)
        mean, variance = self.local_steps * step_mean, self.local_steps * step_variance
        whole = self._mixed(self.local_steps * log_step)
        share = self._share(self.local_steps * log_step, whole)
        return whole, share * mean, share * (variance + (1.0 - share) * mean**2)

    def _share(self, log_taking_part: float, whole: float) -> float:
        """Probability, under the tilted law, that the round took place."""
        return min(1.0, math.exp(math.log(self.probability) + log_taking_part - whole))

    def spectrum(self, theta: float, size: int) -> np.ndarray:
        """Fourier transform of the tilted law of one round, loss 0 at index 0, modulo ``size``."""
        tilted = self.logs + theta * self.losses
        log_step = _log_sum_exp(tilted)
        start = self.pmf.low % size
        folded = np.zeros(-(-(start + len(tilted)) // size) * size)
        folded[start : start + len(tilted)] = np.exp(tilted - log_step)
        step = fft.rfft(folded.reshape(-1, size).sum(axis=0)) ** self.local_steps
        if self.probability >= 1.0:
            return step
        log_taking_part = self.local_steps * log_step
        share = self._share(log_taking_part, self._mixed(log_taking_part))
        return (1.0 - share) + share * step


class Composition:
    """One direction of adjacency of a sequence of steps (adaptive composition of PLDs)."""

    def __init__(self, parts: Sequence[Part]):
        """Args: parts: steps on one common grid, at least one."""
        self._parts = tuple(parts)
        self.grid = parts[0].pmf.grid
        self.steps = sum(part.count * part.local_steps for part in parts)
        self.infinity = -math.expm1(
            sum(p.count * math.log1p(-min(p.infinity, 1.0 - 1e-16)) for p in parts)
        )
        _, mean, variance = self._moments(0.0)
        self.mean, self.sd = mean, math.sqrt(max(variance, self.grid**2))

    def _cumulant(self, theta: float) -> float:
        return sum(part.count * part.log_moment(theta) for part in self._parts)

    def _moments(self, theta: float) -> tuple[float, float, float]:
        """Log moment of the whole, and mean and variance of its tilted law."""
        each = [(part.count, *part.moments(theta)) for part in self._parts]
        return (
            sum(count * log_moment for count, log_moment, _, _ in each),
            sum(count * mean for count, _, mean, _ in each),
            sum(count * variance for count, _, _, variance in each),
        )

    def _tilt(self, slope: Callable[[float, float, float], float]) -> float:
        """The theta > 0 at which ``slope(theta, cumulant, mean)``, increasing in theta, is 0.

        Any theta gives a valid bound: a few correct digits are enough. The search goes by factors,
        as rare but large losses put the answer far from 1 / sd.
        """

        def at(log_theta: float) -> float:
            theta = math.exp(log_theta)
            return slope(theta, *self._moments(theta)[:2])

        low = high = math.log(1.0 / self.sd)
        value = at(low)
        step, least, most = 1.0, low - 30.0, math.log(3.0 / self.grid)
        if value > 0.0:
            while low > least and value > 0.0:
                high, low, step = low, low - step, 2.0 * step
                value = at(low)
        else:
            while high < most and value <= 0.0:
                low, high, step = high, high + step, 2.0 * step
                value = at(high)
            high = min(high, most)
        while high - low > 0.05:
            middle = 0.5 * (low + high)
            if at(middle) > 0.0:
                high = middle
            else:
                low = middle
        return math.exp(0.5 * (low + high))

    def _reach(self, bound: Callable[[float], float], sd: float) -> float:
        """Smallest of ``bound(speed)`` over speeds in a geometric progression, from 1 / sd."""
        speed = math.sqrt(-2 * _LOG_CUT) / sd
        best = bound(speed)
        for factor in (0.6, 1.0 / 0.6):
            here = speed * factor
            for _ in range(60):
                value = bound(here)
                if not value < best:
                    break
                best, here = value, here * factor
        return best

    def _edges(self, theta: float) -> tuple[float, float, float]:
        """Window [low, high] that holds all but e^_LOG_CUT of the tilted law on either side.

        By Chernoff's inequality, valid at any speed; every speed tried is one.
        """
        base, _, variance = self._moments(theta)
        sd = math.sqrt(max(variance, self.grid**2))
        largest = smallest = 0.0
        for part in self._parts:
            # A round that need not take place may also have loss 0.
            rest = 0.0 if part.probability < 1.0 else math.inf
            steps, x = part.local_steps, part.losses
            largest += part.count * max(steps * float(x[-1]), -rest)
            smallest += part.count * min(steps * float(x[0]), rest)
        high = self._reach(lambda s: (self._cumulant(theta + s) - base - _LOG_CUT) / s, sd)
        low = -self._reach(lambda s: (self._cumulant(theta - s) - base - _LOG_CUT) / s, sd)
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
        for part in self._parts:
            spectrum *= part.spectrum(theta, size) ** part.count
        law = np.roll(fft.irfft(spectrum, size), -first % size)
        losses = (first + np.arange(size)) * self.grid
        return base, losses, np.maximum(law, 0.0), math.exp(_LOG_CUT)

    def _weighted(
        self, theta: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]:
        """Losses, tilted law, log of what undoes the tilt, slack of delta, and the mass lost."""
        base, losses, law, cut = self._tilted_law(theta)
        # Clipped weights multiply a law that is below its own rounding, which is in the slack.
        log_weight = np.minimum(base - theta * losses, 690.0)
        # Of the powers of the spectrum (per step), and of the exponents theta * loss (per step).
        reach = theta * max(float(np.abs(part.losses[[0, -1]]).max()) for part in self._parts)
        rounding = 1e-15 * (self.steps * (4.0 + 0.25 * reach) + 100.0)
        slack = np.exp(log_weight) * rounding
        lost = self.infinity + cut * math.exp(min(base - theta * losses[-1], 690.0))
        return losses, law, log_weight, slack, lost

    def delta(self, epsilon: float) -> float:
        """Upper bound on the hockey-stick divergence at ``epsilon`` >= 0."""
        theta = 0.0
        if epsilon > self.mean:
            # Far in the tail the Chernoff bound below settles it: no need of an extreme theta.
            enough = math.log(max(self.infinity, 1e-300)) - 40.0
            theta = self._tilt(
                lambda t, cumulant, mean: max(mean - epsilon, enough - cumulant + t * epsilon)
            )
        losses, law, log_weight, slack, lost = self._weighted(theta)
        if theta > 0.0 and epsilon < losses[0]:
            # What lies below the window is not counted rightly there; without a tilt it is.
            losses, law, log_weight, slack, lost = self._weighted(0.0)
        j = int(np.searchsorted(losses, epsilon, side="right"))
        spread = float(
            np.exp(log_weight[j:]) @ (law[j:] * -np.expm1(np.maximum(epsilon - losses[j:], -700.0)))
        )
        chernoff = math.exp(min(self._cumulant(theta) - theta * epsilon, 0.0)) * (1.0 + 1e-6)
        bound = min(spread + float(slack[max(j - 1, 0)]) + lost, chernoff + self.infinity)
        return float(min(1.0, bound))

    def deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """Upper bounds on delta at ``epsilons`` >= 0, float [n], all of them without a tilt."""
        losses, law, _, slack, lost = self._weighted(0.0)
        upper, spread = self._spread(law)
        # Between two points of the grid the curve is linear in e^epsilon.
        spread = np.append(spread, 0.0)
        j = np.clip(np.searchsorted(losses, epsilons, side="right") - 1, 0, len(losses) - 1)
        share = np.clip(np.expm1(epsilons - losses[j]) / math.expm1(self.grid), 0.0, 1.0)
        found = (1.0 - share) * spread[j] + share * spread[j + 1]
        below = np.exp(np.minimum(epsilons - losses[0], 0.0))
        found = np.where(below < 1.0, upper[0] * (1.0 - below) + below * spread[0], found)
        return np.asarray(np.minimum(1.0, found + slack[0] + lost))

    def _spread(self, mass: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mass [n + 1] at each loss and above, and the hockey-stick divergence [n] there."""
        upper = np.append(np.cumsum(mass[::-1])[::-1], 0.0)
        # spread[j] = sum over i > j of mass[i] (1 - e^(losses[j] - losses[i])), without
        # cancellation: spread[j] = e^-grid spread[j+1] + (1 - e^-grid) upper[j+1].
        decay = math.exp(-self.grid)
        inputs = upper[:0:-1]
        spread = signal.lfilter([-math.expm1(-self.grid)], [1.0, -decay], inputs)[::-1]
        return upper, spread

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon >= 0 whose upper bound on delta is at most ``delta``; inf if none."""
        if self.infinity >= delta:
            return math.inf
        log_delta = math.log(delta)
        # The minimum of the Chernoff bound (cumulant - log delta) / theta on epsilon.
        theta = self._tilt(lambda t, cumulant, mean: t * mean - cumulant + log_delta)
        answer, share = self._search(theta, delta)
        for _ in range(8):
            if not (0.0 < answer < math.inf and share > 1e-4):
                break
            # Rounding at this tilt costs something: tilt to the answer itself. Where all losses
            # are tiny or at their largest the first tilt is far too strong, and one turn too few.
            theta = self._tilt(functools.partial(_distance, answer))
            found, share = self._search(theta, delta)
            if not found < answer * (1.0 - 1e-6):
                return min(answer, found)
            answer = found
        return answer

    def _search(self, theta: float, delta: float) -> tuple[float, float]:
        """The epsilon from this tilt, or from one nearby whose window holds it; and see _solve."""
        for attempt in range(24):
            found = self._solve(theta, delta)
            if not isinstance(found, str):
                return found
            if found == "above":
                theta *= 1.5
            else:
                theta = theta / 4 if attempt < 10 else 0.0
        return math.inf, 1.0

    def _solve(self, theta: float, delta: float) -> tuple[float, float] | str:
        """Epsilon and the share of delta that rounding takes; or where it lies, off the window."""
        losses, law, log_weight, slack, lost = self._weighted(theta)
        upper, spread = self._spread(law * np.exp(log_weight))
        values = spread + slack + lost
        inside = np.flatnonzero(values <= delta)
        if len(inside) == 0:
            return "above" if theta > 0.0 else (math.inf, 1.0)
        j = int(inside[0])
        share = float(slack[j] + lost - self.infinity) / delta
        if losses[j] <= 0.0:
            return 0.0, share
        if j == 0 and theta > 0.0:
            return "below"
        # Up to losses[j] the curve is upper[j] - e^(eps - losses[j]) (upper[j] - spread[j]).
        floor = max(float(losses[j - 1]), 0.0) if j > 0 else 0.0
        excess = upper[j] + slack[max(j - 1, 0)] + lost - delta
        discounted = upper[j] - spread[j]
        if excess <= 0 or discounted <= 0:
            return floor, share
        answer = float(losses[j]) + math.log(excess) - math.log(discounted)
        return float(max(min(max(answer, floor), losses[j]), 0.0)), share
