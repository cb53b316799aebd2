"""Banded inverse: users in turns, without sampling, and noise of which few rows are taken back.

Source: Kalinin, McKenna, Upadhyay and Lampert 2025 (arXiv 2505.12128). Turns are those of
``in_turns``, the matrix of the noise that of ``noise/banded_inverse.py``. At the same memory the
noise of ``blt`` is as small to 0.1 % where users pause for 6 to 10 steps, and else smaller.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
import optax

from dpfl_jax import accounting
from dpfl_jax.accounting.cells import KEPT_SUMS
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.base import Population
from dpfl_jax.mechanisms.in_turns import InTurns
from dpfl_jax.noise import (
    MOST_NOISE,
    Noise,
    banded_inverse,
    inverse_column,
    inverse_strategy,
    redrawn,
    redrawn_rows,
    workload_of,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BandedInverse(InTurns):
    """Every user at every s-th step, with noise whose matrix has few bands.

    Attributes:
      bands: b, of K^-1.
      taken: of the noise of a step, the parts that are taken back in each of the next b - 1 steps,
        0 or more, which add up to 1 at most; default the best for the number of steps and
        the optimiser.
      redrawn: whether past noise is drawn again from its keys, bands times as much of it at every
        step, where else 3 (bands - 1) numbers a parameter are kept. ``taken`` is then rounded down
        to multiples of 2^-16.
    """

    bands: int = 3
    taken: tuple[float, ...] | None = None
    redrawn: bool = False

    kind: ClassVar[str] = "banded_inverse"

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.bands < 2:
            raise BadInputError(
                f"mechanism.bands is {self.bands}, but it must be at least 2: one takes back "
                "nothing"
            )
        if self.taken is not None and self.redrawn:
            parts = tuple(math.floor(f * 2**16) / 2**16 if f == f else f for f in self.taken)
            object.__setattr__(self, "taken", parts)
        if self.taken is not None:
            self._as_they_run("taken", self.bands - 1, f"{self.bands} bands but the first")
            self._check_total("taken")

    @property
    def chosen(self) -> tuple[float, ...]:
        """The parts; raises BadInputError before they are chosen for a plan's steps."""
        if self.taken is None or self.horizon is None:
            raise BadInputError(
                "this banded_inverse mechanism has no bands or horizon yet: give mechanism.taken "
                "and horizon, or make a plan, which chooses them for its number of steps"
            )
        return self.taken

    def for_steps(
        self,
        population: Population,
        steps: int,
        optimizer: optax.GradientTransformation | None = None,
    ) -> BandedInverse:
        """With the bands that are best for these steps and optimiser, unless it has some."""
        made = dataclasses.replace(self, horizon=self.horizon or steps)
        if self.taken is not None:
            return made
        separation, workload = self.once_in(population), workload_of(optimizer, steps)
        taken = inverse_strategy(self.bands, steps, separation, workload)
        return dataclasses.replace(made, taken=taken)

    def column(self, steps: int) -> np.ndarray:
        """That of the bands, or more."""
        return inverse_column(self.chosen, steps)

    def taken_back(self, noise: Noise) -> optax.GradientTransformationExtraArgs:
        """By the bands."""
        if not self.redrawn:
            return banded_inverse(noise, self.chosen, self.divisor)
        rows = redrawn_rows(self.column(self.horizon or 1))
        if self.noise == "exact" and noise.stddev > MOST_NOISE / rows**0.5 * noise.sensitivity:
            raise BadInputError(
                "mechanism.redrawn rounds noise at every step, which bands that forget so slowly "
                f"(mechanism.taken adds up to {math.fsum(self.chosen):g}) pass on for too long: "
                "leave it out, set mechanism.taken to less, or ask for a larger epsilon"
            )
        return redrawn(dataclasses.replace(noise, rows=rows), self.chosen, self.divisor)

    @property
    def noise_keys(self) -> int:
        """Those of the bands."""
        return self.bands if self.redrawn else 1

    def guarantee(
        self, population: Population, steps: int, delta: float, caveats: tuple[str, ...] = ()
    ) -> accounting.Guarantee:
        """As in turns; checkpoints hold no sums if noise is drawn again."""
        made = super().guarantee(population, steps, delta, caveats)
        if not self.redrawn:
            return made
        left = tuple(told for told in made.assumptions if told != KEPT_SUMS)
        return dataclasses.replace(made, assumptions=left)
