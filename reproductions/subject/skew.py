"""Subjects concentrated in few silos: who suffers, under the papers' recipes and the sound one."""

from __future__ import annotations

from typing import Any

import numpy as np

from reproductions._plots import band, columns, panel, ticks
from reproductions.registry import Claim, Outcome, Settings, between, less
from reproductions.subject._training import (
    COMPARED,
    Trained,
    base_config,
    train,
    tried_of,
)

TITLE = "accuracy when subjects are concentrated in few silos"
SOURCE = "Marathe et al., text A Figure 3, text B Figure 3"
OPTIONS = ("seeds",)


def run(settings: Settings) -> Outcome:
    """Trains three algorithms at several skews."""
    alphas = (1.0, 16.0) if settings.quick else (1.0, 2.0, 4.0, 8.0, 16.0)
    rounds, steps, seeds = (36, 6, 3) if settings.quick else (100, 12, 3)
    seeds = settings.seeds or seeds
    # The papers' number of subjects, and batches of their size. A subject has 13 images instead of
    # 145, but as large a share of a batch: 0.15 records on average at a=1, and 2.3 at a=16.
    raw, note = base_config(settings, rounds, steps, subjects=3500)
    if "max_users" in raw["data"]:
        raw["mechanism"]["batch_size"] = 512
    found: dict[tuple[str, float], Trained] = {}
    rows: list[dict[str, Any]] = []
    for alpha in alphas:
        # A subject's records gather in one silo: the cap must let them in.
        cap = raw["mechanism"]["max_records_per_subject"] if alpha == 1 else _most(raw)
        own = raw | {
            "federation": raw["federation"] | {"partition": "power", "alpha": alpha},
            "mechanism": raw["mechanism"] | {"max_records_per_subject": cap},
        }
        for item in COMPARED:
            trained = train(settings, own, item, seeds)
            found[item.label, alpha] = trained
            rows.append({"alpha": alpha} | trained.row())
            settings.console.print(f"a={alpha:g}, {item.label}: accuracy {trained.mean:.3f}")
    first, last = alphas[0], alphas[-1]

    def loss(label: str) -> np.ndarray:
        """Relative loss of accuracy, of each seed."""
        return 1 - np.divide(found[label, last].accuracy, found[label, first].accuracy)

    alone, group, average = (loss(r.label) for r in COMPARED)
    claims: list[Claim] = [
        less(
            "both: LocalItemDP is not significantly affected by skew",
            alone,
            np.zeros(seeds),
            f"relative loss of accuracy from a={first:g} to a={last:g}",
            source="paper",
            room=0.05,
        ),
        less(
            "text B: LocalGroupDP loses more than LocalItemDP and HiGradAvgDP",
            np.maximum(alone, average),
            group,
            "loss of the next one minus its own",
            source="paper",
        ),
        between(
            "text B: HiGradAvgDP loses just about 5 % at a=16",
            average,
            0.01,
            0.15,
            source="paper",
        ),
    ]
    file = settings.out / "subject_skew.png"
    _draw(rows, file)
    notes = [
        note,
        f"{rounds} rounds calibrated, {seeds} seed(s)",
        "the papers also have FedAvg and User-Local-SGD; text A's own HiGradAvgDP is not run",
    ]
    return Outcome(claims, [file], rows, notes, tried_of(raw, seeds))


def _most(raw: dict[str, Any]) -> int:
    """A cap that keeps (nearly) all of a concentrated subject's records."""
    return int(raw["data"]["records_per_user"])


def _draw(rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file, size=(5.5, 3.6)) as axes:
        for item in COMPARED:
            mine = [r for r in rows if r["run"] == item.label]
            band(axes, *columns(mine, "alpha", "accuracies"), label=item.label)
        ticks(axes, sorted({r["alpha"] for r in rows}), base=2)
        axes.set(xlabel="skew a", ylabel="held-out accuracy", ylim=(0, 1))
