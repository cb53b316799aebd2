"""The planner: noise on the averaged gradient, for every way to spend a compute budget.

A budget B is the expected number of gradient evaluations a step: ELS spends it on B examples, ULS
on M users of G examples. The noise on the average has standard deviation L_ELS sigma_ELS / B, or
L_ULS(G) sigma_ULS(M) / M (Charles et al. 2024, equations (5) and (6)).

BandMF spends it as ULS does, on noise that later steps take back. An optimiser adds up gradients,
so what is compared is the noise in their prefix sums, root mean square over the steps: of
independent noise that is sqrt((T + 1) / 2) times a step's, whatever the algorithm. BLT and banded
inverse take back more, of more noise: their users' turns are not sampled. The noise of an option is
that of a step of independent noise with the same prefix sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from dpfl_jax import accounting
from dpfl_jax.accounting import events
from dpfl_jax.accounting.calibrate import noise_near
from dpfl_jax.errors import BadInputError
from dpfl_jax.matrices import (
    PREFIX_SUMS,
    Workload,
    buffered_column,
    buffered_error,
    buffered_strategy,
    inverse_column,
    inverse_error,
    inverse_strategy,
    prefix_error,
    strategy,
)
from dpfl_jax.planning.estimates import Sensitivities

BUFFERS = 2  # of BLT, its default
BANDS = 3  # of banded inverse, likewise: as much memory
# More are seldom worth their memory: 8 (b - 1) bytes for each trained parameter.
MOST_BANDS = 32


@dataclasses.dataclass(frozen=True)
class Users:
    """Summary statistics of a training set; no data.

    Attributes:
      num_users: N.
      sizes: int [N], examples of each user; or None.
      limited: {G: examples left with at most G a user}, where ``sizes`` are not known.
    """

    num_users: int
    sizes: np.ndarray | None = None
    limited: dict[int, int] | None = None

    def __post_init__(self) -> None:
        """Validates."""
        if self.num_users < 1:
            raise BadInputError(f"the number of users is {self.num_users}, but it must be positive")

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
        """ELS group sizes that can be priced: known ones, or powers of two up to the largest."""
        if self.sizes is None:
            return sorted(self.limited or {})
        top = int(self.sizes.max(initial=1))
        return [2**k for k in range(int(math.log2(top)) + 1)]


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to spend the budget.

    Attributes:
      kind: "els", "uls", "bandmf", "blt", "banded_inverse" or "allocation".
      group_size: G.
      size: expected examples (ELS) or users (ULS) a step.
      sampling_prob: of each example or user.
      noise_multiplier: sigma.
      sensitivity: L, the typical gradient norm.
      bands: b of BandMF and banded inverse; else 1.
      error: of prefix sums, by independent noise of the same multiplier; else 1.
      noise: standard deviation of the noise on the averaged gradient, per coordinate (of
        independent noise with the same error in prefix sums).
    """

    kind: Literal["els", "uls", "bandmf", "blt", "banded_inverse", "allocation"]
    group_size: int
    size: int
    sampling_prob: float
    noise_multiplier: float
    sensitivity: float
    bands: int = 1
    error: float = 1.0

    @property
    def noise(self) -> float:
        """L sigma error / size."""
        return self.sensitivity * self.noise_multiplier * self.error / self.size

    @property
    def gradients(self) -> int:
        """Gradient evaluations of a unit."""
        return 1 if self.kind == "els" else self.group_size

    def to_json(self) -> dict[str, Any]:
        """Fields, the noise, and gradient evaluations of a unit."""
        return {**dataclasses.asdict(self), "noise": self.noise, "gradients": self.gradients}


@dataclasses.dataclass(frozen=True)
class Plan:
    """An answer.

    Attributes:
      budget: B.
      epsilon, delta, steps: of the guarantee.
      options: all that were priced.
      best: of least noise.
      heuristic_els: median group size, if known.
      heuristic_uls: Estimate-and-Double.
      literal_uls: Estimate-and-Double as printed, for comparison.
      reason: why ``best``, in a sentence.
    """

    budget: int
    epsilon: float
    delta: float
    steps: int
    options: list[Option]
    best: Option
    heuristic_els: Option | None
    heuristic_uls: Option
    literal_uls: Option
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "budget": self.budget,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "steps": self.steps,
            "best": self.best.to_json(),
            "heuristic_els": None if self.heuristic_els is None else self.heuristic_els.to_json(),
            "heuristic_uls": self.heuristic_uls.to_json(),
            "literal_uls": self.literal_uls.to_json(),
            "reason": self.reason,
            "options": [option.to_json() for option in self.options],
        }


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


class Planner:
    """Prices every option for one population, guarantee and model; calibrations are kept."""

    def __init__(
        self,
        users: Users,
        sensitivities: Sensitivities,
        *,
        epsilon: float,
        delta: float,
        steps: int,
        els_group: int | None = None,
        workload: Workload = PREFIX_SUMS,
    ) -> None:
        """Prepares; nothing is calibrated yet.

        Args:
          users: what is known of the training set.
          sensitivities: typical gradient norms.
          epsilon: target over all steps.
          delta: of the target.
          steps: T.
          els_group: ELS's group size by the median heuristic, if it was found otherwise than from
            ``users.sizes`` (a private median).
          workload: what an optimiser makes of noise, with rates of T steps if they differ.
        """
        self.els_group, self.workload = els_group, workload
        if steps < 1:
            raise BadInputError(f"the number of steps is {steps}, but at least 1 is needed")
        self.users, self.sensitivities = users, sensitivities
        self.epsilon, self.delta, self.steps = epsilon, delta, steps
        self._uls: dict[tuple[int, float], float] = {}
        self._els: dict[tuple[int, int, float], float] = {}
        self._bandmf: dict[tuple[int, int], float] = {}

    # ---- single options --------------------------------------------------------------------

    def uls_noise_multiplier(self, cohort: int, epsilon: float | None = None) -> float:
        """sigma_ULS(M)."""
        epsilon = self.epsilon if epsilon is None else epsilon
        known = (cohort, epsilon)
        if known not in self._uls:
            prob = self._probability(cohort, self.users.num_users, "users")
            self._uls[known] = accounting.calibrate_noise_multiplier(
                lambda s: events.uls(s, prob, self.steps), epsilon, self.delta
            )
        return self._uls[known]

    def uls(self, group: int, cohort: int, epsilon: float | None = None) -> Option:
        """ULS with G examples of M users.

        Raises:
          BadInputError: more users than there are, or an epsilon that no noise reaches.
        """
        sigma = self.uls_noise_multiplier(cohort, epsilon)
        prob = cohort / self.users.num_users
        return Option("uls", group, cohort, prob, sigma, self.sensitivities.at(group))

    def bandmf(self, group: int, cohort: int) -> Option | None:
        """BandMF with G examples of M users, at the best number of bands; None if that is one.

        Raises:
          BadInputError: as ``uls``.
        """
        bands = self._bands(cohort)
        if bands == 1:
            return None
        prob, column = bands * cohort / self.users.num_users, self._strategy(bands)
        known = (bands, cohort)
        if known not in self._bandmf:
            self._bandmf[known] = accounting.calibrate_noise_multiplier(
                lambda s: events.banded(s, prob, column, self.steps), self.epsilon, self.delta
            )
        return self._banded(group, cohort, bands, self._bandmf[known])

    def _bands(self, cohort: int) -> int:
        """The power of two of least noise, about: by rough noises."""
        rough: dict[int, float] = {}
        most = min(self.steps, self.users.num_users // cohort, MOST_BANDS)
        while (bands := 2 ** len(rough)) <= most:
            column, prob = self._strategy(bands), bands * cohort / self.users.num_users
            try:
                sigma = noise_near(
                    lambda s, c=column, p=prob: events.banded(s, p, c, self.steps),  # type: ignore[misc]
                    self.epsilon,
                    self.delta,
                )
            except BadInputError:
                break
            rough[bands] = sigma * prefix_error(column, self.steps, self.workload)
        return min(rough, key=lambda b: rough[b], default=1)

    def _strategy(self, bands: int) -> tuple[float, ...]:
        return strategy(bands, self.steps, self.workload)

    def _banded(self, group: int, cohort: int, bands: int, sigma: float) -> Option:
        norm, prob = self.sensitivities.at(group), bands * cohort / self.users.num_users
        error = prefix_error(self._strategy(bands), self.steps, self.workload)
        return Option("bandmf", group, cohort, prob, sigma, norm, bands, error)

    def of_users(self, kind: str, group: int, cohort: int) -> Option | None:
        """Any mechanism that draws users; None if it would be no other than ULS.

        Args:
          kind: "uls", "bandmf", "blt", "banded_inverse" or "allocation".
          group: G.
          cohort: M.

        Raises:
          BadInputError: as ``uls``.
        """
        if kind in ("blt", "banded_inverse"):
            return self.in_turns(kind, group, cohort)  # type: ignore[arg-type]
        alone = {"uls": self.uls, "bandmf": self.bandmf, "allocation": self.allocation}
        return alone[kind](group, cohort)

    def in_turns(
        self, kind: Literal["blt", "banded_inverse"], group: int, cohort: int
    ) -> Option | None:
        """BLT or banded inverse with G examples of M users; None if everybody is in every step.

        Raises:
          BadInputError: as ``uls``.
        """
        separation = self._once_in(cohort)
        if separation < 2:
            return None
        alone = accounting.calibrate_noise_multiplier(
            lambda s: events.gaussian(s, 1), self.epsilon, self.delta
        )
        norm = self.sensitivities.at(group)
        column, error = self._taken_back(kind, separation)
        moved = events.toeplitz(1.0, column, separation, self.steps).noise_multiplier
        bands = BANDS if kind == "banded_inverse" else 1
        return Option(kind, group, cohort, 1 / separation, alone / moved, norm, bands, error)

    def _once_in(self, cohort: int) -> int:
        """Steps of which a user is in one, where M users are expected in each."""
        return round(self.users.num_users / cohort)

    def _taken_back(self, kind: str, separation: int) -> tuple[np.ndarray, float]:
        """First column of the noise's matrix, and the error that it leaves in prefix sums."""
        if kind == "blt":
            buffers = buffered_strategy(BUFFERS, self.steps, separation, self.workload)
            error = buffered_error(buffers, self.steps, self.workload)
            return buffered_column(buffers, self.steps), error
        taken = inverse_strategy(BANDS, self.steps, separation, self.workload)
        error = inverse_error(taken, self.steps, self.workload)
        return inverse_column(taken, self.steps), error

    def allocation(self, group: int, cohort: int) -> Option | None:
        """Random allocation of G examples of M users; None if everybody is in every step.

        Raises:
          BadInputError: as ``uls``.
        """
        once_in = self._once_in(cohort)
        if once_in < 2:
            return None
        sigma = accounting.calibrate_noise_multiplier(
            lambda s: events.allocated(s, once_in, self.steps),
            self.epsilon,
            self.delta,
            near=self.uls_noise_multiplier(cohort),
        )
        norm = self.sensitivities.at(group)
        return Option("allocation", group, cohort, 1 / once_in, sigma, norm)

    def els(self, group: int, batch: int, epsilon: float | None = None) -> Option:
        """ELS with B examples, at most G of a user in the whole run."""
        epsilon = self.epsilon if epsilon is None else epsilon
        left = self.users.left(group)
        prob = self._probability(batch, left, f"examples left with at most {group} a user")
        known = (group, batch, epsilon)
        if known not in self._els:
            self._els[known] = accounting.calibrate_noise_multiplier(
                lambda s: events.els(s, prob, group, self.steps), epsilon, self.delta
            )
        return Option("els", group, batch, prob, self._els[known], self.sensitivities.example)

    def _probability(self, size: int, population: int, what: str) -> float:
        if size < 1:
            raise BadInputError(
                f"the compute budget pays for {size} a step, less than one: raise it"
            )
        if size > population:
            raise BadInputError(
                f"{size} a step cannot be drawn from {population} {what}: lower the compute "
                "budget, or raise the group size"
            )
        return size / population

    def heat_map(self, cohorts: Sequence[int]) -> list[Option]:
        """ULS at every known group size and these cohorts, whatever it costs: G M varies.

        Args:
          cohorts: numbers of users a step; those above the population are left out.
        """
        return [
            self.uls(group, cohort)
            for group in sorted(self.sensitivities.user)
            for cohort in cohorts
            if 1 <= cohort <= self.users.num_users
        ]

    # ---- plans -----------------------------------------------------------------------------

    def plan(
        self, budget: int, *, els_groups: Sequence[int] | None = None, every: bool = False
    ) -> Plan:
        """Prices all (G, M) with G M = B, powers of two, and ELS at all group sizes.

        Args:
          budget: B, gradient evaluations a step.
          els_groups: ELS group sizes; default all that can be priced.
          every: whether BandMF, BLT and banded inverse are priced, too, at every (G, M), and
            random allocation, which takes seconds, where ULS has the least noise.
        """
        if budget < 1:
            raise BadInputError(
                f"the compute budget is {budget}, less than one gradient a step: raise it"
            )
        options: list[Option] = []
        for group in sorted(self.sensitivities.user):
            cohort = budget // group
            if cohort >= 1 and cohort <= self.users.num_users:
                kinds = ("uls", "bandmf", "blt", "banded_inverse") if every else ("uls",)
                made = [self.of_users(kind, group, cohort) for kind in kinds]
                options += [option for option in made if option is not None]
        if every and options:
            uls = min((o for o in options if o.kind == "uls"), key=lambda o: o.noise)
            allocated = self.allocation(uls.group_size, uls.size)
            options += [] if allocated is None else [allocated]
        for group in self.users.groups() if els_groups is None else els_groups:
            if budget <= self.users.left(group):
                options.append(self.els(group, budget))
        if not options:
            raise BadInputError(
                f"no way to spend a budget of {budget} a step on {self.users.num_users} users: "
                "lower it, or allow larger groups"
            )
        largest = max(self.sensitivities.user)
        pair = [
            estimate_and_double(
                self.sensitivities.at,
                self.uls_noise_multiplier,
                budget,
                most_users=self.users.num_users,
                largest_group=largest,
                literal=literal,
            )
            for literal in (False, True)
        ]
        heuristic, literal = (self.uls(*found) for found in pair)
        els = None if els_groups is not None and not els_groups else self._median_els(budget)
        best = min(options, key=lambda option: option.noise)
        return Plan(
            budget,
            self.epsilon,
            self.delta,
            self.steps,
            options,
            best,
            els,
            heuristic,
            literal,
            _reason(best, options),
        )

    def _median_els(self, budget: int) -> Option | None:
        if self.els_group is not None:
            group = self.els_group
            return None if budget > self.users.left(group) else self.els(group, budget)
        if self.users.sizes is None:
            known = self.users.groups()
            if len(known) != 1 or budget > self.users.left(known[0]):
                return None
            return self.els(known[0], budget)
        from dpfl_jax.planning.estimates import median_group_size

        group = median_group_size(self.users.sizes)
        return None if budget > self.users.left(group) else self.els(group, budget)

    # ---- inverse questions -----------------------------------------------------------------

    def smallest_epsilon(self, noise: float, budget: int) -> tuple[float, Option]:
        """The smallest epsilon at which some option has this noise: its noise multiplier is given.

        Raises:
          BadInputError: no option has a finite epsilon at so little noise.
        """
        found = [(self.epsilon_of(option), option) for option in self._with_noise(noise, budget)]
        epsilon, option = min(found, key=lambda pair: pair[0])
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
        found = fits(high)
        while found is not None and high - low > 1:
            middle = (low + high) // 2
            option = fits(middle)
            if option is None:
                low = middle
            else:
                high, found = middle, option
        if found is not None:
            return 2**high, found
        raise BadInputError(
            f"no compute budget brings the noise down to {noise:g} at epsilon {self.epsilon:g}: "
            "raise epsilon, or find more users"
        )

    def _with_noise(self, noise: float, budget: int) -> list[Option]:
        """Every option at this budget, with the noise multiplier that gives this noise."""
        if not (math.isfinite(noise) and noise > 0):
            raise BadInputError(f"the target noise is {noise}, but it must be finite and above 0")
        found: list[Option] = []
        for group in sorted(self.sensitivities.user):
            cohort, norm = budget // group, self.sensitivities.at(group)
            if 1 <= cohort <= self.users.num_users:
                prob = cohort / self.users.num_users
                found.append(Option("uls", group, cohort, prob, noise * cohort / norm, norm))
        norm = self.sensitivities.example
        for group in self.users.groups():
            if budget <= self.users.left(group):
                prob = budget / self.users.left(group)
                found.append(Option("els", group, budget, prob, noise * budget / norm, norm))
        if not found:
            raise BadInputError(f"there is no way to spend a budget of {budget} a step")
        return found

    def epsilon_of(self, option: Option) -> float:
        """What an option of a given noise multiplier spends; infinity where there is no bound."""
        sigma, prob = option.noise_multiplier, option.sampling_prob
        if option.kind == "els":
            event = events.els(sigma, prob, option.group_size, self.steps)
        elif option.kind in ("blt", "banded_inverse"):
            separation = round(1 / prob)
            column, _ = self._taken_back(option.kind, separation)
            event = events.toeplitz(sigma, column, separation, self.steps)
        elif option.kind == "allocation":
            event = events.allocated(sigma, round(1 / prob), self.steps)
        else:
            event = events.banded(sigma, prob, self._strategy(option.bands), self.steps)
        try:
            return accounting.epsilon(event, self.delta)
        except BadInputError:  # far too little noise for any guarantee
            return math.inf

    def users_at_overtake(self, budget: int, els_group: int, most: int = 2**30) -> int | None:
        """The number of users from which ULS (best G) no longer has less noise than ELS.

        Users are taken to be alike, with ``els_group`` examples each: ELS gains more from users,
        ULS more from compute (the paper's Figure 8). None if ULS is ahead up to ``most`` users.
        """
        count = max(2, budget)
        while count <= most:
            users = Users(count, limited={els_group: count * els_group})
            other = Planner(
                users,
                self.sensitivities,
                epsilon=self.epsilon,
                delta=self.delta,
                steps=self.steps,
            )
            try:
                uls = min(
                    other.uls(g, budget // g).noise
                    for g in self.sensitivities.user
                    if 1 <= budget // g <= count
                )
                if other.els(els_group, budget).noise <= uls:
                    return count
            except BadInputError:  # so many users that hardly anyone is ever drawn: no noise
                return None
            count *= 4
        return None


def _reason(best: Option, options: list[Option]) -> str:
    what = (
        f"{best.size} examples, at most {best.group_size} of a user in the run"
        if best.kind == "els"
        else f"{best.size} users of up to {best.group_size} examples"
    )
    where = "in sums of gradients" if any(o.error != 1 for o in options) else "on the gradient"
    text = f"{_NAMES[best.kind]} with {what} a step has the least noise {where} ({best.noise:.4g})"
    for kind, name in _NAMES.items():
        others = [o for o in options if o.kind == kind != best.kind]
        if others:
            rival = min(others, key=lambda o: o.noise)
            factor = rival.noise / best.noise
            text += f"; the best {name} (G={rival.group_size}) has {factor:.2f} times as much"
    if best.kind == "bandmf":
        text += (
            f". Its {best.bands} groups of users take turns: that needs a noise multiplier of "
            f"{best.noise_multiplier:.3g}, but later steps take back all but {best.error:.0%} of "
            "what independent noise would leave in sums of gradients"
        )
    if best.kind == "allocation":
        steps = round(1 / best.sampling_prob)
        text += f". Every user takes part in exactly one of every {steps} steps"
    if best.kind in ("blt", "banded_inverse"):
        text += (
            f". Its users take part in every {1 / best.sampling_prob:.0f}th step, and nothing is "
            f"gained by sampling: a noise multiplier of {best.noise_multiplier:.3g}, of which all "
            f"but {best.error:.0%} is taken back in sums of gradients"
        )
    return text


_NAMES = {
    "els": "ELS",
    "uls": "ULS",
    "bandmf": "BandMF",
    "blt": "BLT",
    "banded_inverse": "banded inverse",
    "allocation": "allocation",
}
