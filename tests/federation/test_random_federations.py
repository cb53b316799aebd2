"""Random federations: what is stated is at most the target, and never below a recomputation.

The recomputation is written from the definitions and shares no code with the accountant: outputs
are cut into cells (post-processing), losses rounded down, and convolved: a lower bound.
"""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import special, stats

from dpfl_jax.accounting import epsilon
from dpfl_jax.accounting.rates import TwoStage
from dpfl_jax.federation.accountant import (
    calibrate_federation,
    dominating_event,
    federated_epsilon,
    silo_epsilons,
)
from dpfl_jax.federation.data import ArrayRecords, FederatedData
from dpfl_jax.federation.federation import Federation, SiloPlan
from dpfl_jax.federation.mechanisms import (
    PRESETS,
    fed_avg,
    hi_grad_avg,
    local_group,
    local_item,
    rpdp,
    subject_uls,
    user_ldp,
)
from dpfl_jax.federation.participation import SiloFacts
from dpfl_jax.federation.personal import RATE_POLICIES, BudgetTable, assign, with_setting
from dpfl_jax.sampling import FixedSize, Poisson

DELTA, GRID, SIZE = 1e-5, 2.5e-4, 1 << 18


def contributions(plan, batch, cap):
    """How far one unit moves a silo's sum, in clip norms, with which probabilities."""
    q = min(1.0, batch / plan.facts.num_records)
    mechanism = PRESETS[plan.mechanism.kind]
    if mechanism is local_item:
        return [0, 1], [1 - q, q]
    if mechanism is hi_grad_avg:
        return [0, 1], [(1 - q) ** cap, 1 - (1 - q) ** cap]
    if mechanism is local_group:
        counts = np.arange(cap + 1)
        return counts, stats.binom.pmf(counts, cap, q)
    if mechanism is subject_uls:
        q = min(1.0, batch / plan.facts.num_subjects)
        return [0, 1], [1 - q, q]
    assert mechanism is user_ldp
    return [2], [1.0]


def spectrum(sigma, shifts, weights):
    """Of the loss of removing the unit at one step, rounded down to the grid."""
    edges = np.linspace(-9 * sigma, 9 * sigma + max(shifts), 8001)
    cells = [np.diff(special.ndtr((edges - shift) / sigma)) for shift in (0.0, *shifts)]
    without, present = cells[0], np.tensordot(weights, cells[1:], 1)
    kept = (without > 1e-30) & (present > 1e-30)
    losses = np.maximum(np.log(present[kept] / without[kept]), -25.0)
    index = np.minimum(np.floor(losses / GRID), SIZE // 2).astype(int) % SIZE
    return np.fft.rfft(np.bincount(index, present[kept], SIZE))


def epsilon_of(whole):
    """The epsilon of a spectrum: never above the true one."""
    law = np.fft.irfft(whole, SIZE)
    law = np.where(law > 1e-13, law, 0.0)
    losses = np.fft.fftfreq(SIZE, 1.0 / SIZE) * GRID

    def delta(epsilon):
        above = losses > epsilon
        return float(law[above] @ -np.expm1(epsilon - losses[above]))

    low, high = 0.0, 25.0
    if delta(low) <= DELTA:
        return 0.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if delta(middle) > DELTA else (low, middle)
    return low


def lower_bound(parts):
    """Epsilon of removing a unit from silos given as (sigma, shifts, weights, steps)."""
    whole, known = 1.0, {}
    for sigma, shifts, weights, steps in parts:
        key = (sigma, tuple(shifts), tuple(weights))
        if key not in known:
            known[key] = spectrum(sigma, shifts, np.asarray(weights))
        whole = whole * known[key] ** steps
    return epsilon_of(whole)


def check(make, sizes, steps, batch, cap, rounds, reach, target, mode=None, cohort=None):
    plans = tuple(
        SiloPlan(
            make(batch_size=batch, max_records_per_subject=cap),
            SiloFacts(size, max(size // 2, 1)),
            step,
        )
        for size, step in zip(sizes, steps, strict=True)
    )
    made = calibrate_federation(Federation(plans, rounds, reach, cohort), target, DELTA, mode)
    stated = federated_epsilon(made, DELTA)
    assert stated <= target
    assert max(silo_epsilons(made, DELTA)) <= stated * (1 + 1e-6)
    assert epsilon(dominating_event(made, DELTA), DELTA) >= stated * (
        1 - 1e-6
    )  # what a ledger is told
    silos = [
        (plan.sigma, *contributions(plan, batch, cap), plan.local_steps * rounds)
        for plan in made.silos
    ]
    if make is local_item or reach == 1:
        ones = {(s[0], tuple(s[1]), tuple(s[2]), s[3]): s for s in silos}
        # The silos that spend most, by a rough measure, and some others.
        order = sorted(ones.values(), key=lambda s: -s[3] * (np.dot(s[1], s[2]) / s[0]) ** 2)
        truth = max(lower_bound([silo]) for silo in (order[:3] + order[3::9]))
    else:
        order = sorted(silos, key=lambda s: -s[3] * (np.dot(s[1], s[2]) / s[0]) ** 2)
        # Who takes part is visible: the rounds may be those in which the costliest take part.
        together = cohort.size if isinstance(cohort, FixedSize) else len(sizes)
        truth = lower_bound(order[: min(reach, together)])
    assert stated >= truth * (1 - 1e-6)
    return stated, truth


@st.composite
def federations(draw, kinds):
    number = draw(st.integers(1, 60))
    choices = draw(st.lists(st.integers(20, 3000), min_size=1, max_size=kinds))
    sizes = [draw(st.sampled_from(choices)) for _ in range(number)]
    taken = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    steps = [taken[size % len(taken)] for size in sizes]
    return {
        "make": draw(
            st.sampled_from([local_item, hi_grad_avg, local_group, subject_uls, user_ldp])
        ),
        "sizes": sizes,
        "steps": steps,
        "batch": draw(st.sampled_from([8, 32])),
        "cap": draw(st.integers(1, 4)),
        "rounds": draw(st.integers(1, 4)),
        "reach": draw(st.one_of(st.just(1), st.just(number), st.integers(1, number))),
        "target": draw(st.sampled_from([0.5, 2.0, 4.0, 8.0])),
        "mode": draw(st.sampled_from([None, "per_silo", "common"])),
        "cohort": draw(
            st.one_of(
                st.none(),
                st.builds(FixedSize, st.integers(1, number)),
                st.builds(Poisson, st.sampled_from([0.2, 0.7])),
            )
        ),
    }


def check_personal(silos, records, budgets, policy, setting):
    """Every record's own epsilon, of the rates that its silo's mechanism draws it with."""
    rng = np.random.default_rng(records)
    budgets = rng.choice(budgets, records)
    made = assign(policy, budgets, budgets, setting, "exclude")
    number = np.arange(records)
    data = FederatedData.from_assignment(
        ArrayRecords({"x": np.zeros((records, 1), np.float32)}),
        number, rng.integers(0, silos, records), silos,
    )  # fmt: skip
    made = dataclasses.replace(made, rates=made.rates[data.order], stay=made.stay[data.order])
    budgets = budgets[data.order]
    plans = tuple(SiloPlan(rpdp(), SiloFacts.of(silo), setting.local_steps) for silo in data.silos)
    prob = setting.participation_prob
    cohort = Poisson(prob) if prob < 1 else None
    federation = Federation(plans, setting.rounds, 1, cohort)
    federation = with_setting(federation, setting, [1.0] * silos)
    data = data.with_rates(made.rates, made.stay)
    federation.check(data)
    where = np.repeat(np.arange(silos), np.diff(data.silo_offsets))
    names = tuple(str(i) for i in data.order)
    stated = BudgetTable(setting, budgets, made, where, names).check(setting.rounds)
    assert np.all(stated <= budgets)
    run = np.concatenate(
        [[silo.at_round(r).rates for r in range(setting.rounds)] for silo in data.silos],
        axis=1,
    )
    ratios, most = [], 0.0
    for column in np.unique(np.vstack([run, stated]), axis=1).T:
        used, own = column[:-1], column[-1]
        whole = 1.0
        for rate in used[used > 0]:
            steps = spectrum(setting.noise_multiplier, [0, 1], np.array([1 - rate, rate]))
            whole = whole * (1 - prob + prob * steps**setting.local_steps)
        truth = epsilon_of(whole) if (used > 0).any() else 0.0
        assert own >= truth * (1 - 1e-6)
        most = max(most, truth)
        ratios.append(truth / own if own > 0.05 else 1.0)
    assert federated_epsilon(federation, DELTA) >= most
    return min(ratios)


@st.composite
def personal_federations(draw, most):
    return {
        "silos": draw(st.integers(1, 60)),
        "records": draw(st.integers(1, 200)),
        "budgets": draw(st.lists(st.floats(0.05, 9.0), min_size=1, max_size=most)),
        "policy": draw(st.sampled_from(RATE_POLICIES)),
        "setting": TwoStage(
            draw(st.floats(2.0, 12.0)),
            draw(st.integers(1, 12)),
            draw(st.integers(1, 6)),
            draw(st.sampled_from([0.25, 0.6, 1.0])),
            DELTA,
        ),
    }


OPTIONS = {"derandomize": True, "deadline": None, "database": None}
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.slow
@settings(max_examples=5, suppress_health_check=SLOW, **OPTIONS)
@given(federations(kinds=3))
def test_stated_lies_between_the_truth_and_the_target(federation):
    check(**federation)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=SLOW, **OPTIONS)
@given(federations(kinds=60))
def test_stated_lies_between_the_truth_and_the_target_for_many(federation):
    check(**federation)


@pytest.mark.parametrize(
    ("make", "reach"),
    [(hi_grad_avg, 1), (local_item, 2), (local_group, 1), (subject_uls, 1), (user_ldp, 1)],
)
def test_every_mechanism_is_priced_tightly(make, reach):
    """The recomputation is no idle bound: it comes within 2 % of what is stated."""
    stated, truth = check(make, [300, 900, 50], [2, 3, 1], 16, 3, 5, reach, 3.0, "common")
    assert truth >= 0.98 * stated


@pytest.mark.slow
@pytest.mark.parametrize("make", [hi_grad_avg, user_ldp])
def test_more_kinds_than_are_composed_exactly_state_no_more_than_was_asked_for(make):
    sizes = [60 + 37 * i for i in range(26)]
    stated, truth = check(make, sizes, [1 + i % 2 for i in range(26)], 32, 2, 3, 1, 4.0)
    assert truth >= 0.97 * stated


def test_a_baseline_has_no_epsilon():
    plan = SiloPlan(fed_avg(batch_size=8), SiloFacts(100, 50), 1)
    assert federated_epsilon(Federation((plan,) * 3, 2, 1), DELTA) == math.inf


@settings(max_examples=3, suppress_health_check=SLOW, **OPTIONS)
@given(personal_federations(most=2))
def test_every_record_is_told_no_less_than_its_epsilon(federation):
    check_personal(**federation)


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=SLOW, **OPTIONS)
@given(personal_federations(most=8))
def test_every_record_of_many_federations_is_told_no_less_than_its_epsilon(federation):
    check_personal(**federation)


@pytest.mark.parametrize("prob", [0.6, 1.0])
def test_personal_epsilons_are_tight(prob):
    setting = TwoStage(3.0, 8, 5, prob, DELTA)
    assert check_personal(4, 30, [0.7, 2.0, 5.0], "certified", setting) >= 0.97
