"""``dpfl bench federation`` runs and says what it measured (times are not tested)."""

import argparse
import json

import numpy as np
import pytest

from benchmarks import _isrl
from dpfl_jax.cli.main import main


@pytest.mark.nightly
def test_the_rows_are_those_of_the_manual(capsys):
    code = main(
        ["bench", "federation", "--silos", "3", "--local-steps", "2", "--records", "8",
         "--batch-size", "4", "--channels", "2", "--hidden", "4", "--rounds", "1",
         "--loop-silos", "2", "--mechanism", "user_ldp", "rpdp", "--json"]
    )  # fmt: skip
    assert code == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    rows = {row["what"]: row for row in result["rows"]}
    assert set(rows) == {
        "user_ldp", "user_ldp, no noise", "rpdp", "rpdp, no noise", "no privacy", "python loop",
        "host",
    }  # fmt: skip
    assert all(row["seconds"] > 0 and row["cpu_seconds"] > 0 for row in rows.values())
    assert rows["no privacy"]["ratio"] == 1.0
    assert 3 * 2 <= rows["user_ldp"]["records"] <= 3 * 2 * 8
    assert result["settings"]["silos"] == 3


@pytest.mark.nightly
def test_convex_rows_are_those_of_the_manual(capsys):
    code = main(
        ["bench", "federation", "--convex", "--silos", "4", "--records", "12", "--batch-size", "4",
         "--rounds", "3", "--dim", "5", "--trials", "2", "--json"]
    )  # fmt: skip
    assert code == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    names = [row["what"] for row in result["rows"]]
    assert names == [
        "vmapped silos", "vmapped silos and 2 trials", "no privacy", "numpy loop over silos",
    ]  # fmt: skip
    assert all(row["seconds"] > 0 for row in result["rows"])


@pytest.mark.nightly
def test_the_numpy_loop_is_the_same_algorithm(monkeypatch):
    args = argparse.Namespace(
        silos=3, records=10, batch_size=10.0, rounds=4, dim=5, trials=1
    )  # every record in every batch
    monkeypatch.setattr(_isrl, "NOISE", 0.0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 10, 5)).astype(np.float32) * 2
    y = (rng.random((3, 10)) < 0.5).astype(np.float32)
    ours = _isrl._vmapped(args, x, y, 1)(1)[0]
    np.testing.assert_allclose(ours, _isrl.numpy_loop(args, x, y, 1), rtol=1e-4, atol=1e-6)
