"""``dpfl bench quality``: what is run, what is resumed, and what is compared."""

import dataclasses
import json
import pathlib
import types

import pytest

from benchmarks import quality
from benchmarks.quality import Arm, Task
from dpfl_jax.cli.main import main

TASK = Task(
    "A made-up task",
    ("train", "made-up.yaml"),
    "loss",
    {1.0: (), 8.0: ("train.steps=9",)},
    (
        Arm("first", (), (0.1, 0.2)),
        Arm("better", ("arm=better",), (0.3,)),
        Arm("worse", ("arm=worse",), (0.4, 0.5)),
    ),
    ("of=all",),
    ("held_out=other",),
    ((8.0, 1.5, "somebody"),),
)
LOSSES = {"better": 1.0, "worse": 3.0}


@pytest.fixture
def runs(monkeypatch):
    """Replaces training by a loss that is known."""
    monkeypatch.setattr(quality, "TASKS", {"made-up": TASK})
    done = []

    def train(command, **_):
        if command[0] == "python-of-peers":
            done.append({"library": command[2], "seed": command[4], "steps": command[6]})
            return types.SimpleNamespace(returncode=0, stdout='{"value": 2.5, "epsilon": 1.0}\n')
        given = dict(word.split("=", 1) for word in command if "=" in word and word[0] != "-")
        loss = LOSSES.get(given.get("arm"), 2.0) + 0.01 * int(given["seed"])
        loss = 10 - float(given["optimizer.learning_rate"]) if "held_out" in given else loss
        folder = pathlib.Path(command[command.index("--run-dir") + 1])
        folder.mkdir(parents=True)
        report = {"eval": {"final": {"loss": loss}}, "privacy": {"epsilon": 1.0}}
        (folder / "report.json").write_text(json.dumps(report))
        done.append(given)
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(quality, "subprocess", types.SimpleNamespace(run=train))
    return done


def bench(tmp_path, capsys, *options):
    assert main(["bench", "quality", "--out", str(tmp_path), *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_rates_are_tuned_apart_and_what_is_not_better_at_first_is_run_once(runs, tmp_path, capsys):
    result = bench(tmp_path, capsys, "--seeds", "3")
    assert result["ended"]
    tuning = [run for run in runs if "held_out" in run]
    assert {run["seed"] for run in tuning} == {"1000"}
    assert {run["privacy.epsilon"] for run in tuning} == {"8.0"}
    assert all(run["train.steps"] == "9" and run["of"] == "all" for run in tuning)
    assert len(tuning) == 4
    # The larger rate is the better one where others are held out; a rate alone is not tuned.
    rates = {"first": 0.2, "better": 0.3, "worse": 0.5}
    seeds = {"first": 3, "better": 3, "worse": 1}
    assert len(runs) == 4 + 2 * sum(seeds.values())
    for row in result["rows"]:
        assert row["rate"] == rates[row["arm"]]
        assert row["seeds"] == seeds[row["arm"]]
    by_arm = {row["arm"]: row for row in result["rows"] if row["epsilon"] == 8}
    assert by_arm["better"]["difference"] == pytest.approx(-1)
    assert [quality.verdict(row) for row in by_arm.values()] == [
        "",
        "better",
        "not better, one seed",
    ]


def test_other_libraries_run_if_their_python_is_given(runs, tmp_path, capsys, monkeypatch):
    peer = Arm("the same elsewhere", ("train.steps=9",), (0.3,), "opacus")
    task = dataclasses.replace(TASK, arms=(*TASK.arms[:1], peer))
    monkeypatch.setattr(quality, "TASKS", {"made-up": task})
    bench(tmp_path, capsys, "--seeds", "1")
    assert not any("library" in run for run in runs)
    result = bench(tmp_path, capsys, "--seeds", "1", "--peers", "python-of-peers")
    assert runs[-1] == {"library": "opacus", "seed": "0", "steps": "train.steps=9"}
    assert [row["mean"] for row in result["rows"] if row["arm"] == peer.name] == [2.5, 2.5]


def test_the_same_command_resumes(runs, tmp_path, capsys):
    assert not bench(tmp_path, capsys, "--minutes", "0")["ended"]
    bench(tmp_path, capsys, "--seeds", "1")
    before = len(runs)
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(rows[:-20])  # a line that was cut off
    bench(tmp_path, capsys, "--seeds", "1")
    assert len(runs) == before + 1
    assert runs[-1] == runs[before - 1]
    page, picture = tmp_path / "page.md", tmp_path / "page.png"
    bench(tmp_path, capsys, "--seeds", "1", "--markdown", str(page), "--png", str(picture))
    assert len(runs) == before + 1
    assert "| 8 | better | 1.000 | -1.000 | better, one seed | 0.3 | 1 |" in page.read_text()
    assert "Published: 1.500 at epsilon 8 (somebody)." in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_fails_says_why(runs, monkeypatch, tmp_path):
    failed = types.SimpleNamespace(returncode=2, stderr="no such file")
    monkeypatch.setattr(quality.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit, match="no such file"):
        main(["bench", "quality", "--out", str(tmp_path)])


@pytest.mark.nightly
def test_a_configuration_is_trained(monkeypatch, tmp_path, capsys):
    config = {
        "data": {"source": "breast_cancer", "validation_fraction": 0.2},
        "model": {"kind": "logistic"},
        "mechanism": {"kind": "uls", "group_size": 1, "cohort_size": 50},
        "privacy": {"delta": 1e-3},
        "train": {"steps": 2},
    }
    (tmp_path / "tiny.yaml").write_text(json.dumps(config))
    task = Task(
        "Tumours", ("train", str(tmp_path / "tiny.yaml")), "accuracy", {8.0: ()},
        (Arm("last", (), (0.1,)), Arm("tail", ("train.average=tail",), (0.1,))), (), (),
    )  # fmt: skip
    monkeypatch.setattr(quality, "TASKS", {"tumours": task})
    first, second = bench(tmp_path, capsys, "--seeds", "1")["rows"]
    assert 0 < first["mean"] < 1
    assert first["cpu_seconds"] > 0
    assert second["arm"] == "tail"
