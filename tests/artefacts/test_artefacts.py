"""Files that earlier versions wrote are read: verified, predicted from, resumed."""

import csv
import json
import pathlib
import tarfile

import pytest

from dpfl_jax import __version__
from dpfl_jax.accounting import statement, versions
from dpfl_jax.cli.main import main

FOLDER = pathlib.Path(__file__).parent
VERSIONS = sorted(path.parent.name for path in FOLDER.glob("*/files.tar.gz"))
GUARANTEES = sorted(FOLDER.glob("*/guarantees/*.json"))


@pytest.fixture(params=VERSIONS)
def files(request, tmp_path, monkeypatch):
    """The files of a version, in the current folder."""
    with tarfile.open(FOLDER / request.param / "files.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return request.param


def output_of(capsys, *words, code=0):
    """What a command prints with --json."""
    capsys.readouterr()
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("file", GUARANTEES, ids=lambda file: f"{file.parts[-3]}-{file.stem}")
def test_files_that_were_written_before_hold(file, capsys):
    """One of every mechanism: what is stated of a run has not changed."""
    assert output_of(capsys, "verify", str(file))["holds"]


def test_runs_and_exports_are_verified(files, capsys):
    for folder in ("run", "interrupted", "exported"):
        found = output_of(capsys, "verify", folder)
        assert found["failures"] == []
        assert found["compared"]
        assert found["library"].startswith(f"dpfl_jax {files}")


def test_an_export_predicts_what_it_predicted(files, capsys):
    command = ["predict", "exported", "visits.csv", "--delimiter", ";", "--out", "now.csv"]
    assert main(command) == 0
    then, now = (
        list(csv.DictReader(pathlib.Path(name).read_text().splitlines(), delimiter=";"))
        for name in ("predicted.csv", "now.csv")
    )
    assert len(then) == len(now) == 60
    for a, b in zip(then, now, strict=True):
        assert a.keys() == b.keys()
        assert float(a["probability_1"]) == pytest.approx(float(b["probability_1"]), abs=1e-5)


def test_a_finished_run_is_shown_and_exported(files, capsys):
    assert main(["show", "run"]) == 0
    assert "epsilon 8" in capsys.readouterr().out
    assert main(["export", "run", "again", "--registry", "entry.yaml"]) == 0
    assert "epsilon: " in pathlib.Path("entry.yaml").read_text()
    assert main(["export", "run", "again/2", "--registry", "again/2/entry.yaml"]) == 2
    assert "write the entry somewhere else" in capsys.readouterr().err


def test_an_interrupted_run_resumes(files, capsys):
    """With the same first two numbers: a later version may have another key."""
    if versions.version_of(files).order[:2] != versions.version_of(__version__).order[:2]:
        pytest.skip("of another minor version")
    before = output_of(capsys, "verify", "interrupted")["privacy"]
    assert main(["train", "config.yaml", "--run-dir", "interrupted"]) == 0
    after = output_of(capsys, "verify", "interrupted")
    assert before["steps"] < after["privacy"]["steps"] == 4
    assert before["epsilon"] < after["privacy"]["epsilon"] <= 8.0
    library = statement.read("interrupted/guarantee.json").library
    assert library.startswith(f"dpfl_jax {files}")
    assert library.endswith(versions.this_version())


def test_a_store_is_read(files, capsys):
    found = output_of(capsys, "data", "inspect", "store", "--verify")
    assert (found["users"], found["examples"]) == (5, 30)
