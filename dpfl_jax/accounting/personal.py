"""What each unit spends, when units differ in a declared number (examples, sampling rate).

The guarantee of a run is the worst unit's. These tables say what the others spend; they are
computed from *declared* numbers: a table made from the private data's own counts is itself private.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import dp_accounting
from dp_accounting import NeighboringRelation

from dpfl_jax.accounting import events
from dpfl_jax.accounting.accountant import ADD_OR_REMOVE, FINE, epsilon
from dpfl_jax.errors import BadInputError

Number = TypeVar("Number", int, float)


def epsilon_table(
    make_event: Callable[[Number], dp_accounting.DpEvent],
    values: Iterable[Number],
    delta: float,
    *,
    relation: NeighboringRelation = ADD_OR_REMOVE,
    resolution: float = FINE,
) -> dict[Number, float]:
    """Epsilon of a unit for each distinct value of what units differ in.

    Args:
      make_event: from a unit's value (its examples, its sampling rate) to what the run does to it.
      values: the units' values, repeats allowed (a million units of a hundred values cost a
        hundred accountings).
      delta: in (0, 1), the same for all.
      relation: adjacency.
      resolution: as for ``accounting.epsilon``.

    Returns:
      {value: upper bound on epsilon}, by increasing value.

    Raises:
      BadInputError: no values, or a value that is no valid parameter of the event.
    """
    distinct = sorted(set(values))
    if not distinct:
        raise BadInputError("the table of epsilons needs at least one unit's value")
    return {
        value: epsilon(make_event(value), delta, relation=relation, resolution=resolution)
        for value in distinct
    }


def els_epsilons(
    noise_multiplier: float,
    sampling_prob: float,
    contributions: Iterable[int],
    steps: int,
    delta: float,
) -> dict[int, float]:
    """Epsilon of an ELS run for users of each number of examples; the largest governs the run.

    Each user's is exact for them alone (``events.els`` with their own number in place of the group
    size), as the examples of a user who has fewer are in a batch more rarely.

    Args:
      noise_multiplier: sigma_ELS.
      sampling_prob: p, of each example in each step.
      contributions: declared numbers of examples (>= 1), after contribution limiting.
      steps: T.
      delta: in (0, 1).
    """
    return epsilon_table(
        lambda count: events.els(noise_multiplier, sampling_prob, count, steps),
        contributions,
        delta,
    )
