"""The runs of the user-level language-model figures: noise, seeds, and how rates are chosen."""

import numpy as np
import pytest
from rich.console import Console

from dpfl_jax.planning import Option
from reproductions.registry import Settings
from reproductions.userlevel import _small_lm as small

OPTIONS = [Option("els", 8, 64, 0.01, 0.8, 3.0), Option("uls", 2, 32, 0.02, 0.6, 2.0)]


@pytest.mark.parametrize("quick", [True, False])
def test_rates_are_chosen_by_a_seed_that_is_not_reported(tmp_path, monkeypatch, quick):
    """ELS is better at the lower rate with the tuning seed, and at the other with the reported."""
    ran = []

    def run_trials(file, overrides, trials, done_file, done):
        ran.extend((overrides[0], t) for t in trials)
        low = [t.rate < 1 for t in trials]
        better = [
            t.kind == "els" and (t.seed == 100) == small_rate for t, small_rate in zip(trials, low)
        ]
        return [{"loss": 2.0 if b else 3.0} for b in better]

    monkeypatch.setattr(small, "run_trials", run_trials)
    found = small.losses(Settings(quick, tmp_path, Console(quiet=True), None, 2), OPTIONS)
    assert np.shape(found) == (2, 2)
    reported = [t for _, t in ran if t.seed != 100]
    assert [t.seed for t in reported if t.kind == "els"] == [0, 1]
    assert {t.rate for t in reported if t.kind == "els"} == {1.0 if quick else 1 / 3}
    assert any(t.seed == 100 for _, t in ran) is not quick
    # The noise of the average, over the clip norm, is the plan's.
    assert {(clip, t.ratio) for clip, t in ran} == {
        ("mechanism.clip_norm=3", 0.8 / 64),
        ("mechanism.clip_norm=2", 0.6 / 32),
    }
    # Clipping is to the norm: proxy runs take noise in its units.
    assert small.config(quick).mechanism.clip.kind == "flat"
