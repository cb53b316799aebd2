"""What more users would change, in the accounting only (Figure 8)."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpfl_jax.planning import Option, Planner, UserStatistics
from reproductions._plots import band, panel, ticks
from reproductions.registry import Claim, Outcome, Settings, less
from reproductions.userlevel import _small_lm as small

TITLE = "ELS against ULS when the accounting supposes more users"
SOURCE = "Charles et al. 2024, section 6, Figure 8"
OPTIONS = small.OPTIONS

EPSILON = 4.0


def run(settings: Settings) -> Outcome:
    """Trains with the noise that 1, 10 and 100 times as many users would need."""
    factors = [1, 10] if settings.quick else [1, 10, 100]
    budgets = [64, 512]
    data, _, _, config = small.start(settings.quick)
    sizes = np.diff(data.train.user_offsets)
    median = small.median(settings.quick)
    left = int(np.minimum(sizes, median).sum())
    delta = float(sizes.sum()) ** -1.1
    options: dict[tuple[str, int, int], Option] = {}
    for factor in factors:
        users = UserStatistics(factor * len(sizes), limited={median: factor * left})
        planner = Planner(
            users,
            small.sensitivities(settings.quick),
            epsilon=EPSILON,
            delta=delta,
            steps=config.train.steps,
        )
        for budget in budgets:
            options["els", factor, budget] = planner.option("els", median, budget)
            options["uls", factor, budget] = small.uls(planner, budget)
    swept = small.sweep(settings, list(options.values()))
    losses = dict(zip(options, swept.losses, strict=True))
    rows = [
        small.row(option, losses[kind, factor, budget], users=factor, budget=budget)
        for (kind, factor, budget), option in options.items()
    ]
    low, high = budgets
    by_users = {
        k: np.mean([losses[k, 1, b] - losses[k, factors[-1], b] for b in budgets], axis=0)
        for k in ("els", "uls")
    }
    by_compute = {
        k: np.mean([losses[k, f, low] - losses[k, f, high] for f in factors], axis=0)
        for k in ("els", "uls")
    }
    claims: list[Claim] = [
        less(
            "ELS gains more from more users than ULS",
            by_users["uls"],
            by_users["els"],
            f"fall of the loss from 1 to {factors[-1]} times the users, mean over budgets: ULS's "
            "minus ELS's",
            source="paper",
        ),
        less(
            "ULS gains more from compute than ELS",
            by_compute["els"],
            by_compute["uls"],
            f"fall of the loss from B = {low} to {high}, mean over numbers of users: ELS - ULS",
            source="paper",
        ),
    ]
    file = settings.out / "userlevel-figure-8.png"
    _draw(losses, factors, budgets, file)
    notes = [
        small.NOTE,
        small.SEED_NOTE,
        "more users are supposed in the accounting only, as in the paper: beyond 1 the runs have "
        "no guarantee for the users there are",
        "at 1 times the users these are the trainings of figure 6",
    ]
    return Outcome(claims, [file], rows, notes, swept.tried)


def _draw(losses: Any, factors: list[int], budgets: list[int], file: Any) -> None:
    with panel(file) as ax:
        for k, factor in enumerate(factors):
            for kind, style in (("els", "--"), ("uls", "-")):
                y = [losses[kind, factor, b] for b in budgets]
                label = f"{kind.upper()}, {factor}x users"
                band(ax, budgets, y, linestyle=style, color=f"C{k}", label=label)
        ticks(ax, budgets, base=2)
        ax.set(xlabel="compute budget B", ylabel="held-out loss")
