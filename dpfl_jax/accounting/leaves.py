"""Decomposition of an event into elementary steps ("leaves"), each with its loss distribution.

Gaussians are merged exactly (their squared signal-to-noise ratios add up); Poisson-sampled
Gaussians are mixtures of two Gaussians; the losses of an (epsilon, delta) guarantee are atoms.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation, dp_event
from scipy import special, stats

from dpfl_jax.accounting.allocation import allocated
from dpfl_jax.accounting.discretize import (
    Atoms,
    Mixture,
    StepLoss,
    mixed,
    mixture_step,
)
from dpfl_jax.accounting.event_types import (
    AllocatedDpEvent,
    ApproximateDpEvent,
    FilteredDpEvent,
    FixedSizeGaussianDpEvent,
    OneOfDpEvent,
    TwoStageSampledDpEvent,
)
from dpfl_jax.accounting.events import check_count, check_noise, check_prob, fixed_size
from dpfl_jax.errors import BadInputError, at_least, require

_REPLACE = NeighboringRelation.REPLACE_ONE


class Leaf(abc.ABC):
    """One elementary step; subclasses are frozen dataclasses, as leaves are dictionary keys."""

    @abc.abstractmethod
    def losses(self, spacing: float, log_tail: float) -> StepLoss:
        """Returns the privacy loss of the step in both directions.

        Args:
          spacing: approximate length of a cell, in standard deviations of the noise; the excess of
            the divergences falls as its square.
          log_tail: log of the probability that may be counted as an infinite loss.
        """

    @property
    def unit(self) -> float | None:
        """A number of which all losses are integer multiples (0 if all are 0), or None."""
        return None


@dataclasses.dataclass(frozen=True)
class EventLeaf(Leaf, abc.ABC):
    """A leaf that is identified by its event."""

    event: Any
    relation: NeighboringRelation


_NOISE = Mixture(np.zeros(1), np.ones(1))


@dataclasses.dataclass(frozen=True)
class MixtureLeaf(Leaf):
    """N(0, 1) against a mixture of N(shift, 1): Gaussian, Poisson-sampled Gaussian, ELS users.

    Attributes:
      shifts: sensitivities over the noise standard deviation, >= 0.
      weights: their probabilities.
    """

    shifts: tuple[float, ...]
    weights: tuple[float, ...]

    def losses(self, spacing: float, log_tail: float) -> StepLoss:
        mixture = Mixture(np.asarray(self.shifts), np.asarray(self.weights))
        return mixture_step(mixture, _NOISE, spacing, log_tail)


class ApproximateLeaf(EventLeaf):
    """A step for which only (epsilon, delta) is known."""

    def losses(self, spacing: float, log_tail: float) -> StepLoss:
        # The dominating pair of Kairouz, Oh, Viswanath 2015, Theorem 3.3.
        losses = np.array([-self.event.epsilon, self.event.epsilon])
        both = Atoms(losses, (1.0 - self.event.delta) * special.expit(losses), self.event.delta)
        return StepLoss(both, both)

    @property
    def unit(self) -> float | None:
        return float(self.event.epsilon)


class RenyiLeaf(Leaf, abc.ABC):
    """A step for which only Renyi divergences are known."""

    name: str

    def losses(self, spacing: float, log_tail: float) -> StepLoss:
        raise BadInputError(
            f"only Renyi divergences are known for {self.name}, no privacy losses: use "
            "accountant='rdp'"
        )


@dataclasses.dataclass(frozen=True)
class BestLeaf(RenyiLeaf):
    """The best of a random number of runs; the other runs stay secret."""

    inner: Flat
    mean: float
    shape: float
    name = "RepeatAndSelectDpEvent"


@dataclasses.dataclass(frozen=True)
class OneOfLeaf(RenyiLeaf):
    """One of several events, unknown which; at each order the largest divergence counts."""

    parts: tuple[Flat, ...]
    name = "OneOfDpEvent"


@dataclasses.dataclass(frozen=True)
class FilteredLeaf(RenyiLeaf):
    """Steps whose divergence at one order is at most that of ``budget``."""

    budget: Flat
    order: float
    name = "FilteredDpEvent"


class ReplaceGaussianLeaf(EventLeaf):
    """A Poisson-sampled Gaussian under replace-one: the unit's vector becomes its negative."""

    def losses(self, spacing: float, log_tail: float) -> StepLoss:
        q, shift = self.event.sampling_probability, 1.0 / self.event.event.noise_multiplier
        weights = np.array([1.0 - q, q])
        upper, lower = (Mixture(np.array([0.0, s]), weights) for s in (shift, -shift))
        step = mixture_step(upper, lower, spacing, log_tail)
        return StepLoss(step.remove, step.remove)  # both directions are equal by symmetry


class TruncatedLeaf(EventLeaf):
    """Poisson sampling cut to a batch size, decomposed as by dp-accounting.

    If the batch is not cut, the step is a Poisson-sampled Gaussian. If it is cut, the unit takes
    another unit's place, which is at most a replacement. Source: section 4.3 of the supplement to
    dp-accounting's PLD library.
    """

    def losses(self, spacing: float, log_tail: float) -> StepLoss:
        plain, cut, share = _truncated_parts(self)
        first = plain.losses(spacing, log_tail)
        if cut is None:
            return first
        second = cut.losses(spacing, log_tail)
        return StepLoss(
            remove=mixed(first.remove, second.remove, share),
            add=mixed(first.add, second.add, share),
        )


@functools.lru_cache(maxsize=64)
def _truncated_parts(leaf: TruncatedLeaf) -> tuple[Leaf, Leaf | None, float]:
    """The step with a batch that is not cut, one with a cut batch or None, and its probability."""
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


def _as_leaf(leaf: Leaf | float | str) -> Leaf:
    if isinstance(leaf, str):  # the step reveals nothing
        return ApproximateLeaf(ApproximateDpEvent(0.0, 0.0), _REPLACE)
    return MixtureLeaf((math.sqrt(leaf),), (1.0,)) if isinstance(leaf, float) else leaf


@dataclasses.dataclass(frozen=True)
class AllocatedLeaf(Leaf):
    """The first ``taken`` of ``steps`` Gaussian sums; a unit takes part in one of the ``steps``."""

    sigma: float
    steps: int
    taken: int

    def losses(self, spacing: float, log_tail: float) -> StepLoss:
        return allocated(self.sigma, self.taken, self.steps, spacing, log_tail)


class FixedSizeLeaf(EventLeaf):
    """Fixed-size batches without replacement, under replace-one adjacency.

    Balle, Barthe, Gaboardi 2018 (Theorem 11) and Zhu, Dong, Wang 2022 (Proposition 30): for
    e^eps >= 1 the divergence is at most that of (1-q) Q + q P against Q, where P, Q dominate the
    Gaussian under replacement (distance 2C), q = batch / data set. For e^eps < 1 the symmetry of
    the relation gives H_a(A||B) = 1 - a + a H_{1/a}(B||A).
    """

    def losses(self, spacing: float, log_tail: float) -> StepLoss:
        # Each positive loss gets its mirror image; the rest of the mass has loss 0.
        q = self.event.batch_size / self.event.dataset_size
        shifts, weights = np.array([0.0, 2.0 / self.event.noise_multiplier]), np.array([1.0 - q, q])
        half = mixture_step(Mixture(shifts, weights), _NOISE, spacing, log_tail).remove
        above = half.losses > 0.0
        losses, probs = half.losses[above], half.probs[above]
        mirrored = np.exp(-losses) * probs
        rest = max(1.0 - probs.sum() - mirrored.sum() - half.infinity, 0.0)
        both = Atoms(np.append(losses, -losses), np.append(probs, mirrored), half.infinity)
        both = both.with_atom(0.0, rest)
        return StepLoss(both, both)


@dataclasses.dataclass(frozen=True)
class TwoStageLeaf(Leaf):
    """A round of local steps that happens with a probability, visibly (Liu et al. 2024, Lemma 2).

    The outcome is (took part?, outputs): with probability 1 - lambda the loss is 0, otherwise it
    is the loss of the local steps, in both directions.
    """

    probability: float
    inner: Leaf
    local_steps: int

    @property
    def unit(self) -> float | None:
        return self.inner.unit  # sums of integer multiples are integer multiples

    def losses(self, spacing: float, log_tail: float) -> StepLoss:
        # The loss of one local step, which ``Part`` composes and mixes.
        return self.inner.losses(spacing, log_tail - math.log(self.local_steps))


@dataclasses.dataclass(frozen=True)
class Flat:
    """An event decomposed into its elementary steps.

    Attributes:
      leaves: pairs of a step and how often it runs.
      gaussian: sum of 1/sigma^2 over the plain Gaussian steps.
      private: False if a part of the event has no finite guarantee.
    """

    leaves: tuple[tuple[Leaf, int], ...]
    gaussian: float
    private: bool

    @property
    def reveals_nothing(self) -> bool:
        """Whether the output does not depend on the unit at all."""
        return self.private and not self.leaves and self.gaussian == 0


def flatten(event: dp_accounting.DpEvent, relation: NeighboringRelation) -> Flat:
    """Decomposes an event into its elementary steps.

    Raises:
      BadInputError: no accountant knows a part of the event under this adjacency.
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
        elif getattr(current, "sampling_probability", None) == 1 and hasattr(current, "event"):
            stack.append((current.event, count))  # all units are in the batch
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
    if isinstance(_merged(getattr(event, "event", event)), dp_accounting.NoOpDpEvent):
        return "nothing"  # whichever units are drawn
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        prob = check_prob(event.sampling_probability)
        if prob == 0 and isinstance(event.event, dp_accounting.GaussianDpEvent):
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
        if isinstance(event.event, dp_accounting.PoissonSampledDpEvent):  # sampled twice
            both = prob * check_prob(event.event.sampling_probability)
            return _leaf(dp_accounting.PoissonSampledDpEvent(both, event.event.event), relation)
        merged = None if replace else _merged(event.event)
        if isinstance(merged, dp_accounting.GaussianDpEvent):
            return _leaf(dp_accounting.PoissonSampledDpEvent(prob, merged), relation)
    if isinstance(event, dp_event.SampledWithoutReplacementDpEvent) and replace:
        merged = _merged(event.event)
        sizes = event.source_dataset_size, event.sample_size
        if isinstance(merged, dp_accounting.GaussianDpEvent):
            single = fixed_size(merged.noise_multiplier, *sizes, steps=1)
            return _leaf(getattr(single, "event", single), relation)
    if isinstance(event, dp_event.RepeatAndSelectDpEvent):
        at_least("the mean number of runs of which the best is chosen", event.mean, 1)
        at_least("the shape of the number of runs of which the best is chosen", event.shape, 0)
        inner = flatten(event.event, relation)
        if not inner.private:
            return "no privacy"
        nothing = inner.reveals_nothing
        return "nothing" if nothing else BestLeaf(inner, float(event.mean), float(event.shape))
    if isinstance(event, FilteredDpEvent):
        require(1 < event.order < math.inf, "the order of a filter", event.order, "above 1")
        budget = flatten(event.event, relation)
        if not budget.private:
            return "no privacy"
        return "nothing" if budget.reveals_nothing else FilteredLeaf(budget, float(event.order))
    if isinstance(event, OneOfDpEvent):
        each = tuple(dict.fromkeys(flatten(part, relation) for part in event.events))
        if not all(part.private for part in each):
            return "no privacy"
        moved = tuple(part for part in each if not part.reveals_nothing)
        return OneOfLeaf(moved) if moved else "nothing"
    if isinstance(event, dp_accounting.GaussianDpEvent):
        sigma = check_noise(event.noise_multiplier)
        # proof: isrl-event-3
        return ((2.0 if replace else 1.0) / sigma) ** 2 if sigma > 0 else "no privacy"
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
                "add-or-remove, or account for a replacement as two add-or-remove steps"
            )
        return _mixture(event)
    if isinstance(event, TwoStageSampledDpEvent):
        return _two_stage(event, relation)
    if isinstance(event, AllocatedDpEvent):
        return _allocated(event, relation)
    if isinstance(event, FixedSizeGaussianDpEvent):
        if not replace:
            raise BadInputError(
                "fixed-size sampling without replacement is accounted under replace-one adjacency "
                "only: use replace-one adjacency, or Poisson sampling"
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
        at_least("the epsilon of an (epsilon, delta) event", event.epsilon, 0)
        if event.epsilon == 0.0 and event.delta == 0.0:
            return "nothing"
        private = math.isfinite(event.epsilon) and event.delta < 1.0
        return ApproximateLeaf(event, relation) if private else "no privacy"
    raise BadInputError(
        f"no accountant knows the event {type(event).__name__} under {relation.name} adjacency: "
        + _INSTEAD.get(
            type(event),
            "compose Gaussian, Poisson-sampled Gaussian, "
            "mixture-of-Gaussians, two-stage or fixed-size events",
        )
    )


_STATED = "use its guarantee instead, as an ApproximateDpEvent(epsilon, delta)"
# What to use instead of an event that is known under another adjacency only, or not at all.
_INSTEAD = {
    dp_accounting.PoissonSampledDpEvent: "Poisson sampling is accounted for Gaussian sums only "
    "(under add-or-remove, several on one batch as well); use those, or a "
    "MixtureOfGaussiansDpEvent of how far a unit moves a sum",
    dp_event.SampledWithReplacementDpEvent: "a unit may be drawn several times; sample without "
    "replacement (events.fixed_size), or by Poisson (events.poisson)",
    dp_event.SampledWithoutReplacementDpEvent: "batches of fixed size are accounted for Gaussian "
    "sums under replace-one adjacency only; use that adjacency, or sample by Poisson "
    "(events.poisson)",
    dp_event.SingleEpochTreeAggregationDpEvent: "use the Gaussian event that it is equal to, "
    "events.matrix_factorization",
    dp_event.UnsupportedDpEvent: "its mechanism is unknown; use the event of the mechanism itself",
    dp_accounting.LaplaceDpEvent: _STATED,
    dp_event.DiscreteLaplaceDpEvent: _STATED,
    dp_event.RandomizedResponseDpEvent: _STATED,
    dp_event.ZCDpEvent: _STATED,
}


def _merged(event: dp_accounting.DpEvent) -> dp_accounting.DpEvent | None:
    """One Gaussian (or no-op, or no noise) that dominates several Gaussian sums on one batch.

    Each sum may depend on the earlier ones, but a unit in the batch moves it by at most 1 / sigma,
    and the squares add up; the bound survives sampling (Zhu, Dong and Wang 2022, Theorems 10 and
    11). None for other events.
    """
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return event
    if not isinstance(event, (dp_accounting.ComposedDpEvent, dp_accounting.SelfComposedDpEvent)):
        return event if isinstance(event, dp_accounting.NoOpDpEvent) else None
    flat = flatten(event, NeighboringRelation.ADD_OR_REMOVE_ONE)
    if flat.leaves:
        return None
    if not flat.private:
        return dp_accounting.GaussianDpEvent(0.0)
    if flat.gaussian == 0:
        return dp_accounting.NoOpDpEvent()
    return dp_accounting.GaussianDpEvent(1.0 / math.sqrt(flat.gaussian))


def _mixture(event: dp_accounting.dp_event.MixtureOfGaussiansDpEvent) -> Leaf | float | str:
    sensitivities = np.asarray(event.sensitivities, dtype=float)
    weights = np.asarray(event.sampling_probs, dtype=float)
    good = np.isfinite(sensitivities).all() and sensitivities.min(initial=0.0) >= 0
    if not good or not weights.min(initial=0.0) >= 0 or not abs(weights.sum() - 1.0) <= 1e-6:
        raise BadInputError(
            "a mixture of Gaussians needs sensitivities >= 0 and probabilities >= 0 that sum to 1, "
            f"not sensitivities {sensitivities.tolist()!r:.80} with probabilities "
            f"{weights.tolist()!r:.80}"
        )
    kept = weights > 0
    sensitivities, weights = sensitivities[kept], weights[kept] / weights.sum()
    if sensitivities.max(initial=0.0) == 0.0:
        return "nothing"
    sigma = event.standard_deviation
    if check_noise(sigma / sensitivities.max()) == 0:
        return "no privacy"
    if len(sensitivities) == 1:
        return float((sensitivities[0] / sigma) ** 2)
    return MixtureLeaf(tuple(sensitivities / sigma), tuple(weights))


def _allocated(event: AllocatedDpEvent, relation: NeighboringRelation) -> Leaf | float | str:
    steps = check_count(event.steps, "number of steps of an allocation", 1)
    taken = check_count(event.taken, "number of steps taken of an allocation")
    if taken > steps:
        raise BadInputError(f"an allocation over {steps} steps cannot have taken {taken} of them")
    inner = _leaf(event.event, relation) if taken else "nothing"
    if isinstance(inner, str):
        return inner
    if not isinstance(inner, float) or relation == _REPLACE:
        raise BadInputError(
            "random allocation is accounted for Gaussian sums under add-or-remove adjacency only: "
            "use that adjacency, or Poisson sampling"
        )
    # An adversary who knows the step sees one Gaussian: a bound, which is tight at little noise.
    if steps == 1 or inner > 100.0:
        return inner
    return AllocatedLeaf(1.0 / math.sqrt(inner), steps, taken)


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
