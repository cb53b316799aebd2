"""No sequence of runs, each chosen by what earlier ones showed, tells more than its budget."""

import functools

import dp_accounting
import numpy as np
import pytest
from scipy import special

from dpfl_jax import accounting
from dpfl_jax.accounting import REPLACE, accountant, events, filters, leaves, renyi
from dpfl_jax.accounting.event_types import ApproximateDpEvent, OneOfDpEvent
from dpfl_jax.accounting.filters import dominates, filtered_epsilon

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
