"""The runs of the user-level language-model figures: noise, seeds, and how rates are chosen."""

import dataclasses

import numpy as np
import pytest
from rich.console import Console

from dpfl_jax.planning import Option
from reproductions.registry import Outcome, Settings, less
from reproductions.userlevel import _small_lm as small

OPTIONS = [Option("els", 8, 64, 0.01, 0.8, 3.0), Option("uls", 2, 32, 0.02, 0.6, 2.0)]


@pytest.mark.parametrize("quick", [True, False])
def test_rates_are_chosen_by_seeds_that_are_not_reported(tmp_path, monkeypatch, quick):
    """ELS is better at the lowest rate with the tuning seeds, and at the others if reported."""
    ran = []

    def run_trials(file, overrides, trials, done_file, done):
        ran.extend((overrides[0], t) for t in trials)
        low = [t.rate == min(small.RATES) for t in trials]
        better = [
            t.kind == "els" and (t.seed in small.TUNING_SEEDS) == small_rate
            for t, small_rate in zip(trials, low)
        ]
        return [{"loss": 2.0 if b else 3.0} for b in better]

    monkeypatch.setattr(small, "run_trials", run_trials)
    monkeypatch.setattr(small, "fingerprint", lambda quick: {"training": "f"})
    found = small.sweep(Settings(quick, tmp_path, Console(quiet=True), None, 2), OPTIONS)
    assert np.shape(found.losses) == (2, 2)
    reported = [t for _, t in ran if t.seed not in small.TUNING_SEEDS]
    assert [t.seed for t in reported if t.kind == "els"] == [0, 1]
    assert {t.rate for t in reported if t.kind == "els"} == {min(small.RATES)}
    assert (found.tried.unfair, found.tried.data) == ("", {"training": "f"})
    assert "learning rate (4 values) for each of 2 arms" in found.tried.tuned
    # The noise of the average, over the clip norm, is the plan's.
    assert {(clip, t.ratio) for clip, t in ran} == {
        ("mechanism.clip_norm=3", 0.8 / 64),
        ("mechanism.clip_norm=2", 0.6 / 32),
    }
    # Clipping is to the norm: proxy runs take noise in its units.
    assert small.config(quick).mechanism.clip.kind == "flat"


def test_less_noise_that_loses_leaves_every_comparison_undecided(tmp_path):
    quieter = dataclasses.replace(OPTIONS[0], noise_multiplier=0.2)
    settings = Settings(True, tmp_path, Console(quiet=True), None, 5)
    spread = np.array([0.0, 0.01, 0.02, 0.03, 0.04])
    for worse, said in ((0.5, "less noise loses"), (-0.5, "")):
        losses = [3 + spread, 3 + worse + spread + 0.001 * spread[::-1]]
        found = small.tried(settings, [OPTIONS[0], quieter], losses, {}, {})
        assert found.unfair.startswith(said)
        assert bool(found.unfair) == bool(said)
        claim = less("x", losses[1], losses[0], source="paper")
        assert Outcome([claim], [], tried=found).claims[0].holds is (None if said else True)
