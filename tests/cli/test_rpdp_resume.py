"""``dpfl train configs/rpdp/quickstart.yaml`` killed on the way and resumed: nobody pays twice."""

import csv
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dpfl_jax.run.directory import RECORDS

pytestmark = [pytest.mark.slow, pytest.mark.privacy]  # each run is a process of its own
pytest.importorskip("sklearn")

QUICKSTART = pathlib.Path(__file__).parents[2] / "configs" / "rpdp" / "quickstart.yaml"
ROUNDS = 8
REDUCED = [
    f"federation.rounds={ROUNDS}",
    "federation.local_steps=4",
    "federation.participation_prob=0.6",
    "privacy.policy=uniform",  # one rate for all: records leave after rounds 2 and 5
    "privacy.budgets.levels=[0.7, 1.0, 5.0]",
    "train.checkpoint_every=2",
    "seed=5",
]


def start(run_dir, *more):
    return subprocess.Popen(
        [sys.executable, "-m", "dpfl_jax.cli.main", "train", str(QUICKSTART), *REDUCED,
         "--run-dir", str(run_dir), *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


def finish(process):
    output, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    return json.loads(output.strip().splitlines()[-1])


def final_state(run_dir):
    manager = ocp.CheckpointManager(run_dir / "checkpoints", item_names=("state", "progress"))
    items = ocp.args.Composite(state=ocp.args.StandardRestore())
    return jax.tree.map(np.asarray, manager.restore(manager.latest_step(), args=items)["state"])


def table(run_dir):
    with (run_dir / RECORDS).open(newline="") as file:
        return list(csv.DictReader(file))


def test_kill_9_and_resume_gives_the_same_parameters_and_records(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    report = finish(start(whole, "--json"))

    process = start(killed)
    metrics = killed / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and metrics.read_text().count("outside_guarantee") >= 3:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (killed / "report.json").exists()
    done = metrics.read_text().count("outside_guarantee")
    assert 3 <= done < ROUNDS

    resumed = finish(start(killed, "--json"))
    assert resumed["privacy"] == report["privacy"]
    jax.tree.map(np.testing.assert_array_equal, final_state(killed), final_state(whole))
    rounds = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [r["step"] for r in rounds if "outside_guarantee" in r] == list(range(1, ROUNDS + 1))
    rows = table(killed)
    assert rows == table(whole)  # what is spent counts every round once
    assert len(rows) == report["data"]["records"] > 300
    assert all(float(row["epsilon_spent"]) <= float(row["budget"]) for row in rows)
    assert {int(row["rounds"]) for row in rows} == {2, 5, ROUNDS}
