"""The authors' published settings: recovered from their files, and unsound by name."""

import dataclasses

import numpy as np
import pytest
from jax import random
from rich.console import Console

from dpfl_jax.accounting.rates import TwoStage
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.data import ArrayRecords, FederatedData
from dpfl_jax.federation.personal import RateAssignment
from dpfl_jax.federation.personal_budgets import ThreeLevels, mean_over
from dpfl_jax.models import LogisticRegression
from dpfl_jax.randomness import RootKey
from reproductions.registry import Settings
from reproductions.rpdp import _training, published
from reproductions.rpdp._tables import row
from reproductions.rpdp._training import Bench

SETTING = TwoStage(3.0, 2, 3, 1.0, 1e-3)


def bench(scale=1.0):
    rng = np.random.default_rng(0)
    x = (scale * rng.normal(size=(30, 3)) * rng.exponential(size=(30, 1))).astype(np.float32)
    arrays = {"x": x, "label": (x[:, 0] + scale * rng.normal(size=30) > 0).astype(np.int32)}
    data = FederatedData.from_assignment(ArrayRecords(arrays), np.arange(30), np.arange(30) % 2, 2)
    return Bench(LogisticRegression(3), data, arrays, ("sgd", 0.1), 2, 3, 1.0, (1.0, 1.0))


@pytest.mark.parametrize("where", published.PUBLISHED)
def test_rates_and_budgets_are_those_of_the_result_files(where):
    found = published._batches(published.PUBLISHED[where], where)
    assert [c.expected for c in found] == list(published.PUBLISHED[where].batches)
    assert all(c.holds for c in found)


def test_dropout_and_minimum_follow_the_fitted_curve_too():
    law = ThreeLevels((0.5, 1.0, 3.0))
    public, budgets = mean_over(law), np.array([0.5, 1.0, 3.0])
    own, of_mean, of_least = (
        published.rates(method, budgets, public, SETTING) for method in published.METHODS
    )
    assert 0 < own[0] < own[1] < own[2]
    assert of_mean[0] == 0  # 0.85 on average
    assert own[0] < of_mean[1] == of_mean[2] < own[2]
    assert np.allclose(of_least, own[0])


def test_nobody_is_promised_anything():
    made = published.as_published(bench(), SETTING, ThreeLevels(), "curve fit", 0)
    assert made.personal is not None
    assert made.personal.assignment.stay.tolist() == [3] * 30
    assert np.isinf(made.personal.spent(3)).all()
    assert made.personal.unsound == published.UNSOUND


@pytest.mark.parametrize(
    ("accounted", "changed"),
    [
        ({"participation_prob": 0.8}, {}),
        ({}, {"participation": 0.5}),
        ({}, {"rounds": 4}),
        ({}, {"local_steps": 3}),
    ],
)
def test_rates_for_other_runs_promise_nothing(accounted, changed):
    table = bench()
    budgets, rate = np.ones(30), RateAssignment("x", np.full(30, 1e-6), np.full(30, 3), 0, {})
    sound = table.assigned(SETTING, budgets, rate, 0.1).personal
    assert sound is not None
    assert np.isfinite(sound.check(3)).all()
    for name, value in changed.items():
        setattr(table, name, value)
    setting = dataclasses.replace(SETTING, **accounted)
    other = table.assigned(setting, budgets, rate, 0.1).personal
    assert other is not None
    assert np.isinf(other.spent(3)).all()
    assert "participation" in other.unsound[0]


def test_the_papers_denominator_is_there_and_promises_nothing():
    table = bench()
    made = table.personal(SETTING, ThreeLevels((0.5, 1.0, 3.0)), "certified", 0, True)
    sizes = []

    class Seen(_training._RealizedBatch):
        def scale(self, silo, draw):
            found = super().scale(silo, draw)
            assert found == (3.0, max(draw.size, 1))
            sizes.append(draw.size)
            return found

    data = table.data.with_rates(made.assignment.rates, made.assignment.stay)
    builder = Seen(made.federation, data, RootKey.from_seed(0), table._mesh)
    for r in range(3):
        builder.gather(r, np.arange(2))
    assert len(set(sizes)) > 1
    assert made.personal.unsound == (_training.READ_OFF,)
    assert made.personal.assignment.rates.min() > 0
    # What is accounted is not what is released: whoever is sampled has spent everything.
    assert np.isinf(made.personal.check(3)).all()
    assert made.personal.summary(3)["over_budget"] == 30
    assert np.all(made.personal.check(0) == 0)


@pytest.mark.nightly
def test_clipped_sums_without_noise_are_the_same_whatever_ran_before():
    table, fresh = bench(scale=100.0), bench(scale=100.0)
    params = table.model.init(random.key(0))
    plain = table.run(table.non_private(1000), params, 0)
    table.run(published.as_published(table, SETTING, ThreeLevels(), "minimum", 0), params, 0)
    # All records in every step: the seed can only matter as noise.
    first = table.run(table.without_noise(1000), params, 1)
    second = fresh.run(fresh.without_noise(1000), params, 2)
    assert (first == second).all()
    assert (first != plain).any()  # clipping matters here


def test_claims_of_what_is_there():
    def claims(run, law, where, *values):
        line = row(run, law, [np.full(15, v) for v in values], data=where, tested=20_400)
        return published._claims([line])[0]

    assert claims("non-private", "all", "hospitals", 0.743, 0.743).holds
    assert claims("non-private", "all", "hospitals", 0.71, 0.712, 0.711, 0.711).holds is False
    assert claims("non-private", "all", "IID", 0.979, 0.979).holds
    assert (
        claims("curve fit", "Pareto (code)", "IID", 0.86, 0.85, 0.855, 0.857, 0.853).holds is None
    )
    assert claims("dropout", "ThreeLevels", "non-IID", 0.9).holds is False
    assert published._claims([]) == []


def test_missing_data_is_one_sentence(tmp_path):
    console = Console(quiet=True)
    with pytest.raises(BadInputError, match="DPFL_DATA_DIR"):
        published.run(Settings(False, tmp_path, console))
    (tmp_path / "mnist").mkdir()
    with pytest.raises(BadInputError, match="--quick"):
        published.run(Settings(True, tmp_path, console, tmp_path))


@pytest.mark.nightly
def test_hospitals_as_published(tmp_path, data_dir):
    found = published.run(Settings(True, tmp_path, Console(quiet=True), data_dir))
    assert len(found.claims) == 13
    batches = [c for c in found.claims if c.source == "authors' code"]
    assert all(c.holds for c in batches)
    assert len(batches) == 3
