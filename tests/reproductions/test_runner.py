"""``dpfl reproduce all``: what is finished is kept, what failed is told, a kill gone on from."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from dpfl_jax.cli.main import main
from dpfl_jax.errors import BadInputError
from reproductions import _seeds, registry, runner
from reproductions.runner import Job, run_all

QUIET = Console(quiet=True)
FOUND = """
import json, pathlib, sys
name, holds = sys.argv[1:3]
pathlib.Path(sys.argv[-1], "ran.txt").open("a").write(name + "\\n")
claim = {"claim": "c", "measured": 1.0, "expected": 1.0, "note": "", "source": "ours",
         "p_value": None, "holds": holds == "True", "verdict": "holds"}
print(json.dumps({"figure": name, "claims": [claim], "rows": [], "notes": [], "tried": None,
                  "files": []}))
"""
JOBS = [Job("isrl/closed-forms", True), Job("userlevel/lemma-1", True), Job("isrl/rates", True)]


def finds(holds):
    return lambda job: [sys.executable, "-c", FOUND, job.figure, str(holds)]


def ran(out):
    return (out / "ran.txt").read_text().split()


def test_finished_experiments_are_not_run_again(tmp_path, monkeypatch):
    made = run_all(JOBS[:2], tmp_path, QUIET, command=finds(True))
    assert [e["figure"] for e in made["experiments"]] == [j.figure for j in JOBS[:2]]
    again = run_all(JOBS, tmp_path, QUIET, at_once=2, command=finds(True))
    assert sorted(ran(tmp_path)) == sorted(j.figure for j in JOBS)
    assert again["tally"] == {"ours": {"holds": 3, "does not hold": 0, registry.UNDECIDED: 0}}
    assert json.loads((tmp_path / "manifest.json").read_text()) == again
    for entry in again["experiments"]:
        assert entry["wall_seconds"] > 0
        assert set(entry) >= {"commit", "versions", "hardware", "cpu_seconds", "form", "seeds"}
    log = (tmp_path / "reproduce.log").read_text()
    assert "isrl/closed-forms (quick): finished" in log
    # Other settings, or other code, are another experiment.
    assert runner.key_of(JOBS[0]) != runner.key_of(Job(JOBS[0].figure, False))
    assert runner.key_of(JOBS[0]) != runner.key_of(Job(JOBS[0].figure, True, replication=1))
    monkeypatch.setattr(runner, "code_of", lambda module: module)
    last = run_all(JOBS[:1], tmp_path, QUIET, command=finds(True))
    assert ran(tmp_path).count(JOBS[0].figure) == 2
    assert sorted(e["figure"] for e in last["experiments"]) == sorted(j.figure for j in JOBS)


def test_code_that_an_experiment_imports_decides_its_key():
    assert runner.code_of("reproductions.isrl.mnist") != runner.code_of("reproductions.isrl.rates")


def test_one_that_fails_is_told_and_run_again(tmp_path):
    def command(job):
        if job is JOBS[1] and not (tmp_path / "mended").exists():
            return [sys.executable, "-c", "raise SystemExit('no data')"]
        return finds(True)(job)

    made = run_all(JOBS, tmp_path, QUIET, command=command)
    assert made["failed"] == [JOBS[1].figure]
    assert made["experiments"][1]["error"] == "no data"
    (tmp_path / "mended").touch()
    assert not run_all(JOBS, tmp_path, QUIET, command=command)["failed"]
    assert len(ran(tmp_path)) == 3


def test_a_claim_of_ours_that_fails_is_exit_status_3(tmp_path, capsys, monkeypatch):
    figures = {job.figure: registry.figures()[job.figure] for job in JOBS}
    monkeypatch.setattr(registry, "figures", lambda: figures)
    for holds, status in ((True, 0), (False, 3)):
        monkeypatch.setattr(runner.Job, "command", property(finds(holds)))
        out = tmp_path / str(holds)
        assert main(["reproduce", "all", "--out", str(out), "--json"]) == status
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["holds"] is holds


def test_a_killed_run_goes_on(tmp_path):
    """SIGKILL between two experiments: the first one is in the manifest."""
    program = f"""
import pathlib, sys
from rich.console import Console
from reproductions.runner import Job, run_all
def command(job):
    if job.figure == "isrl/rates":
        return [sys.executable, "-c", "import time; time.sleep(60)"]
    return [sys.executable, "-c", {FOUND!r}, job.figure, "True"]
run_all([Job("isrl/closed-forms", True), Job("isrl/rates", True)], pathlib.Path(sys.argv[1]),
        Console(quiet=True), command=command)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(runner.ROOT)},
        start_new_session=True,
    )
    for _ in range(300):
        if (tmp_path / "manifest.json").exists():
            break
        time.sleep(0.1)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    made = run_all([JOBS[0], JOBS[2]], tmp_path, QUIET, command=finds(True))
    assert ran(tmp_path) == [JOBS[0].figure, JOBS[2].figure]
    assert len(made["experiments"]) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("isrl/rates", "--jobs", "2"), "--jobs is for"),
        (("isrl/all", "--jobs", "0"), "at least 1"),
        (("isrl/all", "--replication", "-1"), "--replication is -1"),
    ],
)
def test_wrong_options_are_one_sentence(args, message, tmp_path, capsys):
    assert main(["reproduce", *args, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_figures_with_a_comma_between_are_run_like_all(tmp_path, monkeypatch):
    asked = []

    def noted(jobs, out, console, at_once):
        asked.extend((job.figure, job.form, job.minutes, at_once) for job in jobs)
        return {"failed": [], "holds": True, "tally": {}}

    monkeypatch.setattr(runner, "run_all", noted)
    figures = "isrl/rates,rpdp/mnist"
    options = ["--full", "--minutes", "3", "--jobs", "2", "--out", str(tmp_path)]
    assert main(["reproduce", figures, *options]) == 0
    assert asked == [("isrl/rates", "full", None, 2), ("rpdp/mnist", "full", 3.0, 2)]


def test_what_is_to_run_on_a_gpu_is_there():
    script = runner.ROOT / "reproductions" / "on_gpu.sh"
    (figures,) = re.findall(r"^figures=(.*)$", script.read_text(), re.M)
    assert {*figures.split(",")} <= {*registry.figures()}
    shown = subprocess.run([script, "--help"], check=True, capture_output=True, text=True)
    assert shown.stdout.startswith("usage: reproductions/on_gpu.sh OUT")


def test_another_replication_has_other_seeds_throughout(monkeypatch):
    monkeypatch.setattr(_seeds, "_replication", 0)
    assert _seeds.of(7) == 7
    _seeds.replicate(2)
    assert _seeds.of(7) == 7 + 2 * _seeds.STRIDE
    found = {}
    for file in sorted((runner.ROOT / "reproductions").rglob("*.py")):
        # Those on personal budgets number seeds where their trainings begin.
        if file.parent.name != "rpdp":
            starts = re.findall(
                r"(?:default_rng|random\.key|from_seed)\((?!of\()", file.read_text()
            )
            found |= {file.name: starts} if starts else {}
    assert not found


def test_a_manifest_of_another_version_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": 0}')
    with pytest.raises(BadInputError, match="no manifest of this version"):
        run_all(JOBS, tmp_path, QUIET, command=finds(True))
