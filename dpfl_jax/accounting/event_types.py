"""Events that dp-accounting has no class for, and events as JSON.

Each is a frozen ``attrs`` class, as dp-accounting's are, so that events nest, compare and print.
"""

from __future__ import annotations

from typing import Any

import attr
import dp_accounting
from dp_accounting import dp_event

from dpfl_jax.errors import BadInputError


@attr.s(frozen=True, slots=True, auto_attribs=True)
class TwoStageSampledDpEvent(dp_accounting.DpEvent):
    """A silo takes part in a round with a probability; if it does, it runs several local steps.

    Whether it took part is visible to the adversary. Liu et al. 2024 (rPDP-FL), Lemma 2.

    Attributes:
      participation_probability: lambda, probability that the silo takes part in the round.
      event: one local step.
      local_steps: tau, local steps in a round.
    """

    participation_probability: float
    event: dp_accounting.DpEvent
    local_steps: int


@attr.s(frozen=True, slots=True, auto_attribs=True)
class FixedSizeGaussianDpEvent(dp_accounting.DpEvent):
    """A Gaussian sum over a uniformly random batch of fixed size, without replacement.

    Defined under replace-one adjacency only (the size of the data set is public).

    Attributes:
      dataset_size: units in the data set.
      batch_size: units in every batch.
      noise_multiplier: standard deviation over the clip norm C (not over the sensitivity 2C).
    """

    dataset_size: int
    batch_size: int
    noise_multiplier: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class AllocatedDpEvent(dp_accounting.DpEvent):
    """Gaussian sums of which a unit takes part in one, drawn uniformly; add-or-remove.

    Attributes:
      event: of a step in which the unit takes part: a Gaussian.
      steps: t, among which the unit's is drawn.
      taken: r, number of steps so far, the first of them.
    """

    event: dp_accounting.DpEvent
    steps: int
    taken: int


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ApproximateDpEvent(dp_accounting.DpEvent):
    """Any step of which only (epsilon, delta)-DP is known; composes optimally (Kairouz et al.)."""

    epsilon: float
    delta: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class OneOfDpEvent(dp_accounting.DpEvent):
    """One of several events, drawn without looking at the data, or one for each kind of unit.

    Attributes:
      events: what each does to a unit; a tuple, so that events are hashable.
    """

    events: tuple[dp_accounting.DpEvent, ...] = attr.ib(
        converter=tuple, validator=attr.validators.min_len(1)
    )


@attr.s(frozen=True, slots=True, auto_attribs=True)
class FilteredDpEvent(dp_accounting.DpEvent):
    """Steps of which each unit takes part only in those that its own Renyi budget pays for.

    Feldman and Zrnic 2021: at this order, and at no larger one, a unit's divergence is at most that
    of ``event``, whatever the steps were and however many.

    Attributes:
      order: above 1.
      event: an event that costs the whole budget.
    """

    order: float
    event: dp_accounting.DpEvent


# Only these classes, so that a file cannot name any other.
_CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        dp_event.NoOpDpEvent,
        dp_event.NonPrivateDpEvent,
        dp_event.GaussianDpEvent,
        dp_event.SelfComposedDpEvent,
        dp_event.ComposedDpEvent,
        dp_event.PoissonSampledDpEvent,
        dp_event.MixtureOfGaussiansDpEvent,
        dp_event.TruncatedSubsampledGaussianDpEvent,
        dp_event.SampledWithoutReplacementDpEvent,
        dp_event.RepeatAndSelectDpEvent,
        TwoStageSampledDpEvent,
        AllocatedDpEvent,
        FixedSizeGaussianDpEvent,
        OneOfDpEvent,
        FilteredDpEvent,
        ApproximateDpEvent,
    )
}


def to_json(event: dp_accounting.DpEvent) -> dict[str, Any]:
    """The event as JSON values; floats survive exactly.

    Raises:
      BadInputError: for an event of a class that cannot be stored.
    """
    name = type(event).__name__
    if _CLASSES.get(name) is not type(event):
        raise BadInputError(f"an event of type {name} cannot be stored: use the package's events")
    out: dict[str, Any] = {"type": name}
    for field in attr.fields(type(event)):  # type: ignore[arg-type]
        out[field.name] = _value(getattr(event, field.name))
    return out


def _value(value: Any) -> Any:
    if isinstance(value, dp_accounting.DpEvent):
        return to_json(value)
    if isinstance(value, list | tuple):
        return [_value(item) for item in value]
    if isinstance(value, int):
        return value
    return float(value)


def from_json(values: Any) -> dp_accounting.DpEvent:
    """The inverse of :func:`to_json`.

    Raises:
      BadInputError: if it is not an event.
    """
    try:
        cls = _CLASSES[values["type"]]
        fields = {key: _parsed(item) for key, item in values.items() if key != "type"}
        return cls(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInputError(f"this is not a stored event: {str(values)[:80]}") from error


def _parsed(value: Any) -> Any:
    if isinstance(value, dict):
        return from_json(value)
    if isinstance(value, list):
        return [_parsed(item) for item in value]
    return value
