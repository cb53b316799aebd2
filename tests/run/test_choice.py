"""What held-out loss decides, the best checkpoint and when to stop, and at what epsilon."""

import io
import json
import os
import signal

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import yaml
from rich.console import Console
from silo_configs import SILOS

import dpfl_jax as dpfl
from dpfl_jax.cli.main import main
from dpfl_jax.errors import BadInputError
from dpfl_jax.run.checkpoint import Checkpoints, exhausted
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.training.export import load_trained

TRUE = np.array([1.0, -2.0, 0.5], np.float32)
STEPS = 20


def people(users, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3 * users, 3)).astype(np.float32)
    owners = [f"{seed}:{i // 3}" for i in range(3 * users)]
    return dpfl.from_arrays({"x": x, "label": x @ TRUE}, owners)


TRAIN, HELD_OUT = people(100, 0), people(30, 1)


def loss(params, example):
    return 0.5 * (example["x"] @ params["w"] - example["label"]) ** 2


def plan():
    return dpfl.uls(group_size=2, cohort_size=30).plan(TRAIN, steps=STEPS, epsilon=8.0, delta=1e-3)


def run(run_dir, **loop):
    """It learns for some steps, and unlearns after that."""
    optimizer = optax.sgd(lambda step: jnp.where(step < 7, 0.4, -0.4))
    loop = {"checkpoint_every": 5, "keep_checkpoints": 1, "eval_every": 3, "keep_best": True} | loop
    return dpfl.fit(
        loss,
        {"w": jnp.zeros(3)},
        plan(),
        optimizer,
        validation=HELD_OUT,
        key=dpfl.RootKey.from_seed(0),
        run_dir=run_dir,
        loop=dpfl.LoopConfig(**loop),
    )


def held_out(params):
    rows = HELD_OUT.read(np.arange(90))
    return float(np.mean([loss(params, {k: v[i] for k, v in rows.items()}) for i in range(90)]))


def kept(run_dir):
    return sorted(ocp.CheckpointManager(run_dir / "checkpoints").all_steps())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    return run_dir, run(run_dir, patience=2)


@pytest.mark.nightly
def test_the_best_is_kept_beside_the_last(whole):
    run_dir, result = whole
    losses = {row["step"]: row["eval"]["loss"] for row in result.metrics if "eval" in row}
    chosen = min((step for step in losses if step), key=losses.get)
    assert 0 < chosen < result.steps
    assert (result.best.step, result.best.loss) == (chosen, losses[chosen])
    assert held_out(result.best.params()) == pytest.approx(losses[chosen], rel=1e-5)
    assert held_out(result.params) > result.best.loss
    assert kept(run_dir) == [chosen, result.steps]
    report = json.loads((run_dir / "report.json").read_text())
    assert report["best_step"] == chosen
    assert report["eval"]["best"]["loss"] == losses[chosen]
    assert f"at the best checkpoint, of step {chosen}" in (run_dir / "report.md").read_text()


@pytest.mark.parametrize("choice", [{"keep_best": True}, {"patience": 2}])
def test_nobody_who_is_trained_on_chooses(choice, tmp_path):
    mixed = dpfl.from_arrays(
        {"x": np.zeros((2, 3), "f4"), "label": np.zeros(2, "f4")}, ["0:5", "z"]
    )
    with pytest.raises(BadInputError, match="1 users of validation are trained on, too"):
        dpfl.fit(
            loss, {"w": jnp.zeros(3)}, plan(), optax.sgd(0.1), validation=mixed,
            run_dir=tmp_path / "run", loop=dpfl.LoopConfig(eval_every=3, **choice),
        )  # fmt: skip


def test_it_says_that_somebody_is_trained_on_and_held_out():
    mixed = dpfl.from_arrays(
        {"x": np.zeros((2, 3), "f4"), "label": np.zeros(2, "f4")}, ["0:5", "z"]
    )
    shown = Console(file=io.StringIO(), width=1000)
    result = dpfl.fit(
        loss, {"w": jnp.zeros(3)}, plan(), optax.sgd(0.1), validation=mixed, console=shown
    )
    told = "people in validation are trained on, too"
    assert any(told in caveat for caveat in result.guarantee.caveats)
    assert f"warning: {told}" in shown.file.getvalue()


@pytest.mark.slow
def test_a_run_that_is_interrupted_says_on_what_its_epsilon_rests(tmp_path):
    def stop(row):
        if row["step"] == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    result = dpfl.fit(
        loss, {"w": jnp.zeros(3)}, plan(), optax.sgd(0.1), validation=HELD_OUT,
        run_dir=tmp_path / "run", hooks=dpfl.Hooks(on_step=stop),
    )  # fmt: skip
    assert result.interrupted is not None
    assert result.guarantee.epsilon == plan().guarantee(result.steps).epsilon
    told = " ".join(result.guarantee.caveats)
    assert f"interrupted after {result.steps} of {STEPS} steps: epsilon is that of" in told
    assert "losses on validation are computed without noise" in told


@pytest.mark.slow
def test_a_run_that_stops_by_a_rule_states_the_epsilon_of_all_steps(whole, tmp_path):
    run_dir, result = whole
    evaluated = [row["step"] for row in result.metrics if "eval" in row]
    assert result.interrupted is None
    assert result.steps == evaluated[-1] == result.best.step + 2 * 3 < STEPS
    assert max(row["step"] for row in result.metrics) == result.steps
    # When to stop followed from the models: only the number of steps set beforehand is fixed.
    assert result.guarantee.epsilon == plan().guarantee(STEPS).epsilon
    assert result.guarantee.epsilon > 1.01 * plan().guarantee(result.steps).epsilon
    told = " ".join(result.guarantee.caveats)
    assert f"stopped after {result.steps} of {STEPS} steps by held-out loss" in told
    assert "chosen by held-out loss, without noise" in told
    # Nowhere does the run, as it was left, state less.
    file = run_dir / "checkpoints" / str(result.steps) / "progress" / "metadata"
    spent = json.loads(file.read_text())["spent"]["epsilon"]
    assert spent == pytest.approx(result.guarantee.epsilon)
    title = (run_dir / "report.md").read_text().splitlines()[0]
    assert title.endswith(f"finished after {result.steps} of {STEPS} steps")
    assert {row["epsilon_spent"] for row in result.metrics if "epsilon_spent" in row} == {spent}
    other = run(tmp_path / "to_the_end", keep_best=False)
    assert other.steps == STEPS
    assert other.best is None
    assert "stopped after" not in " ".join(other.guarantee.caveats)
    assert len(kept(tmp_path / "to_the_end")) == 1


class DiedError(Exception):
    pass


DEATHS = [("append_metrics", n) for n in (5, 12, 16)] + [
    (when, n) for when in ("before", "after") for n in (1, 2, 4)
]


@pytest.mark.nightly
@pytest.mark.slow("after-2")
@pytest.mark.parametrize(("where", "count"), DEATHS)
def test_it_goes_on_to_the_same_choice(where, count, whole, tmp_path, monkeypatch):
    calls = []

    def dies(real, after=False):
        def call(self, *args, **kwargs):
            calls.append(1)
            if len(calls) == count and not after:
                raise DiedError
            real(self, *args, **kwargs)
            if len(calls) == count:
                self.close()
                raise DiedError

        return call

    with monkeypatch.context() as patch:
        if where == "append_metrics":
            patch.setattr(RunDirectory, where, dies(RunDirectory.append_metrics))
        else:
            patch.setattr(Checkpoints, "save", dies(Checkpoints.save, where == "after"))
        with pytest.raises(DiedError):
            run(tmp_path / "run", patience=2)
    result, expected = run(tmp_path / "run", patience=2), whole[1]
    assert (result.steps, result.best.step) == (expected.steps, expected.best.step)
    np.testing.assert_array_equal(result.params["w"], expected.params["w"])
    np.testing.assert_array_equal(result.best.params()["w"], expected.best.params()["w"])
    found, wanted = ([r["eval"] for r in x.metrics if "eval" in r] for x in (result, expected))
    assert found == wanted
    assert kept(tmp_path / "run") == kept(whole[0])
    assert result.guarantee.epsilon == expected.guarantee.epsilon


def test_patience():
    rows = [{"step": i, "eval": {"loss": x}} for i, x in enumerate([9.0, 3.0, float("nan"), 2.0])]
    rows += [{"step": 4}, {"step": 5, "eval": {"loss": 2.0}}, {"step": 6, "eval": {"loss": 2.5}}]
    assert exhausted(rows, 2)
    assert not exhausted(rows, 3)
    assert not exhausted(rows[:4], 1)
    assert not exhausted(rows, None)
    assert not exhausted(rows[:1], 1)  # nothing was trained


@pytest.mark.nightly
@pytest.mark.parametrize("system", SILOS)
def test_every_system_chooses(system, tmp_path, capsys):
    pytest.importorskip("sklearn")
    config = json.loads(json.dumps(SILOS[system])) | {"seed": 1}
    # So much noise, or so large a rate, that some evaluation finds a worse model.
    if system == "isrl":
        config["federation"] |= {"rounds": 12}
        config["mechanism"] |= {"step_size": 1e4}
        config["privacy"] = {"epsilon": 0.2}
    else:
        config["federation"] |= {
            "rounds": 6,
            "local_optimizer": {"name": "sgd", "learning_rate": 30.0},
        }
    config["train"] = {"eval_every": 1, "keep_best": True, "patience": 1}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    assert main(["train", str(file), "--run-dir", str(tmp_path / "run"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(["train", str(file), "--dry-run", "--json"]) == 0
    price = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["status"] == "finished"
    assert report["steps"] < report["planned_steps"]
    assert report["eval"]["best"]["loss"] < report["eval"]["final"]["loss"]
    assert report["privacy"]["epsilon"] == pytest.approx(price["privacy"]["epsilon"])
    assert {report["best_step"], report["steps"]} <= set(kept(tmp_path / "run"))
    assert "by held-out loss" in report["guarantee"]


TEXT = {
    "data": {"source": "jsonl", "path": "posts.jsonl", "seq_len": 16, "validation_fraction": 0.2,
             "test_fraction": 0.0},
    "model": {"overrides": {"num_layers": 1, "embed_dim": 16, "num_heads": 2}},
    "mechanism": {"kind": "uls", "group_size": 2, "cohort_size": 8},
    "privacy": {"epsilon": 8.0, "delta": 1e-3},
    "optimizer": {"learning_rate": 0.02},
}  # fmt: skip


@pytest.fixture
def posts(tmp_path, monkeypatch):
    texts = [{"user": f"u{i // 4}", "text": f"post {i} of lamps"} for i in range(160)]
    (tmp_path / "posts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    monkeypatch.chdir(tmp_path)


@pytest.mark.nightly
@pytest.mark.usefixtures("posts")
def test_the_best_can_be_exported(tmp_path, capsys):
    file, runs = tmp_path / "text.yaml", {}
    for name, best in (("best", True), ("plain", False)):
        train = {"steps": 6, "eval_every": 2, "keep_best": best}
        file.write_text(yaml.safe_dump({**TEXT, "seed": 1, "train": train}))
        runs[name] = str(tmp_path / name)
        assert main(["train", str(file), "--run-dir", runs[name], "--json"]) == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["best_step"] is None
    last, best = (load_trained(runs["best"], which=which) for which in ("last", "best"))
    assert last.step == 6
    assert best.step == best.report["best_step"]
    same = np.array_equal(*(m.params["embedding"] for m in (last, best)))
    assert same == (best.step == 6)
    assert main(["export", runs["plain"], str(tmp_path / "out"), "--which", "best"]) == 2
    assert "train with train.keep_best=true" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.usefixtures("posts")
def test_the_file_of_a_run_that_stops_by_a_rule_is_of_all_steps(tmp_path, capsys):
    train = {"steps": 6, "eval_every": 1, "patience": 1}
    config = {**TEXT, "train": train, "optimizer": {"learning_rate": 1e-12}}
    (tmp_path / "text.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", "text.yaml", "--run-dir", "run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["steps"] < report["privacy"]["steps"] == 6
    assert json.loads((tmp_path / "run" / "guarantee.json").read_text())["basis"]["steps"] == 6
    assert main(["verify", "run"]) == 0


@pytest.mark.usefixtures("posts")
def test_what_cannot_be_chosen_is_one_sentence(tmp_path, capsys):
    def said(**changes):
        config = {**TEXT, "train": {"steps": 2, "eval_every": 1, "patience": 1}}
        for section, change in changes.items():
            config[section] = config[section] | change
        file = tmp_path / "text.yaml"
        file.write_text(yaml.safe_dump(config))
        assert main(["train", str(file), "--run-dir", str(tmp_path / "run")]) == 2
        assert not (tmp_path / "run").exists()
        return " ".join(capsys.readouterr().err.split())

    assert "set train.eval_every" in said(train={"eval_every": 0})
    assert "patience" in said(train={"patience": 0})
    assert "set data.validation_fraction" in said(data={"validation_fraction": 0.0})
    assert "hold out other people" in said(
        data={"split": "within_user", "validation_fraction": 0.4}
    )
    with pytest.raises(dpfl.BadInputError, match="set eval_every"):
        dpfl.LoopConfig(keep_best=True)
    with pytest.raises(dpfl.BadInputError, match="keep_best needs run_dir"):
        run(None)
    loop = dpfl.LoopConfig(eval_every=1, patience=1)
    with pytest.raises(dpfl.BadInputError, match="hold out some data"):
        dpfl.fit(loss, {"w": jnp.zeros(3)}, plan(), optax.sgd(0.1), loop=loop)
