"""`dpfl bench data` runs, and its synthetic store is what it says."""

import json

import numpy as np
import pytest

from benchmarks.data import heavy_tailed_counts
from dpfl_jax.cli.main import main
from dpfl_jax.data.shards import open_store
from dpfl_jax.errors import BadInputError


def test_counts_are_heavy_tailed_and_exact():
    counts = heavy_tailed_counts(3000, 100_000)
    assert counts.sum() == 100_000
    assert counts.min() >= 1
    assert counts.max() > 50 * np.median(counts)
    with pytest.raises(BadInputError, match="too few"):
        heavy_tailed_counts(10, 9)


@pytest.mark.nightly
def test_bench_data_small(tmp_path, capsys):
    command = ["bench", "data", "--users", "300", "--examples", "5000", "--seq-len", "16"]
    command += ["--steps", "8", "--work-dir", str(tmp_path), "--batch", "64", "--cohort", "16"]
    assert main([*command, "--group-size", "4", "--row", "16", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert len(result["rows"]) == 10
    assert {r["format"] for r in result["rows"]} == {"arrow", "arrayrecord"}
    assert all(r["users"] == 300 and r["examples"] == 5000 for r in result["rows"])
    stores = [open_store(p) for p in sorted(tmp_path.iterdir())]
    for store in stores:
        store.verify()
    assert len({s.fingerprint for s in stores}) == 1
