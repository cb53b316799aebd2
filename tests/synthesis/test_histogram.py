"""The histogram of labels: what a person adds, its noise, its event, and its file's verdict."""

import argparse
import dataclasses
import json

import dp_accounting
import numpy as np
import pytest

from dpfl_jax import accounting
from dpfl_jax.accounting import statement
from dpfl_jax.cli import verify
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import uls
from dpfl_jax.mechanisms.participation import Population
from dpfl_jax.noise.exact import STDDEV
from dpfl_jax.randomness import RootKey
from dpfl_jax.synthesis.histogram import allotted, noisy_sums, restate, with_histogram

KEY = RootKey.from_seed(0)


def trained(epsilon=2.0):
    people = Population(num_users=1000, num_examples=9000, num_units=1000)
    mechanism = uls(group_size=4, cohort_size=64)
    calibrated = mechanism.calibrate(people, steps=20, epsilon=epsilon, delta=1e-5)
    return calibrated.statement(calibrated.guarantee(caveats=("a caveat of the run",)))


def test_a_person_moves_the_sums_by_one_at_most_however_many_rows_they_have():
    """Noise is the same for neighbours, so that the difference is what the person added."""
    others = [[3, 0, 1], [0, 2, 0]]
    for own in ([1, 0, 0], [0, 1000, 0], [5, 3, 2], [1, 1, 1]):
        with_, without = (
            np.array(noisy_sums(counts, 2.0, KEY)) for counts in ([*others, own], others)
        )
        assert np.linalg.norm(with_ - without) <= 1 + 1e-12
        np.testing.assert_allclose(with_ - without, np.array(own) / sum(own), atol=1e-9)


def test_noise_is_at_least_as_stated_and_independent():
    draws = np.array([noisy_sums([[1, 0]], 2.0, KEY.child("n", n)) for n in range(400)]) - [1, 0]
    assert STDDEV / int(STDDEV / 2.0) >= 2.0
    # Standard deviations of 800 draws and of their correlation: 5 % and 0.05.
    assert abs(draws.std() / 2.0 - 1) < 0.13
    assert abs(np.corrcoef(draws.T)[0, 1]) < 0.25
    # Another noise multiplier is another draw, not the same one scaled.
    one, other = (np.array(noisy_sums([[1, 1]], sigma, KEY)) - 0.5 for sigma in (2.0, 4.0))
    assert not np.allclose(other / one, 2.0)


def test_the_statement_composes_training_and_histogram():
    run, sigma = trained(), 8.0
    made = with_histogram(run, sigma, 3)
    (event,) = run.cases[0]
    both = dp_accounting.ComposedDpEvent([event, dp_accounting.GaussianDpEvent(sigma)])
    assert made.privacy.epsilon == accounting.epsilon(both, 1e-5)
    assert run.privacy.epsilon < made.privacy.epsilon < 2.0 + 0.6
    assert "noisy histogram of labels" in made.privacy.released
    assert set(run.privacy.assumptions) < set(made.privacy.assumptions)
    again = restate(json.loads(json.dumps(made.basis)))
    assert again.privacy.epsilon == made.privacy.epsilon


@pytest.mark.parametrize("lie", ["nothing", "epsilon", "noise", "basis"])
def test_verify_tells_a_lie_about_the_histogram(lie, tmp_path):
    made = with_histogram(trained(), 8.0, 3)
    privacy = made.privacy
    if lie == "epsilon":  # that of the training alone
        made = made.about(dataclasses.replace(privacy, epsilon=trained().privacy.epsilon))
    if lie == "noise":
        words = privacy.sampling.replace("multiplier 8", "multiplier 80")
        made = made.about(dataclasses.replace(privacy, sampling=words))
    if lie == "basis":
        histogram = {"noise_multiplier": 80.0, "labels": 3}
        made = made.model_copy(update={"basis": made.basis | {"histogram": histogram}})
    (tmp_path / statement.NAME).write_text(made.dumps())
    args = argparse.Namespace(file=str(tmp_path), mechanism=None, advisories=None, json=True)
    assert verify.run(args)["holds"] == (lie == "nothing")


@pytest.mark.parametrize("histogram", [{"labels": 3}, {"noise_multiplier": 0, "labels": 3},
                                       {"noise_multiplier": 1.0, "labels": 1}])  # fmt: skip
def test_a_damaged_basis_is_refused(histogram):
    with pytest.raises((BadInputError, KeyError)):
        restate(trained().basis | {"histogram": histogram})


def test_rows_are_split_like_people():
    assert allotted({"a": 2.0, "b": 1.0, "c": -5.0}, 10) == {"a": 7, "b": 3, "c": 0}
    assert allotted({"a": -1.0, "b": -2.0}, 3) == {"a": 2, "b": 1}
