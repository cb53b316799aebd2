"""Monotone in every parameter, safe at the extremes; calibration of every parameter; the cache."""

import itertools
import json
import math
import warnings

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpfl_jax import accounting
from dpfl_jax.accounting import events
from dpfl_jax.accounting.accountant import FINEST
from dpfl_jax.accounting.calibrate import coarse_noise_multiplier
from dpfl_jax.errors import BadInputError

few = settings(derandomize=True, deadline=None, max_examples=8)

NOISE = st.floats(0.7, 20.0)
PROB = st.floats(1e-3, 0.5)
SIZE = st.integers(1, 24)
STEPS = st.integers(1, 300)
DELTA = st.sampled_from([1e-9, 1e-6, 1e-3])
# The grid moves with the parameters, so that bounds may cross by its own error.
SLACK = 1 + 2e-3


@pytest.mark.slow
@few
@given(NOISE, PROB, SIZE, STEPS, DELTA)
def test_epsilon_is_monotone_in_every_parameter(sigma, prob, size, steps, delta):
    here = accounting.epsilon(events.els(sigma, prob, size, steps), delta)
    assert math.isfinite(here)
    assert here >= 0
    assert accounting.epsilon(events.els(1.1 * sigma, prob, size, steps), delta) <= here * SLACK
    more = [
        events.els(sigma, min(1.0, 1.1 * prob), size, steps),
        events.els(sigma, prob, size + 1, steps),
        events.els(sigma, prob, size, steps + 1 + steps // 10),
    ]
    for event in more:
        assert accounting.epsilon(event, delta) * SLACK >= here
    assert accounting.epsilon(events.els(sigma, prob, size, steps), delta / 3) * SLACK >= here


@pytest.mark.slow
@few
@given(NOISE, PROB, SIZE, STEPS)
def test_delta_and_epsilon_are_inverse_and_accountants_ordered(sigma, prob, size, steps):
    event = events.els(sigma, prob, size, steps)
    epsilon = accounting.epsilon(event, 1e-6)
    if epsilon > 0:
        assert accounting.delta(event, epsilon) == pytest.approx(1e-6, rel=2e-2)
    assert epsilon <= accounting.epsilon(event, 1e-6, accountant="rdp") * SLACK


@pytest.mark.slow
@few
@given(NOISE, PROB, st.floats(0.1, 1.0), st.integers(1, 20), st.integers(1, 20))
def test_two_stage_is_monotone(sigma, prob, participation, local, rounds):
    def spent(*args):
        return accounting.epsilon(events.two_stage(*args), 1e-5)

    here = spent(sigma, prob, participation, local, rounds)
    assert here <= spent(sigma, prob, 1.0, local, rounds) * SLACK
    assert here <= spent(sigma, prob, participation, local + 1, rounds) * SLACK
    assert here <= spent(sigma, prob, participation, local, rounds + 1) * SLACK


@pytest.mark.slow
@few
@given(st.floats(0.2, 8.0), PROB, st.integers(1, 16), st.integers(1, 200))
def test_calibrated_noise_is_certified_and_not_wasteful(epsilon, prob, size, steps):
    def make_event(sigma):
        return events.els(sigma, prob, size, steps)

    sigma = accounting.calibrate_noise_multiplier(make_event, epsilon, 1e-6)
    assert accounting.epsilon(make_event(sigma), 1e-6, resolution=FINEST) <= epsilon
    assert accounting.epsilon(make_event(0.997 * sigma), 1e-6, resolution=FINEST) > epsilon


@pytest.mark.slow
@pytest.mark.parametrize("near", [0.2, 1.0, 30.0])
@pytest.mark.parametrize(
    "make_event",
    [lambda s: events.els(s, 0.02, 8, 200), lambda s: events.allocated(s, 20, 50)],
)
def test_coarsely_calibrated_noise_is_certified_too(make_event, near, tmp_path, monkeypatch):
    monkeypatch.setenv("DPFL_CACHE_DIR", str(tmp_path))
    needed = accounting.calibrate_noise_multiplier(make_event, 2.0, 1e-6)
    sigma = coarse_noise_multiplier(make_event, 2.0, 1e-6, near)
    assert accounting.epsilon(make_event(sigma), 1e-6) <= 2.0
    assert 1 <= sigma / needed <= 1.025
    assert coarse_noise_multiplier(make_event, 2.0, 1e-6, 7.0) == sigma  # from disk


def test_steps_probability_and_group_size_are_calibrated():
    def fits(event):
        return accounting.epsilon(event, 1e-6, resolution=FINEST) <= 2.0

    steps = accounting.calibrate_steps(lambda t: events.els(3.0, 0.01, 4, t), 2.0, 1e-6)
    assert fits(events.els(3.0, 0.01, 4, steps))
    assert not fits(events.els(3.0, 0.01, 4, steps + 1 + steps // 500))
    size = accounting.calibrate_group_size(lambda g: events.els(3.0, 0.01, g, 200), 2.0, 1e-6)
    assert fits(events.els(3.0, 0.01, size, 200))
    assert not fits(events.els(3.0, 0.01, size + 1, 200))
    prob = accounting.calibrate_sampling_prob(lambda p: events.uls(1.5, p, 200), 2.0, 1e-6)
    assert fits(events.uls(1.5, prob, 200))
    assert not fits(events.uls(1.5, prob * 1.002, 200))
    assert accounting.calibrate_sampling_prob(lambda p: events.uls(200.0, p, 9), 2.0, 1e-6) == 1.0
    assert (
        accounting.calibrate_steps(lambda t: events.uls(1e6, 0.01, t), 2.0, 1e-6, most=5000) == 5000
    )
    with pytest.raises(BadInputError, match="even one step"):
        accounting.calibrate_steps(lambda t: events.gaussian(0.2, t), 1.0, 1e-6)


EXTREMES = [
    *itertools.product((1.0, 1e6), (0, 1e-3, 1), (1, 32), (1, 10**6), (1e-15, 1e-6)),
    (1e-3, 0.5, 1, 1, 1e-15),
    (1e-3, 1e-3, 32, 10**6, 1e-6),
    (0.1, 0.5, 100_000, 1000, 1e-6),
    (0.1, 1e-3, 1, 1000, 1e-6),
    (1e-3, 1e-8, 1, 1, 1e-6),
]


@pytest.mark.slow
def test_extremes_give_an_answer_or_one_sentence():
    refused = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sigma, prob, size, steps, delta in EXTREMES:
            try:
                found = accounting.epsilon(events.els(sigma, prob, size, steps), delta)
            except BadInputError as error:
                refused.append((sigma, steps, str(error)))
                continue
            assert not math.isnan(found)
            # Never optimistic: at least one full-strength step that is always taken, if it is.
            if prob == 1:
                least = accounting.epsilon(events.gaussian(sigma / size, steps), delta)
                assert found >= least * (1 - 1e-9)
    for sigma, steps, message in refused:
        assert "\n" not in message
        assert sigma < 1 or steps == 10**6


@pytest.mark.parametrize("epsilon", [0.01, 50])
@pytest.mark.parametrize("delta", [1e-15, 1e-6])
def test_extreme_targets(epsilon, delta):
    for prob, size, steps in ((0.5, 32, 10), (1.0, 1, 10**6)):
        sigma = accounting.calibrate_noise_multiplier(
            lambda s, p=prob, k=size, t=steps: events.els(s, p, k, t), epsilon, delta
        )
        reached = accounting.epsilon(events.els(sigma, prob, size, steps), delta)
        assert 0.98 * epsilon <= reached <= epsilon


def test_huge_groups_merge_upwards():
    exact = accounting.epsilon(events.els(400.0, 1e-3, 100_000, 5), 1e-6)
    assert exact >= accounting.epsilon(events.gaussian(4.0, 5), 1e-6)  # its mean alone
    assert exact <= accounting.epsilon(events.gaussian(4.0, 5), 1e-6) * 1.2


def test_cache_returns_the_same_and_survives_corruption(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFL_CACHE_DIR", str(tmp_path))
    calls = []

    def make_event(sigma):
        calls.append(sigma)
        return events.els(sigma, 0.01, 4, 100)

    first = accounting.calibrate_noise_multiplier(make_event, 1.0, 1e-6)
    searched = len(calls)
    assert accounting.calibrate_noise_multiplier(make_event, 1.0, 1e-6) == first
    assert len(calls) - searched <= 4  # the key and the certificate
    (entry,) = tmp_path.rglob("*.json")
    forged = json.dumps(0.5 * first)
    for bad in ("", "{", "[]", "null", "NaN", forged):
        entry.write_text(bad)
        assert accounting.calibrate_noise_multiplier(make_event, 1.0, 1e-6) == first
    entry.write_bytes(bytes(np.arange(256, dtype=np.uint8)))
    assert accounting.calibrate_noise_multiplier(make_event, 1.0, 1e-6) == first
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("blocked", [False, True])
def test_cache_can_be_off_or_impossible(blocked, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("not a folder")
    monkeypatch.setenv("DPFL_CACHE_DIR", str(file) if blocked else "off")
    monkeypatch.chdir(tmp_path)
    first, again = (
        accounting.calibrate_noise_multiplier(lambda s: events.gaussian(s, 10), 1.0, 1e-6)
        for _ in range(2)
    )
    assert first == again
    assert list(tmp_path.iterdir()) == [file]


def test_matrix_factorisation_is_a_gaussian_of_the_right_sensitivity():
    identity = events.matrix_factorization(2.0, np.eye(4), np.ones((1, 4)))
    assert accounting.epsilon(identity, 1e-6) == pytest.approx(
        accounting.epsilon(events.gaussian(2.0, 4), 1e-6)
    )
    once = events.matrix_factorization(2.0, np.tril(np.ones((3, 3))))
    expected = accounting.epsilon(events.gaussian(2.0 / math.sqrt(3), 1), 1e-6)
    assert accounting.epsilon(once, 1e-6) == pytest.approx(expected)
    with pytest.raises(BadInputError):
        events.matrix_factorization(1.0, np.eye(3), np.ones((1, 4)))


def test_shuffled_passes_and_truncation():
    event = events.shuffled_epochs(8.0, 4, 3)
    assert accounting.epsilon(event, 1e-6) == pytest.approx(
        accounting.epsilon(events.gaussian(2.0, 3), 1e-6)
    )
    cut = accounting.epsilon(events.truncated_poisson(1.0, 0.01, 1000, 40, 100), 1e-5)
    plain = accounting.epsilon(events.uls(1.0, 0.01, 100), 1e-5)
    assert plain * (1 - 1e-3) <= cut <= plain * 1.05  # 40 is far above the mean of 10


def test_each_user_spends_their_own_epsilon():
    def event(examples):
        return events.els(2.0, 0.01, examples, 200)

    table = accounting.epsilon_table(event, [8, 1, 3, 8, 1], 1e-6)
    assert list(table) == [1, 3, 8]
    assert list(table.values()) == sorted(table.values())
    assert table[1] == accounting.epsilon(events.uls(2.0, 0.01, 200), 1e-6)
    assert table[8] == accounting.epsilon(events.els(2.0, 0.01, 8, 200), 1e-6)
    with pytest.raises(BadInputError, match="at least one"):
        accounting.epsilon_table(event, [], 1e-6)


@pytest.mark.nightly
@settings(derandomize=True, deadline=None, max_examples=6)
@given(st.floats(0.7, 8.0), st.floats(0.005, 0.3), st.integers(1, 8), st.integers(1, 40), DELTA)
def test_between_the_librarys_own_optimistic_and_pessimistic_compositions(
    sigma, prob, size, steps, delta
):
    found = accounting.epsilon(events.els(sigma, prob, size, steps), delta)
    counts = np.arange(size + 1)
    weights = stats.binom.pmf(counts, size, prob)

    def library(pessimistic):
        pld = privacy_loss_distribution.from_mixture_gaussian_mechanism(
            sigma,
            list(counts.astype(float)),
            list(weights / weights.sum()),
            pessimistic_estimate=pessimistic,
            value_discretization_interval=1e-3,
            use_connect_dots=pessimistic,
        )
        return pld.self_compose(steps).get_epsilon_for_delta(delta)

    assert library(False) - 1e-9 <= found <= library(True) * (1 + 5e-3) + 1e-5


@pytest.mark.parametrize("sigma", [1e-300, 1e-12, 1e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("prob", [1.0, 0.0625, 1e-4])
@pytest.mark.parametrize("size", [1, 32])
def test_absurdly_little_noise_is_infinite_or_one_sentence(sigma, prob, size):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            found = accounting.epsilon(events.els(sigma, prob, size, 1000), 1e-6)
        except BadInputError:
            return
    assert found > 1e3
