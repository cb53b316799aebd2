"""Sampling schemes: which of n units take part in each step, for units of any kind.

A scheme holds only numbers: it draws indices from a root key, a step and the number of units.
``samplers`` turns indices into store positions. Schemes differ in amplification and in the
adjacency it is proved for, which each class names; a mechanism accounts for the scheme it runs.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from typing import ClassVar, Protocol, TypeVar

import numpy as np
from scipy import stats

from dpfl_jax.errors import BadInputError, at_least, probability, require
from dpfl_jax.randomness import RootKey

T = TypeVar("T")
Self = TypeVar("Self", bound="SamplingScheme")
SelfPoisson = TypeVar("SelfPoisson", bound="_Poisson")
SelfPeriodic = TypeVar("SelfPeriodic", bound="_OncePerPeriod")
_LEAST_RATE = 1e-12
_MOST_PERIOD = 2**62 - 1


class Scheme(Protocol):
    """Random access to the indices drawn at each step.

    Examples:
      >>> from dpfl_jax.sampling import Poisson, Scheme
      >>> scheme: Scheme = Poisson(0.1)
      >>> scheme.expected_size(population=200)
      20.0
    """

    def expected_size(self, population: int) -> float:
        """Returns the expected number of indices in a draw."""

    def size_bound(self, population: int, tail: float = 1e-15) -> int:
        """Returns a size that a draw exceeds with probability at most ``tail``."""

    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        """Returns the distinct indices of ``step``, sorted, int64 [n]."""


def check_population(population: int) -> None:
    """Raises BadInputError if there are no units to sample from."""
    if population < 1:
        raise BadInputError("there is nothing to sample from: the data hold no units")


def _rate(size: float, population: int, what: str) -> float:
    rate = size / max(population, 1)
    name = f"the sampling probability ({what}: {size:g} expected of {population})"
    advice = f"set {what} to at most {population}, or use more data"
    require(0.0 < rate <= 1.0, name, rate, "above 0 and at most 1", advice)
    return rate


def _known(number: T | None, scheme: SamplingScheme) -> T:
    if number is None:
        raise BadInputError(
            f"this {type(scheme).__name__} has no rate yet: set it, or call of_size(...), which "
            "derives it from the expected number of units in a draw"
        )
    return number


def binomial_bound(population: int, prob: float, tail: float) -> int:
    """Returns the smallest k with P(Binomial(population, prob) > k) <= tail."""
    if population == 0:
        return 0
    return int(stats.binom.isf(tail, population, prob))


def poisson_indices(rng: np.random.Generator, population: int, prob: float) -> np.ndarray:
    """Draws each of ``population`` units independently with probability ``prob``.

    It draws the size from Binomial(population, prob) and then a uniform subset of that size. That
    has the distribution of independent coins, but its cost grows with the draw, not the population.

    Returns:
      Sorted int64 [n], the units drawn.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.sampling import poisson_indices
      >>> poisson_indices(np.random.default_rng(0), population=4, prob=1.0).tolist()
      [0, 1, 2, 3]
    """
    if prob >= 1.0:
        return np.arange(population, dtype=np.int64)
    # proof: poisson-1
    size = rng.binomial(population, prob)
    chosen = rng.choice(population, size=size, replace=False, shuffle=False)
    return np.sort(chosen.astype(np.int64, copy=False))


class SamplingScheme(abc.ABC):
    """A scheme whose draws are no larger, in distribution, than Poisson draws at its rate.

    A scheme without a rate (``Poisson()``) says how units are drawn; ``of_size`` sets the rate.
    """

    kind: ClassVar[str]  # name in configurations

    @property
    def separation(self) -> int | None:
        """Least number of steps between two participations of a unit; None: no bound."""
        return None

    @property
    def is_stateful(self) -> bool:
        """Whether a step's draw depends on the draws of earlier steps."""
        return False

    @property
    @abc.abstractmethod
    def rate(self) -> float:
        """Probability that a unit takes part in a given step, over all draws of the run.

        Raises:
          BadInputError: the scheme has no rate yet.
        """

    @property
    def draw_prob(self) -> float:
        """Probability that a unit takes part in a step in which its group has its turn."""
        return self.rate

    @abc.abstractmethod
    def of_size(self: Self, size: float, population: int, what: str) -> Self:
        """Returns the scheme with the rate that draws ``size`` units; itself if it has a rate.

        Args:
          size: expected number of units in a draw.
          population: number of units that may be drawn.
          what: name of the option that ``size`` comes from, for messages.

        Raises:
          BadInputError: there are fewer units than ``size``.
        """

    def expected_size(self, population: int) -> float:
        """Returns the expected number of indices in a draw."""
        return population * self.rate

    def size_bound(self, population: int, tail: float = 1e-15) -> int:
        """Returns a size that a draw exceeds with probability at most ``tail``."""
        return binomial_bound(population, self.rate, tail)

    @abc.abstractmethod
    def describe(self, counted: str, unit: str, contribution: str = "") -> str:
        """Returns the sampling in words, for a guarantee.

        Args:
          counted: the units that may be drawn, e.g. "90 users".
          unit: the noun for one of them, e.g. "user".
          contribution: what a drawn unit contributes; "": all that it has.
        """

    @abc.abstractmethod
    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        """Returns the distinct indices of ``step``, sorted, int64 [n]."""


@dataclasses.dataclass(frozen=True)
class _Poisson(SamplingScheme, abc.ABC):
    """Schemes that draw each unit independently."""

    sampling_prob: float | None = None

    def __post_init__(self) -> None:
        probability("the sampling probability", self.sampling_prob, zero=False)
        if self.sampling_prob is not None:
            object.__setattr__(self, "sampling_prob", float(self.sampling_prob))

    @property
    def rate(self) -> float:
        return self.draw_prob

    @property
    def draw_prob(self) -> float:
        return _known(self.sampling_prob, self)

    def of_size(self: SelfPoisson, size: float, population: int, what: str) -> SelfPoisson:
        if self.sampling_prob is not None:
            return self
        return dataclasses.replace(self, sampling_prob=_rate(size, population, what))

    def describe(self, counted: str, unit: str, contribution: str = "") -> str:
        text = f"Poisson over {counted}, probability {self.draw_prob:.6g} each"
        return f"{text}, {contribution} of a sampled {unit} per step" if contribution else text

    def _drawn(self, key: RootKey, step: int, population: int) -> np.ndarray:
        return poisson_indices(key.numpy("sampling", step), population, self.draw_prob)


@dataclasses.dataclass(frozen=True)
class Poisson(_Poisson):
    """Draws each unit independently with one probability (add-or-remove adjacency).

    Attributes:
      sampling_prob: probability of each unit; None: not set yet (``of_size``).

    Examples:
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.sampling import Poisson
      >>> Poisson(0.1).expected_size(population=200)
      20.0
      >>> Poisson(1.0).indices(dpfl.RootKey.from_seed(0), step=0, population=4).tolist()
      [0, 1, 2, 3]
    """

    kind: ClassVar[str] = "poisson"

    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        return self._drawn(key, step, population)


@dataclasses.dataclass(frozen=True, eq=False)
class PoissonWithDropout(_Poisson):
    """Poisson sampling of the units that have not left yet.

    Attributes:
      sampling_prob: probability of each unit.
      until: int64 [population], the first step in which each unit no longer takes part.

    Examples:
      >>> import numpy as np
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.sampling import PoissonWithDropout
      >>> scheme = PoissonWithDropout(1.0, until=np.array([1, 9, 9]))  # unit 0 leaves
      >>> key = dpfl.RootKey.from_seed(0)
      >>> [scheme.indices(key, step, population=3).tolist() for step in (0, 1)]
      [[0, 1, 2], [1, 2]]
    """

    until: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    is_stateful = True

    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        # Draw from all units, so that no unit's draw depends on which units have left.
        drawn = self._drawn(key, step, population)
        # proof: individual-sampling-2
        return drawn[step < self.until[drawn]]


@dataclasses.dataclass(frozen=True)
class TruncatedPoisson(_Poisson):
    """Poisson sampling that keeps at most ``cap`` units of a draw, at random (add-or-remove).

    Attributes:
      sampling_prob: probability of each unit; None: not set yet.
      cap: most units in a draw; None: 4 standard deviations above the expected size (``of_size``).

    Examples:
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.sampling import TruncatedPoisson
      >>> key = dpfl.RootKey.from_seed(0)
      >>> len(TruncatedPoisson(0.9, cap=4).indices(key, step=0, population=30))
      4
    """

    cap: int | None = None

    kind: ClassVar[str] = "truncated_poisson"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("the cap of a draw", self.cap, 1, whole=True)

    def of_size(self, size: float, population: int, what: str) -> TruncatedPoisson:
        cap = math.ceil(size + 4.0 * math.sqrt(size)) if self.cap is None else self.cap
        if cap < size:
            raise BadInputError(
                f"the cap of a draw is {cap}, less than the expected {size:g} ({what}): raise the "
                f"cap to 4 standard deviations above that, or lower {what}"
            )
        return dataclasses.replace(super().of_size(size, population, what), cap=cap)

    def size_bound(self, population: int, tail: float = 1e-15) -> int:
        return min(_known(self.cap, self), super().size_bound(population, tail))

    def describe(self, counted: str, unit: str, contribution: str = "") -> str:
        return f"{super().describe(counted, unit, contribution)}, of at most {self.cap} {unit}s"

    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        drawn, cap = self._drawn(key, step, population), _known(self.cap, self)
        if len(drawn) <= cap:
            return drawn
        # proof: truncated-1
        kept = key.numpy("truncation", step).choice(len(drawn), cap, replace=False)
        return drawn[np.sort(kept)]


@functools.lru_cache(maxsize=8)
def _groups(key: RootKey, population: int, groups: int) -> np.ndarray:
    # proof: cyclic-1
    drawn = key.numpy("groups").integers(groups, size=population)
    drawn.flags.writeable = False
    return drawn


@dataclasses.dataclass(frozen=True, kw_only=True)
class CyclicPoisson(_Poisson):
    """Poisson sampling within groups of units that take turns (add-or-remove).

    Each unit's group is drawn uniformly once for the run, independently of other units. Groups
    differ in size, which need not be known. Step t is the turn of group t modulo ``period``.

    Attributes:
      sampling_prob: probability of each unit in the group whose turn it is; None: not set yet.
      period: b, number of groups. With one group the draws are those of ``Poisson``.

    Examples:
      >>> from dpfl_jax.sampling import CyclicPoisson
      >>> CyclicPoisson(0.5, period=4).separation
      4
    """

    period: int

    kind: ClassVar[str] = "cyclic_poisson"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_period(self.period)

    @property
    def rate(self) -> float:
        return self.draw_prob / self.period  # over the random group of the unit

    def of_size(self, size: float, population: int, what: str) -> CyclicPoisson:
        # Only the group whose turn it is can be drawn.
        what = what if self.period == 1 else f"{self.period} (the period) times {what}"
        return super().of_size(self.period * size, population, what)

    @property
    def separation(self) -> int:
        return self.period

    @property
    def is_stateful(self) -> bool:
        return self.period > 1  # groups are drawn once for the run

    def describe(self, counted: str, unit: str, contribution: str = "") -> str:
        of_a_group = super().describe(counted, unit, contribution)
        if self.period == 1:
            return of_a_group
        groups = f"{self.period} groups of {unit}s, drawn {unit} by {unit}, in turns"
        return f"{groups}; of a group: {of_a_group}"

    def group_of(self, key: RootKey, population: int) -> np.ndarray:
        """Returns the group of each unit under the root key of a run, int64 [population]."""
        return _groups(key, population, self.period)

    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        if self.period == 1:
            return self._drawn(key, step, population)
        # proof: cyclic-2
        members = np.flatnonzero(self.group_of(key, population) == step % self.period)
        rng = key.numpy("sampling", step)
        return members[poisson_indices(rng, len(members), self.draw_prob)]


def _check_period(period: int | None) -> None:
    good = period is None or (type(period) is int and 1 <= period <= _MOST_PERIOD)
    require(good, "the period", period, "a whole number of steps, at least 1")


@functools.lru_cache(maxsize=2)
def _stretch(
    key: RootKey, stretch: int, population: int, period: int
) -> tuple[np.ndarray, np.ndarray]:
    """Units sorted by the steps that they drew within the period, and these steps, sorted."""
    # proof: allocation-1
    drawn = key.numpy("allocation", stretch).integers(period, size=population)
    order = np.argsort(drawn, kind="stable")
    order.flags.writeable = False
    return order, drawn[order]


@dataclasses.dataclass(frozen=True)
class _OncePerPeriod(SamplingScheme, abc.ABC):
    """Schemes in which each unit takes part in one of every ``period`` steps."""

    period: int | None = None
    is_stateful = True

    def __post_init__(self) -> None:
        _check_period(self.period)

    @property
    def known_period(self) -> int:
        """The period.

        Raises:
          BadInputError: it is not set yet.
        """
        return int(_known(self.period, self))

    @property
    def rate(self) -> float:
        return 1.0 / self.known_period

    def of_size(self: SelfPeriodic, size: float, population: int, what: str) -> SelfPeriodic:
        if self.period is not None:
            return self
        # The integer nearest to the number of units over ``size``.
        rate = max(_rate(size, population, what), _LEAST_RATE)
        return dataclasses.replace(self, period=max(1, round(1.0 / rate)))


@dataclasses.dataclass(frozen=True)
class RandomAllocation(_OncePerPeriod):
    """Draws each unit in exactly one of every ``period`` steps (add-or-remove adjacency).

    Each unit's step is drawn uniformly and independently of other units, anew for each stretch of
    ``period`` steps.

    Attributes:
      period: t; None: not set yet.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.sampling import RandomAllocation
      >>> scheme, key = RandomAllocation(period=2), dpfl.RootKey.from_seed(0)
      >>> drawn = [scheme.indices(key, step, population=6).tolist() for step in range(2)]
      >>> sorted(drawn[0] + drawn[1])
      [0, 1, 2, 3, 4, 5]
    """

    kind: ClassVar[str] = "random_allocation"

    def describe(self, counted: str, unit: str, contribution: str = "") -> str:
        text = (
            f"each of {counted} in exactly one of every {self.known_period} steps, drawn uniformly "
            "and independently"
        )
        return f"{text}, {contribution} of a {unit} who takes part" if contribution else text

    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        stretch, turn = divmod(step, self.known_period)
        units, steps = _stretch(key, stretch, population, self.known_period)
        # proof: allocation-2
        return units[slice(*np.searchsorted(steps, [turn, turn + 1]))]


@dataclasses.dataclass(frozen=True)
class Cyclic(_OncePerPeriod):
    """Draws each unit in every ``period``-th step, from a random one of the first ``period`` on.

    Each unit's first step is drawn uniformly and independently, once for the run, so that a unit's
    steps are exactly ``period`` apart (add-or-remove adjacency).

    Attributes:
      period: s; None: not set yet.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.sampling import Cyclic
      >>> scheme, key = Cyclic(period=2), dpfl.RootKey.from_seed(0)
      >>> drawn = [scheme.indices(key, step, population=6) for step in range(3)]
      >>> len(drawn[0]) + len(drawn[1]), drawn[0].tolist() == drawn[2].tolist()
      (6, True)
    """

    kind: ClassVar[str] = "cyclic"

    @property
    def separation(self) -> int:
        return self.known_period

    def describe(self, counted: str, unit: str, contribution: str = "") -> str:
        period = self.known_period
        text = (
            f"each of {counted} at every {period}-th step, from one of the first {period} "
            "on that is drawn uniformly and independently (no amplification by sampling is counted "
            "on)"
        )
        return f"{text}, {contribution} of a {unit} who takes part" if contribution else text

    def turn_of(self, key: RootKey, population: int) -> np.ndarray:
        """Returns the first step of each unit under the root key of a run, int64 [population]."""
        units, steps = _stretch(key, 0, population, self.known_period)
        turns = np.empty_like(steps)
        turns[units] = steps
        return turns

    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        # Repeat the first stretch of random allocation.
        # proof: turns-1
        return RandomAllocation(self.known_period).indices(
            key, step % self.known_period, population
        )


@dataclasses.dataclass(frozen=True)
class FixedSize:
    """Draws a uniform subset of exactly ``size`` units in each step (replace-one adjacency).

    Examples:
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.sampling import FixedSize
      >>> len(FixedSize(4).indices(dpfl.RootKey.from_seed(0), step=0, population=30))
      4
    """

    size: int

    def expected_size(self, population: int) -> float:
        """Returns ``size``, the size of every draw."""
        return float(self.size_bound(population))

    def size_bound(self, population: int, tail: float = 1e-15) -> int:
        """Returns ``size``, the size of every draw.

        Raises:
          BadInputError: there are fewer units than that.
        """
        wanted = f"at least 1 and at most the {population} units there are"
        require(1 <= self.size <= population, "the batch size", self.size, wanted)
        return self.size

    def describe(self, counted: str, unit: str, contribution: str = "") -> str:
        """Returns the sampling in words, as ``SamplingScheme.describe`` does."""
        return f"exactly {self.size} of {counted} per step, without replacement"

    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        """Returns the distinct indices of ``step``, sorted, int64 [size]."""
        size, rng = self.size_bound(population), key.numpy("sampling", step)
        chosen = rng.choice(population, size, replace=False, shuffle=False)
        return np.sort(chosen.astype(np.int64, copy=False))


@dataclasses.dataclass(frozen=True, eq=False)
class PersonalizedPoisson:
    """Draws each unit independently with a personal probability (Liu et al. 2024).

    Attributes:
      probs: float64 [population], in [0, 1]; units with 0 are never drawn.

    Examples:
      >>> import numpy as np
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.sampling import PersonalizedPoisson
      >>> scheme = PersonalizedPoisson(np.array([0.0, 1.0, 0.0, 1.0]))
      >>> scheme.indices(dpfl.RootKey.from_seed(0), step=0, population=4).tolist()
      [1, 3]
    """

    probs: np.ndarray

    def __post_init__(self) -> None:
        probs = np.asarray(self.probs, dtype=np.float64)
        check_population(len(probs))
        if probs.ndim != 1 or not ((probs >= 0) & (probs <= 1)).all():
            raise BadInputError("every sampling probability must be a number in [0, 1]")
        object.__setattr__(self, "probs", probs)

    def expected_size(self, population: int) -> float:
        """Returns the sum of the probabilities."""
        return float(self.probs.sum())

    def size_bound(self, population: int, tail: float = 1e-15) -> int:
        """Returns a size that a draw exceeds with probability at most ``tail`` (Bernstein)."""
        log = -np.log(tail)
        variance = float((self.probs * (1 - self.probs)).sum())
        slack = log / 3 + np.sqrt(log * log / 9 + 2 * variance * log)
        return min(
            int(np.count_nonzero(self.probs)), int(np.ceil(self.expected_size(population) + slack))
        )

    def indices(self, key: RootKey, step: int, population: int) -> np.ndarray:
        """Returns the distinct indices of ``step``, sorted, int64 [n].

        All units are drawn with the largest probability, and each is then kept with the ratio of
        its probability to that (thinning): the cost grows with the draw, not the population.

        Raises:
          BadInputError: the number of units is not the number of probabilities.
        """
        if population != len(self.probs):
            raise BadInputError(
                f"there are {len(self.probs)} sampling probabilities, but {population} units: give "
                "one probability per unit"
            )
        rng = key.numpy("sampling", step)
        most = float(self.probs.max())
        if most == 0.0:
            return np.zeros(0, np.int64)
        # proof: rpdp-sampling-1
        drawn = poisson_indices(rng, population, most)
        return drawn[rng.random(len(drawn)) * most < self.probs[drawn]]
