"""BLT: what a user adds to rows is bounded, costs what is stated, and a run goes on as itself."""

import dataclasses
import math
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fit_given as fit
from neighbours import people
from runs import went_on_bit_for_bit

from benchmarks import audit as bench
from dpfl_jax.accounting import epsilon, events
from dpfl_jax.errors import BadInputError
from dpfl_jax.evidence import audit
from dpfl_jax.mechanisms import BLT, Allocation, Population
from dpfl_jax.noise import buffered_column, multiplied
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.sampling import Turns

pytestmark = pytest.mark.privacy
BUFFERS = {"decays": (0.75, 0.25), "scales": (0.5, 0.125)}
PEOPLE = Population(100, 200, 100)


def loss_fn(params, example):
    return jnp.sum(params["w"] * example["x"]) + 0.5 * jnp.sum(params["w"] ** 2)


def run(directory=None, loss=loss_fn, **given):
    given = {"steps": 8, "epsilon": 4.0, "delta": 1e-3, "microbatch_size": 8} | given
    key = {"key": RootKey.from_seed(0)} if directory is None else {}
    return fit(
        loss_fn=loss, params={"w": jnp.zeros(4)}, data=people(60), optimizer=optax.adam(0.1),
        mechanism=BLT(group_size=2, cohort_size=20, **BUFFERS), run_dir=directory, **key, **given,
    )  # fmt: skip


def test_turns_follow_from_the_cohort_and_buffers_from_the_plan():
    made = BLT(group_size=1, cohort_size=21)
    assert made.once_in(PEOPLE) == 5
    assert made.remembers
    with pytest.raises(BadInputError, match="no buffers or horizon yet"):
        made.noise_transform()
    chosen = made.calibrate(PEOPLE, 40, 4.0, 1e-5)
    assert chosen.horizon == 40
    assert len(chosen.decays) == len(chosen.scales) == 2
    assert 3.99 < epsilon(chosen.event(PEOPLE, 40), 1e-5) <= 4.0
    # Its buffers stay when it is planned again; another separation has others.
    assert chosen.for_steps(PEOPLE, 30) == chosen
    assert made.for_steps(Population(1000, 2000, 1000), 40).decays != chosen.decays
    with pytest.raises(BadInputError, match="horizon is 40: raise it"):
        chosen.event(PEOPLE, 41)


def test_epsilon_midway_is_that_of_the_turns_so_far():
    """Of who takes part first, and of rows that were released: by the matrix itself."""
    made = BLT(group_size=1, cohort_size=25, noise_multiplier=3.0, horizon=11, **BUFFERS)
    column = buffered_column(made.chosen, 11)
    matrix = np.array([[column[max(i - j, 0)] * (i >= j) for j in range(11)] for i in range(11)])
    before = 0.0
    for steps in range(1, 12):
        norms = [
            np.linalg.norm(matrix[:steps, first:steps:4].sum(axis=1))
            for first in range(min(4, steps))
        ]
        assert max(norms) == norms[0]
        found = epsilon(made.event(PEOPLE, steps), 1e-5)
        assert found == pytest.approx(epsilon(events.gaussian(3.0 / norms[0], 1), 1e-5), rel=1e-9)
        assert found > before
        before = found


def test_the_guarantee_rests_on_no_sampling():
    made = BLT(group_size=1, cohort_size=25, noise_multiplier=5.0).for_steps(PEOPLE, 12)
    stated = made.guarantee(PEOPLE, 12, 1e-5)
    assert stated.adjacency == "add-or-remove one user"
    assert "at every 4-th step" in stated.sampling
    assert "no amplification by sampling is counted on" in stated.sampling
    assert "without amplification by sampling" in stated.accountant
    assert any("whose turn it is may be known" in told for told in stated.assumptions)
    assert any(told.startswith("checkpoints are as secret") for told in stated.assumptions)
    # No noise is hidden by who takes part: three turns cost what three Gaussians at least cost.
    assert stated.epsilon > epsilon(events.gaussian(5.0, 3), 1e-5)
    sampled = Allocation(group_size=1, cohort_size=25, noise_multiplier=5.0)
    assert stated.epsilon > sampled.guarantee(PEOPLE, 12, 1e-5).epsilon


def rows_of(data, steps):
    """What is noised at each step, [steps, 4]: the library's release without noise, times C."""
    mechanism = BLT(
        group_size=2, cohort_size=20, sampling_prob=1 / 3, clip_norm=0.5, noise_multiplier=0.0,
        **BUFFERS,
    )  # fmt: skip
    plan = mechanism.plan(data, steps=steps, delta=1e-5)
    params = {"w": jnp.zeros(4)}
    grad, noise = plan.clipped_grad(loss_fn), plan.noise()
    state, released = noise.init(params), []
    for batch in plan.batches(RootKey.from_seed(0)):
        x, state = noise.update(grad(params, batch).sum, state, noise_key=batch.noise_key)
        released.append(np.asarray(x["w"]) * mechanism.divisor)
    return multiplied(plan.mechanism.chosen, np.stack(released).T).T


@pytest.mark.slow
def test_a_user_moves_rows_from_its_first_turn_on_and_no_further_than_accounted():
    """The last user is removed, and has other data: turns of the others are what they were."""
    steps = 8
    without, one, other = (rows_of(people(60, x), steps) for x in (0.0, 3.0, -7.0))
    made = BLT(group_size=2, cohort_size=20, noise_multiplier=1.0, horizon=steps, **BUFFERS)
    population = Population(60, 120, 60)
    accounted = 1 / made.event(population, steps).noise_multiplier
    column = buffered_column(made.chosen, steps)
    for moved in (one - without, other - without):
        norms = np.linalg.norm(moved, axis=1) / 0.5
        first = int(np.argmax(norms > 1e-4))
        assert first in (0, 1, 2)
        assert norms[:first].max(initial=0.0) < 1e-5
        # All gradients of this user point one way: it is as bad as it can be, from its turn on.
        wanted = [sum(column[t - j] for j in range(first, t + 1, 3)) for t in range(first, steps)]
        np.testing.assert_allclose(norms[first:], wanted, rtol=1e-4)
        assert np.linalg.norm(norms) <= accounted * (1 + 1e-5)
    # Who takes part first moves most; that is what is accounted.
    whole = [sum(column[t - j] for j in range(0, t + 1, 3)) for t in range(steps)]
    assert accounted == pytest.approx(np.linalg.norm(whole), rel=1e-9)


@pytest.mark.slow
def test_a_run_that_died_goes_on_with_its_buffers_bit_for_bit(tmp_path, monkeypatch):
    def start(name):
        directory = RunDirectory(tmp_path / name, {}, "f", RootKey.from_seed(0))
        try:
            return run(directory, checkpoint_every=3)
        finally:
            directory.close()

    whole, state = went_on_bit_for_bit(tmp_path, monkeypatch, start)
    kept = state["noise"]
    assert kept["sums"]["w"].shape == (4, 4)
    assert kept["released"]["w"].shape == (2, 4)
    assert np.abs(kept["released"]["w"]).min() > 0
    spent = [row["epsilon_spent"] for row in whole.metrics if "epsilon_spent" in row]
    assert (np.diff(spent) > 0).all()
    assert spent[-1] <= 4.0


@pytest.mark.slow
def test_a_run_with_turns_goes_on_only_as_the_same_computation(tmp_path):
    """Another would draw turns anew: those of a user would come closer than accounted."""

    def other(params, example):
        return jnp.sum(params["w"] * example["x"]) + 0.25 * (2 * jnp.sum(params["w"] ** 2))

    def start(**given):
        directory = RunDirectory(tmp_path / "run", {}, "f", key)
        try:
            return run(directory, checkpoint_every=3, **given)
        finally:
            directory.close()

    key = RootKey.generate()
    start()
    assert (tmp_path / "run" / "checkpoints").stat().st_mode & 0o077 == 0  # sums without noise
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "8")
    with pytest.raises(BadInputError, match="began with"):
        start(loss=other)


@pytest.mark.slow
def test_a_release_of_blt_under_attack_stands_and_is_seen_through_its_noise():
    """By the likelihood ratio of what the columns of C say of all turns together."""
    found = audit(bench.SOUND["blt"](4.0, 7, 4000), 0.999)
    assert not found.exceeds, str(found)
    assert found.proved >= 0.5 * found.claimed, str(found)


@pytest.mark.slow
def test_a_user_with_a_turn_more_is_seen(monkeypatch):
    """Turns twice as close as accounted."""

    def indices(self, key, step):
        half = self.once_in // 2
        return np.flatnonzero(self.turn_of(key) % half == step % half)

    def turn_of(self, key):
        return drawn(self, key) % (self.once_in // 2)

    drawn = Turns.turn_of
    monkeypatch.setattr(Turns, "turn_of", turn_of)
    monkeypatch.setattr(Turns, "indices", indices)
    found = audit(bench.SOUND["blt"](4.0, 7, 4000), 0.999)
    assert found.proved > found.claimed, str(found)


def test_a_run_that_ended_early_is_attacked_by_its_steps():
    """What was not released is left out, and units that had no turn tell nothing."""
    made = BLT(group_size=1, cohort_size=25, noise_multiplier=1.0, horizon=8, **BUFFERS)
    sampler = made.sampler(np.arange(101), RootKey.from_seed(0))
    seen = np.full((100, 8), np.nan)
    seen[:, :3] = np.random.default_rng(0).normal(size=(100, 3))
    found = made.along(seen, np.ones(100, bool), sampler)
    turns = sampler.law.turn_of(sampler.key)
    assert found.shape == (100, 1)
    assert np.isnan(found[turns == 3, 0]).all()
    rows = multiplied(made.chosen, seen[:, :3])
    np.testing.assert_allclose(found[turns == 2, 0], rows[turns == 2, 2])
    column = buffered_column(made.chosen, 3)
    np.testing.assert_allclose(
        found[turns == 0, 0], rows[turns == 0] @ column / np.linalg.norm(column)
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decays": (0.5, 0.5)}, "scales has 0 numbers, but it must have one for each of the 2"),
        ({"decays": (0.5,), "scales": (0.5,)}, "decays has 1 numbers"),
        ({"decays": (0.5, 1.5), "scales": (0.1, 0.1)}, "all from 0 to 1"),
        ({"decays": (0.5, math.nan), "scales": (0.1, 0.1)}, "all from 0 to 1"),
        ({"decays": (0.5, 0.5), "scales": (0.1, -0.1)}, "all from 0 to 1"),
        ({"decays": (0.5, 0.5), "scales": (0.6, 0.6)}, "scales add up to 1.2, but"),
        ({"horizon": 0}, "horizon is 0"),
    ],
)
def test_bad_fields_of_blt_are_one_sentence(fields, message):
    with pytest.raises(BadInputError, match=message):
        BLT(group_size=1, cohort_size=2, **fields)


def test_too_many_buffers_of_a_plan_are_one_sentence():
    with pytest.raises(BadInputError, match=r"buffers is 40, .* at most 16"):
        BLT(group_size=1, cohort_size=20, buffers=40).for_steps(PEOPLE, 9)


def test_numbers_are_taken_as_they_run():
    made = BLT(group_size=1, cohort_size=2, buffers=1, decays=(0.1,), scales=(0.3,))
    assert made.decays == (float(np.float32(0.1)),)
    assert dataclasses.replace(made, noise_multiplier=1.0).scales == made.scales
