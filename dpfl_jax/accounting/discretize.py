"""Privacy-loss distributions of one step, discretised so that divergences are upper bounds.

The outputs of a step are cut into cells on which the loss is monotone. Within a cell the loss is
moved to the losses at the cell's two ends so that the cell keeps its probability under both
hypotheses. This is connect-the-dots (Doroshenko et al. 2022, arXiv 2207.04380) without inverting
the loss: between the losses of two cell ends the divergence becomes its chord, which lies above it.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from scipy import special, stats

# Most cells of a step times its number of sensitivities: bounds the time to about a second.
MAX_WORK = 1 << 23


@dataclasses.dataclass(frozen=True)
class LossPmf:
    """A privacy-loss distribution on a grid, rounded so that divergences are upper bounds.

    Attributes:
      grid: distance between neighbouring losses (nats).
      index: int64 [n], ascending; the i-th loss is ``index[i] * grid``.
      probs: float64 [n], probability of each loss.
      infinity: probability of an infinite loss.
    """

    grid: float
    index: np.ndarray
    probs: np.ndarray
    infinity: float

    @property
    def losses(self) -> np.ndarray:
        """The losses (nats), float64 [n]."""
        return self.index * self.grid


@dataclasses.dataclass(frozen=True)
class Atoms:
    """A privacy-loss distribution with finitely many values, in one direction of adjacency.

    Attributes:
      losses: float64 [n], nats, in any order.
      probs: float64 [n], their probabilities.
      infinity: probability of an infinite loss.
    """

    losses: np.ndarray
    probs: np.ndarray
    infinity: float

    def with_atom(self, loss: float, prob: float) -> Atoms:
        """Returns these atoms with one more."""
        return Atoms(np.append(self.losses, loss), np.append(self.probs, prob), self.infinity)

    def on_grid(self, grid: float) -> LossPmf:
        """Splits each atom between its neighbours on the grid, whose distance is ``grid`` nats.

        Mass and expected e^-loss are kept, so the divergence is nowhere smaller (connect-the-dots).
        An atom on a grid point stays whole.
        """
        index = np.floor(self.losses / grid).astype(np.int64)
        up = np.expm1(index * grid - self.losses) / np.expm1(-grid)
        up = np.clip(up, 0.0, 1.0)
        low = int(index.min())
        size = int(index.max()) - low + 2
        if size > 64 * len(index):  # atoms far apart: a dense table would be too large
            distinct, place = np.unique(np.append(index, index + 1), return_inverse=True)
            weights = np.append(self.probs * (1.0 - up), self.probs * up)
            return LossPmf(grid, distinct, np.bincount(place, weights), self.infinity)
        probs = np.bincount(index - low, self.probs * (1.0 - up), size)
        probs[1:] += np.bincount(index - low, self.probs * up, size - 1)
        kept = np.flatnonzero(probs)
        return LossPmf(grid, low + kept, probs[kept], self.infinity)


@dataclasses.dataclass(frozen=True)
class StepLoss:
    """The privacy loss of one step in both directions: the unit is removed, or added."""

    remove: Atoms
    add: Atoms


def atoms_of_cells(
    first: np.ndarray, second: np.ndarray, low: np.ndarray, high: np.ndarray, infinity: float
) -> Atoms:
    """Returns the loss of ``first`` against ``second``, moved to the losses at the ends of cells.

    Args:
      first: float64 [n], probability of each cell under the first hypothesis.
      second: float64 [n], probability of each cell under the second hypothesis.
      low: float64 [n], the smallest loss in each cell, nats.
      high: float64 [n], the largest loss in each cell, nats.
      infinity: probability under ``first`` of outputs outside all cells.
    """
    gap = -np.expm1(low - high)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # With b at the upper end: (first - b) e^-low + b e^-high = second.
        up = (first - np.exp(low) * second) / gap
    # Where rounding prevents that, move the whole cell up, which is safe.
    up = np.where((gap > 0.0) & (second > 1e-290), np.clip(up, 0.0, first), first)
    return Atoms(np.append(low, high), np.append(first - up, up), infinity)


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A mixture of N(shift, 1).

    Attributes:
      shifts: float64 [k].
      weights: float64 [k], summing to 1.
    """

    shifts: np.ndarray
    weights: np.ndarray

    def log_ratio(self, x: np.ndarray) -> np.ndarray:
        """Returns the log of the density over that of N(0, 1), float64 [n]."""
        terms = x[:, None] * self.shifts + (np.log(self.weights) - 0.5 * self.shifts**2)
        top = terms.max(axis=1)
        return np.asarray(top + np.log(np.exp(terms - top[:, None]).sum(axis=1)))

    def cells(self, edges: np.ndarray) -> np.ndarray:
        """Returns the probabilities between neighbouring edges [n + 1], float64 [n]."""
        x = edges[:, None] - self.shifts
        lower, upper = special.ndtr(x), special.ndtr(-x)
        # Above a mean take the upper tails, whose difference does not cancel.
        inside = np.where(x[:-1] > 0.0, upper[:-1] - upper[1:], lower[1:] - lower[:-1])
        return np.asarray((inside * self.weights).sum(axis=1))

    def below(self, x: float) -> float:
        """Returns the probability below x."""
        return float((special.ndtr(x - self.shifts) * self.weights).sum())

    def above(self, x: float) -> float:
        """Returns the probability above x."""
        return float((special.ndtr(self.shifts - x) * self.weights).sum())


def mixture_step(upper: Mixture, lower: Mixture, spacing: float, log_tail: float) -> StepLoss:
    """Returns the loss of a step whose likelihood ratio grows with the output.

    Args:
      upper: distribution of the output if the unit takes part.
      lower: distribution of the output if it does not.
      spacing: length of a cell, in standard deviations of the noise.
      log_tail: log of the probability above the cells, whose loss is counted as infinite.
    """
    reach, tail = -float(special.ndtri_exp(log_tail)), math.exp(log_tail)
    left, right = float(lower.shifts.min()) - reach, float(upper.shifts.max()) + reach
    low = left
    while right - low > 0.01:  # large but unlikely shifts get no cells
        middle = 0.5 * (low + right)
        low, right = (low, middle) if upper.above(middle) <= tail else (middle, right)
    count = min(
        math.ceil((right - left) / spacing), MAX_WORK // (len(upper.shifts) + len(lower.shifts))
    )
    edges = np.linspace(left, right, count + 1)
    loss = np.maximum.accumulate(upper.log_ratio(edges) - lower.log_ratio(edges))
    up, down = upper.cells(edges), lower.cells(edges)
    remove = atoms_of_cells(up, down, loss[:-1], loss[1:], upper.above(right))
    add = atoms_of_cells(down, up, -loss[1:], -loss[:-1], lower.below(left))
    return StepLoss(
        remove.with_atom(loss[0], upper.below(left)), add.with_atom(-loss[-1], lower.above(right))
    )


@functools.lru_cache(maxsize=4096)
def binomial_weights(trials: int, prob: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns support and probabilities of Binomial(trials, prob), negligible tails moved upwards.

    The tail above the kept counts (mass below e^-110) is moved to ``trials`` and the tail below
    them to the smallest kept count. By stochastic dominance this can only raise the divergence
    (Lemma 2 of Charles et al. 2024). Above 2,048 counts, neighbouring counts are merged upwards.

    Args:
      trials: group size, >= 1.
      prob: probability of each example, in (0, 1].

    Returns:
      counts: float64 [n], ascending; weights: float64 [n], summing to 1; both read-only.
    """
    if prob >= 1.0:
        return _frozen(np.array([float(trials)]), np.array([1.0]))
    binomial = (trials, prob)
    mean, sd = trials * prob, math.sqrt(trials * prob * (1 - prob))
    low = max(0, math.floor(mean - 16 * sd - 130))
    high = min(trials, math.ceil(mean + 16 * sd + 130))
    counts = np.arange(low, high + 1)
    weights = stats.binom.pmf(counts, *binomial)
    keep = np.flatnonzero(weights > 1e-48)
    counts, weights = counts[keep[0] : keep[-1] + 1], weights[keep[0] : keep[-1] + 1]
    # Mass below the window moves up to its first count; mass above, up to ``trials``.
    if counts[0] > 0:
        weights[0] += stats.binom.cdf(counts[0] - 1, *binomial)
    if counts[-1] < trials:
        tail = max(float(stats.binom.sf(counts[-1], *binomial)), 0.0)
        if tail > 0:
            counts = np.append(counts, trials)
            weights = np.append(weights, tail)
    while len(counts) > 2048:
        if len(counts) % 2:
            counts, weights = np.append(counts, counts[-1]), np.append(weights, 0.0)
        counts, weights = counts[1::2], weights[::2] + weights[1::2]
    return _frozen(counts.astype(float), weights / weights.sum())


def _frozen(counts: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Makes the arrays read-only, because the cache shares them between callers."""
    counts.flags.writeable = weights.flags.writeable = False
    return counts, weights


def mixed(first: Atoms, second: Atoms, share: float) -> Atoms:
    """Returns the loss of a step that is, visibly, ``second`` with probability ``share``."""
    return Atoms(
        np.append(first.losses, second.losses),
        np.append((1.0 - share) * first.probs, share * second.probs),
        (1.0 - share) * first.infinity + share * second.infinity,
    )
