"""Noise of ELS and ULS at equal compute (Figure 2 and Appendix B, Figure 9)."""

from __future__ import annotations

from typing import Any

from dpfl_jax.planning import Planner, Sensitivities, Users
from reproductions._plots import panel
from reproductions.registry import Claim, Outcome, Settings, near

TITLE = "noise of ELS and ULS at equal compute"
SOURCE = "Charles et al. 2024, section 3, Figure 2; Appendix B, Figure 9"

USERS, PER_USER, STEPS, DELTA, COHORT = 1024, 32, 1000, 1e-6, 16
# Figure 2(a), sigma_ELS at B = 64, epsilon 1, computed independently on a grid of 1e-3.
FLAT = {1: 8.449, 2: 8.454, 4: 8.455, 8: 8.456, 16: 8.457, 32: 8.457}
# Noise standard deviation over L_ELS: ELS, ULS with the same L, ULS with orthogonal gradients.
TABLE = {
    1.0: {
        16: (0.1419, 0.1415, 0.1415),
        32: (0.1345, 0.1415, 0.1001),
        64: (0.1322, 0.1415, 0.0708),
        128: (0.1314, 0.1415, 0.0500),
        256: (0.1310, 0.1415, 0.0354),
        512: (0.1309, 0.1415, 0.0250),
    },
    4.0: {
        16: (0.0601, 0.0581, 0.0581),
        64: (0.0396, 0.0581, 0.0290),
        512: (0.0371, 0.0581, 0.0103),
    },
    16.0: {
        16: (0.0379, 0.0348, 0.0348),
        32: (0.0235, 0.0348, 0.0246),
        64: (0.0162, 0.0348, 0.0174),
        512: (0.0116, 0.0348, 0.0062),
    },
}


def planner(epsilon: float, decay: float) -> Planner:
    """Users alike, with K examples each."""
    groups = [2**k for k in range(6)]
    users = Users(USERS, limited={g: USERS * g for g in groups})
    return Planner(
        users, Sensitivities.assumed(decay, groups), epsilon=epsilon, delta=DELTA, steps=STEPS
    )


def run(settings: Settings) -> Outcome:
    """Computes both panels."""
    claims: list[Claim] = []
    rows: list[dict[str, Any]] = []
    with settings.console.status("calibrating"):
        base = planner(1.0, 0.0)
        flat = {group: base.els(group, 64).noise_multiplier for group in FLAT}
        spread = max(flat.values()) / min(flat.values()) - 1
        claims.append(
            Claim(
                "2(a): ELS's noise hardly depends on its group size (spread over G = 1 to 32)",
                f"{spread:.2%}",
                "<= 0.3%",
                spread <= 0.003,
            )
        )
        claims += [
            near(f"2(a): noise multiplier of ELS, G = {g}", flat[g], known, 0.01)
            for g, known in FLAT.items()
        ]
        for epsilon, table in TABLE.items():
            same, orthogonal = planner(epsilon, 0.0), planner(epsilon, 0.5)
            for budget, known in table.items():
                group = budget // COHORT
                found = (
                    same.els(PER_USER, budget).noise,
                    same.uls(group, COHORT).noise,
                    orthogonal.uls(group, COHORT).noise,
                )
                rows.append(
                    {
                        "epsilon": epsilon,
                        "budget": budget,
                        "els": found[0],
                        "uls_same": found[1],
                        "uls_orthogonal": found[2],
                    }
                )
                worst = max(abs(a / b - 1) for a, b in zip(found, known, strict=True))
                claims.append(
                    Claim(
                        f"2(b): epsilon {epsilon:g}, B = {budget}: ELS, ULS same L, ULS orthogonal",
                        tuple(round(v, 4) for v in found),
                        known,
                        worst <= 0.01,
                        f"within 1 %; off by {worst:.2%}",
                    )
                )
    claims += _order(rows)
    file = settings.out / "userlevel-figure-2.png"
    _draw(flat, rows, file)
    return Outcome(claims, [file], rows, ["noise is a standard deviation over L_ELS"])


def _order(rows: list[dict[str, Any]]) -> list[Claim]:
    same = [r["els"] <= r["uls_same"] for r in rows if r["budget"] > COHORT]
    strict = [r["uls_orthogonal"] < r["els"] for r in rows if r["epsilon"] == 1.0]
    exceptions = [
        r["budget"]
        for r in rows
        if r["epsilon"] == 16.0 and r["budget"] > COHORT and r["els"] < r["uls_orthogonal"]
    ]
    return [
        Claim(
            "with equal gradients ELS has less noise wherever G_ULS > 1",
            f"{sum(same)} of {len(same)}",
            f"{len(same)} of {len(same)}",
            all(same),
        ),
        Claim(
            "with orthogonal gradients ULS has less noise at epsilon 1, at every budget",
            f"{sum(strict)} of {len(strict)}",
            f"{len(strict)} of {len(strict)}",
            all(strict),
        ),
        Claim(
            "the curves cross: at epsilon 16 and small groups ELS has less even then",
            exceptions,
            [32, 64],
            exceptions == [32, 64],
        ),
    ]


def _draw(flat: dict[int, float], rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file, 1, 2, size=(11, 4)) as axes:
        axes[0].plot(list(flat), list(flat.values()), "o-")
        axes[0].set(
            xscale="log",
            xlabel="ELS group size",
            ylabel="noise multiplier",
            ylim=(0, 10),
            title="B = 64, epsilon 1",
        )
        for k, epsilon in enumerate(sorted({r["epsilon"] for r in rows})):
            part = [r for r in rows if r["epsilon"] == epsilon]
            x = [r["budget"] for r in part]
            for key, style in (("els", "-"), ("uls_same", "--"), ("uls_orthogonal", ":")):
                y = [r[key] for r in part]
                axes[1].loglog(x, y, style, color=f"C{k}", label=f"{key}, epsilon {epsilon:g}")
        axes[1].set(xlabel="compute budget B", ylabel="noise / L_ELS", title="M = 16")
        axes[1].legend(fontsize=7)
