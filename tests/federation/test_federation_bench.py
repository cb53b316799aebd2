"""``dpfl bench federation`` runs and says what it measured (times are not tested)."""

import json

import pytest

from dpfl_jax.cli.main import main


@pytest.mark.slow
def test_the_rows_are_those_of_the_manual(capsys):
    code = main(
        ["bench", "federation", "--silos", "3", "--local-steps", "2", "--records", "8",
         "--batch-size", "4", "--channels", "2", "--hidden", "4", "--rounds", "1",
         "--loop-silos", "2", "--json"]
    )  # fmt: skip
    assert code == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    rows = {row["what"]: row for row in result["rows"]}
    assert set(rows) == {"private", "no privacy", "python loop", "host"}
    assert all(row["seconds"] > 0 and row["cpu_seconds"] > 0 for row in rows.values())
    assert rows["no privacy"]["ratio"] == 1.0
    assert 3 * 2 <= rows["private"]["records"] <= 3 * 2 * 8
    assert result["settings"]["silos"] == 3
