"""ISRL-DP: the paper's noise constants, what they really spend, and shuffling amplification."""

import math

import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant

from dpfl_jax import accounting
from dpfl_jax.accounting import REPLACE, closed_forms, events
from dpfl_jax.errors import BadInputError

N, R, K = 1238, 35, 443
DELTA = 1 / N**2
Q = K / N


def spent(z, q=Q, rounds=R, delta=DELTA):
    return accounting.epsilon(events.isrl_dp(z, q, rounds), delta, relation=REPLACE)


def test_replacement_doubles_the_sensitivity():
    # z = 4 under replacement is z = 2 under add-or-remove: 1.99309; undoubled it would be 0.92634.
    event = events.gaussian(4.0, 1)
    assert accounting.epsilon(event, 1e-5, relation=REPLACE) == pytest.approx(1.99309, rel=1e-5)
    assert accounting.epsilon(event, 1e-5) == pytest.approx(0.92634, rel=1e-5)
    rdp = accounting.epsilon(event, 1e-5, relation=REPLACE, accountant="rdp")
    assert 1.99309 <= rdp <= 1.99309 * 1.15


def test_three_accountants_of_one_mechanism():
    # q = .3, T = 35, noise 4: without replacement by RDP 10.12, Poisson replace-one by PLD 3.79.
    poisson = accounting.epsilon(events.isrl_dp(4.0, 0.3, 35), 1e-5, relation=REPLACE)
    fixed = events.fixed_size(4.0, 1000, 300, 35)
    assert poisson == pytest.approx(3.79, abs=5e-3)
    loose = accounting.epsilon(fixed, 1e-5, relation=REPLACE, accountant="rdp")
    assert loose == pytest.approx(10.12, abs=6e-3)
    tight = accounting.epsilon(fixed, 1e-5, relation=REPLACE)
    assert tight < loose
    accountant = PLDAccountant(NeighboringRelation.REPLACE_ONE, value_discretization_interval=1e-3)
    accountant.compose(events.isrl_dp(4.0, 0.3, 35))
    assert poisson == pytest.approx(accountant.get_epsilon(1e-5), rel=5e-3)


@pytest.mark.parametrize(
    ("epsilon", "sigma", "true"),
    [(1, 1.2783, 0.0268), (3, 0.4261, 0.0831), (6, 0.2130, 0.173), (12, 0.1065, 0.362)],
)
def test_minibatch_constant_is_valid_and_loose(epsilon, sigma, true):
    found = closed_forms.minibatch_noise(R, N, epsilon, DELTA)
    assert found == pytest.approx(sigma, abs=5e-5)
    real = spent(found * K)
    # The reference's fixed grid overstates such small losses, by 5 % at most.
    assert 0.94 * true <= real <= 1.002 * true
    assert real < epsilon / 30
    tight = accounting.calibrate_noise_multiplier(
        lambda z: events.isrl_dp(z, Q, R), epsilon, DELTA, relation=REPLACE
    )
    assert tight <= found * K


def test_minibatch_formula_by_hand():
    square = 256 * 35 * math.log(2.5 * 35 / DELTA) * math.log(2 / DELTA) / N**2
    assert closed_forms.minibatch_noise(R, N, 1.0, DELTA) ** 2 == pytest.approx(square)
    assert square == pytest.approx(1.63403, rel=1e-5)
    with pytest.raises(BadInputError):
        closed_forms.minibatch_noise(R, N, 100.0, DELTA)


@pytest.mark.parametrize(
    ("epsilon", "z", "true", "half", "tight"),
    [
        (0.75, 30.13, 0.585, 0.279, 23.90),
        (1.5, 15.07, 1.229, 0.585, 12.54),
        (3, 7.532, 2.610, 1.229, 6.643),
        (6, 3.766, 5.644, 2.610, 3.569),
        (12, 1.883, 12.53, 5.644, 1.955),
        (18, 1.255, 20.27, 8.966, 1.388),
    ],
)
def test_experiment_constant_golden_and_not_a_bound(epsilon, z, true, half, tight):
    found = closed_forms.experiment_noise(R, N, epsilon, DELTA) * K
    assert found == pytest.approx(z, rel=5e-4)
    assert spent(found) == pytest.approx(true, rel=1.5e-3)
    assert spent(2 * found) == pytest.approx(half, rel=1.5e-3)
    if epsilon >= 12:
        assert spent(found) > epsilon
    needed = accounting.calibrate_noise_multiplier(
        lambda s: events.isrl_dp(s, Q, R), epsilon, DELTA, relation=REPLACE
    )
    assert needed == pytest.approx(tight, rel=2e-3)


@pytest.mark.parametrize(
    ("epsilon", "z", "true", "tight"),
    [
        (0.5, 43.03, 0.180, 16.48),
        (1, 21.52, 0.376, 8.623),
        (3, 7.172, 1.22, 3.142),
        (6, 3.586, 2.59, 1.697),
        (12, 1.793, 5.64, 0.943),
        (18, 1.195, 9.03, 0.679),
    ],
)
def test_one_pass_constant_is_valid(epsilon, z, true, tight):
    found = closed_forms.one_pass_noise(1, epsilon, DELTA)
    assert found == pytest.approx(z, rel=5e-4)
    assert spent(found, 1.0, 1) == pytest.approx(true, rel=3e-3)
    needed = accounting.calibrate_noise_multiplier(
        lambda s: events.gaussian(s, 1), epsilon, DELTA, relation=REPLACE
    )
    assert needed == pytest.approx(tight, rel=1e-3)
    assert needed <= found


@pytest.mark.slow
def test_local_sgd_constant_is_not_a_bound():
    steps = R * K
    for epsilon, true in ((0.75, 0.60), (1.5, 1.79), (3, 26.7)):
        z = closed_forms.experiment_noise(steps, N, epsilon, DELTA)
        found = spent(z, 1 / N, steps)
        assert found == pytest.approx(true, rel=2e-2)
        assert (found > epsilon) == (epsilon >= 1.5)
    # Sound noise, to the two digits of the reference.
    for epsilon, sound in ((0.75, 1.18), (3, 0.62)):
        assert spent(sound + 0.01, 1 / N, steps) <= epsilon < spent(sound - 0.01, 1 / N, steps)


def test_shuffling_golden_and_range():
    cases = [
        ((1.0, 1000, 1, 1e-6), 0.56620),
        ((0.5, 10_000, 1, 1e-8), 0.10642),
        ((0.01, 1000, 100, 1e-6), 0.0082061),
    ]
    for arguments, golden in cases:
        assert closed_forms.shuffled_epsilon(*arguments) == pytest.approx(golden, rel=1e-4)
    with pytest.raises(BadInputError):
        closed_forms.shuffled_epsilon(1.0, 25, 1, 1e-6)
    delta = closed_forms.shuffled_delta(0.01, 1000, 100, 1e-6, 1e-13)
    assert delta == pytest.approx(1e-6 + 2 * 1000 * 100 * math.exp(0.99) * 1e-13)


def test_user_level_guarantee_by_hand():
    epsilon, delta = closed_forms.user_level_guarantee(100, 0.01, 2.5e-8)
    # n e^((n-1) e/n) delta / (4 n) <= e delta / 4 < delta: the recipe keeps its promise.
    assert epsilon == pytest.approx(1.0)
    assert delta <= 1e-5
