"""From an event to the elementary steps ("leaves") it composes, each with its loss distribution.

Gaussians are merged exactly (their squared signal-to-noise ratios add up); Poisson-sampled
Gaussians are mixtures of two Gaussians; anything else that dp-accounting knows is discretised by
its own accountant.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Protocol

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant, common, privacy_loss_distribution

from dpfl_jax.accounting import discretize
from dpfl_jax.accounting.discretize import LossPmf, StepLoss
from dpfl_jax.accounting.event_types import (
    ApproximateDpEvent,
    FixedSizeGaussianDpEvent,
    TwoStageSampledDpEvent,
)
from dpfl_jax.errors import BadInputError

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


@dataclasses.dataclass(frozen=True)
class MixtureLeaf:
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


@dataclasses.dataclass(frozen=True)
class LibraryLeaf:
    """Any other single event that dp-accounting's PLD accountant supports."""

    event: dp_accounting.DpEvent
    relation: NeighboringRelation

    def moments(self) -> Moments:
        """Measured on a coarse discretisation that is refined until the grid is small beside it."""
        return _probed_moments(self)

    def finest_grid(self, log_tail: float) -> float:
        """A safe guess; these events are used at ordinary noise."""
        return 1e-6

    def build(self, grid: float, log_tail: float) -> StepLoss:
        """dp-accounting's own discretisation (its tail cut is e^-50 at most)."""
        if isinstance(self.event, FixedSizeGaussianDpEvent):
            return _fixed_size_step(self.event, grid, log_tail)
        if isinstance(self.event, ApproximateDpEvent):
            pld = privacy_loss_distribution.from_privacy_parameters(
                common.DifferentialPrivacyParameters(self.event.epsilon, self.event.delta),
                value_discretization_interval=grid,
            )
            pmf = discretize.from_library(pld._pmf_remove, grid)
            return StepLoss(remove=pmf, add=pmf)
        accountant = PLDAccountant(self.relation, value_discretization_interval=grid)
        accountant.compose(self.event)
        pld = accountant._pld
        return StepLoss(
            remove=discretize.from_library(pld._pmf_remove, grid),
            add=discretize.from_library(pld._pmf_add, grid),
        )


@functools.lru_cache(maxsize=256)
def _probed_moments(leaf: LibraryLeaf) -> Moments:
    grid = 0.1
    for _ in range(12):
        step = leaf.build(grid, -50.0)
        found = {"remove": _pmf_moments(step.remove), "add": _pmf_moments(step.add)}
        smallest = min(variance for _, variance in found.values())
        if grid <= 0.3 * math.sqrt(smallest) or grid < 1e-5:
            return found
        grid /= 4.0
    return found


def _pmf_moments(pmf: LossPmf) -> tuple[float, float]:
    weights = pmf.probs / pmf.probs.sum()
    mean = float(weights @ pmf.losses)
    return mean, float(weights @ (pmf.losses - mean) ** 2)


def _fixed_size_step(event: FixedSizeGaussianDpEvent, grid: float, log_tail: float) -> StepLoss:
    """Fixed-size batches without replacement, replace-one.

    Balle, Barthe, Gaboardi 2018 (Theorem 11) and Zhu, Dong, Wang 2022 (Proposition 30): for
    e^eps >= 1 the divergence is at most that of (1-q) Q + q P against Q, where P, Q dominate the
    Gaussian under replacement (distance 2C), q = batch / data set. For e^eps < 1 the symmetry of
    the relation gives H_a(A||B) = 1 - a + a H_{1/a}(B||A).
    """
    q = event.batch_size / event.dataset_size
    shift = 2.0 / event.noise_multiplier
    shifts, weights = np.array([0.0, shift]), np.array([1.0 - q, q])
    if q >= 1.0:
        shifts, weights = np.array([shift]), np.array([1.0])
    loss = discretize._mixture_loss(shifts, weights, log_tail, discretize._Adjacency.REMOVE)
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
    replace = relation == NeighboringRelation.REPLACE_ONE
    if isinstance(event, dp_accounting.GaussianDpEvent):
        if event.noise_multiplier == 0:
            return "no privacy"
        return ((2.0 if replace else 1.0) / event.noise_multiplier) ** 2
    if isinstance(event, dp_accounting.PoissonSampledDpEvent) and isinstance(
        event.event, dp_accounting.GaussianDpEvent
    ):
        prob, sigma = event.sampling_probability, event.event.noise_multiplier
        if prob == 0:
            return "nothing"
        if sigma == 0:
            return "no privacy"
        if prob == 1:
            return _leaf(event.event, relation)
        if not replace:
            return MixtureLeaf((0.0, 1.0 / sigma), (1.0 - prob, prob))
    if isinstance(event, dp_accounting.dp_event.MixtureOfGaussiansDpEvent):
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
        if event.noise_multiplier == 0:
            return "no privacy"
        if event.batch_size >= event.dataset_size:
            return (2.0 / event.noise_multiplier) ** 2
        return LibraryLeaf(event, relation)
    if isinstance(event, ApproximateDpEvent):
        if event.epsilon == 0.0 and event.delta == 0.0:
            return "nothing"
        return LibraryLeaf(event, relation)
    if not PLDAccountant(relation).supports(event):
        raise BadInputError(
            f"no accountant knows the event {type(event).__name__} under {relation.name} adjacency:"
            " compose Gaussian, Poisson-sampled Gaussian, mixture-of-Gaussians, two-stage or "
            "fixed-size events"
        )
    return LibraryLeaf(event, relation)


def _mixture(event: dp_accounting.dp_event.MixtureOfGaussiansDpEvent) -> Leaf | float | str:
    sensitivities = np.asarray(event.sensitivities, dtype=float)
    weights = np.asarray(event.sampling_probs, dtype=float)
    kept = weights > 0
    sensitivities, weights = sensitivities[kept], weights[kept]
    if sensitivities.max(initial=0.0) == 0.0:
        return "nothing"
    sigma = event.standard_deviation
    if sigma == 0:
        return "no privacy"
    if len(sensitivities) == 1:
        return float((sensitivities[0] / sigma) ** 2)
    return MixtureLeaf(tuple(sensitivities / sigma), tuple(weights))


def _two_stage(event: TwoStageSampledDpEvent, relation: NeighboringRelation) -> Leaf | str:
    if event.participation_probability == 0 or event.local_steps == 0:
        return "nothing"
    inner = _leaf(event.event, relation)
    if isinstance(inner, str):
        return inner
    steps = event.local_steps
    if isinstance(inner, float):
        inner, steps = MixtureLeaf((math.sqrt(steps * inner),), (1.0,)), 1
    return TwoStageLeaf(event.participation_probability, inner, steps)
