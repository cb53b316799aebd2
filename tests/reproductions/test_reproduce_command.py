"""``dpfl reproduce``: the registry, the JSON, and the quick subject-level figures."""

import json

import pytest

from dpfl_jax.cli.main import main
from reproductions.registry import Claim, Outcome, figures, load, near, within


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


@pytest.mark.privacy
@pytest.mark.parametrize(
    "figure", ["subject/audit", "subject/batch-statistics", "subject/empirical-audit"]
)
def test_quick_figures_hold_what_they_should(figure, tmp_path, capsys):
    assert dpfl("reproduce", figure, "--quick", "--out", tmp_path, "--json") == 0
    result = last_json(capsys.readouterr().out)
    assert result["figure"] == figure
    assert all(set(c) >= {"claim", "measured", "expected", "holds"} for c in result["claims"])
    papers = [c for c in result["claims"] if c["claim"].startswith("papers:")]
    others = [c for c in result["claims"] if not c["claim"].startswith("papers:")]
    assert all(c["holds"] for c in others), [c for c in others if not c["holds"]]
    # What the audit is for: no calibration of the papers gives what it claims.
    assert not any(c["holds"] for c in papers)
    expected = {"subject/audit": 6, "subject/empirical-audit": 2}
    assert len(papers) == expected.get(figure, 0)
    for file in result["files"]:
        with open(file, "rb") as stream:
            assert stream.read(8) == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
@pytest.mark.parametrize("figure", ["subject/skew", "subject/few-subjects", "subject/curves"])
def test_quick_training_figures_run_without_any_files(figure, tmp_path, capsys, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.delenv("DPFL_DATA_DIR", raising=False)
    assert dpfl("reproduce", figure, "--quick", "--out", tmp_path, "--json") == 0
    result = last_json(capsys.readouterr().out)
    assert any("digits stand in" in note for note in result["notes"])
    by_claim = {c["claim"]: c for c in result["claims"]}
    if figure == "subject/curves":
        assert by_claim["both: LocalItemDP is below FedAvg"]["holds"]
        assert by_claim["both: UserLDP hardly learns"]["holds"]
    assert len(result["rows"]) >= 6


@pytest.mark.parametrize(
    ("name", "message"),
    [("subject/audi", "did you mean 'subject/audit'"), ("nobody/all", "no paper")],
)
def test_unknown_figures_are_bad_input(name, message, tmp_path, capsys):
    assert dpfl("reproduce", name, "--out", tmp_path) == 2
    assert message in capsys.readouterr().err


def test_verdicts_and_json_of_claims():
    assert near("x", 1.04, 1.0, 0.05).holds
    assert not near("x", 1.06, 1.0, 0.05).holds
    assert not near("x", float("inf"), 1.0, 0.05).holds
    assert within("x", -0.1, 0.0, 0.15) == Claim("x", -0.1, 0.0, True, "within 0.15")
    assert not within("x", 0.2, 0.0, 0.15).holds
    assert not within("x", float("nan"), 0.0, 0.15, "why").holds
    outcome = Outcome([Claim("c", float("inf"), 4.0, False)], [], [{"e": float("nan")}])
    assert outcome.to_json("p/f")["claims"][0]["measured"] == "inf"
    assert outcome.to_json("p/f")["rows"] == [{"e": "nan"}]
