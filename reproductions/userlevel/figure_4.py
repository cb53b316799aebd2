"""ELS in small: held-out loss over the group size (Figures 4, 11, 12)."""

from __future__ import annotations

from typing import Any

from reproductions._plots import band, columns, panel, ticks
from reproductions.registry import Claim, Outcome, Settings, less
from reproductions.userlevel import _small_lm as small

TITLE = "ELS: held-out loss over the group size, and the median heuristic"
SOURCE = "Charles et al. 2024, section 6, Figure 4; Appendix E, Figures 11 and 12"
OPTIONS = small.OPTIONS
NEAR = 0.1  # of the gain over pre-training: what is called near the best


def run(settings: Settings) -> Outcome:
    """Sweeps group sizes at several budgets and epsilons."""
    median = small.median(settings.quick)
    groups = sorted({1, 8, 512, median})
    points = [(b, e) for b in (128, 512) for e in (2.0, 16.0)]
    if settings.quick:
        groups, points = sorted({8, median}), [(256, 4.0)]
    cells = [(b, e, g) for b, e in points for g in groups]
    options = [small.planner(settings.quick, e).option("els", g, b) for b, e, g in cells]
    swept = small.sweep(settings, options)
    losses = dict(zip(cells, swept.losses, strict=True))
    initial = small.initial_loss(settings.quick)
    claims: list[Claim] = []
    for budget, epsilon in points:
        part = {g: losses[budget, epsilon, g] for g in groups}
        best = min(part, key=lambda g: part[g].mean())
        claims.append(
            less(
                f"B = {budget}, epsilon {epsilon:g}: the median group size ({median}) is near-best",
                part[median],
                part[best],
                f"loss above that of G = {best}; near: {NEAR:.0%} of the gain over pre-training",
                source="paper",
                room=NEAR * max(0.0, initial - float(part[best].mean())),
            )
        )
    claims += [
        small.better_than_before(f"B = {b}, epsilon {e:g}, G = {g}", found, initial)
        for (b, e, g), found in losses.items()
    ]
    rows = [
        small.row(option, losses[cell], budget=cell[0], epsilon=cell[1])
        for cell, option in zip(cells, options, strict=True)
    ]
    file = settings.out / "userlevel-figure-4.png"
    _draw(rows, points, median, file)
    return Outcome(claims, [file], rows, [small.NOTE, small.SEED_NOTE], swept.tried)


def _draw(rows: list[dict[str, Any]], points: Any, median: int, file: Any) -> None:
    with panel(file) as ax:
        for budget, epsilon in points:
            part = [r for r in rows if (r["budget"], r["epsilon"]) == (budget, epsilon)]
            label = f"B = {budget}, epsilon {epsilon:g}"
            band(ax, *columns(part, "group_size", "losses"), label=label)
        ax.axvline(median, color="grey", linestyle=":", label="median (power of two)")
        ticks(ax, sorted({r["group_size"] for r in rows}), base=2)
        ax.set(xlabel="ELS group size", ylabel="held-out loss")
