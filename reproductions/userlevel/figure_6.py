"""ELS and ULS in small over epsilon and compute, with the heuristics' sizes (Figures 6, 7, 16)."""

from __future__ import annotations

from typing import Any

from dpfl_jax.planning import Option
from reproductions._plots import band, panel, ticks
from reproductions.registry import Claim, Outcome, Settings, less
from reproductions.userlevel import _small_lm as small

TITLE = "ELS against ULS: held-out loss over epsilon and compute budget"
SOURCE = "Charles et al. 2024, section 6, Figure 6; Appendix G.1, Figure 16"
OPTIONS = small.OPTIONS
HEURISTIC = "ELS has the group size of the paper's heuristic, not the best of its group sizes"


def run(settings: Settings) -> Outcome:
    """Sweeps epsilon and budget for both, at the group sizes of the heuristics."""
    epsilons, budgets = (
        ([4.0], [64, 512]) if settings.quick else ([1.0, 4.0, 16.0], [64, 256, 1024])
    )
    median = small.median(settings.quick)
    points = [(b, e) for b in budgets for e in epsilons]
    options: dict[tuple[str, int, float], Option] = {}
    for b, e in points:
        planner = small.planner(settings.quick, e)
        options["els", b, e] = planner.option("els", median, b)
        options["uls", b, e] = small.least_noise(planner, b)
    swept = small.sweep(settings, list(options.values()))
    losses = dict(zip(options, swept.losses, strict=True))
    initial = small.initial_loss(settings.quick)
    rows = [
        small.row(option, losses[kind, b, e], budget=b, epsilon=e)
        for (kind, b, e), option in options.items()
    ]
    loss = {key: float(found.mean()) for key, found in losses.items()}
    ahead = [loss["uls", b, e] <= loss["els", b, e] for b, e in points]
    low, high = budgets[0], budgets[-1]
    claims: list[Claim] = [
        less(
            f"ULS is at least as good as ELS: B = {b}, epsilon {e:g}",
            losses["uls", b, e],
            losses["els", b, e],
            f"in means over seeds in {sum(ahead)} of {len(ahead)} settings; the paper: "
            "in all (Stack Overflow), in many (CC-News)",
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
        + ", ".join(
            f"{options['uls', b, e].group_size} (B = {b}, epsilon {e:g})" for b, e in points
        ),
        HEURISTIC,
    ]
    return Outcome(claims, [file], rows, notes, swept.tried)


def _draw(
    losses: Any, budgets: list[int], epsilons: list[float], initial: float, file: Any
) -> None:
    with panel(file, 1, len(epsilons), size=(4.5 * len(epsilons), 4), squeeze=False) as grid:
        for ax, epsilon in zip(grid[0], epsilons, strict=True):
            for kind, style in (("els", "--"), ("uls", "-")):
                y = [losses[kind, budget, epsilon] for budget in budgets]
                band(ax, budgets, y, linestyle=style, label=kind.upper())
            ticks(ax, budgets, base=2)
            ax.axhline(initial, color="black", linestyle=":", label="pre-trained")
            ax.set(xlabel="compute budget B", ylabel="held-out loss", title=f"epsilon {epsilon:g}")
