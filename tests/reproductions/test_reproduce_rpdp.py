"""The reproductions of rPDP-FL: what does not hold is what the paper gets wrong."""

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from dpfl_jax.accounting import closed_forms
from dpfl_jax.accounting.rates import TwoStage
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.personal import RateAssignment
from reproductions import registry
from reproductions.registry import Settings
from reproductions.rpdp import mnist
from reproductions.rpdp._tables import Beside, beside, row
from reproductions.rpdp._training import with_papers_stops


def outcome(name, tmp_path, data_dir=None, seeds=None):
    console = Console(quiet=True)
    return registry.load(name).run(Settings(True, tmp_path, console, data_dir, seeds))


@pytest.mark.parametrize("name", ["rpdp/heart", "rpdp/mnist"])
def test_missing_data_is_one_sentence(tmp_path, name):
    with pytest.raises(BadInputError, match="DPFL_DATA_DIR"):
        outcome(name, tmp_path)


def test_verdicts_use_the_standard_errors_of_both():
    curves = [np.full(5, a) for a in (0.70, 0.72, 0.74)]
    found = row("certified", "ThreeLevels", curves)
    assert found["accuracy"] == pytest.approx(0.72)
    assert found["std"] == pytest.approx(0.02)
    # Far off, and an unlucky one of ten: Holm's rate is that of all.
    far, tenth = Beside("x", found, 0.78, 0.02, 20), Beside("x", found, 0.753, 0.02, 20)
    assert beside([far])[0].holds is False
    assert beside([tenth])[0].holds is False
    wide = Beside("x", found, 0.72, 0.05, 20)
    assert beside([tenth] + 9 * [wide])[0].holds is None
    # As near as can be, and known too badly to be called the same.
    assert beside([wide])[0].holds is None


def test_runs_that_share_a_start_spread_less_than_starts_do():
    """All that ours spread more is the start's: a mean of one start says little of the others."""
    found = row("certified", "ThreeLevels", [np.full(5, 0.72 + 0.01 * z) for z in range(-9, 10)])
    same, one_start = (Beside("x", found, 0.7, std, 5) for std in (found["std"], 0.003))
    assert same.tested()[1] < one_start.tested()[1]
    assert one_start.tested()[1] > 1.9 * found["std"]
    narrow = row("certified", "ThreeLevels", [np.full(5, 0.72 + 0.001 * z) for z in (-1, 0, 1) * 3])
    assert beside([Beside("x", narrow, 0.715, 0.003, 5)])[0].holds
    # Another, but by less than is told apart.
    assert beside([Beside("x", narrow, 0.701, 0.003, 5)])[0].holds is None


def test_a_difference_from_a_published_mean_is_welchs():
    curves = [np.full(5, a) for a in (0.70, 0.72, 0.74, 0.71, 0.73, 0.75)]
    found = row("certified", "ThreeLevels", curves)
    one = Beside("x", found, 0.7, 0.03, 5)
    want = stats.ttest_ind_from_stats(
        found["accuracy"], found["std"], 6, 0.7, 0.03, 5, equal_var=False
    )
    assert one.tested()[2] == pytest.approx(want.pvalue)


def test_the_fitted_rates_leave_where_the_papers_accountant_stops_them():
    """The last round that each budget allows, by Renyi's epsilon of the rate."""
    setting = TwoStage(12.2509765625, 50, 15, 1.0, 1e-3)
    budgets, form = np.array([0.1, 1.0, 5.0]), setting.closed_form()
    rates = np.vectorize(closed_forms.fit_curve(*form).rate)(budgets)
    stay = with_papers_stops(
        RateAssignment("curve_fit", rates, np.full(3, 15), 0, {}), budgets, setting
    ).stay
    assert stay.tolist() == [10, 15, 14]
    for rate, budget, rounds in zip(rates, budgets, stay.tolist(), strict=True):
        spent = [closed_forms.epsilon_two_stage(rate, *form[:2], t, *form[3:])[0] for t in (10, 15)]
        assert spent[0] <= budget
        assert (spent[1] <= budget) == (rounds == 15)


@pytest.mark.nightly
def test_the_curve_stops_records_early_and_certified_rates_do_not(tmp_path):
    found = outcome("rpdp/curve", tmp_path)
    failed = {claim.claim for claim in found.claims if not claim.holds}
    early = {claim.claim for claim in found.claims if "stop early" in claim.claim}
    assert len(early) == 4
    assert not early & failed
    assert all(c.source == "paper" for c in found.claims if not c.holds)
    assert any("server" in claim for claim in failed)
    assert found.files[0].stat().st_size > 1000


@pytest.mark.nightly
def test_distributions_of_budgets_on_embedded_data(tmp_path):
    pytest.importorskip("sklearn")
    found = outcome("rpdp/budgets", tmp_path, seeds=3)
    by_claim = {claim.claim: claim for claim in found.claims}
    assert by_claim["nobody exceeds a budget, in any run"].holds
    ahead = [c for n, c in by_claim.items() if "is ahead of" in n]
    assert len(ahead) == 20  # five distributions, two methods, two baselines
    assert not any(c.holds is False for c in ahead)  # three seeds decide little
    assert all(float(c.measured.split()[0]) < 0 for c in ahead)


@pytest.mark.nightly
def test_one_silo_against_the_filter(tmp_path):
    pytest.importorskip("sklearn")
    found = outcome("rpdp/centralised", tmp_path, seeds=5)
    assert next(c for c in found.claims if "nobody exceeds" in c.claim).holds
    assert {r["run"] for r in found.rows} == {"bisection", "filter"}


@pytest.mark.nightly
def test_hospitals(tmp_path, data_dir):
    found = outcome("rpdp/heart", tmp_path, data_dir, seeds=5)
    assert not [c for c in found.claims if c.holds is False]
    ahead = [c for c in found.claims if "is ahead of" in c.claim]
    assert len(ahead) == 15  # three distributions, two methods, two baselines, and minimum (b)
    assert all(float(c.measured.split()[0]) < 0 for c in ahead)  # five seeds decide little


@pytest.mark.nightly
def test_mnist_silos_hold_what_they_should(data_dir):
    for split, classes in (("IID", 10), ("non-IID", 5)):
        data, test = mnist.silos(data_dir / "mnist", split, 0)
        for silo in data.silos:
            read = data.read(np.arange(silo.first, silo.first + silo.num_records))
            assert len(set(read["label"].tolist())) == classes
            assert abs(silo.num_records - 3960) < 200
        assert len(test["x"]) + data.num_records <= 60_000
        assert len(np.unique(data.order)) == data.num_records
