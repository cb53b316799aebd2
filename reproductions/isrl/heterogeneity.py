"""Heterogeneous silos: one-pass accelerated MB-SGD, and Lemma E.3's variance."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.federation.isrl import Budget, Problem, accelerated, iterate, step_weights
from dpfl_jax.federation.isrl.algorithms import ball
from dpfl_jax.federation.isrl.privacy import silo_noise
from dpfl_jax.federation.isrl.theory import variance_sco
from reproductions._plots import columns, panel
from reproductions.isrl._synthetic import (
    drawn,
    opposed_means,
    oracle_of,
    repeated,
    risk_bound,
    rows_of,
)
from reproductions.registry import Claim, Outcome, Settings, near, within

TITLE = "heterogeneous silos: one-pass accelerated MB-SGD"
SOURCE = "Lowy and Razaviyayn 2023, Theorem 3.1, Theorem E.1 and Lemma E.3"

SILOS, DIM, BATCH, ROUNDS, SPREAD, CLIP = 20, 8, 50, 10, 0.2, 8.0
UPSILONS = (0.0, 1.0, 2.0, 4.0)
COHORTS = (20, 5)
BUDGET = Budget(4.0, 1e-6)


def facts(cohort: int, upsilon: float, multiplier: float) -> float:
    """V^2 by Lemma E.3."""
    problem = Problem(
        lipschitz=CLIP,
        diameter=CLIP,
        dim=DIM,
        silos=SILOS,
        silo_size=BATCH * ROUNDS,
        budget=BUDGET,
        cohort=cohort,
        phi=SPREAD * math.sqrt(DIM),
        upsilon=upsilon,
    )
    return variance_sco(problem, BATCH, multiplier * CLIP / BATCH)


def run(settings: Settings) -> Outcome:
    """Sweeps heterogeneity with all silos, and with a quarter of them, answering."""
    trials = 400 if settings.quick else 4000
    n = BATCH * ROUNDS
    noise = silo_noise(BUDGET, n, BATCH, ROUNDS, sampling="disjoint")
    multipliers = np.full(SILOS, noise.noise_multiplier)
    start = jnp.zeros(DIM).at[0].set(1.0)

    def one(s: jax.Array, means: jax.Array, counts: jax.Array, a: jax.Array, p: Any) -> jax.Array:
        oracle = oracle_of(drawn(s, means, n, SPREAD), "disjoint", BATCH, CLIP, multipliers)
        method = accelerated(a, p, 0.0, ball(None))
        w = iterate(method, oracle, rows_of(s, ROUNDS, SILOS, counts), start)
        first = jax.tree.map(lambda x: x[0], rows_of(s, 1, SILOS, counts[:1]))
        off = oracle(start, first) - start
        return jnp.stack([0.5 * jnp.sum(w**2), jnp.sum(jnp.square(off))])

    sample = repeated(one)
    rows: list[dict[str, Any]] = []
    for seed, (cohort, upsilon) in enumerate(itertools.product(COHORTS, UPSILONS), start=1):
        variance = facts(cohort, upsilon, noise.noise_multiplier)
        steps = step_weights(ROUNDS, 1.0, variance, 1.0)
        counts = jnp.full(ROUNDS, cohort)
        found = sample(trials, seed, opposed_means(SILOS, DIM, upsilon), counts, *steps)
        rows.append(
            {
                "cohort": cohort,
                "upsilon": upsilon,
                "risk": float(found[:, 0].mean()),
                "risk_error": float(found[:, 0].std() / math.sqrt(trials)),
                "variance": float(found[:, 1].mean()),
                "lemma": variance,
                "bound": risk_bound(ROUNDS, 1.0, variance, 1.0),
            }
        )
    at = {(r["cohort"], r["upsilon"]): r for r in rows}
    claims = [
        near(
            f"Lemma E.3, M = {r['cohort']}, upsilon {r['upsilon']:g}: variance of the mean",
            r["variance"],
            r["lemma"],
            0.1,
            f"Monte Carlo of {trials}, within 10 %",
            source="paper",
        )
        for r in rows
    ]
    flat = at[SILOS, 4.0]["risk"] / at[SILOS, 0.0]["risk"]
    grown = at[5, 4.0]["risk"] / at[5, 0.0]["risk"]
    claims += [
        within(
            "all silos answer: the risk does not depend on heterogeneity (upsilon 4 over 0)",
            flat,
            1.0,
            0.15,
            source="paper",
        ),
        Claim(
            "a quarter of the silos answers: the risk grows with heterogeneity (4 over 0)",
            round(grown, 2),
            "> 1.5",
            grown > 1.5,
            source="paper",
        ),
        Claim(
            "the risk is below the bound of the step weights everywhere",
            f"{sum(r['risk'] <= r['bound'] for r in rows)} of {len(rows)}",
            f"{len(rows)} of {len(rows)}",
            all(r["risk"] <= r["bound"] for r in rows),
            source="arithmetic",
        ),
    ]
    file = settings.out / "isrl-heterogeneity.png"
    _draw(rows, file)
    return Outcome(
        claims,
        [file],
        rows,
        [
            f"sound arm, epsilon {BUDGET.epsilon:g}, one pass: R = {ROUNDS}, K = {BATCH}",
            "the loss is |w - x|^2 / 2, of condition number 1, and the silos' means are opposed: "
            "when all silos answer, heterogeneity cancels exactly, an easy case of Theorem 3.1",
        ],
    )


def _draw(rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file, size=(5, 4)) as ax:
        for cohort in COHORTS:
            part = [r for r in rows if r["cohort"] == cohort]
            ax.errorbar(
                *columns(part, "upsilon", "risk"),
                yerr=[1.645 * r["risk_error"] for r in part],
                marker="o",
                label=f"M = {cohort} of {SILOS}",
            )
        ax.set(xlabel="heterogeneity", ylabel="excess risk", yscale="log")
