"""Users ranked by their other texts."""

import json

import pytest

from dpfl_jax.cli.main import main

SHORT = ["train.steps=3", "eval.baseline=false", "eval.max_users=4", "mechanism.cohort_size=400"]


@pytest.mark.slow
def test_users_are_ranked_with_privacy_and_without(capsys):
    given = ["audit", "--user-inference", "configs/quickstart.yaml", *SHORT]
    assert main([*given, "mechanism.cohort_size=100", "--seed", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["users_in"] + found["users_out"] > 900
    for area in found["auc"].values():  # three steps tell nothing
        assert abs(area - 0.5) < 5 * found["chance_deviation"]
