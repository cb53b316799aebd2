"""Non-private training on a public corpus: where private fine-tuning starts from.

The result is kept by content (model, corpus, settings), so that many private runs share one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from dpfl_jax.data.pipeline import local_columns, ship_columns
from dpfl_jax.data.store import Readable
from dpfl_jax.errors import BadInputError
from dpfl_jax.mesh import parameter_shardings, place, unit_axes, unit_parts
from dpfl_jax.randomness import RootKey
from dpfl_jax.run import processes
from dpfl_jax.run.checkpoint import load_params, save_params
from dpfl_jax.run.content import content_digest
from dpfl_jax.run.directory import RunDirectory, open_plain
from dpfl_jax.run.programs import default_cache_dir
from dpfl_jax.run.progress import StepProgress
from dpfl_jax.run.state import shardings_of

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A pre-trained checkpoint.

    Attributes:
      params: the parameters.
      path: where they are kept.
      cached: True if they were found there, not trained now.
    """

    params: PyTree
    path: pathlib.Path
    cached: bool

    @property
    def facts(self) -> dict[str, Any]:
        """What identifies it: ``name`` (model, corpus and settings) and ``digest`` (of values)."""
        return {"name": self.path.name, "digest": content_digest(self.params)}


def pretrain(
    *,
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    public: Readable,
    optimizer: optax.GradientTransformation,
    steps: int,
    batch_size: int,
    seed: int,
    identity: dict[str, Any],
    mesh: Mesh,
    cache_dir: pathlib.Path | None = None,
    console: Console | None = None,
) -> Pretrained:
    """Trains on ``public``, or returns the cached result of the same training.

    Args:
      loss_fn: ``(params, example) -> scalar`` for one example.
      params: initial parameters.
      public: store of public examples; users do not matter here.
      optimizer: any Optax transformation.
      steps: optimiser steps.
      batch_size: examples per step, rounded up to a multiple of the devices.
      seed: seed of the shuffle (public).
      identity: plain JSON that identifies model, corpus and settings: the cache's key.
      mesh: from ``mesh.make_mesh``.
      cache_dir: default ``default_cache_dir()``.
      console: where the progress bar goes.

    Raises:
      BadInputError: the public corpus is empty.
    """
    identity = {**identity, "steps": steps, "batch_size": batch_size, "seed": seed, "format": 1}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = (cache_dir or default_cache_dir()) / "pretrained" / digest
    params = place(params, parameter_shardings(params, mesh))
    with _alone(path):
        if processes.broadcast(path.exists()):
            try:
                return Pretrained(load_params(path, params), path, cached=True)
            except (ValueError, OSError, KeyError):
                if processes.many():
                    raise BadInputError(
                        f"the pre-trained checkpoint {path} cannot be read by every process: put "
                        "pretrain.cache_dir on storage that all share, or remove it if damaged"
                    ) from None
                shutil.rmtree(path, ignore_errors=True)  # a damaged cache entry is made again
        first, stop = int(public.user_offsets[0]), int(public.user_offsets[-1])
        if stop <= first:
            raise BadInputError(
                "the public corpus is empty: remove the pretrain section, or add data"
            )

        parts = unit_parts(mesh)
        rows = -(-batch_size // parts) * parts
        sharding = NamedSharding(mesh, PartitionSpec(unit_axes(mesh)))
        mine = local_columns(sharding, rows, axis=0)

        def mean_loss(params: PyTree, batch: PyTree) -> jax.Array:
            return jax.vmap(loss_fn, in_axes=(None, 0))(params, batch).mean()

        @jax.jit
        def step(
            params: PyTree, opt_state: PyTree, batch: PyTree
        ) -> tuple[PyTree, PyTree, jax.Array]:
            loss, gradient = jax.value_and_grad(mean_loss)(params, batch)
            updates, opt_state = optimizer.update(gradient, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        opt_state = jax.jit(
            optimizer.init, out_shardings=shardings_of(params, optimizer, mesh).opt_state
        )(params)
        key = RootKey.from_seed(seed)
        started, tokens = time.perf_counter(), 0
        with StepProgress(console or Console(quiet=True), "pre-training (public)", steps) as bar:
            for i in range(steps):
                positions = _shuffled(key, first, stop, rows, i)
                batch = public.read(positions[mine])
                tokens += int(batch["mask"].sum()) if "mask" in batch else 0
                batch = ship_columns(batch, mine, rows, 0, sharding)
                params, opt_state, loss = step(params, opt_state, batch)
                rate = tokens * rows / len(mine) / (time.perf_counter() - started)
                bar.update(i + 1, f"loss {float(loss):.3f}  {rate:,.0f} tok/s")
        path.parent.mkdir(parents=True, exist_ok=True)
        save_params(path, params)
        if processes.is_primary():
            (path / "identity.json").write_text(json.dumps(identity, indent=2, sort_keys=True))
        return Pretrained(params, path, cached=False)


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[None]:
    """One training of a base at a time: another program waits, and then finds it.

    The processes of one run train it together, and so do not wait for each other.
    """
    if processes.many():
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_plain(path.with_suffix(".lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def begin_from(pretrained: Pretrained, directory: RunDirectory, needed: bool) -> None:
    """Notes what was trained before on public data; a run that goes on must find the same.

    Args:
      pretrained: the base.
      directory: of the run.
      needed: whether a part of it stays as it is for the whole run.

    Raises:
      BadInputError: the run began with another one. One of the same settings that was made again
        may differ in rounding: enough to take steps twice with one noise on different sums, unless
        all parameters are in a checkpoint of the run.
    """
    found = pretrained.facts

    def check() -> None:
        known = directory.facts.get("base", found)
        kept = any(p.name.isdigit() for p in (directory.path / "checkpoints").glob("*"))
        if known["name"] != found["name"] or (known != found and (needed or not kept)):
            raise BadInputError(
                f"the pre-trained checkpoint {pretrained.path} is not the one that the run in "
                f"{directory.path} began with ({known['name']}): bring back the public corpus and "
                "the checkpoint, or start another run"
            )

    processes.on_primary(check)
    if "base" not in directory.facts:
        directory.note("base", found)


def _shuffled(key: RootKey, first: int, stop: int, rows: int, step: int) -> np.ndarray:
    """Positions of one batch: epochs of a fresh permutation each, without replay."""
    size = stop - first
    wanted = np.arange(step * rows, (step + 1) * rows)
    positions = np.empty(rows, np.int64)
    for epoch in np.unique(wanted // size):
        inside = wanted // size == epoch
        order = key.numpy("pretrain-shuffle", int(epoch)).permutation(size)
        positions[inside] = first + order[wanted[inside] % size]
    return positions
