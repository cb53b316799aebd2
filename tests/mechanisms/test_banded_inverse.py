"""Banded inverse: what a user adds to rows is bounded, and a run costs what is stated."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fit_given as fit
from neighbours import people
from noising import inverse_banded_matrix
from runs import went_on_bit_for_bit

from benchmarks import audit as bench
from dpfl_jax.accounting import epsilon, events
from dpfl_jax.cli.main import main
from dpfl_jax.errors import BadInputError
from dpfl_jax.evidence import audit
from dpfl_jax.mechanisms import BLT, BandedInverse, Population
from dpfl_jax.mesh import make_mesh
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import RunDirectory

pytestmark = pytest.mark.privacy
TAKEN = (0.5, 0.25)
PEOPLE = Population(100, 200, 100)


def loss_fn(params, example):
    return jnp.sum(params["w"] * example["x"]) + 0.5 * jnp.sum(params["w"] ** 2)


def test_bands_follow_from_the_plan():
    made = BandedInverse(group_size=1, cohort_size=21)
    assert made.once_in(PEOPLE) == 5
    assert made.remembers
    with pytest.raises(BadInputError, match="no bands or horizon yet"):
        made.noise_transform()
    chosen = made.calibrate(PEOPLE, 40, 4.0, 1e-5)
    assert (chosen.horizon, len(chosen.taken)) == (40, 2)
    assert 3.99 < epsilon(chosen.event(PEOPLE, 40), 1e-5) <= 4.0
    assert chosen.for_steps(PEOPLE, 30) == chosen
    with pytest.raises(BadInputError, match="horizon is 40: raise it"):
        chosen.event(PEOPLE, 41)
    stated = chosen.guarantee(PEOPLE, 40, 1e-5)
    assert "at every 5-th step" in stated.sampling
    assert any("the matrix of the noise" in told for told in stated.assumptions)


def test_epsilon_midway_is_that_of_the_turns_so_far():
    """Of who takes part first, and of rows that were released: by the matrix itself."""
    made = BandedInverse(
        group_size=1, cohort_size=25, noise_multiplier=3.0, horizon=11, taken=TAKEN
    )
    matrix, before = inverse_banded_matrix(TAKEN, 11), 0.0
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


def rows_of(data, steps, devices):
    """What is noised at each step, [steps, 4]: the library's release without noise, times K."""
    mechanism = BandedInverse(
        group_size=2, cohort_size=20, sampling_prob=1 / 3, clip_norm=0.5, noise_multiplier=0.0,
        taken=TAKEN,
    )  # fmt: skip
    mesh = make_mesh(data=devices, devices=jax.devices()[:devices])
    plan = mechanism.plan(data, steps=steps, delta=1e-5, mesh=mesh)
    params = {"w": jnp.zeros(4)}
    grad, noise = plan.clipped_grad(loss_fn), plan.noise()
    state, released = noise.init(params), []
    for batch in plan.batches(RootKey.from_seed(0)):
        x, state = noise.update(grad(params, batch).sum, state, noise_key=batch.noise_key)
        released.append(np.asarray(x["w"]) * mechanism.divisor)
    return plan.mechanism.multiplied(np.stack(released).T).T


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.release)])
def test_a_user_moves_rows_from_its_first_turn_on_and_no_further_than_accounted(devices):
    """The last user is removed, and has other data: turns of the others are what they were."""
    steps = 8
    without, one, other = (rows_of(people(60, x), steps, devices) for x in (0.0, 3.0, -7.0))
    made = BandedInverse(
        group_size=2, cohort_size=20, noise_multiplier=1.0, horizon=steps, taken=TAKEN
    )
    accounted = 1 / made.event(Population(60, 120, 60), steps).noise_multiplier
    column = inverse_banded_matrix(TAKEN, steps)[:, 0]
    for moved in (one - without, other - without):
        norms = np.linalg.norm(moved, axis=1) / 0.5
        first = int(np.argmax(norms > 1e-4))
        assert first in (0, 1, 2)
        assert norms[:first].max(initial=0.0) < 1e-5
        wanted = [sum(column[t - j] for j in range(first, t + 1, 3)) for t in range(first, steps)]
        np.testing.assert_allclose(norms[first:], wanted, rtol=1e-4)
        assert np.linalg.norm(norms) <= accounted * (1 + 1e-5)


@pytest.mark.slow
def test_a_run_that_died_goes_on_with_its_bands_bit_for_bit(tmp_path, monkeypatch):
    def start(name):
        directory = RunDirectory(tmp_path / name, {}, "f", RootKey.from_seed(0))
        try:
            return fit(
                loss_fn=loss_fn, params={"w": jnp.zeros(4)}, data=people(60),
                optimizer=optax.adam(0.1), steps=8, epsilon=4.0, delta=1e-3, microbatch_size=8,
                mechanism=BandedInverse(group_size=2, cohort_size=20, bands=3),
                run_dir=directory, checkpoint_every=3,
            )  # fmt: skip
        finally:
            directory.close()

    _, state = went_on_bit_for_bit(tmp_path, monkeypatch, start)
    assert state["noise"]["sums"]["w"].shape == (4, 4)
    assert state["noise"]["released"]["w"].shape == (2, 4)
    assert np.abs(state["noise"]["released"]["w"]).min() > 0


@pytest.mark.slow
@pytest.mark.release
def test_half_the_noise_is_seen(monkeypatch):
    own = BandedInverse.noise_stddev.fget
    monkeypatch.setattr(BandedInverse, "noise_stddev", property(lambda m: own(m) / 2))
    found = audit(bench.SOUND["banded_inverse"](4.0, 7, 4000), 0.999)
    assert found.proved > found.claimed, str(found)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bands": 1}, "bands is 1, but it must be at least 2: one takes back nothing"),
        ({"taken": (0.5,)}, "taken has 1 numbers, but it must have one for each of the 3 bands"),
        ({"taken": (0.5, 1.5)}, "all from 0 to 1"),
        ({"taken": (0.5, math.nan)}, "all from 0 to 1"),
        ({"taken": (0.5, 0.6)}, "taken add up to 1.1, but"),
        ({"horizon": 0}, "horizon is 0"),
    ],
)
def test_bad_fields_of_banded_inverse_are_one_sentence(fields, message):
    with pytest.raises(BadInputError, match=message):
        BandedInverse(group_size=1, cohort_size=2, **fields)


def test_buffers_and_bands_of_one_number_are_one_noise():
    """1 / (1 - f x) is the column 1, f, f^2, ... of one buffer with decay and scale f."""
    bands = BandedInverse(group_size=1, cohort_size=20, bands=2, taken=(0.75,), horizon=9)
    buffers = BLT(
        group_size=1, cohort_size=20, buffers=1, decays=(0.75,), scales=(0.75,), horizon=9
    )
    np.testing.assert_allclose(bands.column(9), buffers.column(9), rtol=1e-13)


def test_an_account_is_that_of_the_mechanism(capsys):
    given = ["--noise-multiplier", "5", "--delta", "1e-5", "--steps", "40", "--once-in", "5"]
    assert main(["account", "banded-inverse", *given, "--bands", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    made = BandedInverse(group_size=1, cohort_size=20, bands=4, noise_multiplier=5.0)
    wanted = epsilon(made.for_steps(PEOPLE, 40).event(PEOPLE, 40), 1e-5)
    assert found["epsilon"] == pytest.approx(wanted, rel=1e-9)
