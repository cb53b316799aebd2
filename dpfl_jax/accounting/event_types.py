"""Event classes that dp-accounting lacks, and the conversion of events to and from JSON.

Like dp-accounting's, the classes are frozen ``attrs`` classes: events nest, compare and print.
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

    It is defined under replace-one adjacency only (the size of the data set is public).

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
      event: a step in which the unit takes part: a Gaussian.
      steps: t, the number of steps among which the unit's step is drawn.
      taken: r, the number of steps that have run, the first r of t.
    """

    event: dp_accounting.DpEvent
    steps: int
    taken: int


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ApproximateDpEvent(dp_accounting.DpEvent):
    """A step known only to be (epsilon, delta)-DP, composed optimally (Kairouz et al. 2015)."""

    epsilon: float
    delta: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class OneOfDpEvent(dp_accounting.DpEvent):
    """One of several events, drawn independently of the data, or one for each kind of unit.

    Attributes:
      events: the possible events, as a tuple so that they are hashable.
    """

    events: tuple[dp_accounting.DpEvent, ...] = attr.ib(
        converter=tuple, validator=attr.validators.min_len(1)
    )


@attr.s(frozen=True, slots=True, auto_attribs=True)
class FilteredDpEvent(dp_accounting.DpEvent):
    """Steps in which each unit takes part only while its Renyi budget pays for them.

    Feldman and Zrnic 2021: at this order and below, a unit's divergence is at most that of
    ``event``, whatever the steps were and however many ran.

    Attributes:
      order: Renyi order, above 1.
      event: an event that costs the whole budget.
    """

    order: float
    event: dp_accounting.DpEvent


# The only classes that a file can name.
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
    """Returns the event as JSON values; floats survive exactly.

    Raises:
      BadInputError: the event's class cannot be stored.
    """
    name = type(event).__name__
    if _CLASSES.get(name) is not type(event):
        raise BadInputError(f"an event of type {name} cannot be stored: use accounting.events")
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
    """Returns the event that :func:`to_json` wrote.

    Raises:
      BadInputError: the values are not those of an event.
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
