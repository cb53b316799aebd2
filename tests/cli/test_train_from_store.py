"""From files to a built store to a run: the same parameters as from the files themselves."""

import json

import jax
import numpy as np
import pytest
import yaml
from runs import final_state

from dpfl_jax.cli.main import main


def train(tmp_path, data, capsys, name):
    config = {
        "name": name,
        "seed": 1,
        "data": {"seq_len": 32, "validation_fraction": 0.2, "test_fraction": 0.0} | data,
        "model": {"size": "tiny", "overrides": {"num_layers": 1, "embed_dim": 16, "num_heads": 2}},
        "mechanism": {"kind": "uls", "group_size": 2, "cohort_size": 4, "clipping": "normalized"},
        "privacy": {"epsilon": 8.0, "delta": 1e-3},
        "optimizer": {"name": "adam", "learning_rate": 0.01},
        "train": {"steps": 2},
        "execution": {"microbatch_size": 4},
    }
    file = tmp_path / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    run_dir = tmp_path / name
    assert main(["train", str(file), "--run-dir", str(run_dir), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    return final_state(run_dir)["params"], report


@pytest.mark.nightly
@pytest.mark.parametrize("store_format", ["arrow", "arrayrecord"])
def test_a_built_store_trains_like_its_files(tmp_path, capsys, store_format):
    rng = np.random.default_rng(0)
    rows = [
        json.dumps({"user": f"u{u}", "text": " ".join(rng.choice(["ab", "cde", "f"], size=12))})
        for u in range(40)
        for _ in range(int(rng.integers(1, 5)))
    ]
    posts = tmp_path / "posts.jsonl"
    posts.write_text("\n".join(rows))
    store = tmp_path / "store"
    build = ["data", "build", "--input", str(posts), "--out", str(store), "--seq-len", "32"]
    assert main([*build, "--store-format", store_format, "--workers", "1"]) == 0
    capsys.readouterr()
    direct, first = train(tmp_path, {"source": "jsonl", "path": str(posts)}, capsys, "direct")
    stored, second = train(tmp_path, {"source": "store", "path": str(store)}, capsys, "stored")
    for a, b in zip(jax.tree.leaves(direct), jax.tree.leaves(stored), strict=True):
        np.testing.assert_array_equal(a, b)
    assert first["privacy"]["epsilon"] == second["privacy"]["epsilon"]


@pytest.mark.nightly
def test_speaking_roles_of_shakespeare_end_to_end(tmp_path, capsys):
    """Real plays: built by speaker, inspected, and trained for two steps."""
    store = tmp_path / "plays"
    build = ["data", "build", "--source", "shakespeare", "--out", str(store)]
    assert main([*build, "--seq-len", "32", "--max-examples-per-user", "4", "--json"]) == 0
    built = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(["data", "inspect", str(store), "--verify", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["users"] == built["users"] > 500
    _, report = train(tmp_path, {"source": "store", "path": str(store)}, capsys, "roles")
    assert report["status"] == "finished"
    assert report["privacy"]["unit"] == "user"
