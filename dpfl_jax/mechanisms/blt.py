"""BLT: users in turns, without sampling, and noise that a few buffers take back over all steps.

Source: McMahan, Xu and Xu, "A hassle-free algorithm for private learning in practice" (2024, arXiv
2408.08868); Dvijotham et al. 2024 (arXiv 2404.16706) for the noise. Turns are those of
``in_turns``, the matrix of the noise that of ``noise/buffered.py``.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import optax

from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.base import Population
from dpfl_jax.mechanisms.in_turns import InTurns
from dpfl_jax.noise import (
    Buffers,
    Noise,
    buffered,
    buffered_column,
    buffered_strategy,
    workload_of,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BLT(InTurns):
    """Every user at every s-th step, with buffered Toeplitz noise.

    Attributes:
      buffers: B, of the noise.
      decays: of the buffers, in [0, 1]; default, with scales, the best for the number of steps and
        the optimiser.
      scales: of the buffers, 0 or more, which add up to 1 at most.
    """

    buffers: int = 2
    decays: tuple[float, ...] | None = None
    scales: tuple[float, ...] | None = None

    kind: ClassVar[str] = "blt"

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.decays is None and self.scales is None:
            return
        for name in ("decays", "scales"):
            self._as_they_run(name, self.buffers, f"{self.buffers} buffers")
        self._check_total("scales")

    @property
    def chosen(self) -> Buffers:
        """Decays and scales; raises BadInputError before they are chosen for a plan's steps."""
        if self.decays is None or self.scales is None or self.horizon is None:
            raise BadInputError(
                "this blt mechanism has no buffers or horizon yet: give mechanism.decays, scales "
                "and horizon, or make a plan, which chooses them for its number of steps"
            )
        return self.decays, self.scales

    def for_steps(
        self,
        population: Population,
        steps: int,
        optimizer: optax.GradientTransformation | None = None,
    ) -> BLT:
        """With the buffers that are best for these steps and optimiser, unless it has some."""
        made = dataclasses.replace(self, horizon=self.horizon or steps)
        if self.decays is not None:
            return made
        separation, workload = self.once_in(population), workload_of(optimizer, steps)
        decays, scales = buffered_strategy(self.buffers, steps, separation, workload)
        return dataclasses.replace(made, decays=decays, scales=scales)

    def column(self, steps: int) -> np.ndarray:
        """That of the buffers."""
        return buffered_column(self.chosen, steps)

    def taken_back(self, noise: Noise) -> optax.GradientTransformationExtraArgs:
        """By the buffers."""
        return buffered(noise, self.chosen, self.divisor)
