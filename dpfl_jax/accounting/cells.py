"""The proven cells: what a sampling scheme with a noise strategy costs one privacy unit.

A mechanism's participation resolves to a scheme (``sampling.schemes``, or one of those below) and
to what one privacy unit has in a draw (``Contribution``), its noise resolves to a
``StrategyMatrix``. ``cell_of`` looks up the scheme's type, the matrix's kind and the contribution's
type. Independent noise also matches banded and full cells, and a contribution of one drawn unit
also matches cells without one. What is not in the table is not proven, and refused.
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


# ---- schemes that are used in accounting alone: no sampler draws them ----------------------------


@dataclasses.dataclass(frozen=True)
class Everyone:
    """All units, at every step."""

    def describe(self, counted: str, unit: str) -> str:
        """In words, as ``schemes.SamplingScheme.describe``."""
        del unit
        return f"none is counted on: {counted} may all take part in every step"


@dataclasses.dataclass(frozen=True)
class OnePass:
    """Each unit at one step at most; which one depends on no unit's content."""


@dataclasses.dataclass(frozen=True)
class TwoStagePoisson:
    """Silos first, then their units: rounds of local steps, each unit with a rate of its own.

    Attributes:
      sampling_prob: q, of the unit that is accounted, in each local step.
      participation_prob: lambda, of its silo in each round, which everybody sees.
      local_steps: tau, steps of a round.
    """

    sampling_prob: float
    participation_prob: float
    local_steps: int

    def describe(self, counted: str, unit: str) -> str:
        """In words, as ``schemes.SamplingScheme.describe``."""
        return (
            f"each silo with probability {self.participation_prob:.6g} in each round of "
            f"{self.local_steps} local steps, then Poisson over {counted}, probability "
            f"{self.sampling_prob:.6g} of this {unit}"
        )


# ---- what one privacy unit has in a draw, where it is not itself what is drawn -------------------


@dataclasses.dataclass(frozen=True)
class SeveralUnits:
    """Several of the units that are drawn, each of which moves the sum by C at most.

    Attributes:
      max_units: L.
      per_step_cap: Z, most of these in one step; None: all.
    """

    max_units: int
    per_step_cap: int | None = None


@dataclasses.dataclass(frozen=True)
class AveragedUnits:
    """Several of the units that are drawn, whose average in a step moves the sum by C at most.

    Attributes:
      max_units: L.
    """

    max_units: int


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """Whatever is drawn, it moves the sum by so many C at most.

    Attributes:
      sensitivity: S.
    """

    sensitivity: int


Contribution = SeveralUnits | AveragedUnits | Sensitivity


@dataclasses.dataclass(frozen=True)
class StrategyMatrix:
    """K of the noise K^-1 Z, lower triangular and Toeplitz.

    Attributes:
      column: the first of K, float [steps], or as far as it is not 0.
      kind: ``independent`` (the identity), ``banded`` (nothing beyond ``column``), ``full``.
      bounding_column: of a full matrix, numbers that are not below K's, nor below a later one:
        what is accounted. None: ``column`` is such.
    """

    column: tuple[float, ...] = (1.0,)
    kind: MatrixKind = "independent"
    bounding_column: tuple[float, ...] | None = None


INDEPENDENT = StrategyMatrix()


@dataclasses.dataclass(frozen=True)
class NoisedSums:
    """What is accounted: steps of clipped sums over the units drawn, plus noise.

    Attributes:
      scheme: which units are drawn.
      noise_multiplier: standard deviation of each entry of Z over the sensitivity of a drawn unit.
      steps: taken.
      num_units: units that may be drawn.
      matrix: K of the noise.
      contribution: what one privacy unit has in a draw; None: it is itself what is drawn.
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
        """What is proven of these.

        Raises:
          BadInputError: nothing is.
        """
        return cell_of(self.scheme, self.matrix, self.contribution, self.relation)

    def event(self) -> DpEvent:
        """Of one privacy unit, to be accounted under ``relation``.

        Raises:
          BadInputError: nothing is proven of these.
        """
        return self.cell.event(self)


# Of each unit a column for each step of the event, of (column of K, seen, inside, sampler).
Statistic = Callable[[tuple[float, ...], np.ndarray, np.ndarray, Any], np.ndarray]
Key = tuple[type, MatrixKind, type[Contribution] | None]


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is proven of one kind of scheme with one kind of matrix.

    Attributes:
      event: of one privacy unit.
      accountant: how the epsilon of that event is computed, for the guarantee.
      proof: page of docs/theory.
      assumptions: that the proof needs besides those of all mechanisms.
      statistic: what tells an audit most; None: what was released at each step.
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
    """The cell of these (``NoisedSums``).

    Raises:
      BadInputError: nothing is proven of them; the nearest that is proven is named.
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
    """Whether a privacy unit is itself what is drawn, or has one of the drawn units."""
    return contribution is None or getattr(contribution, "max_units", None) == 1


def _found(
    table: dict[Key, Cell],
    scheme: Any,
    matrix: StrategyMatrix,
    contribution: Contribution | None,
) -> Cell | None:
    """The cell of these, or of what they also are; None: there is none."""
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
    # Of the larger of two neighbouring sets: one unit more than there are.
    # proof: truncated-event-1
    return events.truncated_poisson(*given, sums.num_units + 1, sums.scheme.cap, sums.steps)


def _allocation(sums: NoisedSums) -> DpEvent:
    return events.allocated(sums.noise_multiplier, sums.scheme.period, sums.steps)


def _cyclic_poisson(sums: NoisedSums) -> DpEvent:
    column, period = sums.matrix.column, sums.scheme.period
    # proof: bandmf-period-1
    if len(column) > period:
        raise BadInputError(
            f"noise of {len(column)} bands needs users to pause for as many steps, but their "
            f"period is {period}: raise it"
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
            f"{sums.steps} local steps are no whole number of rounds of {scheme.local_steps}: "
            "personal rates are accounted by rounds"
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


# ---- what tells an audit most of a unit, of what a run with correlated noise released ------------
# Each has a column for each step of the event, in its order. K x = K g + Z of what was released, x:
# a unit that took part at some steps moves K x along the sum of these columns of K.


def _column_of_each_turn(
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


def _columns_of_all_turns(
    column: tuple[float, ...], seen: np.ndarray, inside: np.ndarray, sampler: Any
) -> np.ndarray:
    """Of all turns of a unit together what its columns of K say; of the steps that were.

    Arguments as of ``_column_of_each_turn``, of a ``Cyclic`` scheme.
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


def audit_statistic(
    matrix: StrategyMatrix, seen: np.ndarray, inside: np.ndarray, sampler: Any
) -> np.ndarray:
    """What tells an audit most of each unit: a column for each step of the event, in its order.

    Args:
      matrix: of the noise.
      seen: [units, steps], what was released along each unit's direction, over the noise.
      inside: bool [units], who is in the data: the first units of the sampler's, in order.
      sampler: of the run; one of ``sampling``.
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
# Of one privacy unit that is replaced by another; its events are accounted under replace-one.
_REPLACE_TABLE: dict[Key, Cell] = {
    (schemes.Poisson, "independent", None): Cell(_poisson_replaced, _REPLACED, "isrl"),
    (Everyone, "independent", None): Cell(_everyone_replaced, _REPLACED, "isrl"),
    (OnePass, "independent", None): Cell(_one_pass_replaced, _REPLACED, "isrl"),
}
