"""ELS in small: held-out loss over the group size (Figures 4, 11, 12)."""

from __future__ import annotations

from typing import Any

from reproductions._plots import columns, panel
from reproductions.registry import Claim, Outcome, Settings
from reproductions.userlevel import _small_lm as small

TITLE = "ELS: held-out loss over the group size, and the median heuristic"
SOURCE = "Charles et al. 2024, section 6, Figure 4; Appendix E, Figures 11 and 12"


def run(settings: Settings) -> Outcome:
    """Sweeps group sizes at several budgets and epsilons."""
    median = small.median(settings.quick)
    groups = sorted({1, 8, 512, median})
    axes: dict[str, Any] = {"budget": [128, 512], "epsilon": [2.0, 16.0]}
    if settings.quick:
        groups, axes = sorted({8, median}), {"budget": [256], "epsilon": [4.0]}
    rows = [row for g in groups for row in small.cells(settings, "els", g, axes)]
    initial = small.initial_loss(settings.quick)
    claims, points = [], sorted({(r["budget"], r["epsilon"]) for r in rows})
    for budget, epsilon in points:
        part = {
            r["group_size"]: r["loss"]
            for r in rows
            if (r["budget"], r["epsilon"]) == (budget, epsilon)
        }
        best = min(part, key=lambda g: part[g])
        claims.append(
            Claim(
                f"B = {budget}, epsilon {epsilon:g}: the median group size ({median}) is near-best",
                f"{part[median]:.4f}; best {part[best]:.4f} at G = {best}",
                "within 2 % of the best",
                part[median] <= 1.02 * part[best],
            )
        )
    worst = max(r["loss"] for r in rows)
    claims.append(
        Claim(
            "fine-tuning with a user-level guarantee beats the pre-trained checkpoint everywhere",
            f"largest loss {worst:.4f}",
            f"below {initial:.4f}",
            worst < initial,
        )
    )
    file = settings.out / "userlevel-figure-4.png"
    _draw(rows, points, median, file)
    return Outcome(claims, [file], rows, [small.NOTE, small.SEED_NOTE])


def _draw(rows: list[dict[str, Any]], points: Any, median: int, file: Any) -> None:
    with panel(file) as ax:
        for budget, epsilon in points:
            part = [r for r in rows if (r["budget"], r["epsilon"]) == (budget, epsilon)]
            x, y = columns(part, "group_size", "loss")
            ax.semilogx(x, y, "o-", base=2, label=f"B = {budget}, epsilon {epsilon:g}")
        ax.axvline(median, color="grey", linestyle=":", label="median (power of two)")
        ax.set(xlabel="ELS group size", ylabel="held-out loss")
        ax.legend(fontsize=8)
