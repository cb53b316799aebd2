"""Synthetic mean estimation: ELS and ULS at equal compute (Figure 3)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from reproductions._plots import panel, ticks
from reproductions.registry import Claim, Outcome, Settings, Tried, Tuning
from reproductions.userlevel._mean_estimation import (
    PER_USER,
    Arm,
    Result,
    Setting,
    evaluate,
)

TITLE = "synthetic mean estimation: ELS and ULS over epsilon, compute and spread within users"
SOURCE = "Charles et al. 2024, section 4, Figure 3"

PANELS: dict[str, list[Any]] = {
    "epsilon": [0.25, 0.5, 1.0, 2.0, 4.0, 8.0],
    "budget": [16, 64, 256, 1024],
    "sigma_2": [0.25, 0.5, 1.0, 2.0, 4.0],
}
QUICK: dict[str, list[Any]] = {
    "epsilon": [0.25, 1.0, 8.0],
    "budget": [64, 256],
    "sigma_2": [0.25, 4.0],
}
ELS_K = Arm("els", PER_USER)
ULS_1 = Arm("uls", 1)
ARMS = (ELS_K, Arm("els", 4), Arm("els", 1), *(Arm("uls", g) for g in (1, 2, 4, 8, 16)))
QUICK_ARMS = (ELS_K, Arm("els", 1), *(Arm("uls", g) for g in (1, 4, 16)))

Results = dict[Setting, dict[Arm, Result]]


def run(settings: Settings) -> Outcome:
    """Tunes and scores every arm in every setting of the three panels."""
    from rich.progress import track

    panels = QUICK if settings.quick else PANELS
    arms = QUICK_ARMS if settings.quick else ARMS
    tuning_trials, trials = (8, 64) if settings.quick else (16, 128)
    rates, clip_norms = np.geomspace(1e-3, 3.0, 12), np.geomspace(2.0**-6, 2.0**5, 12)
    points = {Setting()} | {
        dataclasses.replace(Setting(), **{name: value})
        for name, values in panels.items()
        for value in values
    }
    work = [(point, arm) for point in sorted(points, key=str) for arm in arms]
    found: Results = {}
    for point, arm in track(work, "mean estimation", console=settings.console):
        result = evaluate(arm, point, rates, clip_norms, tuning_trials, trials)
        if result is not None:
            found.setdefault(point, {})[arm] = result
    rows = [
        {
            **dataclasses.asdict(point),
            "arm": arm.name,
            "error": result.mean,
            "standard_error": result.standard_error,
            "learning_rate": result.rate,
            "clip_norm": result.clip_norm,
            "at_edge": result.at_edge,
        }
        for point, results in found.items()
        for arm, result in results.items()
    ]
    file = settings.out / "userlevel-figure-3.png"
    _draw(found, panels, file)
    edges = sum(r["at_edge"] for r in rows)
    notes = [
        f"learning rate and clip norm are tuned on {tuning_trials} trials and scored on {trials} "
        "others, the same for all arms; the paper seems to tune and score on the same 128",
        f"{edges} of {len(rows)} best pairs lie on the edge of the grid of 12 x 12",
        "a budget above the number of users leaves out ULS with G = 1 (M would exceed N)",
    ]
    grid = {"learning rate": rates.tolist(), "clip norm": clip_norms.tolist()}
    tuning = {
        f"{arm.name}, {point}": Tuning(
            grid,
            {"learning rate": result.rate, "clip norm": result.clip_norm},
            range(tuning_trials),
        )
        for point, results in found.items()
        for arm, result in results.items()
    }
    tried = Tried(
        f"the paper's problem, in {len(points)} settings; {trials} trials (paper: 128)",
        is_papers_size=not settings.quick,
        tuning=tuning,
        fixed="scored on other trials",
    )
    return Outcome(_claims(found), [file], rows, notes, tried)


def _difference(a: Result, b: Result) -> tuple[float, float]:
    """Mean of a - b over paired trials, and its standard error."""
    d = a.errors - b.errors
    return float(d.mean()), float(d.std(ddof=1) / np.sqrt(len(d)))


def _claims(found: Results) -> list[Claim]:
    comparable: list[bool] = []
    others: set[int] = set()
    behind: list[float] = []  # ELS at other group sizes, in standard errors
    for results in found.values():
        if ULS_1 in results:
            gap, error = _difference(results[ULS_1], results[ELS_K])
            comparable.append(gap <= max(2 * error, 0.05 * results[ELS_K].mean))
        for arm, result in results.items():
            if arm.kind == "els" and arm != ELS_K:
                gap, error = _difference(result, results[ELS_K])
                behind.append(gap / error)
                others.add(arm.group_size)
    ahead, worse = sum(b > 2 for b in behind), sum(b < -2 for b in behind)
    claims = [
        Claim(
            "ULS with G = 1 is at least comparable with ELS (G = K) in every setting",
            f"{sum(comparable)} of {len(comparable)}",
            f"{len(comparable)} of {len(comparable)}",
            all(comparable),
            "error no more than 2 standard errors of the paired difference, or 5 %, above",
            source="paper",
        ),
        Claim(
            f"ELS is no better at G = {' or '.join(map(str, sorted(others)))} than at G = K",
            f"K ahead in {ahead}, level in {len(behind) - ahead - worse}, behind in {worse}",
            "never behind",
            worse == 0,
            f"by 2 standard errors of the paired difference; K = {PER_USER}; other sizes are not "
            "run",
            source="paper",
        ),
    ]
    gains = []
    for words, point, expected in (
        ("large spread within users (sigma_2 = 4)", Setting(sigma_2=4.0), True),
        ("small epsilon (0.25)", Setting(epsilon=0.25), True),
        ("large compute (B = 256)", Setting(budget=256), True),
        ("large epsilon (8)", Setting(epsilon=8.0), False),
        ("small spread (sigma_2 = 0.25)", Setting(sigma_2=0.25), False),
    ):
        results = found[point]
        best = min((a for a in results if a.kind == "uls"), key=lambda a: results[a].mean)
        gap, error = _difference(results[ULS_1], results[best])
        helps = best != ULS_1 and gap > 2 * error
        gain = results[ELS_K].mean / results[best].mean
        lead, lead_error = _difference(results[ELS_K], results[best])
        if expected:
            gains.append((gain, lead > 2 * lead_error))
        claims.append(
            Claim(
                f"{words}: larger groups {'improve' if expected else 'do not improve'} ULS",
                f"best G = {best.group_size}: {results[best].mean:.3f}, G = 1: "
                f"{results[ULS_1].mean:.3f} (difference {gap:.3f} +- {error:.3f}); ELS is "
                f"{gain:.2f} times the best",
                "improves" if expected else "no gain beyond 5 %",
                helps if expected else gap <= max(2 * error, 0.05 * results[ULS_1].mean),
                "" if expected else "the paper says when they do, not when they do not",
                source="paper" if expected else "ours",
            )
        )
    claims.append(
        Claim(
            "in these three regimes ULS improves significantly on ELS",
            ", ".join(f"{gain:.2f} times" for gain, _ in gains),
            "ELS's error is larger, beyond 2 standard errors",
            all(is_ahead for _, is_ahead in gains),
            "ELS's error over that of the best ULS",
            source="paper",
        )
    )
    return claims


def _draw(found: Results, panels: dict[str, list[Any]], file: Any) -> None:
    with panel(file, 1, 3, size=(14, 4)) as axes:
        labels = {"epsilon": "epsilon", "budget": "compute budget B", "sigma_2": "sigma_2"}
        for ax, (name, values) in zip(axes, panels.items()):
            points = [dataclasses.replace(Setting(), **{name: value}) for value in values]
            arms = {arm: None for point in points for arm in found[point]}
            for arm in arms:
                part = [
                    (getattr(p, name), found[p][arm].mean, found[p][arm].standard_error)
                    for p in points
                    if arm in found[p]
                ]
                x, y, e = zip(*part)
                style = "--" if arm.kind == "els" else "-"
                ax.errorbar(
                    x, y, yerr=2 * np.asarray(e), fmt=f"o{style}", label=arm.name, capsize=2
                )
            ticks(ax, values)
            ax.set(yscale="log", xlabel=labels[name])
        axes[0].set_ylabel("squared error of the last iterate")
