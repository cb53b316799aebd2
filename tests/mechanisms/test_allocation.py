"""Allocation: what runs is what is accounted, a release stands, and faults are seen."""

import numpy as np
import pytest

from benchmarks import audit as bench
from dpfl_jax.audit import audit
from dpfl_jax.data import from_arrays
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import Population, allocation, uls
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import RandomAllocation


def test_steps_follow_from_the_cohort_or_are_declared():
    population = Population(100, 200, 100)
    assert allocation(group_size=1, cohort_size=21).participation.scheme_of(population).period == 5
    declared = allocation(group_size=1, cohort_size=21, period=8)
    assert declared.participation.scheme_of(population).period == 8
    assert declared.participation.divisor == 21
    with pytest.raises(BadInputError, match="period is 0, but it must be a whole number of steps"):
        allocation(group_size=1, cohort_size=21, period=0)
    with pytest.raises(BadInputError, match="cohort_size to at most 100"):
        allocation(group_size=1, cohort_size=101).participation.scheme_of(population)


def test_it_needs_less_noise_than_poisson():
    population = Population(100, 200, 100)
    once, poisson = (
        kind(group_size=1, cohort_size=10)
        .calibrate(population, 10, epsilon=4.0, delta=1e-5)
        .noise_multiplier
        for kind in (allocation, uls)
    )
    assert once < 0.95 * poisson


@pytest.mark.slow
def test_a_user_in_every_step_is_seen(monkeypatch):
    def indices(self, key, step, population):
        return np.arange(population if step % 2 else 0)

    monkeypatch.setattr(RandomAllocation, "indices", indices)
    found = audit(bench.SOUND["allocation"](4.0, 7, 4000), 0.999)
    assert found.proved > found.claimed, str(found)


def test_an_example_that_is_a_user_is_in_one_step_of_every_stretch():
    """As of a table whose rows are people of their own: the unit is a row."""
    rows = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    data = from_arrays({"x": rows}, range(60))
    made = allocation(group_size=1, cohort_size=20)
    plan = made.plan(data, steps=6, epsilon=4.0, delta=1e-5)
    assert plan.population.num_users == plan.population.num_examples == 60
    sampler = plan.sampler(RootKey.from_seed(0))
    drawn = [set(sampler.draw(step).units.tolist()) for step in range(6)]
    for stretch in (drawn[:3], drawn[3:]):
        assert sum(len(step) for step in stretch) == 60
        assert set.union(*stretch) == set(range(60))
