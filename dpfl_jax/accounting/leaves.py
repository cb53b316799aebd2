"""From an event to the elementary steps ("leaves") it composes, each with its loss distribution.

Gaussians are merged exactly (their squared signal-to-noise ratios add up); Poisson-sampled
Gaussians are mixtures of two Gaussians; losses with atoms (Laplace, randomised response,
(epsilon, delta)) have closed forms.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Protocol

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation, dp_event
from scipy import special, stats

from dpfl_jax.accounting import discretize
from dpfl_jax.accounting.discretize import Atoms, LossPmf, StepLoss
from dpfl_jax.accounting.event_types import (
    ApproximateDpEvent,
    FixedSizeGaussianDpEvent,
    TwoStageSampledDpEvent,
)
from dpfl_jax.accounting.events import check_count, check_noise, check_prob
from dpfl_jax.errors import BadInputError

_REPLACE = NeighboringRelation.REPLACE_ONE
# What may be Poisson-sampled.
_SAMPLED = (dp_accounting.GaussianDpEvent, dp_accounting.LaplaceDpEvent)

Moments = dict[str, tuple[float, float]]
# Bounds on one discretisation: points, and points times sensitivities (a few seconds of work).
MAX_STEP_POINTS = 1 << 18
MAX_STEP_WORK = 1 << 22


class Leaf(Protocol):
    """One elementary step."""

    def __hash__(self) -> int:
        """Leaves are dictionary keys."""

    def moments(self) -> Moments:
        """Mean and variance of its loss, by direction."""

    def finest_grid(self, log_tail: float) -> float:
        """Smallest distance between losses that keeps its table within memory."""

    def build(self, grid: float, log_tail: float) -> StepLoss:
        """Its discretised loss."""

    @property
    def top(self) -> float:
        """The largest loss, if it is an atom (its mass does not fade out towards it); else 0."""

    @property
    def unit(self) -> float:
        """All atoms lie at whole multiples of it; 0 if there is no such number."""

    @property
    def discrete(self) -> bool:
        """Whether the loss consists of such atoms alone."""


class _Smooth:
    """A loss without atoms."""

    top = 0.0
    unit = 0.0
    discrete = False


@dataclasses.dataclass(frozen=True)
class EventLeaf:
    """A leaf that is known by its event."""

    event: Any
    relation: NeighboringRelation


@dataclasses.dataclass(frozen=True)
class MixtureLeaf(_Smooth):
    """N(0, 1) against a mixture of N(shift, 1): Gaussian, Poisson-sampled Gaussian, ELS users.

    Attributes:
      shifts: sensitivities over the noise standard deviation, >= 0.
      weights: their probabilities.
    """

    shifts: tuple[float, ...]
    weights: tuple[float, ...]

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return np.asarray(self.shifts), np.asarray(self.weights)

    @property
    def mean_shift(self) -> float:
        """Mean sensitivity over noise: what is left of the mixture when the noise is large."""
        shifts, weights = self._arrays()
        return float(shifts @ weights)

    def moments(self) -> Moments:
        """Mean and variance of its loss, by direction."""
        return _cached_moments(self)

    def finest_grid(self, log_tail: float) -> float:
        """Smallest grid within ``MAX_STEP_POINTS`` points and ``MAX_STEP_WORK`` exponentials."""
        points = min(MAX_STEP_POINTS, MAX_STEP_WORK // len(self.shifts))
        return discretize.mixture_range(*self._arrays(), log_tail) / points

    def build(self, grid: float, log_tail: float) -> StepLoss:
        """Its discretised loss."""
        return discretize.mixture_step(*self._arrays(), grid, log_tail)


@functools.lru_cache(maxsize=256)
def _cached_moments(leaf: MixtureLeaf) -> Moments:
    return discretize.mixture_moments(np.asarray(leaf.shifts), np.asarray(leaf.weights))


class AtomicLeaf(EventLeaf):
    """A loss of finitely many values: randomised response, discrete Laplace, (epsilon, delta)."""

    def moments(self) -> Moments:
        """Mean and variance of its finite losses, by direction."""
        remove, add = _atoms(self)
        return {"remove": remove.moments(), "add": add.moments()}

    def finest_grid(self, log_tail: float) -> float:
        """Smallest grid within ``MAX_STEP_POINTS`` points."""
        return max(np.ptp(atoms.losses) for atoms in _atoms(self)) / MAX_STEP_POINTS

    def build(self, grid: float, log_tail: float) -> StepLoss:
        """Each atom on its grid point, or split between its neighbours."""
        remove, add = _atoms(self)
        return StepLoss(remove=remove.on_grid(grid), add=add.on_grid(grid))

    @property
    def top(self) -> float:
        """The largest loss of either direction."""
        return max(float(atoms.losses.max()) for atoms in _atoms(self))

    @property
    def unit(self) -> float:
        """Distance between the atoms, where they are evenly spaced about 0."""
        if isinstance(self.event, dp_event.DiscreteLaplaceDpEvent):
            return self.event.noise_parameter * (1 if self.event.sensitivity % 2 else 2)
        # Randomised response against the uniform answer has two unrelated losses.
        return 0.0 if self.relation == NeighboringRelation.REPLACE_SPECIAL else self.top

    @property
    def discrete(self) -> bool:
        """True where the atoms have a common unit."""
        return self.unit > 0


@functools.lru_cache(maxsize=64)
def _atoms(leaf: AtomicLeaf) -> tuple[Atoms, Atoms]:
    """Losses of both directions (remove, add)."""
    event = leaf.event
    if isinstance(event, ApproximateDpEvent):
        losses = np.array([-event.epsilon, event.epsilon])
        # The pair that attains every (epsilon, delta): Kairouz, Oh, Viswanath 2015, Theorem 3.3.
        both = Atoms(losses, (1.0 - event.delta) * special.expit(losses), event.delta)
        return both, both
    if isinstance(event, dp_event.DiscreteLaplaceDpEvent):
        a, size = event.noise_parameter, event.sensitivity
        x = np.arange(size + 1)
        probs = np.exp(-a * x) * math.tanh(0.5 * a)
        probs[0] = probs[-1] = 0.0
        # Beyond either end the loss stays at -a * size or a * size; e^(a * size) is their ratio.
        probs[0], probs[-1] = special.expit(a), special.expit(-a) * math.exp(-a * (size - 1))
        both = Atoms(a * (size - 2.0 * x), probs, 0.0)
        return both, both
    assert isinstance(event, dp_event.RandomizedResponseDpEvent)
    p, k = event.noise_parameter, event.num_buckets
    # Log probabilities of the true answer and of each other one.
    log_true, log_other = math.log1p(-p * (k - 1) / k), math.log(p) - math.log(k)
    if leaf.relation == NeighboringRelation.REPLACE_SPECIAL:
        losses = np.array([log_true + math.log(k), log_other + math.log(k)])
        remove = np.array([math.exp(log_true), (k - 1) * math.exp(log_other)])
        return Atoms(losses, remove, 0.0), Atoms(-losses, np.array([1.0, k - 1.0]) / k, 0.0)
    log_probs = np.array([log_true, log_other])
    losses, probs = log_probs - log_probs[::-1], np.exp(log_probs)
    if k > 2:
        losses, probs = np.append(losses, 0.0), np.append(probs, (k - 2) * math.exp(log_other))
    both = Atoms(losses, probs, 0.0)
    return both, both


class LaplaceLeaf(EventLeaf):
    """Laplace noise, perhaps Poisson-sampled."""

    @property
    def sampling_probability(self) -> float:
        """Of taking part."""
        return getattr(self.event, "sampling_probability", 1.0)

    @property
    def shift(self) -> float:
        """The largest loss without sampling."""
        return 1.0 / getattr(self.event, "event", self.event).noise_multiplier

    def _tops(self) -> tuple[float, float]:
        """Largest loss by direction; the smallest of one is minus the largest of the other."""
        if self.sampling_probability >= 1.0:
            return self.shift, self.shift
        log_q, log_rest = (
            math.log(self.sampling_probability),
            math.log1p(-self.sampling_probability),
        )
        remove = float(np.logaddexp(log_rest, log_q + self.shift))
        return remove, -math.log1p(self.sampling_probability * math.expm1(-self.shift))

    def divergences(self, epsilons: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Hockey-stick divergence at ``epsilons`` in either direction, both float64 [n].

        Sampling amplifies exactly, with S = (1-q) Q + q P and a = e^epsilon:
        H_a(S || Q) = q H_b(P || Q) for b = (a - 1 + q) / q, or 1 - a if that is negative;
        H_a(Q || S) = w H_b(Q || P) for b = a q / w and w = 1 - a (1 - q), or 0 if that is negative.
        """
        q = self.sampling_probability
        if q >= 1.0:
            both = self._unsampled(epsilons)
            return both, both
        log_q, log_rest = math.log(q), math.log1p(-q)
        with np.errstate(divide="ignore", invalid="ignore"):
            removed = q * self._unsampled(
                epsilons + np.log1p(-np.exp(np.minimum(log_rest - epsilons, 0.0))) - log_q
            )
            taken = -np.expm1(np.minimum(epsilons + log_rest, 0.0))
            added = taken * self._unsampled(epsilons + log_q - np.log(taken))
        removed = np.where(epsilons > log_rest, removed, -np.expm1(np.minimum(epsilons, 0.0)))
        return removed, np.where(taken > 0.0, added, 0.0)

    def _unsampled(self, epsilons: np.ndarray) -> np.ndarray:
        """1 - e^((epsilon - shift) / 2) between the smallest and the largest loss."""
        inside = -np.expm1(np.minimum(0.5 * (epsilons - self.shift), 0.0))
        return np.where(epsilons > -self.shift, inside, -np.expm1(np.minimum(epsilons, 0.0)))

    def moments(self) -> Moments:
        """Of a fine discretisation."""
        return _laplace_moments(self)

    def finest_grid(self, log_tail: float) -> float:
        """Smallest grid within ``MAX_STEP_POINTS`` points."""
        return sum(self._tops()) / MAX_STEP_POINTS

    def build(self, grid: float, log_tail: float) -> StepLoss:
        """Connect-the-dots on the exact divergences."""
        remove, add = (math.ceil(top / grid) for top in self._tops())

        def one(direction: int, low: int, high: int) -> LossPmf:
            return discretize.pmf_from_divergence(
                lambda e: self.divergences(e)[direction], grid, low, high
            )

        return StepLoss(remove=one(0, -add, remove), add=one(1, -remove, add))

    @property
    def top(self) -> float:
        """The largest loss of either direction."""
        return max(self._tops())

    @property
    def unit(self) -> float:
        """The largest loss: an atom, as is its negative."""
        return self.shift if self.sampling_probability >= 1.0 else 0.0

    @property
    def discrete(self) -> bool:
        """Between its two atoms the loss has a density."""
        return False


@functools.lru_cache(maxsize=256)
def _laplace_moments(leaf: LaplaceLeaf) -> Moments:
    step = leaf.build(max(2.0 * leaf.top / 4096, 1e-300), -50.0)
    return {"remove": _pmf_moments(step.remove), "add": _pmf_moments(step.add)}


class ReplaceGaussianLeaf(_Smooth, EventLeaf):
    """A Poisson-sampled Gaussian under replace-one: the unit's vector turns round."""

    def moments(self) -> Moments:
        """Measured."""
        return _probed_moments(self)

    def finest_grid(self, log_tail: float) -> float:
        """Smallest grid within ``MAX_STEP_POINTS`` points."""
        return 2.0 * self._largest(log_tail) / MAX_STEP_POINTS

    def build(self, grid: float, log_tail: float) -> StepLoss:
        """Connect-the-dots; the two directions are alike."""
        high = math.ceil(self._largest(log_tail) / grid)
        pmf = discretize.pmf_from_divergence(self._divergence, grid, -high, high)
        return StepLoss(remove=pmf, add=pmf)

    def _constants(self) -> tuple[float, float]:
        return self.event.sampling_probability, 1.0 / self.event.event.noise_multiplier

    def _largest(self, log_tail: float) -> float:
        """Loss that is exceeded with probability below e^log_tail."""
        q, shift = self._constants()
        x = float(special.ndtri_exp(log_tail)) - shift
        rest = math.log1p(-q) + 0.5 * shift**2
        return float(
            np.logaddexp(math.log(q) - shift * x, rest)
            - np.logaddexp(math.log(q) + shift * x, rest)
        )

    def _divergence(self, epsilons: np.ndarray) -> np.ndarray:
        """At x = (asinh(-alpha sinh(e / 2)) - e / 2) / shift the loss is e (dp-accounting)."""
        q, shift = self._constants()
        half = 0.5 * np.abs(epsilons)
        with np.errstate(divide="ignore"):
            log_sinh = half + np.log(-np.expm1(-2.0 * half)) - math.log(2.0)
        log_scaled = 0.5 * shift**2 + math.log1p(-q) - math.log(q) + log_sinh
        small = np.arcsinh(np.exp(np.minimum(log_scaled, 20.0)))
        turned = np.where(log_scaled < 20.0, small, log_scaled + math.log(2.0))
        x = -np.sign(epsilons) * (turned + half) / shift
        here = (1.0 - q) * special.ndtr(x)
        log_other = np.logaddexp(
            math.log1p(-q) + special.log_ndtr(x), math.log(q) + special.log_ndtr(x - shift)
        )
        found = here + q * special.ndtr(x + shift) - np.exp(epsilons + log_other)
        return np.clip(found, 0.0, 1.0)


class TruncatedLeaf(_Smooth, EventLeaf):
    """Poisson sampling cut to a batch size: dp-accounting's decomposition.

    Either the batch is not cut, and it is a Poisson-sampled Gaussian; or it is, and the unit takes
    another's place (at most a replacement); section 4.3 of the supplement to its PLD library.
    """

    def _parts(self) -> tuple[Leaf, Leaf | None, float]:
        return _truncated_parts(self)

    def moments(self) -> Moments:
        """Of the mixture of the two cases."""
        plain, cut, share = self._parts()
        first = plain.moments()
        if cut is None:
            return first
        second, out = cut.moments(), {}
        for name in first:
            mean = (1.0 - share) * first[name][0] + share * second[name][0]
            square = sum(
                weight * (variance + mean_of**2)
                for weight, (mean_of, variance) in (
                    (1.0 - share, first[name]),
                    (share, second[name]),
                )
            )
            out[name] = (mean, max(square - mean**2, 0.0))
        return out

    def finest_grid(self, log_tail: float) -> float:
        """The coarser of the two cases'."""
        plain, cut, _ = self._parts()
        return max(leaf.finest_grid(log_tail) for leaf in (plain, cut) if leaf is not None)

    def build(self, grid: float, log_tail: float) -> StepLoss:
        """Both cases on one grid, mixed."""
        plain, cut, share = self._parts()
        first = plain.build(grid, log_tail)
        if cut is None:
            return first
        second = cut.build(grid, log_tail)
        return StepLoss(
            remove=discretize.mixed(first.remove, second.remove, share),
            add=discretize.mixed(first.add, second.add, share),
        )


@functools.lru_cache(maxsize=64)
def _truncated_parts(leaf: TruncatedLeaf) -> tuple[Leaf, Leaf | None, float]:
    """The step that is not cut, the one that is (or None), and the probability of the latter."""
    event = leaf.event
    size, cap, q = event.dataset_size, event.truncated_batch_size, event.sampling_probability
    gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
    plain = _as_leaf(_leaf(dp_accounting.PoissonSampledDpEvent(q, gaussian), leaf.relation))
    share = float(stats.binom.sf(cap - 1, size - 1, q))
    if share == 0.0:
        return plain, None, 0.0
    taken = float(stats.binom.sf(cap, size, q)) * cap / share / size
    half = dp_accounting.GaussianDpEvent(event.noise_multiplier / 2.0)
    cut = _leaf(dp_accounting.PoissonSampledDpEvent(min(taken, 1.0), half), _REPLACE)
    return plain, _as_leaf(cut), share


def _as_leaf(found: Leaf | float | str) -> Leaf:
    if isinstance(found, str):  # nothing happens
        return AtomicLeaf(ApproximateDpEvent(0.0, 0.0), _REPLACE)
    return MixtureLeaf((math.sqrt(found),), (1.0,)) if isinstance(found, float) else found


class FixedSizeLeaf(_Smooth, EventLeaf):
    """A batch of fixed size without replacement."""

    def moments(self) -> Moments:
        """Measured."""
        return _probed_moments(self)

    def finest_grid(self, log_tail: float) -> float:
        """Smallest grid within ``MAX_STEP_POINTS`` points."""
        return 2.0 * _fixed_size_reach(self.event, log_tail) / MAX_STEP_POINTS

    def build(self, grid: float, log_tail: float) -> StepLoss:
        """Its discretised loss."""
        return _fixed_size_step(self.event, grid, log_tail)


@functools.lru_cache(maxsize=256)
def _probed_moments(leaf: Leaf) -> Moments:
    """Of a coarse discretisation, refined until the grid is small beside the spread."""
    finest = leaf.finest_grid(-50.0)
    grid = max(0.1, finest)
    for _ in range(12):
        step = leaf.build(grid, -50.0)
        found = {"remove": _pmf_moments(step.remove), "add": _pmf_moments(step.add)}
        smallest = min(variance for _, variance in found.values())
        if grid <= 0.3 * math.sqrt(smallest) or grid <= max(finest, 1e-5):
            return found
        grid = max(grid / 4.0, finest)
    return found


def _pmf_moments(pmf: LossPmf) -> tuple[float, float]:
    weights = pmf.probs / pmf.probs.sum()
    mean = float(weights @ pmf.losses)
    return mean, float(weights @ (pmf.losses - mean) ** 2)


def _fixed_size_loss(event: FixedSizeGaussianDpEvent, log_tail: float) -> Any:
    q = event.batch_size / event.dataset_size
    shifts, weights = np.array([0.0, 2.0 / event.noise_multiplier]), np.array([1.0 - q, q])
    return discretize._mixture_loss(shifts, weights, log_tail, discretize._Adjacency.REMOVE)


def _fixed_size_reach(event: FixedSizeGaussianDpEvent, log_tail: float) -> float:
    """The largest loss of a table."""
    return float(_fixed_size_loss(event, log_tail).connect_dots_bounds().epsilon_upper)


def _fixed_size_step(event: FixedSizeGaussianDpEvent, grid: float, log_tail: float) -> StepLoss:
    """Fixed-size batches without replacement, replace-one.

    Balle, Barthe, Gaboardi 2018 (Theorem 11) and Zhu, Dong, Wang 2022 (Proposition 30): for
    e^eps >= 1 the divergence is at most that of (1-q) Q + q P against Q, where P, Q dominate the
    Gaussian under replacement (distance 2C), q = batch / data set. For e^eps < 1 the symmetry of
    the relation gives H_a(A||B) = 1 - a + a H_{1/a}(B||A).
    """
    loss = _fixed_size_loss(event, log_tail)
    high = math.ceil(loss.connect_dots_bounds().epsilon_upper / grid)

    def divergence(epsilons: np.ndarray) -> np.ndarray:
        upper = loss.get_delta_for_epsilon(np.arange(0, high + 1) * grid)
        index = np.abs(np.round(epsilons / grid).astype(int))
        positive = upper[index]
        below = np.minimum(epsilons, 0.0)
        return np.where(epsilons >= 0, positive, -np.expm1(below) + np.exp(below) * positive)

    pmf = discretize.pmf_from_divergence(divergence, grid, -high, high)
    return StepLoss(remove=pmf, add=pmf)


@dataclasses.dataclass(frozen=True)
class TwoStageLeaf:
    """A round of local steps that happens with a probability, visibly (Liu et al. 2024, Lemma 2).

    The outcome is (took part?, outputs): with probability 1 - lambda the loss is 0, otherwise it
    is that of the local steps, in both directions.
    """

    probability: float
    inner: Leaf
    local_steps: int

    def moments(self) -> Moments:
        """From those of the local steps, which add up."""
        out = {}
        for name, (mean, variance) in self.inner.moments().items():
            first = self.local_steps * mean
            second = self.local_steps * variance + first**2
            out[name] = (
                self.probability * first,
                self.probability * second - (self.probability * first) ** 2,
            )
        return out

    @property
    def top(self) -> float:
        """That of one local step."""
        return self.inner.top

    @property
    def unit(self) -> float:
        """That of one local step: multiples of it add up to multiples."""
        return self.inner.unit

    @property
    def discrete(self) -> bool:
        """As one local step."""
        return self.inner.discrete

    def finest_grid(self, log_tail: float) -> float:
        """That of one local step."""
        return self.inner.finest_grid(log_tail)

    def build(self, grid: float, log_tail: float) -> StepLoss:
        """The discretised loss of one local step; ``Part`` composes and mixes it."""
        return self.inner.build(grid, log_tail - math.log(self.local_steps))


@dataclasses.dataclass(frozen=True)
class Flat:
    """An event taken apart.

    Attributes:
      leaves: each kind of step and how often it runs.
      gaussian: sum of 1/sigma^2 over the plain Gaussian steps (0 if none).
      private: False if something in it has no finite guarantee.
    """

    leaves: tuple[tuple[Leaf, int], ...]
    gaussian: float
    private: bool


def flatten(event: dp_accounting.DpEvent, relation: NeighboringRelation) -> Flat:
    """Takes an event apart.

    Raises:
      BadInputError: if no accountant knows a part of it under this adjacency.
    """
    counts: dict[Leaf, int] = {}
    gaussian = 0.0
    private = True
    stack: list[tuple[dp_accounting.DpEvent, int]] = [(event, 1)]
    while stack:
        current, count = stack.pop()
        if isinstance(current, dp_accounting.ComposedDpEvent):
            stack.extend((part, count) for part in current.events)
        elif isinstance(current, dp_accounting.SelfComposedDpEvent):
            if current.count > 0:
                stack.append((current.event, count * current.count))
        elif isinstance(current, dp_accounting.NoOpDpEvent):
            continue
        elif isinstance(current, dp_accounting.NonPrivateDpEvent):
            private = False
        else:
            leaf = _leaf(current, relation)
            if isinstance(leaf, str):
                private = private and leaf != "no privacy"
            elif isinstance(leaf, float):
                gaussian += count * leaf
            else:
                counts[leaf] = counts.get(leaf, 0) + count
    return Flat(tuple(counts.items()), gaussian, private)


def _leaf(event: dp_accounting.DpEvent, relation: NeighboringRelation) -> Leaf | float | str:
    """A leaf, or 1/sigma^2 of a plain Gaussian, or "nothing" / "no privacy"."""
    replace = relation == _REPLACE
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        prob = check_prob(event.sampling_probability)
        if prob == 0 and isinstance(event.event, _SAMPLED):
            return "nothing"
        if prob == 1:
            return _leaf(event.event, relation)
        if isinstance(event.event, dp_accounting.GaussianDpEvent):
            sigma = check_noise(event.event.noise_multiplier)
            if sigma == 0:
                return "no privacy"
            if not replace:
                return MixtureLeaf((0.0, 1.0 / sigma), (1.0 - prob, prob))
            return ReplaceGaussianLeaf(event, relation)
        if isinstance(event.event, dp_accounting.LaplaceDpEvent) and not replace:
            sigma = check_noise(event.event.noise_multiplier)
            return LaplaceLeaf(event, relation) if sigma > 0 else "no privacy"
    if isinstance(event, dp_accounting.GaussianDpEvent):
        sigma = check_noise(event.noise_multiplier)
        return ((2.0 if replace else 1.0) / sigma) ** 2 if sigma > 0 else "no privacy"
    if isinstance(event, dp_accounting.LaplaceDpEvent) and not replace:
        return LaplaceLeaf(event, relation) if check_noise(event.noise_multiplier) else "no privacy"
    if isinstance(event, dp_event.DiscreteLaplaceDpEvent) and not replace:
        return _discrete_laplace(event, relation)
    if isinstance(event, dp_event.RandomizedResponseDpEvent) and relation in (
        _REPLACE,
        NeighboringRelation.REPLACE_SPECIAL,
    ):
        prob = check_prob(event.noise_parameter, "noise parameter of randomised response")
        if check_count(event.num_buckets, "number of buckets", 1) == 1 or prob == 1:
            return "nothing"
        return AtomicLeaf(event, relation) if prob > 0 else "no privacy"
    if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
        sizes = event.dataset_size, event.truncated_batch_size
        if check_prob(event.sampling_probability) == 0 or 0 in sizes:
            return "nothing"
        sigma = check_noise(event.noise_multiplier)
        return TruncatedLeaf(event, relation) if sigma > 0 else "no privacy"
    if isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
        if replace:
            raise BadInputError(
                "a mixture-of-Gaussians event has no accountant under replace-one adjacency: use "
                "add-or-remove, or account a replacement as two add-or-remove steps"
            )
        return _mixture(event)
    if isinstance(event, TwoStageSampledDpEvent):
        return _two_stage(event, relation)
    if isinstance(event, FixedSizeGaussianDpEvent):
        if not replace:
            raise BadInputError(
                "fixed-size sampling without replacement is accounted under replace-one adjacency "
                "only: ask for the replace-one guarantee, or sample by Poisson"
            )
        if event.batch_size == 0:
            return "nothing"
        sigma = check_noise(event.noise_multiplier)
        if sigma == 0:
            return "no privacy"
        if event.batch_size >= event.dataset_size:
            return (2.0 / sigma) ** 2
        return FixedSizeLeaf(event, relation)
    if isinstance(event, ApproximateDpEvent):
        check_prob(event.delta, "delta of an (epsilon, delta) event")
        if not event.epsilon >= 0:
            raise BadInputError(
                f"the epsilon of an (epsilon, delta) event is {event.epsilon}, but it must be 0 or "
                "more"
            )
        if event.epsilon == 0.0 and event.delta == 0.0:
            return "nothing"
        private = math.isfinite(event.epsilon) and event.delta < 1.0
        return AtomicLeaf(event, relation) if private else "no privacy"
    raise BadInputError(
        f"no accountant knows the event {type(event).__name__} under {relation.name} adjacency:"
        " compose Gaussian, Poisson-sampled Gaussian, mixture-of-Gaussians, two-stage or "
        "fixed-size events"
    )


def _discrete_laplace(
    event: dp_event.DiscreteLaplaceDpEvent, relation: NeighboringRelation
) -> Leaf | str:
    size = check_count(event.sensitivity, "sensitivity of discrete Laplace noise")
    a = event.noise_parameter
    if not a >= 0:
        raise BadInputError(
            f"the noise parameter of discrete Laplace noise is {a}, but it must be above 0"
        )
    if size == 0:
        return "nothing"
    # Its parameter is one over the scale; 0 is no distribution at all, and counts as no noise.
    if a == 0 or check_noise(1.0 / (a * size)) == 0:
        return "no privacy"
    if size > MAX_STEP_POINTS:
        raise BadInputError(
            f"a discrete Laplace event of sensitivity {size} has more losses than a table can "
            "hold: account it as Laplace noise, or rescale it"
        )
    return AtomicLeaf(event, relation)


def _mixture(event: dp_accounting.dp_event.MixtureOfGaussiansDpEvent) -> Leaf | float | str:
    sensitivities = np.asarray(event.sensitivities, dtype=float)
    weights = np.asarray(event.sampling_probs, dtype=float)
    kept = weights > 0
    sensitivities, weights = sensitivities[kept], weights[kept]
    if sensitivities.max(initial=0.0) == 0.0:
        return "nothing"
    sigma = event.standard_deviation
    if check_noise(sigma / sensitivities.max()) == 0:
        return "no privacy"
    if len(sensitivities) == 1:
        return float((sensitivities[0] / sigma) ** 2)
    return MixtureLeaf(tuple(sensitivities / sigma), tuple(weights))


def _two_stage(event: TwoStageSampledDpEvent, relation: NeighboringRelation) -> Leaf | str:
    prob = check_prob(event.participation_probability, "participation probability")
    if prob == 0 or event.local_steps == 0:
        return "nothing"
    inner = _leaf(event.event, relation)
    if isinstance(inner, str):
        return inner
    steps = event.local_steps
    if isinstance(inner, float):
        inner, steps = MixtureLeaf((math.sqrt(steps * inner),), (1.0,)), 1
    return TwoStageLeaf(event.participation_probability, inner, steps)
