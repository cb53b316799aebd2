"""On GPUs a run measures how to clip fastest; a run that resumes computes as before."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpfl_jax as dpfl
from dpfl_jax.clipping import Way
from dpfl_jax.mechanisms import els, uls
from dpfl_jax.training import central


def loss(params, example):
    return jnp.sum(jnp.tanh(example["x"] @ params["w"]) ** 2)


def planned(mechanism=None, **options):
    rng = np.random.default_rng(0)
    people = [(f"u{i}", {"x": rng.normal(size=(2, 5)).astype("f4")}) for i in range(40)]
    mechanism = mechanism or els(group_size=2, batch_size=8, clip_norm=0.1)
    settings = {"steps": 2, "noise_multiplier": 1.0, "delta": 1e-3, **options}
    return mechanism.plan(dpfl.ArrayStore.from_users(people), **settings)


def params():
    return {"w": 0.1 * np.ones((5, 3), np.float32)}


def run(folder, *mechanism, **options):
    return dpfl.fit(loss, params(), planned(*mechanism, **options), optax.sgd(0.1), run_dir=folder)


@pytest.fixture
def found(monkeypatch):
    """Pretends that devices are GPUs, on which ``found["way"]`` is fastest."""
    found = {"way": Way("vmap"), "shapes": []}

    def fastest(gradient, params, units):
        found["shapes"].append(jax.tree.map(lambda x: x.shape, units))
        return found["way"]

    monkeypatch.setattr(central, "_on_gpus", lambda mesh: True)
    monkeypatch.setattr(central, "fastest", fastest)
    return found


def report(folder):
    return json.loads((folder / "report.json").read_text())


def test_the_run_clips_as_was_measured(found, tmp_path):
    run(tmp_path / "a")
    assert report(tmp_path / "a")["clipping"]["strategy"] == "vmap"
    (shapes,) = found["shapes"]
    assert shapes["x"][1:] == (5,)
    run(tmp_path / "b", uls(group_size=2, cohort_size=4, clip_norm=0.1))
    assert found["shapes"][1]["examples"]["x"][1:] == (2, 5)
    assert found["shapes"][1]["mask"][1:] == (2,)


def test_another_way_is_another_layout_so_that_no_draw_is_used_twice(found):
    def fingerprint(way):
        found["way"] = way
        return central.Central(loss, params(), planned(), optax.sgd(0.1)).layout_fingerprint

    one, other = fingerprint(Way("vmap")), fingerprint(Way("ghost"))
    assert one == fingerprint(Way("vmap"))
    assert one != other


def test_a_strategy_that_is_asked_for_is_not_measured(found, tmp_path):
    run(tmp_path / "a", execution=dpfl.Execution(strategy="scan"))
    assert found["shapes"] == []
    assert report(tmp_path / "a")["clipping"]["strategy"] == "scan"
