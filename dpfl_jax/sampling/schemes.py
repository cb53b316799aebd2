"""Sampling schemes: which of n units take part in each step, for units of any kind.

A scheme is numbers alone: it draws indices from a root key, a step and the number of units.
``units`` turns indices into store positions. Amplification differs from scheme to scheme, and so
does the adjacency it is proved for: the class says which; a mechanism accounts for the scheme it
runs.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Protocol

import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling.base import binomial_bound, check_probability


class Scheme(Protocol):
    """Random access to the indices drawn at each step."""

    def expected_size(self, population: int) -> float:
        """Expected number of indices in a draw."""

    def size_bound(self, population: int, tail: float = 1e-15) -> int:
        """A size that a draw exceeds with probability at most ``tail``."""

    def describe(self, population: int, units: str) -> str:
        """One line for the report; ``units`` is what is drawn, in the plural."""

    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        """Returns the distinct indices of ``step``, sorted, int64 [n]."""


def check_population(population: int) -> None:
    """Raises BadInputError if there is nothing to sample from."""
    if population < 1:
        raise BadInputError("there is nothing to sample from: the data hold no units")


def poisson_indices(rng: np.random.Generator, population: int, prob: float) -> np.ndarray:
    """Draws each of ``population`` units independently with probability ``prob``.

    The size is drawn from Binomial(population, prob), then a uniform subset of that size: the same
    distribution as independent coins, at a cost that follows the draw and not the population.

    Returns:
      Sorted int64 [n], the units drawn.
    """
    if prob >= 1.0:
        return np.arange(population, dtype=np.int64)
    # proof: poisson-1
    size = rng.binomial(population, prob)
    chosen = rng.choice(population, size=size, replace=False, shuffle=False)
    return np.sort(chosen.astype(np.int64, copy=False))


class AtRate(abc.ABC):
    """A scheme whose draws are no larger, in distribution, than those of coins of one rate."""

    @property
    def separation(self) -> int | None:
        """Steps from one participation of a unit to its next, at least; None: no bound."""
        return None

    @property
    def is_stateful(self) -> bool:
        """Whether a step's draw depends on those of earlier steps."""
        return False

    @property
    @abc.abstractmethod
    def rate(self) -> float:
        """Probability of a unit at a step, of which nothing else is known."""

    def expected_size(self, population: int) -> float:
        """Expected number of indices in a draw."""
        return population * self.rate

    def size_bound(self, population: int, tail: float = 1e-15) -> int:
        """A size that a draw exceeds with probability at most ``tail``."""
        return binomial_bound(population, self.rate, tail)

    @abc.abstractmethod
    def describe(self, population: int, units: str) -> str:
        """One line for the report; ``units`` is what is drawn, in the plural."""

    @abc.abstractmethod
    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        """Returns the distinct indices of ``step``, sorted, int64 [n]."""


@dataclasses.dataclass(frozen=True)
class Poisson(AtRate):
    """Each unit independently with the same probability (add-or-remove adjacency)."""

    prob: float

    def __post_init__(self) -> None:
        """Validates the probability."""
        check_probability(self.prob, "given to Poisson")

    @property
    def rate(self) -> float:
        """The probability."""
        return self.prob

    def describe(self, population: int, units: str) -> str:
        """One line for the report."""
        return f"Poisson over {population} {units}, probability {self.prob:.6g} each"

    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        """Returns the indices of ``step``."""
        return poisson_indices(key.numpy("sampling", step), population, self.prob)


@dataclasses.dataclass(frozen=True, eq=False)
class PoissonWithDropout(AtRate):
    """Poisson, of those alone who have not left yet.

    Attributes:
      prob: of each unit.
      until: int64 [population], the first step that each takes no part in.
    """

    prob: float
    until: np.ndarray
    is_stateful = True

    @property
    def rate(self) -> float:
        """The probability."""
        return self.prob

    def describe(self, population: int, units: str) -> str:
        """One line for the report."""
        return f"{Poisson(self.prob).describe(population, units)}, of those who have not left"

    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        """Everybody's coins are tossed: nobody's depend on who stays."""
        drawn = Poisson(self.prob).indices(key, step, population)
        # proof: individual-sampling-2
        return drawn[step < self.until[drawn]]


@dataclasses.dataclass(frozen=True)
class TruncatedPoisson(AtRate):
    """Poisson, of whose draws no more than ``cap`` units are kept, at random (add-or-remove)."""

    prob: float
    cap: int

    def __post_init__(self) -> None:
        """Validates probability and cap."""
        check_probability(self.prob, "given to TruncatedPoisson")
        if self.cap < 1:
            raise BadInputError(f"the cap of a draw is {self.cap}, but it must be at least 1")

    @property
    def rate(self) -> float:
        """The probability."""
        return self.prob

    def size_bound(self, population: int, tail: float = 1e-15) -> int:
        """The cap, or less."""
        return min(self.cap, super().size_bound(population, tail))

    def describe(self, population: int, units: str) -> str:
        """One line for the report."""
        return f"{Poisson(self.prob).describe(population, units)}, cut at random to {self.cap}"

    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        """Returns the indices of ``step``."""
        drawn = Poisson(self.prob).indices(key, step, population)
        if len(drawn) <= self.cap:
            return drawn
        # proof: truncated-1
        kept = key.numpy("truncation", step).choice(len(drawn), self.cap, replace=False)
        return drawn[np.sort(kept)]


@functools.lru_cache(maxsize=8)
def _groups(key: RootKey, population: int, groups: int) -> np.ndarray:
    # proof: cyclic-1
    drawn = key.numpy("groups").integers(groups, size=population)
    drawn.flags.writeable = False
    return drawn


@dataclasses.dataclass(frozen=True)
class CyclicPoisson(AtRate):
    """Poisson within one of several groups of units, each of which has its turn (add-or-remove).

    A unit's group is a uniform draw of its own, for the whole run, so that who else is there has no
    part in it; groups are of unequal size, which nobody need know. At step t it is the turn of
    group t modulo ``period``.

    Attributes:
      prob: of each unit of the group whose turn it is.
      period: b, number of groups. One group is ``Poisson``, draw by draw.
    """

    prob: float
    period: int

    def __post_init__(self) -> None:
        """Validates probability and period."""
        check_probability(self.prob, "given to CyclicPoisson")
        _check_period(self.period)

    @property
    def rate(self) -> float:
        """Of a unit whose group is not known."""
        return self.prob / self.period

    @property
    def separation(self) -> int:
        """The period."""
        return self.period

    @property
    def is_stateful(self) -> bool:
        """Groups are drawn once."""
        return self.period > 1

    def describe(self, population: int, units: str) -> str:
        """One line for the report."""
        return (
            f"{self.period} groups of {population} {units}, in turns: Poisson within a group, "
            f"probability {self.prob:.6g} each"
        )

    def group_of(self, key: RootKey, population: int) -> np.ndarray:
        """int64 [population], the group of each unit under the key of a run."""
        return _groups(key, population, self.period)

    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        """Returns the indices of ``step``."""
        if self.period == 1:
            return Poisson(self.prob).indices(key, step, population)
        # proof: cyclic-2
        members = np.flatnonzero(self.group_of(key, population) == step % self.period)
        rng = key.numpy("sampling", step)
        return members[poisson_indices(rng, len(members), self.prob)]


def _check_period(period: int) -> None:
    if not (isinstance(period, int) and 1 <= period < 2**62):
        raise BadInputError(
            f"the period is {period}, but it must be a whole number of steps, at least 1"
        )


@functools.lru_cache(maxsize=2)
def _stretch(
    key: RootKey, stretch: int, population: int, period: int
) -> tuple[np.ndarray, np.ndarray]:
    """Units by their step, and these steps."""
    # proof: allocation-1
    drawn = key.numpy("allocation", stretch).integers(period, size=population)
    order = np.argsort(drawn, kind="stable")
    order.flags.writeable = False
    return order, drawn[order]


@dataclasses.dataclass(frozen=True)
class _OncePerPeriod(AtRate, abc.ABC):
    """A scheme in which each unit takes part in one of every ``period`` steps."""

    period: int
    is_stateful = True

    def __post_init__(self) -> None:
        """Validates the period."""
        _check_period(self.period)

    @property
    def rate(self) -> float:
        """One of ``period`` steps."""
        return 1.0 / self.period


@dataclasses.dataclass(frozen=True)
class RandomAllocation(_OncePerPeriod):
    """Each unit in exactly one of every ``period`` steps (add-or-remove adjacency).

    Which step it is is a uniform draw of the unit's own, afresh for each stretch of ``period``
    steps; who else is there has no part in it.
    """

    def describe(self, population: int, units: str) -> str:
        """One line for the report."""
        return f"each of {population} {units} in one of every {self.period} steps, uniformly"

    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        """Returns the indices of ``step``."""
        stretch, turn = divmod(step, self.period)
        units, steps = _stretch(key, stretch, population, self.period)
        # proof: allocation-2
        return units[slice(*np.searchsorted(steps, [turn, turn + 1]))]


@dataclasses.dataclass(frozen=True)
class Cyclic(_OncePerPeriod):
    """Each unit at every ``period``-th step, from one of the first ``period`` on.

    Which of these it is is a uniform draw of the unit's own, once for the run. So two steps of a
    unit are ``period`` apart, and it has no more of them than fit (add-or-remove).
    """

    @property
    def separation(self) -> int:
        """The period."""
        return self.period

    def describe(self, population: int, units: str) -> str:
        """One line for the report."""
        return f"each of {population} {units} at every {self.period}-th step, in turns"

    def turn_of(self, key: RootKey, population: int) -> np.ndarray:
        """int64 [population], the first step of each unit under the key of a run."""
        units, steps = _stretch(key, 0, population, self.period)
        turns = np.empty_like(steps)
        turns[units] = steps
        return turns

    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        """Returns the indices of ``step``."""
        # proof: turns-1
        return RandomAllocation(self.period).indices(key, step % self.period, population)


@dataclasses.dataclass(frozen=True)
class FixedSize:
    """A uniform subset of exactly ``size`` units, afresh at each step (replace-one adjacency)."""

    size: int

    def expected_size(self, population: int) -> float:
        """The size."""
        return float(self.size_bound(population))

    def size_bound(self, population: int, tail: float = 1e-15) -> int:
        """The size.

        Raises:
          BadInputError: there are not so many units.
        """
        del tail
        if not 1 <= self.size <= population:
            raise BadInputError(
                f"the batch size is {self.size}, but it must be at least 1 and at most the "
                f"{population} units there are"
            )
        return self.size

    def describe(self, population: int, units: str) -> str:
        """One line for the report."""
        return f"exactly {self.size} of {population} {units} per step, without replacement"

    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        """Returns the indices of ``step``."""
        size, rng = self.size_bound(population), key.numpy("sampling", step)
        chosen = rng.choice(population, size, replace=False, shuffle=False)
        return np.sort(chosen.astype(np.int64, copy=False))
