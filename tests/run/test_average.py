"""Averages of the iterates: what they are, that a run resumes with them, and that they are free."""

import dataclasses
import json
import os
import signal

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from silo_configs import SILOS

import dpfl_jax as dpfl
from dpfl_jax.cli.main import main
from dpfl_jax.errors import BadInputError
from dpfl_jax.run.checkpoint import Checkpoints, released

STEPS = 6
RNG = np.random.default_rng(0)
X = RNG.normal(size=(180, 3)).astype(np.float32)
ROWS = {"x": X, "label": X @ np.array([1.0, -2.0, 0.5], np.float32)}
TRAIN = dpfl.from_arrays({k: v[:120] for k, v in ROWS.items()}, np.arange(120) // 3)
HELD_OUT = dpfl.from_arrays({k: v[120:] for k, v in ROWS.items()}, 100 + np.arange(60))
SIZES = {"group_size": 2, "cohort_size": 20}


def loss(params, example):
    return 0.5 * (example["x"] @ params["w"] - example["label"]) ** 2


def run(run_dir=None, make=dpfl.uls, stop=None, train=TRAIN, **loop):
    plan = make(**SIZES).plan(train, steps=STEPS, epsilon=8.0, delta=1e-3)

    def on_step(row):
        if row["step"] == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    return dpfl.fit(
        loss,
        {"w": jnp.zeros(3), "b": jnp.zeros(1)},
        plan,
        optax.adam(0.3),
        trainable=lambda name: name == "w",
        validation=HELD_OUT,
        run_dir=run_dir,
        key=dpfl.RootKey.from_seed(0),
        loop=dpfl.LoopConfig(checkpoint_every=1, keep_checkpoints=STEPS, **loop),
        hooks=dpfl.Hooks(on_step=on_step),
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run without an average, and its iterates."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    result = run(folder)
    iterates = []
    for step in range(1, STEPS + 1):
        iterates.append(released(folder / "checkpoints", step)["w"].astype(np.float64))
    return result, iterates


def test_the_tail_is_the_mean_of_the_second_half(plain):
    _, iterates = plain
    found = run(average="tail").params["w"]
    np.testing.assert_allclose(found, np.mean(iterates[STEPS // 2 :], axis=0), rtol=1e-5)


def test_the_first_model_has_no_weight_in_an_ema(plain):
    _, iterates = plain
    for decay in (0.0, 0.25, 0.9999):
        want = np.full(3, 1e9)
        for t, w in enumerate(iterates, start=1):
            kept = min(decay, (t - 1) / (t + 9))
            want = kept * want + (1 - kept) * w
        found = run(average="ema", ema_decay=decay).params["w"]
        np.testing.assert_allclose(found, want, rtol=1e-4)


def test_with_other_data_it_is_the_same_function_of_the_iterates(tmp_path):
    """Nothing of a person is in the average but what is in iterates that have noise."""
    moved = {name: values[:120].copy() for name, values in ROWS.items()}
    moved["x"][:3], moved["label"][:3] = 50.0, -50.0
    changed = dpfl.from_arrays(moved, np.arange(120) // 3)
    run(tmp_path / "run", train=changed)
    half = range(STEPS // 2 + 1, STEPS + 1)
    iterates = [released(tmp_path / "run" / "checkpoints", step)["w"] for step in half]
    found = run(train=changed, average="tail").params["w"]
    np.testing.assert_allclose(found, np.mean(iterates, axis=0), rtol=1e-5)


def test_nothing_else_changes(plain):
    """The steps, their noise and the guarantee are those of the run without an average."""
    before, _ = plain
    averaged = run(average="tail")
    assert averaged.guarantee == before.guarantee
    assert averaged.last_iterate == before.last
    assert averaged.last["loss"] != before.last["loss"]
    assert before.last_iterate is None
    assert [row.get("outside_guarantee") for row in averaged.metrics] == [
        row.get("outside_guarantee") and {**row["outside_guarantee"], **timing}
        for row, timing in zip(before.metrics, map(_timing, averaged.metrics), strict=True)
    ]


def _timing(row):
    found = row.get("outside_guarantee", {})
    names = ("seconds_per_step", "tokens_per_s", "input_wait", "goodput")
    return {name: found[name] for name in names if name in found}


@pytest.mark.parametrize("make", [dpfl.uls, dpfl.experimental.individual])
def test_a_run_resumes_with_its_average(make, tmp_path):
    choice = {"average": "ema", "ema_decay": 0.5, "make": make}
    whole = run(tmp_path / "whole", **choice)
    assert run(tmp_path / "cut", stop=4, **choice).interrupted
    resumed = run(tmp_path / "cut", **choice)
    assert resumed.params["w"].tobytes() == whole.params["w"].tobytes()
    assert resumed.last_iterate == whole.last_iterate


def test_another_average_is_another_run(tmp_path):
    assert run(tmp_path / "run", stop=2, average="ema").interrupted
    for other in ({"average": "tail"}, {}, {"average": "ema", "ema_decay": 0.5}):
        with pytest.raises(BadInputError, match=r"(average|ema_decay) differs"):
            run(tmp_path / "run", **other)


def test_the_average_is_chosen_and_exported(tmp_path):
    result = run(tmp_path / "run", average="tail", keep_best=True, eval_every=2)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["eval"]["final"] == dataclasses.asdict(result.final)
    assert report["eval"]["last_iterate"] == result.last_iterate
    assert "the last iterate, not averaged" in (tmp_path / "run" / "report.md").read_text()
    dpfl.export(tmp_path / "run", tmp_path / "model")
    exported = dpfl.load_exported(tmp_path / "model").params
    assert exported["w"].tobytes() == result.params["w"].tobytes()
    losses = {r["step"]: r["eval"]["loss"] for r in result.metrics if "eval" in r and r["step"]}
    assert result.best.step == min(losses, key=losses.get)
    kept = Checkpoints(tmp_path / "run" / "checkpoints", 1)
    kept.close()
    best = released(tmp_path / "run" / "checkpoints", result.best.step)["w"]
    assert result.best.params()["w"].tobytes() == best.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("system", ["federated", "personal"])
def test_silos_average_their_rounds(system, tmp_path, capsys):
    pytest.importorskip("sklearn")
    stated = {}
    for average in ("none", "ema"):
        config = json.loads(json.dumps(SILOS[system])) | {"seed": 1}
        config["train"] |= {"average": average}
        file, folder = tmp_path / f"{average}.yaml", tmp_path / average
        file.write_text(yaml.safe_dump(config))
        assert main(["train", str(file), "--run-dir", str(folder), "--json"]) == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert ("last_iterate" in report["eval"]) == (average == "ema")
        found = json.loads((folder / "guarantee.json").read_text())
        stated[average] = {name: found[name] for name in ("privacy", "basis")}
    assert stated["none"] == stated["ema"]
    assert report["eval"]["last_iterate"]["loss"] != report["eval"]["final"]["loss"]
    assert main(["verify", str(folder)]) == 0


def test_silos_that_trust_no_server_average_by_theorem(tmp_path, capsys):
    config = SILOS["isrl"] | {"train": {"average": "ema"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", str(tmp_path / "run.yaml"), "--dry-run"]) == 2
    assert "train.average is for data in one place" in " ".join(capsys.readouterr().err.split())


def test_bad_averages_are_one_sentence():
    with pytest.raises(BadInputError, match="average is 'mean', but it must be one of none, ema"):
        dpfl.LoopConfig(average="mean")
    with pytest.raises(BadInputError, match="ema_decay is 1, but it must be"):
        dpfl.LoopConfig(average="ema", ema_decay=1)
