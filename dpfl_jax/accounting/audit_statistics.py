"""What tells an audit most of a unit, from what a run with correlated noise released.

Each has a column for each step of the event, in its order. K x = K g + Z of what was released, x:
a unit that took part at some steps moves K x along the sum of these columns of K.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import signal

from dpfl_jax.sampling import schemes


def column_of_each_turn(
    column: tuple[float, ...], seen: np.ndarray, inside: np.ndarray, sampler: Any
) -> np.ndarray:
    """Of every turn of a unit what its column of K says; NaN where it has no such turn.

    Args:
      column: the first of K, as far as it is not 0.
      seen: [units, steps], what was released along each unit's direction, over the noise.
      inside: bool [units], who is in the data: the first units of the sampler's, in order.
      sampler: of the run, with a ``CyclicPoisson`` scheme.
    """
    scheme: schemes.CyclicPoisson = sampler.scheme
    if scheme.period == 1:
        return seen
    units, steps = seen.shape
    bands = np.asarray(column)
    white = sum(np.pad(seen, ((0, 0), (i, 0)))[:, :steps] * c for i, c in enumerate(bands))
    group = _first_steps(scheme.group_of(sampler.key, sampler.population), scheme.period, inside)
    found = np.full((units, -(-steps // scheme.period)), np.nan)
    for turn in range(found.shape[1]):
        first = turn * scheme.period + group
        reached = first[:, None] + np.arange(len(bands))
        there = np.where(reached < steps, bands, 0.0)
        values = np.take_along_axis(np.asarray(white), np.minimum(reached, steps - 1), axis=1)
        with np.errstate(invalid="ignore"):
            found[:, turn] = (values * there).sum(axis=1) / np.linalg.norm(there, axis=1)
    return found


def columns_of_all_turns(
    column: tuple[float, ...], seen: np.ndarray, inside: np.ndarray, sampler: Any
) -> np.ndarray:
    """Of all turns of a unit together what its columns of K say; of the steps that were.

    Arguments as of ``column_of_each_turn``, of a ``Cyclic`` scheme.
    """
    scheme: schemes.Cyclic = sampler.scheme
    period = scheme.known_period
    seen = seen[:, ~np.isnan(seen).all(axis=0)]
    first = _first_steps(scheme.turn_of(sampler.key, sampler.population), period, inside)
    steps = np.arange(seen.shape[1])
    took_part = (steps % period == first[:, None]).astype(float)
    shown = np.asarray(column)[None, : len(steps)]
    moved, rows = (
        signal.fftconvolve(part, shown, axes=1)[:, : len(steps)] for part in (took_part, seen)
    )
    with np.errstate(invalid="ignore"):  # no turn
        found: np.ndarray = (moved * rows).sum(axis=1) / np.linalg.norm(moved, axis=1)
    return found[:, None]


def _first_steps(drawn: np.ndarray, period: int, inside: np.ndarray) -> np.ndarray:
    """Who is not in the data has a first step like everybody: it is drawn, and means nothing."""
    first: np.ndarray = np.random.default_rng(0).integers(period, size=inside.shape)
    first[inside] = drawn[: inside.sum()]
    return first
