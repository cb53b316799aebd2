"""Truncated: no cohort is larger than its cap, who is kept is a coin, and both are accounted."""

import numpy as np
import pytest
from scipy import stats

from dpfl_jax.accounting import epsilon, events
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import Population, truncated, uls
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Poisson, TruncatedPoisson

KEY = RootKey.from_seed(3)


def test_draws_are_poisson_s_cut_at_random():
    """False-alarm rate 1e-6."""
    scheme, free = TruncatedPoisson(0.5, 30), Poisson(0.5)
    counts, cut = np.zeros(60), 0
    for step in range(2000):
        drawn, all_of_them = scheme.indices(KEY, step, 60), free.indices(KEY, step, 60)
        assert len(drawn) == min(30, len(all_of_them))
        assert set(drawn) <= set(all_of_them)
        assert (np.diff(drawn) > 0).all()
        counts[drawn] += 1
        cut += len(all_of_them) > 30
    assert 600 < cut < 1200
    size = stats.binom(60, 0.5)
    expected = sum(min(k, 30) * size.pmf(k) for k in range(61)) / 60 * 2000
    # Sizes are not independent of who is drawn: variances are a little below the binomial's.
    z2 = ((counts - expected) ** 2).sum() / (expected * (1 - expected / 2000))
    assert z2 < stats.chi2.isf(1e-6, 60)
    assert scheme.size_bound(60) == 30
    assert TruncatedPoisson(0.5, 100).size_bound(60) == free.size_bound(60)


def test_the_event_is_that_of_one_user_more_and_a_high_cap_costs_nothing():
    population = Population(1000, 2000, 1000)

    def at(mechanism):
        return mechanism.calibrate(population, 100, noise_multiplier=1.0)

    made = {cap: at(truncated(group_size=2, cohort_size=64, cap=cap)) for cap in (64, 96, 128)}
    assert made[96].event(5) == events.truncated_poisson(1.0, 0.064, 1001, 96, 5)
    found = {cap: epsilon(m.event(), 1e-6) for cap, m in made.items()}
    plain = at(uls(group_size=2, cohort_size=64)).event()
    assert found[64] > 1.5 * found[96] > 1.5 * found[128]
    assert found[128] == pytest.approx(epsilon(plain, 1e-6), rel=1e-4)
    assert found[128] >= epsilon(plain, 1e-6)


def test_a_cap_for_a_budget_and_one_that_is_too_small():
    made = truncated(group_size=4, cohort_size=64)
    population = Population(1000, 4000, 1000)
    assert made.participation.scheme_of(population) == TruncatedPoisson(0.064, 96)
    with pytest.raises(BadInputError, match="cap of a draw is 10, less than the expected 20"):
        truncated(group_size=1, cohort_size=20, cap=10).participation.scheme_of(population)
    with pytest.raises(BadInputError, match="cap of a draw is 0"):
        TruncatedPoisson(0.5, 0)
