"""What every mechanism is: one frozen object that samples, bounds, adds noise and accounts.

Because all four come from the same fields, what is accounted cannot differ from what runs.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpfl_jax import accounting
from dpfl_jax.accounting import cells
from dpfl_jax.accounting.statement import whole
from dpfl_jax.clipping import Flat, Normalized, PerLayer, Rule, clipped_grad
from dpfl_jax.config.kinds import CENTRAL, Named
from dpfl_jax.data.owners import BoundedStore, by_set, whole_of
from dpfl_jax.data.store import Readable
from dpfl_jax.errors import BadInputError
from dpfl_jax.noise import MOST_NOISE, Noise, transformation
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Sampler
from dpfl_jax.sampling.schemes import AtRate

if TYPE_CHECKING:
    from dpfl_jax.mechanisms.plan import Plan

PyTree = Any
LossFn = Callable[..., jax.Array]
Self = TypeVar("Self", bound="Mechanism")


@dataclasses.dataclass(frozen=True)
class Population:
    """What a mechanism must know of a data set to sample and to account: public facts.

    Attributes:
      num_users: users in the training set.
      num_examples: examples in the training set, before any limit.
      num_units: units that may be drawn (ELS: examples of the limited set; ULS: users).
      shared: whether examples have several owners.
    """

    num_users: int
    num_examples: int
    num_units: int
    shared: bool = False

    def to_json(self) -> dict[str, Any]:
        """As JSON; that owners are one each is not said."""
        return {n: v for n, v in dataclasses.asdict(self).items() if n != "shared" or v}

    @property
    def told(self) -> str:
        """The numbers in words."""
        words = f"{self.num_users:,} users, {self.num_examples:,} examples"
        if self.num_units in (self.num_users, self.num_examples):
            return words
        return f"{words}, {self.num_units:,} units that may be drawn"

    def default_delta(self) -> float:
        """num_examples ** -1.1 (Charles et al. 2024, section 5)."""
        return float(self.num_examples) ** -1.1


def require_positive(name: str, value: float) -> None:
    """Raises BadInputError unless it is above 0, and float32 holds it with room for sums."""
    if not 0 < value <= 1e30:
        raise BadInputError(f"{name} is {value}, but it must be a number above 0, at most 1e30")


def check_noise_law(law: str) -> None:
    """Raises BadInputError unless there is such noise."""
    if law not in ("exact", "float"):
        raise BadInputError(f"noise is {law!r}, but it must be 'exact' or 'float'")


def check_noise_multiplier(value: float | None) -> None:
    """Raises BadInputError unless it is None (not calibrated yet), or from 0 to a million."""
    if value is not None and not 0 <= value < math.inf:
        raise BadInputError(f"noise_multiplier is {value}, but it must be finite and >= 0")
    if value is not None and value > MOST_NOISE:
        raise BadInputError(
            f"noise_multiplier is {value}, but it must be at most {MOST_NOISE:g}: ask for a larger "
            "epsilon, or take larger batches"
        )


_RULES: dict[str, Callable[[float], Rule]] = {
    "standard": Flat,
    "normalized": Normalized,
    "per_layer": PerLayer,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism(Named, abc.ABC, kinds=CENTRAL):
    """A private (or, for baselines, non-private) way to estimate a gradient.

    Attributes:
      clip_norm: C, the largest norm of one unit's gradient.
      clipping: ``"standard"`` (min(1, C/n) times the gradient; contribution at most C),
        ``"normalized"`` (min(1/C, 1/n); at most 1, so that the learning rate does not scale with
        C; De et al. 2022), or ``"per_layer"`` (each parameter's gradient apart, to C over the root
        of their number; McMahan et al. 2018: faster where gradients are formed for their norms,
        and more of the gradient is lost for the same noise).
      noise_multiplier: sigma; the noise on the sum has stddev sigma times the largest
        contribution. None until calibrated.
      noise: ``"exact"`` (drawn and added in integers: low bits tell nothing of the sum), or
        ``"float"`` (float32, as elsewhere; the guarantee says what that leaves open).
      unit: whom it protects.
    """

    clip_norm: float = 1.0
    clipping: Literal["standard", "normalized", "per_layer"] = "standard"
    noise_multiplier: float | None = None
    noise: accounting.NoiseLaw = "exact"

    unit: ClassVar[str] = "user"
    private: ClassVar[bool] = True
    several_owners: ClassVar[bool] = False  # whether it protects all of an example
    own_budgets: ClassVar[bool] = False  # whether users leave when budgets of their own are spent

    def __post_init__(self) -> None:
        """Validates what all mechanisms share."""
        super().__post_init__()
        require_positive("clip_norm", self.clip_norm)
        if self.clipping not in _RULES:
            raise BadInputError(
                f"clipping is {self.clipping!r}, but it must be one of {', '.join(_RULES)}"
            )
        check_noise_multiplier(self.noise_multiplier)
        check_noise_law(self.noise)

    # ---- what runs -------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def divisor(self) -> float:
        """The constant the noised sum is divided by: the expected size, never the realised one."""

    @abc.abstractmethod
    def population(self, user_offsets: np.ndarray) -> Population:
        """Counts what this mechanism samples from. user_offsets: int64 [num_users + 1]."""

    def bounded(self, data: Readable) -> Readable:
        """What may be used of the data; all, unless examples have several owners.

        Raises:
          BadInputError: they have, and this mechanism would take a set of owners for a user.
        """
        if self.private and whole_of(data) is not None:
            raise BadInputError(
                "some records of the data have several owners, which mechanism.kind="
                f"{self.kind} would take for one user: {SHARED_KINDS}, or name one owner of each"
            )
        return by_set(data)

    def count(self, data: Readable) -> Population:
        """The public numbers of data that ``bounded`` gave."""
        found = self.population(np.asarray(data.user_offsets))
        if not isinstance(data, BoundedStore):
            return found
        whole = data.shared
        return dataclasses.replace(
            found, num_users=whole.num_users, num_examples=whole.num_examples, shared=True
        )

    def _check_owners(self, population: Population) -> None:
        """Raises BadInputError if examples have several owners and this would not protect all."""
        if population.shared and self.private and not self.several_owners:
            raise BadInputError(
                "the population has examples with several owners, of whom mechanism.kind="
                f"{self.kind} protects none: {SHARED_KINDS}"
            )

    def declared_population(
        self, num_users: int, num_examples: int, limited: Mapping[int, int]
    ) -> Population:
        """The same of a data set that is not here.

        Args:
          num_users: how many there are.
          num_examples: their examples.
          limited: by group size, examples left with at most so many of a user.

        Raises:
          BadInputError: a number that this mechanism needs is missing.
        """
        del limited
        return Population(num_users, num_examples, num_examples)

    def unit_bounds(self, population: Population) -> tuple[int, int]:
        """The fewest and the most units that so many users with so many examples can have."""
        return 1, population.num_examples

    def check_population(self, population: Population) -> None:
        """Raises BadInputError unless there can be data with these numbers."""
        numbers = dataclasses.asdict(population)
        examples = whole(numbers, "num_examples", 1)
        # Records with several owners may be fewer than these.
        users = whole(numbers, "num_users", 1, None if population.shared else examples)
        units = whole(numbers, "num_units", 1)
        least, most = self.unit_bounds(population)
        if not least <= units <= most:
            raise BadInputError(
                f"num_units is {units}, but {users} users with {examples} examples have from "
                f"{least} to {most} that mechanism.kind={self.kind} may draw: give the numbers of "
                "one data set (declared ones: section population)"
            )

    @classmethod
    def at_budget(cls: type[Self], compute_budget: float, group_size: int, **common: Any) -> Self:
        """The mechanism that evaluates so many gradients a step, in expectation.

        Args:
          compute_budget: gradient evaluations.
          group_size: for mechanisms that have one.
          **common: fields that all mechanisms have.
        """
        raise NotImplementedError(f"{cls.__name__} does not say what it does at a compute budget")

    @property
    def unit_examples(self) -> int | None:
        """Most examples of a unit in a step; None if a unit is one example."""
        return None

    @property
    def compute_budget(self) -> float:
        """Expected gradient evaluations of a step."""
        return self.divisor * (self.unit_examples or 1)

    @abc.abstractmethod
    def sampling_probability(self, population: Population) -> float:
        """Probability with which one unit is drawn at each step; raises BadInputError over 1."""

    @abc.abstractmethod
    def scheme(self, population: Population) -> AtRate:
        """Which units are drawn at each step; raises BadInputError if there are too few."""

    @abc.abstractmethod
    def sampler(self, user_offsets: np.ndarray, key: RootKey) -> Sampler:
        """Returns the sampler of a run."""

    def unit_loss(self, loss_fn: LossFn) -> LossFn:
        """Turns the loss of one example into the loss of one unit."""
        return loss_fn

    def units(self, examples: PyTree, example_mask: Any) -> PyTree:
        """Turns the examples of some units into what ``unit_loss`` takes.

        Args:
          examples: pytree of arrays [..., (group_size,) ...], zero where there is no example.
          example_mask: bool [..., group_size], or None if a unit is one example.

        Returns:
          A pytree of arrays with the same leading axes.
        """
        del example_mask
        return examples

    @property
    def rule(self) -> Rule:
        """The clip rule; it carries the sensitivity that the noise is scaled to."""
        return _RULES[self.clipping](self.clip_norm)

    def in_pieces(
        self, loss_fn: LossFn, at_once: int, sharding: jax.sharding.NamedSharding | None
    ) -> tuple[LossFn, Callable[[PyTree], PyTree]]:
        """Returns the loss of a piece of a unit, and what cuts a unit into pieces.

        Args:
          loss_fn: of one example.
          at_once: examples of a piece.
          sharding: how these are split over devices; None: not.

        Raises:
          BadInputError: a unit of this mechanism is one example.
        """
        raise BadInputError(
            f"a unit of {self.kind} is one example, which is processed at once: leave out "
            "execution.examples_at_once and execution.split_users"
        )

    def clipped_grad(
        self,
        loss_fn: LossFn,
        *,
        examples_at_once: int | None = None,
        example_sharding: jax.sharding.NamedSharding | None = None,
        **options: Any,
    ) -> Any:
        """Returns the function that sums this mechanism's bounded unit gradients.

        Args:
          loss_fn: ``(params, example) -> scalar`` for one example.
          examples_at_once: examples of a unit processed at once; the gradients of the rest are
            accumulated before the norm is taken. None: all.
          example_sharding: how these examples are split over devices; None: not.
          **options: passed to ``clipping.clipped_grad`` (``strategy``, ...).
        """
        unit_loss = self.unit_loss(loss_fn)
        if examples_at_once is not None:
            if examples_at_once < 1:
                raise BadInputError(
                    f"examples_at_once is {examples_at_once}, but it must be at least 1"
                )
            unit_loss, options["pieces"] = self.in_pieces(
                loss_fn, examples_at_once, example_sharding
            )
        return clipped_grad(unit_loss, rule=self.rule, **options)

    @property
    def sigma(self) -> float:
        """The noise multiplier; raises BadInputError before calibration."""
        if self.noise_multiplier is None:
            raise BadInputError(
                f"this {self.kind} mechanism has no noise multiplier: set noise_multiplier, or "
                "call calibrate() with a target epsilon and delta"
            )
        return self.noise_multiplier

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of the noise on the bounded sum."""
        # proof: noise-1
        return self.sigma * self.rule.sensitivity

    def noise_transform(self) -> optax.GradientTransformationExtraArgs:
        """Adds the noise of a step to the sum, and divides by the expected size."""
        noise = Noise(self.noise_stddev, self.rule.sensitivity, self.noise)
        return transformation(noise, self.divisor)

    def plan(self, data: Any, *, steps: int, **options: Any) -> Plan:
        """Calibrates the mechanism for a data set.

        Args:
          data: a store: ``user_offsets`` and ``read(positions)``.
          steps: number of steps T.
          **options: ``epsilon`` (the target, unless the mechanism has a noise multiplier),
            ``delta`` (default: number of examples ** -1.1), ``execution`` (``config.Execution``:
            how steps are computed), ``mesh`` (default: that of the execution over all devices),
            ``optimizer`` (that will train: if it is SGD, noise that is correlated between steps is
            made for its schedule and momentum; default, and of others, for sums of gradients).

        Raises:
          BadInputError: no target, or one that is out of reach; data without examples.
        """
        from dpfl_jax.mechanisms.plan import Plan  # which is made of mechanisms

        return Plan.make(self, data, steps=steps, **options)

    @property
    def passes(self) -> int:
        """How often a step evaluates the gradient of each example that it has."""
        return 1

    @property
    def takes_local_steps(self) -> bool:
        """Whether users are devices of a federated round, whose updates are clipped."""
        return False

    def is_stateful(self, population: Population) -> bool:
        """Whether noise or sampling of a step depends on earlier steps' draws.

        Then a run cannot go on as another computation, which draws anew.
        """
        return self.scheme(population).is_stateful

    @property
    def noise_keys(self) -> int:
        """Steps whose noise is drawn at a step: its own, and those before it."""
        return 1

    # ---- what is accounted -----------------------------------------------------------------

    @property
    def contribution(self) -> cells.Contribution | None:
        """What one privacy unit has in a draw; None: it is itself what is drawn."""
        return None

    def matrix(self, steps: int) -> cells.StrategyMatrix:
        """That of the noise of ``steps`` steps."""
        del steps
        return cells.INDEPENDENT

    def event(self, population: Population, steps: int) -> Any:
        """The ``dp_accounting.DpEvent`` of ``steps`` steps for one privacy unit."""
        given = (self.scheme(population), self.sigma, steps, population.num_units)
        return cells.NoisedSums(*given, self.matrix(steps), self.contribution).event()

    def calibrate(
        self: Self, population: Population, steps: int, epsilon: float, delta: float
    ) -> Self:
        """Returns a copy whose noise multiplier is the smallest known to meet the target.

        Raises:
          BadInputError: epsilon <= 0, delta outside (0, 1), steps < 1, or out of reach.
        """
        self._check_owners(population)
        chosen = self.for_steps(population, steps)

        def event(sigma: float) -> Any:
            return dataclasses.replace(chosen, noise_multiplier=sigma).event(population, steps)

        sigma = accounting.calibrate_noise_multiplier(event, epsilon, delta)
        return dataclasses.replace(chosen, noise_multiplier=sigma)

    def for_steps(
        self: Self,
        population: Population,
        steps: int,
        optimizer: optax.GradientTransformation | None = None,
    ) -> Self:
        """A copy with all that follows from these: of correlated noise, what it takes back.

        Args:
          population: what is sampled from.
          steps: T.
          optimizer: that will train; see ``noise.workload_of``.
        """
        del population, steps, optimizer
        return self

    def calibrated(
        self: Self,
        population: Population,
        steps: int,
        epsilon: float | None,
        delta: float | None,
        optimizer: optax.GradientTransformation | None = None,
    ) -> tuple[Self, float]:
        """The mechanism with a noise multiplier, its own or the target's; and delta.

        Raises:
          BadInputError: there is neither, or nobody to protect; see ``calibrate``.
        """
        if population.num_units == 0:
            raise BadInputError("the training set has no usable example: check the data section")
        delta = population.default_delta() if delta is None else float(delta)
        accounting.check_delta(delta)
        self.sampling_probability(population)
        if not self.private:
            return self, delta
        if self.noise_multiplier is not None:
            if epsilon is not None:
                raise BadInputError(
                    "both epsilon and the mechanism's noise_multiplier are set: keep one, the "
                    "other follows from it"
                )
            return self.for_steps(population, steps, optimizer), delta
        if epsilon is None:
            raise BadInputError("neither epsilon nor the mechanism's noise_multiplier is set")
        chosen = self.for_steps(population, steps, optimizer)
        return chosen.calibrate(population, steps, float(epsilon), delta), delta

    @abc.abstractmethod
    def told_sampling(self, population: Population) -> str:
        """The sampling that runs, as the guarantee tells it (before the number of steps)."""

    def guarantee(
        self, population: Population, steps: int, delta: float, caveats: tuple[str, ...] = ()
    ) -> accounting.Guarantee:
        """What ``steps`` steps guarantee each user at ``delta``; caveats are added to its own.

        Where records have several owners, it is of all of them.
        """
        self._check_owners(population)
        own = accounting.delta_caveats(delta, population.num_users, "users")
        event, scheme = self.event(population, steps), self.scheme(population)
        cell = cells.cell_of(scheme, self.matrix(steps), self.contribution)
        epsilon = accounting.epsilon(event, delta, accountant=accounting.accountant_of(event))
        told = accounting.Guarantee(
            unit=self.unit,
            adjacency=f"add-or-remove one {self.unit}",
            trust="central",
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=self.sigma,
            steps=steps,
            accountant=cell.accountant,
            sampling=f"{self.told_sampling(population)}, {steps} steps",
            assumptions=(
                *COMMON_ASSUMPTIONS,
                *accounting.noise_assumptions(self.noise, epsilon, delta, steps),
                *(cell.assumptions if scheme.is_stateful else ()),
            ),
            caveats=(*own, *caveats),
        )
        return _for_owners(told) if population.shared else told


SHARED_KINDS = "use mechanism.kind=els or owner_sets, which bound what each owner has part in"
COMMON_ASSUMPTIONS = (
    "every example belongs to exactly one user, and removing a user removes all their examples",
    "the numbers of users, of examples and of examples left by the group size, the group size, the "
    "expected size, the clip norm and the number of steps are public constants, fixed before "
    "looking at one user's data",
    "the root key is secret",
)


# Of records with several owners, instead of the first of these (Ganesh et al. 2025, section 2).
SHARED_ADJACENCY = "empty all records that one user owns or co-owns (fixed graph)"
SHARED_ASSUMPTIONS = (
    "a record belongs to every one of its owners; who owns which, how many records there are, and "
    "how texts are cut into them is public: what is in a record is protected, not that it exists",
    "an emptied record moves no sum, and which records are kept follows from who owns them alone",
)
SHARED_CAVEAT = (
    "who owns a record is public here: who 'took part', in words about attackers, is whose records "
    "had their contents"
)


def _for_owners(guarantee: accounting.Guarantee) -> accounting.Guarantee:
    """A guarantee that was stated for records of one owner, of records with several."""
    assert guarantee.assumptions[0] == COMMON_ASSUMPTIONS[0]
    return dataclasses.replace(
        guarantee,
        adjacency=SHARED_ADJACENCY,
        assumptions=(*SHARED_ASSUMPTIONS, *guarantee.assumptions[1:]),
        caveats=(SHARED_CAVEAT, *guarantee.caveats),
    )


def mean_of_examples(loss_fn: LossFn, axis: str | None = None) -> LossFn:
    """Lifts a loss of one example to the loss of one user: the mean over the examples they have.

    The user is ``{"examples": pytree [group_size, ...], "mask": bool [group_size]}``. The divisor
    is the user's own count, as in Algorithm 2 of Charles et al. 2024; no user without examples.
    A user with a further entry ``"count"`` is a piece of one (see ``pieces_of_user``): its loss is
    the sum over the piece, divided by the count of the whole.

    Args:
      loss_fn: of one example.
      axis: mesh axis over which the examples are split, where they are.
    """

    def user_loss(params: PyTree, user: PyTree, **kwargs: Any) -> jax.Array:
        every = jax.vmap(lambda example: loss_fn(params, example, **kwargs), spmd_axis_name=axis)
        mask = user["mask"]
        if "count" in user:
            losses, count = every(user["examples"]), user["count"]
        else:
            losses, count = every(_without_absent(user)), jnp.sum(mask)
        # proof: uls-sensitivity-2
        return jnp.sum(jnp.where(mask, losses, 0.0)) / jnp.maximum(count, 1).astype(losses.dtype)

    return user_loss


def _without_absent(user: PyTree) -> PyTree:
    """A user's examples, with one that is there in the place of each that is not.

    Where a loss is not differentiable at what fills the gaps (a norm at zeros), even a loss that
    counts nothing would have a gradient of NaN.
    """
    mask = user["mask"]
    some = jnp.argmax(mask)

    def one(x: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, x[some])

    return jax.tree.map(one, user["examples"])


def pieces_of_user(
    user: PyTree, at_once: int, sharding: jax.sharding.NamedSharding | None = None
) -> PyTree:
    """Cuts a user into pieces whose losses (``mean_of_examples``) add up to the user's.

    Args:
      user: ``{"examples": pytree [group_size, ...], "mask": bool [group_size]}``.
      at_once: examples of a piece, >= 1; the last piece is filled up with absent ones.
      sharding: how the examples of a piece are split over devices; None: not.

    Returns:
      Users of ``at_once`` examples with a ``"count"``, stacked: a pytree of arrays [pieces, ...].
    """
    size = user["mask"].shape[0]
    pieces = -(-size // at_once)
    missing = pieces * at_once - size

    def cut(x: jax.Array) -> jax.Array:
        x = x.reshape(pieces, at_once, *x.shape[1:])
        if sharding is None:
            return x
        spec = jax.sharding.PartitionSpec(None, *sharding.spec)
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(sharding.mesh, spec))

    def filled(x: jax.Array) -> jax.Array:
        return jnp.take(x, jnp.arange(size + missing) % size, axis=0) if missing else x

    return {
        "examples": jax.tree.map(lambda x: cut(filled(x)), _without_absent(user)),
        "mask": cut(jnp.pad(user["mask"], (0, missing))),
        "count": jnp.broadcast_to(jnp.sum(user["mask"]), (pieces,)),
    }
