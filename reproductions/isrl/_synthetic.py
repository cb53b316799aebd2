"""Mean estimation over synthetic silos: a strongly convex instance whose minimiser is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.federation.isrl import MessageSpec, SiloData, iterate, make_oracle, minibatch_sgd
from dpfl_jax.federation.isrl.algorithms import ball, last_weights
from dpfl_jax.federation.isrl.message import Sampling
from reproductions._seeds import of


def quadratic(w: jax.Array, example: Any) -> jax.Array:
    """1/2 |w - x|^2: beta = mu = 1, and the minimiser is the mean."""
    return 0.5 * jnp.sum(jnp.square(w - example["x"]))


def rows_of(seed: jax.Array, rounds: int, silos: int, counts: jax.Array | None = None) -> Any:
    """A schedule made of one jax seed, so that trials can be vmapped.

    Args:
      seed: int.
      rounds: R.
      silos: N.
      counts: int [R], M_r; default all.
    """
    who, what = jax.random.split(jax.random.key(of(seed)))
    order = jax.random.uniform(who, (rounds, silos)).argsort(1).argsort(1)
    limit = jnp.full(rounds, silos) if counts is None else counts
    present = order < limit[:, None]
    turn = jnp.cumsum(present, axis=0) - present
    return {
        "present": present,
        "turn": turn.astype(jnp.int32),
        "keys": jax.random.bits(what, (rounds, silos, 2, 8), jnp.uint32),
    }


def drawn(seed: jax.Array, means: jax.Array, n: int, spread: float) -> SiloData:
    """Fresh records: uniform on {-spread, spread}^d about the mean of their silo."""
    silos, dim = means.shape
    signs = jax.random.rademacher(
        jax.random.fold_in(jax.random.key(of(seed)), 77), (silos, n, dim), jnp.float32
    )
    x = means[:, None, :] + spread * signs
    with jax.ensure_compile_time_eval():  # sizes are public: known outside of every trace
        sizes = jnp.full(silos, n, jnp.int32)
    return SiloData({"x": x}, sizes)


def oracle_of(
    data: SiloData,
    sampling: Sampling,
    batch: Any,
    clip: float,
    multipliers: Any,
    **options: Any,
) -> Any:
    """The mean of the silos' messages; ``multipliers`` [N] are their noise over the clip norm."""
    silos = data.num_silos
    rank = jnp.broadcast_to(jnp.arange(data.capacity), (silos, data.capacity))
    return make_oracle(
        quadratic,
        MessageSpec(sampling),
        data,
        batch=jnp.broadcast_to(jnp.asarray(batch, jnp.float32), (silos,)),
        clip_norm=clip,
        stddev=jnp.asarray(multipliers, jnp.float32) * clip,
        rank=rank.astype(jnp.int32),
        **options,
    )


def averaged_descent(oracle: Any, rows: Any, start: jax.Array) -> jax.Array:
    """Steps of 1/(r+1), by which the last iterate is the mean of all rounds' estimates."""
    rounds = rows["present"].shape[0]
    etas = 1.0 / (1.0 + jnp.arange(rounds))
    return iterate(minibatch_sgd(etas, last_weights(rounds), ball(None)), oracle, rows, start)


def risk_bound(rounds: int, smoothness: float, variance: float, distance: float) -> float:
    """The bound that goes with ``step_weights``."""
    grown = 2 * variance * rounds * (rounds + 1) * (rounds + 2) / (3 * distance**2)
    scale = max(2 * smoothness, math.sqrt(grown))
    first = 2 * scale * distance**2 / (rounds * (rounds + 1))
    return first + 4 * variance * (rounds + 2) / (3 * scale)


def repeated(one: Callable[..., jax.Array]) -> Callable[..., np.ndarray]:
    """``f(trials, seed, *facts)``: values [trials, ...] of ``one(seed, *facts)``, compiled once."""

    @jax.jit
    def run(seeds: jax.Array, *facts: Any) -> jax.Array:
        return jax.lax.map(lambda s: one(s, *facts), seeds, batch_size=20)

    def many(trials: int, seed: int, *facts: Any) -> np.ndarray:
        return np.asarray(run(jnp.arange(trials) + 100_000 * seed, *facts), np.float64)

    return many


def opposed_means(silos: int, dim: int, upsilon: float) -> jax.Array:
    """Silo means that sum to 0 and have mean square upsilon^2."""
    rng = np.random.default_rng(of(5))
    half = rng.normal(size=(silos // 2, dim))
    half *= upsilon / np.linalg.norm(half, axis=1, keepdims=True)
    return jnp.asarray(np.concatenate([half, -half]), jnp.float32)
