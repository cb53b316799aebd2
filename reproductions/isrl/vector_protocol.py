"""P_vec: sums in the shuffle model, and one-pass accelerated MB-SGD with it (Algorithms 4 to 6)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.federation.isrl import Budget, Problem, accelerated, iterate, step_weights
from dpfl_jax.federation.isrl.algorithms import ball
from dpfl_jax.federation.isrl.privacy import silo_noise
from dpfl_jax.federation.isrl.schedule import Schedule
from dpfl_jax.federation.isrl.theory import variance_sco
from reproductions._plots import columns, panel
from reproductions._seeds import of
from reproductions.isrl._shuffle_protocol import (
    VectorProtocol,
    calibrate_protocol,
    make_vector_oracle,
    protocol_guarantee,
)
from reproductions.isrl._synthetic import (
    drawn,
    opposed_means,
    oracle_of,
    quadratic,
    repeated,
    risk_bound,
    rows_of,
)
from reproductions.registry import Claim, Outcome, Settings, near

TITLE = "the vector protocol, and one pass in the shuffle model"
SOURCE = "Lowy and Razaviyayn 2023, Algorithms 4 to 6, Lemma G.1 and Theorem 5.2"

SILOS, DIM, BATCH, ROUNDS, SPREAD, CLIP = 40, 8, 50, 4, 0.2, 4.0
EPSILONS = (0.25, 1.0, 4.0)
DELTA = 1e-6


def moments(trials: int) -> tuple[float, float, float]:
    """Largest bias over its standard error, and the variance over its formula and least value."""
    protocol = VectorProtocol(levels=8, noise_bits=12, bit_probability=0.5, bound=CLIP)
    reports = 60
    raw = np.random.default_rng(of(0)).normal(size=(reports, DIM))
    raw *= CLIP / np.maximum(np.linalg.norm(raw, axis=1, keepdims=True), CLIP)
    x = jnp.asarray(raw, jnp.float32)
    real = jnp.ones(reports, bool)

    def one(seed: jax.Array) -> jax.Array:
        return protocol.sum(x, real, reports, jax.random.key(of(seed))) - x.sum(0)

    found = repeated(one)(trials, 2)
    error = found.std(0) / math.sqrt(trials)
    unit = 2 * CLIP / protocol.levels
    binomial = unit**2 * reports * protocol.noise_bits / 4
    return (
        float(np.abs(found.mean(0) / error).max()),
        float(found.var(0).mean() / protocol.variance(reports)),
        float(found.var(0).mean() / binomial),
    )


def one_pass(epsilon: float, upsilon: float, trials: int, seed: int) -> dict[str, Any]:
    """Excess risk of both algorithms at the same epsilon: with a shuffler, and without."""
    reports, n = SILOS * BATCH, BATCH * ROUNDS
    protocol = calibrate_protocol(epsilon, DELTA, reports, DIM, CLIP, levels=16)
    guarantee = protocol_guarantee(
        protocol, batch=BATCH, cohort=SILOS, dim=DIM, delta=DELTA, rounds=ROUNDS
    )
    budget = Budget(epsilon, DELTA)
    own = silo_noise(budget, n, BATCH, ROUNDS, sampling="disjoint")
    multipliers = np.full(SILOS, own.noise_multiplier)
    means, start = opposed_means(SILOS, DIM, upsilon), jnp.zeros(DIM).at[0].set(1.0)
    problem = Problem(
        lipschitz=CLIP,
        diameter=CLIP,
        dim=DIM,
        silos=SILOS,
        silo_size=n,
        budget=budget,
        cohort=SILOS,
        phi=SPREAD * math.sqrt(DIM),
        upsilon=upsilon,
    )
    sigmas = {  # of a silo's mean; with a shuffler its share of the sum's noise
        "shuffle": math.sqrt(SILOS * protocol.variance(reports)) / reports,
        "ISRL-DP": own.noise_multiplier * CLIP / BATCH,
    }
    variances = {name: variance_sco(problem, BATCH, sigma) for name, sigma in sigmas.items()}
    template = rows_of(jnp.asarray(0), ROUNDS, SILOS)
    rank = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (SILOS, n))
    schedule = Schedule(template["present"], template["turn"], template["keys"], rank)

    def one(s: jax.Array) -> jax.Array:
        data, rows = drawn(s, means, n, SPREAD), rows_of(s, ROUNDS, SILOS)
        oracles = {
            "shuffle": make_vector_oracle(
                quadratic, data, schedule, protocol, batch=BATCH, cohort=SILOS
            ),
            "ISRL-DP": oracle_of(data, "disjoint", BATCH, CLIP, multipliers),
        }
        risks = []
        for name, oracle in oracles.items():
            steps = step_weights(ROUNDS, 1.0, variances[name], 1.0)
            w = iterate(accelerated(*steps, 0.0, ball(None)), oracle, rows, start)
            risks.append(0.5 * jnp.sum(w**2))
        return jnp.stack(risks)

    shuffle, isrl = repeated(one)(trials, seed).mean(0)
    return {
        "epsilon": epsilon,
        "upsilon": upsilon,
        "shuffle": float(shuffle),
        "isrl": float(isrl),
        "bound": risk_bound(ROUNDS, 1.0, variances["shuffle"], 1.0),
        "spent": guarantee.epsilon,
        "noise": guarantee.noise_multiplier,
        "bits": protocol.messages(DIM),
        "caveat": guarantee.caveats[0],
    }


def run(settings: Settings) -> Outcome:
    """Moments of the protocol; then whole runs with and without a shuffler."""
    trials = 100 if settings.quick else 1000
    with settings.console.status("vector protocol"):
        bias, share, above = moments(2000 if settings.quick else 20_000)
        work = [(e, 0.0) for e in EPSILONS] + [(1.0, 1.0)]
        rows = [one_pass(e, u, trials, seed) for seed, (e, u) in enumerate(work)]
    alike, apart = rows[1], rows[-1]
    claims = [
        Claim(
            "the protocol is unbiased: largest bias over its standard error",
            round(bias, 2),
            "<= 4",
            bias <= 4.0,
            f"{DIM} coordinates; false-alarm rate 5e-4",
            source="paper",
        ),
        near(
            "variance of a coordinate over its formula (rounding at most)",
            share,
            1.0,
            0.1,
            source="arithmetic",
        ),
        Claim(
            "at least the binomial noise, (2L/g)^2 N' b p (1-p)",
            round(above, 3),
            ">= 0.93",
            above >= 0.93,
            source="arithmetic",
        ),
        Claim(
            "the calibrated bits spend no more than asked for",
            [round(r["spent"], 3) for r in rows],
            [r["epsilon"] for r in rows],
            all(r["spent"] <= r["epsilon"] for r in rows),
            source="ours",
        ),
        Claim(
            "one pass: with a shuffler the risk is lower at the smallest epsilon, and nowhere more "
            "than 10 % higher",
            [float(f"{r['shuffle'] / r['isrl']:.3g}") for r in rows],
            "< 1, then <= 1.1",
            all(r["shuffle"] <= 1.1 * r["isrl"] for r in rows)
            and rows[0]["shuffle"] < rows[0]["isrl"],
            source="ours",
        ),
        Claim(
            "the risk is below the bound of the step weights",
            f"{sum(r['shuffle'] <= r['bound'] for r in rows)} of {len(rows)}",
            f"{len(rows)} of {len(rows)}",
            all(r["shuffle"] <= r["bound"] for r in rows),
            source="arithmetic",
        ),
        near(
            "heterogeneity does not matter when all silos answer (upsilon 1 over 0)",
            apart["shuffle"] / alike["shuffle"],
            1.0,
            0.25,
            source="paper",
        ),
    ]
    file = settings.out / "isrl-vector-protocol.png"
    _draw(rows[: len(EPSILONS)], file)
    return Outcome(
        claims,
        [file],
        rows,
        [
            f"N = {SILOS}, n = {BATCH * ROUNDS}, K = {BATCH}, R = {ROUNDS}, d = {DIM}, {trials} "
            "trials; the same epsilon, but a weaker adversary with a shuffler",
            "P_vec is corrected: coordinates lie in [-L, L], so that their range is 2 L, and the "
            "sum is centred again by L for every report",
            alike["caveat"],
        ],
    )


def _draw(rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file, size=(5, 4)) as ax:
        for name, label in (("isrl", "ISRL-DP"), ("shuffle", "shuffle model")):
            ax.loglog(*columns(rows, "epsilon", name), "o-", label=label)
        ax.set(xlabel="epsilon", ylabel="excess risk")
