"""Against numerical integration written here from the definition, Monte Carlo, and exact cases."""

import math
from typing import get_args

import numpy as np
import pytest
from scipy import stats

from dpfl_jax import accounting
from dpfl_jax.accounting import closed_forms, events, renyi
from dpfl_jax.accounting.accountant import _composed
from dpfl_jax.accounting.leaves import flatten
from reproductions.userlevel import _closed_forms as userlevel


class Mixture:
    """N(0, s^2) against N(Binom(G, p), s^2): the definition, by quadrature."""

    def __init__(self, sigma, prob, size):
        self.sigma, self.prob, self.size = sigma, prob, size
        self.counts = np.arange(size + 1)
        self.weights = stats.binom.pmf(self.counts, size, prob)

    def loss(self, x):
        c, s2 = self.counts, self.sigma**2
        exponents = (2 * c * np.atleast_1d(x)[:, None] - c**2) / (2 * s2)
        highest = exponents.max(axis=1)
        return highest + np.log(np.exp(exponents - highest[:, None]) @ self.weights)

    def root(self, values):
        """Where the loss, which grows with x, is each of the values: by bisection."""
        reach = 40 * self.sigma + self.size
        low, high = np.full(len(values), -reach), np.full(len(values), 40 * reach)
        for _ in range(70):
            middle = (low + high) / 2
            above = self.loss(middle) > values
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        return np.where(values <= self.size * math.log1p(-self.prob), -np.inf, high)

    def delta(self, epsilons, removed):
        """Hockey-stick divergence at any real epsilons, one step."""
        epsilons = np.atleast_1d(epsilons)
        x, s = self.root(epsilons if removed else -epsilons), self.sigma
        each = (x[:, None] - self.counts) / s
        if removed:
            return stats.norm.sf(each) @ self.weights - np.exp(epsilons) * stats.norm.sf(x / s)
        return stats.norm.cdf(x / s) - np.exp(epsilons) * (stats.norm.cdf(each) @ self.weights)

    def delta_two(self, epsilon, removed):
        """Two steps: the first one's loss shifts epsilon of the second."""
        s = self.sigma
        x = np.linspace(-9 * s, 9 * s + self.size, 3001)
        density = stats.norm.pdf(x, scale=s)
        if removed:
            density = stats.norm.pdf(x[:, None] - self.counts, scale=s) @ self.weights
        loss = self.loss(x) * (1 if removed else -1)
        return float(np.trapezoid(density * self.delta(epsilon - loss, removed), x))


CASES = [(2.0, 0.05, 8), (1.0, 0.2, 3), (0.8, 0.1, 1), (5.0, 0.3, 16)]


@pytest.mark.parametrize(("sigma", "prob", "size"), CASES)
@pytest.mark.parametrize("epsilon", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("removed", [True, False])
def test_one_and_two_steps_agree_with_quadrature(sigma, prob, size, epsilon, removed):
    truth = Mixture(sigma, prob, size)
    for steps, exact in (
        (1, float(truth.delta(epsilon, removed)[0])),
        (2, truth.delta_two(epsilon, removed)),
    ):
        flat = flatten(events.els(sigma, prob, size, steps), accounting.ADD_OR_REMOVE)
        direction = "remove" if removed else "add"
        found = _composed(flat, direction, [max(exact, 1e-9)], 0.004, -60.0).delta(epsilon)
        assert exact - 1e-11 <= found <= exact + 1e-6


def test_published_quadrature_value():
    truth = Mixture(2.0, 0.05, 8)
    assert truth.delta(0.3, True)[0] == pytest.approx(0.017310163, abs=1e-9)
    assert truth.delta(0.3, False)[0] == pytest.approx(1.2919e-4, rel=1e-4)


@pytest.mark.slow
def test_monte_carlo_of_a_subsampled_mixture():
    # 40 steps; delta(1.5) estimated from 400,000 runs. False alarms: about 6e-7 (5 sd, two sides).
    sigma, prob, size, steps, epsilon = 2.0, 0.05, 4, 40, 1.5
    rng = np.random.default_rng(7)
    truth = Mixture(sigma, prob, size)
    runs = 400_000
    total = np.zeros(runs)
    for _ in range(steps):
        x = rng.binomial(size, prob, runs) + sigma * rng.standard_normal(runs)
        total += truth.loss(x)
    gain = np.maximum(-np.expm1(epsilon - total), 0.0)
    mean, error = gain.mean(), gain.std() / math.sqrt(runs)
    found = accounting.delta(events.els(sigma, prob, size, steps), epsilon)
    assert abs(found - mean) <= 5 * error + 1e-3 * mean
    assert error < 0.02 * mean


@pytest.mark.parametrize("delta", [1e-15, 1e-9, 1e-6])
@pytest.mark.parametrize("steps", [1, 1000, 1_000_000])
def test_general_composition_is_exact_on_gaussians_even_at_tiny_delta(delta, steps):
    # A mixture with one certain sensitivity is a Gaussian, whose epsilon is known exactly; the
    # second atom (probability 1e-300) keeps it on the general path.
    sigma = 1.3 * math.sqrt(steps)
    mixture = events.mixture(sigma, [1.0, 1.0 + 1e-12], [1 - 1e-16, 1e-16], steps)
    exact = accounting.epsilon(events.gaussian(sigma, steps), delta)
    found = accounting.epsilon(mixture, delta, resolution=0.015)
    assert exact * (1 - 1e-9) <= found <= exact * 1.002


@pytest.mark.parametrize("size", [1, 4, 32])
def test_renyi_quadrature_against_exact_integer_orders(size):
    orders = np.array([2.0, 3.0, 5.0, 8.0])
    found = renyi.renyi_divergences(events.els(1.5, 0.03, size, 1), orders)
    exact = [userlevel.renyi_of_binomial_mixture(int(a), 1.5, size, 0.03) for a in orders]
    assert found == pytest.approx(exact, rel=1e-8)
    # Order 2 by hand: sum of w_c w_d e^{c d / s^2}.
    counts = np.arange(size + 1)
    w = stats.binom.pmf(counts, size, 0.03)
    by_hand = math.log(w @ np.exp(np.outer(counts, counts) / 1.5**2) @ w)
    assert exact[0] == pytest.approx(by_hand, rel=1e-10)


def test_lemma_1_on_a_grid():
    for order in (2, 3, 4, 8, 16):
        for size in (2, 8, 32):
            for prob in (0.001, 0.01, 0.1, 0.5):
                for sigma in (0.5, 1.0, 4.0):
                    assert userlevel.lemma_1_holds(order, sigma, size, prob)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 8, 32])
@pytest.mark.parametrize(
    ("prob", "steps"),
    [
        (0.001, 100),
        (0.01, 1000),
        (0.1, 10),
        (0.5, 100),
    ],
)
def test_conjecture_1_noise_of_els_is_at_most_k_times_uls(size, prob, steps):
    els = accounting.calibrate_noise_multiplier(
        lambda s: events.els(s, prob, size, steps), 1.0, 1e-6
    )
    uls = accounting.calibrate_noise_multiplier(lambda s: events.uls(s, prob, steps), 1.0, 1e-6)
    assert els <= size * uls * (1 + 3e-4)


# (sigma, G): mixture, black box on the PLD curve, black box on the RDP curve in log space.
FIGURE_1 = [
    ((1, 1), (2.96, 2.96, 3.26)),
    ((1, 2), (6.43, 6.98, 7.78)),
    ((2, 2), (2.20, 2.24, 2.40)),
    ((2, 8), (10.7, 12.5, 13.3)),
    ((4, 4), (2.06, 2.12, 2.24)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "golden"), FIGURE_1)
def test_black_box_group_privacy_golden_and_looser(setting, golden):
    sigma, size = setting
    mixture = accounting.epsilon(events.els(sigma, 0.01, size, 2000), 1e-6)
    example = events.poisson(sigma, 0.01, 2000)
    pld = closed_forms.black_box_epsilon(example, size, 1e-6, accountant="pld")
    rdp = closed_forms.black_box_epsilon(example, size, 1e-6)
    assert mixture == pytest.approx(golden[0], rel=5e-3)
    # The reference scanned example-level epsilons in steps of about 0.01, always upwards.
    assert golden[1] * 0.97 <= pld <= golden[1] * 1.002
    assert golden[2] * 0.96 <= rdp <= golden[2] * 1.002
    assert mixture <= pld * (1 + 1e-9) <= rdp * (1 + 2e-9)


def test_log_space_black_box_is_finite_where_floating_point_is_not():
    huge = closed_forms.black_box_epsilon(events.poisson(0.5, 0.01, 2000), 4, 1e-6)
    assert huge == pytest.approx(128_900, rel=1e-2)  # Renyi orders up to 4,000 bound it
    found = closed_forms.black_box_epsilon(events.poisson(1, 0.01, 2000), 8, 1e-6)
    assert found == pytest.approx(314, rel=1e-2)
    vadhan = closed_forms.black_box_epsilon(events.poisson(4, 0.01, 2000), 8, 1e-6, form="vadhan")
    marathe = closed_forms.black_box_epsilon(events.poisson(4, 0.01, 2000), 8, 1e-6, form="marathe")
    geometric = closed_forms.black_box_epsilon(events.poisson(4, 0.01, 2000), 8, 1e-6)
    assert geometric <= marathe <= vadhan


def test_group_lemma_by_hand():
    factor = {
        form: math.exp(closed_forms.log_delta_factor(0.5, 3, form))
        for form in get_args(closed_forms.Form)
    }
    assert factor["geometric"] == pytest.approx(1 + math.exp(0.5) + math.exp(1.0))
    assert factor["marathe"] == pytest.approx(3 * math.e)
    assert factor["vadhan"] == pytest.approx(3 * math.exp(1.5))


@pytest.mark.slow
def test_noise_is_smaller_than_under_group_privacy_for_every_group_size():
    from benchmarks.accounting import group_rows

    rows = group_rows((2, 8, 32, 128))
    assert all(row["ratio"] > 1.05 for row in rows)
    assert rows[-1]["ratio"] > 1.25


def test_large_noise_rule_is_near_and_below():
    sigma = accounting.calibrate_noise_multiplier(
        lambda s: events.els(s, 64 / 32768, 32, 1000), 1.0, 1e-6
    )
    rule = userlevel.large_noise_els(64, 1024, 1000, 1.0, 1e-6)
    assert 0.95 * sigma <= rule < sigma
