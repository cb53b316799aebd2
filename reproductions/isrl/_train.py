"""One experiment of the paper: silos, algorithms, arms, step sizes tuned on the training loss.

Everything is vmapped: over silos inside the message, and over lanes (step size, repetition, noise).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.federation.isrl import (
    MessageSpec,
    SiloData,
    iterate,
    minibatch_sgd,
)
from dpfl_jax.federation.isrl.algorithms import ball, last_weights
from dpfl_jax.noise import GaussianNoise
from reproductions._seeds import of
from reproductions.isrl._local_sgd import make_local_oracle
from reproductions.isrl._published import Published, oracle_of
from reproductions.registry import Tried, Tuning

Loss = Callable[[jax.Array, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Task:
    """One draw of an experiment.

    Attributes:
      loss: of one record.
      metric: ``(w, train, test) -> scalar``, smaller is better; from all silos' records.
      train, test: silos.
      dim: number of parameters (or shape).
      rounds, batch, cohort: R, K, M.
    """

    loss: Loss
    metric: Callable[[jax.Array, SiloData, SiloData], jax.Array]
    train: SiloData
    test: SiloData
    shape: tuple[int, ...]
    rounds: int
    batch: int
    cohort: int


def mean_loss(loss: Loss, data: SiloData, w: jax.Array) -> jax.Array:
    """Mean over silos of the mean loss of their records."""
    each = jax.vmap(jax.vmap(loss, (None, 0)), (None, 0))(w, data.examples)
    n = data.capacity
    real = jnp.arange(n)[None, :] < data.sizes[:, None]
    return (jnp.where(real, each, 0.0).sum(1) / data.sizes).mean()


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _lane(
    loss: Loss,
    metric: Any,
    algorithm: str,
    spec: MessageSpec | Published,
    sizes: tuple[int, int, int, int, tuple[int, ...]],
    train: SiloData,
    test: SiloData,
    steps: jax.Array,
    seeds: jax.Array,
    clip: jax.Array,
    multiplier: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(training loss, metric), each [steps, seeds], at the mean of the last iterates."""
    rounds, batch, cohort, window, shape = sizes
    silos = train.num_silos
    own = 0.0 if algorithm == "server_noise" else multiplier
    stddev = jnp.full(silos, own * jnp.where(jnp.isfinite(clip), clip, 0.0))

    def one(step: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        who, what = jax.random.split(jax.random.key(of(seed)))
        order = jax.random.uniform(who, (rounds, silos)).argsort(1).argsort(1)
        rows = {
            "present": order < cohort,
            "turn": jnp.zeros((rounds, silos), jnp.int32),
            "keys": jax.random.bits(what, (rounds, silos, 2, 8), jnp.uint32),
        }
        if algorithm == "local":
            oracle = make_local_oracle(
                loss, train, local_steps=batch, step_size=step, clip_norm=clip, stddev=stddev
            )
        else:
            oracle = oracle_of(loss, spec, train, batch=batch, clip_norm=clip, stddev=stddev)
            if algorithm == "server_noise":
                oracle = _summed_with_server_noise(oracle, batch, multiplier * clip / batch)
        sgd = minibatch_sgd(jnp.full(rounds, step), last_weights(rounds, window), ball(None))
        w = iterate(sgd, oracle, rows, jnp.zeros(shape))
        return mean_loss(loss, train, w), metric(w, train, test)

    return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(steps, seeds)


def _summed_with_server_noise(oracle: Any, batch: int, sigma: Any) -> Any:
    """Sums instead of means, and noise once, at the server.

    As the authors' ``multiclasslogistic_convexFL_obesity.py`` (commit 421aeb6) has it.
    """

    def summed(w: jax.Array, row: Any) -> jax.Array:
        key = jax.random.wrap_key_data(row["keys"][0, 1, :2], impl="threefry2x32")
        noise = sigma * GaussianNoise(1.0).sample(jax.random.fold_in(key, 2), w)
        return batch * oracle(w, row) + noise

    return summed


def best_over_steps(
    task: Task,
    algorithm: str,
    spec: MessageSpec | Published,
    steps: np.ndarray,
    *,
    clips: np.ndarray,
    multiplier: float,
    repeats: int,
    seed: int,
    window: int = 8,
) -> float:
    """The metric at the step (and clip norm) of the best mean training loss: not private tuning."""
    sizes = (task.rounds, task.batch, task.cohort, window, task.shape)
    seeds = jnp.arange(repeats) + 1000 * seed
    best, chosen = math.inf, math.nan
    for clip in clips:
        losses, metrics = _lane(
            task.loss,
            task.metric,
            algorithm,
            spec,
            sizes,
            task.train,
            task.test,
            jnp.asarray(steps, jnp.float32),
            seeds,
            jnp.asarray(clip, jnp.float32),
            jnp.asarray(multiplier, jnp.float32),
        )
        mean = np.nan_to_num(np.asarray(losses), nan=np.inf, posinf=np.inf).mean(axis=1)
        at = int(np.argmin(mean))
        if mean[at] < best:
            best, chosen = float(mean[at]), float(np.asarray(metrics)[at].mean())
    return chosen


def tried_of(size: str, is_papers_size: bool, grids: Mapping[str, Sequence[np.ndarray]]) -> Tried:
    """How the arms were tuned: each by its training loss, trial by trial, as the scripts do.

    Args:
      size: in words.
      is_papers_size: whether it is.
      grids: arm -> its step sizes and clip norms.
    """
    tuning = {
        arm: Tuning({"step size": steps.tolist(), "clip norm": clips.tolist()}, {}, ())
        for arm, (steps, clips) in grids.items()
    }
    how = "by the training loss of each trial, as in the authors' scripts"
    return Tried(size, is_papers_size, tuning, how)


def summary(values: list[float]) -> tuple[float, float]:
    """Mean, and standard error of the mean."""
    array = np.asarray(values)
    error = array.std(ddof=1) / math.sqrt(len(array)) if len(array) > 1 else math.nan
    return float(array.mean()), float(error)
