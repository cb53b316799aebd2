"""The planner: noise on the averaged gradient, for every way to spend a compute budget.

A budget B is the expected number of gradient evaluations a step: a mechanism spends it on B
examples, or on M users of G examples. The noise on the average has standard deviation L sigma / B,
or L(G) sigma(M) / M (Charles et al. 2024, equations (5) and (6)).

Where noise is correlated over steps, some of it cancels in later steps. An optimiser adds up
gradients, so what is compared is the noise in their prefix sums, root mean square over the steps:
of independent noise that is sqrt((T + 1) / 2) times a step's, whatever the algorithm. The noise of
an option is that of a step of independent noise with the same error in prefix sums.

The mechanisms that are compared are those of ``planning.candidates``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent

from dpfl_jax import accounting
from dpfl_jax.accounting import events
from dpfl_jax.accounting.calibrate import coarse_noise_multiplier, noise_near
from dpfl_jax.accounting.cells import NoisedSums
from dpfl_jax.errors import BadInputError, at_least, positive
from dpfl_jax.matrices import PREFIX_SUMS, Workload
from dpfl_jax.mechanisms import NoiseStrategy, Population
from dpfl_jax.planning.candidates import CANDIDATES, at_budget, draws_examples, plain
from dpfl_jax.planning.estimates import Sensitivities, median_group_size


@dataclasses.dataclass(frozen=True)
class UserStatistics:
    """Statistics of the users of a training set.

    Attributes:
      num_users: N.
      sizes: int [N], examples of each user; or None.
      limited: {G: examples left with at most G a user}, where ``sizes`` are not known.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.planning import UserStatistics
      >>> UserStatistics(num_users=4, sizes=np.array([1, 2, 8, 8])).left(4)  # at most 4 of a user
      11
    """

    num_users: int
    sizes: np.ndarray | None = None
    limited: dict[int, int] | None = None

    def __post_init__(self) -> None:
        at_least("the number of users", self.num_users, 1)

    def left(self, group: int) -> int:
        """Examples left when every user keeps at most ``group``.

        Raises:
          BadInputError: neither sizes nor this group size are known.
        """
        if self.sizes is not None:
            return int(np.minimum(self.sizes, group).sum())
        if self.limited and group in self.limited:
            return int(self.limited[group])
        raise BadInputError(
            f"the number of examples left with at most {group} a user is not known: give the sizes "
            "of users, or that number (population.limited_examples)"
        )

    def groups(self) -> list[int]:
        """Group sizes whose examples are known: those given, or powers of two up to the largest."""
        if self.sizes is None:
            return sorted(self.limited or {})
        top = int(self.sizes.max(initial=1))
        return [2**k for k in range(int(math.log2(top)) + 1)]


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to spend the budget.

    Attributes:
      kind: a preset's, of ``planning.candidates``.
      group_size: G.
      size: expected examples or users a step.
      sampling_prob: of each of these.
      noise_multiplier: sigma.
      sensitivity: L, the typical gradient norm.
      bands: of the noise, where it has them; else 1.
      error: of prefix sums, by independent noise of the same multiplier; else 1.
      noise: standard deviation of the noise on the averaged gradient, per coordinate (of
        independent noise with the same error in prefix sums).

    Examples:
      >>> from dpfl_jax.planning import Option
      >>> option = Option("uls", 4, 64, 0.01, noise_multiplier=1.0, sensitivity=1.2)
      >>> option.gradients, option.noise
      (4, 0.01875)
    """

    kind: str
    group_size: int
    size: int
    sampling_prob: float
    noise_multiplier: float
    sensitivity: float
    bands: int = 1
    error: float = 1.0

    @property
    def noise(self) -> float:
        """L sigma error / size: standard deviation on the averaged gradient."""
        return self.sensitivity * self.noise_multiplier * self.error / self.size

    @property
    def gradients(self) -> int:
        """Gradient evaluations of one unit."""
        return 1 if draws_examples(self.kind) else self.group_size

    def to_json(self) -> dict[str, Any]:
        """Fields, ``noise`` and ``gradients``."""
        return {**dataclasses.asdict(self), "noise": self.noise, "gradients": self.gradients}


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """What a planner recommends for a compute budget.

    Attributes:
      budget: B.
      epsilon, delta, steps: of the guarantee.
      options: all that were priced.
      best: of least noise.
      median: of drawn examples, at the median group size, if known.
      doubling: of drawn users, by Estimate-and-Double.
      doubling_as_printed: the same as printed, for comparison.
      reason: why ``best``, in a sentence.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.planning import Planner, Sensitivities, UserStatistics
      >>> users = UserStatistics(num_users=5000, sizes=np.full(5000, 8))
      >>> norms = Sensitivities(2.0, {1: 2.0, 4: 1.2}, intervals={}, source="a proxy")
      >>> found = Planner(users, norms, epsilon=4.0, delta=1e-6, steps=100).recommend(64)
      >>> found.best in found.options
      True
    """

    budget: int
    epsilon: float
    delta: float
    steps: int
    options: list[Option]
    best: Option
    median: Option | None
    doubling: Option
    doubling_as_printed: Option
    reason: str

    def to_json(self) -> dict[str, Any]:
        """As JSON: the fields, each option as of ``Option.to_json``."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        single = {k: v.to_json() if isinstance(v, Option) else v for k, v in fields.items()}
        return single | {"options": [option.to_json() for option in self.options]}


def estimate_and_double(
    sensitivity: Callable[[int], float],
    noise_multiplier: Callable[[int], float],
    budget: int,
    *,
    group: int = 1,
    cohort: int = 32,
    most_users: int | None = None,
    largest_group: int | None = None,
    literal: bool = False,
) -> tuple[int, int]:
    """Estimate-and-Double (Charles et al. 2024, Algorithm 3): (G, M) with G M <= budget.

    As printed (``literal``) it compares L(2G)/L(G) with sigma(2M)/sigma(M). As sigma grows with M
    the second is above 1 and the first is not, so that G is always doubled, against the paper's
    own text. The noise on the average is L(G) sigma(M) / M, so that the second ratio must be
    sigma(2M) / (2 sigma(M)).

    Args:
      sensitivity: G -> L_ULS(G).
      noise_multiplier: M -> sigma_ULS(M).
      budget: B.
      group: G_0.
      cohort: M_0.
      most_users: N, beyond which M cannot grow.
      largest_group: beyond which G cannot grow.
      literal: the printed rule.

    Examples:
      >>> from dpfl_jax.planning import estimate_and_double
      >>> estimate_and_double(lambda g: g**-0.4, lambda m: 1 + m / 500, budget=512)
      (1, 512)
    """
    most = math.inf if most_users is None else most_users
    largest = math.inf if largest_group is None else largest_group
    cohort = int(min(cohort, budget, most))
    while 2 * group * cohort <= budget:
        may_group, may_cohort = 2 * group <= largest, 2 * cohort <= most
        if not (may_group or may_cohort):
            break
        if may_group and may_cohort:
            by_group = sensitivity(2 * group) / sensitivity(group)
            by_cohort = noise_multiplier(2 * cohort) / noise_multiplier(cohort)
            if not literal:
                by_cohort /= 2
            double_group = by_group < by_cohort
        else:
            double_group = may_group
        group, cohort = (2 * group, cohort) if double_group else (group, 2 * cohort)
    return group, cohort


@dataclasses.dataclass(frozen=True)
class _Uncalibrated:
    """An option without its noise multiplier, and what is accounted of it."""

    option: Option
    sums: NoisedSums

    def event(self, sigma: float) -> DpEvent:
        return dataclasses.replace(self.sums, noise_multiplier=sigma).event()

    @property
    def takes_all_units(self) -> bool:
        """Whether every unit is in every step."""
        return bool(self.sums.scheme.rate >= 1.0)


class Planner:
    """Prices every option for one population, guarantee and model; calibrations are cached.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.planning import Planner, Sensitivities, UserStatistics
      >>> users = UserStatistics(num_users=5000, sizes=np.full(5000, 8))
      >>> norms = Sensitivities(2.0, {1: 2.0, 4: 1.2}, intervals={}, source="a proxy")
      >>> planner = Planner(users, norms, epsilon=4.0, delta=1e-6, steps=100)
      >>> planner.option("uls", 4, 64).noise < planner.option("uls", 1, 64).noise
      True
    """

    def __init__(
        self,
        users: UserStatistics,
        sensitivities: Sensitivities,
        *,
        epsilon: float,
        delta: float,
        steps: int,
        example_group: int | None = None,
        workload: Workload = PREFIX_SUMS,
    ) -> None:
        """Calibrates nothing yet.

        Args:
          users: what is known of the training set.
          sensitivities: typical gradient norms.
          epsilon: target over all steps.
          delta: of the target.
          steps: T.
          example_group: the group size of drawn examples by the median heuristic, if it is not that
            of ``users.sizes`` (a private median).
          workload: what an optimiser makes of noise, with rates of T steps if they differ.
        """
        at_least("the number of steps", steps, 1)
        self.example_group, self.workload = example_group, workload
        self.users, self.sensitivities = users, sensitivities
        self.epsilon, self.delta, self.steps = epsilon, delta, steps
        self._sigmas: dict[tuple[str, float], float] = {}
        self._errors: dict[NoiseStrategy, float] = {}
        self._sized = functools.cache(self._make)

    # ---- single options --------------------------------------------------------------------

    def option(self, kind: str, group: int, size: int, epsilon: float | None = None) -> Option:
        """A candidate with so many examples, or users of up to ``group`` examples, a step.

        Args:
          kind: of ``planning.candidates``.
          group: G; of drawn examples, the most of a user in the run.
          size: expected examples or users.
          epsilon: of the guarantee; None: the planner's.

        Raises:
          BadInputError: more than there are, an epsilon that no noise reaches, or the candidate is
            the same mechanism as the plain one.
        """
        option = self.try_option(kind, group, size, epsilon)
        if option is None:
            raise BadInputError(
                f"with {size} a step, {CANDIDATES[kind].name} is no other mechanism than "
                f"{CANDIDATES[plain(draws_examples(kind))].name}: take that, or fewer a step"
            )
        return option

    def try_option(
        self, kind: str, group: int, size: int, epsilon: float | None = None
    ) -> Option | None:
        """As ``option``; None if the candidate would be the same mechanism as the plain one."""
        run = self._uncalibrated(kind, group, size)
        if run is None:
            return None
        sigma = self._sigma(run.event, self.epsilon if epsilon is None else epsilon)
        return dataclasses.replace(run.option, noise_multiplier=sigma)

    def _sigma(self, event: Callable[[float], DpEvent], epsilon: float) -> float:
        """The least noise multiplier; equal events are calibrated once."""
        one = event(1.0)
        if isinstance(one, GaussianDpEvent):  # all steps are one Gaussian event
            return self._sigma(lambda s: events.gaussian(s, 1), epsilon) / one.noise_multiplier
        key = repr(one), epsilon
        if key not in self._sigmas:
            self._sigmas[key] = accounting.calibrate_noise_multiplier(event, epsilon, self.delta)
        return self._sigmas[key]

    def _slow_option(self, kind: str, options: Sequence[Option]) -> Option | None:
        """A slowly calibrated candidate, at the sizes where the plain one has the least noise.

        A coarse bound will do where another option has less noise by more than it overstates.
        """
        same = [o for o in options if o.kind == plain(draws_examples(kind))]
        if not same:
            return None
        best = min(same, key=lambda option: option.noise)
        run = self._uncalibrated(kind, best.group_size, best.size)
        if run is None:
            return None
        sigma = coarse_noise_multiplier(run.event, self.epsilon, self.delta, best.noise_multiplier)
        coarse = dataclasses.replace(run.option, noise_multiplier=sigma)
        if coarse.noise > 1.03 * min(option.noise for option in options):
            return coarse
        return self.option(kind, best.group_size, best.size)

    def _uncalibrated(self, kind: str, group: int, size: int) -> _Uncalibrated | None:
        """A candidate at its sizes and best number of bands; None: the same as the plain one."""
        candidate = CANDIDATES[kind]
        if not candidate.bands:
            run = self._sized(kind, group, size)
            return run if candidate.is_plain or not run.takes_all_units else None
        rough: dict[int | None, float] = {}
        unbanded = self._sized(plain(draws_examples(kind)), group, size)
        for bands in (None, *candidate.bands):
            try:
                run = unbanded if bands is None else self._sized(kind, group, size, bands)
                sigma = noise_near(run.event, self.epsilon, self.delta)
            except BadInputError:  # more bands than steps, or than groups of users
                break
            rough[bands] = sigma * run.option.error
        bands = min(rough, key=lambda b: rough[b], default=None)
        return None if bands is None else self._sized(kind, group, size, bands)

    def _make(self, kind: str, group: int, size: int, bands: int | None = None) -> _Uncalibrated:
        examples = draws_examples(kind)
        units = self.users.left(group) if examples else self.users.num_users
        what = f"examples left with at most {group} a user" if examples else "users"
        at_least("what the compute budget pays for, a step,", size, 1, advice="raise the budget")
        if size > units:
            raise BadInputError(
                f"{size} a step cannot be drawn from {units} {what}: lower the compute "
                "budget, or raise the group size"
            )
        budget, more = size * (1 if examples else group), {} if bands is None else {"bands": bands}
        made = at_budget(None, kind, budget, group, **more)
        scheme = made.participation.scheme_of(Population(self.users.num_users, units, units))
        noise = made.noise.fitted_to(self.steps, scheme.separation, self.workload)
        if noise not in self._errors:
            self._errors[noise] = noise.error(self.steps, self.workload)
        norm, used_bands = self.sensitivities.norm(kind, group), getattr(noise, "bands", 1)
        prob, error = scheme.draw_prob, self._errors[noise]
        option = Option(kind, group, size, prob, math.nan, norm, used_bands, error)
        matrix, contribution = noise.matrix(self.steps), made.participation.contribution
        sums = NoisedSums(scheme, 1.0, self.steps, units, matrix, contribution)
        return _Uncalibrated(option, sums)

    def heat_map(self, cohorts: Sequence[int]) -> list[Option]:
        """Sampled users at every known group size and these cohort sizes, up to the population."""
        return [
            self.option(plain(False), group, cohort)
            for group in sorted(self.sensitivities.user)
            for cohort in cohorts
            if 1 <= cohort <= self.users.num_users
        ]

    # ---- recommendations -------------------------------------------------------------------

    def recommend(
        self, budget: int, *, example_groups: Sequence[int] | None = None, every: bool = False
    ) -> Recommendation:
        """Prices all (G, M) with G M = B, powers of two, and examples at all group sizes.

        Args:
          budget: B, gradient evaluations a step.
          example_groups: group sizes of drawn examples; default all that can be priced.
          every: whether all candidates are priced, at every (G, M), not the plain ones alone. Those
            whose calibration takes seconds are priced where the plain one has the least noise, and
            to 2.5 % where they cannot win.
        """
        at_least("the compute budget (gradients a step)", budget, 1, advice="raise it")
        kinds = [k for k, c in CANDIDATES.items() if c.is_plain or every]
        options: list[Option] = []
        for kind in sorted(kinds, key=lambda kind: CANDIDATES[kind].is_slow):
            if CANDIDATES[kind].is_slow:
                tried = [self._slow_option(kind, options)]
            else:
                cells = self.cells(kind, budget, example_groups)
                tried = [self.try_option(kind, *cell) for cell in cells]
            options += [option for option in tried if option is not None]
        if not options:
            raise BadInputError(
                f"no way to spend a budget of {budget} a step on {self.users.num_users} users: "
                "lower it, or allow larger groups"
            )
        groups = sorted(self.sensitivities.user)
        doubling, as_printed = (
            self.option(
                plain(False),
                *estimate_and_double(
                    self.sensitivities.at,
                    lambda cohort: self.option(plain(False), groups[0], cohort).noise_multiplier,
                    budget,
                    most_users=self.users.num_users,
                    largest_group=groups[-1],
                    literal=literal,
                ),
            )
            for literal in (False, True)
        )
        no_examples = example_groups is not None and not example_groups
        best = min(options, key=lambda option: option.noise)
        return Recommendation(
            budget,
            self.epsilon,
            self.delta,
            self.steps,
            options,
            best,
            None if no_examples else self._median(budget),
            doubling,
            as_printed,
            _reason(best, options),
        )

    def cells(
        self, kind: str, budget: int, example_groups: Sequence[int] | None = None
    ) -> list[tuple[int, int]]:
        """All (G, size) at a budget."""
        if draws_examples(kind):
            groups = self.users.groups() if example_groups is None else example_groups
            return [(group, budget) for group in groups if budget <= self.users.left(group)]
        pairs = [(group, budget // group) for group in sorted(self.sensitivities.user)]
        return [(group, size) for group, size in pairs if 1 <= size <= self.users.num_users]

    def _median(self, budget: int) -> Option | None:
        """Drawn examples at the median group size, where that is known and there are as many."""
        groups = self.users.groups()
        if self.example_group is not None:
            group = self.example_group
        elif self.users.sizes is not None:
            group = median_group_size(self.users.sizes)
        elif len(groups) == 1:
            (group,) = groups
        else:
            return None
        return None if budget > self.users.left(group) else self.option(plain(True), group, budget)

    # ---- inverse questions -----------------------------------------------------------------

    def smallest_epsilon(self, noise: float, budget: int) -> tuple[float, Option]:
        """The smallest epsilon at which some option has this noise, and that option.

        Raises:
          BadInputError: no option has a finite epsilon at so little noise.
        """
        pairs = [(self.epsilon_of(option), option) for option in self._with_noise(noise, budget)]
        epsilon, option = min(pairs, key=lambda pair: pair[0])
        if math.isinf(epsilon):
            raise BadInputError(
                f"no useful epsilon brings the noise down to {noise:g} at budget {budget}: raise "
                "the budget or accept more noise"
            )
        return epsilon, option

    def smallest_budget(self, noise: float) -> tuple[int, Option]:
        """The smallest power-of-two budget at which some option has this noise within the target.

        Raises:
          BadInputError: no budget reaches it.
        """

        def fits(power: int) -> Option | None:
            options = self._with_noise(noise, 2**power)
            return next((o for o in options if self.epsilon_of(o) <= self.epsilon), None)

        # More compute never needs more noise: halve the range of powers.
        low, high = -1, int(math.log2(self.users.num_users * max(self.sensitivities.user)))
        best = fits(high)
        while best is not None and high - low > 1:
            middle = (low + high) // 2
            option = fits(middle)
            if option is None:
                low = middle
            else:
                high, best = middle, option
        if best is not None:
            return 2**high, best
        raise BadInputError(
            f"no compute budget brings the noise down to {noise:g} at epsilon {self.epsilon:g}: "
            "raise epsilon, or find more users"
        )

    def _with_noise(self, noise: float, budget: int) -> list[Option]:
        """Every plain option at this budget, with the noise multiplier that gives this noise."""
        positive("the target noise", noise)
        options = [
            dataclasses.replace(option, noise_multiplier=noise * option.size / option.sensitivity)
            for kind, candidate in CANDIDATES.items()
            if candidate.is_plain
            for cell in self.cells(kind, budget)
            for option in [self._sized(kind, *cell).option]
        ]
        if not options:
            raise BadInputError(f"there is no way to spend a budget of {budget} a step")
        return options

    def epsilon_of(self, option: Option) -> float:
        """Epsilon of an option's noise multiplier; infinity where there is no bound."""
        bands = option.bands if CANDIDATES[option.kind].bands else None
        run = self._sized(option.kind, option.group_size, option.size, bands)
        event = run.event(option.noise_multiplier)
        try:
            return accounting.epsilon(event, self.delta)
        except BadInputError:  # far too little noise for any guarantee
            return math.inf

    def users_at_overtake(self, budget: int, example_group: int, most: int = 2**30) -> int | None:
        """The number of users from which drawing users (best G) has no less noise than examples.

        Each user has ``example_group`` examples: drawing examples gains more from users, drawing
        users more from compute (the paper's Figure 8). None if users are ahead up to ``most``.
        """
        count = max(2, budget)
        while count <= most:
            users = UserStatistics(count, limited={example_group: count * example_group})
            other = Planner(
                users,
                self.sensitivities,
                epsilon=self.epsilon,
                delta=self.delta,
                steps=self.steps,
            )
            try:
                least = min(
                    other.option(plain(False), *cell).noise
                    for cell in other.cells(plain(False), budget)
                )
                if other.option(plain(True), example_group, budget).noise <= least:
                    return count
            except BadInputError:  # so many users that hardly anyone is ever drawn: no noise
                return None
            count *= 4
        return None


def in_words(cell: dict[str, Any]) -> str:
    """A cell (an option or a trial, as JSON) as people read it."""
    bands = f" b={cell['bands']}" if cell.get("bands", 1) > 1 else ""
    text = f"{CANDIDATES[cell['kind']].name}{bands} G={cell['group_size']}, {cell['size']} a step"
    return f"{text}, {cell['steps']} steps" if "steps" in cell else text


def _reason(best: Option, options: list[Option]) -> str:
    what = (
        f"{best.size} examples, at most {best.group_size} of a user in the run"
        if draws_examples(best.kind)
        else f"{best.size} users of up to {best.group_size} examples"
    )
    where = "in sums of gradients" if any(o.error != 1 for o in options) else "on the gradient"
    name = CANDIDATES[best.kind].name
    text = f"{name} with {what} a step has the least noise {where} ({best.noise:.4g})"
    for kind, candidate in CANDIDATES.items():
        others = [o for o in options if o.kind == kind != best.kind]
        if others:
            rival = min(others, key=lambda o: o.noise)
            factor = rival.noise / best.noise
            text += f"; the best {candidate.name} (G={rival.group_size}) has {factor:.2f} times as"
            text += " much"
    if sentence := CANDIDATES[best.kind].sentence:
        period = round(1 / best.sampling_prob)
        text += f". {sentence.format(**dataclasses.asdict(best), period=period)}"
    return text
