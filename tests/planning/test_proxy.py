"""Proxy runs: the noise that was asked for, kept as they finish, and never on private data."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpfl_jax.cli.main import main
from dpfl_jax.config import load_config
from dpfl_jax.mechanisms import Population
from dpfl_jax.planning.proxy import Proxy, Trial, run_trials

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "quickstart.yaml"
TINY = (
    "data.source=digits", "data.tokenizer=bytes", "data.max_users=400", "model={kind: mlp}",
    "eval.prompt=null", "execution.microbatch_size=16",
)  # fmt: skip


@pytest.mark.nightly
def test_runs_are_kept_and_not_run_again(tmp_path):
    file = tmp_path / "runs.jsonl"
    trials = [Trial("uls", 1, 16, 3, ratio, seed=1) for ratio in (0.0, 0.05)]
    counts = []
    rows = run_trials(CONFIG, TINY, trials[:1], file, done=lambda n, row: counts.append(n))
    with file.open("a") as out:
        out.write('{"config": "cut o')  # a run that was interrupted while it wrote
        out.write("\n")
    again = run_trials(CONFIG, TINY, trials, file, done=lambda n, row: counts.append(n))
    assert counts == [1, 2]
    assert again[0] == rows[0]
    assert again[0]["loss"] < again[0]["initial"]
    assert again[1]["loss"] != again[0]["loss"]
    assert len(file.read_text().splitlines()) == 3


@pytest.mark.nightly("1.0")
@pytest.mark.parametrize(("clipping", "most"), [("normalized", 1.0), ("flat", 0.5)])
def test_noise_is_that_of_a_run_with_this_ratio(clipping, most):
    """Nothing but noise, at learning rate 1: its deviation over 2,400 coordinates, within 6 %."""
    changes = (f"mechanism.clipping={clipping}", "optimizer={name: sgd, learning_rate: 1.0}")
    proxy = Proxy(load_config(CONFIG, [*TINY, *changes]), 16)
    assert proxy.config.mechanism.clip_norm == 0.5
    init, update = proxy._update(3)
    state = (proxy.trained, init(proxy.trained))
    nothing = jax.tree.map(jnp.zeros_like, proxy.trained)
    after, _ = update(state, nothing, 16.0, 0.05, 1.0, jnp.arange(8, dtype=jnp.uint32))
    moved = jax.tree.leaves(jax.tree.map(jnp.subtract, after, proxy.trained))
    found = np.concatenate([np.ravel(leaf) for leaf in moved])
    # A run's: sigma times the sensitivity of its rule, over the divisor.
    made = proxy.config.mechanism.calibrate(
        Population(1000, 1000, 1000), 3, noise_multiplier=0.05 * 16
    )
    assert made.noise_stddev / 16 == pytest.approx(0.05 * most)
    assert len(found) > 2400
    assert found.std() == pytest.approx(0.05 * most, rel=0.06)  # its deviation is 1.5 %


def test_only_public_data_are_fitted_to(capsys, tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text(
        "".join(json.dumps({"user": str(u), "text": "to be or not"}) + "\n" for u in range(40))
    )
    words = [
        "plan", str(CONFIG), "--fit", str(tmp_path / "fit.json"), "data.source=jsonl",
        f"data.path={own}", "--users", "4", "--max-group-size", "1",
    ]  # fmt: skip
    assert main(words) == 2
    assert "say so with --public" in capsys.readouterr().err


@pytest.mark.nightly
def test_fit_plan_and_ask(capsys, tmp_path):
    fit, png, out = (tmp_path / name for name in ("fit.json", "ask.png", "planned.yaml"))
    common = ["plan", str(CONFIG), *TINY, "train.steps=16", "--compute-budget", "32", "--json"]

    def call(*words):
        assert main([*common, *map(str, words)]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    made = call("--fit", fit, "--runs", 12, "--max-group-size", 1, "--users", 8)
    assert made["runs"] == 12
    assert pathlib.Path(made["picture"]).stat().st_size > 1000
    planned = call("--with", fit, "--target-loss", 2.2, "--out", out)
    told = planned["prediction"]
    assert told["best_split"]["low"] < told["best_split"]["loss"] < told["best_split"]["high"]
    assert told["least_epsilon"]["value"] is None or told["least_epsilon"]["value"] > 0
    assert main(["train", str(out), "--dry-run", "--json"]) == 0
    capsys.readouterr()
    found = call("--with", fit, "--ask", "epsilon", "--png", png)
    assert found["answer"].startswith("epsilon 8: loss")
    assert png.stat().st_size > 1000
