"""A mechanism with its noise multiplier: what can be run, and what it guarantees.

``Mechanism.calibrate`` makes it. Everything here needs the noise multiplier: the noise of a step,
the event of a run, and the guarantee.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dp_accounting
import numpy as np
import optax
from scipy import signal

from dpfl_jax import accounting
from dpfl_jax.accounting import cells
from dpfl_jax.accounting.events import LEAST_NOISE
from dpfl_jax.accounting.filters import RenyiFilter
from dpfl_jax.accounting.statement import Statement
from dpfl_jax.clipping import Adaptive
from dpfl_jax.clipping.adaptive import adapting_noise
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import individual_budget
from dpfl_jax.mechanisms.participation import Population
from dpfl_jax.noise import MOST_NOISE

if TYPE_CHECKING:
    from dpfl_jax.mechanisms.mechanism import Mechanism


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """A mechanism with its noise multiplier, for a number of steps over a population.

    Attributes:
      mechanism: the mechanism, whose noise strategy and budgets are fitted to the steps.
      noise_multiplier: sigma, the standard deviation of each entry of Z over the largest norm of
        what a unit adds to the sum of a step; 0 without privacy. It is not divided by the
        sensitivity of K: compare noise multipliers only for the same K.
      population: the counts of what is sampled from.
      steps: number of steps T.
      delta: delta of the guarantee.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> people = dpfl.Population(num_users=1000, num_examples=9000, num_units=1000)
      >>> mechanism = dpfl.uls(group_size=4, cohort_size=64)
      >>> calibrated = mechanism.calibrate(people, steps=100, noise_multiplier=1.0, delta=1e-5)
      >>> calibrated.noise_stddev, round(calibrated.guarantee().epsilon, 2)
      (1.0, 4.48)
    """

    mechanism: Mechanism
    noise_multiplier: float
    population: Population
    steps: int
    delta: float

    def __post_init__(self) -> None:
        """Checks the noise multiplier.

        Raises:
          BadInputError: it is negative, above a million, or too small for individual budgets.
        """
        check_noise_multiplier(self.noise_multiplier)
        if self.mechanism.budget is not None and self.noise_multiplier < LEAST_NOISE:
            raise BadInputError(
                f"noise_multiplier is {self.noise_multiplier:g}, but with so little noise no "
                "individual budget pays for a step: set it higher, or leave out mechanism.budget"
            )

    def to_section(self) -> dict[str, Any]:
        """Returns the mechanism's section of a configuration, with any noise multiplier."""
        section = self.mechanism.to_section()
        return section | ({"noise_multiplier": self.noise_multiplier} if self.private else {})

    @property
    def private(self) -> bool:
        """Whether the mechanism has a privacy guarantee."""
        return self.mechanism.private

    # ---- what runs -------------------------------------------------------------------------

    @property
    def noise_stddev(self) -> float:
        """Standard deviation of each entry of Z; for independent noise, of the noise on the sum."""
        # proof: noise-1
        return self.noise_multiplier * self.mechanism.clip.sensitivity if self.private else 0.0

    @property
    def noise_on_gradients(self) -> np.ndarray:
        """Standard deviation of the noise on each entry of the mean gradient, float [T] by step.

        For correlated noise K^-1 Z, that of step t is proportional to the norm of row t of K^-1. If
        the clip norm adapts, it is relative to the clip norm of the step.
        """
        if not self.private:
            return np.zeros(self.steps)
        impulse = np.eye(1, self.steps)[0]
        row = signal.lfilter([1.0], self.matrix.column, impulse)  # K is Toeplitz
        return self.noise_stddev / self.mechanism.participation.divisor * np.sqrt(np.cumsum(row**2))

    def noise_transform(self) -> optax.GradientTransformationExtraArgs:
        """Returns the transformation that adds noise to a sum, and divides by the expected size."""
        clip, divisor = self.mechanism.clip, self.mechanism.participation.divisor
        made = self.mechanism.noise.transform(self.noise_stddev, clip.sensitivity, divisor)
        return adapting_noise(clip, made) if isinstance(clip, Adaptive) else made

    def at_own_rates(self) -> Mechanism:
        """Returns the mechanism with the sampling rate fixed to that for this population."""
        fixed: Any = self.mechanism.participation
        if hasattr(fixed, "scheme"):
            fixed = dataclasses.replace(fixed, scheme=self.scheme)
        return dataclasses.replace(self.mechanism, participation=fixed)

    @property
    def scheme(self) -> Any:
        """The sampling scheme with its rate for this population."""
        return self.mechanism.participation.scheme_of(self.population)

    @property
    def is_stateful(self) -> bool:
        """Whether noise or sampling at a step depends on the draws of earlier steps.

        Then a run can be resumed only under the key that it began with.
        """
        stateful = self.mechanism.noise.is_correlated or self.mechanism.budget is not None
        return bool(stateful or self.scheme.is_stateful)

    # ---- what is accounted -----------------------------------------------------------------

    @property
    def matrix(self) -> cells.StrategyMatrix:
        """The strategy matrix K of the noise of all steps."""
        return self.mechanism.noise.matrix(self.steps)

    def filter(self) -> RenyiFilter:
        """Returns the Renyi filter that charges each user for a step, for individual budgets."""
        assert self.mechanism.budget is not None
        contribution = self.mechanism.participation.contribution
        return self.mechanism.budget.filter(self.noise_multiplier, self.scheme, contribution)

    def event(self, steps: int | None = None) -> Any:
        """Returns the ``DpEvent`` of the first ``steps`` steps (None: all) for one privacy unit."""
        steps, budget = self._of(steps), self.mechanism.budget
        if not self.private:
            return dp_accounting.NonPrivateDpEvent()
        if budget is None:
            return self._sums(steps).event()
        contribution = self.mechanism.participation.contribution
        return budget.event(self.noise_multiplier, self.scheme, contribution, steps)

    def budget_event(self) -> Any:
        """Returns the event of the steps that every individual budget pays for; no filter."""
        assert self.mechanism.budget is not None
        assert self.mechanism.budget.least_steps is not None
        return self._sums(self.mechanism.budget.least_steps).event()

    def _sums(self, steps: int) -> cells.NoisedSums:
        given = (self.scheme, self.noise_multiplier, steps, self.population.num_units)
        matrix, contribution = (
            self.mechanism.noise.matrix(steps),
            self.mechanism.participation.contribution,
        )
        return cells.NoisedSums(*given, matrix, contribution)

    def epsilons(self, counts: Sequence[int]) -> list[float]:
        """Returns upper bounds on epsilon after these numbers of steps; inf where there is none."""
        total = self.guarantee().epsilon
        counts = [self._of(count) for count in counts]
        curve = accounting.epsilons_midway(self.event, self.steps, counts, self.delta)
        return [min(epsilon, total) for epsilon in curve]

    def _of(self, steps: int | None) -> int:
        steps = self.steps if steps is None else steps
        if not 0 <= steps <= self.steps:
            raise BadInputError(
                f"{steps} steps are asked for, but the plan is for {self.steps}: make a plan for "
                "as many steps as will be taken"
            )
        return steps

    def sampling_description(self, steps: int | None = None) -> str:
        """Returns the sampling in words, with the number of steps, for the guarantee."""
        mechanism = self.mechanism
        drawn = mechanism.participation.describe(self.population, mechanism.update.description)
        if mechanism.budget is not None:
            drawn = mechanism.budget.describe(drawn, mechanism.participation.contribution)
        return f"{drawn}, {self._of(steps)} steps"

    def guarantee(
        self, steps: int | None = None, caveats: tuple[str, ...] = ()
    ) -> accounting.Guarantee:
        """Returns the guarantee of the first ``steps`` steps (None: all) for each user.

        If records have several owners, it covers all of them. ``caveats`` are appended.
        """
        steps, mechanism, delta = self._of(steps), self.mechanism, self.delta
        sampling = self.sampling_description(steps)
        if not self.private:
            return _nothing(delta, sampling, caveats)
        shared = self.population.shared or mechanism.participation.owners_only
        mechanism.check_owners(shared)
        own = accounting.delta_caveats(delta, self.population.num_users, "users")
        event, contribution = self.event(steps), mechanism.participation.contribution
        cell = cells.cell_of(self.scheme, mechanism.noise.matrix(steps), contribution)
        epsilon = accounting.epsilon(event, delta, accountant=accounting.accountant_of(event))
        made = accounting.Guarantee(
            unit=mechanism.privacy_unit,
            adjacency=f"add-or-remove one {mechanism.privacy_unit}",
            trust="central",
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=self.noise_multiplier,
            steps=steps,
            accountant=cell.accountant,
            sampling=sampling,
            assumptions=(
                *COMMON_ASSUMPTIONS,
                *([mechanism.clip.assumption] if isinstance(mechanism.clip, Adaptive) else ()),
                *accounting.noise_assumptions(mechanism.noise.arithmetic, epsilon, delta, steps),
                # A cyclic scheme with period 1 draws nothing that the assumptions could be about.
                *(cell.assumptions if self.scheme.is_stateful else ()),
                *mechanism.noise.assumptions,
            ),
            caveats=(*own, *caveats),
        )
        if mechanism.budget is not None:
            made = dataclasses.replace(
                made,
                accountant=mechanism.budget.accountant_description(contribution),
                assumptions=(*made.assumptions, *individual_budget.ASSUMPTIONS),
                caveats=(*own, individual_budget.CAVEAT, *caveats),
            )
        return _for_owners(made) if shared else made

    def statement(self, guarantee: accounting.Guarantee, steps: int | None = None) -> Statement:
        """Returns the contents of guarantee.json for the first ``steps`` steps (None: all)."""
        steps = self._of(steps)
        basis = {
            "system": "central",
            "mechanism": self.to_section(),
            "population": self.population.to_json(),
            "steps": steps,
            "delta": guarantee.delta,
        }
        return Statement.of(guarantee, basis, [[self.event(steps)]])


def check_noise_multiplier(value: float) -> None:
    """Raises BadInputError unless ``value`` is from 0 to a million."""
    if not 0 <= value < math.inf:
        raise BadInputError(f"noise_multiplier is {value}, but it must be finite and >= 0")
    if value > MOST_NOISE:
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


# For records with several owners, instead of the first assumption (Ganesh et al. 2025, section 2).
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
    """The guarantee in the words for records with several owners."""
    assert guarantee.assumptions[0] == COMMON_ASSUMPTIONS[0]
    return dataclasses.replace(
        guarantee,
        adjacency=SHARED_ADJACENCY,
        assumptions=(*SHARED_ASSUMPTIONS, *guarantee.assumptions[1:]),
        caveats=(SHARED_CAVEAT, *guarantee.caveats),
    )


def _nothing(delta: float, sampling: str, caveats: tuple[str, ...]) -> accounting.Guarantee:
    """The guarantee of a run without privacy: an infinite epsilon."""
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
