"""What tests of runs need: the state that one ended with, and a death on the way."""

import contextlib

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dpfl_jax.run import checkpoint


def final_state(run_dir, **restore):
    """All arrays of the newest checkpoint; ``restore``: as Orbax's StandardRestore takes it."""
    manager = ocp.CheckpointManager(run_dir / "checkpoints", item_names=("state", "progress"))
    items = ocp.args.Composite(state=ocp.args.StandardRestore(**restore))
    return jax.tree.map(np.asarray, manager.restore(manager.latest_step(), args=items)["state"])


class DiedError(Exception):
    """Instead of a signal."""


@contextlib.contextmanager
def death_after_a_checkpoint(monkeypatch):
    """Inside, a run dies as soon as it has saved its first checkpoint."""
    save = checkpoint.Checkpoints.save

    def dies(self, state, *rest):
        save(self, state, *rest)
        self.close()
        raise DiedError

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoints, "save", dies)
        with pytest.raises(DiedError):
            yield


def went_on_bit_for_bit(tmp_path, monkeypatch, start):
    """A run, and one that died and went on, end with the same numbers: (the run, its state).

    ``start``: name of a run directory below ``tmp_path`` -> its result, which it resumes.
    """
    whole = start("whole")
    with death_after_a_checkpoint(monkeypatch):
        start("killed")
    jax.tree.map(np.testing.assert_array_equal, start("killed").params, whole.params)
    states = [final_state(tmp_path / name) for name in ("whole", "killed")]
    jax.tree.map(np.testing.assert_array_equal, *states)
    return whole, states[0]
