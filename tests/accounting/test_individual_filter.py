"""The filter: what steps cost by other implementations, and that nobody exceeds a budget."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from dpfl_jax import accounting
from dpfl_jax.accounting import event_types, events
from dpfl_jax.accounting.filters import (
    LEVELS,
    RenyiFilter,
    best_order,
    bounds,
    levels_of,
    sizes,
)
from dpfl_jax.accounting.renyi import ORDERS
from dpfl_jax.errors import BadInputError

SETTINGS = [(0.1, 1.2, 5.0), (0.5, 0.7, 3.0), (0.01, 1.0, 8.0), (1.0, 4.0, 6.0)]


def by_quadrature(prob, sigma, order):
    """The larger direction, as E[(1 + q (e^L - 1))^p] - 1 without cancellation: E[e^L - 1] = 0."""

    def integrand(x, p):
        moved = prob * np.expm1(x / sigma - 0.5 / sigma**2)
        return np.exp(-x * x / 2) * (np.expm1(p * np.log1p(moved)) - p * moved)

    def one(p):
        options = {"points": [0.0, order / sigma], "limit": 500, "epsabs": 0, "epsrel": 1e-9}
        found = integrate.quad(integrand, -30, 30 + order / sigma, args=(p,), **options)[0]
        return math.log1p(found / math.sqrt(2 * math.pi)) / (order - 1)

    return max(one(order), one(1 - order))


def of_mixture(shifts, weights, order):
    """The same of any mixture of N(shift, 1) against N(0, 1), on a fine grid."""
    shifts, top = np.asarray(shifts, float), order * np.abs(shifts).max()
    x = np.linspace(-14 - top, 14 + top, 8_001)
    moved = np.expm1(x[:, None] * shifts - shifts**2 / 2) @ np.asarray(weights)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def one(p):
        values = density * (np.expm1(p * np.log1p(moved)) - p * moved)
        return math.log1p(values.sum() * (x[1] - x[0])) / (order - 1)

    return max(one(order), one(1 - order))


def of_examples(bounds_, prob, sigma, order):
    """Of one user's examples, drawn each with ``prob``: sums over all subsets."""
    shifts, weights = np.zeros(1), np.ones(1)
    for bound in bounds_:
        shifts = np.r_[shifts, shifts + bound / sigma]
        weights = np.r_[weights * (1 - prob), weights * prob]
    return of_mixture(shifts, weights, order)


def of_equal(bound, parts, prob, sigma, order):
    """Of so many examples of one bound, all pointing one way."""
    drawn = np.arange(parts + 1)
    return of_mixture(drawn * bound / sigma, stats.binom(parts, prob).pmf(drawn), order)


def by_dp_accounting(prob, sigma, order):
    accountant = rdp.RdpAccountant([order])
    gaussian = dp_accounting.GaussianDpEvent(sigma)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(prob, gaussian))
    return accountant._rdp[0]


@pytest.mark.parametrize(("prob", "sigma", "order"), SETTINGS)
def test_no_step_costs_less_than_by_two_other_computations(prob, sigma, order):
    found = RenyiFilter.of(sigma, prob, 10, order)
    for level in (0, 1, 5, 12, LEVELS - 1):
        own = found.costs[0][level] * found.step / found.costs[0][0]
        multiplier = sigma * 2 ** (level / 4)
        for reference in (by_quadrature, by_dp_accounting):
            least = reference(prob, multiplier, order)
            assert least * (1 - 1e-7) <= own <= least * 1.001 + 1e-12
            if level:  # what may be is room for: rounding is upwards
                assert own >= least


OF_EXAMPLES = [(0.1, 5.0, 5.0, 12), (0.5, 3.0, 3.0, 6), (0.01, 3.0, 4.0, 9), (1.0, 9.0, 4.0, 5)]


@pytest.mark.parametrize(("prob", "sigma", "order", "most"), OF_EXAMPLES)
def test_no_step_of_several_examples_costs_less_than_by_integration(prob, sigma, order, most):
    """Of examples at their user's bound; numbers between sizes are rounded up."""
    found = RenyiFilter.of(sigma, prob, 10, order, most)
    assert found.costs[-1][0] == found.budget // 10
    assert found.step == pytest.approx(of_equal(1.0, most, prob, sigma, order), rel=1e-6)
    for parts in {1, 2, 3, most - 1, most}:
        for level in (0, 1, 6, LEVELS - 1):
            units = np.array([level]), np.array([parts])
            own = int(found._costs_of(*units)[0]) * found.step / found.costs[-1][0]
            least = of_equal(2 ** (-level / 4), parts, prob, sigma, order)
            assert own >= least * (1 - 1e-7)
            if parts in sizes(most):
                assert own <= least * 1.001 + 1e-8 * found.step


@pytest.mark.parametrize(("prob", "sigma", "order", "most"), OF_EXAMPLES)
def test_examples_below_their_users_bound_or_of_other_directions_cost_no_more(
    prob, sigma, order, most
):
    """What a user pays for is the worst: all examples as large as allowed, and pointing one way."""
    found = RenyiFilter.of(sigma, prob, 10, order, most)
    rng = np.random.default_rng(0)
    for _ in range(6):
        norms = rng.uniform(0.05, 1.0, rng.integers(1, 6))
        level, parts = levels_of(norms.max(keepdims=True), 1.0), np.array([len(norms)])
        paid = int(found._costs_of(level, parts)[0]) * found.step / found.costs[-1][0]
        assert of_examples(norms, prob, sigma, order) <= paid
        signs = np.where(rng.random(len(norms)) < 0.5, -1.0, 1.0)
        assert of_examples(norms * signs, prob, sigma, order) <= paid


def test_nobody_with_any_number_of_examples_exceeds_a_budget():
    found = RenyiFilter.of(3.0, 0.1, 5, 5.0, 6)
    rng = np.random.default_rng(1)
    true = {
        (level, parts): of_equal(2 ** (-level / 4), parts, 0.1, 3.0, 5.0)
        for level in (0, 2, 5)
        for parts in (1, 4, 6)
    }
    parts = np.array([1, 4, 6, 6])
    spent, paid, taken = np.zeros(4, np.int64), np.zeros(4), np.zeros(4, int)
    for _ in range(200):
        levels = rng.choice([0, 2, 5], 4).astype(np.uint8)
        levels[3] = 0
        left = found.steps_left(spent, levels, 3, parts)
        paid += left * [true[pair] for pair in zip(levels.tolist(), parts.tolist())]
        spent, taken = found.after(spent, levels, 3, parts), taken + left
    assert (spent <= found.budget).all()
    assert (paid <= 5 * true[0, 6] * (1 + 1e-7)).all()
    assert taken[3] == 5 < taken[2] < taken[1] < taken[0]


def test_levels_are_the_lowest_that_hold_a_norm():
    norms = np.array([0.0, 1e-9, 0.3, 0.5, 1.0, 1.7, 400.0, np.inf, np.nan])
    own = bounds(1.0)[levels_of(norms, 1.0)]
    assert own[0] == own[1] == bounds(1.0)[-1]
    assert (own[2:5] >= norms[2:5]).all()
    assert (own[2:5] < norms[2:5] * 2**0.25 * (1 + 1e-6)).all()
    assert (own[4:] == 1.0).all()
    assert (levels_of(2.0 * norms, 2.0) == levels_of(norms, 1.0)).all()


@settings(max_examples=30, deadline=None)
@given(
    which=st.sampled_from(SETTINGS),
    least=st.integers(1, 40),
    stretches=st.lists(st.lists(st.integers(0, LEVELS - 1), min_size=4, max_size=4), min_size=1),
    every=st.integers(1, 9),
    greedy=st.booleans(),
)
def test_nobody_exceeds_a_budget_whatever_their_norms(which, least, stretches, every, greedy):
    """Levels in any order, one of the units always taking what just fits; by another accountant."""
    prob, sigma, order = which
    found = RenyiFilter.of(sigma, prob, least, order)
    known = {j: by_dp_accounting(prob, sigma * 2 ** (j / 4), order) for j in range(LEVELS)}
    spent, true, taken = np.zeros(4, np.int64), np.zeros(4), np.zeros(4, int)
    for row in stretches * 20:
        levels = np.array(row, np.uint8)
        if greedy:  # the costliest level that can still be paid for
            afford = np.asarray(found.costs[0]) <= found.budget - spent[0]
            levels[0] = np.argmax(afford) if afford.any() else 0
        left = found.steps_left(spent, levels, every)
        after = found.after(spent, levels, every)
        true += left * [known[j] for j in levels.tolist()]
        could = spent + np.asarray(found.costs[0])[levels] <= found.budget
        assert ((left > 0) == could).all()  # who can pay does, who cannot does not
        assert (left <= every).all()
        assert (after >= spent).all()
        spent, taken = after, taken + left
    assert (spent <= found.budget).all()
    assert (true <= least * known[0] * (1 + 1e-7)).all()
    assert (taken >= np.minimum(least, every * 20 * len(stretches))).all()


def test_counting_goes_up_to_the_longest_run():
    found = RenyiFilter.of(1.0, 0.1, 1 << 30, 4.0)
    spent = np.array([0, found.budget - 1])
    levels = np.zeros(2, np.uint8)
    assert found.steps_left(spent, levels, 1 << 40).tolist() == [1 << 30, 0]
    assert found.after(spent, levels, 1 << 40).tolist() == [found.budget, found.budget - 1]


# ---- the filter's theorem, by integration over what is released ---------------------------------


def divergence(found, prob, sigma, strategy, steps, removed, stays=0, parts=1):
    """Renyi divergence of all that is released, where bounds follow what was released before.

    ``strategy``: (step, whether the last release was above 0) -> level. Nothing else of a release
    matters, so that the rest of the run has one moment for each side. ``stays``: steps that a unit
    takes part in though it cannot pay.
    """
    order, drawn = found.order, list(enumerate(stats.binom(parts, prob).pmf(range(parts + 1))))

    def moment(step, above, spent, stays):
        """E[(P/Q)^order] under Q of all that follows; removed: P has the unit, Q has not."""
        if step == steps:
            return 1.0
        level = np.array([strategy(step, above)], np.uint8)
        can = found.steps_left(np.array([spent]), level, 1, parts)[0]
        shift = 2.0 ** (-int(level[0]) / 4) / sigma
        if not can and not stays:
            shift = 0.0
        after = int(found.after(np.array([spent]), level, 1, parts)[0])

        def integrand(x):
            ratio = sum(w * math.exp(x * k * shift - (k * shift) ** 2 / 2) for k, w in drawn)
            base = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
            return base * ratio ** (order if removed else 1 - order)

        owed = max(stays - (not can), 0)
        rest = [moment(step + 1, up, after, owed) for up in (False, True)]
        sides = ((-14.0, 0.0), (0.0, 14.0 + order * shift * parts))
        return sum(r * integrate.quad(integrand, *s, limit=200)[0] for r, s in zip(rest, sides))

    return math.log(moment(0, False, 0, stays)) / (order - 1)


@pytest.mark.parametrize("removed", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_bounds_that_follow_what_is_released_spend_no_more_than_the_budget(removed, parts):
    """By integration over all releases of 5 steps; one step more is seen."""
    prob, sigma, order = 0.5, float(parts), 3.0
    found = RenyiFilter.of(sigma, prob, 2, order, parts)
    budget = 2 * of_equal(1.0, parts, prob, sigma, order)

    def by_sign(step, above):
        return 0 if above else (4, 3, 6, 1, 0)[step]

    def none(step, above):
        return 0

    for strategy in (by_sign, none, lambda step, above: 8 * above):
        got = divergence(found, prob, sigma, strategy, 5, removed, parts=parts)
        assert got <= budget * (1 + 1e-6)
    if removed:
        all_paid, one_more = (
            divergence(found, prob, sigma, none, 5, removed, stays, parts) for stays in (0, 1)
        )
        assert all_paid == pytest.approx(budget, rel=1e-5)
        assert one_more > 1.4 * budget


# ---- its event ----------------------------------------------------------------------------------


def test_the_event_is_of_the_budget_and_until_then_of_the_steps():
    sigma, prob, least, delta = 1.2, 0.1, 30, 1e-5
    order = best_order(events.uls(sigma, prob, least), delta)
    assert order in ORDERS
    event = events.individual(sigma, prob, least, order, 200)
    assert events.individual(sigma, prob, least, order, 30) == events.uls(sigma, prob, 30)
    assert event_types.from_json(event_types.to_json(event)) == event
    told = accounting.epsilon(event, delta, accountant=accounting.accountant_of(event))
    every_order = accounting.epsilon(events.uls(sigma, prob, least), delta, accountant="rdp")
    assert told == pytest.approx(every_order, rel=1e-9)
    assert told > accounting.epsilon(events.uls(sigma, prob, least), delta)  # Renyi is looser
    worse = events.individual(sigma, prob, least, 2.0 * order, 200)
    assert accounting.epsilon(worse, delta, accountant="rdp") > told
    found = RenyiFilter.of(sigma, prob, least, order)
    own = found.epsilons(np.array([0, found.budget // 2, found.budget]), delta)
    assert own[0] == 0.0 < own[1] < own[2] == pytest.approx(told, rel=1e-9)
    with pytest.raises(BadInputError, match="only Renyi divergences are known"):
        accounting.epsilon(event, delta)


def test_with_everybody_in_every_step_it_is_one_gaussian():
    """Koskela, Tobaben and Honkela 2023: no order, no slack."""
    event = events.individual(4.0, 1.0, 30, 7.0, 200)
    assert accounting.accountant_of(event) == "pld"
    assert accounting.epsilon(event, 1e-5) == accounting.epsilon(events.gaussian(4.0, 30), 1e-5)
    costs = np.array(RenyiFilter.of(4.0, 1.0, 30, 7.0).costs[0])
    squares = costs[0] * 2.0 ** (-np.arange(LEVELS) / 2)
    assert (costs >= squares - 1e-6).all()
    np.testing.assert_allclose(costs, squares, rtol=1e-4)


def test_of_several_examples_it_is_that_of_a_whole_group():
    """With everybody in every step, one Gaussian of a group's; one example is a user."""
    event = events.individual(4.0, 1.0, 30, 7.0, 200, group_size=3)
    assert accounting.epsilon(event, 1e-5) == pytest.approx(
        accounting.epsilon(events.gaussian(4.0 / 3.0, 30), 1e-5), rel=1e-9
    )
    costs = np.array(RenyiFilter.of(4.0, 1.0, 30, 7.0, 3).costs) / 2**30
    squares = np.outer(np.array([1, 2, 3]) ** 2 / 9, 2.0 ** (-np.arange(LEVELS) / 2))
    assert (costs >= squares - 1e-14).all()
    np.testing.assert_allclose(costs, squares, rtol=1e-3, atol=1e-8)
    event = events.individual(2.0, 0.1, 30, 7.0, 200, group_size=3)
    assert event_types.from_json(event_types.to_json(event)) == event
    assert events.individual(2.0, 0.1, 30, 7.0, 30, group_size=3) == events.els(2.0, 0.1, 3, 30)
    told = accounting.epsilon(event, 1e-5, accountant=accounting.accountant_of(event))
    found = RenyiFilter.of(2.0, 0.1, 30, 7.0, 3)
    assert found.epsilons(np.array([found.budget]), 1e-5)[0] == pytest.approx(told, rel=1e-9)
    alone = RenyiFilter.of(2.0, 0.1, 30, 7.0, 1)
    assert alone.costs[0] == RenyiFilter.of(2.0, 0.1, 30, 7.0).costs[0]


def test_without_noise_there_is_no_guarantee():
    event = events.individual(0.0, 0.1, 30, 4.0, 200)
    assert accounting.epsilon(event, 1e-5, accountant="rdp") == math.inf
    with pytest.raises(BadInputError, match="order of a filter is 1"):
        accounting.epsilon(events.individual(1.0, 0.1, 30, 1.0, 200), 1e-5, accountant="rdp")
    for sigma in (1e-6, 1e-3):
        with pytest.raises(BadInputError, match="raise the noise"):
            RenyiFilter.of(sigma, 0.1, 30, 50.0)
