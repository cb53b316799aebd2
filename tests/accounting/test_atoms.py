"""Losses with atoms against closed forms and exact compositions, none of them ours."""

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation, dp_event
from scipy import signal

from dpfl_jax import accounting
from dpfl_jax.accounting import ADD_OR_REMOVE, REPLACE
from dpfl_jax.accounting.event_types import ApproximateDpEvent
from dpfl_jax.errors import BadInputError

EXCESS = 2e-3
# Of the closed forms' own rounding.
BELOW = 1e-9


def times(event, count):
    return dp_event.SelfComposedDpEvent(event, count)


def close(found, truth):
    assert truth * (1 - BELOW) - 1e-15 <= found <= truth * (1 + EXCESS) + 1e-12


def exact(losses, probs, count, infinity=0.0):
    """Atoms of the composition: losses float64 [n], probs, mass at infinity."""
    size = int(max(losses)) * 2 + 1
    step = np.zeros(size)
    for loss, prob in zip(losses, probs, strict=True):
        step[int(loss) + size // 2] += prob
    law = np.array([1.0])
    for _ in range(count):
        law = np.convolve(law, step)
    return np.arange(len(law)) - len(law) // 2, law, -math.expm1(count * math.log1p(-infinity))


def delta_at(law, unit, epsilon):
    index, probs, infinity = law
    losses = index * unit
    return infinity + float(np.sum(probs * np.maximum(-np.expm1(epsilon - losses), 0.0)))


def epsilon_at(law, unit, delta):
    low, high = 0.0, float(law[0][-1] * unit)
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if delta_at(law, unit, middle) <= delta else (middle, high)
    return high


@pytest.mark.parametrize("count", [1, 2, 7, 40])
@pytest.mark.parametrize(("prob", "buckets"), [(0.3, 2), (0.5, 3), (0.9, 10), (1e-3, 2)])
def test_randomised_response(prob, buckets, count):
    right, wrong = 1 - prob + prob / buckets, prob / buckets
    unit = math.log(right / wrong)
    law = exact([1, -1, 0], [right, wrong, (buckets - 2) * wrong], count)
    event = times(dp_event.RandomizedResponseDpEvent(prob, buckets), count)
    for delta in (1e-2, 1e-5, 1e-10):
        close(accounting.epsilon(event, delta, relation=REPLACE), epsilon_at(law, unit, delta))
    for share in (0.3, 0.7, 0.95):
        at = share * unit * math.sqrt(count)
        close(accounting.delta(event, at, relation=REPLACE), delta_at(law, unit, at))


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


@pytest.mark.parametrize("prob", [1.0, 0.3, 0.01])
@pytest.mark.parametrize("scale", [0.2, 1.0, 10.0])
def test_one_laplace_step(scale, prob):
    """H = 1 - e^((epsilon - 1 / scale) / 2); sampling: q H at log(1 + (e^epsilon - 1) / q)."""
    event = dp_event.LaplaceDpEvent(scale)
    if prob < 1.0:
        event = dp_event.PoissonSampledDpEvent(prob, event)
    for delta in (1e-3, 1e-6, 1e-9):
        inner = 1 / scale + 2 * math.log1p(-delta / prob)
        truth = math.log1p(prob * math.expm1(inner))
        if truth > 0:
            close(accounting.epsilon(event, delta), truth)
            found = accounting.delta(event, 0.9 * truth)
            inner = math.log1p(math.expm1(0.9 * truth) / prob)
            close(found, -prob * math.expm1(0.5 * (inner - 1 / scale)))


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize(("scale", "prob"), [(1.0, 1.0), (1.0, 0.1), (1.0, 0.01), (0.3, 0.3)])
def test_several_laplace_steps(scale, prob, count):
    """Losses rounded down and up to a fine grid and convolved bracket the truth (removal)."""
    t, points = 1 / scale, 4000
    top = math.log1p(prob * math.expm1(t))
    grid = top / points
    low = math.floor(math.log1p(prob * math.expm1(-t)) / grid) - 1
    edges = np.arange(low, points + 1) * grid
    with np.errstate(invalid="ignore", divide="ignore"):
        inner = np.log1p(np.expm1(edges) / prob)
    inner = np.clip(np.nan_to_num(inner, nan=-2 * t), -2 * t, t)
    inside = (inner >= -t) & (np.arange(len(edges)) < len(edges) - 1)
    taking_part = np.where(inside, 0.5 * np.exp((inner - t) / 2), 0.0)
    resting = np.where(inside, 1 - 0.5 * np.exp(-(inner + t) / 2), 0.0)
    taking_part[-1] = resting[-1] = 1.0
    step = np.diff(prob * taking_part + (1 - prob) * resting, prepend=0.0)
    law = np.array([1.0])
    for _ in range(count):
        law = np.maximum(signal.fftconvolve(law, step), 0.0)
    event = dp_event.LaplaceDpEvent(scale)
    event = times(event if prob == 1 else dp_event.PoissonSampledDpEvent(prob, event), count)
    for delta in (1e-3, 1e-4, 1e-6):
        found = accounting.epsilon(event, delta)
        index = np.arange(len(law)) + count * low
        upper = epsilon_at((index, law, 0.0), grid, delta)
        if upper <= 10 * count * grid:
            continue
        lower = epsilon_at((index - count, law, 0.0), grid, delta)
        assert lower <= found <= upper * (1 + EXCESS)


@pytest.mark.parametrize("sensitivity", [1, 2, 5])
def test_discrete_laplace(sensitivity):
    a, count = 0.4, 3
    x = np.arange(-200, 200)
    probs = np.exp(-a * np.abs(x)) * math.tanh(a / 2)
    losses = np.abs(x - sensitivity) - np.abs(x)
    law = exact(losses, probs, count)
    event = times(dp_event.DiscreteLaplaceDpEvent(a, sensitivity), count)
    for delta in (1e-2, 1e-5):
        close(accounting.epsilon(event, delta), epsilon_at(law, a, delta))


@pytest.mark.slow
def test_different_atoms_and_a_gaussian_together():
    """Several units without a common grid: against each alone with the finest one."""
    parts = [ApproximateDpEvent(1.0, 1e-7), ApproximateDpEvent(math.sqrt(0.3), 0.0)]
    for extra in ([], [dp_event.LaplaceDpEvent(3.0)], [dp_event.GaussianDpEvent(2.0)]):
        event = dp_event.ComposedDpEvent([*parts, *extra])
        fine = accounting.epsilon(event, 1e-5, resolution=1e-3)
        assert fine * (1 - 1e-6) <= accounting.epsilon(event, 1e-5) <= fine * (1 + EXCESS)
    # A subject against the special value: dp-accounting's own, on its finest useful grid.
    special = NeighboringRelation.REPLACE_SPECIAL
    found = accounting.epsilon(dp_event.RandomizedResponseDpEvent(0.5, 4), 1e-6, relation=special)
    close(found, math.log(0.625 * 4) + math.log1p(-1e-6 / 0.625))
    assert accounting.epsilon(dp_event.LaplaceDpEvent(1.0), 1e-6, relation=ADD_OR_REMOVE) <= 1.0


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
