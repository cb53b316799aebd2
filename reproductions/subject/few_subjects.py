"""Fewer subjects: larger groups in a batch, fewer subjects to average over."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from reproductions._plots import panel
from reproductions.registry import Claim, Outcome, Settings, less
from reproductions.subject._training import (
    COMPARED,
    Trained,
    base_config,
    people_of,
    train,
    tried_of,
)

TITLE = "accuracy with fewer subjects"
SOURCE = "Marathe et al., text B Figure 4 (Small-FEMNIST)"
OPTIONS = ("seeds",)


def run(settings: Settings) -> Outcome:
    """Trains with many and with a fifth of the subjects, at the same batch size."""
    rounds, steps, seeds = (36, 6, 3) if settings.quick else (100, 12, 3)
    seeds = settings.seeds or seeds
    raw, about = base_config(settings, rounds, steps)
    raw["mechanism"] |= {"batch_size": 64.0 if "max_users" in raw["data"] else 24.0}
    total = raw["data"].get("max_users", 120)
    rows: list[dict[str, Any]] = []
    found: dict[tuple[str, int], Trained] = {}
    for count in (total, total // 5):
        own = raw | {"data": raw["data"] | {"max_users": count}}
        for item in COMPARED:
            trained = train(settings, own, item, seeds)
            found[item.label, count] = trained
            rows.append({"subjects": count} | trained.row())
            settings.console.print(f"{count} subjects, {item.label}: accuracy {trained.mean:.3f}")
    drops = {
        item.label: 1
        - np.divide(found[item.label, total // 5].accuracy, found[item.label, total].accuracy)
        for item in COMPARED
    }
    alone, group, average = (drops[r.label] for r in COMPARED)
    fewer = found[COMPARED[2].label, total].claim.rounds
    note = "relative loss of accuracy with a fifth of the subjects: LocalItemDP's minus its own"
    claims: list[Claim] = [
        less(
            "text B: LocalGroupDP drops more than LocalItemDP",
            alone,
            group,
            note,
            source="paper",
        ),
        less(
            "text B: HiGradAvgDP drops more than LocalItemDP",
            alone,
            average,
            f"{note}; {fewer} rounds with LocalItemDP's own noise for its {rounds}, so that "
            "stopping early may explain it; B says that it drops, and compares it with nothing",
            source="paper",
        ),
    ]
    file = settings.out / "subject_few_subjects.png"
    _draw(rows, file)
    notes = [
        about,
        f"{rounds} rounds calibrated, {seeds} seed(s)",
        "the batch is as large with few subjects as with many; text B's is 512 and 256",
    ]
    tried = tried_of(raw, seeds)
    tried = dataclasses.replace(tried, size=f"{people_of(own['data'])} or {tried.size}")
    return Outcome(claims, [file], rows, notes, tried)


def _draw(rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file, size=(6.5, 3.6)) as axes:
        counts = sorted({r["subjects"] for r in rows}, reverse=True)
        for i, count in enumerate(counts):
            mine = [r for r in rows if r["subjects"] == count]
            offsets = [k + 0.4 * (i - 0.5) for k in range(len(mine))]
            bars = axes.bar(offsets, [r["accuracy"] for r in mine], 0.38, label=f"{count} subjects")
            axes.bar_label(bars, fmt="%.2f", fontsize=8, label_type="center", color="white")
            for x, r in zip(offsets, mine, strict=True):  # of each seed
                axes.plot([x] * len(r["accuracies"]), r["accuracies"], "_", color="black")
        axes.set_xticks(range(len(COMPARED)), [r.label for r in COMPARED])
        axes.set(ylabel="held-out accuracy", ylim=(0, 1))
