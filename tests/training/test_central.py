"""``fit`` on a small regression: what a notebook user calls."""

import json
import pathlib
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import fit_given as fit
from rich.console import Console

from dpfl_jax.config.load import validate_config
from dpfl_jax.data import ArrayStore
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import els, non_private, uls
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.training.central_run import prepare

TRUE = np.array([1.0, -2.0, 0.5], np.float32)


def make_store(users=200, seed=0):
    rng = np.random.default_rng(seed)
    data = {}
    for user in range(users):
        x = rng.normal(size=(int(rng.integers(1, 6)), 3)).astype(np.float32)
        data[f"u{user:04d}"] = {"x": x, "y": x @ TRUE}
    return ArrayStore.from_users(data.items())


def loss_fn(params, example):
    return 0.5 * (example["x"] @ params["w"] - example["y"]) ** 2


def run(mechanism=None, **kwargs):
    arguments = {
        "loss_fn": loss_fn,
        "params": {"w": jnp.zeros(3)},
        "data": make_store(),
        "validation": make_store(40, seed=1),
        "mechanism": mechanism or uls(group_size=2, cohort_size=50, clip_norm=1.0),
        "optimizer": optax.sgd(0.3),
        "steps": 30,
        "epsilon": 8.0,
        "delta": 1e-3,
        "key": RootKey.from_seed(0),
        "microbatch_size": 8,
    }
    return fit(**(arguments | kwargs))


@pytest.mark.nightly("els", "uls")
@pytest.mark.parametrize(
    "mechanism",
    [
        uls(group_size=2, cohort_size=50, clip_norm=1.0),
        els(group_size=3, batch_size=50, clip_norm=1.0),
        non_private(batch_size=50),
    ],
    ids=lambda m: m.kind,
)
def test_training_lowers_the_held_out_loss(mechanism):
    result = run(mechanism)
    assert result.final.loss < 0.3 * result.initial.loss
    assert result.steps == 30
    assert result.interrupted is None
    if mechanism.private:
        assert result.guarantee.epsilon <= 8.0
        assert result.guarantee.unit == "user"
        assert any("seed" in caveat for caveat in result.guarantee.caveats)
    else:
        assert result.guarantee.epsilon == float("inf")


@pytest.mark.nightly
def test_the_seed_decides_everything():
    a, b, c = run(), run(), run(key=RootKey.from_seed(1))
    np.testing.assert_array_equal(a.params["w"], b.params["w"])
    assert (np.asarray(a.params["w"]) != np.asarray(c.params["w"])).any()


@pytest.mark.nightly
def test_the_caller_keeps_their_parameters():
    params = {"w": jnp.zeros(3)}
    run(params=params, steps=2)
    np.testing.assert_array_equal(params["w"], np.zeros(3))


@pytest.mark.slow
def test_epsilon_spent_grows_to_the_guarantee():
    result = run()
    spent = [row["epsilon_spent"] for row in result.metrics if "epsilon_spent" in row]
    assert spent == sorted(spent)
    assert 0 < spent[0] < spent[-1]
    assert spent[-1] == pytest.approx(result.guarantee.epsilon)


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    def there(folder):
        full = (folder.path / "checkpoints" / "3").exists()
        return pathlib.Path("/dev/full") if full else folder.path / "metrics.jsonl"

    options = {"steps": 7, "validation": None, "checkpoint_every": 3, "key": None}
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "metrics_path", property(there))
        with pytest.raises(BadInputError, match="full cannot be written, as the disk is full: fre"):
            run(**options, run_dir=tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "3").exists()
    assert run(**options, run_dir=tmp_path / "run").steps == 7


@pytest.mark.nightly
def test_resume_in_process_is_bit_for_bit(tmp_path, monkeypatch):
    whole = run(steps=20, validation=None)

    directory = RunDirectory(tmp_path / "run", {}, RootKey.from_seed(0))
    calls = {"n": 0}
    real = RunDirectory.append_metrics

    def crash(self, row):
        calls["n"] += 1
        if calls["n"] == 13:
            raise KeyboardInterrupt
        real(self, row)

    monkeypatch.setattr(RunDirectory, "append_metrics", crash)
    with pytest.raises(KeyboardInterrupt):
        run(steps=20, validation=None, run_dir=directory, key=None, checkpoint_every=5)
    directory.close()
    monkeypatch.setattr(RunDirectory, "append_metrics", real)
    directory = RunDirectory(tmp_path / "run", {}, RootKey.from_seed(0))
    assert directory.resumed
    result = run(steps=20, validation=None, run_dir=directory, key=None, checkpoint_every=5)
    np.testing.assert_array_equal(result.params["w"], whole.params["w"])
    assert [row["step"] for row in result.metrics] == list(range(1, 21))


@pytest.mark.nightly
def test_hardware_that_reached_no_checkpoint_is_named_too(tmp_path, monkeypatch):
    one = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    real, steps = RunDirectory.append_metrics, []

    def crash(self, row):
        steps.append(row["step"])
        if len(steps) == 3:
            raise KeyboardInterrupt
        real(self, row)

    monkeypatch.setattr(RunDirectory, "append_metrics", crash)
    directory = RunDirectory(tmp_path / "run", {}, RootKey.from_seed(0))
    with pytest.raises(KeyboardInterrupt):
        run(steps=6, validation=None, run_dir=directory, mesh=one, checkpoint_every=5)
    directory.close()
    monkeypatch.setattr(RunDirectory, "append_metrics", real)
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))
    directory = RunDirectory(tmp_path / "run", {}, RootKey.from_seed(0))
    moved = run(steps=6, validation=None, run_dir=directory, checkpoint_every=5)
    directory.close()
    assert moved.steps == 6
    assert any("or from its start, on other hardware" in c for c in moved.guarantee.caveats)


@pytest.mark.nightly
def test_moving_a_run_to_other_hardware_is_named(tmp_path):
    one = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    whole = run(steps=6, validation=None)
    directory = RunDirectory(tmp_path / "run", {}, RootKey.from_seed(0))
    first = run(steps=6, validation=None, run_dir=directory, mesh=one, checkpoint_every=3)
    assert not any("other hardware" in c for c in first.guarantee.caveats)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    moved = run(steps=6, validation=None, run_dir=directory, checkpoint_every=3)
    directory.close()
    assert any("other hardware" in c for c in moved.guarantee.caveats)
    np.testing.assert_allclose(moved.params["w"], whole.params["w"], rtol=1e-5)


def test_a_poisoned_user_never_reaches_the_parameters():
    rng = np.random.default_rng(0)
    data = {f"u{i:03d}": {"x": rng.normal(size=(2, 3)).astype(np.float32),
                          "y": np.zeros(2, np.float32)} for i in range(100)}  # fmt: skip
    data["u050"]["x"][:] = np.nan
    data["u051"]["y"][:] = np.inf
    result = run(data=ArrayStore.from_users(data.items()), validation=None, steps=10)
    assert np.isfinite(result.params["w"]).all()
    poisoned = sum(r["outside_guarantee"]["nonfinite_units"] for r in result.metrics)
    assert poisoned > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "number of steps"),
        ({"epsilon": None}, "neither epsilon nor"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"mechanism": uls(group_size=2, cohort_size=5000)}, "sampling probability"),
    ],
)
def test_bad_arguments_are_one_sentence(change, message):
    with pytest.raises(BadInputError, match=message) as caught:
        run(**change)
    assert "\n" not in str(caught.value)


def test_two_processes_do_not_share_a_run_directory(tmp_path):
    first = RunDirectory(tmp_path / "run", {}, None)
    with pytest.raises(BadInputError, match="another process"):
        RunDirectory(tmp_path / "run", {}, None)
    first.close()
    RunDirectory(tmp_path / "run", {}, None).close()


def test_a_run_goes_on_only_with_the_data_and_noise_it_began_with(tmp_path):
    facts = {"data": "a", "noise_multiplier": 1.5}
    RunDirectory(tmp_path / "run", {}, None, facts).close()
    again = RunDirectory(tmp_path / "run", {}, None, facts | {"noise_multiplier": 1.4})
    assert again.facts["noise_multiplier"] == 1.5
    again.close()
    with pytest.raises(BadInputError, match="training data are not those"):
        RunDirectory(tmp_path / "run", {}, None, facts | {"data": "b"})


def test_a_lost_key_is_said_not_replaced(tmp_path):
    RunDirectory(tmp_path / "run", {}, None).close()
    (tmp_path / "run/private/root_key.json").unlink()
    with pytest.raises(BadInputError, match="root key"):
        RunDirectory(tmp_path / "run", {}, None)


@pytest.mark.nightly
def test_loss_is_computed_on_the_mesh_given():
    one = run(mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)), steps=8)
    eight = run(steps=8)
    np.testing.assert_allclose(one.params["w"], eight.params["w"], rtol=1e-5, atol=1e-6)


def test_a_run_goes_on_with_the_noise_that_it_began_with(tmp_path):
    """With the strategy of its noise, too, whatever calibration would say today."""
    posts = [{"user": f"u{i % 20}", "text": "river stone lamp"} for i in range(40)]
    (tmp_path / "posts.jsonl").write_text("\n".join(map(json.dumps, posts)))
    data = {"source": "jsonl", "path": str(tmp_path / "posts.jsonl"), "seq_len": 8}
    raw = {
        "data": {**data, "test_fraction": 0.0},
        "model": {"overrides": {"num_layers": 1, "embed_dim": 8, "num_heads": 1}},
        "mechanism": {"kind": "bandmf", "bands": 2, "group_size": 2, "cohort_size": 4},
        "privacy": {"epsilon": 8.0, "delta": 1e-2},
        "train": {"steps": 4},
    }
    ready = prepare(validate_config(raw), Console(quiet=True))
    facts = json.loads(json.dumps(ready.facts()))
    run = types.SimpleNamespace(path=tmp_path, facts=facts)
    assert ready.resume_from(run).calibrated == ready.calibrated
    facts["mechanism"] |= {"noise_multiplier": 30.0, "column": [1.0, 0.5]}
    began = ready.resume_from(run).calibrated
    assert (began.noise_multiplier, began.mechanism.noise.column) == (30.0, (1.0, 0.5))
    del facts["mechanism"]
    with pytest.raises(BadInputError, match=r"begun by an earlier version.*start another run"):
        ready.resume_from(run)
