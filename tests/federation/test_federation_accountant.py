"""The accountant of federations: golden values, heterogeneous silos."""

import dataclasses

import pytest

from dpfl_jax import accounting
from dpfl_jax.accounting import accountant, events
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.accountant import (
    calibrate_federation,
    federated_epsilon,
    silo_epsilons,
    worst_cases,
)
from dpfl_jax.federation.federation import Federation, SiloPlan
from dpfl_jax.federation.mechanisms import hi_grad_avg, local_group, local_item, subject_uls
from dpfl_jax.federation.participation import SiloFacts
from dpfl_jax.sampling import FixedSize

DELTA = 1e-5


def uniform(make, records, silos, steps, rounds, reach=None, cohort=None, **kwargs):
    sigma = kwargs.pop("noise_multiplier", None)
    facts = SiloFacts(records, max(records // 10, 1))
    plan = SiloPlan(make(**kwargs), facts, steps, noise_multiplier=sigma)
    return Federation((plan,) * silos, rounds, silos if reach is None else reach, cohort)


@pytest.mark.parametrize(
    ("make", "reach", "golden"),
    [
        (hi_grad_avg, 4, 8.555),
        (local_group, 4, 9.875),
        (hi_grad_avg, 1, 4.3715),
        (local_group, 1, 5.0706),
    ],
)
def test_golden_noise_of_a_federation(make, reach, golden):
    """n_i=2000, B=64, K=10, T=20, R=10, 4 silos, (4, 1e-5): composed over 4 silos, and over one."""
    federation = uniform(make, 2000, 4, 20, 10, reach, batch_size=64, max_records_per_subject=10)
    made = calibrate_federation(federation, 4.0, DELTA)
    sigmas = {plan.sigma for plan in made.silos}
    assert len(sigmas) == 1
    assert sigmas.pop() == pytest.approx(golden, rel=1e-3)
    assert federated_epsilon(made, DELTA) <= 4.0
    assert max(silo_epsilons(made, DELTA)) <= 4.0
    assert federated_epsilon(made, DELTA, rounds=5) < federated_epsilon(made, DELTA)


def test_local_item_protects_records_and_its_subjects_pay_more():
    federation = uniform(local_item, 2000, 4, 20, 10, batch_size=64, max_records_per_subject=10)
    made = calibrate_federation(federation, 4.0, DELTA)
    assert made.silos[0].sigma == pytest.approx(0.879, rel=2e-3)
    assert federated_epsilon(made, DELTA) <= 4.0
    assert federated_epsilon(made, DELTA, subject=True) > 15 * 4.0


def heterogeneous(sizes, reach, cohort=None, make=hi_grad_avg, **kwargs):
    plans = tuple(
        SiloPlan(
            make(batch_size=32, max_records_per_subject=1 + i % 3, **kwargs),
            SiloFacts(n, max(n // 3, 1)),
            4 + i,
        )
        for i, n in enumerate(sizes)
    )
    return Federation(plans, 5, reach, cohort)


@pytest.mark.parametrize("mode", ["per_silo", "common"])
@pytest.mark.parametrize("reach", [1, 2, 4])
def test_unequal_silos_meet_the_target_and_not_by_much(mode, reach):
    federation = heterogeneous([400, 900, 150, 2000], reach)
    made = calibrate_federation(federation, 3.0, DELTA, mode)
    epsilon = federated_epsilon(made, DELTA)
    assert 2.0 < epsilon <= 3.0
    if mode == "common":
        assert len({p.sigma for p in made.silos}) == 1
    # Any two silos of a subject stay under the bound for two.
    if reach == 2:
        profiles = [p.event(5) for p in made.silos]
        pairs = [events.horizontal([a, b]) for a in profiles for b in profiles if a is not b]
        assert max(accounting.epsilon(pair, DELTA) for pair in pairs) <= epsilon + 1e-9


def test_silos_that_form_a_chain_need_no_envelope():
    plans = tuple(
        SiloPlan(
            hi_grad_avg(sampling_prob=q, max_records_per_subject=2),
            SiloFacts(100, 50),
            3,
            noise_multiplier=2.0,
        )
        for q in (0.05, 0.2, 0.1)
    )
    federation = Federation(plans, 10, 2)
    assert len(worst_cases(federation, 10)) == 1
    expected = events.horizontal([plans[i].event(10) for i in (1, 2)])
    assert federated_epsilon(federation, DELTA) == pytest.approx(
        accounting.epsilon(expected, DELTA), rel=1e-9
    )
    # Of subjects who are in one silo each, those of the second spend most.
    apart = dataclasses.replace(federation, max_silos_per_subject=1)
    assert federated_epsilon(apart, DELTA) == silo_epsilons(apart, DELTA)[1]


def test_many_kinds_of_silos_are_accounted_in_classes_never_below():
    sizes = [200 + 7 * i for i in range(40)]
    plans = tuple(
        SiloPlan(
            hi_grad_avg(batch_size=20, max_records_per_subject=2),
            SiloFacts(n, n // 2),
            2,
            noise_multiplier=3.0,
        )
        for n in sizes
    )
    federation = Federation(plans, 3, 40)
    exact = accounting.epsilon(events.horizontal([p.event(3) for p in plans]), DELTA)
    assert exact <= federated_epsilon(federation, DELTA) <= 1.03 * exact


def test_many_unequal_silos_each_meet_the_target_with_few_accountings(monkeypatch):
    """Fewer than two accountings for each class of silos, and none for a silo."""
    monkeypatch.setenv("DPFL_CACHE_DIR", "off")
    mechanism = hi_grad_avg(batch_size=32, max_records_per_subject=2)
    sizes = range(1000, 1700, 10)
    plans = tuple(SiloPlan(mechanism, SiloFacts(n, n // 3), 1) for n in sizes)
    made_of = Federation(plans, 3, 1)
    accountant._flat_epsilon.cache_clear()
    made = calibrate_federation(made_of, 4.0, DELTA)
    classes = len({plan.sigma for plan in made.silos})
    assert 50 < classes < 60
    assert accountant._flat_epsilon.cache_info().misses < 2 * classes
    alone = silo_epsilons(made, DELTA)
    assert max(alone) == federated_epsilon(made, DELTA) <= 4.0  # none is left out
    assert min(alone) > 0.95 * 4.0


def test_many_unequal_silos_of_one_subject_meet_the_target_with_few_accountings(monkeypatch):
    """Of the whole federation at most two: it is what costs most."""
    monkeypatch.setenv("DPFL_CACHE_DIR", "off")
    mechanism = hi_grad_avg(batch_size=32, max_records_per_subject=2)
    sizes = range(200, 200 + 70 * 97, 97)
    plans = tuple(SiloPlan(mechanism, SiloFacts(n, n // 3), 2) for n in sizes)
    whole = []

    def counted(flat, *rest, worst=accountant._worst):
        whole.append(len(flat.leaves) > 50)
        return worst(flat, *rest)

    monkeypatch.setattr(accountant, "_worst", counted)
    accountant._flat_epsilon.cache_clear()
    made = calibrate_federation(Federation(plans, 3, len(plans)), 4.0, DELTA)
    assert sum(whole) <= 2
    assert 0.998 * 4.0 < federated_epsilon(made, DELTA) <= 4.0
    alone = [
        accounting.epsilon(events.horizontal([p.event(3)] * 70), DELTA) for p in made.silos[::10]
    ]
    assert min(alone) > 0.98 * max(alone)  # all spend alike


def test_a_bad_guess_changes_no_calibration():
    def event(sigma):
        return events.poisson(sigma, 0.05, 20)

    plain = accounting.calibrate_noise_multiplier(event, 2.0, DELTA, use_cache=False)
    for near in (1e-3, 0.5 * plain, 30.0 * plain, 1e9):
        found = accounting.calibrate_noise_multiplier(event, 2.0, DELTA, use_cache=False, near=near)
        assert accounting.epsilon(event(found), DELTA) <= 2.0
        assert found == pytest.approx(plain, rel=2e-5)


def test_cohorts_bound_how_many_silos_meet_in_a_round():
    all_silos = uniform(
        hi_grad_avg, 500, 8, 5, 10, batch_size=20, max_records_per_subject=3, noise_multiplier=4.0
    )
    some = dataclasses.replace(all_silos, cohort=FixedSize(2))
    two = dataclasses.replace(all_silos, max_silos_per_subject=2)
    assert federated_epsilon(some, DELTA) == pytest.approx(federated_epsilon(two, DELTA))
    assert federated_epsilon(some, DELTA) < federated_epsilon(all_silos, DELTA)


def test_empty_silos_cost_nothing_and_no_silo_at_all_is_an_error():
    full = uniform(hi_grad_avg, 500, 3, 5, 10, batch_size=20, noise_multiplier=2.0)
    empty = dataclasses.replace(full.silos[0], facts=SiloFacts(0, 0))
    with_empty = Federation((*full.silos, empty), 10, 4)
    assert federated_epsilon(with_empty, DELTA) == federated_epsilon(full, DELTA)
    assert silo_epsilons(with_empty, DELTA)[-1] == 0.0
    with pytest.raises(BadInputError, match="no silo"):
        federated_epsilon(Federation((empty,), 1, 1), DELTA)


def test_subject_sampling_does_not_depend_on_the_cap():
    costs = [
        federated_epsilon(
            uniform(
                subject_uls,
                1000,
                3,
                4,
                5,
                sampling_prob=0.1,
                max_records_per_subject=k,
                noise_multiplier=1.5,
                group_size=2,
            ),
            DELTA,
        )
        for k in (1, 50)
    ]
    assert costs[0] == costs[1]
