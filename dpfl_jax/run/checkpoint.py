"""Checkpoints of a run (Orbax), the best of them, and early stopping.

A checkpoint holds parameters, optimiser state, step and the privacy spent. It is copied to the host
before the next step and written during it. It appears when it is complete; only then is an older
one removed.

A checkpoint holds only the fingerprint of the root key (which stays in the run's ``private/``), so
that nobody can recompute the noise from it. Key and step determine the state of sampler and noise,
except for correlated noise (``mechanisms/noise_strategies.py``): then checkpoints hold sums without
noise, and are as secret as the key. Only their owner may read the folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import glob
import io
import json
import logging
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from dpfl_jax import buckets
from dpfl_jax.errors import BadInputError, UnreachableError
from dpfl_jax.files import on_disk
from dpfl_jax.randomness import RootKey
from dpfl_jax.run import processes
from dpfl_jax.run.state import TrainState, content_digest
from dpfl_jax.run.terms import refuse_other

# How long processes wait for each other's parts of one checkpoint.
_SLOW_STORAGE_S = 7200


# Orbax's threads log a traceback of each error, which is also raised here.
logging.getLogger("absl").addFilter(
    lambda record: not (record.exc_info and "orbax" in record.pathname)
)


@epath.register_path_cls
class _Folder(type(epath.Path("/"))):  # type: ignore[misc]
    """A path that escapes patterns: else Orbax fails below `study [copy]` (its issue 924)."""

    def glob(self, pattern: str) -> Iterator[_Folder]:
        return map(self._new, glob.iglob(f"{glob.escape(str(self))}/{pattern}"))


_CommittedLast = ocp.path.atomicity.CommitFileTemporaryPath  # a bucket cannot rename


def _place(directory: pathlib.Path) -> Any:
    """Where Orbax reads and writes."""
    where = buckets.located(directory.absolute())
    if not isinstance(where, epath.Path):
        return _Folder(where)
    if str(where).startswith("s3:"):
        _teach_s3()
    return where


@functools.cache
def _teach_s3() -> None:
    """Lets Orbax write arrays to S3: TensorStore can, but Orbax only asks it to for Google's.

    Without this, Orbax refuses such a path ("should be absolute"), and writes nothing elsewhere.
    """
    from orbax.checkpoint._src.serialization import tensorstore_utils

    of_google = tensorstore_utils.build_kvstore_tspec
    known = {
        "endpoint": os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
        "aws_region": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
        "aws_credentials": {"type": "environment"} if "AWS_ACCESS_KEY_ID" in os.environ else None,
    }
    of_s3 = {"driver": "s3", **{name: value for name, value in known.items() if value}}

    def translated(spec: Any) -> Any:
        if isinstance(spec, list):
            return [translated(part) for part in spec]
        if not isinstance(spec, dict):
            return spec
        spec = {name: translated(part) for name, part in spec.items()}
        return spec | of_s3 if str(spec.get("driver")).startswith("gcs") else spec

    def build(directory: str, *args: Any, **given: Any) -> Any:
        if not directory.startswith("s3:"):
            return of_google(directory, *args, **given)
        return translated(of_google("gs://" + directory[3:].lstrip("/"), *args, **given))

    tensorstore_utils.build_kvstore_tspec = build


def _meet(**given: Any) -> None:
    """Orbax's barrier; it raises an error that is being handled, as others wait elsewhere then."""
    if (error := sys.exception()) is not None:
        raise error
    ocp.multihost.get_barrier_sync_fn()(**given)


class Checkpoints:
    """The checkpoints of one run; finished ones survive a kill at any moment.

    Attributes:
      best: a step whose checkpoint is kept, however old.
    """

    best: int | None = None

    def __init__(self, directory: pathlib.Path, keep: int) -> None:
        """Opens (or creates) ``directory``, keeping the newest ``keep`` checkpoints."""
        self.directory, self._keep = on_disk(directory).absolute(), keep
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = _place(self.directory)
        # The state is donated to the next step. JAX reuses no buffer that a copy on the host still
        # shows, and every checkpoint holds a digest of what it should be.
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self,
            async_options=ocp.AsyncOptions(timeout_secs=_SLOW_STORAGE_S, barrier_sync_fn=_meet),
            temporary_path_class=None if isinstance(place, _Folder) else _CommittedLast,
        )
        self._manager = ocp.CheckpointManager(place, options=options)
        self._unopened: set[int] = set()

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Which checkpoints to keep; Orbax calls it after each save."""
        del context
        newest = sorted(info.step for info in checkpoints)[-self._keep :]
        return [info.step in (*newest, self.best) for info in checkpoints]

    def steps(self) -> list[int]:
        """The steps of all finished checkpoints, as process 0 sees them."""
        return processes.broadcast(sorted(map(int, self._manager.all_steps())))

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, or None; it may still be being written."""
        return self._manager.latest_step()

    def resumed_step(self) -> int | None:
        """The step to resume from, or None; from process 0, as shared storage may lag."""
        return processes.broadcast(self._manager.latest_step())

    def save(
        self, state: TrainState, key: RootKey, spent: dict[str, Any], terms: dict[str, Any]
    ) -> None:
        """Saves the state after ``state.step`` steps: returns once it is copied to the host.

        It first waits for the previous save, and raises its error.

        Args:
          state: the state to save.
          key: root key of the run; only its fingerprint is kept.
          spent: epsilon and delta until this step.
          terms: terms of the run, noise multiplier included (``terms.begin``).
        """
        step = int(state.step)
        if step == self.latest_step():
            return
        self._unopened.add(step)
        progress = {
            "step": step,
            "root_key": key.fingerprint,
            "spent": spent,
            "terms": terms,
            "state": content_digest(_to_tree(state), key),
        }
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(_to_tree(state)),
            progress=ocp.args.JsonSave({**progress, "seal": _seal(key, progress)}),
        )
        # A checkpoint without the rows of metrics up to it would decide otherwise when it resumes.
        buckets.publish(self.directory.parent)
        with self._room():
            self._manager.save(step, args=args)

    def restore(
        self, like: TrainState, key: RootKey, terms: dict[str, Any], step: int | None = None
    ) -> TrainState:
        """Reads the state of a checkpoint, whatever number of processes wrote it.

        Args:
          like: gives shapes, dtypes and shardings.
          key: root key of the run.
          terms: terms of the run (``terms.begin``).
          step: ``resumed_step()``, or None for the newest this process sees.

        Raises:
          BadInputError: it belongs to another root key or to a run of other terms, was changed,
            or cannot be read.
        """
        state, progress = self.read(like, step)
        if progress["root_key"] != key.fingerprint:
            raise BadInputError(
                f"the checkpoint of step {progress['step']} was made with another root key than "
                "the one in private/: noise would be reused or lost, so this run cannot go on"
            )
        where = f"the checkpoint of step {progress['step']} in {self._manager.directory}"
        seal = progress.pop("seal", None)
        if seal != _seal(key, progress) or progress["state"] != content_digest(
            _to_tree(state), key
        ):
            raise BadInputError(
                f"{where} was changed after it was written: remove it to go on from the one before"
            )
        # The computation was compared by ``terms.begin``, which knows whether the run has moved.
        refuse_other(progress["terms"], terms, where, moved=True)
        return state

    def read(self, like: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
        """Reads a checkpoint of any run: the state and its ``progress``.

        Args:
          like: gives shapes, dtypes and shardings (arrays or ShapeDtypeStructs).
          step: its step; default the newest this process sees.

        Raises:
          BadInputError: there is no checkpoint, or it cannot be read.
        """
        step = self.latest_step() if step is None else step
        if step is None:
            raise BadInputError(f"there is no checkpoint in {self._manager.directory}")
        abstract = shapes_of(_to_tree(like))
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), progress=ocp.args.JsonRestore()
        )
        restored = _attempt(lambda: self._manager.restore(step, args=args), self.directory, step)
        # Files keep no tuples: the state gets the structure of ``like``.
        leaves = jax.tree.leaves(restored["state"])
        state = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
        return TrainState(**state), restored["progress"]

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Closes, unless it would wait for other processes that may be gone."""
        if kind is None or not processes.many():
            self.close()

    def finish(self) -> None:
        """Waits until all checkpoints are complete.

        Raises:
          Exception: the last one could not be written.
        """
        with self._room():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not isinstance(_place(self.directory), _Folder):  # every client has its own errors
                raise UnreachableError(
                    f"no checkpoint could be written to {self.directory} ({error}): the same "
                    "command resumes from the one before"
                ) from error
            is_full = "No space left" in str(error) or "quota" in str(error)
            if not (is_full and isinstance(error, ValueError | OSError)):
                raise
            raise BadInputError(
                f"no checkpoint can be written to {self.directory}, as the disk is full: free "
                "space; the same command with the same run directory resumes from the one before"
            ) from error

    def open_all(self) -> None:
        """Reads back each new checkpoint that is kept, as a disk may lose what it accepted.

        A single process reads all of it. Of many, process 0 reads what is there only if their
        parts were joined.

        Raises:
          BadInputError: one cannot be read.
        """
        self.finish()
        kept, self._unopened = self._unopened & set(self._manager.all_steps()), set()
        for step in sorted(kept) if processes.is_primary() else ():
            _read_on_host(self.directory, step, ("step",) if processes.many() else None)

    def close(self) -> None:
        """Waits for writing to finish."""
        self.finish()
        self._manager.close()


def _attempt(read: Callable[[], Any], directory: pathlib.Path, step: int) -> Any:
    """Calls ``read``, and turns any error of a damaged checkpoint into one sentence.

    Once one read has failed, Orbax's other reads go on, and each prints a traceback at its end.
    """
    real, reason = sys.stderr, ""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            return read()
        except (RuntimeError, MemoryError):  # of devices
            raise
        except Exception as error:
            reason = str(error).split("\n", 1)[0].split(" [tensorstore_spec")[0][:300]
        finally:
            if reason:
                logging.getLogger("asyncio").setLevel(logging.CRITICAL)
                time.sleep(0.2)
                gc.collect()
                logging.getLogger("asyncio").setLevel(logging.NOTSET)
            else:
                real.write(printed.getvalue())
    raise BadInputError(
        f"the checkpoint of step {step} in {directory} cannot be restored: {reason}; remove it to "
        "go on from the one before"
    )


def _seal(key: RootKey, progress: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(progress))
    return key.keyed_digest("checkpoint", json.dumps(plain, sort_keys=True))


def _to_tree(state: TrainState) -> dict[str, Any]:
    tree = {"params": state.params, "opt_state": state.opt_state, "step": state.step}
    more = {"noise": state.noise, "units": state.units, "average": state.average}
    return tree | {name: kept for name, kept in more.items() if jax.tree.leaves(kept)}


def save_params(path: pathlib.Path, params: Any) -> None:
    """Writes parameters alone; the directory appears when it is complete."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(_Folder(on_disk(path).absolute()), params)


def load_params(path: pathlib.Path, like: Any) -> Any:
    """Reads parameters in the shapes, dtypes and shardings of ``like``."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(_Folder(path.absolute()), shapes_of(like))


def released(directory: pathlib.Path, step: int) -> Any:
    """Reads the model of a checkpoint of any run: the average of the iterates, or the last one.

    Args:
      directory: the folder of the checkpoints.
      step: the step of a finished one.

    Returns:
      Nested dicts and lists (files keep no tuples, and no names of classes) of arrays on the host;
      None where a parameter was frozen.

    Raises:
      BadInputError: it cannot be read.
    """
    found = _read_on_host(directory, step, ("average", "params"))
    return found.get("average", found["params"])


def _read_on_host(directory: pathlib.Path, step: int, parts: Sequence[str] | None) -> Any:
    """Reads the named ``parts`` of a checkpoint's state (None: all) as NumPy arrays."""

    def read() -> Any:
        state = _place(directory) / str(step) / "state"
        handler = ocp.PyTreeCheckpointHandler()
        tree = handler.metadata(state).tree
        chosen = {name: tree[name] for name in parts or tree if name in tree}
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), chosen)
        on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
        args = ocp.args.PyTreeRestore(item=like, partial_restore=True, restore_args=on_host)
        return handler.restore(state, args=args)

    return _attempt(read, directory, step)


def shapes_of(tree: Any) -> Any:
    """ShapeDtypeStructs of arrays, with their shardings."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)


# ---- the best checkpoint -------------------------------------------------------------------------
# The best checkpoint and when to stop are functions of the rows of metrics, so that a resumed run
# decides as an uninterrupted one.
#
# The epsilon of the steps taken holds only if their number was fixed beforehand, not if it follows
# from the models (Rogers et al. 2016). The epsilon of all planned steps holds for any rule, as what
# was published is part of what all steps would publish.

PyTree = Any
BEST_CAVEAT = (
    "the best checkpoint was chosen by held-out loss, without noise: the guarantee covers every "
    "checkpoint for those who were trained on, but nobody who was held out"
)


def stopped_caveat(done: int, steps: int, word: str) -> str:
    """The caveat of a run that ``patience`` stopped."""
    return (
        f"the run stopped after {done} of {steps} {word} by held-out loss, without noise: nobody "
        f"who was held out is covered; epsilon is that of all {steps}, since when to stop followed "
        "from the models"
    )


def interrupted_caveat(done: int, released: int, steps: int, word: str) -> str:
    """The caveat of a run that a signal stopped after up to ``released`` released steps."""
    more = ""
    if released != done:
        more = f", and what it released of up to {released} before it was resumed"
    return (
        f"the run was interrupted after {done} of {steps} {word}{more}: epsilon is that of "
        f"{released} if the reason had nothing to do with what the run had shown, and otherwise "
        f"that of all {steps}"
    )


@dataclasses.dataclass(frozen=True)
class Best:
    """The evaluation with the lowest held-out loss; the one before the first step is left out.

    Attributes:
      step: steps taken before it.
      loss: its held-out loss.
      params: reads its parameters from the run's directory.
    """

    step: int
    loss: float
    params: Callable[[], PyTree] | None = None


def exhausted(rows: Iterable[Mapping[str, Any]], patience: int | None) -> bool:
    """Whether the last ``patience`` evaluations found no lower loss; False if it is None."""
    rows = list(rows)
    result = best_evaluation(rows)
    if patience is None or result is None:
        return False
    return sum("eval" in row and row["step"] > result.step for row in rows) >= patience


class KeepBest:
    """Keeps the best checkpoint of a run, as well as its newest ones."""

    def __init__(self, checkpoints: Checkpoints, rows: Iterable[Mapping[str, Any]]) -> None:
        """Resumes from what the run's directory holds."""
        self._checkpoints, self._kept = checkpoints, set(checkpoints.steps())
        self._best: Best | None = None
        self.update(rows, 0)

    def update(self, rows: Iterable[Mapping[str, Any]], done: int) -> bool:
        """Returns whether the evaluation after ``done`` steps is the best, and must be saved.

        Earlier evaluations whose checkpoint was not kept do not count.
        """
        self._best = best_evaluation(row for row in rows if row["step"] in {*self._kept, done})
        if self._best is None:
            return False
        self._checkpoints.best = self._best.step
        self._kept |= {self._best.step}
        return self._best.step == done

    def best(self, params: Callable[[Checkpoints, int], PyTree]) -> Best | None:
        """The best checkpoint, or None; ``params`` reads the parameters of one."""
        result = self._best
        if result is None:
            return None

        def read() -> PyTree:
            kept = Checkpoints(self._checkpoints.directory, 1)
            try:
                return params(kept, result.step)
            finally:
                kept.close()

        return dataclasses.replace(result, params=read)


def best_evaluation(rows: Iterable[Mapping[str, Any]]) -> Best | None:
    """The evaluation with the lowest finite loss, the first of equal ones; None without any."""
    losses = [(row["eval"]["loss"], row["step"]) for row in rows if "eval" in row and row["step"]]
    loss, step = min((x for x in losses if math.isfinite(x[0])), default=(math.nan, 0))
    return Best(step, loss) if step else None
