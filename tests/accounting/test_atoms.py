"""Losses with atoms against closed forms and exact compositions, none of them ours."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event

from dpfl_jax import accounting
from dpfl_jax.accounting.event_types import ApproximateDpEvent
from dpfl_jax.errors import BadInputError

EXCESS = 2e-3
# Of the closed forms' own rounding.
BELOW = 1e-9


def times(event, count):
    return dp_event.SelfComposedDpEvent(event, count)


def close(found, truth):
    assert truth * (1 - BELOW) - 1e-15 <= found <= truth * (1 + EXCESS) + 1e-12


def optimal(epsilon, delta, count, i):
    """(epsilon, delta)^count is optimally (count - 2i) epsilon at this delta.

    Kairouz, Oh, Viswanath 2015, "The composition theorem for differential privacy", Theorem 3.3.
    """
    share = sum(
        math.comb(count, j)
        * (math.exp((count - j) * epsilon) - math.exp((count - 2 * i + j) * epsilon))
        for j in range(i)
    )
    kept = (1 - delta) ** count
    return 1 - kept * (1 - share / (1 + math.exp(epsilon)) ** count)


@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-5), (0.1, 1e-6), (3.0, 1e-3)])
def test_epsilon_delta_events_compose_optimally(epsilon, delta, count):
    event = times(ApproximateDpEvent(epsilon, delta), count)
    for i in range(count // 2 + 1):
        known, at = optimal(epsilon, delta, count, i), (count - 2 * i) * epsilon
        close(accounting.delta(event, at), known)
        if known < 0.5:
            # At this very delta the curve has its corner; above it (and what is reserved) below.
            assert accounting.epsilon(event, known * (1 + 4e-6)) <= at * (1 + EXCESS)
            assert accounting.epsilon(event, known * (1 - 1e-6)) >= at * (1 - BELOW)


@pytest.mark.parametrize("epsilon", [0.0, 1e-300, 1e-99])
def test_losses_of_nothing_but_a_delta(epsilon):
    """All is lost with probability 1 - (1 - delta)^3, and nothing without it."""
    event = times(ApproximateDpEvent(epsilon, 0.01), 3)
    lost = 1 - 0.99**3
    for at in (0.0, 1.0):
        assert lost <= accounting.delta(event, at) <= lost * (1 + 1e-9)
        assert lost <= accounting.delta_curve(event, [at])[0] <= lost * (1 + 1e-9)
    assert accounting.epsilon(event, lost * (1 + 1e-6)) <= 1e-15
    assert accounting.epsilon(event, lost * (1 - 1e-6)) == math.inf
    assert accounting.epsilon_curve(event.event, [1, 3, 4], 0.03) == [0.0, 0.0, math.inf]


def test_stated_guarantees_need_nothing_of_delta_for_noise():
    """A delta that pays for theirs alone leaves the sum of their epsilons; no less does."""
    stated = (ApproximateDpEvent(1.0, 0.1), ApproximateDpEvent(2.0, 0.2))
    event = dp_event.ComposedDpEvent(list(stated))
    assert 3.0 <= accounting.epsilon(event, 0.28) <= 3.0 + 1e-9
    assert accounting.epsilon(event, 0.28 * (1 - 1e-15)) == math.inf
    assert 1.0 <= accounting.epsilon(stated[0], 0.1) <= 1.0 + 1e-9
    # What draws noise beside them pays as before.
    noisy = dp_event.ComposedDpEvent([stated[0], dp_event.GaussianDpEvent(50.0)])
    assert accounting.epsilon(noisy, 0.1 * (1 + 2.0**-21)) == math.inf


@pytest.mark.slow
def test_different_atoms_and_a_gaussian_together():
    """Several units without a common grid: against each alone with the finest one."""
    parts = [ApproximateDpEvent(1.0, 1e-7), ApproximateDpEvent(math.sqrt(0.3), 0.0)]
    for extra in ([], [dp_event.GaussianDpEvent(2.0)]):
        event = dp_event.ComposedDpEvent([*parts, *extra])
        fine = accounting.epsilon(event, 1e-5, resolution=1e-3)
        assert fine * (1 - 1e-6) <= accounting.epsilon(event, 1e-5) <= fine * (1 + EXCESS)


def test_the_least_delta_is_found_again():
    event = dp_event.SelfComposedDpEvent(
        dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.0)), 1000
    )
    for delta in (1e-100, 1e-200):
        assert 0.9 * delta < accounting.delta(event, accounting.epsilon(event, delta)) < 1.1 * delta


def test_targets_may_be_numbers_of_numpy():
    """In float32 8.0000001 is 8: what is certified is compared in double precision."""
    epsilon, delta = np.float32(1.1), np.float32(1e-5)

    def step(sigma):
        return dp_event.GaussianDpEvent(sigma)

    exact = accounting.epsilon(step(4.0), float(delta))
    assert accounting.epsilon(step(4.0), delta) == exact
    sigma = accounting.calibrate_noise_multiplier(step, epsilon, delta, use_cache=False)
    assert accounting.epsilon(step(sigma), float(delta)) <= float(epsilon)
    for bad, words in (
        ("1e-5", "must be a number"),
        (np.float32(2.0), "delta is 2.0, but it must"),
    ):
        with pytest.raises(BadInputError, match=words):
            accounting.epsilon(step(4.0), bad)
