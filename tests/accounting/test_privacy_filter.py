"""No sequence of runs, each chosen by what earlier ones showed, tells more than its budget."""

import functools
import itertools

import dp_accounting
import numpy as np
import pytest
from scipy import special

from dpfl_jax import accounting
from dpfl_jax.accounting import REPLACE, events, leaves, privacy_filter, renyi
from dpfl_jax.accounting.accountant import profile
from dpfl_jax.accounting.event_types import ApproximateDpEvent
from dpfl_jax.accounting.privacy_filter import dominates, filtered_epsilon

pytestmark = pytest.mark.privacy
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
        expectation(*step, removed)
        @ delta_of((*runs, step), epsilon, removed, choose, allowed)
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
        whole = events.composed(event_of(first), event_of(step))
        assert accounting.epsilon(whole, delta) <= budget * 1.001
    free = delta_of((first,), budget, True, worst, lambda runs: menu if len(runs) < 2 else [])
    true = (expectation(*first, True) @ free)[START, 0]
    assert true == pytest.approx(1.93e-5, rel=0.01)
    allowed = accepts(budget, delta, menu)
    assert allowed((first,)) == []
    # With a little more noise each is allowed, and the choice, too, is within the budget.
    least = [(LEAST_B, 1e-4), (LEAST_C, 1.0)]
    assert accepts(budget, delta, least)((first,)) == least
    for removed in (True, False):
        found = delta_of(
            (first,), budget, removed, worst, lambda runs: least if len(runs) < 2 else []
        )
        assert 0.2 * delta < (expectation(*first, removed) @ found)[START, 0] <= delta
