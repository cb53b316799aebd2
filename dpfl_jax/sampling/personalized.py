"""Laws in which units differ: own probabilities, and silos first, records then."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling.base import check_probability
from dpfl_jax.sampling.laws import check_population
from dpfl_jax.sampling.poisson import poisson_indices


@dataclasses.dataclass(frozen=True, eq=False)
class PersonalizedPoisson:
    """Each unit independently with its own probability (personalised budgets; Liu et al. 2024).

    Attributes:
      probs: float64 [population], in [0, 1]; 0 leaves a unit out.
    """

    probs: np.ndarray
    name: ClassVar[str] = "personalized-poisson"

    def __post_init__(self) -> None:
        """Validates the probabilities."""
        probs = np.asarray(self.probs, dtype=np.float64)
        check_population(len(probs))
        if probs.ndim != 1 or not ((probs >= 0) & (probs <= 1)).all():
            raise BadInputError("every sampling probability must be a number in [0, 1]")
        object.__setattr__(self, "probs", probs)

    @property
    def population(self) -> int:
        """Number of units."""
        return len(self.probs)

    @property
    def expected_size(self) -> float:
        """Sum of the probabilities."""
        return float(self.probs.sum())

    def size_bound(self, tail: float = 1e-15) -> int:
        """Bernstein's bound: a size that a draw exceeds with probability at most ``tail``."""
        log = -np.log(tail)
        variance = float((self.probs * (1 - self.probs)).sum())
        slack = log / 3 + np.sqrt(log * log / 9 + 2 * variance * log)
        return min(int(np.count_nonzero(self.probs)), int(np.ceil(self.expected_size + slack)))

    def describe(self, units: str) -> str:
        """One line for the report."""
        return (
            f"Poisson over {self.population} {units}, each with its own probability "
            f"({self.probs.min():.6g} to {self.probs.max():.6g})"
        )

    def indices(self, key: RootKey, step: int) -> np.ndarray:
        """Returns the indices of ``step``.

        Thinning: coins of the largest probability for all, then a second coin for those drawn; the
        same law as one coin each, at a cost that follows the draw.
        """
        rng = key.numpy("sampling", step)
        most = float(self.probs.max())
        if most == 0.0:
            return np.zeros(0, np.int64)
        drawn = poisson_indices(rng, self.population, most)
        return drawn[rng.random(len(drawn)) * most < self.probs[drawn]]


@dataclasses.dataclass(frozen=True, eq=False)
class TwoStage:
    """Silos first, then records of the silos drawn: both Poisson.

    The participation of a silo's records is not independent: all sit out when the silo does. The
    marginal probability of a record is the product; what may be accounted for with it depends on
    who knows which silos took part.

    Attributes:
      silo_offsets: int64 [num_silos + 1]; silo i holds records offsets[i]:offsets[i+1].
      silo_prob: probability of each silo.
      record_probs: probability of each record of a silo drawn: one number, or float64 [population].
    """

    silo_offsets: np.ndarray
    silo_prob: float
    record_probs: float | np.ndarray
    name: ClassVar[str] = "two-stage-poisson"

    def __post_init__(self) -> None:
        """Validates the probabilities."""
        offsets = np.asarray(self.silo_offsets, dtype=np.int64)
        object.__setattr__(self, "silo_offsets", offsets)
        check_probability(self.silo_prob, f"for {len(offsets) - 1} silos")
        probs = np.asarray(self.record_probs, dtype=np.float64)
        if probs.ndim and probs.shape != (self.population,):
            raise BadInputError(
                f"{probs.shape[0]} record probabilities for {self.population} records"
            )
        object.__setattr__(self, "record_probs", np.broadcast_to(probs, (self.population,)))
        PersonalizedPoisson(self._probs)  # validates

    @property
    def _probs(self) -> np.ndarray:
        return np.asarray(self.record_probs)

    @property
    def population(self) -> int:
        """Number of records."""
        return int(self.silo_offsets[-1])

    @property
    def expected_size(self) -> float:
        """Expected number of records in a draw."""
        return float(self.silo_prob * self._probs.sum())

    def size_bound(self, tail: float = 1e-15) -> int:
        """A size that a draw exceeds with probability at most ``tail`` (as if all silos came)."""
        return PersonalizedPoisson(self._probs).size_bound(tail)

    def describe(self, units: str) -> str:
        """One line for the report."""
        return (
            f"two-stage Poisson: each of {len(self.silo_offsets) - 1} silos with probability "
            f"{self.silo_prob:.6g}, then {units} of those with probability "
            f"{self._probs.min():.6g} to {self._probs.max():.6g}"
        )

    def silos(self, key: RootKey, step: int) -> np.ndarray:
        """Returns the silos of ``step``, sorted, int64 [n]."""
        rng = key.numpy("silo-sampling", step)
        return poisson_indices(rng, len(self.silo_offsets) - 1, self.silo_prob)

    def indices(self, key: RootKey, step: int) -> np.ndarray:
        """Returns the records of ``step``; a silo's coins do not depend on the other silos."""
        drawn = [np.zeros(0, np.int64)]
        for silo in self.silos(key, step).tolist():
            first, last = self.silo_offsets[silo], self.silo_offsets[silo + 1]
            coins = key.numpy("sampling", step, silo).random(last - first)
            drawn.append(first + np.flatnonzero(coins < self._probs[first:last]))
        return np.concatenate(drawn)
