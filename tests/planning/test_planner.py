"""The planner: golden noises, the two readings of Estimate-and-Double, inverse questions."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from dpfl_jax import accounting
from dpfl_jax.accounting import events
from dpfl_jax.accounting.accountant import FINEST
from dpfl_jax.accounting.calibrate import noise_near
from dpfl_jax.data import ArrayStore
from dpfl_jax.errors import BadInputError
from dpfl_jax.matrices import banded_strategy, buffered_error, inverse_error, prefix_error
from dpfl_jax.mechanisms import Population, allocation, banded_inverse, bandmf, blt
from dpfl_jax.planning import (
    Planner,
    Sensitivities,
    UserStatistics,
    estimate_and_double,
    estimate_sensitivities,
    median_group_size,
)

GROUPS = [1, 2, 4, 8, 16, 32]


def planner(epsilon=1.0, decay=0.5, users=1024):
    alike = UserStatistics(users, limited={g: users * g for g in GROUPS})
    assumed = Sensitivities.assumed(decay, GROUPS)
    return Planner(alike, assumed, epsilon=epsilon, delta=1e-6, steps=1000)


def test_noise_golden():
    """Charles et al. 2024 (Figure 2(b)), computed independently: B = 64, M = 16, epsilon 1."""
    p = planner()
    assert p.option("els", 32, 64).noise == pytest.approx(0.1322, rel=3e-3)
    assert p.option("uls", 4, 16).noise == pytest.approx(0.0708, rel=3e-3)
    assert planner(decay=0.0).option("uls", 4, 16).noise == pytest.approx(0.1415, rel=3e-3)


@pytest.mark.nightly
def test_the_winners_of_ten_budgets_are_those_of_an_exhaustive_search():
    """Every cell and number of bands again, by a plain root search on the fine accountant."""
    p = planner(epsilon=2.0)
    found, kinds = {}, set()

    def exact(option, bands):
        column = banded_strategy(bands, p.steps)
        size, prob = option.group_size, option.sampling_prob * bands / option.bands

        def event(sigma):
            if option.kind == "els":
                return events.els(sigma, prob, size, p.steps)
            return events.banded(sigma, prob, column, p.steps)

        def excess(log_sigma):
            made = event(math.exp(log_sigma))
            return math.log(accounting.epsilon(made, p.delta, resolution=FINEST) / p.epsilon)

        key = (option.kind == "els" and size, bands, prob)
        if key not in found:
            near = math.log(noise_near(event, p.epsilon, p.delta))  # no more than where to look
            found[key] = math.exp(optimize.brentq(excess, near - 0.3, near + 0.3, xtol=1e-6))
        return found[key]

    def noises(option):
        """Of all numbers of bands."""
        most = min(32, int(1 / option.sampling_prob * option.bands))
        powers = [2**k for k in range(1 if option.kind == "els" else most.bit_length())]
        scale = option.sensitivity / option.size
        return [
            scale * exact(option, b) * prefix_error(banded_strategy(b, 1000), 1000) for b in powers
        ]

    for budget in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        plan = p.recommend(budget, every=True)
        own = ("blt", "banded_inverse", "allocation")  # which have tests of their own
        sampled = [o for o in plan.options if o.kind not in own]
        least = min(min(noises(o)) for o in sampled)
        assert plan.best.noise <= least * (1 + 5e-4), (budget, plan.best)
        kinds.add((plan.best.kind, plan.best.group_size))
        for option in sampled:
            # Never less than is needed, and hardly more.
            needed = exact(option, option.bands)
            assert 1 - 5e-6 <= option.noise_multiplier / needed <= 1 + 3e-4
    assert len(kinds) > 1


def test_best_has_the_least_noise_and_the_reason_says_so():
    plan = planner().recommend(512)
    assert plan.best.noise == min(option.noise for option in plan.options)
    assert {option.kind for option in plan.options} == {"els", "uls"}
    assert plan.best.kind == "uls"
    assert "ULS" in plan.reason


@pytest.mark.slow
def test_banded_noise_is_priced_by_what_is_left_in_prefix_sums():
    """Against matrices and the plain accountant; the number of bands against all of them."""
    p = Planner(
        UserStatistics(1024, limited={1: 1024}), Sensitivities.assumed(0.0, [1, 4]), epsilon=2.0,
        delta=1e-6, steps=64,
    )  # fmt: skip
    option = p.option("bandmf", 4, 16)
    column = banded_strategy(option.bands, 64)
    matrix = sum(np.diag(np.full(64 - i, c), -i) for i, c in enumerate(column))
    left = np.linalg.norm(np.tril(np.ones((64, 64))) @ np.linalg.inv(matrix)) / 8
    alone = np.linalg.norm(np.tril(np.ones((64, 64)))) / 8
    assert option.noise == pytest.approx(option.noise_multiplier * left / alone / 16)
    assert option.sampling_prob == option.bands * 16 / 1024
    assert 1.98 < p.epsilon_of(option) <= 2.0

    def noise(bands):
        made = bandmf(group_size=4, cohort_size=16, bands=bands)
        made = made.calibrate(Population(1024, 4096, 1024), 64, epsilon=2.0, delta=1e-6)
        return made.noise_multiplier * prefix_error(made.mechanism.noise.chosen, 64) / 16

    found = {bands: noise(bands) for bands in (1, 2, 4, 8, 16, 32)}
    assert option.noise == pytest.approx(found[option.bands], rel=1e-5)
    assert option.noise <= 1.02 * min(found.values())
    assert found[1] == pytest.approx(p.option("uls", 4, 16).noise, rel=1e-4)
    # In many passes; in one, allocation is ahead.
    plan = Planner(p.users, p.sensitivities, epsilon=8.0, delta=1e-6, steps=512).recommend(
        64, every=True
    )
    assert plan.best.kind == "bandmf"
    assert f"Its {plan.best.bands} groups of users take turns" in plan.reason
    assert (
        p.try_option("bandmf", 1, 1024) is None
    )  # everybody in every step: groups have nothing to give


@pytest.mark.slow
def test_noise_of_turns_is_priced_without_sampling():
    """Against the mechanism calibrated; ahead of BandMF if epsilon is large and turns are few."""
    p = Planner(
        UserStatistics(3000, limited={1: 3000}), Sensitivities.assumed(0.0, [1, 4]), epsilon=20.0,
        delta=1e-6, steps=60,
    )  # fmt: skip
    plan = p.recommend(500, every=True)
    assert plan.best.kind in ("blt", "banded_inverse")  # by less than a thousandth
    assert "take part in every 6th step" in plan.reason
    least = {}
    for kind, cls, error in (
        ("blt", blt, buffered_error),
        ("banded_inverse", banded_inverse, inverse_error),
    ):
        options = [o for o in plan.options if o.kind == kind]
        assert {o.bands for o in options} == {3 if kind == "banded_inverse" else 1}
        for option in options:
            made = cls(group_size=option.group_size, cohort_size=option.size)
            made = made.calibrate(Population(3000, 12000, 3000), 60, epsilon=20.0, delta=1e-6)
            assert option.noise_multiplier == pytest.approx(made.noise_multiplier, rel=2e-5)
            left = error(made.mechanism.noise.chosen, 60)
            assert option.noise == pytest.approx(option.noise_multiplier * left / option.size)
            assert 19.99 < p.epsilon_of(option) <= 20.0
        # Everybody in every step: noise that cancels later costs more.
        assert p.try_option(kind, 1, 3000) is None
        least[kind] = min(o.noise for o in options)
    assert least["blt"] == pytest.approx(least["banded_inverse"], rel=1e-3)
    small = Planner(p.users, p.sensitivities, epsilon=1.0, delta=1e-6, steps=600)
    assert small.recommend(500, every=True).best.kind not in least  # sampling gains more
    # Long pauses: with as much memory buffers leave less.
    long = Planner(
        UserStatistics(300_000, limited={1: 300_000}), Sensitivities.assumed(0.0, [1]), epsilon=8.0,
        delta=1e-7, steps=2000,
    )  # fmt: skip
    buffers, bands = (long.option(kind, 1, 900) for kind in least)
    assert 1.2 < bands.noise / buffers.noise < 1.5


@pytest.mark.slow
def test_allocation_is_priced_where_users_are_sampled_with_the_least_noise():
    """Against the mechanism calibrated; ahead of ULS in a run of one pass."""
    p = Planner(
        UserStatistics(1024, limited={1: 1024}), Sensitivities.assumed(0.2, [1, 4]), epsilon=2.0,
        delta=1e-6, steps=16,
    )  # fmt: skip
    plan = p.recommend(64, every=True)
    (option,) = (o for o in plan.options if o.kind == "allocation")
    uls = min((o for o in plan.options if o.kind == "uls"), key=lambda o: o.noise)
    assert (option.group_size, option.size) == (uls.group_size, uls.size)
    made = allocation(group_size=option.group_size, cohort_size=option.size)
    made = made.calibrate(Population(1024, 4096, 1024), 16, epsilon=2.0, delta=1e-6)
    assert option.noise_multiplier == pytest.approx(made.noise_multiplier, rel=2e-5)
    assert option.noise == pytest.approx(option.sensitivity * made.noise_multiplier / option.size)
    assert 1.99 < p.epsilon_of(option) <= 2.0
    assert option.noise < 0.95 * uls.noise
    if plan.best.kind == "allocation":
        assert "exactly one of every" in plan.reason
    assert p.try_option("allocation", 1, 1024) is None  # everybody in every step
    with pytest.raises(BadInputError, match="allocation is the same mechanism as ULS"):
        p.option("allocation", 1, 1024)


@pytest.mark.nightly
def test_estimate_and_double_as_printed_never_grows_the_cohort():
    """A large population, where M pays first, then G (Charles et al. 2024, section 6)."""
    p = planner(users=2**15)
    options = {"most_users": 2**15, "largest_group": 32}
    args = (p.sensitivities.at, lambda m: p.option("uls", 1, m).noise_multiplier, 1024)
    corrected = estimate_and_double(*args, **options)
    printed = estimate_and_double(*args, **options, literal=True)
    assert printed == (32, 32)
    assert corrected[1] >= 128
    assert corrected[0] * corrected[1] == 1024
    # It is within a few per cent of the best split on the diagonal; the printed one is not.
    best = min(p.option("uls", g, 1024 // g).noise for g in GROUPS)
    assert p.option("uls", *corrected).noise <= 1.1 * best
    assert p.option("uls", *printed).noise > p.option("uls", *corrected).noise


def test_limits_of_doubling():
    constant = {"sensitivity": lambda g: 1.0, "noise_multiplier": lambda m: 1.0}
    assert estimate_and_double(**constant, budget=10**6, most_users=64, largest_group=4) == (4, 64)
    assert estimate_and_double(**constant, budget=100, cohort=32) == (1, 64)
    assert estimate_and_double(**constant, budget=8, cohort=32) == (1, 8)


@pytest.mark.nightly
def test_inverse_questions_are_consistent():
    p = planner(epsilon=2.0)
    noise = p.recommend(256).best.noise
    epsilon, option = p.smallest_epsilon(noise, 256)
    assert epsilon == pytest.approx(2.0, rel=5e-3)
    assert option.noise == pytest.approx(noise)
    budget, cheap = p.smallest_budget(noise * (1 + 1e-3))
    assert budget <= 256
    assert cheap.noise <= noise * (1 + 2e-3)
    assert p.smallest_epsilon(noise * (1 + 1e-3), budget // 2)[0] > 2.0
    with pytest.raises(BadInputError, match="no compute budget"):
        p.smallest_budget(1e-9)
    with pytest.raises(BadInputError, match="no useful epsilon"):
        p.smallest_epsilon(1e-9, 64)
    with pytest.raises(BadInputError, match="target noise"):
        p.smallest_budget(0.0)


def test_orthogonal_gradients_keep_uls_ahead():
    assert planner(decay=0.5).users_at_overtake(256, 32, most=1024) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: planner().recommend(0), r"a step\) is 0, but it must be at least 1"),
        (lambda: planner(users=16).option("uls", 1, 32), "cannot be drawn from 16 users"),
        (lambda: planner(epsilon=-1.0).recommend(64), "epsilon is -1"),
        (lambda: UserStatistics(0), "number of users"),
        (lambda: Sensitivities.assumed(2.0, [1]), "decay"),
        (lambda: Sensitivities.assumed(0.5, [1, 4]).at(8), "not known"),
        (lambda: UserStatistics(10).left(4), "not known"),
        (lambda: median_group_size([]), "no users"),
    ],
)
def test_bad_input_is_one_sentence(make, message):
    with pytest.raises(BadInputError, match=message):
        make()


def test_sensitivities_between_sizes_follow_a_power_law():
    found = Sensitivities.assumed(0.5, [1, 4, 16])
    assert found.at(8) == pytest.approx(8**-0.5)


def test_median_group_size():
    assert median_group_size([100, 183, 400]) == 128
    assert median_group_size([100, 183, 400], rounding="none") == 183
    assert median_group_size([1]) == 1


def test_estimated_norms_of_orthogonal_and_equal_gradients():
    """Users whose examples have equal, or orthogonal, gradients: L(G) is 1, or G^-1/2."""
    eye = np.eye(16, dtype=np.float32)

    def loss(params, example):
        return jnp.sum(params["w"] * example["x"])

    params = {"w": jnp.zeros(16)}
    orthogonal = ArrayStore.from_users([(f"u{k}", {"x": eye}) for k in range(12)])
    alike = ArrayStore.from_users([(f"u{k}", {"x": eye[[0] * 16]}) for k in range(12)])
    spread = estimate_sensitivities(loss, params, orthogonal, [1, 4, 16], users=10)
    same = estimate_sensitivities(loss, params, alike, [1, 4, 16], users=10)
    assert spread.user == pytest.approx({1: 1.0, 4: 0.5, 16: 0.25}, rel=1e-5)
    assert same.user == pytest.approx({1: 1.0, 4: 1.0, 16: 1.0}, rel=1e-5)
    assert spread.example == pytest.approx(1.0, rel=1e-5)
    low, high = spread.intervals[4]
    assert low <= 0.5 + 1e-5
    assert high >= 0.5 - 1e-5
