"""Traces of a few steps: written, named as private, and without influence on what is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpfl_jax as dpfl
from dpfl_jax.config import load_config
from dpfl_jax.errors import BadInputError
from dpfl_jax.run.driver import Profile

rng = np.random.default_rng(0)
DATA = dpfl.from_arrays({"x": rng.normal(size=(120, 3)).astype(np.float32)}, list(range(120)))


def loss(params, example):
    return jnp.sum(jnp.square(params["w"] - example["x"]))


def fit(run_dir, **loop):
    plan = dpfl.uls(group_size=1, cohort_size=20).plan(DATA, steps=6, epsilon=8.0, delta=1e-3)
    return dpfl.fit(
        loss, {"w": jnp.zeros(3)}, plan, optax.sgd(0.1), key=dpfl.RootKey.from_seed(0),
        run_dir=run_dir, loop=dpfl.LoopConfig(**loop),
    )  # fmt: skip


@pytest.mark.nightly
def test_a_traced_run_is_the_same_run(tmp_path):
    traced, other = fit(tmp_path / "traced", profile=2), fit(tmp_path / "other")
    jax.tree.map(np.testing.assert_array_equal, traced.params, other.params)
    (trace,) = (tmp_path / "traced" / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 1000
    assert (tmp_path / "traced" / "profile").stat().st_mode & 0o77 == 0
    assert not (tmp_path / "other" / "profile").exists()
    assert any("profile/" in caveat for caveat in traced.guarantee.caveats)


def test_it_is_written_where_a_run_ends_early_and_needs_a_folder(tmp_path):
    fit(tmp_path / "run", profile=100)
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
    with pytest.raises(BadInputError, match="profile needs run_dir"):
        fit(None, profile=2)


def test_the_first_turn_compiles_and_the_next_are_traced(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: seen.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append("stop"))
    with Profile(tmp_path / "profile", 2) as profile:
        for turn in range(5):
            profile.before()
            seen.append(turn)
            profile.after(jnp.zeros(()))
    assert seen == [0, "start", 1, 2, "stop", 3, 4]


@pytest.mark.parametrize("name", ["quickstart", "subject/quickstart", "isrl/quickstart"])
def test_every_kind_of_run_can_be_traced(name):
    plain, traced = (
        load_config(f"configs/{name}.yaml", more) for more in ([], ["execution.profile=3"])
    )
    assert dpfl.LoopConfig.of(traced).profile == 3
    assert dpfl.LoopConfig.of(plain).profile == 0
