"""``dpfl reproduce correlated/...``: runs in small, at equal epsilon and compute."""

import json

import pytest

from dpfl_jax.accounting import epsilon, events
from dpfl_jax.cli.main import main
from dpfl_jax.noise import strategy


@pytest.mark.slow
def test_the_language_model_in_small(tmp_path, capsys):
    command = ["reproduce", "correlated/language-model", "--quick", "--seeds", "1", "--json"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    uls, banded = found["rows"]
    assert (uls["kind"], banded["kind"]) == ("uls", "bandmf")
    assert uls["size"] * uls["gradients"] == banded["size"] * banded["gradients"]
    for row in (uls, banded):  # 16 steps
        event = events.banded(
            row["noise_multiplier"], row["sampling_prob"], strategy(row["bands"], 16), 16
        )
        assert 7.9 < epsilon(event, 1e-4) <= 8.0
    assert all(claim["holds"] for claim in found["claims"])
    assert (tmp_path / "correlated-language-model.png").stat().st_size > 1000
