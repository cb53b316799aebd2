"""The table of proven cells: what a sampling scheme with a noise strategy costs one privacy unit.

A mechanism's participation resolves to a scheme (from ``sampling.schemes`` or this module) and to
how one privacy unit contributes to a draw (``Contribution``). Its noise resolves to a
``StrategyMatrix``. ``cell_of`` looks up the scheme's type, the matrix's kind and the contribution's
type. Independent noise also matches banded and full cells, and a contribution of one drawn unit
also matches cells without a contribution. What is not in the table is not proven, and is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from dp_accounting import DpEvent, NeighboringRelation
from scipy import signal

from dpfl_jax.accounting import events
from dpfl_jax.errors import BadInputError
from dpfl_jax.sampling import schemes

MatrixKind = Literal["independent", "banded", "full"]
_ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE = NeighboringRelation.REPLACE_ONE


# ---- schemes for accounting alone: no sampler draws them -----------------------------------------


@dataclasses.dataclass(frozen=True)
class Everyone:
    """All units take part in every step."""

    def describe(self, counted: str, unit: str) -> str:
        """Returns the words of a guarantee, as ``schemes.SamplingScheme.describe`` does."""
        del unit
        return f"none is counted on: {counted} may all take part in every step"


@dataclasses.dataclass(frozen=True)
class OnePass:
    """Each unit takes part in one step at most; no unit's content affects in which one."""


@dataclasses.dataclass(frozen=True)
class TwoStagePoisson:
    """Poisson sampling of silos in each round, then of each silo's units in each local step.

    Attributes:
      sampling_prob: q, probability of the accounted unit in each local step.
      participation_prob: lambda, probability of its silo in each round; which take part is public.
      local_steps: tau, local steps in a round.
    """

    sampling_prob: float
    participation_prob: float
    local_steps: int

    def describe(self, counted: str, unit: str) -> str:
        """Returns the words of a guarantee, as ``schemes.SamplingScheme.describe`` does."""
        return (
            f"each silo with probability {self.participation_prob:.6g} in each round of "
            f"{self.local_steps} local steps, then Poisson over {counted}, probability "
            f"{self.sampling_prob:.6g} of this {unit}"
        )


# ---- how one privacy unit contributes to a draw, if it is not itself what is drawn ---------------


@dataclasses.dataclass(frozen=True)
class SeveralUnits:
    """A privacy unit has several of the units drawn, each of which moves the sum by C at most.

    Attributes:
      max_units: L, the most units drawn that one privacy unit has.
      per_step_cap: Z, the most of these in one step; None: all of them.
    """

    max_units: int
    per_step_cap: int | None = None


@dataclasses.dataclass(frozen=True)
class AveragedUnits:
    """A privacy unit has several of the units drawn; their average moves the sum by C at most.

    Attributes:
      max_units: L, the most units drawn that one privacy unit has.
    """

    max_units: int


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """A privacy unit moves the sum by S * C at most, whatever is drawn.

    Attributes:
      sensitivity: S.
    """

    sensitivity: int


Contribution = SeveralUnits | AveragedUnits | Sensitivity


@dataclasses.dataclass(frozen=True)
class StrategyMatrix:
    """The lower triangular Toeplitz matrix K of correlated noise K^-1 Z.

    Attributes:
      column: the first column of K, float [steps], without its trailing zeros.
      kind: ``independent`` (the identity), ``banded`` (zero beyond ``column``), ``full``.
      bounding_column: for a full matrix, a non-increasing upper bound on K's column, which is what
        is accounted. None: ``column`` does not increase.
    """

    column: tuple[float, ...] = (1.0,)
    kind: MatrixKind = "independent"
    bounding_column: tuple[float, ...] | None = None


INDEPENDENT = StrategyMatrix()


@dataclasses.dataclass(frozen=True)
class NoisedSums:
    """What is accounted: the noised clipped sums over the units drawn at every step.

    Attributes:
      scheme: how units are drawn.
      noise_multiplier: standard deviation of each entry of Z over the sensitivity of a drawn unit.
      steps: number of steps.
      num_units: number of units that may be drawn.
      matrix: K of the noise.
      contribution: how one privacy unit contributes to a draw; None: privacy units are drawn.
      relation: whether a privacy unit is added or removed, or replaced by another.
    """

    scheme: Any
    noise_multiplier: float
    steps: int
    num_units: int
    matrix: StrategyMatrix = INDEPENDENT
    contribution: Contribution | None = None
    relation: NeighboringRelation = _ADD_OR_REMOVE

    @property
    def cell(self) -> Cell:
        """The cell of the table that proves the cost.

        Raises:
          BadInputError: nothing is proven for this scheme, matrix and contribution.
        """
        return cell_of(self.scheme, self.matrix, self.contribution, self.relation)

    def event(self) -> DpEvent:
        """Returns what the steps do to one privacy unit, to be accounted under ``relation``.

        Raises:
          BadInputError: nothing is proven for this scheme, matrix and contribution.
        """
        return self.cell.event(self)


# (column of K, seen, inside, sampler) -> float [units, steps of the event]: ``audit_statistic``.
Statistic = Callable[[tuple[float, ...], np.ndarray, np.ndarray, Any], np.ndarray]
Key = tuple[type, MatrixKind, type[Contribution] | None]


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is proven about one kind of scheme with one kind of matrix.

    Attributes:
      event: returns what the sums do to one privacy unit.
      accountant: how the epsilon of that event is computed, in the words of a guarantee.
      proof: name of the page in docs/theory.
      assumptions: what the proof needs in addition to the assumptions of all mechanisms.
      statistic: the most powerful statistic for an audit; None: what was released at each step.
    """

    event: Callable[[NoisedSums], DpEvent]
    accountant: str
    proof: str
    assumptions: tuple[str, ...] = ()
    statistic: Statistic | None = None


def cell_of(
    scheme: Any,
    matrix: StrategyMatrix = INDEPENDENT,
    contribution: Contribution | None = None,
    relation: NeighboringRelation = _ADD_OR_REMOVE,
) -> Cell:
    """Returns the cell that proves the cost; the arguments are fields of ``NoisedSums``.

    Raises:
      BadInputError: nothing is proven for them; the message names the nearest proven cell.
    """
    table = _REPLACE_TABLE if relation is _REPLACE else TABLE
    if (cell := _found(table, scheme, matrix, contribution)) is not None:
        return cell
    several = not _is_one_unit(contribution)
    wanted = type(contribution) if several else None

    def distance(key: Key) -> tuple[int, ...]:
        differs = [key[2] is not wanted, key[0] is not type(scheme), key[1] != matrix.kind]
        return (sum(differs), *differs)

    kind, noise, more = min(table, key=distance)
    raise BadInputError(
        f"nothing is proven of {type(scheme).__name__} sampling with {matrix.kind} noise"
        + (" where a privacy unit has several of the units that are drawn" if several else "")
        + (" under replace-one adjacency" if relation is _REPLACE else "")
        + f": take {kind.__name__} with {noise} noise"
        + (" where it has one of them" if several and more is None else "")
    )


_ALSO: dict[MatrixKind, tuple[MatrixKind, ...]] = {"independent": ("banded", "full")}


def _is_one_unit(contribution: Contribution | None) -> bool:
    """Whether privacy units are drawn, or each privacy unit has one of the units drawn."""
    return contribution is None or getattr(contribution, "max_units", None) == 1


def _found(
    table: dict[Key, Cell],
    scheme: Any,
    matrix: StrategyMatrix,
    contribution: Contribution | None,
) -> Cell | None:
    """The first matching cell, the narrowest first; None if no cell matches."""
    kinds = (matrix.kind, *_ALSO.get(matrix.kind, ()))
    keys: list[Key] = []
    if contribution is not None:
        keys += [(type(scheme), kind, type(contribution)) for kind in kinds]
    # proof: wider-cell-1
    if _is_one_unit(contribution):
        keys += [(type(scheme), kind, None) for kind in kinds]
    return next((table[key] for key in keys if key in table), None)


# ---- the events of the cells ---------------------------------------------------------------------


def _poisson(sums: NoisedSums) -> DpEvent:
    # proof: poisson-cell-1
    return events.uls(sums.noise_multiplier, sums.scheme.sampling_prob, sums.steps)


def _poisson_of_several(sums: NoisedSums) -> DpEvent:
    of, given = sums.contribution, (sums.noise_multiplier, sums.scheme.sampling_prob)
    assert isinstance(of, SeveralUnits)
    return events.poisson_of_several(*given, of.max_units, sums.steps, of.per_step_cap)


def _poisson_of_averaged(sums: NoisedSums) -> DpEvent:
    of, given = sums.contribution, (sums.noise_multiplier, sums.scheme.sampling_prob)
    assert isinstance(of, AveragedUnits)
    return events.poisson_of_averaged(*given, of.max_units, sums.steps)


def _truncated(sums: NoisedSums) -> DpEvent:
    given = (sums.noise_multiplier, sums.scheme.sampling_prob)
    # The larger of two neighbouring data sets may have one unit more than this one.
    # proof: truncated-event-1
    return events.truncated_poisson(*given, sums.num_units + 1, sums.scheme.cap, sums.steps)


def _allocation(sums: NoisedSums) -> DpEvent:
    return events.allocated(sums.noise_multiplier, sums.scheme.period, sums.steps)


def _cyclic_poisson(sums: NoisedSums) -> DpEvent:
    column, period = sums.matrix.column, sums.scheme.period
    # proof: bandmf-period-1
    if len(column) > period:
        raise BadInputError(
            f"noise of {len(column)} bands needs a period of at least as many steps, but the "
            f"period is {period}: raise it, or use fewer bands"
        )
    padded = (*column, *[0.0] * (period - len(column)))
    return events.banded(sums.noise_multiplier, sums.scheme.sampling_prob, padded, sums.steps)


def _cyclic(sums: NoisedSums) -> DpEvent:
    column = sums.matrix.bounding_column or sums.matrix.column
    return events.toeplitz(sums.noise_multiplier, column, sums.scheme.period, sums.steps)


def _everyone_of_sensitivity(sums: NoisedSums) -> DpEvent:
    of = sums.contribution
    assert isinstance(of, Sensitivity)
    return events.user_ldp(sums.noise_multiplier, sums.steps, sensitivity=float(of.sensitivity))


def _two_stage(sums: NoisedSums) -> DpEvent:
    scheme: TwoStagePoisson = sums.scheme
    rounds, rest = divmod(sums.steps, scheme.local_steps)
    if rest:
        raise BadInputError(
            f"{sums.steps} local steps are not a whole number of rounds of {scheme.local_steps}: "
            "personal rates need whole rounds"
        )
    given = (
        sums.noise_multiplier,
        scheme.sampling_prob,
        scheme.participation_prob,
        scheme.local_steps,
    )
    return events.two_stage(*given, rounds)


def _poisson_replaced(sums: NoisedSums) -> DpEvent:
    return events.isrl_dp(sums.noise_multiplier, sums.scheme.sampling_prob, sums.steps)


def _everyone_replaced(sums: NoisedSums) -> DpEvent:
    return events.gaussian(sums.noise_multiplier, sums.steps)


def _one_pass_replaced(sums: NoisedSums) -> DpEvent:
    # proof: isrl-event-1
    return events.gaussian(sums.noise_multiplier, 1)


# ---- the most powerful statistics for an audit of a run with correlated noise --------------------
# A run releases x = g + K^-1 Z, so that K x = K g + Z: a unit that took part at some steps moves
# K x along the sum of the columns of K at these steps. The statistic projects K x on that sum.


def _column_of_each_turn(
    column: tuple[float, ...], seen: np.ndarray, inside: np.ndarray, sampler: Any
) -> np.ndarray:
    """The projection for each turn of each unit, float [units, turns]; NaN without such a turn.

    The arguments are those of ``audit_statistic``, with the first column of K and a sampler that
    has a ``CyclicPoisson`` scheme.
    """
    scheme: schemes.CyclicPoisson = sampler.scheme
    if scheme.period == 1:
        return seen
    units, steps = seen.shape
    bands = np.asarray(column)
    white = sum(np.pad(seen, ((0, 0), (i, 0)))[:, :steps] * c for i, c in enumerate(bands))
    group = _first_steps(scheme.group_of(sampler.key, sampler.population), scheme.period, inside)
    projections = np.full((units, -(-steps // scheme.period)), np.nan)
    for turn in range(projections.shape[1]):
        first = turn * scheme.period + group
        reached = first[:, None] + np.arange(len(bands))
        there = np.where(reached < steps, bands, 0.0)
        values = np.take_along_axis(np.asarray(white), np.minimum(reached, steps - 1), axis=1)
        with np.errstate(invalid="ignore"):
            projections[:, turn] = (values * there).sum(axis=1) / np.linalg.norm(there, axis=1)
    return projections


def _columns_of_all_turns(
    column: tuple[float, ...], seen: np.ndarray, inside: np.ndarray, sampler: Any
) -> np.ndarray:
    """The projection for all turns of each unit together, float [units, 1], of the steps that ran.

    The arguments are those of ``audit_statistic``, with the first column of K and a sampler that
    has a ``Cyclic`` scheme.
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
    with np.errstate(invalid="ignore"):  # a unit without a turn
        projection: np.ndarray = (moved * rows).sum(axis=1) / np.linalg.norm(moved, axis=1)
    return projection[:, None]


def _first_steps(drawn: np.ndarray, period: int, inside: np.ndarray) -> np.ndarray:
    """Each unit's first step; a unit outside the data gets a random one, for comparison."""
    first: np.ndarray = np.random.default_rng(0).integers(period, size=inside.shape)
    first[inside] = drawn[: inside.sum()]
    return first


def audit_statistic(
    matrix: StrategyMatrix, seen: np.ndarray, inside: np.ndarray, sampler: Any
) -> np.ndarray:
    """Returns the most powerful statistic for an audit, float [units, steps of the event].

    Args:
      matrix: K of the noise.
      seen: float [units, steps], what was released along each unit's direction, divided by the
        noise stddev.
      inside: bool [units], whether a unit is in the data; those are the sampler's first units.
      sampler: the run's sampler, from ``sampling``.
    """
    cell = _found(TABLE, sampler.scheme, matrix, None)
    if cell is None or cell.statistic is None:
        return seen
    return cell.statistic(matrix.column, seen, inside, sampler)


# ---- the table -----------------------------------------------------------------------------------

# By type of scheme, kind of matrix, and type of contribution.
TABLE: dict[Key, Cell] = {
    (schemes.Poisson, "independent", None): Cell(
        _poisson, "PLD, Poisson-subsampled Gaussian (exact up to rounding upwards)", "uls"
    ),
    (schemes.Poisson, "independent", SeveralUnits): Cell(
        _poisson_of_several,
        "PLD, mixture of Gaussians with Binomial sensitivity (exact up to rounding upwards)",
        "els",
    ),
    (schemes.Poisson, "independent", AveragedUnits): Cell(
        _poisson_of_averaged,
        "PLD, Gaussian that is Poisson-sampled with the probability that any of a unit's own is "
        "drawn (exact up to rounding upwards)",
        "hi_grad_avg",
    ),
    (schemes.TruncatedPoisson, "independent", None): Cell(
        _truncated, "PLD, truncated Poisson-subsampled Gaussian (rounded upwards)", "truncated"
    ),
    (schemes.RandomAllocation, "independent", None): Cell(
        _allocation,
        "PLD, random allocation of Gaussians (rounded upwards)",
        "allocation",
        (
            "all steps of a stretch are taken by one run under one key, which draws a user's step "
            "once",
        ),
    ),
    (schemes.CyclicPoisson, "banded", None): Cell(
        _cyclic_poisson,
        "PLD, Poisson-subsampled Gaussians of a user's turns (exact up to rounding upwards)",
        "bandmf",
        (
            "the number of groups of users and the strategy of the noise (its bands) are public "
            "constants, fixed before looking at one user's data",
        ),
        _column_of_each_turn,
    ),
    (schemes.Cyclic, "full", None): Cell(
        _cyclic,
        "one Gaussian of all steps, without amplification by sampling (sensitivity rounded "
        "upwards)",
        "blt",
        (
            "all steps are taken by one run under one key, which draws a user's turn once; whose "
            "turn it is may be known",
            "the number of turns and the matrix of the noise are public constants, fixed before "
            "looking at one user's data",
        ),
        _columns_of_all_turns,
    ),
    (Everyone, "independent", Sensitivity): Cell(
        _everyone_of_sensitivity, "PLD, Gaussian of the unit's sensitivity", "user_ldp"
    ),
    (TwoStagePoisson, "independent", None): Cell(
        _two_stage,
        "PLD of two-stage sampling (silos, then the record by its own rate), each record's rate "
        "certified",
        "rpdp",
        ("a record's budget does not depend on other records, and is not itself protected",),
    ),
}
_REPLACED = "PLD, replace-one (rounded upwards)"
# Cells where a privacy unit is replaced by another; their events are accounted under replace-one.
_REPLACE_TABLE: dict[Key, Cell] = {
    (schemes.Poisson, "independent", None): Cell(_poisson_replaced, _REPLACED, "isrl"),
    (Everyone, "independent", None): Cell(_everyone_replaced, _REPLACED, "isrl"),
    (OnePass, "independent", None): Cell(_one_pass_replaced, _REPLACED, "isrl"),
}
