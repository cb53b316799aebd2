"""When privacy costs nothing: the private risk over the non-private one, and the hybrid recipe."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax import accounting
from dpfl_jax.accounting import REPLACE, closed_forms, events
from dpfl_jax.federation.isrl import Budget
from dpfl_jax.federation.isrl.privacy import silo_noise
from reproductions._plots import columns, panel
from reproductions.isrl._synthetic import (
    averaged_descent,
    drawn,
    oracle_of,
    repeated,
    rows_of,
)
from reproductions.registry import Claim, Outcome, Settings

TITLE = "privacy for free, and protection of a silo's whole data"
SOURCE = "Lowy and Razaviyayn 2023, section 2 (d < n epsilon^2) and appendix D.3.5"

SILOS, DIM, ROUNDS, CLIP, SPREAD, DELTA = 8, 8, 5, 2.0, 0.3, 1e-6
EPSILONS = (0.1, 0.5, 2.0, 8.0, 16.0)  # Theorem 2.1: at most 2 ln(2 / delta), which is 29
SIZE = 1600  # of the sweep of epsilon
SIZES = (50, 100, 200, 400, 800)
USER = Budget(1.0, 1e-5)


def sampler(n: int, rounds: int) -> Callable[..., np.ndarray]:
    """Excess population risk of full batches, with a noise multiplier and without noise."""

    def one(s: jax.Array, noise: jax.Array) -> jax.Array:
        data = drawn(s, jnp.zeros((SILOS, DIM)), n, SPREAD)
        found = []
        for multiplier in (noise, 0.0):
            oracle = oracle_of(data, "full", n, CLIP, multiplier * jnp.ones(SILOS))
            w = averaged_descent(oracle, rows_of(s, rounds, SILOS), jnp.zeros(DIM))
            found.append(0.5 * jnp.sum(w**2))
        return jnp.stack(found)

    return repeated(one)


def record_level(user: Budget, n: int) -> Budget:
    """Appendix D.3.5: (eps / n, delta / (4 n)) for each record of a silo, eps <= 1."""
    return Budget(user.epsilon / n, user.delta / (4 * n))


def run(settings: Settings) -> Outcome:
    """Sweeps epsilon at a fixed n; then n at a fixed user-level budget."""
    trials = 200 if settings.quick else 2000
    rows: list[dict[str, Any]] = []
    n = SIZE
    sample = sampler(n, ROUNDS)
    with settings.console.status("privacy for free"):
        for seed, epsilon in enumerate(EPSILONS):
            noise = silo_noise(Budget(epsilon, DELTA), n, n, ROUNDS, sampling="full")
            private, plain = sample(trials, seed, noise.noise_multiplier).mean(0)
            rows.append(
                {
                    "part": "free",
                    "epsilon": epsilon,
                    "n": n,
                    "signal": n * epsilon**2 / DIM,
                    "ratio": private / plain,
                    "free_by_theory": n * epsilon**2 >= DIM,
                }
            )
        for seed, size in enumerate(SIZES):
            own = record_level(USER, size)
            noise = silo_noise(own, size, size, 1, sampling="full")
            private, plain = sampler(size, 1)(trials, 50 + seed, noise.noise_multiplier).mean(0)
            # Replacing all records of a full batch moves its sum n times as far: one Gaussian.
            direct = size * accounting.calibrate_noise_multiplier(
                lambda z: events.gaussian(z, 1), USER.epsilon, USER.delta, relation=REPLACE
            )
            rows.append(
                {
                    "part": "user-level",
                    "n": size,
                    "private_risk": private - plain,
                    "epsilon": noise.epsilon,
                    "user_epsilon": closed_forms.user_level_guarantee(
                        size, noise.epsilon, own.delta
                    )[0],
                    "user_delta": closed_forms.user_level_guarantee(size, noise.epsilon, own.delta)[
                        1
                    ],
                    "noise_over_direct": noise.noise_multiplier / direct,
                }
            )
    claims = _claims(rows)
    file = settings.out / "isrl-privacy-for-free.png"
    _draw(rows, file)
    return Outcome(
        claims,
        [file],
        rows,
        [f"sound arm, full batches, N = {SILOS}, d = {DIM}; R = {ROUNDS}, user-level 1"],
    )


def _claims(rows: list[dict[str, Any]]) -> list[Claim]:
    free = [r for r in rows if r["part"] == "free"]
    user = [r for r in rows if r["part"] == "user-level"]
    falling = [r["ratio"] for r in free]
    return [
        Claim(
            f"risk over non-private risk at n epsilon^2 / d = {free[0]['signal']:g}: privacy costs",
            round(falling[0], 1),
            "> 10",
            falling[0] > 10,
            "the paper's condition, d <= n epsilon^2, is up to constants and logarithms",
            source="ours",
        ),
        Claim(
            f"the same at n epsilon^2 / d = {free[-1]['signal']:g}: privacy is free",
            round(falling[-1], 3),
            "<= 1.1",
            falling[-1] <= 1.1,
            source="paper",
        ),
        Claim(
            "the ratio falls with n epsilon^2 / d",
            [round(v, 3) for v in falling],
            "decreasing",
            all(b < a for a, b in itertools.pairwise(falling)),
            source="ours",
        ),
        Claim(
            "ISRL-DP at (epsilon/n, delta/(4n)) is (epsilon, delta) for a silo's whole data",
            [max(r["user_epsilon"] for r in user), max(r["user_delta"] for r in user)],
            f"<= ({USER.epsilon:g}, {USER.delta:g})",
            all(
                r["user_epsilon"] <= USER.epsilon * (1 + 1e-9) and r["user_delta"] <= USER.delta
                for r in user
            ),
            "by group privacy of (eps / n, delta / (4 n))",
            source="paper",
        ),
        Claim(
            "the recipe's noise over that of accounting for the silo directly (full batches)",
            round(max(r["noise_over_direct"] for r in user), 3),
            ">= 1: the recipe is valid, not tight",
            all(r["noise_over_direct"] >= 1 for r in user),
            source="arithmetic",
        ),
    ]


def _draw(rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file, 1, 2, size=(9, 3.6)) as axes:
        part = [r for r in rows if r["part"] == "free"]
        axes[0].loglog(*columns(part, "signal", "ratio"), "o-")
        axes[0].axhline(1.0, color="grey", linewidth=0.8)
        axes[0].set(xlabel="n epsilon^2 / d", ylabel="risk / non-private risk")
        part = [r for r in rows if r["part"] == "user-level"]
        axes[1].semilogx(*columns(part, "n", "private_risk"), "o-")
        axes[1].set(xlabel="records of a silo", ylabel="risk that user-level privacy adds")
        axes[1].set_ylim(0, 1.2 * max(r["private_risk"] for r in part))
