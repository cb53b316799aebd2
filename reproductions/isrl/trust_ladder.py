"""Who is trusted, and what it costs: mean estimation under every notion, against N and n."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.federation.isrl import Budget, MessageSpec, SiloData
from dpfl_jax.federation.isrl.privacy import silo_noise
from dpfl_jax.federation.isrl.schedule import Schedule
from reproductions._plots import columns, panel
from reproductions.isrl._baselines import alone, central_noise, make_central_oracle
from reproductions.isrl._shuffle_protocol import calibrate_protocol, make_vector_oracle
from reproductions.isrl._synthetic import (
    drawn,
    oracle_of,
    quadratic,
    repeated,
    rows_of,
)
from reproductions.isrl.rates import slope
from reproductions.registry import Claim, Outcome, Settings, within

TITLE = "the price of trusting nobody: silo alone, local, ISRL-DP, shuffle, central, none"
SOURCE = "Lowy and Razaviyayn 2023, figure 3, Theorems 2.1, 2.2, 5.1 and D.6 (strongly convex)"

DIM, CLIP, SPREAD = 4, 1.0, 0.25  # records are corners of a cube: |x| = 1/2, no clipping at w = 0
BUDGET = Budget(1.0, 1e-6)
BASE = {"silos": 16, "n": 64}
SWEEPS = {"silos": (4, 16, 64), "n": (32, 64, 128, 256)}
# Slope of the excess *empirical* risk (the price of privacy) in N and in n. A bit protocol rounds,
# so that shuffling is a little off.
SLOPES = {
    "silo alone": (0.0, -2.0),
    "local": (-1.0, -1.0),
    "ISRL-DP": (-1.0, -2.0),
    "shuffle": (-2.0, -2.0),
    "central": (-2.0, -2.0),
}

Oracle = Callable[[jax.Array, Any], jax.Array]


def schedule_of(data: SiloData) -> Schedule:
    """One round of all records."""
    silos, n = data.num_silos, data.capacity
    row = rows_of(jnp.asarray(0), 1, silos)
    rank = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (silos, n))
    return Schedule(row["present"], row["turn"], row["keys"], rank)


def makers(silos: int, n: int) -> dict[str, tuple[Callable[[SiloData], Oracle], int]]:
    """Notion -> (data -> oracle of one full-batch round, silos that the oracle sees)."""
    multiplier = silo_noise(BUDGET, n, n, 1, sampling="full").noise_multiplier
    central = central_noise(BUDGET, [n] * silos, [n] * silos, 1, sampling="full").noise_multiplier
    protocol = calibrate_protocol(BUDGET.epsilon, BUDGET.delta, silos * n, DIM, CLIP, levels=16)
    schedule = schedule_of(drawn(jnp.asarray(0), jnp.zeros((silos, DIM)), n, SPREAD))

    def isrl(data: SiloData) -> Oracle:
        noise = np.full(data.num_silos, multiplier)
        return oracle_of(data, "full", data.capacity, CLIP, noise)

    def local(data: SiloData) -> Oracle:
        # Every record is a silo of its own, with the noise of a sum of one.
        x = data.examples["x"].reshape(-1, 1, DIM)
        one = SiloData({"x": x}, jnp.ones(len(x), jnp.int32))
        return oracle_of(one, "full", 1, CLIP, np.full(len(x), multiplier))

    def trusted(data: SiloData) -> Oracle:
        return make_central_oracle(
            quadratic,
            MessageSpec("full"),
            data,
            batch=jnp.full(silos, float(n)),
            clip_norm=CLIP,
            noise_multiplier=central,
        )

    def shuffled(data: SiloData) -> Oracle:
        return make_vector_oracle(quadratic, data, schedule, protocol, batch=n, cohort=silos)

    return {
        "silo alone": (lambda data: isrl(alone(data, 0)), 1),
        "local": (local, silos * n),
        "ISRL-DP": (isrl, silos),
        "shuffle": (shuffled, silos),
        "central": (trusted, silos),
    }


def prices(silos: int, n: int, trials: int) -> dict[str, np.ndarray]:
    """Notion -> excess empirical risk (the price of privacy), population risk, and its floor."""
    made = makers(silos, n)

    def one(s: jax.Array) -> jax.Array:
        data, start = drawn(s, jnp.zeros((silos, DIM)), n, SPREAD), jnp.zeros(DIM)
        found = []
        for maker, seen in made.values():
            row = jax.tree.map(lambda x: x[0], rows_of(s, 1, seen))
            w = start - maker(data)(start, row)
            used = alone(data, 0) if seen == 1 else data
            best = used.examples["x"].mean((0, 1))
            found.append(jnp.stack([jnp.sum(jnp.square(v)) for v in (w - best, w, best)]))
        return 0.5 * jnp.stack(found)

    return dict(zip(made, repeated(one)(trials, 1).mean(0), strict=True))


def run(settings: Settings) -> Outcome:
    """Sweeps the number of silos, and of records, for every notion."""
    from rich.progress import track

    trials = 100 if settings.quick else 2000
    points = [(name, value) for name, values in SWEEPS.items() for value in values]
    rows: list[dict[str, Any]] = []
    for name, value in track(points, "trust", console=settings.console):
        setting = BASE | {name: value}
        for notion, (empirical, population, floor) in prices(**setting, trials=trials).items():
            rows.append(
                {
                    "varied": name,
                    "value": value,
                    "notion": notion,
                    "private_risk": float(empirical),
                    "risk": float(population),
                    "floor": float(floor),
                }
            )
    claims = _claims(rows)
    file = settings.out / "isrl-trust-ladder.png"
    _draw(rows, file)
    return Outcome(
        claims,
        [file],
        rows,
        [
            f"epsilon {BUDGET.epsilon:g}, delta {BUDGET.delta:g} for every record in every notion; "
            f"one full round, d = {DIM}, {trials} trials a point",
            "shuffle is P_vec with numerically calibrated bits; local lets each record be a silo",
        ],
    )


def _claims(rows: list[dict[str, Any]]) -> list[Claim]:
    claims = []
    for notion, expected in SLOPES.items():
        for name, want in zip(SWEEPS, expected, strict=True):
            part = [r for r in rows if (r["notion"], r["varied"]) == (notion, name)]
            found = slope([r["value"] for r in part], [r["private_risk"] for r in part])
            claims.append(
                within(
                    f"{notion}: price of privacy against {'N' if name == 'silos' else 'n'}, slope",
                    found,
                    want,
                    0.25,
                    "within 0.25; the theorems' rates",
                    source="ours" if notion == "silo alone" else "paper",
                )
            )
    for name in SWEEPS:
        part = [r for r in rows if (r["notion"], r["varied"]) == ("central", name)]
        found = slope([r["value"] for r in part], [r["floor"] for r in part])
        claims.append(
            within(
                f"no privacy: risk against {'N' if name == 'silos' else 'n'}, slope",
                found,
                -1.0,
                0.25,
                source="arithmetic",
            )
        )
    last = {r["notion"]: r["private_risk"] for r in rows if r["value"] == SWEEPS["silos"][-1]}
    order = ["local", "ISRL-DP", "shuffle", "central"]
    falling = [last[k] for k in order]
    claims.append(
        Claim(
            f"with {SWEEPS['silos'][-1]} silos, trust pays: local > ISRL > shuffle > central",
            [float(f"{v:.2g}") for v in falling],
            "falling",
            all(more > less for more, less in itertools.pairwise(falling)),
            source="paper",
        )
    )
    return claims


def _draw(rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file, 1, 2, size=(9, 3.6)) as axes:
        for ax, name in zip(axes, SWEEPS, strict=True):
            for notion in SLOPES:
                part = [r for r in rows if (r["notion"], r["varied"]) == (notion, name)]
                ax.loglog(*columns(part, "value", "private_risk"), "o-", label=notion)
            part = [r for r in rows if (r["notion"], r["varied"]) == ("central", name)]
            ax.loglog(*columns(part, "value", "floor"), "k--", label="no privacy")
            ax.set(xlabel="silos" if name == "silos" else "records of a silo", ylabel="excess risk")
