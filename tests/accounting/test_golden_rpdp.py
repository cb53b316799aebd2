"""rPDP-FL: two-stage sampling, its printed bounds, and the curve fit that overruns budgets."""

import math

import numpy as np
import pytest
from dp_accounting import rdp

from dpfl_jax import accounting
from dpfl_jax.accounting import closed_forms, events, renyi
from reproductions.rpdp._noise import noise_for_cap

SHORT = np.array([2, 3, 4, 5, 8])


def test_lemma_9_golden_and_dp_accounting():
    found = 5 * closed_forms.poisson_gaussian(SHORT, 0.1, 1.0)
    assert found == pytest.approx([0.0851843, 0.1585615, 0.2933630, 0.6493872, 6.8918071], rel=1e-6)
    accountant = rdp.RdpAccountant(list(SHORT)).compose(events.uls(1.0, 0.1, 5))
    assert found == pytest.approx(accountant._rdp, rel=1e-9)
    # Order 2 by hand: log(1 + q^2 (e^{1/s^2} - 1)).
    by_hand = math.log1p(0.01 * math.expm1(1.0))
    assert closed_forms.poisson_gaussian([2], 0.1, 1.0)[0] == pytest.approx(by_hand, rel=1e-12)
    assert closed_forms.poisson_gaussian([4], 1.0, 2.0)[0] == pytest.approx(4 / 8)


def test_quadrature_of_the_general_accountant_is_lemma_9():
    orders = SHORT.astype(float)
    found = renyi.renyi_divergences(events.uls(1.0, 0.1, 5), orders)
    assert found == pytest.approx(5 * closed_forms.poisson_gaussian(SHORT, 0.1, 1.0), rel=1e-9)


def test_lemma_2_golden():
    found = closed_forms.two_stage(SHORT, 0.1, 1.0, 5, 0.5)
    assert found == pytest.approx([0.0434989, 0.0855400, 0.1779640, 0.4940540, 6.7927860], rel=1e-6)
    assert 20 * found == pytest.approx(
        [0.869979, 1.710801, 3.559279, 9.881079, 135.855721], rel=1e-6
    )
    event = events.two_stage(1.0, 0.1, 0.5, 5, 20)
    general = renyi.renyi_divergences(event, SHORT.astype(float))
    assert general == pytest.approx(20 * found, rel=1e-8)
    # lambda = 1 changes nothing.
    plain = 5 * closed_forms.poisson_gaussian(SHORT, 0.1, 1.0)
    assert closed_forms.two_stage(SHORT, 0.1, 1.0, 5, 1.0) == pytest.approx(plain)


def test_theorem_3_golden():
    rates = (0.001, 0.01, 0.1, 0.5, 0.9, 1.0)
    figure_5 = [closed_forms.epsilon_two_stage(q, 1.0, 5, 20, 0.5, 1e-3) for q in rates]
    assert [e for e, _ in figure_5] == pytest.approx(
        [0.26809, 0.56170, 4.20991, 30.49293, 79.11737, 91.79282], rel=2e-5
    )
    assert [a for _, a in figure_5] == [14, 9, 3, 2, 2, 2]
    figure_2 = [closed_forms.epsilon_two_stage(q, 1.0, 1, 100, 1.0, 1e-3) for q in rates]
    assert [e for e, _ in figure_2] == pytest.approx(
        [0.28181, 0.64559, 5.67034, 41.25886, 92.72643, 105.52146], rel=2e-5
    )
    assert [a for _, a in figure_2] == [14, 8, 3, 2, 2, 2]
    mironov = [
        closed_forms.epsilon_two_stage(0.1, 1.0, *args, 1e-3, conversion="mironov")[0]
        for args in ((5, 20, 0.5), (1, 100, 1.0))
    ]
    assert mironov == pytest.approx([5.16468, 6.62511], rel=2e-6)


def test_noise_for_the_public_cap_to_the_last_digit():
    settings = [
        ((10, 50, 15, 1.0, 1e-3), 12.2509765625),
        ((10, 50, 15, 0.8, 1e-4), 12.373046875),
        ((10, 5, 20, 0.5, 1e-3), 3.50830078125),
        ((3, 1, 100, 1.0, 1e-3), 11.484375),
        ((5.95, 1, 100, 1.0, 1e-3), 6.6015625),
    ]
    for arguments, golden in settings:
        assert noise_for_cap(*arguments) == golden


def test_server_formula_is_not_a_bound():
    # Golden: .606 / 8.516 against .659 / 9.995 (and .889 / 13.382 without client sampling).
    for q, server, clients, always in ((0.1, 0.606, 0.659, 0.889), (1.0, 8.516, 9.995, 13.382)):
        args = (q, 10.752, 50, 15)
        found = closed_forms.epsilon_two_stage(*args, 0.5, 1e-4, adversary="server")[0]
        sound = closed_forms.epsilon_two_stage(*args, 0.5, 1e-4)[0]
        assert (found, sound) == pytest.approx((server, clients), abs=1e-3)
        assert closed_forms.epsilon_two_stage(*args, 1.0, 1e-4)[0] == pytest.approx(
            always, abs=1e-3
        )
        assert found < sound
    # The violation itself, at every order, by Jensen: the server sees at least what clients see.
    inner = 50 * closed_forms.poisson_gaussian(SHORT, 1.0, 10.752)
    assert np.all(0.5 * inner < closed_forms.two_stage(SHORT, 1.0, 10.752, 50, 0.5))


def test_server_formula_is_below_the_true_divergence():
    # One round, one local full-batch step: what the server sees is exactly (omega, output), whose
    # delta is lambda times the Gaussian's. At small delta the printed epsilon is too small.
    sigma, lam, delta = 1.0, 0.5, 1e-6
    printed, _ = closed_forms.epsilon_two_stage(1.0, sigma, 1, 1, lam, delta, adversary="server")
    true_delta = lam * accounting.delta(events.gaussian(sigma, 1), printed)
    assert true_delta > 5 * delta


def test_tight_two_stage_golden_and_below_the_papers_bound():
    cases = [  # epsilon by PLD and by the paper's Renyi formula
        ((1.0, 0.1, 0.5, 5, 20), 1e-3, 3.4223, 4.2099),
        ((10.7483, 0.02254, 0.5, 50, 15), 1e-4, 0.1047, 0.1238),
        ((10.7483, 0.14018, 0.5, 50, 15), 1e-4, 0.8422, 0.9643),
        ((10.7483, 0.58046, 0.5, 50, 15), 1e-4, 4.4402, 4.9915),
        ((12.2509765625, 0.02536, 1.0, 50, 15), 1e-3, 0.0989, 0.1211),
        ((12.373046875, 0.02197, 0.8, 50, 15), 1e-4, 0.1095, 0.1270),
    ]
    for arguments, delta, golden, by_renyi in cases:
        found = accounting.epsilon(events.two_stage(*arguments), delta)
        assert found == pytest.approx(golden, rel=1e-3)
        sigma, q, lam, tau, rounds = arguments
        renyi_epsilon = closed_forms.epsilon_two_stage(q, sigma, tau, rounds, lam, delta)[0]
        assert renyi_epsilon == pytest.approx(by_renyi, rel=1e-3)
        assert found < renyi_epsilon


def test_two_stage_with_certain_participation_is_plain_composition():
    two = accounting.epsilon(events.two_stage(2.0, 0.1, 1.0, 5, 20), 1e-4)
    assert two == pytest.approx(accounting.epsilon(events.uls(2.0, 0.1, 100), 1e-4), rel=1e-9)
    # And nearly-certain participation is near it: the mixed round is discretised rightly.
    near = accounting.epsilon(events.two_stage(2.0, 0.1, 0.9999, 5, 20), 1e-4)
    assert near == pytest.approx(two, rel=2e-3)


# (tau, T, lambda, delta): sigma at integer and at fractional orders, where also the rates that
# cost exactly epsilon 0.1, 1, 3 and 5 (rpdp_fl 5.2).
TABLE_1 = {
    "Heart": ((10, 15, 1.0, 1e-3), 5.4769, 5.3641, (0.02073, 0.14703, 0.37410, 0.56672)),
    "MNIST": ((50, 15, 0.5, 1e-4), 10.7483, 10.5798, (0.01836, 0.14237, 0.37114, 0.57185)),
    "CIFAR": ((50, 30, 0.5, 1e-4), 14.4358, 14.3081, (0.01810, 0.14140, 0.36948, 0.57063)),
}


@pytest.mark.parametrize("name", TABLE_1)
def test_table_1_presets(name):
    (tau, rounds, lam, delta), whole, fractional, rates = TABLE_1[name]
    at_cap = closed_forms.epsilon_two_stage(1.0, whole, tau, rounds, lam, delta)[0]
    assert at_cap == pytest.approx(10.0, rel=2e-5)

    def renyi_epsilon(q):
        event = events.two_stage(fractional, q, lam, tau, rounds)
        return accounting.epsilon(event, delta, accountant="rdp")

    assert renyi_epsilon(1.0) == pytest.approx(10.0, rel=1e-3)
    for budget, rate in zip((0.1, 1.0, 3.0, 5.0), rates, strict=True):
        # The reference lost some fractional orders: its rates are certified, if not the largest.
        found = renyi_epsilon(rate)
        assert 0.98 * budget <= found <= 1.003 * budget
    # PLD is never above the Renyi value.
    noise = accounting.calibrate_noise_multiplier(
        lambda s: events.two_stage(s, 1.0, lam, tau, rounds), 10.0, delta
    )
    assert noise <= fractional * 1.001


def test_binary_search_golden():
    args = (11.484375, 1, 100, 1.0, 1e-3)
    found = [closed_forms.binary_search_rate(e, *args) for e in (1.0, 2.0, 3.0)]
    assert found == pytest.approx([0.39209592, 0.71094039, 0.99902345], abs=1e-8)
    fit = closed_forms.fit_curve(*args)
    assert [fit.rate(e) for e in (1.0, 2.0, 3.0)] == pytest.approx(
        [0.39089506, 0.71363807, 1.0], rel=1e-5
    )
    # Certified by construction, and nobody is sampled whose budget is below the floor.
    assert all(
        closed_forms.epsilon_two_stage(q, *args)[0] <= e
        for q, e in zip(found, (1, 2, 3), strict=True)
    )
    assert closed_forms.binary_search_rate(1e-3, 11.484375, 1, 100, 1.0, 1e-9) == 0.0


def test_curve_fit_golden_and_overruns_small_budgets():
    fit = closed_forms.fit_curve(12.373046875, 50, 15, 0.8, 1e-4)
    assert (fit.a, fit.b, fit.c) == pytest.approx((0.5446, 2.6380, -14.0540), rel=1e-3)
    assert fit.r_squared == pytest.approx(0.99985, abs=1e-5)
    budgets = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
    rates = [fit.rate(e) for e in budgets]
    assert rates == pytest.approx([0.02197, 0.03489, 0.07314, 0.13516, 0.25325, 0.56782], rel=1e-3)
    cost = [closed_forms.epsilon_two_stage(q, 12.373046875, 50, 15, 0.8, 1e-4)[0] for q in rates]
    assert cost == pytest.approx([0.1270, 0.2131, 0.4858, 0.9637, 1.9545, 5.0028], rel=2e-3)
    assert cost[0] > 1.25 * budgets[0]
    # Tight accounting does not save it either.
    tight = accounting.epsilon(events.two_stage(12.373046875, rates[0], 0.8, 50, 15), 1e-4)
    assert tight > budgets[0]
    assert fit.rate(-20.0) == 0.0
    assert fit.rate(50.0) == 1.0


@pytest.mark.parametrize(
    ("preset", "golden", "r_squared"),
    [
        ((12.2509765625, 50, 15, 1.0, 1e-3), (0.7077, 2.2768, -9.8223), 0.99988),
        ((5.4769, 10, 15, 1.0, 1e-3), (0.6606, 2.3724, -10.8011), 0.99988),
        ((10.7483, 50, 15, 0.5, 1e-4), (0.6063, 2.4855, -12.0725), 0.99984),
    ],
)
def test_curve_fit_of_the_presets(preset, golden, r_squared):
    fit = closed_forms.fit_curve(*preset)
    assert (fit.a, fit.b, fit.c) == pytest.approx(golden, rel=2e-3)
    assert fit.r_squared == pytest.approx(r_squared, abs=6e-6)
    worst = max(
        closed_forms.epsilon_two_stage(fit.rate(e), *preset)[0] / e for e in (0.1, 0.12, 0.15)
    )
    assert worst > 1.15


def test_expected_batches_of_the_published_runs():
    """Of three levels (0.1, 1, 5) in a silo; the strictest alone is Minimum's batch."""
    runs = [
        ((12.2509765625, 50, 15, 1.0, 1e-3), 199, 21, 5),  # Heart, first hospital
        ((12.373046875, 50, 15, 0.8, 1e-4), 3960, 392, 86),  # MNIST; 86.98 is cut off
        ((10.7483, 50, 15, 0.5, 1e-4), 3960, 403, 89),
    ]
    for preset, records, personal, minimum in runs:
        fit = closed_forms.fit_curve(*preset)
        rates = [fit.rate(e) for e in (0.1, 1.0, 5.0)]
        first, second = int(0.7 * records), int(0.2 * records)
        counts = (first, second, records - first - second)
        assert int(sum(q * n for q, n in zip(rates, counts, strict=True))) == personal
        assert int(rates[0] * records) == minimum
