"""Filters: no sequence of runs tells more than its budget, and nobody exceeds one of their own."""

import functools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from dpfl_jax import accounting
from dpfl_jax.accounting import REPLACE, accountant, event_types, events, filters, leaves, renyi
from dpfl_jax.accounting.event_types import ApproximateDpEvent, OneOfDpEvent
from dpfl_jax.accounting.filters import (
    LEVELS,
    RenyiFilter,
    best_order,
    bounds,
    dominates,
    filtered_epsilon,
    levels_of,
    sizes,
)
from dpfl_jax.accounting.renyi import ORDERS
from dpfl_jax.errors import BadInputError

# Losses so far, and outputs of one run in standard deviations of its noise.
STEP, LOSSES = 0.05, np.arange(-240, 361) * 0.05
START = 240
OUTPUTS = np.linspace(-9.0, 17.0, 1301)


@functools.cache
def expectation(sigma, prob, removed):
    """Matrix [loss before, loss after] of one sampled Gaussian, by the trapezoidal rule.

    Between two losses of the grid all is linear, which is no less: deltas are convex there.
    """
    noise = np.exp(-0.5 * OUTPUTS**2) / np.sqrt(2 * np.pi) * (OUTPUTS[1] - OUTPUTS[0])
    ratio = np.log1p(prob * np.expm1(OUTPUTS / sigma - 0.5 / sigma**2))
    loss, weights = (ratio, noise * np.exp(ratio)) if removed else (-ratio, noise)
    most = len(LOSSES) - 1
    place = np.clip(loss / STEP + most, 0.0, 2 * most - 1e-9)
    low = place.astype(int)
    moved = np.bincount(low, weights * (1.0 - place + low), 2 * most + 2)
    moved += np.bincount(low + 1, weights * (place - low), 2 * most + 2)
    out = np.array([moved[most - row : 2 * most + 1 - row] for row in range(most + 1)])
    for row in range(most + 1):  # what lies beyond the grid
        out[row, 0] += moved[: most - row].sum()
        out[row, -1] += moved[2 * most + 1 - row :].sum()
    return out


def event_of(step):
    sigma, prob = step
    return events.gaussian(sigma, 1) if prob == 1.0 else events.uls(sigma, prob, 1)


def delta_of(runs, epsilon, removed, choose, allowed):
    """The true delta of strategies, from the end of each: none sees more than the loss so far.

    Args:
      runs: steps so far, a tuple of (sigma, prob).
      epsilon: at which.
      removed: the direction of adjacency.
      choose: from runs, [loss] of stopping and a list of [loss] of going on, to that of strategies.
      allowed: from runs, the steps that may follow.
    """
    stop = np.maximum(-np.expm1(epsilon - LOSSES), 0.0)[:, None]
    further = [
        expectation(*step, removed) @ delta_of((*runs, step), epsilon, removed, choose, allowed)
        for step in allowed(runs)
    ]
    return choose(runs, stop, further)


def worst(runs, stop, further):
    """The strategy of which delta is largest."""
    return functools.reduce(np.maximum, further, stop)


def accepts(budget, delta, menu):
    @functools.cache
    def fits(runs):
        return filtered_epsilon([event_of(step) for step in runs], delta) <= budget

    return lambda runs: [step for step in menu if fits((*runs, step))]


def test_quadrature_is_that_of_the_accountant():
    steps = ((2.0, 1.0), (1.0, 0.1), (0.6, 0.02))
    whole = events.composed(*map(event_of, steps))
    found = [
        delta_of((), 1.5, removed, lambda _, stop, more: more[0] if more else stop,
                 lambda runs: steps[len(runs) : len(runs) + 1])[START, 0]
        for removed in (True, False)
    ]  # fmt: skip
    assert max(found) == pytest.approx(accounting.delta(whole, 1.5), rel=0.01)


def test_a_run_that_is_chosen_by_the_first_keeps_to_the_budget():
    """Either of two second runs is within (2, 1e-5) by its own losses; a choice is 1.93e-5."""
    budget, delta, first = 2.0, 1e-5, (2.6, 1.0)
    menu = [(0.2676, 1e-4), (3.1065, 1.0)]
    for step in menu:
        ends = delta_of((first, step), budget, True, worst, lambda runs: [])[:, 0]
        alone = expectation(*first, True) @ (expectation(*step, True) @ ends)
        assert alone[START] <= delta * 1.02
    free = delta_of((first,), budget, True, worst, lambda runs: menu if len(runs) < 2 else [])
    true = (expectation(*first, True) @ free)[START, 0]
    assert true == pytest.approx(1.93e-5, rel=0.01)
    allowed = accepts(budget, delta, menu)
    assert allowed((first,)) == []
    # With a little more noise each is allowed, and the choice, too, is within the budget.
    least = [(0.34, 1e-4), (3.55, 1.0)]
    assert accepts(budget, delta, least)((first,)) == least
    for removed in (True, False):
        found = delta_of(
            (first,), budget, removed, worst, lambda runs: least if len(runs) < 2 else []
        )
        assert 0.2 * delta < (expectation(*first, removed) @ found)[START, 0] <= delta


def gaussian_delta(mean, epsilon):
    return special.ndtr(mean / 2 - epsilon / mean) - np.exp(epsilon) * special.ndtr(
        -mean / 2 - epsilon / mean
    )


@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (events.els(2.0, 0.01, 4, 300), accounting.ADD_OR_REMOVE),
        (events.uls(0.8, 1e-3, 500), accounting.ADD_OR_REMOVE),
        (
            events.composed(events.uls(1.0, 0.1, 5), events.gaussian(3.0, 2)),
            accounting.ADD_OR_REMOVE,
        ),
        (events.two_stage(2.0, 0.1, 0.5, 5, 4), accounting.ADD_OR_REMOVE),
        (ApproximateDpEvent(0.5, 1e-9), accounting.ADD_OR_REMOVE),
        (events.fixed_size(3.0, 100, 10, 5), REPLACE),
        (OneOfDpEvent([dp_accounting.GaussianDpEvent(5.0)]), accounting.ADD_OR_REMOVE),
    ],
)
@pytest.mark.parametrize("tail", [1e-7, 1e-13])
def test_every_event_is_below_its_gaussian(event, relation, tail):
    """At epsilons between the points that are looked at, too, by another way to compute deltas."""
    flat = leaves.flatten(event, relation)
    most = 40.0
    share = filters._share(flat, most, tail)
    if isinstance(event, ApproximateDpEvent) and tail < event.delta:
        assert share == np.inf
        return
    assert 0.0 < share < 1.0
    end = max(c[0][-1] for c in accountant.profile(flat, 1e-4 * tail, 500))
    epsilons = np.random.default_rng(4).uniform(0.0, end, 8)
    if isinstance(event, OneOfDpEvent):  # of which Renyi divergences alone are known
        orders = renyi.ORDERS
        found = np.exp(renyi.log_delta_from_renyi(0.02 * orders, orders, epsilons))
        found = np.minimum(found, 0.1)  # of total variation, by Pinsker
    else:
        found = [accounting.delta(event, e, relation=relation, resolution=0.05) for e in epsilons]
    apart, mean = share * tail, np.sqrt(share * most)
    above = apart + (1.0 - apart) * gaussian_delta(mean, epsilons)
    assert (np.asarray(found) * (1 - 1e-4) <= above).all()


def test_a_gaussian_is_its_own_and_no_smaller_one_will_do():
    for mean in (0.05, 0.5, 3.0):
        epsilons = np.linspace(0.0, 8.0 * mean, 400)
        deltas = gaussian_delta(mean, epsilons)
        assert dominates(mean**2 * 1.001, 1e-10 + deltas[-1], epsilons, deltas)
        assert not dominates(mean**2 * 0.999, 1e-10 + deltas[-1], epsilons, deltas)
        assert not dominates(mean**2 * 4, deltas[-1] / 2, epsilons, deltas)
    # A chord that leaves the curve between two points.
    few = np.array([0.0, 2.0])
    assert not dominates(1.0, 0.5, few, np.minimum(gaussian_delta(1.0, few) + 0.5, 1.0))


def test_the_parts_of_delta_add_up():
    """Of Gaussians each is its own: what is told beside them is paid for all the same."""
    parts = (filters.STEPS, filters.GAUSSIANS, filters.RENYI)
    assert sum(parts) == 1.0
    delta, tail = 1e-6, 0.25e-6
    runs = [events.gaussian(4.0, 1), events.gaussian(3.0, 1)]
    found = filters._by_gaussians(runs, delta, accounting.ADD_OR_REMOVE)
    told = tail + (1 - tail) * gaussian_delta(np.hypot(1 / 4, 1 / 3), found)
    assert 0.99 * delta < told <= delta


def test_a_budget_allows_what_a_smaller_one_does():
    """Each has a Renyi order of its own: none refuses what is said to be enough."""
    runs = [events.uls(1.0, 0.02, 100), events.gaussian(8.0, 1)]
    found = filters._by_renyi(runs, 1e-6, accounting.ADD_OR_REMOVE)
    orders = renyi.ORDERS[(renyi.ORDERS > 1.02) & (renyi.ORDERS < 128.0)]
    spent = sum(renyi.renyi_divergences(run, orders) for run in runs)
    for budget in found * np.array([1.0, 1.01, 1.1, 1.5, 3.0]):
        served = 0.7 * np.log(1e6) * (2 * orders - 1) / (orders - 1) ** 2
        i = int(np.flatnonzero(served > budget).max(initial=0))
        needed = renyi.epsilon_from_renyi(spent[[i]], orders[[i]], 1e-6)
        assert needed <= budget * (1 + 1e-9)


def test_what_a_filter_costs_over_composition():
    """docs/theory/ledger.md has a table of these."""
    for runs, most in (
        ([events.uls(1.0, 0.01, 1000)] * 2, 1.08),
        ([events.uls(1.0, 0.01, 50)] * 20, 1.1),
        ([events.gaussian(4.0, 1)] * 4, 1.05),
        ([events.els(2.0, 0.01, 4, 500), events.gaussian(3.0, 2)], 1.08),
    ):
        together = accounting.epsilon(events.composed(*runs), 1e-6)
        assert together < filtered_epsilon(runs, 1e-6) < most * together
    # Of one run nothing.
    alone = events.uls(1.0, 0.01, 1000)
    assert filtered_epsilon([dp_accounting.NoOpDpEvent(), alone], 1e-6) == accounting.epsilon(
        alone, 1e-6
    )


def test_what_has_no_guarantee_is_allowed_by_no_budget():
    run = events.gaussian(4.0, 1)
    for other in (dp_accounting.NonPrivateDpEvent(), ApproximateDpEvent(0.1, 1e-5)):
        for runs in ([run, other], [other, run]):
            assert filtered_epsilon(runs, 1e-6) == np.inf
    assert filtered_epsilon([run, ApproximateDpEvent(0.1, 0.0)], 1e-6) < np.inf
    assert filtered_epsilon([], 1e-6) == 0.0


def by_chance(rng, count):
    """Strategies: in pieces of the loss so far something at random, or what is best."""
    boldness = rng.uniform(size=count)

    def choose(runs, stop, further):
        options = np.stack(np.broadcast_arrays(np.repeat(stop, count, axis=1), *further))
        pieces = np.searchsorted(np.sort(rng.normal(0.0, 2.0, 5)), LOSSES)
        picked = rng.integers(len(options), size=(6, count))[pieces]
        bold = (rng.uniform(size=(6, count)) < boldness)[pieces]
        picked = np.take_along_axis(options, picked[None], axis=0)[0]
        return np.where(bold, options.max(axis=0), picked)

    return choose


@pytest.mark.slow
@pytest.mark.nightly("20")
@pytest.mark.parametrize("worlds", [6, 20])
def test_thousands_of_random_strategies_keep_to_their_budgets(worlds):
    """By quadrature, so that none fails by chance; and of each menu the best of all strategies."""
    rng = np.random.default_rng(46)
    of_each, delta, shares = 500, 1e-5, []
    for _ in range(worlds):
        sampled = 10.0 ** -rng.uniform(0.5, 4.0)
        menu = [(2.0 ** rng.uniform(0, 3), 1.0), (2.0 ** rng.uniform(-1.5, 1.5), sampled)]
        some = [menu[i] for i in rng.permutation([0, 1, rng.integers(2)])]
        budget = filtered_epsilon(list(map(event_of, some)), delta) * 1.001
        fits = functools.cache(accepts(budget, delta, menu))

        def allowed(runs, fits=fits, first=some[:1]):
            # The order of later runs does not matter to the filter.
            return (fits((runs[0], *sorted(runs[1:]))) if len(runs) < 4 else []) if runs else first

        for removed in (True, False):
            best = delta_of((), budget, removed, worst, allowed)[START, 0]
            found = delta_of((), budget, removed, by_chance(rng, of_each), allowed)[START]
            assert found.shape == (of_each,)
            assert found.max() <= best * (1 + 1e-9)
            assert best <= delta
            shares.append(best / delta)
    assert max(shares) > 0.3  # there are budgets that strategies use up


# ---- budgets of users -------------------------------------------------------------------------

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
