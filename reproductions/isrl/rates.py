"""Rates of private excess risk on the paper's hard instances, as log-log slopes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.federation.isrl import (
    Budget,
    MessageSpec,
    SiloData,
    iterate,
    make_oracle,
    minibatch_sgd,
)
from dpfl_jax.federation.isrl.algorithms import ball, last_weights
from dpfl_jax.federation.isrl.privacy import silo_noise
from reproductions._plots import columns, panel
from reproductions._seeds import of
from reproductions.registry import Claim, Outcome, Settings, Tried, within

TITLE = "rates in n, epsilon, N and d on hard instances"
SOURCE = "Lowy and Razaviyayn 2023, Theorems 2.1 and 2.2 and their hard instances (appendix D)"

BASE = {"n": 400, "epsilon": 0.5, "silos": 8, "dim": 16}
SWEEPS = {
    "n": (200, 400, 800, 1600),
    "epsilon": (0.25, 0.5, 1.0, 2.0),
    "silos": (4, 8, 16, 32),
    "dim": (8, 16, 32, 64),
}
CONVEX = {"n": -1.0, "epsilon": -1.0, "silos": -0.5, "dim": 0.5}
STRONGLY = {"n": -2.0, "epsilon": -2.0, "silos": -1.0, "dim": 1.0}
ROUNDS, RADIUS = 12, 1.0
# Sizes of the mean of a convex instance. Which is the hardest depends on the noise; rates are of
# the hardest, and so is what is measured: no predicted rate enters it.
MEANS = np.geomspace(1e-3, 1.0, 19)
ETAS = np.geomspace(0.03, 3000.0, 11)  # step sizes of convex losses


def linear(w: jax.Array, example: Any) -> jax.Array:
    """-<w, x>, the convex instance; |x| = 1, so L = 1."""
    return -jnp.sum(w * example["x"])


def quadratic(w: jax.Array, example: Any) -> jax.Array:
    """1/2 |w - x|^2, the strongly convex instance."""
    return 0.5 * jnp.sum(jnp.square(w - example["x"]))


def private_risk(kind: str, setting: dict[str, float], trials: int, seed: int) -> float:
    """Excess *empirical* risk caused by privacy, mean over trials, sound arm, full batches.

    Of the hardest instance of a linear loss; of quadratics all are as hard.
    """
    n, silos, dim = int(setting["n"]), int(setting["silos"]), int(setting["dim"])
    noise = silo_noise(
        Budget(setting["epsilon"], 1e-6), n, n, ROUNDS, sampling="full"
    ).noise_multiplier
    clip = 1.0 if kind == "convex" else 2.0 * RADIUS
    rng = np.random.default_rng(of(seed))
    x = rng.choice([-1.0, 1.0], (silos, n, dim)) / math.sqrt(dim)
    direction = rng.normal(size=dim)
    direction /= np.linalg.norm(direction)
    if kind == "convex":
        x -= x.mean((0, 1))
    loss = linear if kind == "convex" else quadratic

    def oracle_of(records: jax.Array) -> Any:
        return make_oracle(
            loss,
            MessageSpec("full"),
            SiloData({"x": records}, jnp.full(silos, n, jnp.int32)),
            batch=jnp.full(silos, float(n)),
            clip_norm=clip * 1.5,
            stddev=jnp.full(silos, noise * clip * 1.5),
        )

    def rows_of(s: jax.Array) -> dict[str, jax.Array]:
        return {
            "present": jnp.ones((ROUNDS, silos), bool),
            "turn": jnp.zeros((ROUNDS, silos), jnp.int32),
            "keys": jax.random.bits(jax.random.key(of(s)), (ROUNDS, silos, 2, 8), jnp.uint32),
        }

    @jax.jit
    def runs(seeds: jax.Array, size: jax.Array) -> jax.Array:
        records = jnp.asarray(x, jnp.float32)
        if kind == "convex":
            records = records + size * jnp.asarray(direction, jnp.float32)
        mean, start, oracle = records.mean((0, 1)), jnp.zeros(dim), oracle_of(records)

        def one(s: jax.Array) -> jax.Array:
            rows = rows_of(s)
            if kind == "convex":
                # Gradients of a linear loss are alike everywhere: one draw of all serves all steps.
                _, gradients = jax.lax.scan(lambda c, row: (c, oracle(start, row)), None, rows)

                def risk(eta: jax.Array) -> jax.Array:
                    def step(w: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
                        moved = ball(RADIUS)(w - eta * g)
                        return moved, moved

                    _, iterates = jax.lax.scan(step, start, gradients)
                    return RADIUS * jnp.linalg.norm(mean) - iterates.mean(0) @ mean

                return jax.vmap(risk)(jnp.asarray(ETAS, jnp.float32))
            etas = 1.0 / (1.0 + jnp.arange(ROUNDS))
            sgd = minibatch_sgd(etas, last_weights(ROUNDS), ball(RADIUS))
            return 0.5 * jnp.sum(jnp.square(iterate(sgd, oracle, rows, start) - mean))

        return jax.vmap(one)(seeds)

    seeds = jnp.arange(trials) + 10_000 * seed
    sizes = MEANS if kind == "convex" else MEANS[:1]
    # The best step size, of the instance that is the hardest for it.
    return max(float(np.min(np.mean(runs(seeds, size), axis=0))) for size in sizes)


def slope(x: list[float], y: list[float]) -> float:
    """Least squares in logs."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def run(settings: Settings) -> Outcome:
    """Sweeps every quantity for both kinds of loss."""
    from rich.progress import track

    trials = 60 if settings.quick else 400
    rows: list[dict[str, Any]] = []
    claims: list[Claim] = []
    work = [(kind, name) for kind in ("convex", "strongly convex") for name in SWEEPS]
    for kind, name in track(work, "rates", console=settings.console):
        values = SWEEPS[name]
        risks = [
            private_risk(kind, {**BASE, name: value}, trials, seed)
            for seed, value in enumerate(values)
        ]
        rows += [
            {"loss": kind, "varied": name, "value": value, "risk": risk}
            for value, risk in zip(values, risks, strict=True)
        ]
        expected = (CONVEX if kind == "convex" else STRONGLY)[name]
        found = slope(list(values), risks)
        room = 0.15 if kind == "convex" else 0.25
        claims.append(
            within(
                f"{kind}: private excess empirical risk against {name}, log-log slope",
                found,
                expected,
                room,
                source="paper",
            )
        )
    file = settings.out / "isrl-rates.png"
    _draw(rows, file)
    return Outcome(
        claims,
        [file],
        rows,
        [
            f"Algorithm 2 with {ROUNDS} full-batch rounds and sound noise (the paper: the rounds "
            f"of its theorem, draws with replacement), delta 1e-6, {trials} trials a point",
            "convex: the mean of the iterates",
            "empirical risk: the second term of Theorem 2.1's rates; the first is not tried",
            f"convex: the worst of {len(MEANS)} sizes of the instance's mean, alike for all points",
            "a slope over these instances does not show that a rate is tight",
        ],
        Tried(
            f"chosen instances, {ROUNDS} full-batch rounds",
            fixed=f"convex: the best of {len(ETAS)} step sizes at each point",
        ),
    )


def _draw(rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file, 1, 4, size=(14, 3.4)) as axes:
        for ax, name in zip(axes, SWEEPS, strict=True):
            for at, (kind, slopes) in enumerate(
                {"convex": CONVEX, "strongly convex": STRONGLY}.items()
            ):
                part = [r for r in rows if r["loss"] == kind and r["varied"] == name]
                x, y = map(np.asarray, columns(part, "value", "risk"))
                ax.loglog(x, y, "o-", label=kind)
                paper = y[0] * (x / x[0]) ** slopes[name]
                ax.loglog(x, paper, ":", color=f"C{at}", label=f"{kind}, the paper's slope")
            words = {"n": "records of a silo", "dim": "parameters"}
            ax.set(xlabel=words.get(name, name), ylabel="private excess risk")
