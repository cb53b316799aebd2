"""Participation: which units contribute to which step, and how many of a privacy unit's.

A participation resolves to a sampling scheme (``sampling.schemes``) once it knows the population,
and bounds how much one privacy unit contributes to a draw (``contribution``). A participation, a
clip rule and a noise strategy make a mechanism. A new participation is a frozen dataclass that
extends ``Participation``.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.accounting.cells import Contribution, SeveralUnits
from dpfl_jax.accounting.statement import whole_number
from dpfl_jax.config.kinds import PARTICIPATIONS, SCHEMES, Named
from dpfl_jax.data.owners import BoundedStore, grouped_by_owner_set, shared_store
from dpfl_jax.data.store import Readable
from dpfl_jax.errors import BadInputError, at_least
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import (
    Cyclic,
    CyclicPoisson,
    ExampleSampler,
    Poisson,
    RandomAllocation,
    TruncatedPoisson,
    UserSampler,
    limit_contributions,
    limited_size,
)
from dpfl_jax.sampling.samplers import check_group_size
from dpfl_jax.sampling.schemes import SamplingScheme

PyTree = Any
LossFn = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Population:
    """The public counts of a data set that sampling and accounting depend on.

    Attributes:
      num_users: users in the training set.
      num_examples: examples in the training set, before any limit.
      num_units: units that may be drawn (ELS: examples of the limited set; ULS: users).
      shared: whether examples have several owners.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> people = dpfl.Population(num_users=1000, num_examples=9000, num_units=1000)
      >>> people.num_examples / people.num_users
      9.0
    """

    num_users: int
    num_examples: int
    num_units: int
    shared: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns the counts as JSON; ``shared`` is left out if it is false."""
        return {n: v for n, v in dataclasses.asdict(self).items() if n != "shared" or v}

    @property
    def description(self) -> str:
        """The counts in words, such as "90 users, 400 examples"."""
        words = f"{self.num_users:,} users, {self.num_examples:,} examples"
        if self.num_units in (self.num_users, self.num_examples):
            return words
        return f"{words}, {self.num_units:,} units that may be drawn"

    def default_delta(self) -> float:
        """Returns num_examples ** -1.1 (Charles et al. 2024, section 5)."""
        return float(self.num_examples) ** -1.1


def require_positive(name: str, value: float) -> None:
    """Raises BadInputError unless 0 < value <= 1e30 (float32 with room for sums)."""
    if not 0 < value <= 1e30:
        raise BadInputError(f"{name} is {value}, but it must be a number above 0, at most 1e30")


class Participation(Named, abc.ABC, kinds=PARTICIPATIONS):
    """Which units contribute to which step.

    Attributes:
      several_owners: whether all owners of an example are protected.

    Examples:
      >>> from dpfl_jax.mechanisms import Participation, Users
      >>> isinstance(Users(group_size=4, cohort_size=64), Participation)
      True
    """

    several_owners: ClassVar[bool] = False
    owners_only: ClassVar[bool] = False  # whether it is only for examples with several owners

    # ---- the data --------------------------------------------------------------------------

    def bounded(self, data: Readable) -> Readable:
        """Returns the part of the data that may be used: all, unless examples have several owners.

        Raises:
          BadInputError: examples have several owners, and this participation would take each set
            of owners for one user.
        """
        if shared_store(data) is not None:
            raise BadInputError(
                "some records of the data have several owners, which this mechanism would take for "
                f"one user: {SHARED_KINDS}, or name one owner of each"
            )
        return grouped_by_owner_set(data)

    @abc.abstractmethod
    def population(self, user_offsets: np.ndarray) -> Population:
        """Returns the counts of what is sampled from. user_offsets: int64 [num_users + 1]."""

    def population_of(self, data: Readable) -> Population:
        """Returns the public counts of data that ``bounded`` returned."""
        counts = self.population(np.asarray(data.user_offsets))
        if not isinstance(data, BoundedStore):
            return counts
        shared = data.shared
        return dataclasses.replace(
            counts, num_users=shared.num_users, num_examples=shared.num_examples, shared=True
        )

    def declared_population(
        self, num_users: int, num_examples: int, limited: Mapping[int, int]
    ) -> Population:
        """Returns the public counts of a data set that is not at hand, from declared numbers.

        Args:
          num_users: number of users.
          num_examples: number of their examples.
          limited: for each group size, the number of examples if each user keeps at most so many.

        Raises:
          BadInputError: a number that this participation needs is missing.
        """
        del limited
        return Population(num_users, num_examples, num_examples)

    def unit_bounds(self, population: Population) -> tuple[int, int]:
        """Returns the least and the largest number of units that these counts allow."""
        return 1, population.num_examples

    def check_population(self, population: Population) -> None:
        """Raises BadInputError unless these counts can belong to one data set."""
        numbers = dataclasses.asdict(population)
        examples = whole_number(numbers, "num_examples", 1)
        # There may be fewer records than owners if records have several.
        users = whole_number(numbers, "num_users", 1, None if population.shared else examples)
        units = whole_number(numbers, "num_units", 1)
        least, most = self.unit_bounds(population)
        if not least <= units <= most:
            raise BadInputError(
                f"num_units is {units}, but {users} users with {examples} examples have from "
                f"{least} to {most} that may be drawn: give the numbers of one data set (declared "
                "ones: section population)"
            )

    # ---- a draw ----------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def divisor(self) -> float:
        """The constant that the noised sum is divided by: the expected, never the actual size."""

    @property
    def unit_examples(self) -> int | None:
        """The largest number of examples of a unit in a step; None if a unit is one example."""
        return None

    @abc.abstractmethod
    def scheme_of(self, population: Population) -> SamplingScheme:
        """Returns the sampling scheme with its rate; BadInputError if there are too few units."""

    @property
    def contribution(self) -> Contribution | None:
        """What one privacy unit contributes to a draw; None: privacy units are what is drawn."""
        return None

    @abc.abstractmethod
    def sampler(self, user_offsets: np.ndarray, key: RootKey) -> Any:
        """Returns the sampler of a run: an ``ExampleSampler`` or a ``UserSampler``."""

    def unit_counts(self, user_offsets: np.ndarray) -> np.ndarray:
        """Returns the number of units of each user that a draw can hold, int64 [users].

        Individual budgets need it.

        Raises:
          BadInputError: a user has several units, and their number is not known.
        """
        if self.contribution is not None:
            raise BadInputError(
                f"mechanism.participation is {self.kind}, which cannot have individual budgets: "
                "set it to users or examples, or leave out mechanism.budget"
            )
        return np.ones(len(user_offsets) - 1, np.int64)

    @abc.abstractmethod
    def describe(self, population: Population, more: str = "") -> str:
        """Returns the sampling in words, for the guarantee, without the number of steps.

        Args:
          population: the counts of what is sampled from.
          more: added to what is said of the examples of a unit.
        """

    # ---- a unit ----------------------------------------------------------------------------

    # Whether a unit's loss is the mean of its examples' losses (``mean_of_examples``).
    averages_examples: ClassVar[bool] = False

    def unit_loss(self, loss_fn: LossFn) -> LossFn:
        """Returns the loss of one unit, made from the loss of one example."""
        return loss_fn

    def units(self, examples: PyTree, example_mask: Any) -> PyTree:
        """Returns the examples of some units in the form that ``unit_loss`` takes.

        Args:
          examples: pytree of arrays [..., (group_size,) ...], zero where there is no example.
          example_mask: bool [..., group_size], or None if a unit is one example.

        Returns:
          A pytree of arrays with the same leading axes.
        """
        del example_mask
        return examples

    def microbatched(
        self, loss_fn: LossFn, size: int, sharding: jax.sharding.NamedSharding | None
    ) -> tuple[LossFn, Callable[[PyTree], PyTree]]:
        """Returns the loss of a microbatch of a unit, and a function that cuts a unit into these.

        Args:
          loss_fn: loss of one example.
          size: examples of a microbatch.
          sharding: how these are split over devices; None: not split.

        Raises:
          BadInputError: a unit is one example.
        """
        raise BadInputError(
            "a unit of this mechanism is one example, which is processed at once: leave out "
            "execution.examples_at_once and execution.split_users"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examples(Participation):
    """Single examples, of which at most ``group_size`` of a user are used in the whole run.

    Source: Charles et al., "Fine-tuning large language models with user-level differential privacy"
    (2024), Algorithm 1. Departures: batch size and sampling probability may be declared as
    constants; by default the number of examples kept is taken as public.

    Attributes:
      batch_size: expected number of examples per step, B, which is the divisor.
      group_size: most examples of one user in the whole run, on which privacy depends; None: all
        examples, without any guarantee.
      scheme: how examples are drawn.

    Examples:
      >>> from dpfl_jax.mechanisms import Examples
      >>> Examples(batch_size=64, group_size=2).group_size
      2
    """

    batch_size: float
    group_size: int | None = None
    scheme: Annotated[SamplingScheme, SCHEMES] = Poisson()

    kind: ClassVar[str] = "examples"
    several_owners: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("mechanism.batch_size", self.batch_size)
        if self.group_size is not None:
            check_group_size(self.group_size)

    @property
    def divisor(self) -> float:
        # proof: els-divisor-1
        return float(self.batch_size)

    def population(self, user_offsets: np.ndarray) -> Population:
        examples = int(user_offsets[-1] - user_offsets[0])
        if self.group_size is None:
            return Population(len(user_offsets) - 1, examples, examples)
        units = limited_size(user_offsets, self.group_size)
        return Population(len(user_offsets) - 1, examples, units)

    def bounded(self, data: Readable) -> Readable:
        """Returns data in which no user owns more than ``group_size`` examples that have co-owners.

        Examples with one owner are limited later, by ``sampler``.
        """
        shared = shared_store(data)
        if self.group_size is None:
            return grouped_by_owner_set(data)
        # proof: els-owners-1
        return data if shared is None else shared.bounded(self.group_size)

    def declared_population(
        self, num_users: int, num_examples: int, limited: Mapping[int, int]
    ) -> Population:
        if self.group_size is None:
            return Population(num_users, num_examples, num_examples)
        if self.group_size not in limited:
            raise BadInputError(
                f"population.limited_examples has no number for {self.group_size}: ELS needs the "
                f"number of examples left with at most {self.group_size} per user"
            )
        return Population(num_users, num_examples, limited[self.group_size])

    def unit_bounds(self, population: Population) -> tuple[int, int]:
        if self.group_size is None:
            return super().unit_bounds(population)
        return 1, min(population.num_examples, self.group_size * population.num_users)

    def scheme_of(self, population: Population) -> SamplingScheme:
        # proof: els-sampling-2
        return self.scheme.of_size(self.batch_size, population.num_units, "mechanism.batch_size")

    def sampler(self, user_offsets: np.ndarray, key: RootKey) -> ExampleSampler:
        """Returns a sampler that limits contributions once, from the key, and then draws."""
        scheme = self.scheme_of(self.population(user_offsets))
        if self.group_size is None:
            every = np.arange(user_offsets[0], user_offsets[-1], dtype=np.int64)
            return ExampleSampler(scheme, every, key)
        # proof: els-sampling-1
        positions = limit_contributions(
            key.numpy("contribution-limit"), user_offsets, self.group_size
        )
        return ExampleSampler(scheme, positions, key)

    @property
    def contribution(self) -> Contribution | None:
        """At most ``group_size`` examples of a user in a draw (Charles et al. 2024, Theorem 1)."""
        return None if self.group_size is None else SeveralUnits(self.group_size)

    def unit_counts(self, user_offsets: np.ndarray) -> np.ndarray:
        held = np.diff(user_offsets).astype(np.int64)
        return held if self.group_size is None else np.minimum(held, self.group_size)

    def describe(self, population: Population, more: str = "") -> str:
        if self.group_size is None:
            counted = f"{population.num_examples} examples"
            return self.scheme_of(population).describe(counted, "example")
        how = "greedily, by who owns what" if population.shared else "uniformly without replacement"
        drawn = self.scheme_of(population).describe(f"the {population.num_units} kept", "example")
        kept = f"at most {self.group_size} examples of a user kept for the whole run ({how})"
        return f"{kept}, then {drawn}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SeveralExamples(Participation, abc.ABC, kinds=PARTICIPATIONS):
    """Participations whose units have several examples, some of which are drawn at each step.

    Attributes:
      group_size: most examples of a unit per step (privacy does not depend on it).
      cohort_size: expected number of units per step, M, which is the divisor.
      scheme: how units are drawn.
    """

    group_size: int
    cohort_size: float
    scheme: Annotated[SamplingScheme, SCHEMES] = Poisson()

    averages_examples: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group_size(self.group_size)
        require_positive("mechanism.cohort_size", self.cohort_size)

    @property
    def divisor(self) -> float:
        # proof: uls-divisor-1
        return float(self.cohort_size)

    def scheme_of(self, population: Population) -> SamplingScheme:
        # proof: uls-sampling-1
        return self.scheme.of_size(self.cohort_size, population.num_units, "mechanism.cohort_size")

    @property
    def unit_examples(self) -> int:
        return self.group_size

    def sampler(self, user_offsets: np.ndarray, key: RootKey) -> UserSampler:
        """Returns a sampler that draws units, and examples within each, afresh at each step."""
        scheme = self.scheme_of(self.population(user_offsets))
        return UserSampler(scheme, np.asarray(user_offsets), self.group_size, key)

    def population(self, user_offsets: np.ndarray) -> Population:
        users = len(user_offsets) - 1
        return Population(users, int(user_offsets[-1] - user_offsets[0]), users)

    def unit_loss(self, loss_fn: LossFn) -> LossFn:
        """Returns the mean of the losses of the unit's examples."""
        # proof: uls-sensitivity-1
        return mean_of_examples(loss_fn)

    def units(self, examples: PyTree, example_mask: Any) -> PyTree:
        """Returns ``{"examples": [..., group_size, ...], "mask": bool [..., group_size]}``."""
        return {"examples": examples, "mask": example_mask}

    def microbatched(
        self, loss_fn: LossFn, size: int, sharding: jax.sharding.NamedSharding | None
    ) -> tuple[LossFn, Callable[[PyTree], PyTree]]:
        # A microbatch is a unit with fewer examples, and the count of all of the unit's.
        axis = None if sharding is None else sharding.spec[0]
        cut = functools.partial(pieces_of_unit, microbatch_size=size, sharding=sharding)
        return mean_of_examples(loss_fn, axis), cut

    def _examples(self, more: str) -> str:
        size = self.group_size
        return ("one example" if size == 1 else f"up to {size} examples") + more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Users(_SeveralExamples):
    """Users, each of whom contributes the mean gradient of some of their examples.

    Source: Charles et al. 2024, Algorithm 2 and Theorem 2. Departures: M and the sampling
    probability may be declared as constants; by default the number of users is taken as public.

    Examples:
      >>> from dpfl_jax.mechanisms import Users
      >>> from dpfl_jax.sampling import RandomAllocation
      >>> Users(group_size=4, cohort_size=64, scheme=RandomAllocation(period=16)).cohort_size
      64.0
    """

    kind: ClassVar[str] = "users"

    def declared_population(
        self, num_users: int, num_examples: int, limited: Mapping[int, int]
    ) -> Population:
        return Population(num_users, num_examples, num_users)

    def unit_bounds(self, population: Population) -> tuple[int, int]:
        return population.num_users, population.num_users

    def describe(self, population: Population, more: str = "") -> str:
        taken = self._examples(more)
        return self.scheme_of(population).describe(f"{population.num_users} users", "user", taken)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnerSets(_SeveralExamples):
    """Sets of co-owners, for records that have several owners.

    Source: bounding as in Ganesh et al. 2025 (arXiv 2503.03622).

    The units are sets of owners, each with all records that exactly these people own together: a
    conversation, or the papers of some co-authors. Emptying all records of one user changes at most
    L = sets_per_user sets. So the accounting is that of ELS with group size L, with sets in the
    place of examples.

    Attributes:
      sets_per_user: most sets of one user that are used in the whole run, L.

    Examples:
      >>> from dpfl_jax.mechanisms import OwnerSets
      >>> OwnerSets(group_size=4, cohort_size=32, sets_per_user=3).sets_per_user
      3
    """

    sets_per_user: int

    kind: ClassVar[str] = "owner_sets"
    several_owners: ClassVar[bool] = True
    owners_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("sets_per_user", self.sets_per_user, 1)

    def bounded(self, data: Readable) -> Readable:
        """Returns data in which no user is in more than ``sets_per_user`` of the owner sets."""
        shared = shared_store(data)
        if shared is None:
            raise BadInputError(
                "mechanism.kind=owner_sets is for records with several owners, but every record of "
                "the data has one: use mechanism.kind=uls, or give owners as lists"
            )
        # proof: owner-sets-1
        return shared.bounded(self.sets_per_user, whole=True)

    def declared_population(
        self, num_users: int, num_examples: int, limited: Mapping[int, int]
    ) -> Population:
        # How many sets are kept depends on who owns what, not on counts.
        raise BadInputError(
            "mechanism.kind=owner_sets needs the data themselves: leave out the section population"
        )

    def unit_bounds(self, population: Population) -> tuple[int, int]:
        return 1, min(population.num_examples, self.sets_per_user * population.num_users)

    @property
    def contribution(self) -> SeveralUnits:
        """At most ``sets_per_user`` sets of a user, each of which moves the sum by at most C."""
        return SeveralUnits(self.sets_per_user)

    def describe(self, population: Population, more: str = "") -> str:
        drawn = self.scheme_of(population).describe(f"the {population.num_units} kept", "set")
        return (
            f"at most {self.sets_per_user} sets of owners of each user kept for the whole run "
            f"(greedily, by who owns what), then {drawn}, {self._examples(more)} of a set per step"
        )


# ---- the loss of a unit --------------------------------------------------------------------------


def mean_of_examples(loss_fn: LossFn, axis: str | None = None) -> LossFn:
    """Returns the loss of one unit: the mean of ``loss_fn`` over the unit's examples.

    The unit is ``{"examples": pytree [group_size, ...], "mask": bool [group_size]}``. The divisor
    is the number of the unit's examples, as in Algorithm 2 of Charles et al. 2024; a unit without
    examples has loss 0. A unit with a further entry ``"count"`` is a piece of a unit (see
    ``pieces_of_unit``): its loss is the sum over the piece, divided by the count of the whole unit.

    Args:
      loss_fn: loss of one example.
      axis: mesh axis over which the examples are split; None: not split.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.mechanisms import mean_of_examples
      >>> loss = mean_of_examples(lambda w, example: w * example["x"])
      >>> examples = {"x": jnp.array([1.0, 3.0, 9.0])}
      >>> user = {"examples": examples, "mask": jnp.array([True, True, False])}
      >>> float(loss(1.0, user))
      2.0
    """

    def unit_loss(params: PyTree, unit: PyTree, **kwargs: Any) -> jax.Array:
        every = jax.vmap(lambda example: loss_fn(params, example, **kwargs), spmd_axis_name=axis)
        mask = unit["mask"]
        if "count" in unit:
            losses, count = every(unit["examples"]), unit["count"]
        else:
            losses, count = every(_without_absent(unit)), jnp.sum(mask)
        # proof: uls-sensitivity-2
        return jnp.sum(jnp.where(mask, losses, 0.0)) / jnp.maximum(count, 1).astype(losses.dtype)

    return unit_loss


def _without_absent(unit: PyTree) -> PyTree:
    """A unit's examples, with padding replaced by one of the unit's real examples.

    Padding is zeros, at which a loss may not be differentiable (a norm, say): then its gradient
    would be NaN even with weight 0.
    """
    mask = unit["mask"]
    some = jnp.argmax(mask)

    def one(x: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, x[some])

    return jax.tree.map(one, unit["examples"])


def pieces_of_unit(
    unit: PyTree, microbatch_size: int, sharding: jax.sharding.NamedSharding | None = None
) -> PyTree:
    """Cuts a unit into pieces whose losses (``mean_of_examples``) add up to the unit's loss.

    Args:
      unit: ``{"examples": pytree [group_size, ...], "mask": bool [group_size]}``.
      microbatch_size: examples of a piece, >= 1; the last piece is padded.
      sharding: how the examples of a piece are split over devices; None: not split.

    Returns:
      Units of ``microbatch_size`` examples with a ``"count"``, stacked: a pytree of arrays
      [pieces, ...].
    """
    size = unit["mask"].shape[0]
    pieces = -(-size // microbatch_size)
    missing = pieces * microbatch_size - size

    def cut(x: jax.Array) -> jax.Array:
        x = x.reshape(pieces, microbatch_size, *x.shape[1:])
        if sharding is None:
            return x
        spec = jax.sharding.PartitionSpec(None, *sharding.spec)
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(sharding.mesh, spec))

    def filled(x: jax.Array) -> jax.Array:
        return jnp.take(x, jnp.arange(size + missing) % size, axis=0) if missing else x

    return {
        "examples": jax.tree.map(lambda x: cut(filled(x)), _without_absent(unit)),
        "mask": cut(jnp.pad(unit["mask"], (0, missing))),
        "count": jnp.broadcast_to(jnp.sum(unit["mask"]), (pieces,)),
    }


for _scheme in (Poisson, CyclicPoisson, Cyclic, RandomAllocation, TruncatedPoisson):
    SCHEMES.register(_scheme)

SHARED_KINDS = "use mechanism.kind=els or owner_sets, which bound what each owner has part in"
