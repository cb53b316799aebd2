"""Banded inverse: what a user adds to rows is bounded, and a run costs what is stated."""

import json
import math

import numpy as np
import pytest

from benchmarks import audit as bench
from dpfl_jax.accounting import cells, epsilon
from dpfl_jax.audit import audit
from dpfl_jax.cli.main import main
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import Calibrated, Population, banded_inverse, blt
from dpfl_jax.randomness import RootKey

PEOPLE = Population(100, 200, 100)


@pytest.mark.nightly
def test_half_the_noise_is_seen(monkeypatch):
    own = Calibrated.noise_stddev.fget
    monkeypatch.setattr(Calibrated, "noise_stddev", property(lambda m: own(m) / 2))
    found = audit(bench.SOUND["banded_inverse"](4.0, 7, 4000), 0.999)
    assert found.proved > found.claimed, str(found)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bands": 1}, "bands is 1, but it must be at least 2: one is independent noise"),
        (
            {"fractions": (0.5,)},
            "fractions has 1 numbers, but it must have one for each of the 3 bands",
        ),
        ({"fractions": (0.5, 1.5)}, "all from 0 to 1"),
        ({"fractions": (0.5, math.nan)}, "all from 0 to 1"),
        ({"fractions": (0.5, 0.6)}, "fractions add up to 1.1, but"),
        ({"horizon": 0}, "horizon is 0"),
    ],
)
def test_bad_fields_of_banded_inverse_are_one_sentence(fields, message):
    with pytest.raises(BadInputError, match=message):
        banded_inverse(group_size=1, cohort_size=2, **fields)


def test_buffers_and_bands_of_one_number_are_one_noise():
    """1 / (1 - f x) is the column 1, f, f^2, ... of one buffer with decay and scale f."""
    bands = banded_inverse(group_size=1, cohort_size=20, bands=2, fractions=(0.75,), horizon=9)
    buffers = blt(
        group_size=1, cohort_size=20, buffers=1, decays=(0.75,), scales=(0.75,), horizon=9
    )
    np.testing.assert_allclose(
        bands.noise.matrix(9).column, buffers.noise.matrix(9).column, rtol=1e-13
    )


def test_the_guarantee_names_turns_and_the_matrix():
    chosen = banded_inverse(group_size=1, cohort_size=21).calibrate(
        PEOPLE, 40, epsilon=4.0, delta=1e-5
    )
    stated = chosen.guarantee()
    assert "at every 5-th step" in stated.sampling
    assert any("the matrix of the noise" in told for told in stated.assumptions)


def test_an_account_is_that_of_the_mechanism(capsys):
    given = ["--noise-multiplier", "5", "--delta", "1e-5", "--steps", "40", "--period", "5"]
    assert main(["account", "banded-inverse", *given, "--bands", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    made = banded_inverse(group_size=1, cohort_size=20, bands=4)
    wanted = epsilon(made.calibrate(PEOPLE, 40, noise_multiplier=5.0).event(), 1e-5)
    assert found["epsilon"] == pytest.approx(wanted, rel=1e-9)


def test_a_column_that_rises_is_bounded_for_accounting_and_attacked_as_it_is():
    made = banded_inverse(group_size=1, cohort_size=25, fractions=(0.0, 0.5), horizon=8)
    matrix = made.noise.matrix(5)
    np.testing.assert_allclose(matrix.column, (1, 0, 0.5, 0, 0.25), atol=1e-12)
    np.testing.assert_allclose(matrix.bounding_column, (1, 0.5, 0.5, 0.25, 0.25), atol=1e-12)
    sampler = made.sampler(np.arange(101), RootKey.from_seed(0))
    seen = np.random.default_rng(0).normal(size=(100, 3))
    found = cells.audit_statistic(matrix, seen, np.ones(100, bool), sampler)
    first = sampler.scheme.turn_of(sampler.key, 100) == 0
    rows = seen[first] @ np.array([[1, 0, 0.5], [0, 1, 0], [0, 0, 1]])  # K seen, by rows
    np.testing.assert_allclose(found[first, 0], rows @ (1, 0, 0.5) / 1.25**0.5)
