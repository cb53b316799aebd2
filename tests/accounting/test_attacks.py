"""What attackers may find out: against exact trade-offs, and against attacks that are made."""

import json
import math

import numpy as np
import pytest
from scipy import special, stats

from dpfl_jax import accounting
from dpfl_jax.accounting import attacks, events
from dpfl_jax.accounting.event_types import ApproximateDpEvent
from dpfl_jax.cli.main import main
from dpfl_jax.errors import BadInputError

RATES = np.array([1e-6, 1e-4, 1e-3, 1e-2, 0.05, 0.2, 0.5, 0.9])


@pytest.mark.parametrize(("sigma", "steps"), [(4.0, 1), (1.0, 1), (5.0, 100)])
def test_gaussians_have_the_power_of_the_best_test(sigma, steps):
    """Neyman and Pearson: power Phi(Phi^-1(a) + mu) (Dong et al. 2022, (6))."""
    mu = math.sqrt(steps) / sigma
    found = accounting.meaning(events.gaussian(sigma, steps), 1e-6)
    exact = stats.norm.cdf(stats.norm.ppf(RATES) + mu)
    told = np.array([found.true_positive_rate(a) for a in RATES])
    assert np.all(exact <= told)
    np.testing.assert_allclose(told, exact, rtol=0.01)
    assert found.advantage == pytest.approx(2 * stats.norm.cdf(mu / 2) - 1, rel=1e-6)
    assert mu <= found.mu <= 1.02 * mu


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-3), (2.0, 0.01), (1.0, 0.0)])
def test_what_is_known_of_one_epsilon_and_delta(epsilon, delta):
    """The trade-off of (epsilon, delta)-DP (Kairouz et al. 2015; Dong et al. 2022, (5))."""
    found = accounting.meaning(ApproximateDpEvent(epsilon, delta), max(1.01 * delta, 1e-6))
    for a in RATES:
        exact = min(delta + math.exp(epsilon) * a, 1 - math.exp(-epsilon) * (1 - delta - a), 1.0)
        assert exact * (1 - 1e-12) <= found.true_positive_rate(a) <= exact * 1.02 + 1e-12
    plain = attacks.meaning_of_bound(epsilon, delta)
    for a in RATES:
        exact = min(delta + math.exp(epsilon) * a, 1 - math.exp(-epsilon) * (1 - delta - a), 1.0)
        assert plain.true_positive_rate(a) == pytest.approx(exact, rel=1e-9)
    exact = (math.exp(epsilon) - 1 + 2 * delta) / (math.exp(epsilon) + 1)
    assert plain.advantage == pytest.approx(exact)
    assert exact <= found.advantage * (1 + 1e-6)
    assert all("inf" not in sentence for sentence in plain.sentences())


@pytest.mark.slow
def test_the_best_attack_on_users_is_never_better_than_told():
    """40 steps of ELS, 400,000 runs each way, attacked by their likelihood ratio.

    False alarms: each comparison allows 5 standard errors of its estimate, together below 1e-5.
    """
    sigma, prob, size, steps, runs = 2.0, 0.05, 4, 40, 400_000
    found = accounting.meaning(events.els(sigma, prob, size, steps), 1e-5)
    rng, counts = np.random.default_rng(11), np.arange(size + 1)
    weights = stats.binom.pmf(counts, size, prob)

    def losses(present):
        total = np.zeros(runs)
        for _ in range(steps):
            x = sigma * rng.standard_normal(runs)
            x += rng.binomial(size, prob, runs) if present else 0.0
            exponents = (2 * counts * x[:, None] - counts**2) / (2 * sigma**2)
            total += np.log(np.exp(exponents) @ weights)
        return total

    absent, present = losses(False), losses(True)
    for a in (1e-3, 1e-2, 0.05, 0.3):
        threshold = np.quantile(absent, 1 - a)
        wrong, right = np.mean(absent > threshold), np.mean(present > threshold)
        error = math.sqrt(right / runs) + 5 * math.sqrt(a / runs)  # the threshold errs, too
        told = found.true_positive_rate(wrong)
        assert right <= told + 5 * error
        assert told <= 1.05 * right + 5 * error  # and it is nearly reached
    for but_for in (0.1, 1e-2, 1e-3):
        belief = special.expit(special.logit(0.3) + present)
        higher = np.mean(belief > found.posterior(0.3, but_for))
        assert higher <= but_for + 5 * math.sqrt(but_for / runs)


def test_a_record_is_not_named_more_often_than_told():
    """k Gaussian means, one per candidate: the best guess is the largest."""
    sigma, runs = 1.0, 100_000
    rng = np.random.default_rng(3)
    found = accounting.meaning(events.gaussian(sigma, 1), 1e-6)
    for k in (2, 10, 100):
        draws = sigma * rng.standard_normal((runs, k))
        draws[:, 0] += 1.0
        named = np.mean(draws.argmax(axis=1) == 0)
        assert named <= found.guessing(k) + 5 * math.sqrt(0.25 / runs)
    assert found.guessing(2) < 1.0


def test_more_noise_tells_less_and_a_bound_is_never_below_chance():
    one, two = (accounting.meaning(events.uls(s, 0.02, 500), 1e-6) for s in (0.8, 1.6))
    for a in RATES:
        assert a <= two.true_positive_rate(a) <= one.true_positive_rate(a) <= 1
    assert two.mu < one.mu
    assert two.posterior(0.2) < one.posterior(0.2)
    assert (one.posterior(0.0), one.posterior(1.0)) == (0.0, 1.0)
    assert one.posterior(0.5, but_for=1e-9) > one.posterior(0.5, but_for=1e-2)
    assert accounting.meaning(events.repeated(events.gaussian(1.0, 1), 0), 1e-6).advantage == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "event",
    [
        events.els(2.0, 0.01, 4, 100),
        events.uls(1.2, 0.01, 20),
        events.composed(events.uls(1.0, 0.1, 3), events.gaussian(3.0, 2)),
        ApproximateDpEvent(1.0, 1e-4),
    ],
)
def test_a_curve_of_deltas_is_that_of_single_ones(event):
    at = np.array([0.0, 1e-4, 0.3, 1.0, 2.0, 9.0, 60.0, math.inf])
    together = accounting.delta_curve(event, at)
    alone = np.array([accounting.delta(event, float(e)) for e in at])
    assert np.all(np.diff(together) <= 0)
    exact = 1e-4 if event == ApproximateDpEvent(1.0, 1e-4) else 0.0
    assert exact <= alone[-1] <= exact * (1 + 1e-6) + 1e-100
    np.testing.assert_allclose(together, alone, rtol=1e-3, atol=1e-11)


def test_no_guarantee_and_odd_questions_are_one_sentence():
    with pytest.raises(BadInputError, match="no guarantee at this delta"):
        accounting.meaning(events.gaussian(0.0, 1), 1e-6)
    found = accounting.meaning(events.gaussian(3.0, 1), 1e-6)
    with pytest.raises(BadInputError, match="at least 2"):
        found.guessing(1)
    with pytest.raises(BadInputError, match="rate of false alarms"):
        found.true_positive_rate(1.5)


def test_hardly_any_noise_is_told_as_what_it_is():
    found = accounting.meaning(events.gaussian(0.0005, 1), 1e-5)
    assert found.to_json()["gaussian_mu"] is None
    assert found.advantage == found.posterior(0.5) == 1.0
    assert all("inf" not in sentence for sentence in found.sentences())


@pytest.mark.parametrize("value", [1.2345e-7, 0.00123456, 0.12, 0.5, 0.98765, 0.999951, 1.0, 0.0])
def test_shares_are_rounded_upwards(value):
    told = float(attacks._share(value).removesuffix(" %")) / 100
    assert value * (1 - 1e-9) <= told <= value * 1.01 + 1e-12


def test_the_command_explains(capsys, tmp_path):
    code = main(
        [
            "account", "uls", "--noise-multiplier", "1.2", "--delta", "1e-6", "--steps", "100",
            "--sampling-prob", "0.01", "--explain", "--plot", str(tmp_path / "a.png"),
            "--plot-against", "attacks", "--json",
        ]
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0
    told = json.loads(printed.out.strip().splitlines()[-1])["meaning"]
    assert told["true_positive_rate"]["0.001"] > 0.001
    assert (
        "An attacker who wrongly accuses 0.1 % of those who took no part finds at most"
        in printed.err
    )
    assert (tmp_path / "a.png").stat().st_size > 10_000
