"""What a killed process released is accounted, wherever the run resumes and stops after that."""

import json
import os
import signal
import types
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from runs import DiedError
from silo_configs import SILOS

import dpfl_jax as dpfl
from dpfl_jax.cli.main import main
from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.run import driver, terms
from dpfl_jax.run.directory import RELEASED_STEPS, RunDirectory
from dpfl_jax.run.terms import Terms, begin
from dpfl_jax.training.central import CentralSteps

STEPS, TRUE = 12, np.array([1.0, -2.0, 0.5], np.float32)


@pytest.fixture
def every_step(monkeypatch):
    """Each step is noted by itself, as slow ones are."""
    monkeypatch.setattr(driver, "NOTED_EVERY_S", 0.0)


def plan():
    x = np.random.default_rng(0).normal(size=(120, 3)).astype(np.float32)
    data = dpfl.from_arrays({"x": x, "label": x @ TRUE}, [str(i // 3) for i in range(120)])
    mechanism = dpfl.uls(group_size=2, cohort_size=15)
    return mechanism.plan(data, steps=STEPS, epsilon=8.0, delta=1e-3)


def run(run_dir, at, action, first=0.0, **loop):
    def on_step(row):
        if row["step"] == at:
            action()

    return dpfl.fit(
        lambda params, example: (example["x"] @ params["w"] - example["label"]) ** 2,
        {"w": jnp.full(3, first)},
        plan(),
        optax.sgd(0.1),
        run_dir=run_dir,
        hooks=dpfl.Hooks(on_step=on_step),
        loop=dpfl.LoopConfig(**{"checkpoint_every": 3} | loop),
    )


def dies():
    raise DiedError


def stops():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("every_step")
def test_a_kill_forgets_no_step(tmp_path, monkeypatch):
    noted, step = [], CentralSteps.step

    def looks(*given):
        noted.append(json.loads((tmp_path / "run" / RELEASED_STEPS).read_text())["steps"])
        return step(*given)

    with monkeypatch.context() as patch:
        patch.setattr(CentralSteps, "step", looks)
        with pytest.raises(DiedError):
            run(tmp_path / "run", 6, dies)
    assert noted == [1, 2, 3, 4, 5, 6]  # before each is taken
    result = run(tmp_path / "run", 4, stops)
    assert (result.steps, result.released, result.accounted) == (5, 6, 6)
    assert result.guarantee.epsilon == plan().guarantee(6).epsilon
    told = json.loads((tmp_path / "run" / "guarantee.json").read_text())
    assert told["privacy"]["epsilon"] == result.guarantee.epsilon
    assert "5 of 12 steps, and what it released of up to 6" in " ".join(result.guarantee.caveats)
    assert result.metrics[-1]["epsilon_spent"] >= result.guarantee.epsilon
    assert run(tmp_path / "run", 7, stops).accounted == 8  # the next stop is later than the kill


def test_a_killed_run_does_not_begin_again_with_other_parameters(tmp_path):
    with pytest.raises(DiedError):
        run(tmp_path / "run", 2, dies, checkpoint_every=50)
    with pytest.raises(BadInputError, match="the first parameters are not those that it began"):
        run(tmp_path / "run", 4, stops, first=1e-6, checkpoint_every=50)


@pytest.mark.parametrize("public", [False, True])
def test_steps_that_were_released_are_not_drawn_anew(public, tmp_path, monkeypatch):
    """The guarantee would count them once."""
    root = RootKey(b"0" * 32, public=public)
    with closing(RunDirectory(tmp_path / "run", {}, root)) as directory:

        def begins(done, loss="cpu", first="zeros"):
            stated = Terms({"steps": STEPS}, {"computation": loss})
            hardware = "8 x tpu" if loss == "tpu" else "1 x cpu"
            key, _ = begin(stated, root, directory, hardware, done, lambda: first)
            directory.computed_with(hardware)
            return key.fingerprint

        directory.released = 0
        began = begins(None)
        for asked, said in ((6, "up to 6"), (None, "an unknown number of")):
            directory.released = asked
            with pytest.raises(BadInputError, match=f"after 0 .* {said} steps.*first parameters"):
                begins(None, first="ones")
            for done in () if public else (None, 5):
                steps = f"after {done or 0} .* {said} steps.*go on with 1 x cpu"
                with pytest.raises(BadInputError, match=steps):
                    begins(done, "tpu")
        # Nor by another NumPy's coins, another dpfl_jax's sum or noise, or a dropout of other bits.
        for module in (np, terms):
            with monkeypatch.context() as patch:
                patch.setattr(module, "__version__", "9.9")
                with pytest.raises(BadInputError, match=r"random numbers are .*: go on with dpfl"):
                    begins(5)
        refused = pytest.raises(BadInputError, match=r"random numbers are .*: go on with dpfl_jax")
        with jax.threefry_partitionable(False), refused:
            begins(5)
        assert begins(None) == begins(5) == began
        directory.released = 6
        for module in (np, terms):
            with monkeypatch.context() as patch:
                patch.setattr(module, "__version__", "9.9")
                assert (begins(6) == began) == public
        assert (begins(6, "tpu") == began) == public


def test_a_run_that_took_no_step_may_begin_with_other_parameters(tmp_path):
    def refuses(name):
        raise DiedError

    for w in (0.0, 1.0):
        directory = RunDirectory(tmp_path / "run", {})
        algorithm = types.SimpleNamespace(
            steps=STEPS,
            private=True,
            init=lambda w=w: types.SimpleNamespace(params={"w": np.full(3, w)}),
            terms=lambda: Terms({"steps": STEPS}, {}),
            hardware="1 x cpu",
            can_reshard_on_resume=True,
            layout_fingerprint=None,
        )
        with closing(directory), pytest.raises(DiedError):
            driver.drive(algorithm, run_dir=directory, charge=refuses)


def test_quick_steps_are_noted_some_at_a_time(tmp_path, monkeypatch):
    noted, record = [], RunDirectory.record_released
    monkeypatch.setattr(
        RunDirectory, "record_released", lambda *given: (noted.append(given[1]), record(*given))
    )
    with monkeypatch.context() as patch:
        patch.setattr(driver, "NOTED_EVERY_S", 60.0)
        with pytest.raises(DiedError):
            run(tmp_path / "run", 4, dies)
    assert noted == [0, 1, 3, 7]
    # The kill pays for what was noted, a stop in order for what was taken.
    assert run(tmp_path / "run", 4, stops).accounted == 7
    assert noted[-1] == 7


def test_the_number_cannot_be_edited_and_who_removes_it_pays_for_all(tmp_path):
    assert run(tmp_path / "run", 3, stops).accounted == 4
    file = tmp_path / "run" / RELEASED_STEPS
    assert file.stat().st_mode & 0o777 == 0o600
    kept = json.loads(file.read_text())
    assert kept["steps"] == 4
    file.write_text(json.dumps(kept | {"steps": 1}))
    with pytest.raises(BadInputError, match=r"released_steps.json was changed after"):
        run(tmp_path / "run", 5, stops)
    file.unlink()
    assert run(tmp_path / "run", 5, stops).accounted == STEPS


@pytest.mark.slow
@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("name", SILOS)
def test_runs_of_silos_forget_none(name, tmp_path, monkeypatch):
    config = {"name": name, **SILOS[name], "train": {"checkpoint_every": 3}}
    config["federation"] = config["federation"] | {"rounds": 8}
    file, run_dir = tmp_path / "config.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(config))
    append, train = RunDirectory.append_metrics, ["train", str(file), "--run-dir", str(run_dir)]
    ends = {6: dies}

    def appends(self, row):
        append(self, row)
        if "epsilon_spent" in row and row["step"] in ends:
            ends.pop(row["step"])()

    monkeypatch.setattr(RunDirectory, "append_metrics", appends)
    with pytest.raises(DiedError):
        main(train)
    resumed = 2 if name == "isrl" else 4  # the first row after the last checkpoint
    ends[resumed] = stops
    assert main(train) == 1
    report = json.loads((run_dir / "report.json").read_text())
    assert report["steps"] == (4 if name == "isrl" else 5)
    assert report["privacy"]["steps"] == 6 * config["federation"].get("local_steps", 1)
    assert "released of up to 6" in report["guarantee"]
