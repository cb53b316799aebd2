"""``dpfl bench generation`` runs, and says what it measured (times are not tested)."""

import json

import pytest

from dpfl_jax.cli.main import main


@pytest.mark.slow
def test_the_rate_is_that_of_the_tokens_drawn(capsys):
    sizes = ["--batch", "2", "--texts", "3", "--tokens", "4", "--rounds", "2"]
    assert main(["bench", "generation", *sizes, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["rows"]
    assert len(row["seconds"]) == 2
    assert row["tokens_per_second"] == pytest.approx(12 / (sum(row["seconds"]) / 2))
