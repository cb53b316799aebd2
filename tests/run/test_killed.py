"""``kill -9`` at a random step of each of the four systems: the run goes on as if nothing was."""

import csv
import json
import os
import random
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import yaml
from runs import final_state
from silo_configs import SILOS

from dpfl_jax.run.directory import RECORDS

pytest.importorskip("sklearn")

STEPS = 12
PAIR = ("prompt", "chosen", "rejected")
# `dpfl`, whose process is killed as soon as it has written so many rows of metrics.
KILLED = """
import os, sys
from dpfl_jax.cli.main import main
from dpfl_jax.run.directory import RunDirectory

append, left = RunDirectory.append_metrics, int(sys.argv.pop(1))

def append_and_die(self, row):
    global left
    append(self, row)
    left -= "outside_guarantee" in row
    if not left:
        os.kill(os.getpid(), 9)

RunDirectory.append_metrics = append_and_die
sys.exit(main(sys.argv[1:]))
"""


def central(folder):
    rng = np.random.default_rng(0)
    words = ["river", "stone", "lamp", "green", "quiet", "seven", "horse", "under"]
    rows = [{"user": f"u{i % 40}", "text": " ".join(rng.choice(words, 12))} for i in range(120)]
    for i, row in enumerate(rows):
        row |= dict(zip(PAIR, (words[i % 8], words[i % 3], words[3 + i % 5])))
    (folder / "posts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "data": {
            "source": "jsonl", "path": str(folder / "posts.jsonl"), "seq_len": 32,
            "validation_fraction": 0.2, "test_fraction": 0.0,
        },
        "model": {"size": "tiny", "overrides": {"num_layers": 1, "embed_dim": 16, "num_heads": 2}},
        "mechanism": {"kind": "uls", "group_size": 2, "cohort_size": 8},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "optimizer": {"name": "adam", "learning_rate": 0.01},
        "train": {"steps": STEPS, "eval_every": 6},
        "execution": {"microbatch_size": 4},
    }  # fmt: skip


def start(*command):
    env = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, env=env, timeout=900
    )


def steps_of(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "outside_guarantee" in row]


@pytest.mark.nightly
@pytest.mark.slow("federated")
@pytest.mark.parametrize("name", ["central", *SILOS, "bandmf", "blt", "individual", "dpo"])
def test_a_killed_run_ends_as_one_that_was_not(tmp_path, name):
    """Parameters, optimisers of server and silos, and what every record spent, bit for bit."""
    config = {"name": name, "seed": 1, **(SILOS[name] if name in SILOS else central(tmp_path))}
    config["train"] = config["train"] | {"checkpoint_every": 3}
    if name == "bandmf":  # what its noise has to take back is in checkpoints
        more = {"kind": "bandmf", "bands": 4, "cohort_size": 4}
        config["mechanism"] = config["mechanism"] | more
    if name == "individual":  # what users have spent, in the middle of a stretch
        more = {"kind": "individual", "refresh": 4}
        config["mechanism"] = config["mechanism"] | more
    if name == "blt":  # likewise
        config["mechanism"] = config["mechanism"] | {"kind": "blt"}
    if name == "dpo":  # the reference is in no checkpoint, and is made again
        config["data"] = config["data"] | {f"{column}_column": column for column in PAIR}
        config["model"] = config["model"] | {"dpo": {"beta": 0.5}}
    if "federation" in config:
        config["federation"] = config["federation"] | {"rounds": STEPS}
    if name == "personal":  # one rate for all: whose budget is small leaves on the way
        budgets = {"kind": "three_levels", "levels": [0.7, 1.0, 5.0], "shares": [0.7, 0.2, 0.1]}
        config["privacy"] = config["privacy"] | {"policy": "uniform", "budgets": budgets}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    train = ["train", file, "--json", "--run-dir"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = start("-m", "dpfl_jax.cli.main", *train, whole)
    assert done.returncode == 0, done.stderr

    rows = len(steps_of(whole))
    after = random.SystemRandom().randrange(1, rows)
    death = start("-c", KILLED, after, *train, killed)
    assert death.returncode == -signal.SIGKILL, death.stderr
    assert not (killed / "report.json").exists()
    assert len(steps_of(killed)) == after

    resumed = start("-m", "dpfl_jax.cli.main", *train, killed)
    assert resumed.returncode == 0, f"killed after {after} of {rows} rows: {resumed.stderr}"
    reports = [json.loads((place / "report.json").read_text()) for place in (whole, killed)]
    assert reports[0]["privacy"] == reports[1]["privacy"], f"killed after {after} rows"
    assert steps_of(killed) == steps_of(whole), f"killed after {after} rows"
    jax.tree.map(np.testing.assert_array_equal, final_state(killed), final_state(whole))
    if name == "personal":  # what a record has spent counts every round once
        tables = [list(csv.DictReader((run / RECORDS).open())) for run in (whole, killed)]
        assert tables[0] == tables[1]
        assert all(float(row["epsilon_spent"]) <= float(row["budget"]) for row in tables[0])
        assert len({row["rounds"] for row in tables[0]}) > 1
