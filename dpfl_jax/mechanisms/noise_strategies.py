"""Noise strategies: how noise is correlated over steps.

Row t of G is the clipped sum of step t, and the rows of Z are independent noise. What is released
is K^-1 (K G + Z) = G + K^-1 Z, where K is the strategy matrix. A *row* below is a row of K G or Z.

A strategy is fitted to the number of steps, to the least number of steps between two steps of a
unit, and to the optimiser (``fitted_to``). Then it has a matrix for the accounting, and an Optax
transformation for the run. No strategy holds a standard deviation. A new one is a frozen dataclass
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
_LARGEST_SENSITIVITY = 1e20  # sums of 1e9 users over 1e9 steps stay below float32's maximum, 3e38
_KEPT_SUMS = "checkpoints are as secret as the root key: they hold sums of {} steps without noise"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseStrategy(Named, abc.ABC, kinds=NOISES):
    """How noise is correlated over steps.

    Attributes:
      arithmetic: ``"exact"`` (noise is drawn and added in integers, so that low bits do not reveal
        the sum), or ``"float"`` (float32; the guarantee says what that leaves open).

    Examples:
      >>> from dpfl_jax.mechanisms import Banded, Independent, NoiseStrategy
      >>> [strategy.kind for strategy in (Independent(), Banded())]
      ['independent', 'banded']
    """

    arithmetic: accounting.NoiseLaw = "exact"

    is_private: ClassVar[bool] = True

    @property
    def is_correlated(self) -> bool:
        """Whether the noise of a step depends on the noise of other steps."""
        return False

    @property
    def keys_per_step(self) -> int:
        """Number of steps whose noise is drawn at each step: this step, and any before it."""
        return 1

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions for the guarantee: what must be kept secret besides the key."""
        return ()

    def check_sensitivity(self, sensitivity: float) -> None:
        """Raises BadInputError if sums of contributions of this norm may overflow float32."""

    def fitted_to(self: Self, steps: int, separation: int | None, workload: Workload) -> Self:
        """Returns the strategy with the options that were left open set to the best ones.

        Args:
          steps: number of steps T.
          separation: least number of steps from one step of a unit to its next; None: no bound.
          workload: what the optimiser makes of gradients.
        """
        del steps, separation, workload
        return self

    @abc.abstractmethod
    def matrix(self, steps: int) -> StrategyMatrix:
        """Returns K for the first ``steps`` steps.

        Raises:
          BadInputError: the strategy is not fitted yet, or was fitted to fewer steps.
        """

    def error(self, steps: int, workload: Workload) -> float:
        """Returns ``Workload.error`` of K, relative to the error of independent noise."""
        return prefix_error(self.matrix(steps).column, steps, workload)

    @abc.abstractmethod
    def transform(
        self, stddev: float, sensitivity: float, divisor: float
    ) -> optax.GradientTransformationExtraArgs:
        """Returns the Optax transformation that adds noise to a clipped sum, and divides it.

        Args:
          stddev: standard deviation of each entry of Z.
          sensitivity: largest norm of what a unit adds to the sum of a step.
          divisor: constant that the noised sum is divided by.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoNoise(NoiseStrategy):
    """No noise, for baselines without a privacy guarantee.

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
    """Independent noise at each step, as in DP-SGD.

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
    """Banded noise (BandMF): K is a banded Toeplitz matrix.

    The noise of a step is partly subtracted again in the steps that follow.

    Source: Choquette-Choo et al. 2023 (arXiv 2306.08153); strategies of McKenna 2024 (arXiv
    2405.15913). ``matrices/strategies.py`` computes the matrix.

    Attributes:
      bands: number of bands b of K; 1 is independent noise.
      column: the first ``bands`` entries of K's first column; None: the best for the number of
        steps and the optimiser.

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
        # Rounded to float32, as it runs, so that the same numbers are accounted.
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
        """The fitted column; raises BadInputError before ``fitted_to``."""
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
        column = self.chosen
        reach = float(np.linalg.norm(column)) * sensitivity
        # proof: bandmf-noise-2
        return banded(Noise(stddev, reach, self.arithmetic, rows=self.bands), column, divisor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Toeplitz(NoiseStrategy, abc.ABC, kinds=NOISES):
    """K is lower triangular and Toeplitz, and the noise of a step shows in all later steps.

    Attributes:
      horizon: most steps of the run; None: the number of steps that it is fitted to.
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
        """Checks that a field has ``count`` numbers from 0 to 1, and rounds them to float32.

        What runs is float32; rounding first makes the accounting use the same numbers. ``what``
        names, in the error, the things of which each must have one number.
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
                "the noise of a step never grows in later steps: make them smaller"
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
        """K for ``steps`` >= 1, within the horizon."""

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
        # ``reach`` and ``rows`` only set the grid on which exact noise is drawn. ``reach`` is how
        # far one participation of a unit moves K G. All its participations together, which are
        # accounted, move it further; room for 4 times as many rows as steps makes the grid fine
        # enough for these, too.
        matrix = self._matrix(self._steps)
        reach = float(np.linalg.norm(matrix.bounding_column or matrix.column)) * sensitivity
        # proof: in-turns-noise-1
        noise = Noise(stddev, reach, self.arithmetic, rows=4 * self._steps)
        return self._correlated(noise, divisor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffered(_Toeplitz):
    """Buffered linear Toeplitz noise (BLT): a few decaying buffers carry it over all steps.

    Source: Dvijotham et al. 2024 (arXiv 2404.16706); McMahan, Xu and Xu 2024 (arXiv 2408.08868).
    ``matrices/strategies.py`` computes the matrix.

    Attributes:
      buffers: number of buffers.
      decays: decay of each buffer per step, in [0, 1]. If neither decays nor scales are given, the
        best ones for the number of steps and the optimiser are taken.
      scales: weight of each buffer, 0 or more; they add up to 1 at most.

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
        """The fitted decays and scales; raises BadInputError before ``fitted_to``."""
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
    """Noise whose inverse strategy matrix K^-1 is a banded Toeplitz matrix.

    Source: Kalinin, McKenna, Upadhyay and Lampert 2025 (arXiv 2505.12128).
    ``matrices/strategies.py`` computes the matrix. At the same memory the error of ``Buffered`` is
    within 0.1 % of it where units pause for 6 to 10 steps, and higher elsewhere.

    Attributes:
      bands: number of bands b of K^-1.
      fractions: parts of a step's noise that are subtracted in each of the next b - 1 steps, 0 or
        more, which add up to 1 at most; None: the best for the number of steps and the optimiser.
      redrawn: whether past noise is drawn again from its keys, which saves keeping 3 (bands - 1)
        numbers for each parameter, but draws bands times as much noise at every step.
        ``fractions`` are then rounded down to multiples of 2^-16.

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
        # If noise is drawn again, checkpoints hold no sums that would have to be kept secret.
        return () if self.redrawn else super().assumptions

    def fitted_to(self, steps: int, separation: int | None, workload: Workload) -> BandedInverse:
        made = dataclasses.replace(self, horizon=self.horizon or steps)
        if self.fractions is not None:
            return made
        apart = _steps_apart(separation, steps)
        best = inverse_strategy(self.bands, steps, apart, workload)
        return dataclasses.replace(made, fractions=best)

    @property
    def chosen(self) -> tuple[float, ...]:
        """The fitted fractions; raises BadInputError before ``fitted_to``."""
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
                "mechanism.redrawn rounds noise at every step, and these rounding errors add up "
                f"over too many steps (mechanism.fractions adds up to {math.fsum(self.chosen):g}): "
                "leave mechanism.redrawn out, make mechanism.fractions smaller, or ask for a "
                "larger epsilon"
            )
        return redrawn(dataclasses.replace(noise, rows=rows), self.chosen, divisor)


def _steps_apart(separation: int | None, steps: int) -> int:
    if separation is None:
        raise BadInputError(
            "this noise is fitted to how many steps a unit pauses, which the sampling does not "
            "bound: take cyclic participation"
        )
    return min(separation, steps)  # after the last step no unit takes part again
