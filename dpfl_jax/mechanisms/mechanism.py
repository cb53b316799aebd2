"""A mechanism: one value that decides what is sampled, clipped, noised and accounted.

    Mechanism(
        participation=Users(group_size=4, cohort_size=512, scheme=CyclicPoisson(period=8)),
        clip=Flat(1.0),
        noise=Banded(bands=8),
    )

Because all four come from the same parts, what is accounted cannot differ from what runs. The
privacy cost of a participation with a noise strategy is looked up in the table of proven cells
(``accounting.cells``); a combination that is not in the table is refused. ``presets`` has the
published mechanisms by name. A mechanism has no noise multiplier: ``calibrate`` finds or takes one,
and returns a ``Calibrated``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from dpfl_jax import accounting
from dpfl_jax.accounting.accountant import Accountant
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
from dpfl_jax.clipping.adaptive import CountedSum, clipped_and_counted
from dpfl_jax.clipping.gradients import unclipped_sum
from dpfl_jax.clipping.result import ClippedGradResult
from dpfl_jax.config.execution import Execution
from dpfl_jax.config.kinds import (
    BUDGETS,
    CENTRAL,
    CLIPS,
    NOISES,
    PARTICIPATIONS,
    UPDATES,
    Composed,
    Kinds,
    check_types,
    fields_of,
)
from dpfl_jax.data.store import Readable, check_offsets, expect_store
from dpfl_jax.errors import BadInputError, at_least, expect
from dpfl_jax.mechanisms.calibrated import Calibrated
from dpfl_jax.mechanisms.individual_budget import IndividualBudget
from dpfl_jax.mechanisms.noise_strategies import Independent, NoiseStrategy
from dpfl_jax.mechanisms.participation import (
    SHARED_KINDS,
    Examples,
    LossFn,
    Participation,
    Population,
    PyTree,
)
from dpfl_jax.mechanisms.plan import Plan
from dpfl_jax.mechanisms.user_update import Gradient, UnitUpdate, UserUpdate
from dpfl_jax.mesh import make_mesh
from dpfl_jax.noise import workload_of
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Sampler

for _rule in (NoClip, Flat, Normalized, Automatic, PerLayer, PerGroup, Adaptive):
    CLIPS.register(_rule)
# Clip rules that presets make from a word (``clipping``) and a clip norm.
NAMED_CLIPS: dict[str, Callable[[float], Rule]] = {
    "flat": Flat,
    "normalized": Normalized,
    "per_layer": PerLayer,
    "automatic": lambda clip_norm: Automatic(),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism(Composed):
    """A private (or, for baselines, non-private) way to estimate a gradient.

    Attributes:
      participation: which units contribute to which step.
      clip: the clip rule, whose sensitivity the noise is scaled to.
      noise: how noise is correlated over steps.
      update: what is clipped for each unit: its gradient or a user update.
      budget: individual privacy budgets; None: no user leaves before the last step.

    Examples:
      >>> from dpfl_jax.clipping import Flat
      >>> from dpfl_jax.mechanisms import Independent, Mechanism, Users, uls
      >>> users = Users(group_size=4, cohort_size=64)
      >>> by_parts = Mechanism(participation=users, clip=Flat(1.0), noise=Independent())
      >>> by_parts == uls(group_size=4, cohort_size=64)
      True
    """

    participation: Annotated[Participation, PARTICIPATIONS]
    clip: Annotated[Rule | Adaptive, CLIPS] = Flat(1.0)
    noise: Annotated[NoiseStrategy, NOISES] = Independent()
    update: Annotated[UnitUpdate, UPDATES] = Gradient()
    budget: Annotated[IndividualBudget, BUDGETS] | None = None

    kinds: ClassVar[Kinds] = CENTRAL

    def __post_init__(self) -> None:
        """Checks that the parts go together.

        Raises:
          BadInputError: two of the parts exclude each other.
        """
        check_types(self)
        if isinstance(self.update, UserUpdate) and isinstance(self.clip, NoClip):
            raise BadInputError(
                "mechanism.clip is none, but user updates are clipped: set it to another rule"
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
                "mechanism.clip is adaptive, which is proven for independent noise only: set "
                "mechanism.noise to independent, or take another clip rule"
            )
        if isinstance(self.update, UserUpdate) and self.participation.unit_examples is None:
            raise BadInputError(
                "user updates (mechanism.update) are computed from all examples of a user: set "
                "mechanism.participation to users"
            )
        if self.budget is not None:
            self.budget.check(self.clip)
            if self.noise.is_correlated:
                raise BadInputError(
                    "individual budgets are proven for independent noise only: set mechanism.noise "
                    "to independent, or leave out mechanism.budget"
                )

    def preset_options(self) -> dict[str, Any]:
        values: dict[str, Any] = {"clip": self.clip}
        norm = getattr(self.clip, "clip_norm", 1.0)
        if self.clip.kind in NAMED_CLIPS and NAMED_CLIPS[self.clip.kind](norm) == self.clip:
            values = {"clipping": self.clip.kind, "clip_norm": norm}
        scheme = getattr(self.participation, "scheme", None)
        parts = fields_of(self.participation, scheme, self.noise, self.update, self.budget)
        return values | parts

    # ---- what runs -------------------------------------------------------------------------

    @property
    def privacy_unit(self) -> str:
        """What adjacency adds or removes: ``"user"``, or ``"none"`` without privacy."""
        return "user" if self.private else "none"

    @property
    def clip_norm(self) -> float:
        """The clip norm C; 1 for rules without one."""
        return 1.0 if self.clip.threshold is None else float(self.clip.threshold)

    @property
    def group_size(self) -> int:
        """The bound on the examples of one user; 1 where there is no such bound."""
        return getattr(self.participation, "group_size", None) or 1

    @property
    def compute_budget(self) -> float:
        """Expected number of gradient evaluations per step and pass over a unit's examples."""
        return self.participation.divisor * (self.participation.unit_examples or 1)

    @property
    def clips_user_updates(self) -> bool:
        """Whether user updates are clipped (``UserUpdate``), not gradients."""
        return isinstance(self.update, UserUpdate)

    def bounded(self, data: Readable) -> Readable:
        """Returns the part of the data that may be used; see ``Participation.bounded``."""
        # With individual budgets, a record of several owners would leave with the first of them. So
        # such data are refused here, even if the participation bounds the records of each owner.
        if self.budget is not None:
            return Participation.bounded(self.participation, data)
        return self.participation.bounded(data)

    def check_owners(self, shared: bool) -> None:
        """Raises BadInputError if examples have several owners and the mechanism expects one."""
        protects = self.participation.several_owners and self.budget is None
        if shared and self.private and not protects:
            raise BadInputError(
                "the population has examples with several owners, of whom mechanism.kind="
                f"{self.kind} protects none: {SHARED_KINDS}"
            )

    def sampler(self, user_offsets: np.ndarray, key: RootKey) -> Sampler:
        """Returns the sampler of a run with this root key.

        Args:
          user_offsets: int64 [num_users + 1], where each user's examples begin.
          key: root key of the run.
        """
        sampler = self.participation.sampler(user_offsets, key)
        return sampler if self.budget is None else self.budget.empty_sampler(sampler)

    @property
    def rule(self) -> Rule:
        """The clip rule that runs; if the clip norm adapts, the rule of the first step."""
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
          examples_at_once: examples of a unit that are processed at once; gradients of such
            microbatches are accumulated before the norm is taken. None: all examples.
          example_sharding: how these examples are split over devices; None: not split.
          **options: passed to ``clipping.clipped_grad`` (``strategy``, ...).
        """
        if isinstance(self.clip, NoClip):
            return unclipped_sum(self.participation.unit_loss(loss_fn), options.get("trainable"))
        return self.update.clipped(
            self.participation,
            loss_fn,
            self.rule,
            examples_at_once=examples_at_once,
            example_sharding=example_sharding,
            **options,
        )

    def sum_fn(self, gradient: Any) -> Callable[..., ClippedGradResult]:
        """Returns a step's sum: ``(clip_norm, params, units, mask=...) -> ClippedGradResult``.

        Args:
          gradient: what ``clipped_grad`` returned.

        Returns:
          A function that uses ``clip_norm`` only if the clip norm adapts (None: the clip norm of
          the first step). The sum is then a ``CountedSum``.
        """
        if not isinstance(self.clip, Adaptive):
            return lambda clip_norm, *args, **options: gradient(*args, **options)
        first, counted = self.clip.clip_norm, clipped_and_counted(self.clip, gradient)

        def summed(clip_norm: Any, *args: PyTree, **options: Any) -> ClippedGradResult:
            return counted(first if clip_norm is None else clip_norm, *args, **options)

        return summed

    @property
    def initial_extra_args(self) -> tuple[np.float32, ...]:
        """Further arguments of the first step's sum: the clip norm if it adapts, else none."""
        return (np.float32(self.clip.clip_norm),) if isinstance(self.clip, Adaptive) else ()

    def zero_sum(self, params: PyTree, *lead: int) -> PyTree:
        """Returns zeros in the structure of a step's sum: float32 [*lead, *parameter shape]."""
        zeros = jax.tree.map(lambda p: jnp.zeros((*lead, *p.shape), jnp.float32), params)
        if not isinstance(self.clip, Adaptive):
            return zeros
        return CountedSum(zeros, jnp.zeros(lead, jnp.float32))

    # ---- with its noise --------------------------------------------------------------------

    def calibrate(
        self,
        population: Population,
        steps: int,
        *,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        delta: float | None = None,
        optimizer: optax.GradientTransformation | None = None,
    ) -> Calibrated:
        """Returns the mechanism with the least noise that meets a target, or with given noise.

        Args:
          population: the counts of the data that units are sampled from.
          steps: number of steps T, which the noise strategy and budgets are fitted to.
          epsilon: the target.
          noise_multiplier: sigma, instead of a target.
          delta: of the guarantee; None: number of examples ** -1.1.
          optimizer: will train with the noise; see ``noise.workload_of``.

        Raises:
          BadInputError: neither or both of epsilon and noise_multiplier are given, the population
            is empty, the target is out of reach, or nothing is proven for this combination.
        """
        at_least("the number of steps", steps, 1, whole=True)
        steps = int(steps)
        for name, number in (
            ("epsilon", epsilon),
            ("noise_multiplier", noise_multiplier),
            ("delta", delta),
        ):
            if number is not None:
                expect(number, (float, int, np.number), name, "a number")
        if optimizer is not None:
            expect(optimizer, optax.GradientTransformation, "optimizer", "an Optax optimiser")
        if population.num_units == 0:
            raise BadInputError("the training set has no usable example: check the data section")
        delta = population.default_delta() if delta is None else float(delta)
        accounting.check_delta(delta)
        scheme = self.participation.scheme_of(population)
        if not self.private:
            return Calibrated(self, 0.0, population, steps, delta)
        self.check_owners(population.shared)
        if epsilon is None and noise_multiplier is None:
            raise BadInputError("neither epsilon nor noise_multiplier is set: give one of them")
        if epsilon is not None and noise_multiplier is not None:
            raise BadInputError(
                "both epsilon and noise_multiplier are set: keep one, the other follows from it"
            )
        workload, budget = workload_of(optimizer, steps), self.budget
        fitted = dataclasses.replace(
            self,
            noise=self.noise.fitted_to(steps, scheme.separation, workload),
            budget=None if budget is None else budget.fitted_to(steps),
        )
        if epsilon is not None:

            def event(sigma: float) -> Any:
                made = Calibrated(fitted, sigma, population, steps, delta)
                # The order is chosen from sigma: calibrate with the unfiltered budget event.
                chosen = budget is None or budget.renyi_order is not None
                return made.event() if chosen else made.budget_event()

            how: Accountant = "pld" if budget is None else budget.accountant(scheme)
            noise_multiplier = accounting.calibrate_noise_multiplier(
                event, float(epsilon), delta, accountant=how
            )
        assert noise_multiplier is not None
        made = Calibrated(fitted, float(noise_multiplier), population, steps, delta)
        if fitted.budget is not None:
            ordered = fitted.budget.with_order(made.budget_event(), delta)
            fitted = dataclasses.replace(fitted, budget=ordered)
            made = dataclasses.replace(made, mechanism=fitted)
        made.event()  # refuses here what is not proven, not after training
        return made

    def plan(
        self,
        data: Readable,
        *,
        steps: int,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        delta: float | None = None,
        execution: Execution | None = None,
        mesh: Mesh | None = None,
        optimizer: optax.GradientTransformation | None = None,
    ) -> Plan:
        """Calibrates the mechanism for a data set.

        Args:
          data: a store: ``user_offsets`` and ``read(positions)``.
          steps: number of steps T.
          epsilon: the target.
          noise_multiplier: sigma, instead of a target.
          delta: of the guarantee; default: number of examples ** -1.1.
          execution: how steps are computed.
          mesh: the devices that compute; default: ``execution.mesh`` over all devices.
          optimizer: will train with the noise. Correlated noise is fitted to the schedule and
            momentum of SGD; by default, and for other optimisers, to prefix sums of gradients.

        Raises:
          BadInputError: as for ``calibrate``, or the data have no examples.
        """
        expect_store(data, "data")
        if execution is not None:
            expect(execution, Execution, "execution", "a dpfl_jax.Execution(...)")
        if mesh is not None:
            expect(mesh, Mesh, "mesh", "a jax.sharding.Mesh, by dpfl_jax.mesh.make_mesh")
        data = self.bounded(data)
        check_offsets(data.user_offsets)
        made = self.calibrate(
            self.participation.population_of(data),
            steps,
            epsilon=epsilon,
            noise_multiplier=noise_multiplier,
            delta=delta,
            optimizer=optimizer,
        )
        execution = execution or Execution()
        return Plan(made, data, execution, mesh or make_mesh(**execution.mesh.axes))


CENTRAL.without_kind = Mechanism


def check_bounded(clip: Rule | Adaptive) -> None:
    """Raises BadInputError if contributions have no bound that noise could hide."""
    if isinstance(clip, NoClip):
        raise BadInputError(
            "mechanism.clip is none, but noise hides only what is bounded: take another clip "
            "rule, or set mechanism.noise to none for a run without privacy"
        )
