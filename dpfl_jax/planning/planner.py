"""The planner: noise on the averaged gradient, for every way to spend a compute budget.

A budget B is the expected number of gradient evaluations per step: a mechanism spends it on B
examples, or on M users of G examples. The noise on the average has standard deviation L sigma / B,
or L(G) sigma(M) / M (Charles et al. 2024, equations (5) and (6)).

Correlated noise partly cancels in later steps. An optimiser adds up gradients, so mechanisms are
compared by the noise in prefix sums of gradients, root mean square over the steps. (For independent
noise this is sqrt((T + 1) / 2) times the noise of a step, whatever the algorithm.) What an option
calls its noise is the noise of a step of independent noise with the same error in prefix sums.

``planning.candidates`` lists the mechanisms that are compared.
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
    """How many users a training set has, and how many examples they have.

    Attributes:
      num_users: number of users N.
      sizes: int [N], number of examples of each user; or None.
      limited: {G: number of examples if each user keeps at most G}, if ``sizes`` are not known.

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
        """Returns the number of examples left if every user keeps at most ``group``.

        Raises:
          BadInputError: neither ``sizes`` nor the number for this group size is known.
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
        """Returns the group sizes that ``left`` knows: those given, or powers of two."""
        if self.sizes is None:
            return sorted(self.limited or {})
        top = int(self.sizes.max(initial=1))
        return [2**k for k in range(int(math.log2(top)) + 1)]


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to spend the compute budget.

    Attributes:
      kind: kind of a preset, from ``planning.candidates``.
      group_size: group size G.
      size: expected examples or users per step.
      sampling_prob: probability of an example or user to be drawn for a step.
      noise_multiplier: sigma.
      sensitivity: typical gradient norm L.
      bands: number of bands of the noise; 1 without bands.
      error: error in prefix sums, relative to independent noise with the same multiplier.
      noise: standard deviation of the noise on the averaged gradient, per coordinate. For
        correlated noise: of independent noise with the same error in prefix sums.

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
        """The noise on the averaged gradient, sensitivity * noise_multiplier * error / size."""
        return self.sensitivity * self.noise_multiplier * self.error / self.size

    @property
    def gradients(self) -> int:
        """Number of gradient evaluations for one unit."""
        return 1 if draws_examples(self.kind) else self.group_size

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, ``noise`` and ``gradients`` as JSON."""
        return {**dataclasses.asdict(self), "noise": self.noise, "gradients": self.gradients}


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """What a planner recommends for a compute budget.

    Attributes:
      budget: gradient evaluations per step, B.
      epsilon, delta, steps: the guarantee, and the number of steps that it covers.
      options: all options that were compared.
      best: the option with the least noise.
      median: the option that draws examples, with the median group size; None if it is not known.
      doubling: the option that draws users, with the sizes of ``estimate_and_double``.
      doubling_as_printed: as ``doubling``, with the rule as printed, for comparison.
      reason: why ``best`` is recommended, in a sentence.

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
        """Returns the fields as JSON, with each option as ``Option.to_json`` returns it."""
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
    """Returns group and cohort size (G, M) with G M <= budget, by Estimate-and-Double.

    Source: Charles et al. 2024, Algorithm 3, with a correction. As printed (``literal``), the
    algorithm compares L(2G)/L(G) with sigma(2M)/sigma(M). As sigma grows with M, the second ratio
    is above 1, and the first is not: so G would always be doubled, against the paper's text. The
    noise on the average is L(G) sigma(M) / M, so that the second ratio must be
    sigma(2M) / (2 sigma(M)).

    Args:
      sensitivity: function G -> L_ULS(G).
      noise_multiplier: function M -> sigma_ULS(M).
      budget: gradient evaluations per step, B.
      group: starting group size G_0.
      cohort: starting cohort size M_0.
      most_users: number of users N, which bounds M.
      largest_group: bound on G.
      literal: whether to use the rule as printed.

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
    """An option without its noise multiplier, and the noised sums that are accounted."""

    option: Option
    sums: NoisedSums

    def event(self, sigma: float) -> DpEvent:
        return dataclasses.replace(self.sums, noise_multiplier=sigma).event()

    @property
    def takes_all_units(self) -> bool:
        return bool(self.sums.scheme.rate >= 1.0)


class Planner:
    """Compares all options for one population, guarantee and model. Calibrations are cached.

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
        """Stores the arguments; calibrations are made on demand.

        Args:
          users: statistics of the training set's users.
          sensitivities: typical gradient norms.
          epsilon: target over all steps.
          delta: delta of the target.
          steps: number of steps T.
          example_group: median group size for ELS, such as a private median; None: the median of
            ``users.sizes``.
          workload: what the optimiser makes of gradients; if learning rates differ, it must have
            T of them.
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
        """Returns a calibrated candidate with these sizes.

        Args:
          kind: kind of the candidate, from ``planning.candidates``.
          group: most examples of a user per step; if examples are drawn, in the whole run.
          size: expected examples or users per step.
          epsilon: epsilon of the guarantee; None: the planner's.

        Raises:
          BadInputError: there are fewer units than ``size``, no noise reaches epsilon, or the
            candidate is the same mechanism as the plain one.
        """
        option = self.try_option(kind, group, size, epsilon)
        if option is None:
            raise BadInputError(
                f"with {size} units per step, {CANDIDATES[kind].name} is the same mechanism as "
                f"{CANDIDATES[plain(draws_examples(kind))].name}: take that, or fewer units"
            )
        return option

    def try_option(
        self, kind: str, group: int, size: int, epsilon: float | None = None
    ) -> Option | None:
        """Returns ``option``, or None if the candidate is the same mechanism as the plain one."""
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
        """A candidate that is slow to calibrate, at the sizes where the plain one is best.

        If it loses by more than a coarse calibration overstates its noise, the coarse one will do.
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
        """A candidate with its best number of bands; None if it is the same as the plain one."""
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
                f"{size} per step cannot be drawn from {units} {what}: lower the compute "
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
        """Returns ULS at every known group size and these cohort sizes, up to the population."""
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
        """Compares the ways to spend a budget, and recommends the one with the least noise.

        Args:
          budget: gradient evaluations per step, B.
          example_groups: group sizes to compare if examples are drawn; None: all possible ones.
          every: whether to compare all candidates, not only the plain ones. Candidates that are
            slow to calibrate are compared only at the sizes where the plain one has the least
            noise, and only to 2.5 % if they cannot win.

        Raises:
          BadInputError: the budget cannot be spent on these users.
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
                f"a budget of {budget} gradients per step cannot be spent on "
                f"{self.users.num_users} users: lower it, or allow larger groups"
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
        """Returns the pairs (G, size) that spend a budget."""
        if draws_examples(kind):
            groups = self.users.groups() if example_groups is None else example_groups
            return [(group, budget) for group in groups if budget <= self.users.left(group)]
        pairs = [(group, budget // group) for group in sorted(self.sensitivities.user)]
        return [(group, size) for group, size in pairs if 1 <= size <= self.users.num_users]

    def _median(self, budget: int) -> Option | None:
        """ELS at the median group size; None if it is not known, or leaves too few examples."""
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
        """Returns the smallest epsilon at which an option has this noise, and that option.

        Raises:
          BadInputError: no option has a finite epsilon with so little noise.
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
        """Returns the smallest power-of-two budget that gives this noise within the target.

        Raises:
          BadInputError: no budget reaches it.
        """

        def fits(power: int) -> Option | None:
            options = self._with_noise(noise, 2**power)
            return next((o for o in options if self.epsilon_of(o) <= self.epsilon), None)

        # More compute never needs more epsilon, so that bisection over the powers works.
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
        """The plain options at this budget, with the noise multipliers that give this noise."""
        positive("the target noise", noise)
        options = [
            dataclasses.replace(option, noise_multiplier=noise * option.size / option.sensitivity)
            for kind, candidate in CANDIDATES.items()
            if candidate.is_plain
            for cell in self.cells(kind, budget)
            for option in [self._sized(kind, *cell).option]
        ]
        if not options:
            raise BadInputError(
                f"a budget of {budget} gradients per step cannot be spent on these users: lower it"
            )
        return options

    def epsilon_of(self, option: Option) -> float:
        """Returns epsilon for an option's noise multiplier; infinity if there is no bound."""
        bands = option.bands if CANDIDATES[option.kind].bands else None
        run = self._sized(option.kind, option.group_size, option.size, bands)
        event = run.event(option.noise_multiplier)
        try:
            return accounting.epsilon(event, self.delta)
        except BadInputError:  # far too little noise for any guarantee
            return math.inf

    def users_at_overtake(self, budget: int, example_group: int, most: int = 2**30) -> int | None:
        """Returns the number of users from which ELS has no more noise than ULS; None if no number.

        More users help ELS more, and more compute helps ULS more (Charles et al. 2024, Figure 8).

        Args:
          budget: gradient evaluations per step.
          example_group: number of examples of each user.
          most: largest number of users to try.
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
            except BadInputError:  # with so many users hardly any is ever drawn: no noise is needed
                return None
            count *= 4
        return None


def in_words(cell: dict[str, Any]) -> str:
    """Returns a cell (an option or a trial, as JSON) in words."""
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
