"""Events as JSON and back: only the classes named here, so that a file cannot name any other."""

from __future__ import annotations

from typing import Any

import attr
import dp_accounting
from dp_accounting import dp_event

from dpfl_jax.accounting import event_types
from dpfl_jax.errors import BadInputError

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
        event_types.TwoStageSampledDpEvent,
        event_types.AllocatedDpEvent,
        event_types.FixedSizeGaussianDpEvent,
        event_types.OneOfDpEvent,
        event_types.FilteredDpEvent,
        event_types.ApproximateDpEvent,
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
