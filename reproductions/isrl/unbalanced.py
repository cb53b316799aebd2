"""Silos that differ in size and budget, and a random number of them in a round."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.federation.isrl import Budget, SiloData
from dpfl_jax.federation.isrl.privacy import federation_noise
from reproductions._plots import columns, panel
from reproductions._seeds import of
from reproductions.isrl._synthetic import (
    averaged_descent,
    drawn,
    opposed_means,
    oracle_of,
    repeated,
    rows_of,
)
from reproductions.registry import Claim, Outcome, Settings, near

TITLE = "unbalanced silos: the average budget counts, not the worst"
SOURCE = "Lowy and Razaviyayn 2023, appendix H: Theorem H.1 and Remark H.1"

SILOS, DIM, SIZE, ROUNDS, CLIP, DELTA = 16, 8, 200, 10, 1.5, 1e-6
LAW = {4: 0.5, 16: 0.5}


def private_risk(epsilons: list[float], trials: int, seed: int) -> tuple[float, float]:
    """Excess empirical risk of full batches, and the mean square noise that it should follow."""
    budgets = [Budget(e, DELTA) for e in epsilons]
    noise = federation_noise(budgets, [SIZE] * SILOS, [SIZE] * SILOS, ROUNDS, sampling="full")
    multipliers = np.array([z.noise_multiplier for z in noise])
    data = drawn(jnp.asarray(seed), opposed_means(SILOS, DIM, 0.1), SIZE, 0.2)
    risks = _sample()(trials, seed, data, multipliers)
    return float(risks.mean()), float(np.mean(multipliers**2))


@functools.cache
def _sample() -> Callable[..., np.ndarray]:
    def one(s: jax.Array, data: SiloData, multipliers: jax.Array) -> jax.Array:
        oracle = oracle_of(data, "full", SIZE, CLIP, multipliers)
        w = averaged_descent(oracle, rows_of(s, ROUNDS, SILOS), jnp.zeros(DIM))
        return 0.5 * jnp.sum(jnp.square(w - data.examples["x"].mean((0, 1))))

    return repeated(one)


def theorem(epsilons: list[float]) -> float:
    """Theorem H.1's privacy term, convex, all silos answering, L = 1, D = 2: the mean of xi counts.

    xi_i = ln(2.5 R/delta) ln(2/delta) / (n epsilon_i)^2.
    """
    logs = math.log(2.5 * ROUNDS / DELTA) * math.log(2 / DELTA)
    xi = [logs / (SIZE * epsilon) ** 2 for epsilon in epsilons]
    return 2.0 * math.sqrt(DIM * float(np.mean(xi)) / SILOS)


def participation(trials: int) -> tuple[float, float]:
    """Variance of one round's mean under a random M_r over that with all silos, and E[N / M_r]."""
    data = drawn(jnp.asarray(3), jnp.zeros((SILOS, DIM)), SIZE, 0.0)
    oracle = oracle_of(data, "full", SIZE, CLIP, np.full(SILOS, 20.0))

    def one(s: jax.Array) -> jax.Array:
        few = jax.random.bernoulli(jax.random.fold_in(jax.random.key(of(s)), 9), LAW[4])
        counts = jnp.where(few, 4, 16)[None]
        both = []
        for limit in (counts, None):
            row = jax.tree.map(lambda x: x[0], rows_of(s, 1, SILOS, limit))
            both.append(jnp.sum(jnp.square(oracle(jnp.zeros(DIM), row))))
        return jnp.stack(both)

    mean = repeated(one)(trials, 8).mean(0)
    return float(mean[0] / mean[1]), sum(p * SILOS / m for m, p in LAW.items())


def run(settings: Settings) -> Outcome:
    """One silo asks for more privacy; then all do; then silos drop out."""
    trials = 400 if settings.quick else 4000
    settings_ = {
        "all alike": [2.0] * SILOS,
        "one silo at a quarter": [2.0] * (SILOS - 1) + [0.5],
        "all at a quarter": [0.5] * SILOS,
    }
    rows: list[dict[str, Any]] = []
    with settings.console.status("unbalanced silos"):
        for seed, (name, epsilons) in enumerate(settings_.items()):
            risk, square = private_risk(epsilons, trials, seed)
            term = theorem(epsilons)
            rows.append({"silos": name, "risk": risk, "mean_square_noise": square, "theorem": term})
        dropped, expected = participation(4 * trials)
    base, one, every = (r["risk"] for r in rows)
    ratio = rows[1]["mean_square_noise"] / rows[0]["mean_square_noise"]
    worst = rows[2]["mean_square_noise"] / rows[0]["mean_square_noise"]
    claims = [
        near("one strict silo of 16: risk over all alike", one / base, ratio, 0.15, source="paper"),
        near("all strict: risk over all alike", every / base, worst, 0.15, source="paper"),
        Claim(
            "the average counts, not the worst silo",
            round(one / base, 2),
            f"<= {worst / 4:.2f}",
            one / base <= worst / 4,
            "a quarter of what the worst silo alone would cost",
            source="paper",
        ),
        near(
            "Theorem H.1's privacy term follows the same ratio (convex: its square)",
            (rows[1]["theorem"] / rows[0]["theorem"]) ** 2,
            ratio,
            0.25,
            source="paper",
        ),
        near(
            "random M_r: variance over that of all silos is E[N / M_r]",
            dropped,
            expected,
            0.1,
            source="arithmetic",
        ),
    ]
    file = settings.out / "isrl-unbalanced.png"
    _draw(rows, file)
    return Outcome(claims, [file], rows, [f"{trials} trials, {ROUNDS} full-batch rounds, N = 16"])


def _draw(rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file, size=(5, 3.5)) as ax:
        ax.plot(*columns(rows, "silos", "risk"), "o")
        ax.margins(x=0.2)
        ax.set(ylabel="excess risk", yscale="log")
