"""The sampling scheme in which units differ: each has a probability of its own."""

from __future__ import annotations

import dataclasses

import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling.schemes import check_population, poisson_indices


@dataclasses.dataclass(frozen=True, eq=False)
class PersonalizedPoisson:
    """Each unit independently with its own probability (personalised budgets; Liu et al. 2024).

    Attributes:
      probs: float64 [population], in [0, 1]; 0 leaves a unit out.
    """

    probs: np.ndarray

    def __post_init__(self) -> None:
        """Validates the probabilities."""
        probs = np.asarray(self.probs, dtype=np.float64)
        check_population(len(probs))
        if probs.ndim != 1 or not ((probs >= 0) & (probs <= 1)).all():
            raise BadInputError("every sampling probability must be a number in [0, 1]")
        object.__setattr__(self, "probs", probs)

    def expected_size(self, population: int) -> float:
        """Sum of the probabilities."""
        del population
        return float(self.probs.sum())

    def size_bound(self, population: int, tail: float = 1e-15) -> int:
        """Bernstein's bound: a size that a draw exceeds with probability at most ``tail``."""
        log = -np.log(tail)
        variance = float((self.probs * (1 - self.probs)).sum())
        slack = log / 3 + np.sqrt(log * log / 9 + 2 * variance * log)
        return min(
            int(np.count_nonzero(self.probs)), int(np.ceil(self.expected_size(population) + slack))
        )

    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        """Returns the indices of ``step``.

        Thinning: coins of the largest probability for all, then a second coin for those drawn; the
        same distribution as one coin each, at a cost that follows the draw.
        """
        if population != len(self.probs):
            raise BadInputError(
                f"there are {len(self.probs)} sampling probabilities, but {population} units"
            )
        rng = key.numpy("sampling", step)
        most = float(self.probs.max())
        if most == 0.0:
            return np.zeros(0, np.int64)
        # proof: rpdp-sampling-1
        drawn = poisson_indices(rng, population, most)
        return drawn[rng.random(len(drawn)) * most < self.probs[drawn]]
