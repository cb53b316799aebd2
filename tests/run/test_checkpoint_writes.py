"""Checkpoints are written beside the next steps, and hold what they were asked to hold."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpfl_jax as dpfl
from dpfl_jax.run.checkpoint import Checkpoints, load_params, released, save_params
from dpfl_jax.run.state import TrainState

KEY = dpfl.RootKey.from_seed(0)


def test_later_steps_in_the_same_buffers_do_not_reach_a_checkpoint_that_is_being_written(tmp_path):
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = step(TrainState(params={"w": jnp.zeros(2**22)}, opt_state=(), step=jnp.int32(0)))
    with Checkpoints(tmp_path / "checkpoints", 2) as checkpoints:
        for _ in range(3):
            checkpoints.save(state, KEY, {}, {})
            for _ in range(4):
                state = step(state)
            jax.block_until_ready(state)
    with Checkpoints(tmp_path / "checkpoints", 2) as checkpoints:
        assert checkpoints.steps() == [5, 9]
        for saved in (5, 9):  # which also compares the digest made before
            found = checkpoints.restore(state, KEY, {}, saved)
            assert (np.asarray(found.params["w"]) == saved).all()


@pytest.mark.slow
def test_a_run_that_dies_while_a_checkpoint_is_written_goes_on_from_it(tmp_path):
    data = dpfl.from_arrays({"x": np.random.default_rng(0).normal(size=(60, 3))}, list(range(60)))
    plan = dpfl.uls(group_size=1, cohort_size=10).plan(data, steps=8, epsilon=8.0, delta=1e-3)

    def start(name, **hooks):
        return dpfl.fit(
            lambda p, example: jnp.sum(jnp.square(p["w"] - example["x"])), {"w": jnp.zeros(3)},
            plan, optax.adam(0.1), key=KEY, run_dir=tmp_path / name,
            loop=dpfl.LoopConfig(checkpoint_every=3), hooks=dpfl.Hooks(**hooks),
        )  # fmt: skip

    class DiedError(Exception):
        pass

    def die(row):
        if row["step"] == 4:
            raise DiedError

    with pytest.raises(DiedError):
        start("killed", on_step=die)
    written = []
    killed = start("killed", on_checkpoint=lambda step: written.append((step, *kept(tmp_path))))
    assert written == [(6, 3, 6), (8, 6, 8)]  # complete when it is told
    jax.tree.map(np.testing.assert_array_equal, killed.params, start("whole").params)


def kept(folder):
    return sorted(
        int(p.name) for p in (folder / "killed/checkpoints").iterdir() if p.name.isdigit()
    )


STATE = TrainState(params={"w": jnp.arange(3.0)}, opt_state=[jnp.zeros(3)], step=jnp.int32(2))


def saved(folder):
    with Checkpoints(folder, 2) as checkpoints:
        checkpoints.save(STATE, KEY, {}, {})
        checkpoints.open_all()


@pytest.mark.parametrize("name", ["study [copy]", "a]b*?", "[!a]", "né %20 #"])
def test_no_name_of_a_folder_is_a_pattern(tmp_path, name):
    folder = tmp_path / name / "checkpoints"
    saved(folder)
    with Checkpoints(folder, 2) as checkpoints:
        assert int(checkpoints.restore(STATE, KEY, {}, 2).step) == 2
    assert released(folder, 2)["w"].tolist() == [0, 1, 2]
    save_params(tmp_path / name / "p", STATE.params)
    assert load_params(tmp_path / name / "p", STATE.params)["w"].tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_checkpoint_is_one_sentence_and_is_seen_at_the_end(tmp_path, capfd):
    saved(tmp_path)
    parts = list((tmp_path / "2" / "state" / "d").iterdir())
    with Checkpoints(tmp_path, 2) as checkpoints:
        for part in parts:
            part.write_bytes(b"")
        checkpoints._unopened = {2}
        for reading in (
            checkpoints.open_all,
            lambda: checkpoints.restore(STATE, KEY, {}, 2),
            lambda: released(tmp_path, 2),
        ):
            with pytest.raises(
                dpfl.BadInputError, match=r"step 2 in .* cannot be restored"
            ) as told:
                reading()
            assert len(str(told.value)) < 600
    assert "Traceback" not in capfd.readouterr().err


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    with Checkpoints(tmp_path, 2) as checkpoints:

        def full(*_, **__):
            raise ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device")

        monkeypatch.setattr(checkpoints._manager, "save", full)
        with pytest.raises(dpfl.BadInputError, match="the disk is full: free space"):
            checkpoints.save(STATE, KEY, {}, {})
