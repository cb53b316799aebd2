"""Rounds of ISRL-DP minibatch SGD: silos and trials vmapped, against a NumPy loop over silos."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

CLIP, NOISE, STEP = 1.0, 5.0, 0.5


def measure_convex(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per variant: seconds of ``args.rounds`` rounds of one trial, medians of five."""
    rng = np.random.default_rng(0)
    shape = (args.silos, args.records)
    x = rng.normal(size=(*shape, args.dim)).astype(np.float32) / np.sqrt(args.dim)
    y = (rng.random(shape) < 0.5).astype(np.float32)
    variants: dict[str, tuple[Callable[[int], Any], int]] = {
        "vmapped silos": (_vmapped(args, x, y, 1), 1),
        f"vmapped silos and {args.trials} trials": (_vmapped(args, x, y, args.trials), args.trials),
        "no privacy": (_vmapped(args, x, y, 1, private=False), 1),
        "numpy loop over silos": (lambda seed: numpy_loop(args, x, y, seed), 1),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for run, _ in variants.values():
        run(0)  # compiles
    for repeat in range(5):
        for name in rng.permutation(list(variants)):
            run, _ = variants[name]
            wall, cpu = time.perf_counter(), time.process_time()
            run(repeat + 1)
            taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    rows = []
    for name, (_, trials) in variants.items():
        seconds, cpu = np.median(np.asarray(taken[name]), axis=0) / trials
        rows.append(
            {
                "what": name,
                "seconds": float(seconds),
                "cpu_seconds": float(cpu),
                "records": int(args.silos * args.batch_size * args.rounds),
            }
        )
    return rows


def _vmapped(
    args: argparse.Namespace, x: np.ndarray, y: np.ndarray, trials: int, private: bool = True
) -> Callable[[int], Any]:
    import jax
    import jax.numpy as jnp

    from dpfl_jax.federation.isrl import MessageSpec, SiloData, iterate, make_oracle, minibatch_sgd
    from dpfl_jax.federation.isrl.algorithms import ball, last_weights
    from dpfl_jax.federation.isrl.losses import logistic
    from dpfl_jax.noise.chacha import uniform

    silos, rounds = args.silos, args.rounds
    sizes = jnp.full(silos, args.records, jnp.int32)
    data = SiloData({"x": jnp.asarray(x), "y": jnp.asarray(y)}, sizes)

    @jax.jit
    def run(data: SiloData, seeds: jax.Array) -> jax.Array:
        oracle = make_oracle(
            logistic,
            MessageSpec("poisson"),
            data,
            batch=jnp.full(silos, float(args.batch_size)),
            clip_norm=CLIP,
            stddev=jnp.full(silos, NOISE),
        )

        def plain(w: jax.Array, row: Any) -> jax.Array:
            def of_silo(x: jax.Array, y: jax.Array, keys: jax.Array) -> jax.Array:
                drawn = uniform(keys[0], args.records) < args.batch_size / args.records

                def total(w: jax.Array) -> jax.Array:
                    losses = jax.vmap(lambda x, y: logistic(w, {"x": x, "y": y}))(x, y)
                    return jnp.where(drawn, losses, 0.0).sum() / args.batch_size

                return jax.grad(total)(w)

            return jax.vmap(of_silo)(data.examples["x"], data.examples["y"], row["keys"]).mean(0)

        def one(seed: jax.Array) -> jax.Array:
            keys = jax.random.bits(jax.random.key(seed), (rounds, silos, 2, 8), jnp.uint32)
            rows = {
                "present": jnp.ones((rounds, silos), bool),
                "turn": jnp.zeros((rounds, silos), jnp.int32),
                "keys": keys,
            }
            sgd = minibatch_sgd(jnp.full(rounds, STEP), last_weights(rounds), ball(None))
            return iterate(sgd, oracle if private else plain, rows, jnp.zeros(args.dim))

        return jax.vmap(one)(seeds)

    return lambda seed: jax.block_until_ready(run(data, seed * trials + jnp.arange(trials)))


def numpy_loop(args: argparse.Namespace, x: np.ndarray, y: np.ndarray, seed: int) -> np.ndarray:
    """The same algorithm as one writes it in NumPy: only drawn records are touched."""
    rng = np.random.default_rng(seed)
    w, rate = np.zeros(args.dim, np.float32), args.batch_size / args.records
    for _ in range(args.rounds):
        total = np.zeros(args.dim)
        for own, labels in zip(x, y, strict=True):
            drawn = rng.random(args.records) < rate
            mine = own[drawn]
            slope = 1 / (1 + np.exp(-(mine @ w))) - labels[drawn]
            norms = np.abs(slope) * np.linalg.norm(mine, axis=1)
            slope *= np.minimum(1.0, CLIP / np.maximum(norms, 1e-30))
            total += (slope @ mine + NOISE * rng.standard_normal(args.dim)) / args.batch_size
        w = w - STEP * (total / args.silos).astype(np.float32)
    return w
