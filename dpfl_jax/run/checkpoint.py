"""Checkpoints of a run, by Orbax: parameters, optimiser state, step and what was spent.

They are copied to the host at once and written beside the next steps. One is there when it is
complete; only then is an older one removed.

The root key is not in them (it stays in the run's ``private/``), only its fingerprint: a
checkpoint must not let others recompute the noise. With the key and the step, all sampler and noise
state is known, but for noise that remembers (``mechanisms/bandmf.py``): then checkpoints hold sums
without noise, and are as secret as the key. Only their owner may read the folder.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.run import processes
from dpfl_jax.run.content import content_digest
from dpfl_jax.run.state import TrainState
from dpfl_jax.run.terms import refuse_other

# How long processes wait for each other's parts of one checkpoint.
_SLOW_STORAGE_S = 7200


class Checkpoints:
    """The checkpoints of one run; finished ones survive a kill at any moment.

    Attributes:
      best: a step whose checkpoint is kept beside the newest ones.
    """

    best: int | None = None

    def __init__(self, directory: pathlib.Path, keep: int) -> None:
        """Opens (or creates) ``directory``, keeping the newest ``keep`` checkpoints."""
        self.directory, self._keep = directory.absolute(), keep
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The state is donated to the next step. JAX reuses no buffer that a copy on the host still
        # shows, and every checkpoint holds a digest of what it should be.
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self, async_options=ocp.AsyncOptions(timeout_secs=_SLOW_STORAGE_S)
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Which of them stay: Orbax asks after each save."""
        del context
        newest = sorted(info.step for info in checkpoints)[-self._keep :]
        return [info.step in (*newest, self.best) for info in checkpoints]

    def steps(self) -> list[int]:
        """Of all finished checkpoints, as process 0 sees them."""
        return processes.broadcast(sorted(map(int, self._manager.all_steps())))

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, or None; of this object's own, perhaps unfinished."""
        return self._manager.latest_step()

    def resumed_step(self) -> int | None:
        """The step to go on from, as process 0 sees it: shared storage may show it late."""
        return processes.broadcast(self._manager.latest_step())

    def save(
        self, state: TrainState, key: RootKey, spent: dict[str, Any], terms: dict[str, Any]
    ) -> None:
        """Saves the state after ``state.step`` steps: returns once it is copied to the host.

        Waits for the one before, whose failure it raises.

        Args:
          state: what a step changes.
          key: root key of the run; only its fingerprint is kept.
          spent: epsilon and delta until this step.
          terms: what the run is, noise multiplier included (``terms.begin``).
        """
        step = int(state.step)
        if step == self.latest_step():
            return
        progress = {
            "step": step,
            "root_key": key.fingerprint,
            "spent": spent,
            "terms": terms,
            "state": content_digest(_to_tree(state), key),
        }
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_to_tree(state)),
                progress=ocp.args.JsonSave({**progress, "seal": _seal(key, progress)}),
            ),
        )

    def restore(
        self, like: TrainState, key: RootKey, terms: dict[str, Any], step: int | None = None
    ) -> TrainState:
        """Reads the state of a checkpoint, whatever number of processes wrote it.

        Args:
          like: gives shapes, dtypes and shardings.
          key: root key of the run.
          terms: what the run is (``terms.begin``).
          step: ``resumed_step()``, or None for the newest this process sees.

        Raises:
          BadInputError: it belongs to another root key or to a run of other terms, or cannot be
            read.
        """
        state, progress = self.read(like, step)
        if progress["root_key"] != key.fingerprint:
            raise BadInputError(
                f"the checkpoint of step {progress['step']} was made with another root key than "
                "the one in private/: noise would be reused or lost, so this run cannot go on"
            )
        found = f"the checkpoint of step {progress['step']} in {self._manager.directory}"
        seal = progress.pop("seal", None)
        if seal != _seal(key, progress) or progress["state"] != content_digest(
            _to_tree(state), key
        ):
            raise BadInputError(
                f"{found} was changed after it was written: remove it to go on from the one before"
            )
        # The computation was compared by ``terms.begin``, which knows whether the run has moved.
        refuse_other(progress["terms"], terms, found, moved=True)
        return state

    def read(self, like: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
        """Reads a checkpoint, whoever made it: the state and its ``progress``.

        Args:
          like: gives shapes, dtypes and shardings (arrays or ShapeDtypeStructs).
          step: which; default the newest this process sees.

        Raises:
          BadInputError: there is none, or it cannot be read.
        """
        step = self.latest_step() if step is None else step
        if step is None:
            raise BadInputError(f"there is no checkpoint in {self._manager.directory}")
        abstract = shapes_of(_to_tree(like))
        try:
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(abstract),
                    progress=ocp.args.JsonRestore(),
                ),
            )
        except (ValueError, OSError, KeyError) as error:
            reason = str(error).split("\n", 1)[0]
            raise BadInputError(
                f"the checkpoint of step {step} in {self._manager.directory} cannot be restored: "
                f"{reason}; remove it to go on from the one before"
            ) from None
        # Files keep no tuples: states are given back in the structure that they were made in.
        leaves = jax.tree.leaves(restored["state"])
        state = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
        return TrainState(**state), restored["progress"]

    def __enter__(self) -> Checkpoints:
        """Itself, until the run ends."""
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Closes, unless it would wait for other processes that may be gone."""
        if kind is None or not processes.many():
            self.close()

    def finish(self) -> None:
        """Waits until all are complete.

        Raises:
          Exception: the last one could not be written.
        """
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for writing to finish."""
        self.finish()
        self._manager.close()


def _seal(key: RootKey, progress: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(progress))
    return key.keyed_digest("checkpoint", json.dumps(plain, sort_keys=True))


def _to_tree(state: TrainState) -> dict[str, Any]:
    tree = {"params": state.params, "opt_state": state.opt_state, "step": state.step}
    more = {"noise": state.noise, "units": state.units}
    return tree | {name: kept for name, kept in more.items() if jax.tree.leaves(kept)}


def save_params(path: pathlib.Path, params: Any) -> None:
    """Writes parameters alone; the directory appears when it is complete."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), params)


def load_params(path: pathlib.Path, like: Any) -> Any:
    """Reads parameters in the shapes, dtypes and shardings of ``like``."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path.absolute(), shapes_of(like))


def released(directory: pathlib.Path, step: int) -> Any:
    """What a checkpoint released, whatever made it: arrays on the host, None where one was frozen.

    Args:
      directory: of the checkpoints.
      step: a finished one.

    Returns:
      Nested dicts and lists: files keep no tuples, and no names of classes.
    """
    state = directory.absolute() / str(step) / "state"
    handler = ocp.PyTreeCheckpointHandler()
    found = handler.metadata(state).tree["params"]
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), {"params": found})
    on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
    args = ocp.args.PyTreeRestore(item=like, partial_restore=True, restore_args=on_host)
    return handler.restore(state, args=args)["params"]


def shapes_of(tree: Any) -> Any:
    """ShapeDtypeStructs of arrays, with their shardings."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
