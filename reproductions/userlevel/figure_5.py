"""ULS in small: heat map over group and cohort size, and the strategies of Appendix F."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from dpfl_jax.planning import Planner, Users, estimate_and_double
from dpfl_jax.planning.sweep import draw
from reproductions._plots import panel
from reproductions.registry import Claim, Outcome, Settings
from reproductions.userlevel import _small_lm as small

TITLE = "ULS: held-out loss over group and cohort size; how good the planner's choice is"
SOURCE = "Charles et al. 2024, section 6, Figure 5; Appendix F, Figures 13 to 15"

GROUPS, COHORTS = (1, 2, 4, 8, 16), (32, 64, 128, 256, 512)
EPSILON = 4.0

Heat = dict[tuple[int, int], float]


def run(settings: Settings) -> Outcome:
    """Sweeps (G, M), then walks over the heat map as each strategy would."""
    groups, cohorts = (GROUPS[::2], COHORTS[::2]) if settings.quick else (GROUPS, COHORTS)
    axes: dict[str, Any] = {"cohort_size": list(cohorts), "epsilon": [EPSILON]}
    rows = [row for g in groups for row in small.cells(settings, "uls", g, axes)]
    heat = {(r["group_size"], r["cohort_size"]): r["loss"] for r in rows}
    planner = _planner(settings.quick)
    step = cohorts[1] // cohorts[0]
    budgets = sorted({g * m for g, m in heat if g * m <= max(cohorts) * max(groups) // step})
    regret = {
        name: {b: _regret(heat, b, name, planner, step) for b in budgets} for name in STRATEGIES
    }
    table = [
        {"strategy": name, "mean_regret": float(np.mean(list(found.values()))), **found}
        for name, found in regret.items()
    ]
    figure = settings.out / "userlevel-figure-5.png"
    draw(rows, ["group_size", "cohort_size"], figure)
    curves = settings.out / "userlevel-figure-14.png"
    _draw_regret(regret, curves)
    notes = [
        small.NOTE,
        small.SEED_NOTE,
        "regret: loss of the strategy's cell over the best cell of the same budget, minus one; "
        "Random is the mean over its cells",
    ]
    return Outcome(_claims(heat, regret, budgets), [figure, curves], [*rows, *table], notes)


def _planner(quick: bool) -> Planner:
    data, _, _, config = small.start(quick)
    sizes = np.diff(data.train.user_offsets)
    return Planner(
        Users(len(sizes), sizes=sizes),
        small.sensitivities(quick),
        epsilon=EPSILON,
        delta=float(sizes.sum()) ** -1.1,
        steps=config.train.steps,
    )


def _cells(heat: Heat, budget: int) -> Heat:
    return {cell: loss for cell, loss in heat.items() if cell[0] * cell[1] == budget}


def _doubling(heat: Heat, budget: int, planner: Planner, literal: bool) -> tuple[int, int]:
    groups, cohorts = {g for g, _ in heat}, {m for _, m in heat}
    found = estimate_and_double(
        planner.sensitivities.at,
        planner.uls_noise_multiplier,
        budget,
        cohort=min(cohorts),
        most_users=max(cohorts),
        largest_group=max(groups),
        literal=literal,
    )
    return found if found in heat else _nearest(heat, budget, found)


def _nearest(heat: Heat, budget: int, wanted: tuple[int, int]) -> tuple[int, int]:
    """Of the cells that were run at this budget, the one with the nearest group size."""
    return min(_cells(heat, budget), key=lambda cell: abs(np.log2(cell[0] / wanted[0])))


def _least_noise(heat: Heat, budget: int, planner: Planner) -> tuple[int, int]:
    return min(_cells(heat, budget), key=lambda cell: planner.uls(*cell).noise)


def _greedy(heat: Heat, budget: int, step: int) -> tuple[int, int]:
    """The paper's oracle: from the smallest cell, multiplies whichever gives the lower loss."""
    group, cohort = min(heat)
    while group * cohort < budget:
        options = [c for c in ((group * step, cohort), (group, cohort * step)) if c in heat]
        group, cohort = min(options, key=lambda c: heat[c])
    return group, cohort


STRATEGIES = (
    "planner",
    "estimate-and-double",
    "as printed",
    "greedy oracle",
    "max cohort",
    "max group",
    "random",
)


def _regret(heat: Heat, budget: int, strategy: str, planner: Planner, step: int) -> float:
    cells = _cells(heat, budget)
    best = min(cells.values())
    if strategy == "random":
        return float(np.mean(list(cells.values()))) / best - 1
    chosen = {
        "planner": lambda: _least_noise(heat, budget, planner),
        "estimate-and-double": lambda: _doubling(heat, budget, planner, literal=False),
        "as printed": lambda: _doubling(heat, budget, planner, literal=True),
        "greedy oracle": lambda: _greedy(heat, budget, step),
        "max cohort": lambda: max(cells, key=lambda c: c[1]),
        "max group": lambda: max(cells, key=lambda c: c[0]),
    }[strategy]()
    return heat[chosen] / best - 1


def _claims(heat: Heat, regret: dict[str, dict[int, float]], budgets: list[int]) -> list[Claim]:
    worst = {name: max(found.values()) for name, found in regret.items()}
    mean = {name: float(np.mean(list(found.values()))) for name, found in regret.items()}
    shown = ", ".join(f"{name} {100 * value:.2f} %" for name, value in mean.items())
    large = budgets[-1]
    best = min(_cells(heat, large), key=lambda c: heat[c])
    federated = max(_cells(heat, large), key=lambda c: c[0])
    return [
        Claim(
            "the planner's choice is near the best cell at every budget",
            f"at most {worst['planner']:.2%} above",
            "within 5 %",
            worst["planner"] <= 0.05,
        ),
        Claim(
            "so is that of Estimate-and-Double (with sigma(2M) / (2 sigma(M)))",
            f"at most {worst['estimate-and-double']:.2%} above",
            "within 5 %",
            worst["estimate-and-double"] <= 0.05,
        ),
        Claim(
            "Estimate-and-Double is better on average than Random and Max Group Size",
            shown,
            "lower mean regret",
            mean["estimate-and-double"] <= min(mean["random"], mean["max group"]),
        ),
        Claim(
            "as printed it is the Max Group Size strategy",
            f"{mean['as printed']:.2%} against {mean['max group']:.2%}",
            "the same regret",
            abs(mean["as printed"] - mean["max group"]) <= 1e-9,
        ),
        Claim(
            f"at the largest budget compared ({large}) the best group is at least 10 times smaller "
            "than the cohort",
            f"G = {best[0]}, M = {best[1]}",
            "M >= 10 G",
            best[1] >= 10 * best[0],
        ),
        Claim(
            "large groups with a small cohort, as in federated practice, lose at equal compute",
            f"G = {federated[0]}, M = {federated[1]}: {heat[federated]:.4f}; best {heat[best]:.4f}",
            "higher loss",
            heat[federated] > heat[best],
        ),
    ]


def _draw_regret(regret: dict[str, dict[int, float]], file: Any) -> None:
    with panel(file, size=(6.5, 4)) as ax:
        shift = random.Random(0)
        for name, found in regret.items():
            x = [b * (1 + 0.03 * shift.random()) for b in found]
            ax.semilogx(x, [100 * v for v in found.values()], "o-", base=2, label=name)
        ax.set(xlabel="compute budget B", ylabel="loss above the best cell, %")
        ax.legend(fontsize=8)
