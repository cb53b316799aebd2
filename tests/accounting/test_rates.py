"""Personal sampling rates: every record's epsilon is kept, by the tight accountant."""

import math
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from dpfl_jax import accounting
from dpfl_jax.accounting import closed_forms, events
from dpfl_jax.accounting.accountant import FINEST
from dpfl_jax.accounting.rates import (
    LOG_STEP,
    RateSolver,
    TwoStage,
    certified_rates,
    fitted_rates,
    solver,
)
from dpfl_jax.errors import BadInputError

HEART = TwoStage(12.2509765625, 50, 15, 1.0, 1e-3)
MNIST = TwoStage(10.7483, 50, 15, 0.5, 1e-4)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=8)
@given(
    sigma=st.floats(5.0, 30.0),
    tau=st.integers(1, 60),
    rounds=st.integers(1, 30),
    lam=st.floats(0.1, 1.0),
    log_delta=st.floats(-6, -2),
    seed=st.integers(0, 2**31),
)
def test_every_record_keeps_its_budget(sigma, tau, rounds, lam, log_delta, seed):
    """8 settings of 128 budgets: the finest accountant confirms each distinct rate."""
    setting = TwoStage(sigma, tau, rounds, lam, 10**log_delta)
    rng = np.random.default_rng(seed)
    # A few distinct values (accounted one by one below), many records.
    budgets = rng.choice(np.exp(rng.uniform(np.log(0.02), np.log(12), 5)), 128)
    found = certified_rates(budgets, setting)
    assert np.all(found.epsilons <= budgets)
    for i, rate in enumerate(np.unique(found.rates)):
        event = events.two_stage(sigma, float(rate), lam, tau, rounds)
        cost = accounting.epsilon(event, setting.delta, resolution=FINEST)
        assert cost <= budgets[found.rates == rate].min() * (1 + 1e-9)
        if i == 0 and rate < 1:  # and it is the largest on the grid: the next one is too much
            more = accounting.epsilon(
                events.two_stage(sigma, min(1.0, rate * math.exp(1.01 * LOG_STEP)), lam, tau,
                                 rounds), setting.delta)  # fmt: skip
            assert more > budgets[found.rates == rate].max() * (1 - 2e-3)


def test_rates_grow_with_budgets_and_equal_budgets_get_equal_rates():
    budgets = np.array([3.0, 0.1, 3.0, 1.0, 0.1, math.inf])
    rates = certified_rates(budgets, HEART).rates
    assert rates[0] == rates[2]
    assert rates[1] == rates[4]
    assert rates[1] < rates[3] < rates[0] < rates[5] == 1.0
    alone = accounting.calibrate_sampling_prob(HEART.event, 3.0, 1e-3)
    assert rates[0] <= alone <= rates[0] * (1 + 1.2 * LOG_STEP)


def test_published_rates_cost_less_by_the_tight_accountant():
    # Rates that cost exactly 0.1, 1, 3, 5 by Renyi accounting: PLD allows more.
    published = np.array([0.01836, 0.14237, 0.37114, 0.57185])
    budgets = np.array([0.1, 1.0, 3.0, 5.0])
    assert np.all(solver(MNIST).spent(published) < budgets)
    assert np.all(certified_rates(budgets, MNIST).rates > published)


def test_tiny_and_infinite_and_unreachable_budgets():
    found = certified_rates(np.array([1e-9, 0.0, math.inf]), MNIST)
    # Almost nothing is allowed: about 1e-4 of participation in all, which delta covers.
    assert 0 < found.rates[0] * 50 * 15 * 0.5 * 0.5 < 0.1
    assert found.epsilons[0] <= 1e-9
    assert found.rates[1] == 0.0 == found.epsilons[1]  # 0 is "not me", whatever delta covers
    assert found.rates[2] == 1.0
    strict = TwoStage(6.0, 20, 10, 1.0, 1e-12)
    with pytest.raises(
        BadInputError, match=r"row 2 asks for epsilon 1e-12.* smallest sampling rate"
    ):
        certified_rates(np.array([1.0, 2.0, 1e-12]), strict)
    excluded = certified_rates(np.array([1.0, 2.0, 1e-12]), strict, "exclude")
    assert excluded.rates[2] == 0.0 == excluded.epsilons[2]
    assert excluded.rates[0] > 0
    assert certified_rates(np.array([1.0, 0.0]), strict).rates[1] == 0.0  # always in reach
    for bad in (-1.0, math.nan):
        with pytest.raises(BadInputError, match="row 1 has the budget"):
            certified_rates(np.array([1.0, bad]), strict)


def test_many_budgets_share_evaluations():
    fresh = RateSolver(TwoStage(9.0, 50, 15, 1.0, 1e-3))
    budgets = np.random.default_rng(0).choice(np.geomspace(2.0, 4.0, 10_000), 1_000_000)
    found = fresh.solve(budgets)
    assert np.all(found.epsilons <= budgets)
    assert np.median(budgets / found.epsilons) < 1 + 2 * LOG_STEP
    assert fresh.evaluations < 250  # one per grid rate, not per budget
    before, start = fresh.evaluations, time.perf_counter()
    fresh.solve(budgets[:1000])
    assert fresh.evaluations == before
    assert time.perf_counter() - start < 5.0


def test_leaving_keeps_the_budget_that_a_rate_overspends():
    rates, budgets = np.array([0.5, 0.05, 0.2, 0.0]), np.array([1.0, 5.0, 1e-6, 1.0])
    solve = solver(HEART)
    stay = solve.rounds_within(rates, budgets)
    assert stay[1] == 15
    assert 0 < stay[0] < 15
    assert stay[2] <= 1
    assert stay[3] == 15
    assert np.all(solve.spent_after(rates, stay, 15) <= budgets)
    fewer = accounting.epsilon(HEART.event(0.5, int(stay[0])), 1e-3)
    more = accounting.epsilon(HEART.event(0.5, int(stay[0]) + 1), 1e-3)
    assert fewer <= 1.0 < more * 1.02
    assert solve.spent_after(rates, stay, 0) == pytest.approx(0.0)


@pytest.mark.slow
def test_the_fitted_curve_overruns_small_budgets_and_is_counted():
    """The error profile of the fit: shares and worst overruns measured independently."""
    budgets = np.geomspace(0.1, 9.99, 200)
    found = fitted_rates(budgets, HEART)
    fit = found.fit
    assert (fit.a, fit.b, fit.c) == pytest.approx((0.7077, 2.2768, -9.8223), abs=2e-3)
    assert fit.r_squared == pytest.approx(0.99988, abs=1e-5)
    assert found.renyi_violations / 200 == pytest.approx(0.36, abs=0.02)
    assert found.renyi_worst == pytest.approx(1.211, abs=0.003)
    # The tight accountant has slack enough for this preset at 0.1, but not for the other's.
    assert found.worst <= 1.0 + 1e-3
    assert found.violations <= 2
    other = TwoStage(12.373046875, 50, 15, 0.8, 1e-4)
    small = fitted_rates(np.array([0.1, 1.0, 5.0]), other)
    assert small.violations == 1
    assert small.worst == pytest.approx(1.095, abs=0.004)
    assert small.rates == pytest.approx([0.02197, 0.13516, 0.56782], abs=2e-5)
    assert small.renyi_worst == pytest.approx(1.270, abs=0.002)
    assert certified_rates(np.array([0.1]), other).epsilons[0] <= 0.1


def test_figures_5_and_6_fits():
    points = np.concatenate(
        [np.arange(2, 10) / 1000, np.arange(1, 10) / 100, np.arange(1, 11) / 10]
    )
    golden = {
        1.0: (0.92, 4.28, -72.61, 0.9987),
        0.8: (1.06, 4.01, -55.61, 0.9986),
        0.5: (1.36, 3.49, -32.91, 0.9984),
        0.2: (1.93, 2.55, -12.59, 0.9983),
    }
    for lam, (a, b, c, r2) in golden.items():
        fit = closed_forms.fit_curve(1.0, 5, 20, lam, 1e-3, rates=points)
        assert (fit.a, fit.b) == pytest.approx((a, b), abs=5.1e-3)
        assert fit.c == pytest.approx(c, abs=5.1e-3)
        assert fit.r_squared == pytest.approx(r2, abs=5.1e-5)
    figure_6 = dict(zip((1, 1.2, 1.5, 2, 5, 10), (0.99903, 0.99967, 0.99989, 0.99989, 0.99997, 1)))
    for sigma, r2 in figure_6.items():
        fit = closed_forms.fit_curve(sigma, 5, 20, 1.0, 1e-3, conversion="mironov", rates=points)
        assert fit.r_squared == pytest.approx(r2, abs=6e-6)
    # At the delta of the figure's caption, and half of the silos.
    caption = dict(zip((1, 1.2, 1.5, 2, 5, 10), (99927, 99967, 99939, 99926, 99990, 99993)))
    for sigma, r2 in caption.items():
        fit = closed_forms.fit_curve(sigma, 5, 20, 0.5, 1e-5, rates=points)
        assert fit.r_squared == pytest.approx(r2 / 1e5, abs=6e-6)


def test_when_a_record_leaves_does_not_depend_on_how_many_others_there_are():
    """Rates off the grid, around the number up to which the others' costs were exact."""
    few = TwoStage(2.0, 2, 2, 1.0, 1e-3)
    rates = np.linspace(0.3003, 0.6, 65)
    solve = solver(few)
    budgets = np.array([few.epsilon(float(r)) for r in rates[:1]]).repeat(65) * 1.0005
    fewer = solve.rounds_within(rates[:64], budgets[:64])
    more = solve.rounds_within(rates, budgets)
    np.testing.assert_array_equal(fewer, more[:64])
    # Interrupted after any number of rounds, nobody is over its budget.
    for rounds in range(3):
        assert np.all(solve.spent_after(rates, more, rounds) <= budgets)


def test_a_curve_that_cannot_be_fitted_is_one_sentence():
    """Few steps: epsilon along the rates is no exponential, and least squares find none."""
    with pytest.raises(BadInputError, match="no exponential was found"):
        closed_forms.fit_curve(1.0, 2, 3, 1.0, 1e-4)
