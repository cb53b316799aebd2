"""Noise multipliers and deltas that were computed independently, and the identities of ELS/ULS."""

import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from dpfl_jax import accounting
from dpfl_jax.accounting import events
from dpfl_jax.accounting.accountant import FINEST
from dpfl_jax.accounting.drawn import RESERVED
from dpfl_jax.errors import BadInputError

# dp-accounting 0.6.0 with a grid of 1e-4, bisected to 2e-5.
GOLDEN = [
    (lambda s: events.els(s, 64 / 32768, 32, 1000), 8.44425),
    (lambda s: events.els(s, 1 / 16, 1, 1000), 8.43676),
    (lambda s: events.uls(s, 1 / 16, 1000), 8.43676),
    (lambda s: events.uls(s, 16 / 1024, 1000), 2.26069),
    (lambda s: events.els(s, 1 / 64, 16, 256), 17.03911),
]


@pytest.mark.parametrize(("make_event", "golden"), GOLDEN)
def test_calibrated_noise_is_the_golden_value_and_certified(make_event, golden):
    sigma = accounting.calibrate_noise_multiplier(make_event, 1.0, 1e-6)
    assert sigma == pytest.approx(golden, rel=2e-4)
    # Certified on the finest grid, and not below what dp-accounting's own fine grid asks for.
    assert accounting.epsilon(make_event(sigma), 1e-6, resolution=FINEST) <= 1.0
    assert sigma >= golden * (1 - 2e-5)
    # Nothing wasted either.
    assert accounting.epsilon(make_event(sigma * 0.9995), 1e-6) > 1.0


def test_calibrated_noise_satisfies_dp_accounting_itself():
    sigma = accounting.calibrate_noise_multiplier(GOLDEN[0][0], 1.0, 1e-6)
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(GOLDEN[0][0](sigma))
    assert accountant.get_epsilon(1e-6) <= 1.0


@pytest.mark.parametrize("sigma", [0.6, 1.0, 4.0])
def test_els_with_one_example_is_uls(sigma):
    one = accounting.epsilon(events.els(sigma, 0.01, 1, 200), 1e-6)
    assert one == pytest.approx(accounting.epsilon(events.uls(sigma, 0.01, 200), 1e-6), rel=1e-12)
    mixture = events.mixture(sigma, [0, 1], [0.99, 0.01], 200)
    assert one == pytest.approx(accounting.epsilon(mixture, 1e-6), rel=1e-9)


def test_poisson_gaussian_agrees_with_dp_accounting():
    event = events.uls(1.1, 0.02, 300)
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(event)
    ours = accounting.epsilon(event, 1e-6, resolution=FINEST)
    assert ours == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-3)


def test_two_directions_are_composed_apart_and_the_worse_one_counts():
    # T=1, G=8, p=0.05, sigma=2, eps=0.3: 0.017310163 by quadrature (removal), 1.29e-4 (addition).
    delta = accounting.delta(events.els(2.0, 0.05, 8, 1), 0.3, resolution=0.005)
    assert 0.017310163 - 1e-9 <= delta <= 0.017310163 + 1e-6


def test_gaussian_alone_is_the_analytic_formula():
    event = events.composed(events.gaussian(2.0, 4), events.gaussian(3.0, 9))
    sigma = 1 / math.sqrt(4 / 4 + 9 / 9)
    expected = dp_accounting.get_epsilon_gaussian(sigma, 1e-5 * (1 - RESERVED))
    assert accounting.epsilon(event, 1e-5) == pytest.approx(expected, rel=1e-9)
    epsilon = accounting.epsilon(event, 1e-5)
    assert accounting.delta(event, epsilon) == pytest.approx(1e-5, rel=5e-8)


def test_no_privacy_is_infinite_and_nothing_is_zero():
    assert accounting.epsilon(dp_accounting.NonPrivateDpEvent(), 1e-6) == math.inf
    assert accounting.delta(dp_accounting.NonPrivateDpEvent(), 3.0) == 1.0
    assert accounting.epsilon(events.els(0.0, 0.1, 4, 3), 1e-6) == math.inf
    assert accounting.epsilon(events.els(1.0, 0.0, 4, 3), 1e-6) == 0.0
    assert accounting.epsilon(events.els(1.0, 0.1, 4, 0), 1e-6) == 0.0
    assert accounting.epsilon_curve(dp_accounting.NonPrivateDpEvent(), [0, 5], 1e-6) == [
        0.0,
        math.inf,
    ]


def test_curve_bounds_epsilon_from_above_closely():
    steps = [0, 1, 10, 100, 1000]
    curve = accounting.epsilon_curve(events.els(4.0, 0.01, 8, 1), steps, 1e-6)
    assert curve[0] == 0.0
    for t, bound in zip(steps[1:], curve[1:], strict=True):
        exact = accounting.epsilon(events.els(4.0, 0.01, 8, t), 1e-6, resolution=FINEST)
        # Both are upper bounds, "exact" one of at most a few parts in 1e5 above the truth.
        assert exact * (1 - 5e-5) <= bound <= exact * 1.01


def test_heterogeneous_steps_compose():
    parts = [events.els(4.0, 0.01, 8, 50), events.uls(2.0, 0.02, 70), events.gaussian(40.0, 30)]
    together = accounting.epsilon(events.composed(*parts), 1e-6)
    accountant = PLDAccountant(value_discretization_interval=2e-4)
    for part in parts:
        accountant.compose(part)
    assert together == pytest.approx(accountant.get_epsilon(1e-6), rel=2e-3)
    assert together > max(accounting.epsilon(part, 1e-6) for part in parts)


@pytest.mark.parametrize(
    "call",
    [
        lambda: events.els(1.0, 1.5, 4, 10),
        lambda: events.els(-1.0, 0.5, 4, 10),
        lambda: events.els(1.0, 0.5, 0, 10),
        lambda: events.els(1.0, 0.5, 4, -1),
        lambda: accounting.epsilon(events.uls(1.0, 0.1, 1), 0.0),
        lambda: accounting.epsilon(events.uls(1.0, 0.1, 1), 1.0),
        lambda: accounting.epsilon(dp_accounting.UnsupportedDpEvent(), 1e-5),
        lambda: accounting.calibrate_noise_multiplier(
            lambda s: events.composed(events.uls(s, 0.1, 5), events.gaussian(0.1, 5)), 1.0, 1e-5
        ),
    ],
)
def test_bad_input_is_one_sentence(call):
    with pytest.raises(BadInputError) as caught:
        call()
    assert "\n" not in str(caught.value)
