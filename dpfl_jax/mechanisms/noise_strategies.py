"""Noise strategies: how the noise of a step is correlated with that of others, K^-1 Z.

A *row* is one of K G, where row t of G is the clipped sum of step t, and of Z, the noise drawn.

A strategy is fitted to the number of steps, to how far apart a unit's steps are and to what the
optimiser does with gradients (``fitted_to``); then it has a matrix, by which it is accounted, and a
transformation, which runs. No strategy holds a standard deviation. A new one is a frozen dataclass
that extends ``NoiseStrategy``.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import ClassVar, TypeVar

import numpy as np
import optax

from dpfl_jax import accounting
from dpfl_jax.accounting.cells import INDEPENDENT, StrategyMatrix
from dpfl_jax.config.kinds import NOISES, Named
from dpfl_jax.errors import BadInputError, at_least
from dpfl_jax.matrices import (
    Buffers,
    Workload,
    banded_strategy,
    buffered_column,
    buffered_error,
    buffered_strategy,
    inverse_bound,
    inverse_error,
    inverse_matrix,
    inverse_strategy,
    prefix_error,
)
from dpfl_jax.noise import (
    MOST_NOISE,
    Noise,
    banded,
    banded_inverse,
    buffered,
    redrawn,
    redrawn_rows,
    transformation,
)

Self = TypeVar("Self", bound="NoiseStrategy")
_LARGEST_SENSITIVITY = 1e20  # float32 ends at 3e38: for 1e9 people in 1e9 steps
_KEPT_SUMS = "checkpoints are as secret as the root key: they hold sums of {} steps without noise"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseStrategy(Named, abc.ABC, kinds=NOISES):
    """How noise is correlated over steps.

    Attributes:
      arithmetic: ``"exact"`` (noise is drawn and added in integers: low bits tell nothing of the
        sum), or ``"float"`` (float32, as elsewhere; the guarantee says what that leaves open).

    Examples:
      >>> from dpfl_jax.mechanisms import Banded, Independent, NoiseStrategy
      >>> [strategy.kind for strategy in (Independent(), Banded())]
      ['independent', 'banded']
    """

    arithmetic: accounting.NoiseLaw = "exact"

    is_private: ClassVar[bool] = True

    @property
    def is_correlated(self) -> bool:
        """Whether the noise of a step depends on that of others."""
        return False

    @property
    def keys_per_step(self) -> int:
        """Steps whose noise is drawn at a step: its own, and those before it."""
        return 1

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What must be kept secret of a run besides its key."""
        return ()

    def check_sensitivity(self, sensitivity: float) -> None:
        """Raises BadInputError if sums of so large contributions may not stay finite."""

    def fitted_to(self: Self, steps: int, separation: int | None, workload: Workload) -> Self:
        """With what is best for these, of all that was not given.

        Args:
          steps: T.
          separation: steps from one of a unit to its next, at least; None: no bound.
          workload: what the optimiser makes of gradients.
        """
        del steps, separation, workload
        return self

    @abc.abstractmethod
    def matrix(self, steps: int) -> StrategyMatrix:
        """K; raises BadInputError before it is fitted, or beyond the steps it was fitted to."""

    def error(self, steps: int, workload: Workload) -> float:
        """``Workload.error`` of K; 1 of independent noise."""
        return prefix_error(self.matrix(steps).column, steps, workload)

    @abc.abstractmethod
    def transform(
        self, stddev: float, sensitivity: float, divisor: float
    ) -> optax.GradientTransformationExtraArgs:
        """Adds noise to the clipped sum of a step, and divides it.

        Args:
          stddev: of each number of Z.
          sensitivity: largest norm of what a unit adds to the sum of a step.
          divisor: of the noised sum.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoNoise(NoiseStrategy):
    """No noise: for baselines, which guarantee nothing.

    Examples:
      >>> from dpfl_jax.mechanisms import NoNoise
      >>> NoNoise().kind
      'none'
    """

    kind: ClassVar[str] = "none"
    is_private: ClassVar[bool] = False

    def matrix(self, steps: int) -> StrategyMatrix:
        return INDEPENDENT

    def transform(
        self, stddev: float, sensitivity: float, divisor: float
    ) -> optax.GradientTransformationExtraArgs:
        return transformation(Noise(0.0, 1.0, self.arithmetic), divisor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Independent(NoiseStrategy):
    """Noise of each step's own.

    Examples:
      >>> from dpfl_jax.mechanisms import Independent
      >>> Independent().arithmetic
      'exact'
    """

    kind: ClassVar[str] = "independent"

    def matrix(self, steps: int) -> StrategyMatrix:
        return INDEPENDENT

    def transform(
        self, stddev: float, sensitivity: float, divisor: float
    ) -> optax.GradientTransformationExtraArgs:
        return transformation(Noise(stddev, sensitivity, self.arithmetic), divisor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Banded(NoiseStrategy):
    """K has few bands: the noise of a step is subtracted again, in parts, over the next steps.

    Source: Choquette-Choo et al. 2023 (arXiv 2306.08153); strategies of McKenna 2024 (arXiv
    2405.15913). The matrix is that of ``matrices/strategies.py``.

    Attributes:
      bands: b. 1 is independent noise.
      column: the first of K, one number for each band; None: the best for the number of steps and
        the optimiser.

    Examples:
      >>> from dpfl_jax.mechanisms import Banded
      >>> Banded(bands=8).bands
      8
    """

    bands: int = 4
    column: tuple[float, ...] | None = None

    kind: ClassVar[str] = "banded"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("mechanism.bands", self.bands, 1)
        if self.column is None:
            return
        if self.bands == 1:
            raise BadInputError("mechanism.column is for two bands or more: leave it out")
        column = np.asarray(self.column, np.float32)
        if len(column) != self.bands or not np.isfinite(column).all() or not column[0] > 0:
            raise BadInputError(
                f"mechanism.column has {len(column)} numbers, but it must have one for each of "
                f"the {self.bands} bands, all finite and the first above 0"
            )
        # As it runs, so that no other number is accounted.
        object.__setattr__(self, "column", tuple(map(float, column)))

    @property
    def is_correlated(self) -> bool:
        return self.bands > 1

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (_KEPT_SUMS.format("the last"),) if self.bands > 1 else ()

    def fitted_to(self, steps: int, separation: int | None, workload: Workload) -> Banded:
        if self.column is not None or self.bands == 1:
            return self
        return dataclasses.replace(self, column=banded_strategy(self.bands, steps, workload))

    @property
    def chosen(self) -> tuple[float, ...]:
        """The column; raises BadInputError before it is fitted."""
        if self.column is not None:
            return self.column
        if self.bands == 1:
            return (1.0,)
        raise BadInputError(
            "this banded noise has no column yet: give mechanism.column, or make a plan, "
            "which chooses one for its number of steps"
        )

    def matrix(self, steps: int) -> StrategyMatrix:
        return StrategyMatrix(self.chosen, "banded")

    def transform(
        self, stddev: float, sensitivity: float, divisor: float
    ) -> optax.GradientTransformationExtraArgs:
        """Noise of the standard deviation in every row of K G, correlated as the bands say."""
        column = self.chosen
        reach = float(np.linalg.norm(column)) * sensitivity
        # proof: bandmf-noise-2
        return banded(Noise(stddev, reach, self.arithmetic, rows=self.bands), column, divisor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Toeplitz(NoiseStrategy, abc.ABC, kinds=NOISES):
    """K is lower triangular and Toeplitz; the noise of a step shows in all later ones.

    Attributes:
      horizon: most steps of the run; None: those it is fitted to.
    """

    horizon: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("mechanism.horizon", self.horizon, 1)

    @property
    def is_correlated(self) -> bool:
        return True

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (_KEPT_SUMS.format("earlier"),)

    def check_sensitivity(self, sensitivity: float) -> None:
        if sensitivity > _LARGEST_SENSITIVITY:
            raise BadInputError(
                f"mechanism.clip_norm is {sensitivity:g}, but sums of all steps are kept, which "
                f"must stay finite: set it to at most {_LARGEST_SENSITIVITY:g}"
            )

    def _round_to_float32(self, name: str, count: int, what: str) -> None:
        """Checks numbers from 0 to 1, and makes them those of float32: no others are accounted.

        Args:
          name: field.
          count: how many there must be.
          what: one for each of these.

        Raises:
          BadInputError: other numbers, or more.
        """
        given = np.asarray(getattr(self, name) or (), np.float32)
        if len(given) != count or not ((given >= 0) & (given <= 1)).all():
            raise BadInputError(
                f"mechanism.{name} has {len(given)} numbers, but it must have one for each of "
                f"the {what}, all from 0 to 1"
            )
        object.__setattr__(self, name, tuple(map(float, given)))

    def _check_total(self, name: str) -> None:
        """Raises BadInputError unless the numbers of a field add up to 1 at most."""
        if (total := math.fsum(getattr(self, name) or ())) > 1:
            raise BadInputError(
                f"mechanism.{name} add up to {total:g}, but they must add up to at most 1, so that "
                "a step never weighs more in later ones than in its own: make them smaller"
            )

    @property
    def _steps(self) -> int:
        if self.horizon is None:
            raise BadInputError(
                f"this {self.kind} noise has no horizon yet: give mechanism.horizon, or make a "
                "plan, which takes its number of steps"
            )
        return self.horizon

    @abc.abstractmethod
    def _matrix(self, steps: int) -> StrategyMatrix:
        """K of so many steps, at least 1."""

    @abc.abstractmethod
    def _correlated(self, noise: Noise, divisor: float) -> optax.GradientTransformationExtraArgs:
        """The transformation that adds K^-1 Z, where ``noise`` draws Z."""

    def matrix(self, steps: int) -> StrategyMatrix:
        if steps > self._steps:
            raise BadInputError(
                f"{steps} steps are asked for, but mechanism.horizon is {self.horizon}: raise it"
            )
        return self._matrix(max(steps, 1))

    def transform(
        self, stddev: float, sensitivity: float, divisor: float
    ) -> optax.GradientTransformationExtraArgs:
        """Noise of the standard deviation in every row of K G, correlated over all steps."""
        # Only the grid on which exact noise is drawn follows from reach and rows. One participation
        # of a unit moves rows by so much, less than all of them together, which is accounted; and
        # with room for 4 times as many rows as there are steps the grid is fine enough for these.
        matrix = self._matrix(self._steps)
        reach = float(np.linalg.norm(matrix.bounding_column or matrix.column)) * sensitivity
        # proof: in-turns-noise-1
        noise = Noise(stddev, reach, self.arithmetic, rows=4 * self._steps)
        return self._correlated(noise, divisor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffered(_Toeplitz):
    """Buffered linear Toeplitz noise (BLT): a few decaying buffers carry it over all steps.

    Source: Dvijotham et al. 2024 (arXiv 2404.16706); McMahan, Xu and Xu 2024 (arXiv 2408.08868).
    The matrix is that of ``matrices/strategies.py``.

    Attributes:
      buffers: B.
      decays: of the buffers, in [0, 1]; None, with scales: the best for the number of steps and the
        optimiser.
      scales: of the buffers, 0 or more, which add up to 1 at most.

    Examples:
      >>> from dpfl_jax.mechanisms import Buffered
      >>> Buffered(buffers=2).buffers
      2
    """

    buffers: int = 2
    decays: tuple[float, ...] | None = None
    scales: tuple[float, ...] | None = None

    kind: ClassVar[str] = "buffered"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decays is None and self.scales is None:
            return
        for name in ("decays", "scales"):
            self._round_to_float32(name, self.buffers, f"{self.buffers} buffers")
        self._check_total("scales")

    def fitted_to(self, steps: int, separation: int | None, workload: Workload) -> Buffered:
        made = dataclasses.replace(self, horizon=self.horizon or steps)
        if self.decays is not None:
            return made
        apart = _steps_apart(separation, steps)
        decays, scales = buffered_strategy(self.buffers, steps, apart, workload)
        return dataclasses.replace(made, decays=decays, scales=scales)

    @property
    def chosen(self) -> Buffers:
        """Decays and scales; raises BadInputError before it is fitted."""
        if self.decays is None or self.scales is None:
            raise BadInputError(
                "this buffered noise has no buffers yet: give mechanism.decays and scales, or make "
                "a plan, which chooses them for its number of steps"
            )
        return self.decays, self.scales

    def _matrix(self, steps: int) -> StrategyMatrix:
        return StrategyMatrix(tuple(buffered_column(self.chosen, steps).tolist()), "full")

    def error(self, steps: int, workload: Workload) -> float:
        return buffered_error(self.chosen, steps, workload)

    def _correlated(self, noise: Noise, divisor: float) -> optax.GradientTransformationExtraArgs:
        return buffered(noise, self.chosen, divisor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BandedInverse(_Toeplitz):
    """K^-1 has few bands.

    Source: Kalinin, McKenna, Upadhyay and Lampert 2025 (arXiv 2505.12128). The matrix is that of
    ``matrices/strategies.py``. At the same memory ``Buffered`` is as good to 0.1 % where units
    pause for 6 to 10 steps, and else less.

    Attributes:
      bands: b, of K^-1.
      fractions: of a step's noise, subtracted in each of the next b - 1 steps, 0 or more, which add
        up to 1 at most; None: the best for the number of steps and the optimiser.
      redrawn: whether past noise is drawn again from its keys, bands times as much of it at every
        step, where else 3 (bands - 1) numbers a parameter are kept. ``fractions`` are then rounded
        down to multiples of 2^-16.

    Examples:
      >>> from dpfl_jax.mechanisms import BandedInverse
      >>> BandedInverse(bands=3).bands
      3
    """

    bands: int = 3
    fractions: tuple[float, ...] | None = None
    redrawn: bool = False

    kind: ClassVar[str] = "banded_inverse"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("mechanism.bands", self.bands, 2, advice="one is independent noise")
        if self.fractions is not None and self.redrawn:
            parts = tuple(math.floor(f * 2**16) / 2**16 if f == f else f for f in self.fractions)
            object.__setattr__(self, "fractions", parts)
        if self.fractions is not None:
            self._round_to_float32("fractions", self.bands - 1, f"{self.bands} bands but the first")
            self._check_total("fractions")

    @property
    def keys_per_step(self) -> int:
        return self.bands if self.redrawn else 1

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Checkpoints hold no sums if noise is drawn again."""
        return () if self.redrawn else super().assumptions

    def fitted_to(self, steps: int, separation: int | None, workload: Workload) -> BandedInverse:
        made = dataclasses.replace(self, horizon=self.horizon or steps)
        if self.fractions is not None:
            return made
        apart = _steps_apart(separation, steps)
        found = inverse_strategy(self.bands, steps, apart, workload)
        return dataclasses.replace(made, fractions=found)

    @property
    def chosen(self) -> tuple[float, ...]:
        """The fractions; raises BadInputError before it is fitted."""
        if self.fractions is None:
            raise BadInputError(
                "this banded inverse noise has no bands yet: give mechanism.fractions, or make a "
                "plan, which chooses them for its number of steps"
            )
        return self.fractions

    def _matrix(self, steps: int) -> StrategyMatrix:
        return inverse_matrix(self.chosen, steps)

    def error(self, steps: int, workload: Workload) -> float:
        return inverse_error(self.chosen, steps, workload)

    def _correlated(self, noise: Noise, divisor: float) -> optax.GradientTransformationExtraArgs:
        if not self.redrawn:
            return banded_inverse(noise, self.chosen, divisor)
        rows = redrawn_rows(inverse_bound(self.chosen, self._steps))
        if self.arithmetic == "exact" and noise.stddev > MOST_NOISE / rows**0.5 * noise.sensitivity:
            raise BadInputError(
                "mechanism.redrawn rounds noise at every step, which bands that forget so slowly "
                f"(mechanism.fractions adds up to {math.fsum(self.chosen):g}) pass on for too "
                "long: leave it out, set mechanism.fractions to less, or ask for a larger epsilon"
            )
        return redrawn(dataclasses.replace(noise, rows=rows), self.chosen, divisor)


def _steps_apart(separation: int | None, steps: int) -> int:
    if separation is None:
        raise BadInputError(
            "this noise is fitted to how many steps a unit pauses, which the sampling does not "
            "bound: take cyclic participation"
        )
    return min(separation, steps)  # beyond the last step nobody takes part again
