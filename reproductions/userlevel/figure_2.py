"""Noise of ELS and ULS at equal compute (Figure 2 and Appendix B, Figure 9)."""

from __future__ import annotations

from typing import Any

from dpfl_jax.planning import Planner, Sensitivities, UserStatistics
from reproductions._plots import panel, ticks
from reproductions.registry import Claim, Outcome, Settings

TITLE = "noise of ELS and ULS at equal compute"
SOURCE = "Charles et al. 2024, section 3, Figure 2; Appendix B, Figure 9 at a cohort size of 16"

USERS, PER_USER, STEPS, DELTA, COHORT = 1024, 32, 1000, 1e-6, 16
GROUPS = (1, 2, 4, 8, 16, 32)
BUDGETS = {
    1.0: (16, 32, 64, 128, 256, 512),
    4.0: (16, 64, 512),
    16.0: (16, 32, 64, 512),
}


def planner(epsilon: float, decay: float) -> Planner:
    """Users alike, with K examples each."""
    groups = [2**k for k in range(6)]
    users = UserStatistics(USERS, limited={g: USERS * g for g in groups})
    return Planner(
        users, Sensitivities.assumed(decay, groups), epsilon=epsilon, delta=DELTA, steps=STEPS
    )


def run(settings: Settings) -> Outcome:
    """Computes both panels."""
    claims: list[Claim] = []
    rows: list[dict[str, Any]] = []
    with settings.console.status("calibrating"):
        base = planner(1.0, 0.0)
        flat = {group: base.option("els", group, 64).noise_multiplier for group in GROUPS}
        spread = max(flat.values()) / min(flat.values()) - 1
        claims.append(
            Claim(
                "2(a): if all users have K examples, ELS's noise hardly depends on its group size "
                "(spread over G = 1 to 32)",
                f"{spread:.2%}",
                "<= 1%",
                spread <= 0.01,
                "at epsilon 1; 1 % would hardly be seen in its plot",
                source="paper",
            )
        )
        for epsilon, budgets in BUDGETS.items():
            same, orthogonal = planner(epsilon, 0.0), planner(epsilon, 0.5)
            for budget in budgets:
                group = budget // COHORT
                rows.append(
                    {
                        "epsilon": epsilon,
                        "budget": budget,
                        "els": same.option("els", PER_USER, budget).noise,
                        "uls_same": same.option("uls", group, COHORT).noise,
                        "uls_orthogonal": orthogonal.option("uls", group, COHORT).noise,
                    }
                )
    claims += _order(rows)
    file = settings.out / "userlevel-figure-2.png"
    _draw(flat, rows, file)
    rows += [{"group_size": g, "noise_multiplier": z} for g, z in flat.items()]
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
            source="paper",
        ),
        Claim(
            "with orthogonal gradients ULS has less noise at epsilon 1, at every budget",
            f"{sum(strict)} of {len(strict)}",
            f"{len(strict)} of {len(strict)}",
            all(strict),
            source="paper",
        ),
        Claim(
            "the curves cross: at epsilon 16 ELS has less at small groups, and ULS at large ones",
            f"ELS at B = {exceptions}",
            "some budgets, the smaller ones",
            bool(exceptions) and max(exceptions) < max(BUDGETS[16.0]),
            source="paper",
        ),
    ]


def _draw(flat: dict[int, float], rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file, 1, 2, size=(11, 4)) as axes:
        axes[0].plot(list(flat), list(flat.values()), "o-")
        axes[0].set(
            xlabel="ELS group size",
            ylabel="noise multiplier",
            ylim=(0, 10),
            title="B = 64, epsilon 1",
        )
        ticks(axes[0], GROUPS, base=2)
        for k, epsilon in enumerate(sorted({r["epsilon"] for r in rows})):
            part = [r for r in rows if r["epsilon"] == epsilon]
            x = [r["budget"] for r in part]
            for key, name, style in (
                ("els", "ELS", "-"),
                ("uls_same", "ULS, equal gradients", "--"),
                ("uls_orthogonal", "ULS, orthogonal", ":"),
            ):
                y = [r[key] for r in part]
                axes[1].loglog(x, y, style, color=f"C{k}", label=f"{name}, epsilon {epsilon:g}")
        ticks(axes[1], BUDGETS[1.0], base=2)
        axes[1].set(xlabel="compute budget B", ylabel="noise / L_ELS", title="M = 16")
