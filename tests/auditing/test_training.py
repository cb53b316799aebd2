"""Canary users in a real run, and users ranked by their other texts."""

import json

import numpy as np
import pytest
from rich.console import Console

from dpfl_jax import accounting
from dpfl_jax.auditing.training import canary_run
from dpfl_jax.cli.main import main
from dpfl_jax.config import load_config
from dpfl_jax.randomness import RootKey

SHORT = ["train.steps=3", "eval.baseline=false", "eval.max_users=4", "mechanism.cohort_size=400"]


@pytest.mark.slow
@pytest.mark.privacy
def test_canaries_show_the_noise_that_was_claimed_and_nothing_else():
    config = load_config("configs/quickstart.yaml", SHORT)
    trials, cost = canary_run(config, 400, RootKey.from_seed(2), Console(quiet=True))
    outside, inside = trials.seen[~trials.inside], trials.seen[trials.inside]
    assert abs(outside.mean()) < 5 / np.sqrt(outside.size)
    assert outside.var() == pytest.approx(1.0, abs=5 * np.sqrt(2 / outside.size))
    # Each is drawn at the rate of the event, and moves the sum by all that clipping allows.
    step = trials.event.event
    rate, shift = step.sampling_probability, 1 / step.event.noise_multiplier
    spread = np.sqrt((1 + rate * (1 - rate) * shift**2) / inside.size)
    assert abs(inside.mean() - rate * shift) < 5 * spread
    assert accounting.epsilon(trials.event, trials.delta) <= 8.0
    assert cost["inside"] == trials.inside.sum()
    assert 0 < cost["held_out_loss"] < 6


@pytest.mark.slow
def test_users_are_ranked_with_privacy_and_without(capsys):
    given = ["audit", "--user-inference", "configs/quickstart.yaml", *SHORT]
    assert main([*given, "mechanism.cohort_size=100", "--seed", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["users_in"] + found["users_out"] > 900
    for area in found["auc"].values():  # three steps tell nothing
        assert abs(area - 0.5) < 5 * found["chance_deviation"]
