"""The privacy cost of a federation for a subject, and the noise that a target epsilon needs.

A subject's records may be in J silos, whose privacy losses compose (Marathe et al., "Subject
Granular Differential Privacy in Federated Learning", Theorem 3.12: averaging hides nothing in the
worst case). Which silos take part in a round is public, so that drawing silos gives no
amplification here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import dp_accounting

from dpfl_jax import accounting
from dpfl_jax.accounting import events
from dpfl_jax.accounting.accountant import rough_epsilon
from dpfl_jax.accounting.calibrate import noise_ahead, noise_near
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.federation import Federation, SiloPlan

Mode = Literal["per_silo", "common"]

# With more kinds of silos than this, silos are put into classes (cells of a geometric grid) before
# they are composed. Each silo is accounted with the largest probability and the least noise of its
# class, which can only overstate the cost. Silos that are not composed are accounted as they are.
_MOST_KINDS = 64
_GRID = 1.01
# Relative tolerance of the noise with classes, a tenth of what the classes cost; and how many silos
# are sampled for a first guess.
_GRID_NOISE, _SAMPLED = 5e-4, 16


@dataclasses.dataclass(frozen=True)
class _Profile:
    """What a silo's event depends on. The cost grows with every field, and falls with sigma."""

    plan: SiloPlan
    sampling_prob: float
    cap: int
    sigma: float
    steps: int

    @classmethod
    def of(cls, plan: SiloPlan) -> _Profile:
        participation = plan.mechanism.participation
        return cls(
            plan,
            participation.sampling_prob_of(plan.facts),
            participation.max_records_per_subject,
            plan.sigma,
            plan.local_steps,
        )

    @property
    def key(self) -> tuple[float, int, float, int]:
        return (self.sampling_prob, self.cap, self.sigma, self.steps)

    def event(self, rounds: int, subject: bool) -> Any:
        mechanism = self.plan.mechanism
        participation = mechanism.participation.at_sampling_prob(self.sampling_prob, self.cap)
        plan = dataclasses.replace(
            self.plan,
            mechanism=dataclasses.replace(mechanism, participation=participation),
            local_steps=self.steps,
            noise_multiplier=self.sigma if mechanism.private else None,
        )
        return plan.event(rounds, "subject" if subject else None)


def _joint_event(profiles: Sequence[_Profile], rounds: int, subject: bool) -> Any:
    """The event of all these silos together; equal silos share one event object."""
    kinds = {p.key: p for p in profiles}
    made = {key: p.event(rounds, subject) for key, p in kinds.items()}
    return events.horizontal([made[p.key] for p in profiles])


def _coarse(profiles: list[_Profile]) -> list[_Profile]:
    if len({p.key for p in profiles}) <= _MOST_KINDS:
        return profiles

    def cell(x: float) -> int:
        return math.floor(math.log(x) / math.log(_GRID)) if x > 0 else -(10**9)

    names = [(cell(p.sampling_prob), p.cap, cell(p.sigma), p.steps) for p in profiles]
    classes: dict[Any, list[_Profile]] = {}
    for name, p in zip(names, profiles):
        classes.setdefault(name, []).append(p)
    worst = {name: _envelope(members) for name, members in classes.items()}
    return [
        dataclasses.replace(p, sampling_prob=worst[name].sampling_prob, sigma=worst[name].sigma)
        for name, p in zip(names, profiles)
    ]


def _is_chain(profiles: Sequence[_Profile]) -> bool:
    """Whether every field falls from each profile to the next (sigma rises)."""
    return all(
        a.sampling_prob >= b.sampling_prob
        and a.cap >= b.cap
        and a.sigma <= b.sigma
        and a.steps >= b.steps
        for a, b in itertools.pairwise(profiles)
    )


def _envelope(profiles: Sequence[_Profile]) -> _Profile:
    """A profile that costs at least as much as any of these."""
    return dataclasses.replace(
        profiles[0],
        sampling_prob=max(p.sampling_prob for p in profiles),
        cap=max(p.cap for p in profiles),
        sigma=min(p.sigma for p in profiles),
        steps=max(p.steps for p in profiles),
    )


def worst_cases(federation: Federation, rounds: int, subject: bool = False) -> list[list[Any]]:
    """Returns events that bound the cost of a run for one unit.

    Each inner list is a bound: the cost is at most the largest cost of its events.

    Args:
      federation: the federation, with its noise.
      rounds: number of rounds that were run.
      subject: whether to account for subjects even if the mechanism protects records.
    """
    profiles = list(map(_Profile.of, federation.members))
    if not profiles:
        raise BadInputError(
            "no silo holds any record, so that there is nothing to account for: check the data and "
            "federation sections"
        )
    for plan in (profile.plan for profile in profiles):  # personal rates must be for this run
        run = (plan.local_steps, federation.participation, plan.sigma)
        plan.mechanism.participation.check_run(*run)
    one_silo = federation.mechanism.privacy_unit == "record" and not subject
    reach = 1 if one_silo else federation.max_silos_per_subject
    # proof: silos-1
    if reach == 1:  # each unit in one silo: parallel composition
        # Among silos that differ only in probability, the one with the largest costs most.
        kinds = {p.key[1:]: p for p in sorted(profiles, key=lambda p: p.sampling_prob)}
        return [[p.event(rounds, subject) for p in kinds.values()]]
    profiles = _coarse(profiles)
    # proof: silos-2
    count = min(reach, federation.silos_per_round)
    everything = _joint_event(profiles, rounds, subject)
    if count >= len(profiles):
        return [[everything]]
    order = sorted(profiles, key=lambda p: (-p.sampling_prob, p.sigma, -p.cap, -p.steps))
    if _is_chain(order):
        return [[_joint_event(order[:count], rounds, subject)]]
    worst = _envelope(order).event(rounds, subject)
    return [[events.horizontal([worst] * count)], [everything]]


def dominating_event(federation: Federation, delta: float, subject: bool = False) -> Any:
    """Returns one event that costs at least as much as the whole run does for any unit.

    If no silo is the worst in every respect, it is the event of a silo that combines the worst of
    all. Ledgers need a single event.

    Args:
      federation: the federation, with its noise.
      delta: delta at which the ledger is read.
      subject: whether to account for subjects even if the mechanism protects records.
    """
    mechanism = federation.mechanism
    if not mechanism.private:
        return dp_accounting.NonPrivateDpEvent()
    cases = worst_cases(federation, federation.rounds, subject)
    single = [case[0] for case in cases if len(case) == 1]
    if single:
        return min(single, key=lambda event: accounting.epsilon(event, delta))
    worst = _envelope(list(map(_Profile.of, federation.members)))
    return worst.event(federation.rounds, subject)


def federated_epsilon(
    federation: Federation,
    delta: float,
    rounds: int | None = None,
    subject: bool = False,
) -> float:
    """Returns an upper bound on epsilon for one unit over the whole federation.

    It is infinite if there is no bound.

    Args:
      federation: the federation, with its noise.
      delta: in (0, 1).
      rounds: number of rounds that were run; None: all.
      subject: whether to account for subjects even if the mechanism protects records.

    Examples:
      >>> from dpfl_jax import federation as fed
      >>> facts = fed.SiloFacts(num_records=500, num_subjects=200)
      >>> mechanism = fed.local_item(sampling_prob=0.1)
      >>> silo = fed.SiloPlan(mechanism, facts, local_steps=1, noise_multiplier=1.0)
      >>> silos = fed.Federation((silo, silo), rounds=10, max_silos_per_subject=1)
      >>> round(fed.federated_epsilon(silos, delta=1e-5), 2)
      2.85
    """
    if not federation.mechanism.private:
        return math.inf
    cases = worst_cases(federation, federation.rounds if rounds is None else rounds, subject)
    return min(max(accounting.epsilon(event, delta) for event in case) for case in cases)


def subject_epsilon(federation: Federation, delta: float, rounds: int | None = None) -> float:
    """Returns ``federated_epsilon`` of a subject, ``inf`` also if no accountant bounds it."""
    try:
        return federated_epsilon(federation, delta, rounds, subject=True)
    except BadInputError:
        return math.inf


def silo_epsilons(federation: Federation, delta: float) -> list[float]:
    """Returns epsilon of one unit in each silo alone: 0 without records, inf without privacy."""
    known: dict[Any, float] = {}

    def alone(plan: SiloPlan) -> float:
        if not plan.facts.num_records:
            return 0.0
        if not plan.mechanism.private:
            return math.inf
        profile = _Profile.of(plan)
        if profile.key not in known:
            known[profile.key] = accounting.epsilon(profile.event(federation.rounds, False), delta)
        return known[profile.key]

    return list(map(alone, federation.silos))


def calibrate_federation(
    federation: Federation, epsilon: float, delta: float, mode: Mode | None = None
) -> Federation:
    """Returns a federation with noise for which no unit's epsilon exceeds the target.

    ``"per_silo"``: each silo is calibrated as if all silos of a subject were like it, so that all
    silos spend the same. Then all noise multipliers are raised by one factor until the composition
    of the real silos meets the target. ``"common"``: all silos get the same noise multiplier.

    Args:
      federation: the federation, whose noise multipliers are replaced.
      epsilon: target, > 0.
      delta: in (0, 1).
      mode: None: ``"per_silo"`` if a subject may be in only one silo or in all of them, else
        ``"common"``.

    Raises:
      BadInputError: the target is out of reach.

    Examples:
      >>> from dpfl_jax import federation as fed
      >>> facts = fed.SiloFacts(num_records=500, num_subjects=200)
      >>> silo = fed.SiloPlan(fed.local_item(sampling_prob=0.1), facts, local_steps=1)
      >>> silos = fed.Federation((silo, silo), rounds=10, max_silos_per_subject=1)
      >>> calibrated = fed.calibrate_federation(silos, epsilon=4.0, delta=1e-5)
      >>> fed.federated_epsilon(calibrated, delta=1e-5) <= 4.0
      True
    """
    if not federation.mechanism.private:
        return federation
    silos = len(federation.members)
    record = federation.mechanism.privacy_unit == "record"
    reach = 1 if record else min(federation.max_silos_per_subject, silos)
    count = min(reach, federation.silos_per_round)
    if mode is None:
        mode = "per_silo" if reach == 1 or count >= silos else "common"
    if mode == "common":

        def with_noise(x: float) -> Federation:
            return federation.with_noise([x] * len(federation.silos))

    else:
        sigmas = _noise_per_silo(federation, count, epsilon, delta)

        def with_noise(x: float) -> Federation:
            return federation.with_noise([x * sigma for sigma in sigmas])

        made = with_noise(1.0)
        if count == 1 and federated_epsilon(made, delta) <= epsilon:
            return made
    near = 1.0 if mode == "per_silo" else None
    made = with_noise(_calibrated(with_noise, epsilon, delta, near))
    # Checks the target itself, whatever the searches above did.
    assert federated_epsilon(made, delta) <= epsilon
    return made


def _calibrated(
    make: Callable[[float], Federation], epsilon: float, delta: float, near: float | None
) -> float:
    """About the smallest number whose federation meets the target, by the best of its worst cases.

    In each case, the costliest event is calibrated first. Then all events are accounted, and the
    costliest is calibrated again, until none exceeds the target.
    """

    def case(x: float, number: int) -> list[Any]:
        made = make(x)
        return worst_cases(made, made.rounds)[number]

    tolerance = 1e-5
    if near is not None and len({_Profile.of(plan).key for plan in make(1.0).silos}) > _MOST_KINDS:
        tolerance = _GRID_NOISE

        near = accounting.calibrate_noise_multiplier(
            lambda x: _sampled_event(make(x)),
            epsilon,
            delta,
            relative_tolerance=0.1 * tolerance,
            near=near,
        )
        near *= 1.0 + 0.4 * tolerance  # so that the first guess mostly meets the target

    def needed(number: int) -> float:
        start, x = case(1.0, number), 0.0
        costs = [rough_epsilon(event, delta) for event in start] if len(start) > 1 else [0.0]
        while True:
            worst = max(range(len(costs)), key=costs.__getitem__)

            def event(sigma: float, worst: int = worst) -> Any:
                return case(sigma, number)[worst]

            sigma = accounting.calibrate_noise_multiplier(
                event, epsilon, delta, relative_tolerance=tolerance, near=near
            )
            # Never lowered: by rounding, a cost can rise a little with more noise.
            x = max(sigma, x * (1.0 + 1e-6))
            costs = [accounting.epsilon(event, delta) for event in case(x, number)]
            if max(costs) <= epsilon:
                return x

    return min(needed(i) for i in range(len(worst_cases(make(1.0), make(1.0).rounds))))


def _sampled_event(federation: Federation) -> Any:
    """The event of all silos, estimated from a sample of them: NOT A BOUND, only a first guess."""
    profiles = sorted(
        _coarse(list(map(_Profile.of, federation.members))),
        key=lambda p: (p.cap, p.steps, p.sampling_prob),
    )
    ends = [round(i * len(profiles) / _SAMPLED) for i in range(_SAMPLED + 1)]
    return events.horizontal(
        [
            dp_accounting.SelfComposedDpEvent(
                profiles[(low + high) // 2].event(federation.rounds, False), high - low
            )
            for low, high in itertools.pairwise(ends)
        ]
    )


def _noise_per_silo(
    federation: Federation, copies: int, epsilon: float, delta: float
) -> list[float]:
    """Noise of each silo if a subject were in ``copies`` silos like it; certified for one copy."""
    members = set(federation.participants.tolist())
    start = federation.with_noise([1.0] * len(federation.silos))
    profiles = _coarse([_Profile.of(start.silos[i]) for i in sorted(members)])
    by_silo = dict(zip(sorted(members), profiles))
    known: dict[Any, float] = {}
    kinds = {profile.key: profile for profile in profiles}
    # Silos in classes of a grid need no finer tolerance.
    tolerance = 1e-5 if len(kinds) <= _MOST_KINDS else 1e-4
    solved: dict[Any, list[tuple[float, float]]] = {}
    for profile in sorted(kinds.values(), key=lambda p: (p.cap, p.steps, p.sampling_prob)):

        def event(sigma: float, profile: _Profile = profile) -> Any:
            event = dataclasses.replace(profile, sigma=sigma).event(federation.rounds, False)
            return event if copies == 1 else dp_accounting.SelfComposedDpEvent(event, copies)

        before = solved.setdefault((profile.cap, profile.steps), [])
        near = noise_ahead(before, profile.sampling_prob)
        if copies > 1:
            sigma = noise_near(event, epsilon, delta, near=near)
        else:
            sigma = accounting.calibrate_noise_multiplier(
                event, epsilon, delta, relative_tolerance=tolerance, near=near
            )
        known[profile.key] = sigma
        before.append((profile.sampling_prob, sigma))
    largest = max(known.values())
    return [known[by_silo[i].key] if i in members else largest for i in range(len(start.silos))]
