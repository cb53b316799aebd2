"""BLT from a file: trained, verified, read again and compiled."""

import json

import pytest
import yaml

from dpfl_jax.cli.main import main
from dpfl_jax.training.trained import load_trained


@pytest.mark.slow
def test_a_run_of_blt_from_yaml_is_verified_read_and_compiled(tmp_path, capsys):
    config = {
        "data": {
            "source": "python_source", "seq_len": 16, "max_users": 30, "max_examples_per_user": 2,
            "validation_fraction": 0.0, "test_fraction": 0.0,
        },
        "model": {"size": "tiny", "overrides": {"num_layers": 1, "embed_dim": 16, "num_heads": 2}},
        "mechanism": {"kind": "blt", "group_size": 2, "cohort_size": 6},
        "privacy": {"epsilon": 8.0, "delta": 1e-4},
        "train": {"steps": 7, "checkpoint_every": 3},
    }  # fmt: skip
    file, place = tmp_path / "own.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(config))
    assert main(["train", str(file), "--json", "--run-dir", str(place)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 7.9 < report["privacy"]["epsilon"] <= 8.0
    assert "at every 5-th step" in report["privacy"]["sampling"]
    assert report["mechanism"]["horizon"] == 7
    assert main(["verify", str(place)]) == 0
    assert load_trained(place).step == 7  # its checkpoint holds what noise keeps, too
    assert main(["train", str(file), "--dry-run"]) == 0
    assert main(["compile", str(file), "--topology", "cpu:2"]) == 0
