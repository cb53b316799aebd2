"""ULS in small: heat map over group and cohort size, and the strategies of Appendix F."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from dpfl_jax.planning import Planner, estimate_and_double
from reproductions._plots import panel, ticks
from reproductions.registry import Claim, Outcome, Settings, Source, less
from reproductions.userlevel import _small_lm as small

TITLE = "ULS: held-out loss over group and cohort size; how good the planner's choice is"
SOURCE = "Charles et al. 2024, section 6, Figure 5; Appendix F, Figures 13 to 15"

GROUPS, COHORTS = (1, 2, 4, 8, 16), (32, 64, 128, 256, 512)
OPTIONS = small.OPTIONS
EPSILON = 4.0
NEAR = 0.1  # of the gain over pre-training: what is called near the best

Heat = dict[tuple[int, int], float]


def run(settings: Settings) -> Outcome:
    """Sweeps (G, M), then walks over the heat map as each strategy would."""
    groups, cohorts = (GROUPS[::2], (8, 32, 128)) if settings.quick else (GROUPS, COHORTS)
    planner = small.planner(settings.quick, EPSILON)
    step = cohorts[1] // cohorts[0]
    # Larger ones have nothing to be compared with: the best of a budget is on its diagonal.
    cells = [(g, m) for g in groups for m in cohorts if g * m <= groups[-1] * cohorts[-1] // step]
    options = [planner.option("uls", *cell) for cell in cells]
    swept = small.sweep(settings, options)
    losses = dict(zip(cells, swept.losses, strict=True))
    rows = [small.row(o, losses[c], cohort_size=o.size) for o, c in zip(options, cells)]
    counts = collections.Counter(g * m for g, m in cells)
    budgets = sorted(b for b, count in counts.items() if count > 1)  # one cell is no choice
    # Of each seed: what a strategy chooses may follow that seed's losses.
    seeds = small.seeds(settings)
    heats = [{cell: float(v[k]) for cell, v in losses.items()} for k in range(seeds)]
    regrets = {
        name: {b: np.array([_regret(h, b, name, planner, step) for h in heats]) for b in budgets}
        for name in STRATEGIES
    }
    regret = {n: {b: float(v.mean()) for b, v in of.items()} for n, of in regrets.items()}
    table = [
        {"strategy": name, "mean_regret": float(np.mean(list(found.values()))), **found}
        for name, found in regret.items()
    ]
    figure = settings.out / "userlevel-figure-5.png"
    _draw(losses, figure)
    curves = settings.out / "userlevel-figure-14.png"
    _draw_regret(regret, curves)
    notes = [
        small.NOTE,
        small.SEED_NOTE,
        "regret: loss of the strategy's cell over the best cell of the same budget, minus one; "
        "Random is the mean over its cells",
        "Estimate-and-Double compares L(2G) / L(G) with sigma(2M) / (2 sigma(M)): the paper leaves "
        "out the 1/M (section 6, (9) to (11), Algorithm 3), and means it, as a larger M lowers the "
        "noise",
    ]
    claims = _claims(losses, regrets, budgets, small.initial_loss(settings.quick))
    return Outcome(claims, [figure, curves], [*rows, *table], notes, swept.tried)


def _cells(heat: Heat, budget: int) -> Heat:
    return {cell: loss for cell, loss in heat.items() if cell[0] * cell[1] == budget}


def _doubling(heat: Heat, budget: int, planner: Planner, literal: bool) -> tuple[int, int]:
    groups, cohorts = {g for g, _ in heat}, {m for _, m in heat}
    found = estimate_and_double(
        planner.sensitivities.at,
        lambda cohort: planner.option("uls", 1, cohort).noise_multiplier,
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
    return min(_cells(heat, budget), key=lambda cell: planner.option("uls", *cell).noise)


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


def _claims(
    losses: dict[tuple[int, int], np.ndarray],
    regret: dict[str, dict[int, np.ndarray]],
    budgets: list[int],
    initial: float,
) -> list[Claim]:
    mean = {name: np.mean(list(found.values()), axis=0) for name, found in regret.items()}
    at = {b: {c: v for c, v in losses.items() if c[0] * c[1] == b} for b in budgets}
    best = {b: min(cells, key=lambda c: cells[c].mean()) for b, cells in at.items()}
    cells, chosen = at[budgets[-1]], best[budgets[-1]]
    federated = max(cells, key=lambda c: c[0])
    gain = initial / float(cells[chosen].mean()) - 1
    seeds = len(cells[chosen])
    claims: list[Claim] = []
    near: tuple[tuple[str, str, Source], ...] = (
        ("planner", "the planner's choice", "ours"),
        ("estimate-and-double", "that of Estimate-and-Double", "paper"),
    )
    for name, words, source in near:
        claims += [
            less(
                f"budget {b}: {words} is near the best cell",
                regret[name][b],
                np.zeros(seeds),
                f"loss above the best cell's, relative; near: {NEAR:.0%} of the gain",
                source=source,
                room=NEAR * max(gain, 0.0),
            )
            for b in budgets
        ]
    claims.append(
        less(
            "Estimate-and-Double is as good on average as the greedy oracle",
            mean["estimate-and-double"],
            mean["greedy oracle"],
            f"mean regret over budgets; as good: within {NEAR:.0%} of the gain",
            source="paper",
            room=NEAR * max(gain, 0.0),
        )
    )
    claims += [
        less(
            f"Estimate-and-Double is better on average than {name}",
            mean["estimate-and-double"],
            mean[name],
            "mean regret over budgets"
            + "; both choose the same cells"
            * bool((mean["estimate-and-double"] == mean[name]).all()),
            source="ours",
        )
        for name in ("random", "max group", "max cohort")
    ]
    same = float(np.abs(mean["as printed"] - mean["max group"]).max())
    claims += [
        Claim(
            "as printed (sigma for sigma / M) it is the Max Group Size strategy",
            f"regrets differ by {same:.2g}",
            "the same regret",
            same <= 1e-9,
            source="ours",
        ),
        Claim(
            "at every budget compared the best group is at least 10 times smaller than the cohort",
            "; ".join(f"G = {g}, M = {m} of {len(at[g * m])} cells" for g, m in best.values()),
            "M >= 10 G",
            all(m >= 10 * g for g, m in best.values()),
            source="paper",
            seeds=seeds,
        ),
        less(
            f"G = {chosen[0]}, M = {chosen[1]} is better than large groups with a small cohort, "
            f"G = {federated[0]}, M = {federated[1]}, as in federated practice",
            cells[chosen],
            cells[federated],
            source="paper",
        ),
    ]
    return claims


def _draw(losses: dict[tuple[int, int], np.ndarray], file: Any) -> None:
    groups, cohorts = (sorted({cell[k] for cell in losses}) for k in range(2))
    image = np.full((len(groups), len(cohorts)), np.nan)
    with panel(file, size=(5.5, 4)) as ax:
        for (group, cohort), found in losses.items():
            place = groups.index(group), cohorts.index(cohort)
            image[place] = found.mean()
            box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1.5}
            text = f"{image[place]:.3f}"
            ax.text(*place[::-1], text, ha="center", va="center", size=8, bbox=box, zorder=3)
        shown = ax.imshow(image, origin="lower", cmap="viridis_r", aspect="auto", zorder=2)
        ax.set_xticks(range(len(cohorts)), [str(m) for m in cohorts])
        ax.set_yticks(range(len(groups)), [str(g) for g in groups])
        ax.set(xlabel="cohort size M", ylabel="group size G")
        ax.figure.colorbar(shown, label="held-out loss")


def _draw_regret(regret: dict[str, dict[int, float]], file: Any) -> None:
    with panel(file, size=(6.5, 4)) as ax:
        for k, (name, found) in enumerate(regret.items()):
            # Rings within one another: several strategies choose the same cells.
            style = {"marker": "o", "markersize": 13 - 1.6 * k, "markerfacecolor": "none"}
            ax.plot(list(found), [100 * v for v in found.values()], label=name, **style)
        ticks(ax, list(regret["planner"]), base=2)
        ax.set(xlabel="compute budget B", ylabel="loss above the best cell, %")
