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
OTHER_GROUP = 8  # of ELS, besides the median; figure 4 compares the two


def run(settings: Settings) -> Outcome:
    """Sweeps epsilon and budget for both, ELS at the heuristic's group size and at another."""
    epsilons, budgets = (
        ([4.0], [64, 512]) if settings.quick else ([1.0, 4.0, 16.0], [64, 256, 1024])
    )
    median = small.median(settings.quick)
    arms = {OTHER_GROUP: f"ELS with G = {OTHER_GROUP}"}
    arms[median] = f"ELS with G = {median} (the median)"
    points = [(b, e) for b in budgets for e in epsilons]
    options: dict[tuple[str, int, float], Option] = {}
    for b, e in points:
        planner = small.planner(settings.quick, e)
        for group, arm in arms.items():
            options[arm, b, e] = planner.option("els", group, b)
        options["ULS", b, e] = small.uls(planner, b)
    swept = small.sweep(settings, list(options.values()))
    losses = dict(zip(options, swept.losses, strict=True))
    initial = small.initial_loss(settings.quick)
    rows = [
        small.row(option, losses[arm, b, e], budget=b, epsilon=e)
        for (arm, b, e), option in options.items()
    ]
    low, high = budgets[0], budgets[-1]
    claims: list[Claim] = [
        less(
            f"ULS is at least as good as {arm}: B = {b}, epsilon {e:g}",
            losses["ULS", b, e],
            losses[arm, b, e],
            "the paper: in all settings (Stack Overflow), in many (CC-News)",
            source="paper",
        )
        for b, e in points
        for arm in arms.values()
    ]
    claims += [
        less(
            f"ULS gains more from compute than {arm}, epsilon {e:g}",
            losses[arm, low, e] - losses[arm, high, e],
            losses["ULS", low, e] - losses["ULS", high, e],
            f"fall of the loss from B = {low} to {high}, of ELS minus that of ULS",
            source="paper",
        )
        for e in epsilons
        for arm in arms.values()
    ]
    claims += [
        small.better_than_before(f"{arm}, B = {b}, epsilon {e:g}", found, initial)
        for (arm, b, e), found in losses.items()
    ]
    file = settings.out / "userlevel-figure-6.png"
    _draw(losses, [*arms.values(), "ULS"], budgets, epsilons, initial, file)
    notes = [
        small.NOTE,
        small.SEED_NOTE,
        "group sizes of ULS, by Estimate-and-Double: "
        + ", ".join(
            f"{options['ULS', b, e].group_size} (B = {b}, epsilon {e:g})" for b, e in points
        ),
    ]
    return Outcome(claims, [file], rows, notes, swept.tried)


def _draw(
    losses: Any,
    arms: list[str],
    budgets: list[int],
    epsilons: list[float],
    initial: float,
    file: Any,
) -> None:
    with panel(file, 1, len(epsilons), size=(4.5 * len(epsilons), 4), squeeze=False) as grid:
        for ax, epsilon in zip(grid[0], epsilons, strict=True):
            for arm in arms:
                y = [losses[arm, budget, epsilon] for budget in budgets]
                band(ax, budgets, y, linestyle="-" if arm == "ULS" else "--", label=arm)
            ticks(ax, budgets, base=2)
            ax.axhline(initial, color="black", linestyle=":", label="pre-trained")
            ax.set(xlabel="compute budget B", ylabel="held-out loss", title=f"epsilon {epsilon:g}")
