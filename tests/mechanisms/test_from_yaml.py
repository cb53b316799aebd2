"""Mechanisms from a file: trained, verified, read again, priced and compiled."""

import json

import jax
import pytest
import yaml

from dpfl_jax.cli.main import main
from dpfl_jax.training.export import load_trained

CONFIG = {
    "data": {
        "source": "jsonl", "seq_len": 16, "max_examples_per_user": 2,
        "validation_fraction": 0.0, "test_fraction": 0.0,
    },
    "model": {"size": "tiny", "overrides": {"num_layers": 1, "embed_dim": 16, "num_heads": 2}},
    "privacy": {"epsilon": 8.0, "delta": 1e-4},
    "train": {"steps": 7, "checkpoint_every": 3},
}  # fmt: skip
# kind: (fields, what the sampling says, how the last assumption begins)
KINDS = {
    "allocation": ({}, "in exactly one of every 5 steps", "all steps of a stretch are taken by"),
    "bandmf": (
        {"bands": 3, "column": [0.75, 0.5, 0.4375]},
        "3 groups of users",
        "checkpoints are as secret",
    ),
    "banded_inverse": ({}, "at every 5-th step", "checkpoints are as secret"),
    "individual": ({"refresh": 2}, "who leaves when a budget", "private/users.csv is told"),
    "individual_els": (
        {"refresh": 2, "batch_size": 12},
        "of users who leave when a budget",
        "private/users.csv is told",
    ),
    "blt": ({}, "at every 5-th step", "checkpoints are as secret"),
}


@pytest.fixture
def written(tmp_path):
    """Of a kind: its configuration, on two posts of each of 30 people."""
    posts = [{"user": f"u{i % 30}", "text": f"the post {i} of 60"} for i in range(60)]
    (tmp_path / "posts.jsonl").write_text("\n".join(map(json.dumps, posts)))

    def write(kind):
        fields, _, _ = KINDS[kind]
        size = {} if "batch_size" in fields else {"cohort_size": 6}
        mechanism = {"kind": kind, "group_size": 2, **size, **fields}
        file = tmp_path / "own.yaml"
        data = CONFIG["data"] | {"path": str(tmp_path / "posts.jsonl")}
        file.write_text(yaml.safe_dump(CONFIG | {"data": data, "mechanism": mechanism}))
        return file

    return write


@pytest.mark.nightly
@pytest.mark.slow("bandmf")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_from_yaml_is_verified_and_read(kind, written, tmp_path, capsys):
    file, place, (_, sampling, last) = written(kind), tmp_path / "run", KINDS[kind]
    assert main(["train", str(file), "--json", "--run-dir", str(place)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 7.9 < report["privacy"]["epsilon"] <= 8.0
    assert sampling in report["privacy"]["sampling"]
    assert any(told.startswith(last) for told in report["privacy"]["assumptions"][-2:])
    assert main(["verify", str(place)]) == 0
    assert load_trained(place).step == 7  # its checkpoint holds what noise keeps, too


@pytest.mark.nightly
@pytest.mark.slow("bandmf")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_from_yaml_is_priced_and_compiled(kind, written):
    file = written(kind)
    jax.devices()  # before `compile`, which asks for two where none is in use yet
    assert main(["train", str(file), "--dry-run"]) == 0
    assert main(["compile", str(file), "--topology", "cpu:2"]) == 0
