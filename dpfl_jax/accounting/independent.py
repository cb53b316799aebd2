"""A second opinion on an event's epsilon: dp_accounting's own privacy-loss distributions."""

from __future__ import annotations

from typing import Any

import dp_accounting
from dp_accounting import NeighboringRelation

from dpfl_jax.accounting.accountant import ADD_OR_REMOVE, rough_epsilon

_MOST_KINDS = 4
# Their compositions lose deltas below about 1e-15 times the number of steps.
_LEAST_DELTA = 1e-12
# They weigh losses by e^-loss, which is 0 from 745 on: their lower bound is then useless.
_MOST_EPSILON = 500.0


def independent(
    event: dp_accounting.DpEvent, delta: float, relation: NeighboringRelation = ADD_OR_REMOVE
) -> tuple[float, float] | None:
    """Bounds on an event's epsilon from below and above, by dp_accounting's own PLDs.

    Returns:
      (lower bound, upper bound); None for an event of anything but a few kinds of (sampled)
      Gaussians, as mixtures take their code minutes; at a delta that is lost in the rounding of
      their compositions; and where epsilon is above about 500.
    """
    from dp_accounting.pld import privacy_loss_distribution as pld

    steps = _gaussians(event, 1)
    total = sum((steps or {}).values())
    if not steps or len(steps) > _MOST_KINDS or delta < _LEAST_DELTA * total:
        return None
    if not rough_epsilon(event, delta, relation) < _MOST_EPSILON:
        return None
    bounds = []
    for pessimistic in (False, True):
        whole = None
        for (sigma, prob), count in steps.items():
            part = pld.from_gaussian_mechanism(
                sigma,
                sampling_prob=prob,
                neighboring_relation=relation,
                pessimistic_estimate=pessimistic,
                use_connect_dots=pessimistic,
                # Finer ones take minutes; the lower bound is too low by half of it per step.
                value_discretization_interval=1e-3 if total <= 100 else 3e-4,
            ).self_compose(count)
            whole = part if whole is None else whole.compose(part)
        assert whole is not None
        bounds.append(float(whole.get_epsilon_for_delta(delta)))
    return bounds[0], bounds[1]


def _gaussians(event: Any, times: int) -> dict[tuple[float, float], int] | None:
    """(noise multiplier, sampling probability) -> number of steps; None for other events."""
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return _gaussians(event.event, times * event.count)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        counts: dict[tuple[float, float], int] = {}
        for part in event.events:
            inner = _gaussians(part, times)
            if inner is None:
                return None
            for step, count in inner.items():
                counts[step] = counts.get(step, 0) + count
        return counts
    prob = 1.0
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        event, prob = event.event, event.sampling_probability
    if isinstance(event, dp_accounting.GaussianDpEvent) and prob > 0 < event.noise_multiplier:
        return {(event.noise_multiplier, prob): times}
    return None
