"""BandMF: one band is ULS, what a user adds to rows is bounded, and what it costs is composed."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from fitting import fit_given as fit
from neighbours import people

from benchmarks import audit as bench
from dpfl_jax.accounting import epsilon, events
from dpfl_jax.audit import audit
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import Population, bandmf, uls
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import CyclicPoisson, Poisson

COLUMN = (0.75, 0.5, 0.4375)


def loss_fn(params, example):
    return jnp.sum(params["w"] * example["x"]) + 0.5 * jnp.sum(params["w"] ** 2)


def run(mechanism, **given):
    given = {"params": {"w": jnp.zeros(4)}, "steps": 8, "epsilon": 4.0, "delta": 1e-3} | given
    key = {} if "run_dir" in given else {"key": RootKey.from_seed(0)}
    return fit(
        loss_fn=loss_fn, data=people(80), mechanism=mechanism, optimizer=optax.adam(0.1),
        microbatch_size=8, **key, **given,
    )  # fmt: skip


@pytest.mark.slow
def test_one_band_is_uls_bit_for_bit():
    """Draws, noise, parameters, and all that is stated but the name of the accountant."""
    plain, banded = (run(made(group_size=2, cohort_size=20)) for made in (uls, one_band))
    np.testing.assert_array_equal(plain.params["w"], banded.params["w"])
    same = {"accountant": plain.guarantee.accountant}
    assert dataclasses.replace(banded.guarantee, **same) == plain.guarantee
    spent = [[row.get("epsilon_spent") for row in made.metrics] for made in (plain, banded)]
    assert spent[0] == spent[1]
    population = Population(80, 160, 80)
    one, made = (
        kind(group_size=2, cohort_size=20).calibrate(population, 8, noise_multiplier=1.1)
        for kind in (one_band, uls)
    )
    for steps in (0, 1, 8):
        assert one.event(steps) == made.event(steps)


def one_band(**fields):
    return bandmf(bands=1, **fields)


SETTINGS = [  # sigma, p, strategy, steps
    (1.0, 0.1, COLUMN, 30),
    (1.0, 0.1, COLUMN, 31),
    (0.8, 0.02, (0.8, 0.6), 41),
    (2.0, 1.0, COLUMN, 8),
    (0.6, 0.3, (0.9, 0.3, 0.2, 0.1), 3),
]


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "prob", "column", "steps"), SETTINGS)
def test_epsilon_against_dp_accounting(sigma, prob, column, steps):
    """Composed by hand: turn after turn, each with the norm of what was released of its column."""
    worst = [0.0, 0.0]
    for group in range(len(column)):
        turns = [column[: steps - t] for t in range(group, steps, len(column))]
        whole = [None, None]
        for part in turns:
            for i, pessimistic in enumerate((False, True)):
                made = pld.from_gaussian_mechanism(
                    sigma / float(np.linalg.norm(part)), sampling_prob=prob,
                    pessimistic_estimate=pessimistic, use_connect_dots=pessimistic,
                    value_discretization_interval=1e-3,
                )  # fmt: skip
                whole[i] = made if whole[i] is None else whole[i].compose(made)
        found = [0.0 if p is None else p.get_epsilon_for_delta(1e-5) for p in whole]
        worst = np.maximum(worst, found)
    ours = epsilon(events.banded(sigma, prob, column, steps), 1e-5)
    assert worst[0] - 1e-3 <= ours <= worst[1] * 1.002 + 1e-4


def test_epsilon_midway_is_that_of_the_first_group_and_only_grows():
    """With everybody drawn at every turn it is one Gaussian, of the most that a group released."""
    window = np.array(COLUMN)
    before = 0.0
    for steps in range(1, 10):
        squared = [
            sum((window[: steps - t] ** 2).sum() for t in range(group, steps, 3))
            for group in range(3)
        ]
        assert max(squared) == squared[0]
        found = epsilon(events.banded(3.0, 1.0, COLUMN, steps), 1e-5)
        assert found == pytest.approx(
            epsilon(events.gaussian(3.0 / math.sqrt(squared[0]), 1), 1e-5), rel=1e-6
        )
        assert found >= before
        before = found


@pytest.mark.slow
def test_a_user_in_every_turn_is_seen(monkeypatch):
    """Users drawn as by ULS, at the probability of a group."""

    def indices(self, key, step, population):
        return Poisson(self.sampling_prob).indices(key, step, population)

    monkeypatch.setattr(CyclicPoisson, "indices", indices)
    monkeypatch.setattr(CyclicPoisson, "group_of", lambda self, key, n: np.zeros(n, int))
    found = audit(bench.SOUND["bandmf"](4.0, 7, 4000), 0.999)
    assert found.proved > found.claimed, str(found)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bands": 0}, "bands is 0"),
        ({"bands": 1, "column": (0.5,)}, "for two bands or more"),
        ({"bands": 2, "column": (1.0,)}, "1 numbers, but it must have one for each of the 2"),
        ({"bands": 2, "column": (0.0, 1.0)}, "the first above 0"),
        ({"bands": 2, "column": (1.0, math.nan)}, "all finite"),
    ],
)
def test_bad_fields_are_one_sentence(fields, message):
    with pytest.raises(BadInputError, match=message):
        bandmf(group_size=1, cohort_size=2, **fields)


def test_too_large_a_cohort_and_no_strategy_are_one_sentence():
    mechanism = bandmf(group_size=1, cohort_size=30, bands=4)
    with pytest.raises(BadInputError, match=r"times mechanism\.cohort_size to at most 100"):
        mechanism.calibrate(Population(100, 100, 100), 8, noise_multiplier=1.0)
    with pytest.raises(BadInputError, match="no column yet"):
        mechanism.noise.matrix(8)


def test_more_than_one_band_is_stateful():
    for kind, more in ((bandmf, {"bands": 2}), (bandmf, {"bands": 1}), (uls, {})):
        made = kind(group_size=1, cohort_size=2, **more).calibrate(
            Population(80, 160, 80), 8, noise_multiplier=1.0
        )
        assert made.is_stateful == (more == {"bands": 2})
