"""BLT: what a user adds to rows is bounded, costs what is stated, and a run goes on as itself."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import linalg

from benchmarks import audit as bench
from dpfl_jax.accounting import cells, epsilon, events
from dpfl_jax.audit import audit
from dpfl_jax.errors import BadInputError
from dpfl_jax.matrices import buffered_column
from dpfl_jax.mechanisms import Population, allocation, blt
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Cyclic

BUFFERS = {"decays": (0.75, 0.25), "scales": (0.5, 0.125)}
PEOPLE = Population(100, 200, 100)


def test_the_guarantee_rests_on_no_sampling():
    made = blt(group_size=1, cohort_size=25).calibrate(PEOPLE, 12, noise_multiplier=5.0, delta=1e-5)
    stated = made.guarantee()
    assert stated.adjacency == "add-or-remove one user"
    assert "at every 4-th step" in stated.sampling
    assert "no amplification by sampling is counted on" in stated.sampling
    assert "without amplification by sampling" in stated.accountant
    assert any("whose turn it is may be known" in told for told in stated.assumptions)
    assert any(told.startswith("checkpoints are as secret") for told in stated.assumptions)
    # No noise is hidden by who takes part: three turns cost what three Gaussians at least cost.
    assert stated.epsilon > epsilon(events.gaussian(5.0, 3), 1e-5)
    sampled = allocation(group_size=1, cohort_size=25).calibrate(
        PEOPLE, 12, noise_multiplier=5.0, delta=1e-5
    )
    assert stated.epsilon > sampled.guarantee().epsilon


@pytest.mark.slow
def test_a_user_with_a_turn_more_is_seen(monkeypatch):
    """Turns twice as close as accounted."""

    def indices(self, key, step, population):
        half = self.period // 2
        return np.flatnonzero(self.turn_of(key, population) % half == step % half)

    def turn_of(self, key, population):
        return drawn(self, key, population) % (self.period // 2)

    drawn = Cyclic.turn_of
    monkeypatch.setattr(Cyclic, "turn_of", turn_of)
    monkeypatch.setattr(Cyclic, "indices", indices)
    found = audit(bench.SOUND["blt"](4.0, 7, 4000), 0.999)
    assert found.proved > found.claimed, str(found)


def test_a_run_that_ended_early_is_attacked_by_its_steps():
    """What was not released is left out, and units that had no turn tell nothing."""
    made = blt(group_size=1, cohort_size=25, horizon=8, **BUFFERS)
    sampler = made.sampler(np.arange(101), RootKey.from_seed(0))
    seen = np.full((100, 8), np.nan)
    seen[:, :3] = np.random.default_rng(0).normal(size=(100, 3))
    found = cells.audit_statistic(made.noise.matrix(8), seen, np.ones(100, bool), sampler)
    turns = sampler.scheme.turn_of(sampler.key, 100)
    assert found.shape == (100, 1)
    assert np.isnan(found[turns == 3, 0]).all()
    column = buffered_column(made.noise.chosen, 3)
    rows = seen[:, :3] @ linalg.toeplitz(column, np.zeros(3)).T
    np.testing.assert_allclose(found[turns == 2, 0], rows[turns == 2, 2])
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
        blt(group_size=1, cohort_size=2, **fields)


def test_too_many_buffers_of_a_plan_are_one_sentence():
    with pytest.raises(BadInputError, match=r"buffers is 40, .* at most 16"):
        blt(group_size=1, cohort_size=20, buffers=40).calibrate(PEOPLE, 9, noise_multiplier=1.0)


def test_numbers_are_taken_as_they_run():
    made = blt(group_size=1, cohort_size=2, buffers=1, decays=(0.1,), scales=(0.3,))
    assert made.noise.decays == (float(np.float32(0.1)),)
    assert dataclasses.replace(made).noise.scales == made.noise.scales
