"""``dpfl train`` with a personal epsilon for every record, and ``dpfl show --records``."""

import json
import stat

import pytest
import yaml

from dpfl_jax.cli.main import main
from dpfl_jax.federation.personal import COLUMNS

pytest.importorskip("sklearn")

CONFIG = {
    "name": "personal",
    "seed": 1,
    "data": {"source": "breast_cancer", "validation_fraction": 0.34},
    "federation": {"silos": 3, "rounds": 3, "local_steps": 2, "participation_prob": 0.7},
    "model": {"kind": "logistic"},
    "mechanism": {"kind": "rpdp", "max_records_per_subject": 1},
    "privacy": {"noise_multiplier": 2.0, "delta": 1e-3, "policy": "uniform"},
}


def dpfl(*args):
    return main([str(a) for a in args])


def last_json(text):
    return json.loads(text.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("personal")
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    assert dpfl("train", file, "--run-dir", folder / "run") == 0
    return file, folder / "run"


@pytest.mark.slow
def test_every_record_is_in_the_table_and_within_its_budget(finished, capsys):
    _, run = finished
    assert dpfl("show", run, "--records", "--json") == 0
    found = last_json(capsys.readouterr().out)
    summary, rows = found["summary"], found["records"]
    assert tuple(rows[0]) == COLUMNS
    report = json.loads((run / "report.json").read_text())
    assert len(rows) == summary["records"] == report["data"]["records"]
    assert len({row["record"] for row in rows}) == len(rows)
    for row in rows:
        assert float(row["epsilon_spent"]) <= float(row["budget"])
        assert 0 <= int(row["rounds"]) <= 3
    assert summary["over_budget"] == 0
    strict = [row for row in rows if float(row["budget"]) == 0.1]
    assert 0.5 < len(strict) / len(rows) < 0.9
    assert all(int(row["rounds"]) < 3 for row in strict)  # they have left
    assert summary["left_early"] + summary["never_sampled"] >= len(strict)
    most = max(float(row["epsilon_spent"]) for row in rows)
    assert summary["epsilon_spent"]["most"] == pytest.approx(most)
    assert most <= report["privacy"]["epsilon"]
    for name in ("records.csv", "records.json"):
        assert stat.S_IMODE((run / "private" / name).stat().st_mode) == 0o600


@pytest.mark.slow
def test_the_report_states_the_personal_guarantee(finished, capsys):
    _, run = finished
    assert dpfl("show", run, "--json") == 0
    report = last_json(capsys.readouterr().out)
    assert report["privacy"]["unit"] == "record"
    assert report["privacy"]["adjacency"] == "add-or-remove one record of one silo"
    for words in ("every record keeps its own", "between 0.1 and 5", "which silos took part"):
        assert words in report["guarantee"]
    assert "random and observed" in report["guarantee"]
    assert report["outside_guarantee"]["personal"]["over_budget"] == 0
    assert "epsilon_spent" not in report["outside_guarantee"]["personal"]  # the silos' own
    assert not {"rates", "stay", "setting"} & report["mechanism"].keys()


@pytest.mark.slow
def test_tables_of_other_runs_and_dry_runs(finished, tmp_path, capsys):
    file, run = finished
    assert dpfl("show", tmp_path, "--records") == 2
    assert "holds no table of records" in capsys.readouterr().err
    assert dpfl("show", run, "--records", "--limit", 3) == 0
    assert "more in" in capsys.readouterr().out
    assert dpfl("train", file, "--dry-run", "--run-dir", tmp_path / "none", "--json") == 0
    priced = last_json(capsys.readouterr().out)
    assert priced["status"] == "dry-run"
    assert priced["records_per_round"] < priced["population"]["records"]
    assert not (tmp_path / "none").exists()
