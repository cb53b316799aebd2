"""The next character of Shakespeare's speaking roles, scaled down to a CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from reproductions.registry import Claim, Outcome, Settings, less
from reproductions.subject._training import USER, USER_NOTE, Run, Trained, train, tried_of
from reproductions.subject.curves import draw

TITLE = "next character of Shakespeare's roles, scaled"
SOURCE = "Marathe et al., text A Figure 1, text B Figure 2 (Shakespeare)"
OPTIONS = ("seeds",)

ITEM, GROUP = "LocalItemDP", "LocalGroupDP, papers"
TEXT_A, TEXT_B = "HiGradAvgDP, text A", "HiGradAvgDP, text B"
RUNS = (
    Run("FedAvg", "fed_avg"),
    Run(ITEM, "local_item"),
    Run(GROUP, "local_group", "paper_batch_z"),
    Run(TEXT_B, "hi_grad_avg", "paper_b"),
    Run(TEXT_A, "hi_grad_avg", "paper_a"),
    Run(USER, "user_ldp", "paper_a"),
    Run("HiGradAvgDP, sound", "hi_grad_avg"),
)


def run(settings: Settings) -> Outcome:
    """Trains the papers' algorithms on roles with many records in every silo."""
    folder = None if settings.data_dir is None else settings.data_dir / "shakespeare_plays"
    if folder is None or not folder.is_dir():
        return Outcome([], [], notes=["skipped: DPFL_DATA_DIR holds no shakespeare_plays"])
    rounds, steps = (24, 8) if settings.quick else (200, 12)
    seeds = settings.seeds or 3
    window, hidden, layers = (16, 32, 1) if settings.quick else (40, 128, 2)
    raw: dict[str, Any] = {
        "data": {
            "source": "characters",
            "path": str(folder),
            "seq_len": window,
            "stride": 2,
            "max_users": 200 if settings.quick else 660,
            "max_examples_per_user": 1000,
        },
        "federation": {
            "silos": 16,
            "rounds": rounds,
            "local_steps": steps,
            "local_optimizer": {"name": "adam", "learning_rate": 0.01},
        },
        "model": {"kind": "lstm", "options": {"hidden": hidden, "num_layers": layers}},
        "mechanism": {"batch_size": 300 if settings.quick else 100, "max_records_per_subject": 60},
        "privacy": {"epsilon": 4.0, "delta": 1e-5},
        "execution": {"microbatch_size": 64},
        "eval": {},
    }
    found: dict[str, Trained] = {}
    for item in RUNS:
        found[item.label] = train(settings, raw, item, seeds)
        settings.console.print(f"{item.label}: accuracy {found[item.label].mean:.3f}")
    file = settings.out / "subject_shakespeare.png"
    draw(list(found.values()), file, "Next character, held-out roles")

    def ordered(text: str, better: str, worse: str, note: str = "") -> Claim:
        one, other = (found[name].accuracy for name in (better, worse))
        said = f"accuracies {np.mean(other):.4f} and {np.mean(one):.4f}; {note}".removesuffix("; ")
        return less(text, other, one, said, source="paper")

    claims = [
        ordered("both: LocalItemDP is below FedAvg", "FedAvg", ITEM),
        ordered("both: LocalGroupDP is below LocalItemDP", ITEM, GROUP),
        ordered("both: UserLDP is below LocalGroupDP", GROUP, USER, USER_NOTE),
        ordered("text B: HiGradAvgDP is above LocalGroupDP", TEXT_B, GROUP),
        ordered("text A: HiGradAvgDP is below LocalGroupDP", GROUP, TEXT_A),
        ordered("text A: HiGradAvgDP is the worst of all, below UserLDP", USER, TEXT_A, USER_NOTE),
    ]
    notes = [
        f"{raw['data']['max_users']} roles of up to 1,000 windows of {window} characters, LSTM "
        f"of {layers} layer(s) of width {hidden} (the papers: stacked), {rounds} rounds "
        f"calibrated, {seeds} seed(s)"
    ]
    rows = [t.row() for t in found.values()]
    tried = dataclasses.replace(tried_of(raw, seeds), doubts=_constant(list(found.values())))
    return Outcome(claims, [file], rows, notes, tried)


def _constant(found: list[Trained]) -> list[str]:
    """Whether arms are constant predictors: their accuracy is the same, whatever the seed."""
    names = [t.run.label for t in found if np.ptp(t.accuracy) == 0 and len(t.accuracy) > 1]
    if len(names) < 2:
        return []
    return [f"{', '.join(names)} predict one character whatever they read"]
