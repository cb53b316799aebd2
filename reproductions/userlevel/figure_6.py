"""ELS and ULS in small over epsilon and compute, with the heuristics' sizes (Figures 6, 7, 16)."""

from __future__ import annotations

from typing import Any

from reproductions._plots import band, panel, ticks
from reproductions.registry import Claim, Outcome, Settings, less
from reproductions.userlevel import _small_lm as small

TITLE = "ELS against ULS: held-out loss over epsilon and compute budget"
SOURCE = "Charles et al. 2024, section 5, Figures 6 and 7; Appendix G, Figures 16 and 17"
OPTIONS = small.OPTIONS


def run(settings: Settings) -> Outcome:
    """Sweeps epsilon and budget for both, at the group sizes of the heuristics."""
    epsilons, budgets = (
        ([4.0], [64, 512]) if settings.quick else ([1.0, 4.0, 16.0], [64, 256, 1024])
    )
    median = small.median(settings.quick)
    axes: dict[str, Any] = {"budget": budgets, "epsilon": epsilons}
    rows = small.cells(settings, "els", median, axes)
    groups: dict[tuple[int, float], int] = {}
    for epsilon in epsilons:
        planner = small.planner(settings.quick, epsilon)
        for budget in budgets:
            group = small.least_noise(planner, budget).group_size
            groups[budget, epsilon] = group
            cell: dict[str, Any] = {"budget": [budget], "epsilon": [epsilon]}
            rows += small.cells(settings, "uls", group, cell)
    initial = small.initial_loss(settings.quick)
    losses = small.by_seed(rows, "kind", "budget", "epsilon")
    rows = small.mean_of(rows)
    loss = {key: float(found.mean()) for key, found in losses.items()}
    points = [(b, e) for b in budgets for e in epsilons]
    ahead = [loss["uls", b, e] <= loss["els", b, e] for b, e in points]
    low, high = budgets[0], budgets[-1]
    claims: list[Claim] = [
        less(
            f"ULS is at least as good as ELS: B = {b}, epsilon {e:g}",
            losses["uls", b, e],
            losses["els", b, e],
            f"in means over seeds in {sum(ahead)} of {len(ahead)} settings; the paper: in most",
            source="paper",
        )
        for b, e in points
    ]
    claims += [
        less(
            f"ULS gains more from compute than ELS, epsilon {e:g}",
            losses["els", low, e] - losses["els", high, e],
            losses["uls", low, e] - losses["uls", high, e],
            f"fall of the loss from B = {low} to {high}, of ELS minus that of ULS",
            source="paper",
        )
        for e in epsilons
    ]
    claims += [
        small.better_than_before(f"{kind.upper()}, B = {b}, epsilon {e:g}", found, initial)
        for (kind, b, e), found in losses.items()
    ]
    file = settings.out / "userlevel-figure-6.png"
    _draw(losses, budgets, epsilons, initial, file)
    notes = [
        small.NOTE,
        small.SEED_NOTE,
        f"ELS group size {median} (the median); of ULS the planner's: "
        + ", ".join(f"{g} (B = {b}, epsilon {e:g})" for (b, e), g in groups.items()),
    ]
    return Outcome(claims, [file], rows, notes)


def _draw(
    losses: Any, budgets: list[int], epsilons: list[float], initial: float, file: Any
) -> None:
    with panel(file) as ax:
        for k, budget in enumerate(budgets):
            for kind, style in (("els", "--"), ("uls", "-")):
                y = [losses[kind, budget, e] for e in epsilons]
                label = f"{kind.upper()}, B = {budget}"
                band(ax, epsilons, y, linestyle=style, color=f"C{k}", label=label)
        ticks(ax, epsilons)
        ax.axhline(initial, color="black", linestyle=":", label="pre-trained")
        ax.set(xlabel="epsilon", ylabel="held-out loss")
