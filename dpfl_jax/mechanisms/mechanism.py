"""A mechanism: one value of which follow what is sampled, clipped, noised and accounted.

    Mechanism(
        participation=Users(group_size=4, cohort_size=512, scheme=CyclicPoisson(period=8)),
        clip=Flat(1.0),
        noise=Banded(bands=8),
    )

Because all four come from the same parts, what is accounted cannot differ from what runs. What a
participation with a noise strategy costs is looked up in the table of proven cells
(``accounting.cells``); a combination that is not in it is refused. ``presets`` has the mechanisms
that have names.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpfl_jax import accounting
from dpfl_jax.accounting import cells
from dpfl_jax.accounting.accountant import Accountant
from dpfl_jax.accounting.renyi_filter import RenyiFilter
from dpfl_jax.clipping import (
    Adaptive,
    Automatic,
    Flat,
    NoClip,
    Normalized,
    PerGroup,
    PerLayer,
    Rule,
)
from dpfl_jax.clipping.adaptive import CountedSum, adapting_noise, clipped_and_counted
from dpfl_jax.clipping.result import ClippedGradResult
from dpfl_jax.config.kinds import BUDGETS, CENTRAL, CLIPS, GIVES, NOISES, PARTICIPATIONS, Kinds
from dpfl_jax.config.kinds import check_types as check_field_types
from dpfl_jax.data.store import Readable
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import own_budget
from dpfl_jax.mechanisms.local_steps import Gives, Gradient, LocalUpdate
from dpfl_jax.mechanisms.noise_strategies import Independent, NoiseStrategy
from dpfl_jax.mechanisms.own_budget import OwnBudget
from dpfl_jax.mechanisms.participation import SHARED_KINDS, Examples, Participation, Population
from dpfl_jax.mechanisms.unclipped import unclipped_sum
from dpfl_jax.mechanisms.unit_losses import LossFn, PyTree
from dpfl_jax.noise import MOST_NOISE, workload_of
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Sampler
from dpfl_jax.sampling.schemes import AtRate

if TYPE_CHECKING:
    from dpfl_jax.mechanisms.plan import Plan

for _rule in (NoClip, Flat, Normalized, Automatic, PerLayer, PerGroup, Adaptive):
    CLIPS.register(_rule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A private (or, for baselines, non-private) way to estimate a gradient.

    Attributes:
      participation: which units contribute to which step.
      clip: bounds what a unit contributes; it carries the sensitivity that noise is scaled to.
      noise: how noise is correlated over steps.
      gives: what is clipped of a unit, its gradient or a local update.
      budget: of each user's own; None: all take part in all steps.
      noise_multiplier: sigma; the noise on the sum has stddev sigma times the largest contribution.
        None until calibrated.
    """

    participation: Annotated[Participation, PARTICIPATIONS]
    clip: Annotated[Rule | Adaptive, CLIPS] = Flat(1.0)
    noise: Annotated[NoiseStrategy, NOISES] = Independent()
    gives: Annotated[Gives, GIVES] = Gradient()
    budget: Annotated[OwnBudget, BUDGETS] | None = None
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        """Checks that the parts go together.

        Raises:
          BadInputError: they do not.
        """
        check_field_types(self)
        check_noise_multiplier(self.noise_multiplier)
        if isinstance(self.gives, LocalUpdate) and isinstance(self.clip, NoClip):
            raise BadInputError(
                "mechanism.clip is none, but updates of local steps are clipped: take another rule"
            )
        if not self.private:
            return
        check_bounded(self.clip)
        if isinstance(self.participation, Examples) and self.participation.group_size is None:
            raise BadInputError(
                "mechanism.group_size is missing: without a bound on the examples of a user, "
                "nothing can be guaranteed"
            )
        self.noise.check_sensitivity(self.clip.sensitivity)
        if isinstance(self.clip, Adaptive) and self.noise.is_correlated:
            raise BadInputError(
                "mechanism.clip is adaptive, which is proven for independent noise alone: take it, "
                "or another clip rule"
            )
        if isinstance(self.gives, LocalUpdate) and self.unit_examples is None:
            raise BadInputError(
                "local steps (mechanism.gives) are of users with several examples: take a "
                "participation of users"
            )
        if self.budget is not None:
            self.budget.check(self.clip, self.noise_multiplier)
            if self.noise.is_correlated:
                raise BadInputError(
                    "budgets of users' own are proven for independent noise alone: take it, or "
                    "leave out mechanism.budget"
                )

    # ---- as a section of a configuration ---------------------------------------------------

    @functools.cached_property
    def _section(self) -> dict[str, Any]:
        from dpfl_jax.mechanisms.presets import as_preset  # which makes mechanisms

        preset = as_preset(self)
        if preset is not None:
            return preset
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: Kinds.dump(value) for name, value in fields.items()}

    def to_section(self) -> dict[str, Any]:
        """What describes it in a configuration: a preset with its options, or the parts."""
        return dict(self._section)

    to_json = to_section

    @property
    def kind(self) -> str:
        """The name of the preset that it is; "custom" of other combinations."""
        return str(self._section.get("kind", "custom"))

    # ---- what runs -------------------------------------------------------------------------

    @property
    def bounds(self) -> dict[str, Any]:
        """What bounds a unit's contribution: public constants, by name."""
        found: dict[str, Any] = {"clip_norm": self.clip.threshold}
        for name in ("group_size", "sets_per_user"):
            found[name] = getattr(self.participation, name, None)
        return found

    @property
    def private(self) -> bool:
        """Whether it guarantees anything."""
        return self.noise.is_private

    @property
    def unit(self) -> str:
        """Whom it protects."""
        return "user" if self.private else "none"

    @property
    def divisor(self) -> float:
        """The constant the noised sum is divided by: the expected size, never the realised one."""
        return self.participation.divisor

    @property
    def clip_norm(self) -> float:
        """C, above which gradients are clipped; 1 of rules that have no such norm."""
        return 1.0 if self.clip.threshold is None else float(self.clip.threshold)

    @property
    def unit_examples(self) -> int | None:
        """Most examples of a unit in a step; None if a unit is one example."""
        return self.participation.unit_examples

    @property
    def group_size(self) -> int:
        """Most examples of a user, where that is bounded; else 1."""
        return getattr(self.participation, "group_size", None) or 1

    @property
    def compute_budget(self) -> float:
        """Expected gradient evaluations of a step."""
        return self.divisor * (self.unit_examples or 1)

    @property
    def passes(self) -> int:
        """How often a step evaluates the gradient of each example that it has."""
        return self.gives.passes

    @property
    def takes_local_steps(self) -> bool:
        """Whether users are devices of a federated round, whose updates are clipped."""
        return isinstance(self.gives, LocalUpdate)

    @property
    def own_budgets(self) -> bool:
        """Whether users leave when budgets of their own are spent."""
        return self.budget is not None

    def population(self, user_offsets: np.ndarray) -> Population:
        """Counts what this mechanism samples from. user_offsets: int64 [num_users + 1]."""
        return self.participation.population(user_offsets)

    def bounded(self, data: Readable) -> Readable:
        """What may be used of the data; see ``Participation.bounded``."""
        # With budgets of their own a record of several owners would leave with the first of them:
        # such data are refused, even by participations that bound what each owner has part in.
        if self.budget is not None:
            return Participation.bounded(self.participation, data)
        return self.participation.bounded(data)

    def count(self, data: Readable) -> Population:
        """The public numbers of data that ``bounded`` gave."""
        return self.participation.count(data)

    def declared_population(
        self, num_users: int, num_examples: int, limited: Mapping[int, int]
    ) -> Population:
        """The same of a data set that is not here; see ``Participation.declared_population``."""
        return self.participation.declared_population(num_users, num_examples, limited)

    def check_population(self, population: Population) -> None:
        """Raises BadInputError unless there can be data with these numbers."""
        self.participation.check_population(population)

    def _check_owners(self, population: Population) -> None:
        protects = self.participation.several_owners and self.budget is None
        if population.shared and self.private and not protects:
            raise BadInputError(
                "the population has examples with several owners, of whom mechanism.kind="
                f"{self.kind} protects none: {SHARED_KINDS}"
            )

    def scheme(self, population: Population) -> AtRate:
        """Which units are drawn at each step; raises BadInputError if there are too few."""
        return self.participation.scheme_of(population)

    def at_rates_of(self, population: Population) -> Mechanism:
        """A copy that draws each unit as here, from whatever population."""
        fixed: Any = self.participation
        if hasattr(fixed, "scheme"):
            fixed = dataclasses.replace(fixed, scheme=self.scheme(population))
        return dataclasses.replace(self, participation=fixed)

    def sampling_probability(self, population: Population) -> float:
        """Probability with which one unit is drawn at a step at which it may be."""
        return self.scheme(population).sampling_prob

    def sampler(self, user_offsets: np.ndarray, key: RootKey) -> Sampler:
        """Returns the sampler of a run."""
        made = self.participation.sampler(user_offsets, key)
        return made if self.budget is None else self.budget.sampler(made)

    def units(self, examples: PyTree, example_mask: Any) -> PyTree:
        """Turns examples into units; see ``Participation.units``."""
        return self.participation.units(examples, example_mask)

    @property
    def rule(self) -> Rule:
        """The clip rule that runs; of one that adapts, that of the first step."""
        if isinstance(self.clip, Adaptive):
            return self.clip.rule()
        return self.clip if self.budget is None else self.budget.rule(self.clip)

    def clipped_grad(
        self,
        loss_fn: LossFn,
        *,
        examples_at_once: int | None = None,
        example_sharding: jax.sharding.NamedSharding | None = None,
        **options: Any,
    ) -> Any:
        """Returns the function that sums this mechanism's clipped unit gradients.

        Args:
          loss_fn: ``(params, example) -> scalar`` for one example.
          examples_at_once: examples of a unit processed at once; the gradients of the rest are
            accumulated before the norm is taken. None: all.
          example_sharding: how these examples are split over devices; None: not.
          **options: passed to ``clipping.clipped_grad`` (``strategy``, ...).
        """
        if isinstance(self.clip, NoClip):
            return unclipped_sum(self.participation.unit_loss(loss_fn), options.get("trainable"))
        return self.gives.clipped(
            self.participation,
            loss_fn,
            self.rule,
            examples_at_once=examples_at_once,
            example_sharding=example_sharding,
            **options,
        )

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
        """Standard deviation of the noise on the clipped sum."""
        # proof: noise-1
        return self.sigma * self.clip.sensitivity if self.private else 0.0

    def noise_transform(self) -> optax.GradientTransformationExtraArgs:
        """Adds the noise of a step to the sum, and divides by the expected size."""
        made = self.noise.transform(self.noise_stddev, self.clip.sensitivity, self.divisor)
        return adapting_noise(self.clip, made) if isinstance(self.clip, Adaptive) else made

    def summed(self, gradient: Any) -> Callable[..., ClippedGradResult]:
        """What a step sums: ``(clip_norm, params, units, mask=...) -> ClippedGradResult``.

        Args:
          gradient: what ``clipped_grad`` returned.

        Returns:
          A function whose first argument is the clip norm of this step if the clip norm adapts
          (None: the first), and nothing else; then the sum is a ``clipping.adaptive.CountedSum``.
        """
        if not isinstance(self.clip, Adaptive):
            return lambda clip_norm, *args, **options: gradient(*args, **options)
        first, counted = self.clip.clip_norm, clipped_and_counted(self.clip, gradient)

        def summed(clip_norm: Any, *args: PyTree, **options: Any) -> ClippedGradResult:
            return counted(first if clip_norm is None else clip_norm, *args, **options)

        return summed

    @property
    def first_clip_norm(self) -> tuple[np.float32, ...]:
        """What the first step gives its sum besides units, where the clip norm adapts."""
        return (np.float32(self.clip.clip_norm),) if isinstance(self.clip, Adaptive) else ()

    def zero_sum(self, params: PyTree, *lead: int) -> PyTree:
        """Zeros in the structure of what a step sums, float32, with leading axes ``lead``."""
        zeros = jax.tree.map(lambda p: jnp.zeros((*lead, *p.shape), jnp.float32), params)
        if not isinstance(self.clip, Adaptive):
            return zeros
        return CountedSum(zeros, jnp.zeros(lead, jnp.float32))

    @property
    def noise_keys(self) -> int:
        """Steps whose noise is drawn at a step: its own, and those before it."""
        return self.noise.keys_per_step

    def is_stateful(self, population: Population) -> bool:
        """Whether noise or sampling of a step depends on earlier steps' draws.

        Then a run cannot go on as another computation, which draws anew.
        """
        stateful = self.noise.is_correlated or self.budget is not None
        return stateful or self.scheme(population).is_stateful

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

    # ---- what is accounted -----------------------------------------------------------------

    def filter(self, population: Population) -> RenyiFilter:
        """What a step costs each user, of users with budgets of their own."""
        assert self.budget is not None
        scheme, contribution = self.scheme(population), self.participation.contribution
        return self.budget.filter(self.sigma, scheme, contribution)

    def matrix(self, steps: int) -> cells.StrategyMatrix:
        """That of the noise of ``steps`` steps."""
        return self.noise.matrix(steps)

    def event(self, population: Population, steps: int) -> Any:
        """The ``dp_accounting.DpEvent`` of ``steps`` steps for one privacy unit."""
        if not self.private:
            return dp_accounting.NonPrivateDpEvent()
        scheme, contribution = self.scheme(population), self.participation.contribution
        if self.budget is not None:
            return self.budget.event(self.sigma, scheme, contribution, steps)
        return self._event_without_budgets(population, steps)

    def _event_without_budgets(self, population: Population, steps: int) -> Any:
        given = (self.scheme(population), self.sigma, steps, population.num_units)
        sums = cells.NoisedSums(*given, self.matrix(steps), self.participation.contribution)
        return sums.event()

    def for_steps(
        self,
        population: Population,
        steps: int,
        optimizer: optax.GradientTransformation | None = None,
    ) -> Mechanism:
        """A copy whose noise strategy and budgets are made for these.

        Args:
          population: what is sampled from.
          steps: T.
          optimizer: that will train; see ``noise.workload_of``.
        """
        separation = self.scheme(population).separation
        return dataclasses.replace(
            self,
            noise=self.noise.fit(steps, separation, workload_of(optimizer, steps)),
            budget=None if self.budget is None else self.budget.fit(steps),
        )

    def calibrate(
        self, population: Population, steps: int, epsilon: float, delta: float
    ) -> Mechanism:
        """Returns a copy whose noise multiplier is the smallest known to meet the target.

        Raises:
          BadInputError: epsilon <= 0, delta outside (0, 1), steps < 1, or out of reach.
        """
        self._check_owners(population)
        chosen, budget = self.for_steps(population, steps), self.budget

        def event(sigma: float) -> Any:
            made = dataclasses.replace(chosen, noise_multiplier=sigma)
            # The order follows from the noise: until it is chosen, what everybody can pay for is
            # accounted as without a filter, whose budget that is.
            if made.budget is not None and made.budget.order is None:
                return made._event_without_budgets(population, made._least_steps)
            return made.event(population, steps)

        how: Accountant = "pld" if budget is None else budget.accountant(self.scheme(population))
        sigma = accounting.calibrate_noise_multiplier(event, epsilon, delta, accountant=how)
        return dataclasses.replace(chosen, noise_multiplier=sigma)

    @property
    def _least_steps(self) -> int:
        assert self.budget is not None
        assert self.budget.least_steps is not None
        return self.budget.least_steps

    def calibrated(
        self,
        population: Population,
        steps: int,
        epsilon: float | None,
        delta: float | None,
        optimizer: optax.GradientTransformation | None = None,
    ) -> tuple[Mechanism, float]:
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
        made = self.for_steps(population, steps, optimizer)
        if self.noise_multiplier is None:
            if epsilon is None:
                raise BadInputError("neither epsilon nor the mechanism's noise_multiplier is set")
            made = made.calibrate(population, steps, float(epsilon), delta)
        elif epsilon is not None:
            raise BadInputError(
                "both epsilon and the mechanism's noise_multiplier are set: keep one, the other "
                "follows from it"
            )
        if made.budget is not None:
            spent = made._event_without_budgets(population, made._least_steps)
            made = dataclasses.replace(made, budget=made.budget.with_order(spent, delta))
        made.event(population, steps)  # what nothing is proven of is refused here, not at the end
        return made, delta

    def sampling_description(self, population: Population) -> str:
        """The sampling that runs, for the guarantee, before the number of steps."""
        drawn = self.participation.describe(population, self.gives.description)
        if self.budget is None:
            return drawn
        return self.budget.describe(drawn, self.participation.contribution)

    def guarantee(
        self, population: Population, steps: int, delta: float, caveats: tuple[str, ...] = ()
    ) -> accounting.Guarantee:
        """What ``steps`` steps guarantee each user at ``delta``; caveats are added to its own.

        Where records have several owners, it is of all of them.
        """
        sampling = f"{self.sampling_description(population)}, {steps} steps"
        if not self.private:
            return _nothing(delta, sampling, caveats)
        if self.participation.owners_only:
            population = dataclasses.replace(population, shared=True)
        self._check_owners(population)
        own = accounting.delta_caveats(delta, population.num_users, "users")
        event, scheme = self.event(population, steps), self.scheme(population)
        cell = cells.cell_of(scheme, self.matrix(steps), self.participation.contribution)
        epsilon = accounting.epsilon(event, delta, accountant=accounting.accountant_of(event))
        made = accounting.Guarantee(
            unit=self.unit,
            adjacency=f"add-or-remove one {self.unit}",
            trust="central",
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=self.sigma,
            steps=steps,
            accountant=cell.accountant,
            sampling=sampling,
            assumptions=(
                *COMMON_ASSUMPTIONS,
                *accounting.noise_assumptions(self.noise.arithmetic, epsilon, delta, steps),
                *(cell.assumptions if scheme.is_stateful else ()),
                *self.noise.assumptions,
            ),
            caveats=(*own, *caveats),
        )
        if self.budget is not None:
            made = dataclasses.replace(
                made,
                accountant=self.budget.accountant_description(self.participation.contribution),
                assumptions=(*made.assumptions, *own_budget.ASSUMPTIONS),
                caveats=(*own, own_budget.CAVEAT, *caveats),
            )
        return _for_owners(made) if population.shared else made


CENTRAL.without_kind = Mechanism


def code_outside(mechanism: Mechanism) -> list[str]:
    """Digests of the code of parts that are not this package's; [] if there are none.

    A section names such parts. If they are written anew, under the same names, they are another
    mechanism, which must not draw the noise of the one before.
    """
    parts = [getattr(mechanism, f.name) for f in dataclasses.fields(mechanism)]
    found = []
    for part in (*parts, getattr(mechanism.participation, "scheme", None)):
        for cls in type(part).__mro__:
            if cls.__module__.split(".")[0] in ("dpfl_jax", "builtins", "abc", "typing"):
                continue
            members = sorted(vars(cls).items())
            codes = [_code(getattr(m, "fget", getattr(m, "func", m))) for _, m in members]
            found.append(hashlib.sha256(repr(codes).encode()).hexdigest())
    return found


def _code(function: Any) -> Any:
    code = getattr(function, "__code__", function)
    if not isinstance(code, types.CodeType):
        return None
    within = [_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return code.co_code, within, code.co_names


def check_bounded(clip: Rule | Adaptive) -> None:
    """Raises BadInputError if contributions have no bound that noise could hide."""
    if isinstance(clip, NoClip):
        raise BadInputError(
            "mechanism.clip is none, but noise hides only what is bounded: take another clip "
            "rule, or set mechanism.noise to none"
        )


def check_noise_multiplier(value: float | None) -> None:
    """Raises BadInputError unless it is None (not calibrated yet), or from 0 to a million."""
    if value is not None and not 0 <= value < math.inf:
        raise BadInputError(f"noise_multiplier is {value}, but it must be finite and >= 0")
    if value is not None and value > MOST_NOISE:
        raise BadInputError(
            f"noise_multiplier is {value}, but it must be at most {MOST_NOISE:g}: ask for a larger "
            "epsilon, or take larger batches"
        )


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


def _nothing(delta: float, sampling: str, caveats: tuple[str, ...]) -> accounting.Guarantee:
    """A guarantee that says there is none."""
    return accounting.Guarantee(
        unit="none",
        adjacency="none",
        trust="central",
        epsilon=math.inf,
        delta=delta,
        noise_multiplier=0.0,
        accountant="none",
        sampling=sampling,
        caveats=("this run is not private: it is a baseline", *caveats),
    )
