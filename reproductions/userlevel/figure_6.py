"""ELS and ULS in small over epsilon and compute, with the heuristics' sizes (Figures 6, 7, 16)."""

from __future__ import annotations

from typing import Any

from reproductions._plots import panel
from reproductions.registry import Claim, Outcome, Settings
from reproductions.userlevel import _small_lm as small

TITLE = "ELS against ULS: held-out loss over epsilon and compute budget"
SOURCE = "Charles et al. 2024, section 5, Figures 6 and 7; Appendix G, Figures 16 and 17"


def run(settings: Settings) -> Outcome:
    """Sweeps epsilon and budget for both, at the group sizes of the heuristics."""
    epsilons, budgets = (
        ([4.0], [64, 512]) if settings.quick else ([1.0, 4.0, 16.0], [64, 256, 1024])
    )
    median = small.median(settings.quick)
    axes: dict[str, Any] = {"budget": budgets, "epsilon": epsilons}
    rows = small.cells(settings, "els", median, axes)
    for group in (1, 4):  # the smaller budgets have no use for groups: the cohort comes first
        here = [b for b in budgets if (b >= 512) == (group == 4)]
        rows += small.cells(settings, "uls", group, {**axes, "budget": here}) if here else []
    initial = small.initial_loss(settings.quick)
    loss = {(r["kind"], r["budget"], r["epsilon"]): r["loss"] for r in rows}
    points = [(b, e) for b in budgets for e in epsilons]
    ahead = [loss["uls", b, e] <= loss["els", b, e] for b, e in points]
    gain = {
        kind: [loss[kind, budgets[0], e] - loss[kind, budgets[-1], e] for e in epsilons]
        for kind in ("els", "uls")
    }
    claims = [
        Claim(
            "ULS is at least as good as ELS in most settings",
            f"{sum(ahead)} of {len(ahead)}",
            "more than half",
            sum(ahead) > len(ahead) / 2,
        ),
        Claim(
            "ULS gains more from compute than ELS, at every epsilon",
            {k: [round(v, 4) for v in values] for k, values in gain.items()},
            "larger for uls",
            all(u > e for u, e in zip(gain["uls"], gain["els"])),
            f"fall of the loss from B = {budgets[0]} to {budgets[-1]}, by epsilon",
        ),
        Claim(
            "both beat the pre-trained checkpoint at every epsilon",
            f"largest loss {max(loss.values()):.4f}",
            f"below {initial:.4f}",
            max(loss.values()) < initial,
        ),
    ]
    file = settings.out / "userlevel-figure-6.png"
    _draw(loss, budgets, epsilons, initial, file)
    notes = [small.NOTE, small.SEED_NOTE, f"ELS group size {median} (the median)"]
    return Outcome(claims, [file], rows, notes)


def _draw(loss: Any, budgets: list[int], epsilons: list[float], initial: float, file: Any) -> None:
    with panel(file) as ax:
        for k, budget in enumerate(budgets):
            for kind, style in (("els", "--"), ("uls", "-")):
                y = [loss[kind, budget, e] for e in epsilons]
                label = f"{kind.upper()}, B = {budget}"
                ax.semilogx(epsilons, y, f"o{style}", color=f"C{k}", label=label)
        ax.axhline(initial, color="black", linestyle=":", label="pre-trained")
        ax.set(xlabel="epsilon", ylabel="held-out loss")
        ax.legend(fontsize=8)
