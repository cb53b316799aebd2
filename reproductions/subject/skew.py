"""Subjects concentrated in few silos: who suffers, under the papers' recipes and the sound one."""

from __future__ import annotations

from typing import Any

from reproductions._plots import band, columns, panel, ticks
from reproductions.registry import Claim, Outcome, Settings
from reproductions.subject._training import COMPARED, Trained, base_config, train

TITLE = "accuracy when subjects are concentrated in few silos"
SOURCE = "Marathe et al., text A Figure 3, text B Figure 3"


def run(settings: Settings) -> Outcome:
    """Trains three algorithms at several skews."""
    alphas = (1.0, 16.0) if settings.quick else (1.0, 2.0, 4.0, 8.0, 16.0)
    rounds, steps, seeds = (36, 6, 1) if settings.quick else (100, 12, 3)
    raw, note = base_config(settings, rounds, steps)
    found: dict[tuple[str, float], Trained] = {}
    rows: list[dict[str, Any]] = []
    for alpha in alphas:
        # A subject's records gather in one silo: the cap must let them in.
        cap = raw["mechanism"]["max_items_per_subject"] if alpha == 1 else _most(raw)
        own = raw | {
            "federation": raw["federation"] | {"partition": "power", "alpha": alpha},
            "mechanism": raw["mechanism"] | {"max_items_per_subject": cap},
        }
        for item in COMPARED:
            trained = train(settings, own, item, seeds)
            found[item.label, alpha] = trained
            rows.append({"alpha": alpha} | trained.row())
            settings.console.print(f"a={alpha:g}, {item.label}: accuracy {trained.mean:.3f}")
    first, last = alphas[0], alphas[-1]

    def kept(label: str) -> float:
        return found[label, last].mean / found[label, first].mean

    drops = {item.label: round(1 - kept(item.label), 3) for item in COMPARED}
    alone, group, average = (drops[r.label] for r in COMPARED)
    claims = [
        Claim("both: LocalItemDP is not significantly affected by skew", alone, "<= 0.05",
              alone <= 0.05, "relative loss of accuracy from a=1 to a=16", source="paper"),
        Claim("both: LocalGroupDP loses most", drops, "largest loss", group == max(drops.values()),
              source="paper"),
        Claim("text B: HiGradAvgDP loses noticeably at a=16, about 5 %", average, "0.01 to 0.15",
              0.01 <= average <= 0.15, source="paper"),
    ]  # fmt: skip
    file = settings.out / "subject_skew.png"
    _draw(rows, file)
    return Outcome(claims, [file], rows, [note, f"{rounds} rounds calibrated, {seeds} seed(s)"])


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
