"""``dpfl reproduce``: the registry, the JSON, and the quick subject-level figures."""

import dataclasses
import json
import math
import signal

import numpy as np
import pytest
from scipy import stats

from dpfl_jax.cli.main import main
from dpfl_jax.run.console import StopRequest
from reproductions.registry import (
    UNDECIDED,
    Claim,
    Outcome,
    Tried,
    Tuning,
    between,
    figures,
    judged,
    less,
    load,
    near,
    tally,
    within,
)


def dpfl(*args):
    return main([str(a) for a in args])


def last_json(text):
    return json.loads(text.strip().splitlines()[-1])


def test_the_list_names_every_figure_with_its_source(capsys):
    assert dpfl("reproduce", "list", "--json") == 0
    rows = last_json(capsys.readouterr().out)["figures"]
    names = {row["figure"] for row in rows}
    assert {"subject/audit", "subject/batch-statistics"} <= names
    assert all(row["title"] and row["source"] for row in rows)
    for name in figures():
        assert callable(load(name).run)


REFUTED = {
    "subject/audit": {
        "text B, HiGradAvgDP has epsilon 4 in one silo",
        "of two users, UserLDP, text B, has epsilon 4 in one silo",
        "both: what has epsilon 4 in one silo has it over s silos in R/sqrt(s) rounds",
    },
    "subject/empirical-audit": {
        "LocalGroupDP, noise by the batch: no attack finds more than epsilon 4",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "figure", ["subject/audit", "subject/batch-statistics", "subject/empirical-audit"]
)
def test_quick_figures_hold_what_they_should(figure, tmp_path, capsys):
    assert dpfl("reproduce", figure, "--quick", "--out", tmp_path, "--json") == 0
    result = last_json(capsys.readouterr().out)
    assert result["figure"] == figure
    assert all(
        set(c) >= {"claim", "measured", "expected", "verdict", "source"} for c in result["claims"]
    )
    assert sum(c["holds"] is None for c in result["claims"]) <= 1  # sizes the papers do not give
    # What the audits are for: the papers' calibrations that do not give what they claim.
    refuted = {c["claim"] for c in result["claims"] if c["holds"] is False}
    assert refuted == REFUTED.get(figure, set())
    for file in result["files"]:
        with open(file, "rb") as stream:
            assert stream.read(8) == b"\x89PNG\r\n\x1a\n"


@pytest.mark.nightly
@pytest.mark.parametrize("figure", ["subject/skew", "subject/few-subjects", "subject/curves"])
def test_quick_training_figures_run_without_any_files(figure, tmp_path, capsys, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.delenv("DPFL_DATA_DIR", raising=False)
    assert dpfl("reproduce", figure, "--quick", "--out", tmp_path, "--json") == 0
    result = last_json(capsys.readouterr().out)
    assert any("digits stand in" in note for note in result["notes"])
    by_claim = {c["claim"]: c for c in result["claims"]}
    if figure == "subject/curves":
        assert by_claim["both: LocalItemDP is below FedAvg"]["measured"].startswith("-")
    assert len(result["rows"]) >= 6


@pytest.mark.parametrize(
    ("name", "message"),
    [("subject/audi", "did you mean 'subject/audit'"), ("nobody/all", "no paper")],
)
def test_unknown_figures_are_bad_input(name, message, tmp_path, capsys):
    assert dpfl("reproduce", name, "--out", tmp_path) == 2
    assert message in capsys.readouterr().err


def test_verdicts_and_json_of_claims():
    assert near("x", 1.04, 1.0, 0.05, source="paper").holds
    assert not near("x", 1.06, 1.0, 0.05, source="paper").holds
    assert not near("x", float("inf"), 1.0, 0.05, source="paper").holds
    found = within("x", -0.1, 0.0, 0.15, source="ours")
    assert found == Claim("x", -0.1, 0.0, True, "within 0.15", source="ours")
    assert not within("x", 0.2, 0.0, 0.15, source="paper").holds
    assert not within("x", float("nan"), 0.0, 0.15, "why", source="paper").holds
    outcome = Outcome([Claim("c", math.inf, 4.0, False, source="paper")], [], [{"e": math.nan}])
    written = outcome.to_json("p/f")
    assert written["claims"][0]["measured"] == "inf"
    assert written["claims"][0]["verdict"] == "does not hold"
    assert written["rows"] == [{"e": "nan"}]
    undecided = Claim("d", 1, 2, None, source="paper").to_json()
    assert tally([*written["claims"], undecided]) == {
        "paper": {"holds": 0, "does not hold": 1, UNDECIDED: 1}
    }


def verdict_of(*claims):
    return [claim.holds for claim in judged(claims)]


def test_an_order_is_a_paired_test_over_seeds():
    """Golden: scipy's paired t-test."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=8)  # what the seeds have in common, far larger than the difference
    apart = base + 0.1 + 0.02 * rng.normal(size=8)
    claim = less("x", base, apart, source="paper")
    assert claim.p_value == pytest.approx(stats.ttest_rel(base, apart).pvalue, rel=1e-9)
    assert verdict_of(claim) == [True]
    assert verdict_of(less("x", apart, base, source="paper")) == [False]
    # Not worse by more than the room.
    assert verdict_of(less("x", apart, base, source="paper", room=0.2)) == [True]
    assert verdict_of(less("x", base, rng.normal(size=8), source="paper")) == [None]
    assert "seeds would decide" in less("x", base, rng.normal(size=8), source="paper").note
    # At most 5 % of no difference; never fewer seeds than did not decide.
    nearly = less("x", [0.0, 1.0, 2.0, 1.0, 0.3], [0.2, 2.2, 2.1, 2.8, 1.2], source="paper")
    assert nearly.p_value > 0.05
    assert nearly.note == "about 6 seeds would decide"
    level = less("x", [0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 1e-9], source="paper")
    assert level.note == "more than 10,000 seeds would decide"
    one = less("x", [1.0], [2.0], source="paper")
    assert (one.holds, one.measured) == (None, "-1, 1 seed")
    assert less("x", [1.0, 1.0], [2.0, 2.0], source="paper").holds is True


def test_many_orders_share_one_error_rate():
    """Of 20 differences that are none, hardly any figure calls one: 5 % of 400, at most 32."""
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(400):
        drawn = rng.normal(size=(20, 2, 5))
        claims = [less("x", a, b, source="paper") for a, b in drawn]
        wrong += any(c is not None for c in verdict_of(*claims))
    assert 5 <= wrong <= 32  # binomial(400, .05): beyond with probability 1e-3
    tested = [Claim(str(p), 0, 0, True, source="paper", p_value=p) for p in (0.03, 0.001, 0.02)]
    assert verdict_of(*tested) == [True, True, True]  # 0.001 < .05/3, 0.02 < .05/2, 0.03 < .05
    tested = [Claim(str(p), 0, 0, True, source="paper", p_value=p) for p in (0.03, 0.001, 0.03)]
    assert verdict_of(*tested) == [None, True, None]
    assert judged(tested)[0].note == "not after Holm's correction"


def test_a_range_is_met_missed_or_left_open():
    values = np.array([19.0, 20.0, 21.0])
    assert between("x", values, 10, 30, source="paper").holds is True
    assert between("x", values, 30, 40, source="paper").holds is False
    assert between("x", values, 20, 40, source="paper").holds is None
    assert between("x", values[:1], 10, 30, source="paper").holds is None


def test_a_claim_of_ours_that_fails_is_exit_status_3(tmp_path, capsys, monkeypatch):
    def run(settings):
        return Outcome([Claim("c", 1, 2, False, source=source)], [])

    module = load("isrl/closed-forms")
    monkeypatch.setattr(module, "run", run)
    for source, status in (("paper", 0), ("authors' code", 0), ("arithmetic", 3), ("ours", 3)):
        assert dpfl("reproduce", "isrl/closed-forms", "--out", tmp_path, "--json") == status
        assert last_json(capsys.readouterr().out)["tally"][source]["does not hold"] == 1


def test_a_training_that_was_stopped_is_not_taken_for_the_whole(tmp_path, capsys, monkeypatch):
    """Ctrl-C ends a reproduction, which would go on with what the training had come to."""

    def run(settings):
        with StopRequest():  # as the driver of a run has it
            signal.raise_signal(signal.SIGINT)
        return Outcome([], [])

    module = load("isrl/closed-forms")
    monkeypatch.setattr(module, "run", run)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert dpfl("reproduce", "isrl/closed-forms", "--out", tmp_path) not in (0, 3)
    finally:
        signal.signal(signal.SIGINT, before)


# ---- verdicts that are fair ---------------------------------------------------------------------


BASE = np.arange(8.0)
OPPOSITE = {"claim": "x", "smaller": BASE + 1 + 0.01 * BASE**2, "larger": BASE}


def outcome_of(tried, claim=None):
    return Outcome([claim or less(**OPPOSITE, source="paper")], [], tried=tried).claims[0]


def test_a_claim_of_a_paper_fails_at_its_own_size_and_with_power_only():
    assert outcome_of(Tried("the paper's", True)).verdict == "does not hold"
    small = outcome_of(Tried("a tenth of the paper's"))
    assert (small.verdict, small.holds) == ("undecided at this size", None)
    assert "not the paper's" in small.note
    assert outcome_of(None).holds is None
    # Significant, but at so many seeds an effect of the size claimed would be missed.
    gap = np.array([0.3, 0.1, 0.9, 0.5])
    weak = less("x", gap, 0 * gap, source="paper", effect=0.1)
    weak = dataclasses.replace(weak, p_value=0.01)
    assert weak.power < 0.8
    assert outcome_of(Tried("the paper's", True), weak).holds is None
    # What holds at a small size holds there; what is computed has no size; ours may always fail.
    kept = less("x", BASE, BASE + 1 + 0.01 * BASE**2, source="paper")
    assert outcome_of(Tried("small"), kept).holds is True
    assert outcome_of(None, Claim("x", 1, 2, False, source="paper")).holds is False
    assert outcome_of(Tried("small"), less(**OPPOSITE, source="ours")).holds is False


def test_power_is_that_of_a_paired_test():
    """One standard deviation at 8 pairs: against 20,000 tests."""
    gap = np.array([-1.0, 1.0] * 4) * np.sqrt(7 / 8)  # of mean 0 and standard deviation 1
    claim = less("x", gap, 0 * gap, source="paper", effect=1.0)
    drawn = np.random.default_rng(0).normal(1.0, size=(20_000, 8))
    found = stats.ttest_1samp(drawn, 0.0, axis=1).pvalue < 0.05
    assert claim.power == pytest.approx(found.mean(), abs=0.015)


GRID = {"learning rate": (0.1, 1.0, 10.0)}


@pytest.mark.parametrize(
    ("tuning", "said"),
    [
        (
            {"A": Tuning(GRID, {"learning rate": 1.0}, [9]), "B": Tuning({}, {}, [9])},
            "nothing of B",
        ),
        (
            {
                "A": Tuning(GRID, {"learning rate": 1.0}, [9]),
                "B": Tuning({"learning rate": (1.0,)}, {"learning rate": 1.0}, [9]),
            },
            "nothing of B; learning rate (3 values) of A",
        ),
        (
            {
                "A": Tuning(GRID | {"clip norm": (1.0, 2.0)}, {"learning rate": 1.0}, [9]),
                "B": Tuning(GRID, {"learning rate": 1.0}, [9]),
            },
            "clip norm (2 values) of A",
        ),
        (dict.fromkeys("AB", Tuning(GRID, {"learning rate": 1.0}, [1])), "seeds that are reported"),
    ],
)
def test_arms_that_are_not_tuned_alike_are_not_compared(tuning, said):
    """Neither for the claim nor against it, whatever the size."""
    tried = Tried("the paper's", True, tuning=tuning, reported=[0, 1])
    assert said in tried.unfair
    favourable = less("x", BASE, BASE + 1 + 0.01 * BASE**2, source="paper")
    against = [less(**OPPOSITE, source=source) for source in ("paper", "ours")]
    for claim in (favourable, *against):
        found = outcome_of(tried, claim)
        assert found.holds is None
        assert said in found.note
    alike = dict.fromkeys("AB", Tuning(GRID, {"learning rate": 1.0}, [9]))
    fair = Tried("the paper's", True, tuning=alike, reported=[0, 1])
    assert outcome_of(fair, favourable).holds is True
