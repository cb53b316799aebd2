"""Sampling laws: which of n units take part in a step, for units of any kind.

A law draws indices from a root key and a step alone. ``units`` turns indices into store positions.
Amplification differs from law to law, and so does the adjacency it is proved for: the class says
which; a mechanism must account for the law it runs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, Protocol

import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling.base import binomial_bound, check_probability


class Law(Protocol):
    """Random access to the indices drawn at each step."""

    @property
    def population(self) -> int:
        """Number of units."""

    @property
    def name(self) -> str:
        """Short name for reports and accountants."""

    @property
    def expected_size(self) -> float:
        """Expected number of indices in a draw."""

    def size_bound(self, tail: float = 1e-15) -> int:
        """A size that a draw exceeds with probability at most ``tail``."""

    def describe(self, units: str) -> str:
        """One line for the report; ``units`` is what is drawn, in the plural."""

    def indices(self, key: RootKey, step: int) -> np.ndarray:
        """Returns the distinct indices of ``step``, sorted, int64 [n]."""


def check_population(population: int) -> None:
    """Raises BadInputError if there is nothing to sample from."""
    if population < 1:
        raise BadInputError("there is nothing to sample from: the data hold no units")


def _check_size(size: int, population: int, what: str) -> None:
    if not 1 <= size <= population:
        raise BadInputError(
            f"{what} is {size}, but it must be at least 1 and at most the {population} units there "
            "are"
        )


def poisson_indices(rng: np.random.Generator, population: int, prob: float) -> np.ndarray:
    """Draws each of ``population`` units independently with probability ``prob``.

    The size is drawn from Binomial(population, prob), then a uniform subset of that size: the same
    law as independent coins, at a cost that follows the draw and not the population.

    Returns:
      Sorted int64 [n], the units drawn.
    """
    if prob >= 1.0:
        return np.arange(population, dtype=np.int64)
    # proof: poisson-1
    size = rng.binomial(population, prob)
    chosen = rng.choice(population, size=size, replace=False, shuffle=False)
    return np.sort(chosen.astype(np.int64, copy=False))


class AtRate:
    """A law whose draws are no larger, in distribution, than those of coins of one probability."""

    population: int

    @property
    def rate(self) -> float:
        """Probability of a unit at a step, of which nothing else is known."""
        raise NotImplementedError

    @property
    def expected_size(self) -> float:
        """Expected number of indices in a draw."""
        return self.population * self.rate

    def size_bound(self, tail: float = 1e-15) -> int:
        """A size that a draw exceeds with probability at most ``tail``."""
        return binomial_bound(self.population, self.rate, tail)


@dataclasses.dataclass(frozen=True)
class Poisson(AtRate):
    """Each unit independently with the same probability (add-or-remove adjacency)."""

    population: int
    prob: float
    name: ClassVar[str] = "poisson"

    @property
    def rate(self) -> float:
        """Probability of a unit at a step, of which nothing else is known."""
        return self.prob

    def __post_init__(self) -> None:
        """Validates the probability."""
        check_population(self.population)
        check_probability(self.prob, f"for {self.population} units")

    def describe(self, units: str) -> str:
        """One line for the report."""
        return f"Poisson over {self.population} {units}, probability {self.prob:.6g} each"

    def indices(self, key: RootKey, step: int) -> np.ndarray:
        """Returns the indices of ``step``."""
        return poisson_indices(key.numpy("sampling", step), self.population, self.prob)


@dataclasses.dataclass(frozen=True, eq=False)
class Staying(Poisson):
    """Poisson, of those alone who have not left yet.

    Attributes:
      until: int64 [population], the first step that each takes no part in.
    """

    until: np.ndarray
    name: ClassVar[str] = "poisson-staying"

    def indices(self, key: RootKey, step: int) -> np.ndarray:
        """Everybody's coins are tossed: nobody's depend on who stays."""
        drawn = super().indices(key, step)
        # proof: individual-sampling-2
        return drawn[step < self.until[drawn]]


@dataclasses.dataclass(frozen=True)
class TruncatedPoisson(Poisson):
    """Poisson, of whose draws no more than ``cap`` units are kept, at random (add-or-remove)."""

    cap: int = 0
    name: ClassVar[str] = "truncated-poisson"

    def __post_init__(self) -> None:
        """Validates probability and cap."""
        super().__post_init__()
        if self.cap < 1:
            raise BadInputError(f"the cap of a draw is {self.cap}, but it must be at least 1")

    def size_bound(self, tail: float = 1e-15) -> int:
        """The cap, or less."""
        return min(self.cap, super().size_bound(tail))

    def describe(self, units: str) -> str:
        """One line for the report."""
        return f"{super().describe(units)}, cut at random to {self.cap}"

    def indices(self, key: RootKey, step: int) -> np.ndarray:
        """Returns the indices of ``step``."""
        drawn = super().indices(key, step)
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
class CyclicPoisson(Poisson):
    """Poisson within one of several groups of units, each of which has its turn (add-or-remove).

    A unit's group is a uniform draw of its own, for the whole run, so that who else is there has no
    part in it; groups are of unequal size, which nobody need know. At step t it is the turn of
    group t modulo ``groups``.

    Attributes:
      prob: of each unit of the group whose turn it is.
      groups: b. One group is ``Poisson``, draw by draw.
    """

    groups: int = 1
    name: ClassVar[str] = "cyclic-poisson"

    @property
    def rate(self) -> float:
        """Of a unit whose group is not known."""
        return self.prob / self.groups

    def describe(self, units: str) -> str:
        """One line for the report."""
        return (
            f"{self.groups} groups of {self.population} {units}, in turns: Poisson within a group, "
            f"probability {self.prob:.6g} each"
        )

    def group_of(self, key: RootKey) -> np.ndarray:
        """int64 [population], the group of each unit under the key of a run."""
        return _groups(key, self.population, self.groups)

    def indices(self, key: RootKey, step: int) -> np.ndarray:
        """Returns the indices of ``step``."""
        if self.groups == 1:
            return super().indices(key, step)
        # proof: cyclic-2
        members = np.flatnonzero(self.group_of(key) == step % self.groups)
        rng = key.numpy("sampling", step)
        return members[poisson_indices(rng, len(members), self.prob)]


@functools.lru_cache(maxsize=2)
def _stretch(
    key: RootKey, stretch: int, population: int, once_in: int
) -> tuple[np.ndarray, np.ndarray]:
    """Units by their step, and these steps."""
    # proof: allocation-1
    drawn = key.numpy("allocation", stretch).integers(once_in, size=population)
    order = np.argsort(drawn, kind="stable")
    order.flags.writeable = False
    return order, drawn[order]


@dataclasses.dataclass(frozen=True)
class RandomAllocation(AtRate):
    """Each unit in exactly one of every ``once_in`` steps (add-or-remove adjacency).

    Which step it is is a uniform draw of the unit's own, afresh for each stretch of ``once_in``
    steps; who else is there has no part in it.
    """

    population: int
    once_in: int
    name: ClassVar[str] = "random-allocation"

    def __post_init__(self) -> None:
        """Validates the sizes."""
        check_population(self.population)
        if not (isinstance(self.once_in, int) and 1 <= self.once_in < 2**62):
            raise BadInputError(
                f"once_in is {self.once_in}, but it must be a whole number of steps, at least 1"
            )

    @property
    def rate(self) -> float:
        """Probability of a unit at a step, of which nothing else is known."""
        return 1.0 / self.once_in

    def describe(self, units: str) -> str:
        """One line for the report."""
        return f"each of {self.population} {units} in one of every {self.once_in} steps, uniformly"

    def indices(self, key: RootKey, step: int) -> np.ndarray:
        """Returns the indices of ``step``."""
        stretch, turn = divmod(step, self.once_in)
        units, steps = _stretch(key, stretch, self.population, self.once_in)
        # proof: allocation-2
        return units[slice(*np.searchsorted(steps, [turn, turn + 1]))]


@dataclasses.dataclass(frozen=True)
class Turns(RandomAllocation):
    """Each unit at every ``once_in``-th step, from one of the first ``once_in`` on.

    Which of these it is is a uniform draw of the unit's own, once for the run. So two steps of a
    unit are ``once_in`` apart or more, and it has no more of them than fit (add-or-remove).
    """

    name: ClassVar[str] = "turns"

    def describe(self, units: str) -> str:
        """One line for the report."""
        return f"each of {self.population} {units} at every {self.once_in}-th step, in turns"

    def turn_of(self, key: RootKey) -> np.ndarray:
        """int64 [population], the first step of each unit under the key of a run."""
        units, steps = _stretch(key, 0, self.population, self.once_in)
        turns = np.empty_like(steps)
        turns[units] = steps
        return turns

    def indices(self, key: RootKey, step: int) -> np.ndarray:
        """Returns the indices of ``step``."""
        # proof: turns-1
        return super().indices(key, step % self.once_in)


@dataclasses.dataclass(frozen=True)
class FixedSize:
    """A uniform subset of exactly ``size`` units, afresh at each step (replace-one adjacency)."""

    population: int
    size: int
    name: ClassVar[str] = "fixed-size-without-replacement"

    def __post_init__(self) -> None:
        """Validates the size."""
        check_population(self.population)
        _check_size(self.size, self.population, "the batch size")

    @property
    def expected_size(self) -> float:
        """The size."""
        return float(self.size)

    def size_bound(self, tail: float = 1e-15) -> int:
        """The size."""
        return self.size

    def describe(self, units: str) -> str:
        """One line for the report."""
        return f"exactly {self.size} of {self.population} {units} per step, without replacement"

    def indices(self, key: RootKey, step: int) -> np.ndarray:
        """Returns the indices of ``step``."""
        rng = key.numpy("sampling", step)
        chosen = rng.choice(self.population, self.size, replace=False, shuffle=False)
        return np.sort(chosen.astype(np.int64, copy=False))
