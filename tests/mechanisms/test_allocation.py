"""Allocation: what runs is what is accounted, a release stands, and faults are seen."""

import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fit_given as fit
from neighbours import people
from runs import went_on_bit_for_bit

from benchmarks import audit as bench
from dpfl_jax.accounting import epsilon
from dpfl_jax.data import from_arrays
from dpfl_jax.errors import BadInputError
from dpfl_jax.evidence import audit
from dpfl_jax.mechanisms import Population, allocation, uls
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.sampling import RandomAllocation


def loss_fn(params, example):
    return jnp.sum(params["w"] * example["x"]) + 0.5 * jnp.sum(params["w"] ** 2)


def run(directory=None, loss=loss_fn, **given):
    given = {"steps": 8, "epsilon": 4.0, "delta": 1e-3, "microbatch_size": 8} | given
    key = {"key": RootKey.from_seed(0)} if directory is None else {}
    return fit(
        loss_fn=loss, params={"w": jnp.zeros(4)}, data=people(60), optimizer=optax.adam(0.1),
        mechanism=allocation(group_size=2, cohort_size=20), run_dir=directory, **key, **given,
    )  # fmt: skip


def test_steps_follow_from_the_cohort_or_are_declared():
    population = Population(100, 200, 100)
    assert allocation(group_size=1, cohort_size=21).scheme(population).period == 5
    assert allocation(group_size=1, cohort_size=21).sampling_probability(population) == 0.2
    declared = allocation(group_size=1, cohort_size=21, period=8)
    assert declared.scheme(population).period == 8
    assert declared.divisor == 21
    with pytest.raises(BadInputError, match="period is 0, but it must be a whole number of steps"):
        allocation(group_size=1, cohort_size=21, period=0)
    with pytest.raises(BadInputError, match="cohort_size to at most 100"):
        allocation(group_size=1, cohort_size=101).scheme(population)


def test_calibration_meets_the_target_from_below_and_needs_less_noise_than_poisson():
    population = Population(100, 200, 100)
    sigma = {}
    for cls in (allocation, uls):
        made = cls(group_size=1, cohort_size=10).calibrate(population, 10, 4.0, 1e-5)
        assert 3.99 < epsilon(made.event(population, 10), 1e-5) <= 4.0
        sigma[cls] = made.noise_multiplier
    assert sigma[allocation] < 0.95 * sigma[uls]


@pytest.mark.slow
def test_a_user_moves_one_step_of_a_stretch_and_by_the_clip_norm_at_most():
    """The last user is removed, and has other data: steps of the others are what they were."""
    mechanism = allocation(
        group_size=2, cohort_size=20, period=3, clip_norm=0.5, noise_multiplier=0.0
    )

    def released(data):
        plan = mechanism.plan(data, steps=6, delta=1e-5)
        grad, params = plan.clipped_grad(loss_fn), {"w": jnp.zeros(4)}
        batches = plan.batches(RootKey.from_seed(0))
        return np.stack([np.asarray(grad(params, batch).sum["w"]) for batch in batches])

    without, one, other = (released(people(60, x)) for x in (0.0, 3.0, -7.0))
    for moved in (one - without, other - without):
        norms = np.linalg.norm(moved, axis=1).reshape(2, 3)
        assert ((norms > 0).sum(axis=1) == 1).all()
        np.testing.assert_allclose(norms.max(axis=1), 0.5, rtol=1e-5)


@pytest.mark.slow
def test_a_run_that_died_goes_on_bit_for_bit_and_elsewhere_not_at_all(tmp_path, monkeypatch):
    """As another computation it would draw stretches anew: a user could be drawn twice in one."""

    def start(name, **given):
        key = RootKey.from_seed(0) if name != "secret" else secret
        directory = RunDirectory(tmp_path / name, {}, "f", key)
        try:
            return run(directory, checkpoint_every=3, **given)
        finally:
            directory.close()

    went_on_bit_for_bit(tmp_path, monkeypatch, start)
    secret = RootKey.generate()
    start("secret")
    shutil.rmtree(tmp_path / "secret" / "checkpoints" / "8")

    def other(params, example):
        return jnp.sum(params["w"] * example["x"]) + 0.25 * (2 * jnp.sum(params["w"] ** 2))

    with pytest.raises(BadInputError, match="began with"):
        start("secret", loss=other)


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
