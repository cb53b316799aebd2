"""Random allocation: brute force, Monte Carlo, another implementation, and what must hold of it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_jax.accounting import REPLACE, allocation, delta, epsilon, event_types, events
from dpfl_jax.accounting.allocation import allocated
from dpfl_jax.accounting.event_types import AllocatedDpEvent
from dpfl_jax.errors import BadInputError


def divergence(law, eps):
    """Hockey-stick, of a step's loss as it is."""
    return float((law.probs * np.maximum(0.0, -np.expm1(eps - law.losses))).sum() + law.infinity)


def brute_force(sigma, taken, steps, eps):
    """Both directions by quadrature over the outputs of up to three steps."""
    s = 1 / sigma
    y = np.linspace(-9, 9, {1: 20_001, 2: 1001, 3: 121}[taken])
    y = np.stack(np.meshgrid(*[y] * taken)).reshape(taken, -1)
    prob = np.exp(-(y**2).sum(axis=0) / 2)
    prob /= prob.sum()
    ratio = (np.exp(s * y - s * s / 2).sum(axis=0) + steps - taken) / steps
    return [
        (prob * np.maximum(0, ratio - math.exp(eps))).sum(),
        (prob * np.maximum(0, 1 - math.exp(eps) * ratio)).sum(),
    ]


@pytest.mark.parametrize(("taken", "steps"), [(1, 1), (1, 4), (2, 2), (2, 5), (3, 3)])
def test_a_few_steps_against_quadrature(taken, steps):
    """The kink of an integrand costs the quadrature some 1e-3 in three dimensions."""
    law = allocated(1.3, taken, steps, 0.02, -50.0)
    for eps in (0.0, 0.3, 1.0):
        wanted = brute_force(1.3, taken, steps, eps)
        found = [divergence(way, eps) for way in (law.remove, law.add)]
        np.testing.assert_allclose(found, wanted, rtol=3e-3, atol=2e-5)


def test_one_step_is_a_gaussian():
    assert epsilon(events.allocated(1.3, 1, 7), 1e-6) == epsilon(events.gaussian(1.3, 7), 1e-6)


def test_the_number_of_the_single_epoch_regime():
    """5.08 in place of Poisson's 6.55 (sigma .626, 28 steps): Opake 0.16.1 prints both."""
    found = epsilon(events.allocated(0.626, 28, 28), 1e-6, resolution=0.05)
    assert found == pytest.approx(5.08, abs=0.005)
    poisson = epsilon(events.uls(0.626, 1 / 28, 28), 1e-6, resolution=0.1)
    assert poisson == pytest.approx(6.55, abs=0.01)


ELSEWHERE = [  # sigma, once in, steps; lower and upper bound
    (0.626, 28, 28, 5.069128153448217, 5.0940757579343545),
    (1.0, 100, 100, 0.8436711728211483, 0.8744979111842018),
    (1.0, 100, 1000, 1.9245471948597745, 2.0055499383045965),
]


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "period", "steps", "low", "high"), ELSEWHERE)
def test_epsilon_between_the_bounds_of_its_authors(sigma, period, steps, low, high):
    """Printed by ``gaussian_allocation_epsilon_range`` of PLD_accounting 2.0, at delta 1e-6."""
    assert low <= epsilon(events.allocated(sigma, period, steps), 1e-6) <= high


MONTE_CARLO = [  # sigma, once in, steps, epsilon; delta of 1e-3 to 1e-1
    (0.626, 28, 28, 2.0),
    (1.0, 60, 60, 0.2),
    (0.5, 100, 100, 1.0),
    (0.7, 10, 15, 1.0),
    (1.0, 7, 21, 1.0),
    (0.4, 50, 50, 3.0),
    (2.0, 3, 30, 0.5),
    (0.8, 30, 10, 0.5),
]


@pytest.mark.slow
@pytest.mark.nightly("50", "60", "100")
@pytest.mark.parametrize(("sigma", "period", "steps", "eps"), MONTE_CARLO)
def test_delta_against_monte_carlo(sigma, period, steps, eps):
    """10^6 runs a direction: not below by 3 standard errors, not above by 3 % and these."""
    rng, s, trials = np.random.default_rng(0), 1 / sigma, 10**6
    ends = [*range(period, steps + 1, period)] + [steps] * bool(steps % period)
    both = np.zeros((2, 2))  # remove, add; sum and sum of squares
    for _ in range(trials // 10_000):
        for way in range(2):
            loss, first = np.zeros(10_000), 0
            for end in ends:
                y = rng.normal(size=(10_000, end - first))
                mine = rng.integers(period, size=10_000)
                inside = (mine < end - first) & (way == 0)
                y[inside, mine[inside]] += s
                unseen = period - (end - first)
                loss += np.log((np.exp(s * y - s * s / 2).sum(axis=1) + unseen) / period)
                first = end
            value = np.maximum(0.0, -np.expm1(eps - (loss if way == 0 else -loss)))
            both[way] += value.sum(), (value**2).sum()
    mean = both[:, 0] / trials
    error = np.sqrt((both[:, 1] / trials - mean**2) / trials)
    k = int(mean.argmax())
    found = delta(events.allocated(sigma, period, steps), eps)
    assert mean[k] - 3 * error[k] <= found <= 1.03 * mean[k] + 3 * error[k]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    sigma=st.floats(0.3, 5.0), period=st.integers(2, 300), part=st.floats(0, 1),
    spacing=st.floats(0.1, 0.4),
)  # fmt: skip
def test_a_law_of_cells(sigma, period, part, spacing):
    """Probabilities and both means are whole; finer cells cost no more."""
    taken = max(1, round(part * period))
    law, finer = (allocated(sigma, taken, period, s, -50.0) for s in (spacing, spacing / 4))
    for way in (law.remove, law.add):
        assert way.probs.min() >= 0
        assert way.probs.sum() + way.infinity == pytest.approx(1, abs=1e-9)
    other = (law.remove.probs * np.exp(-law.remove.losses)).sum() + law.add.infinity
    assert other == pytest.approx(1, abs=1e-9)
    for eps in (0.0, 0.1, 1.0, 4.0):
        for a, b in ((law.remove, finer.remove), (law.add, finer.add)):
            assert divergence(b, eps) <= divergence(a, eps) * (1 + 1e-4) + 1e-15
    alone = allocated(sigma, 1, 1, spacing / 4, -50.0)  # whoever knows the step sees no less
    assert divergence(finer.remove, 0.1) <= divergence(alone.remove, 0.1) * 1.02 + 1e-9


def test_within_a_stretch_epsilon_only_grows_and_ends_at_the_whole():
    found = [epsilon(events.allocated(1.0, 10, t), 1e-6, resolution=0.1) for t in range(1, 13)]
    assert found == sorted(found)
    assert epsilon(events.allocated(1.0, 10, 0), 1e-6) == 0.0


def test_little_noise_costs_what_it_costs_who_knows_the_step():
    assert epsilon(events.allocated(0.09, 9, 9), 1e-6) == epsilon(events.gaussian(0.09, 1), 1e-6)


def test_an_allocation_is_stored_and_read():
    event = events.allocated(1.5, 10, 25)
    assert event_types.from_json(event_types.to_json(event)) == event


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: epsilon(events.allocated(1.0, 5, 5), 1e-6, relation=REPLACE), "add-or-remove"),
        (lambda: events.allocated(1.0, 0, 5), "period is 0"),
        (lambda: events.allocated(-1.0, 2, 5), "noise multiplier is -1"),
        (
            lambda: epsilon(AllocatedDpEvent(events.gaussian(1.0, 1).event, 3, 4), 1e-6),
            "3 steps cannot have taken 4",
        ),
        (
            lambda: epsilon(AllocatedDpEvent(events.uls(1.0, 0.1, 1).event, 3, 3), 1e-6),
            "Gaussian sums",
        ),
    ],
)
def test_bad_allocations_are_one_sentence(make, message):
    with pytest.raises(BadInputError, match=message):
        make()


@pytest.mark.parametrize("lost", [1e-3, 0.1])
def test_what_is_trimmed_stays_under_both_hypotheses(lost):
    """Nothing of S is lost, nor of its mean: the ends of a table move further apart."""
    for ratio in (allocation._single(0.7, 0.01, 1e-9), allocation._single(2.0, 0.1, 1e-4)):
        made = ratio.trimmed(lost)
        assert len(made.probs) < len(ratio.probs)
        assert made.probs.sum() + made.zero == pytest.approx(1.0, abs=1e-12)
        there = (made.probs * np.exp(made.logs)).sum()
        assert there + made.infinity == pytest.approx(1.0, abs=1e-12)
