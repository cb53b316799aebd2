"""Mails of several owners, from a file to a verified guarantee and a ledger."""

import json

import numpy as np
import pytest
import yaml

from dpfl_jax import accounting
from dpfl_jax.cli.main import main
from dpfl_jax.mechanisms.calibrated import SHARED_ADJACENCY


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["els", "owner_sets"])
def test_mails_from_yaml_with_guarantee_and_ledger(tmp_path, capsys, kind):
    rng = np.random.default_rng(0)
    words = [
        "meeting",
        "report",
        "budget",
        "lunch",
        "please",
        "thanks",
        "tomorrow",
        "draft",
        "review",
        "client",
    ]
    popular = 1 / np.arange(1, 41)
    mails = tmp_path / "mails.jsonl"
    with mails.open("w") as file:
        for _ in range(400):
            size = min(1 + rng.geometric(0.5), 6)
            who = rng.choice(40, size, replace=False, p=popular / popular.sum())
            body = " ".join(rng.choice(words, rng.integers(2, 8)))
            file.write(json.dumps({"authors": [f"p{u}" for u in who], "body": body}) + "\n")
    built = tmp_path / "mails"
    columns = ["--user-column", "authors", "--text-column", "body", "--seq-len", "16"]
    given = ["--input", str(mails), "--out", str(built), "--workers", "1"]
    assert main(["data", "build", *given, *columns]) == 0
    sizes = {"els": {"batch_size": 8, "group_size": 6}, "owner_sets": {
        "cohort_size": 6, "group_size": 2, "sets_per_user": 4}}  # fmt: skip
    config = {
        "data": {"source": "store", "path": str(built), "validation_fraction": 0.2,
                 "test_fraction": 0.0},
        "model": {"size": "tiny", "overrides": {"num_layers": 1, "embed_dim": 16, "num_heads": 2}},
        "mechanism": {"kind": kind, **sizes[kind]},
        "privacy": {"epsilon": 8.0, "delta": 1e-4, "ledger": str(tmp_path / "ledger.jsonl"),
                    "account": "mails", "budget": 9.0},
        "train": {"steps": 6, "checkpoint_every": 3},
    }  # fmt: skip
    file, place = tmp_path / "own.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(config))
    capsys.readouterr()
    assert main(["train", str(file), "--json", "--run-dir", str(place)]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert 7.9 < report["privacy"]["epsilon"] <= 8.0
    assert report["privacy"]["adjacency"] == SHARED_ADJACENCY
    dropped = report["outside_guarantee"]["contribution_bounding"]
    assert 0 < dropped["examples_kept"] < dropped["examples"]
    assert 0 < dropped["tokens_kept"] < dropped["tokens"]
    assert dropped["users_left_out"] >= 0
    said = " ".join(printed.err.split())
    assert f"kept {dropped['examples_kept']:,} of {dropped['examples']:,} records" in said
    account = accounting.ledger.Account("mails", "user", SHARED_ADJACENCY)
    spent = accounting.Ledger(tmp_path / "ledger.jsonl").spent(account, 1e-4)
    assert spent == pytest.approx(report["privacy"]["epsilon"], abs=1e-3)
    assert main(["verify", str(place)]) == 0
    # A second run would take these people beyond their budget.
    assert main(["train", str(file), "--run-dir", str(tmp_path / "more")]) == 2
    assert "beyond the budget of 9" in " ".join(capsys.readouterr().err.split())
