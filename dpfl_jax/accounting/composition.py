"""Composition of privacy losses by FFT, tilted so that small deltas keep their relative accuracy.

A plain FFT has an absolute error of about (number of steps) * 1e-16, which swamps small deltas.
Multiplying every step's distribution by e^(theta * loss) before the FFT, and undoing that after it,
puts the accuracy where the answer is (exponential tilting, as in saddle-point approximations). With
M(theta) = E e^(theta L) of the composed loss L, and P_theta(l) = P(l) e^(theta l) / M(theta),

    delta(eps) = E max(0, 1 - e^(eps - L)) = sum_{l > eps} P_theta(l) M(theta) e^(-theta l)
                 (1 - e^(eps - l)),

where P_theta is the convolution of the steps' tilted distributions. A theta whose tilted mean is
near eps makes the terms that matter large. Any theta gives a valid bound: the mass that is cut off
(by Chernoff's inequality) or may have been lost to rounding is added to delta.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import fft, signal, special

from dpfl_jax.accounting.discretize import Atoms, LossPmf
from dpfl_jax.errors import BadInputError

# About 0.25 GB of temporary arrays, and half a second of FFT.
MAX_POINTS = 1 << 21
# Logs of the mass that a window may cut off a tilted distribution; the second is for windows where
# the first would noticeably change delta.
_ROUNDING = 1e-15
_LOG_CUTS = (math.log(1e-7), math.log(1e-18))


class TableTooLargeError(BadInputError):
    """The composed table would not fit in memory on this grid."""


def _log_sum_exp(values: np.ndarray) -> float:
    """SciPy's logsumexp without its checks, which take longer than summing these short arrays."""
    top = float(values.max())
    return top + math.log(float(np.exp(values - top).sum()))


def _power(values: np.ndarray, count: int) -> np.ndarray:
    """``values ** count``, with 0 instead of results too small to matter, for speed."""
    out = np.zeros_like(values)
    kept = np.flatnonzero(values.real**2 + values.imag**2 > 1e-40 ** (2.0 / count))
    out[kept] = values[kept] ** count
    return out


@dataclasses.dataclass(frozen=True)
class Part:
    """A number of rounds of one kind.

    Attributes:
      pmf: loss distribution of one local step; a ``LossPmf`` when it is composed.
      count: number of rounds.
      local_steps: steps in a round that takes place.
      probability: probability that a round takes place, visibly; otherwise its loss is 0.
    """

    pmf: Atoms | LossPmf
    count: int
    local_steps: int = 1
    probability: float = 1.0

    @functools.cached_property
    def losses(self) -> np.ndarray:
        """The losses of a step (nats), float64 [n]."""
        return self.pmf.losses

    @functools.cached_property
    def logs(self) -> np.ndarray:
        """The log probabilities of these losses, float64 [n]."""
        with np.errstate(divide="ignore"):
            return np.log(self.pmf.probs)

    @property
    def infinity(self) -> float:
        """The probability that a round has an infinite loss."""
        log_finite = self.local_steps * math.log1p(-min(self.pmf.infinity, 1.0 - 1e-16))
        return self.probability * -math.expm1(log_finite)

    def log_moment(self, theta: float) -> float:
        """Returns log E e^(theta * loss) of one round, over its finite losses."""
        return self._mixed(self.local_steps * _log_sum_exp(self.logs + theta * self.losses))

    def _mixed(self, log_taking_part: float) -> float:
        if self.probability >= 1.0:
            return log_taking_part
        high = math.log(self.probability) + log_taking_part
        return float(np.logaddexp(math.log1p(-self.probability), high))

    def moments(self, theta: float) -> tuple[float, float, float]:
        """Returns one round's log moment, and the mean and variance of its tilted loss."""
        tilted = self.logs + theta * self.losses
        log_step = _log_sum_exp(tilted)
        weights = np.exp(tilted - log_step)
        # Sums instead of dot products, because waking BLAS threads takes longer than the sums.
        step_mean = float((weights * self.losses).sum())
        with np.errstate(over="ignore", invalid="ignore"):
            step_variance = float((weights * (self.losses - step_mean) ** 2).sum())
        mean, variance = self.local_steps * step_mean, self.local_steps * step_variance
        whole = self._mixed(self.local_steps * log_step)
        share = self._share(self.local_steps * log_step, whole)
        return whole, share * mean, share * (variance + (1.0 - share) * mean * mean)

    def _share(self, log_taking_part: float, whole: float) -> float:
        """Probability, under the tilted distribution, that the round took place."""
        return min(1.0, math.exp(math.log(self.probability) + log_taking_part - whole))

    def spectrum(self, theta: float, size: int) -> np.ndarray:
        """Returns the FFT of one round's tilted distribution, indexed by loss modulo ``size``."""
        tilted = self.logs + theta * self.losses
        log_step = _log_sum_exp(tilted)
        assert isinstance(self.pmf, LossPmf)
        folded = np.bincount(self.pmf.index % size, np.exp(tilted - log_step), size)
        step = fft.rfft(folded) ** self.local_steps
        if self.probability >= 1.0:
            return step
        log_taking_part = self.local_steps * log_step
        share = self._share(log_taking_part, self._mixed(log_taking_part))
        return (1.0 - share) + share * step


class Composition:
    """The loss of a sequence of steps in one direction of adjacency (adaptive composition of PLDs).

    Args:
      parts: at least one kind of round, all on one grid unless only moments are needed.
    """

    def __init__(self, parts: Sequence[Part]):
        self._parts = tuple(parts)
        self.grid = getattr(parts[0].pmf, "grid", 0.0)
        self.steps = sum(part.count * part.local_steps for part in parts)
        self.infinity = -math.expm1(
            sum(p.count * math.log1p(-min(p.infinity, 1.0 - 1e-16)) for p in parts)
        )
        _, mean, variance = self._moments(0.0)
        self.mean, self.sd = mean, math.sqrt(max(variance, self.grid**2, 1e-200))

    @property
    def largest(self) -> float:
        """The largest loss of one step, in absolute value."""
        return max(float(np.abs(part.losses).max()) for part in self._parts)

    def cumulant(self, theta: float) -> float:
        """Returns log E e^(theta * loss) of the composed loss, over its finite values."""
        return sum(part.count * part.log_moment(theta) for part in self._parts)

    def _moments(self, theta: float) -> tuple[float, float, float]:
        """Log moment of the composed loss, and mean and variance of its tilted distribution."""
        each = [(part.count, *part.moments(theta)) for part in self._parts]
        return (
            sum(count * log_moment for count, log_moment, _, _ in each),
            sum(count * mean for count, _, mean, _ in each),
            sum(count * variance for count, _, _, variance in each),
        )

    def times(self, count: int) -> Composition:
        """Returns the composition of all steps repeated ``count`` times."""
        return Composition([dataclasses.replace(p, count=p.count * count) for p in self._parts])

    def tails(self, mass: float) -> list[float]:
        """Returns a loss for each part; any step exceeds its part's with probability ``mass``."""
        tops = []
        for part in self._parts:
            order = np.argsort(part.losses)
            tail = np.cumsum(part.pmf.probs[order][::-1])[::-1]
            last = max(int((tail > mass / self.steps).sum()) - 1, 0)
            tops.append(float(part.losses[order[last]]))
        return tops

    def clipped(self, most: Sequence[float]) -> Composition:
        """Returns it with losses of parts clipped to ``most``, to choose tilts: NOT A BOUND."""
        clipped = (
            Atoms(np.minimum(part.losses, top), part.pmf.probs, 0.0)
            for part, top in zip(self._parts, most)
        )
        return Composition(
            [dataclasses.replace(part, pmf=pmf) for part, pmf in zip(self._parts, clipped)]
        )

    def gridded(self, grid: float) -> Composition:
        """Returns the composition with all losses on one grid, rounded so that it is a bound."""
        return Composition(
            [dataclasses.replace(p, pmf=p.pmf.on_grid(grid)) for p in self._parts]  # type: ignore[union-attr]
        )

    def saddle(self, delta: float) -> tuple[float, float]:
        """Returns, approximately, the tilt whose mean is epsilon at ``delta``, and that epsilon.

        It takes the tilted loss to be normal, which is exact if the loss itself is normal.
        """

        def log_delta(theta: float, cumulant: float, mean: float, variance: float) -> float:
            sd = math.sqrt(max(variance, 1e-200))
            near, far = special.erfcx(np.array([theta, theta + 1.0]) * sd / math.sqrt(2.0))
            return cumulant - theta * mean + math.log(max(0.5 * (near - far), 1e-300))

        target = math.log(delta)
        theta = self.tilt(lambda *point: target - log_delta(*point), 1e-3)
        cumulant, mean, variance = self._moments(theta)
        left = (log_delta(theta, cumulant, mean, variance) - target) / theta
        return theta, mean + max(min(left, 0.1 * abs(mean)), -0.1 * abs(mean))

    def tilt(self, slope: Callable[..., float], tolerance: float = 0.05) -> float:
        """Returns the theta > 0 at which ``slope``, increasing in theta, is 0.

        As any theta gives a valid bound, a few correct digits are enough. The search multiplies
        theta by growing factors, because rare but large losses put the answer far from 1 / sd.

        Args:
          slope: a function of theta, the cumulant there, and mean and variance of the tilted loss.
          tolerance: relative tolerance of theta.
        """

        def at(log_theta: float) -> float:
            theta = math.exp(log_theta)
            return slope(theta, *self._moments(theta))

        low = high = math.log(1.0 / self.sd)
        below = above = at(low)
        step, least = 1.0, low - 30.0
        most = math.log(3.0 / self.grid) if self.grid > 0 else low + 60.0
        while low > least and below > 0.0:
            high, above, low, step = low, below, low - step, 2.0 * step
            below = at(low)
        while high < most and above <= 0.0:
            low, below, high, step = high, above, high + step, 2.0 * step
            above = at(high)
        high = min(high, most)
        while high - low > tolerance:
            # Take the secant, moved a little towards the far end so that both ends move.
            share = below / (below - above) if below < above < math.inf else 0.5
            share = share + 0.1 if share < 0.5 else share - 0.1
            middle = low + min(max(share, 0.03), 0.97) * (high - low)
            value = at(middle)
            if value > 0.0:
                high, above = middle, value
            else:
                low, below = middle, value
        return math.exp(0.5 * (low + high))

    def _reach(self, bound: Callable[[float], float], speed: float) -> float:
        """The smallest ``bound`` over a geometric progression of speeds around ``speed``."""
        best = bound(speed)
        for factor in (0.6, 1.0 / 0.6):
            here = speed * factor
            for _ in range(60):
                value = bound(here)
                if not value < best:
                    break
                best, here = value, here * factor
        return best

    def _edges(self, theta: float, negligible: float) -> tuple[float, float, float, float]:
        """A window [low, high] that cuts off at most e^cut of the tilted mass on either side.

        It follows from Chernoff's inequality, which holds at any speed. The FFT is periodic: mass
        above the window comes out at its start and is added to delta as lost. Mass below the window
        comes out at its end, which can only raise delta. Both weigh e^(base - theta high).

        Args:
          theta: the tilt.
          negligible: log of a mass that is negligible against delta.

        Returns:
          The log moment at theta, low, high, and cut.
        """
        base, _, variance = self._moments(theta)
        sd = math.sqrt(max(variance, self.grid**2))
        largest = smallest = 0.0
        for part in self._parts:
            # A round that does not take place has loss 0.
            rest = 0.0 if part.probability < 1.0 else math.inf
            steps, x = part.local_steps, part.losses
            largest += part.count * max(steps * float(x.max()), -rest)
            smallest += part.count * min(steps * float(x.min()), rest)
        for cut in _LOG_CUTS:
            speed = math.sqrt(-2.0 * cut) / sd
            ups, downs = (
                functools.partial(self._beyond, theta, base, cut, sign) for sign in (1.0, -1.0)
            )
            high, low = self._reach(ups, speed), -self._reach(downs, speed)
            if cut + base - theta * high <= negligible:
                break
        return base, max(low, smallest), min(high, largest), cut

    def _beyond(self, theta: float, base: float, cut: float, sign: float, speed: float) -> float:
        return (self.cumulant(theta + sign * speed) - base - cut) / speed

    def _tilted(
        self, theta: float, negligible: float
    ) -> tuple[float, np.ndarray, np.ndarray, float]:
        """Log M(theta), losses [n], tilted probabilities [n], and the mass cut off above."""
        base, low, high, cut = self._edges(theta, negligible)
        first = math.floor(low / self.grid)
        size = math.ceil(high / self.grid) - first + 2
        if size > MAX_POINTS:
            raise TableTooLargeError(
                f"this accounting would need a table of {size:.2g} points, as the noise is far too "
                "small (or the steps are too many) for a meaningful guarantee: raise the noise "
                "multiplier or lower the number of steps"
            )
        size = fft.next_fast_len(size, real=True)
        spectrum = np.ones(size // 2 + 1, dtype=complex)
        for part in self._parts:
            spectrum *= _power(part.spectrum(theta, size), part.count)
        tilted = np.roll(fft.irfft(spectrum, size), -first % size)
        losses = (first + np.arange(size)) * self.grid
        return base, losses, np.maximum(tilted, 0.0), math.exp(cut)

    def _weighted(
        self, theta: float, negligible: float = -math.inf
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]:
        """Losses, tilted probabilities, log weights undoing the tilt, rounding slack, lost mass."""
        base, losses, tilted, cut = self._tilted(theta, negligible)
        # Clipping concerns only weights of probabilities below rounding, which the slack covers.
        log_weight = np.minimum(base - theta * losses, 690.0)
        # Rounding of the spectrum's powers and of the exponents theta * loss, both per step.
        reach = theta * self.largest
        rounding = _ROUNDING * (self.steps * (4.0 + 0.25 * reach) + 100.0)
        slack = np.exp(log_weight) * rounding
        lost = self.infinity + cut * math.exp(min(base - theta * losses[-1], 690.0))
        return losses, tilted, log_weight, slack, lost

    def delta(self, epsilon: float) -> float:
        """Returns an upper bound on the hockey-stick divergence at ``epsilon`` >= 0."""
        if math.isinf(epsilon):
            return max(0.0, self.infinity)
        theta = 0.0
        if epsilon > self.mean:
            # Far in the tail the Chernoff bound below suffices without an extreme theta.
            enough = math.log(max(self.infinity, 1e-300)) - 40.0
            theta = self.tilt(lambda t, c, mean, _: max(mean - epsilon, enough - c + t * epsilon))
        negligible = min(self.cumulant(theta) - theta * epsilon, 0.0) - 30.0
        losses, tilted, log_weight, slack, lost = self._weighted(theta, negligible)
        if theta > 0.0 and epsilon < losses[0]:
            # Epsilons below the window are handled only without a tilt.
            losses, tilted, log_weight, slack, lost = self._weighted(0.0)
        j = int(np.searchsorted(losses, epsilon, side="right"))
        spread = float(
            (
                np.exp(log_weight[j:])
                * (tilted[j:] * -np.expm1(np.maximum(epsilon - losses[j:], -700.0)))
            ).sum()
        )
        chernoff = math.exp(min(self.cumulant(theta) - theta * epsilon, 0.0)) * (1.0 + 1e-6)
        bound = min(spread + float(slack[max(j - 1, 0)]) + lost, chernoff + self.infinity)
        return float(min(1.0, bound))

    def deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """Returns upper bounds on delta at ``epsilons`` >= 0, float [n], without a tilt."""
        losses, tilted, _, slack, lost = self._weighted(0.0)
        upper, spread = self._spread(tilted)
        # Between two points of the grid the curve is linear in e^epsilon.
        spread = np.append(spread, 0.0)
        j = np.clip(np.searchsorted(losses, epsilons, side="right") - 1, 0, len(losses) - 1)
        share = np.clip(np.expm1(epsilons - losses[j]) / math.expm1(self.grid), 0.0, 1.0)
        bounds = (1.0 - share) * spread[j] + share * spread[j + 1]
        below = np.exp(np.minimum(epsilons - losses[0], 0.0))
        bounds = np.where(below < 1.0, upper[0] * (1.0 - below) + below * spread[0], bounds)
        return np.asarray(np.minimum(1.0, bounds + slack[0] + lost))

    def curve(self, theta: float, negligible: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns epsilons [n] and upper bounds on delta there [n], where rounding is negligible.

        Args:
          theta: the tilt, > 0; a larger one resolves smaller deltas.
          negligible: log of a mass that is negligible against delta.
        """
        losses, tilted, log_weight, slack, lost = self._weighted(theta, negligible)
        _, spread = self._spread(tilted * np.exp(log_weight))
        seen = np.flatnonzero(slack <= 1e-3 * spread)
        return losses[seen], (spread + slack + lost)[seen]

    def _spread(self, mass: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The mass at each loss and above it [n + 1], and the hockey-stick divergence there [n]."""
        upper = np.append(np.cumsum(mass[::-1])[::-1], 0.0)
        # spread[j] = sum over i > j of mass[i] (1 - e^(losses[j] - losses[i])), without
        # cancellation: spread[j] = e^-grid spread[j+1] + (1 - e^-grid) upper[j+1].
        decay = math.exp(-self.grid)
        inputs = upper[:0:-1]
        spread = signal.lfilter([-math.expm1(-self.grid)], [1.0, -decay], inputs)[::-1]
        return upper, spread

    def epsilon(self, delta: float) -> float:
        """Returns the smallest epsilon >= 0 with a bound on delta of at most ``delta``, or inf."""
        if self.infinity >= delta:
            return math.inf
        log_delta = math.log(delta)
        # The tilt that minimises the Chernoff bound (cumulant - log delta) / theta on epsilon.
        theta = self.tilt(lambda t, cumulant, mean, _: t * mean - cumulant + log_delta)
        # Weaken it, for a smaller window, as far as rounding stays below a millionth of delta.
        bound = (self.cumulant(theta) - log_delta) / theta
        enough = math.log(_ROUNDING * (8.0 * self.steps + 100.0)) + 14.0 - log_delta
        weaker = self.tilt(lambda t, c, *_: t * bound - c - enough)
        theta = min(theta, max(weaker, 0.3 * theta))
        answer, share = self._search(theta, delta)
        for _ in range(8):
            if not (0.0 < answer < math.inf and share > 1e-4):
                break
            # Rounding at this tilt matters: tilt to the answer itself, repeatedly, as the first
            # tilt is far too strong where all losses are tiny or at their largest.
            theta = self.tilt(lambda t, c, mean, _, answer=answer: mean - answer)
            again, share = self._search(theta, delta)
            if not again < answer * (1.0 - 1e-6):
                return min(answer, again)
            answer = again
        return answer

    def _search(self, theta: float, delta: float) -> tuple[float, float]:
        """The result of ``_solve`` at this tilt, or at a nearby one whose window holds epsilon."""
        for attempt in range(24):
            result = self._solve(theta, delta)
            if not isinstance(result, str):
                return result
            if result == "above":
                theta *= 1.5
            else:
                theta = theta / 4 if attempt < 10 else 0.0
        return math.inf, 1.0

    def _solve(self, theta: float, delta: float) -> tuple[float, float] | str:
        """Epsilon and the share of delta lost to rounding; or "above" or "below" the window."""
        negligible = math.log(delta) - 17.0
        losses, tilted, log_weight, slack, lost = self._weighted(theta, negligible)
        upper, spread = self._spread(tilted * np.exp(log_weight))
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
        # Just below losses[j] the curve is upper[j] - e^(eps - losses[j]) (upper[j] - spread[j]).
        floor = max(float(losses[j - 1]), 0.0) if j > 0 else 0.0
        excess = upper[j] + slack[max(j - 1, 0)] + lost - delta
        discounted = upper[j] - spread[j]
        if excess <= 0 or discounted <= 0:
            return floor, share
        answer = float(losses[j]) + math.log(excess) - math.log(discounted)
        return float(max(min(max(answer, floor), losses[j]), 0.0)), share
