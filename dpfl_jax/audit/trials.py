"""Trials of an attack: what was released about units, each of which takes part by a fair coin.

What is released along a unit's direction is white noise, plus a shift if the unit takes part. The
worst case is a gradient of the largest norm after clipping, in a direction that no other unit has.
Then the best attack is the likelihood ratio of the claimed event (Nasr et al. 2023, "Tight
auditing"). Wrong code may leak in other ways, so there are also attacks that learn from trials what
noise and shifts look like.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation, dp_event

from dpfl_jax.accounting import ADD_OR_REMOVE, REPLACE
from dpfl_jax.accounting.event_types import AllocatedDpEvent, TwoStageSampledDpEvent
from dpfl_jax.errors import BadInputError

# Directions whose variance is below this part of the usual variance count as noiseless.
_NO_NOISE = 1e-6
_DRAWS = 4000
LONG = 1e3  # norm of a designed gradient over the clip norm


@dataclasses.dataclass(frozen=True, eq=False)
class Trials:
    """Attacks on units in one or several runs.

    Attributes:
      inside: bool [n], whether each unit took part (replace-one: which of its two values it has).
      seen: float [n, k], the sum released at every step, along the direction of each unit, over
        the standard deviation of the claimed noise; NaN where nothing was released.
      event: the claimed event.
      delta: delta of the claim.
      relation: adjacency; under replace-one the unit's vector becomes its negative.
      beside: float [n, j], what else the attacker sees, such as other silos or directions.
      name: name of what is audited.
      how: what ran, in words.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax import accounting
      >>> from dpfl_jax.audit import Trials
      >>> inside = np.arange(200) % 2 == 0
      >>> seen = np.random.default_rng(0).normal(size=(200, 1)) + inside[:, None]
      >>> trials = Trials(inside, seen, accounting.events.gaussian(1.0, steps=1), delta=1e-5)
      >>> trials.part(np.arange(10)).seen.shape
      (10, 1)
    """

    inside: np.ndarray
    seen: np.ndarray
    event: dp_accounting.DpEvent
    delta: float
    relation: NeighboringRelation = ADD_OR_REMOVE
    beside: np.ndarray | None = None
    name: str = ""
    how: str = ""

    def part(self, chosen: np.ndarray) -> Trials:
        """Returns the trials with these indices (int or bool array)."""
        beside = None if self.beside is None else self.beside[chosen]
        return dataclasses.replace(
            self, inside=self.inside[chosen], seen=self.seen[chosen], beside=beside
        )

    def scores(self, learn: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the scores of all attacks, float [n] by name; larger means "took part".

        Args:
          learn: bool [n], trials that attacks may learn from.
        """
        scores = {"likelihood ratio": log_likelihood_ratio(self.seen, self.event, self.relation)}
        known, out = learn & self.inside, learn & ~self.inside
        parts = [self.seen] if self.beside is None else [self.seen, self.beside]
        most = min(known.sum(), out.sum()) // (10 * len(parts))
        if not most:
            return scores
        y = np.hstack([_added_up(np.nan_to_num(part), most) for part in parts])
        middle = y[out].mean(axis=0)
        values, vectors = np.linalg.eigh(np.atleast_2d(np.cov(y[out].T)))
        floor = np.maximum(values, _NO_NOISE * max(values.max(), 1.0))
        white = (y - middle) @ vectors / np.sqrt(floor)
        scores["shift"] = white @ white[known].mean(axis=0)
        scores["size"] = (white**2).sum(axis=1)
        return scores

    def threshold(self, rate: float) -> float:
        """Returns the threshold of the likelihood ratio for this rate of false alarms."""
        if self.relation == REPLACE:  # the two values are symmetric
            return 0.0
        out = np.random.default_rng(0).standard_normal((_DRAWS, self.seen.shape[1]))
        return float(np.quantile(log_likelihood_ratio(out, self.event), 1 - rate))


def _added_up(y: np.ndarray, most: int) -> np.ndarray:
    """Adds up an even number of neighbouring columns, so that at most ``most`` are left.

    The number is even so that noise that is used twice, added to one column and subtracted from the
    next, cancels and shows.
    """
    if y.shape[1] <= most:
        return y
    each = 2 * -(-y.shape[1] // (2 * most))
    whole = np.pad(y, ((0, 0), (0, -y.shape[1] % each)))
    return whole.reshape(len(y), -1, each).sum(axis=2)


@dataclasses.dataclass(frozen=True)
class StepShifts:
    """How far a unit moves the sums of some steps, relative to their noise.

    Attributes:
      shifts: float [k], possible shifts in one step.
      weights: float [k], their probabilities.
      count: number of steps. If there are several, the unit takes part in at most one of them.
      among: length of the period, in exactly one step of which the unit takes part, uniformly; the
        ``count`` steps are its first.
    """

    shifts: np.ndarray
    weights: np.ndarray
    count: int = 1
    among: int = 1

    def log_ratio(self, seen: np.ndarray) -> np.ndarray:
        """Returns the log likelihood ratio of "in" over "out", float [n].

        Args:
          seen: float [n, count], what was released; NaN where nothing was released.
        """
        with np.errstate(divide="ignore"):
            parts = np.log(self.weights) - self.shifts**2 / 2
        each = np.logaddexp.reduce(parts + np.nan_to_num(seen)[..., None] * self.shifts, axis=2)
        each = np.where(np.isnan(seen), 0.0, each)
        if self.among == 1:
            return np.asarray(each[:, 0])
        unseen = np.zeros((len(seen), self.among - self.count))
        return np.asarray(
            np.logaddexp.reduce(np.hstack([each, unseen]), axis=1) - np.log(self.among)
        )


def step_shifts(event: dp_accounting.DpEvent) -> Iterator[StepShifts]:
    """Yields, in order of the steps, how far a unit moves their sums relative to the noise.

    Raises:
      BadInputError: a step is not a mixture of Gaussians.
    """
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        for _ in range(event.count):
            yield from step_shifts(event.event)
    elif isinstance(event, dp_accounting.ComposedDpEvent):
        for part in event.events:
            yield from step_shifts(part)
    elif isinstance(event, TwoStageSampledDpEvent):  # who takes part is visible
        for _ in range(event.local_steps):
            yield from step_shifts(event.event)
    elif isinstance(event, dp_accounting.GaussianDpEvent):
        yield StepShifts(np.array([1.0 / event.noise_multiplier]), np.ones(1))
    elif isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):  # draws are seldom cut
        q = event.sampling_probability
        yield StepShifts(np.array([0.0, 1.0 / event.noise_multiplier]), np.array([1 - q, q]))
    elif isinstance(event, AllocatedDpEvent) and isinstance(
        event.event, dp_accounting.GaussianDpEvent
    ):
        shift = np.array([1.0 / event.event.noise_multiplier])
        yield StepShifts(shift, np.ones(1), event.taken, event.steps)
    elif isinstance(event, dp_accounting.PoissonSampledDpEvent) and isinstance(
        event.event, dp_accounting.GaussianDpEvent
    ):
        q = event.sampling_probability
        shifts = np.array([0.0, 1.0 / event.event.noise_multiplier])
        yield StepShifts(shifts, np.array([1 - q, q]))
    elif isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
        shifts = np.asarray(event.sensitivities) / event.standard_deviation
        yield StepShifts(shifts, np.asarray(event.sampling_probs))
    elif not isinstance(event, dp_accounting.NoOpDpEvent):
        raise BadInputError(
            f"an audit needs the likelihoods of steps, which are not known for "
            f"{type(event).__name__}: audit another mechanism"
        )


def scaled(event: dp_accounting.DpEvent, factor: float) -> dp_accounting.DpEvent:
    """Returns the event with its noise divided by ``factor``."""
    import attr

    changes: dict[str, Any] = {}
    for field in attr.fields(type(event)):
        value = getattr(event, field.name)
        if field.name in ("noise_multiplier", "standard_deviation"):
            changes[field.name] = value / factor
        elif isinstance(value, dp_accounting.DpEvent):
            changes[field.name] = scaled(value, factor)
        elif isinstance(value, list | tuple) and value and isinstance(value[0], dp_event.DpEvent):
            changes[field.name] = [scaled(part, factor) for part in value]
    return attr.evolve(event, **changes)


def log_likelihood_ratio(
    seen: np.ndarray,
    event: dp_accounting.DpEvent,
    relation: NeighboringRelation = ADD_OR_REMOVE,
) -> np.ndarray:
    """Returns the log likelihood ratio of "in" over "out", float [n], summed over steps.

    If the event has another number of steps than ``seen`` has columns, returns the sum of ``seen``.

    Args:
      seen: float [n, k], as in ``Trials``.
      event: the claimed event, with steps in the order of the columns.
      relation: adjacency.
    """
    total = np.zeros(len(seen))
    steps = list(step_shifts(event))
    if sum(part.count for part in steps) != seen.shape[1]:
        # One event covers many steps, so that columns cannot be matched with steps.
        return np.nansum(seen, axis=1)
    first = 0
    for part in steps:
        y = seen[:, first : first + part.count]
        first += part.count
        total += part.log_ratio(y)
        if relation == REPLACE:
            total -= part.log_ratio(-y)
    return total
