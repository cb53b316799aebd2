"""Privacy-loss distributions of one step, on a grid: dp-accounting's pessimistic connect-the-dots.

dp-accounting inverts the privacy loss of a mixture of Gaussians by a recursive bisection, which is
where its time goes. ``_FastMixtureLoss`` keeps its class and replaces only the inversion (a table,
then safeguarded Newton on all points at once) and the normal distribution functions. Any inversion
error moves the estimate by its square only: the cut-off maximises P(S) - e^eps Q(S).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from dp_accounting.pld import privacy_loss_mechanism
from scipy import special, stats

# Exponentials evaluated at once (rows x sensitivities): bounds the memory to about 100 MB.
_CHUNK = 2_000_000
_Adjacency: TypeAlias = privacy_loss_mechanism.AdjacencyType


@dataclasses.dataclass(frozen=True)
class LossPmf:
    """Distribution of a privacy loss on a grid, rounded so that divergences are upper bounds.

    Attributes:
      grid: distance between neighbouring losses (nats).
      low: index of the smallest loss; the i-th loss is ``(low + i) * grid``.
      probs: float64 [n], probability of each loss.
      infinity: probability of an infinite loss.
    """

    grid: float
    low: int
    probs: np.ndarray
    infinity: float

    @property
    def losses(self) -> np.ndarray:
        """The losses (nats), float64 [n]."""
        return (self.low + np.arange(len(self.probs))) * self.grid


@dataclasses.dataclass(frozen=True)
class Atoms:
    """A loss of finitely many values, in one direction.

    Attributes:
      losses: float64 [n], nats, in any order.
      probs: float64 [n], their probabilities.
      infinity: probability of an infinite loss.
    """

    losses: np.ndarray
    probs: np.ndarray
    infinity: float

    def moments(self) -> tuple[float, float]:
        """Mean and variance of the finite losses."""
        weights = self.probs / self.probs.sum()
        mean = float(weights @ self.losses)
        return mean, float(weights @ (self.losses - mean) ** 2)

    def on_grid(self, grid: float) -> LossPmf:
        """Splits each atom between its neighbours on the grid.

        Mass and expected e^-loss are kept, so the divergence is nowhere smaller (connect-the-dots,
        Doroshenko et al. 2022, arXiv 2207.04380). An atom that lies on the grid stays whole.
        """
        index = np.floor(self.losses / grid).astype(np.int64)
        up = np.expm1(index * grid - self.losses) / np.expm1(-grid)
        up = np.clip(up, 0.0, 1.0)
        low = int(index.min())
        probs = np.zeros(int(index.max()) - low + 2)
        np.add.at(probs, index - low, self.probs * (1.0 - up))
        np.add.at(probs, index - low + 1, self.probs * up)
        return LossPmf(grid, low, probs, self.infinity)


@dataclasses.dataclass(frozen=True)
class StepLoss:
    """The two directions of adjacency of one step: the unit is removed, or added."""

    remove: LossPmf
    add: LossPmf


class _FastMixtureLoss(privacy_loss_mechanism.MixtureGaussianPrivacyLoss):
    """dp-accounting's mixture-of-Gaussians loss with a vectorised inverse."""

    def noise_cdf(self, x: Any) -> Any:
        return special.ndtr(np.asarray(x, dtype=float) / self._standard_deviation)

    def noise_log_cdf(self, x: Any) -> Any:
        return special.log_ndtr(np.asarray(x, dtype=float) / self._standard_deviation)

    def privacy_loss_tail(
        self, precision: float = 1e-4
    ) -> privacy_loss_mechanism.TailPrivacyLossDistribution:
        """dp-accounting's, which fails where the answer is the end of its search interval.

        Under REMOVE it looks for a point of [z - largest sensitivity, z], and finds none if the
        distribution function is above the tail mass at the left end by rounding alone (one certain
        sensitivity). The interval is a little wider here; a wider tail only adds grid points.
        """
        z = float(special.ndtri_exp(math.log(0.5) + self._log_mass_truncation_bound))
        lower = z
        if self.adjacency_type == _Adjacency.REMOVE:
            mass = 0.5 * math.exp(self._log_mass_truncation_bound)
            left, right = z - self._max_sens - precision, z
            while right - left > precision:
                middle = 0.5 * (left + right)
                if self.mu_upper_cdf(middle) <= mass:
                    left = middle
                else:
                    right = middle
            lower = left
        return privacy_loss_mechanism.TailPrivacyLossDistribution(
            lower, -z, {math.inf: self.mu_upper_cdf(lower)}
        )

    def _by_rows(self, function: Callable, x: np.ndarray) -> np.ndarray:
        rows = max(1, _CHUNK // len(self.sensitivities))
        parts = [function(x[i : i + rows]) for i in range(0, len(x), rows)]
        return np.concatenate(parts)

    def mu_upper_cdf(self, x: Any) -> Any:
        if np.ndim(x) == 0:
            return super().mu_upper_cdf(x)
        return self._by_rows(super().mu_upper_cdf, np.asarray(x, dtype=float))

    def mu_lower_log_cdf(self, x: Any) -> Any:
        if np.ndim(x) == 0:
            return super().mu_lower_log_cdf(x)
        return self._by_rows(super().mu_lower_log_cdf, np.asarray(x, dtype=float))

    def loss_and_slope(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Privacy loss at x and its derivative, both float64 [n]."""
        sign = 1.0 if self.adjacency_type == _Adjacency.ADD else -1.0
        scaled = sign * self.sensitivities / self._variance
        constants = self._precompute_privacy_loss_constants

        def chunk(part: np.ndarray) -> np.ndarray:
            terms = constants[None, :] + part[:, None] * scaled[None, :]
            top = terms.max(axis=1)
            weights = np.exp(terms - top[:, None])
            total = weights.sum(axis=1)
            return np.stack([top + np.log(total), weights @ scaled / total], axis=1)

        both = self._by_rows(chunk, x)
        return -sign * both[:, 0], -sign * both[:, 1]

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        """dp-accounting's, without a loop in Python over the points (float64 [n], ascending)."""
        epsilons = np.asarray(epsilon, dtype=float)
        never = math.log1p(-self._sampling_prob) if self._sampling_prob < 1.0 else -math.inf
        if self.adjacency_type == _Adjacency.REMOVE:
            deltas, reached = -np.expm1(np.minimum(epsilons, 0.0)), epsilons > never
        else:
            deltas, reached = np.zeros(epsilons.shape), epsilons < -never
        x = self.inverse_privacy_losses(epsilons[reached])
        lower = np.exp(epsilons[reached] + self.mu_lower_log_cdf(x))
        deltas[reached] = self.mu_upper_cdf(x) - lower
        return np.clip(deltas, 0.0, 1.0)

    def inverse_privacy_losses(
        self, privacy_losses: np.ndarray, precision: float = 1e-6
    ) -> np.ndarray:
        targets = np.asarray(privacy_losses, dtype=float)
        if len(targets) == 0:
            return targets
        # The loss decreases in x. What is beyond 60 standard deviations has no double-precision
        # mass, so that a cut-off there changes no divergence. (dp-accounting's own method treats
        # losses within 1e-8 of their limit as the limit, which is wrong for tiny probabilities.)
        high = 60.0 * self._standard_deviation + self._max_sens
        low = -high
        table_x = np.linspace(low, high, 4097)
        table_loss = self.loss_and_slope(table_x)[0]
        cell = np.searchsorted(-table_loss, -targets, side="left")
        below = table_x[np.clip(cell - 1, 0, 4096)]
        above = table_x[np.clip(cell, 0, 4096)]
        x = np.interp(-targets, -table_loss, table_x)
        left = np.arange(len(x))  # Points that still move.
        for _ in range(60):
            here, low_end, high_end = x[left], below[left], above[left]
            loss, slope = self.loss_and_slope(here)
            excess = loss - targets[left]
            low_end = np.where(excess > 0, np.maximum(low_end, here), low_end)
            high_end = np.where(excess < 0, np.minimum(high_end, here), high_end)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                step = here - excess / slope
            inside = np.isfinite(step) & (step >= low_end) & (step <= high_end)
            new = np.where(inside, step, 0.5 * (low_end + high_end))
            x[left], below[left], above[left] = new, low_end, high_end
            left = left[np.abs(new - here) > 1e-10 * self._standard_deviation]
            if len(left) == 0:
                break
        return x


def binomial_weights(trials: int, prob: float) -> tuple[np.ndarray, np.ndarray]:
    """Support and probabilities of Binomial(trials, prob), the negligible tail moved upwards.

    The tail above the kept counts (mass below e^-110) is moved to ``trials`` and the one below to
    the smallest kept count, which can only raise the divergence (Lemma 2 of Charles et al. 2024:
    stochastic dominance). With more than 2048 counts left, neighbouring counts are merged upwards.

    Args:
      trials: group size, >= 1.
      prob: probability of each example, in (0, 1].

    Returns:
      counts: float64 [n], ascending; weights: float64 [n], summing to 1.
    """
    if prob >= 1.0:
        return np.array([float(trials)]), np.array([1.0])
    law = stats.binom(trials, prob)
    mean, sd = trials * prob, math.sqrt(trials * prob * (1 - prob))
    low = max(0, math.floor(mean - 16 * sd - 130))
    high = min(trials, math.ceil(mean + 16 * sd + 130))
    counts = np.arange(low, high + 1)
    weights = law.pmf(counts)
    keep = np.flatnonzero(weights > 1e-48)
    counts, weights = counts[keep[0] : keep[-1] + 1], weights[keep[0] : keep[-1] + 1]
    # Mass below the window moves up to its first count; mass above, up to ``trials``.
    if counts[0] > 0:
        weights[0] += law.cdf(counts[0] - 1)
    if counts[-1] < trials:
        tail = max(float(law.sf(counts[-1])), 0.0)
        if tail > 0:
            counts = np.append(counts, trials)
            weights = np.append(weights, tail)
    while len(counts) > 2048:
        if len(counts) % 2:
            counts, weights = np.append(counts, counts[-1]), np.append(weights, 0.0)
        counts, weights = counts[1::2], weights[::2] + weights[1::2]
    return counts.astype(float), weights / weights.sum()


def mixture_moments(shifts: np.ndarray, weights: np.ndarray) -> dict[str, tuple[float, float]]:
    """Mean and variance of the privacy loss of one step, by direction.

    Args:
      shifts: float64 [k], sensitivities over the noise standard deviation.
      weights: float64 [k], their probabilities.

    Returns:
      {"remove": (mean, variance), "add": (mean, variance)} in nats and nats^2.
    """
    top = float(shifts.max())
    x = np.concatenate([np.linspace(-12.0, 12.0, 961), np.linspace(12.0, 12.0 + top, 961)[1:]])
    log_phi = -0.5 * x**2 - 0.5 * math.log(2 * math.pi)
    terms = np.log(weights)[None, :] + x[:, None] * shifts[None, :] - 0.5 * shifts[None, :] ** 2
    loss = special.logsumexp(terms, axis=1)
    widths = np.gradient(x)
    out = {}
    for name, log_density, sign in (("remove", log_phi + loss, 1.0), ("add", log_phi, -1.0)):
        mass = np.exp(log_density) * widths
        mass = mass / mass.sum()
        mean = float(np.dot(mass, sign * loss))
        out[name] = (mean, max(float(np.dot(mass, (sign * loss - mean) ** 2)), 0.0))
    return out


def mixture_range(shifts: np.ndarray, weights: np.ndarray, log_tail: float) -> float:
    """Width (nats) of the losses that a discretisation of this mixture must cover."""
    widest = 0.0
    for adjacency in (_Adjacency.REMOVE, _Adjacency.ADD):
        bounds = _mixture_loss(shifts, weights, log_tail, adjacency).connect_dots_bounds()
        widest = max(widest, float(bounds.epsilon_upper - bounds.epsilon_lower))
    return widest


def _mixture_loss(
    shifts: np.ndarray, weights: np.ndarray, log_tail: float, adjacency: _Adjacency
) -> _FastMixtureLoss:
    return _FastMixtureLoss(
        1.0, shifts, weights, log_mass_truncation_bound=log_tail, adjacency_type=adjacency
    )


def mixture_step(shifts: np.ndarray, weights: np.ndarray, grid: float, log_tail: float) -> StepLoss:
    """Discretises N(0, 1) against the mixture of N(shift, 1), both directions.

    Args:
      shifts: float64 [k], sensitivities over the noise standard deviation.
      weights: float64 [k], their probabilities, summing to 1.
      grid: distance between losses (nats).
      log_tail: log of the probability that may be moved to an infinite loss.
    """
    pmfs = []
    for adjacency in (_Adjacency.REMOVE, _Adjacency.ADD):
        loss = _mixture_loss(shifts, weights, log_tail, adjacency)
        bounds = loss.connect_dots_bounds()
        low = math.floor(bounds.epsilon_lower / grid)
        high = math.ceil(bounds.epsilon_upper / grid)
        pmfs.append(pmf_from_divergence(loss.get_delta_for_epsilon, grid, low, high))
    return StepLoss(remove=pmfs[0], add=pmfs[1])


def pmf_from_divergence(
    divergence: Callable[[np.ndarray], np.ndarray], grid: float, low: int, high: int
) -> LossPmf:
    """Connect-the-dots on a divergence curve: ``divergence(epsilons [n]) -> deltas [n]``.

    Doroshenko et al. 2022, arXiv 2207.04380, Algorithm 1: the law on the grid whose divergences are
    those of the curve at every grid point, and above it between them.
    """
    deltas = divergence(np.arange(low, high + 1) * grid)
    deltas = np.clip(np.maximum.accumulate(deltas[::-1])[::-1], 0.0, 1.0)
    # drops[i] falls between points i - 1 and i; before the first the curve is 1 - e^epsilon.
    drops, decay = -np.diff(deltas), math.exp(-grid)
    probs = np.append(0.0, drops / -math.expm1(-grid))
    probs[:-1] -= decay * probs[1:]
    probs[0] += 1.0 - deltas[0]
    # Rounding can leave masses of about -1e-17; 0 in their place errs on the safe side.
    return LossPmf(grid, low, np.maximum(probs, 0.0), float(deltas[-1]))


def mixed(first: LossPmf, second: LossPmf, share: float) -> LossPmf:
    """The loss of a step that is ``second`` with probability ``share``, visibly, else ``first``."""
    low = min(first.low, second.low)
    size = max(first.low + len(first.probs), second.low + len(second.probs)) - low
    probs = np.zeros(size)
    for pmf, weight in ((first, 1.0 - share), (second, share)):
        probs[pmf.low - low : pmf.low - low + len(pmf.probs)] += weight * pmf.probs
    infinity = (1.0 - share) * first.infinity + share * second.infinity
    return LossPmf(first.grid, low, probs, infinity)
