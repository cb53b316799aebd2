"""Personalisation of models fine-tuned by ELS and ULS (Appendix G.2, Figure 18)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dpfl_jax.config.execution import Execution
from dpfl_jax.mechanisms import ELS, ULS
from dpfl_jax.run.driver import Pace
from dpfl_jax.training import fit
from dpfl_jax.training.optimizers import build_optimizer
from dpfl_jax.training.personalize import personalize
from reproductions._plots import panel
from reproductions.registry import Claim, Outcome, Settings
from reproductions.userlevel import _small_lm as small

TITLE = "loss of held-out users before and after local tuning"
SOURCE = "Charles et al. 2024, Appendix G.2, Figure 18"

BUDGET, EPSILON = 512, 4.0


def run(settings: Settings) -> Outcome:
    """Fine-tunes by both mechanisms, then lets each held-out user tune a copy."""
    data, model, params, config = small.start(settings.quick)
    norms, median = small.sensitivities(settings.quick), small.median(settings.quick)
    common: dict[str, Any] = {"clipping": "normalized", "noise_multiplier": None}
    mechanisms = {
        "ELS": ELS(group_size=median, batch_size=BUDGET, clip_norm=norms.example, **common),
        "ULS": ULS(group_size=2, cohort_size=BUDGET // 2, clip_norm=norms.at(2), **common),
    }
    sizes = np.diff(data.train.user_offsets)
    models: dict[str, Any] = {"pre-trained": params}
    for name, mechanism in mechanisms.items():
        with settings.console.status(f"fine-tuning with {name}"):
            plan = mechanism.plan(
                data.train,
                steps=config.train.steps,
                epsilon=EPSILON,
                delta=float(sizes.sum()) ** -1.1,
                execution=Execution(microbatch_size=64),
            )
            optimizer = build_optimizer("adam", small.RATES[-1], config.train.steps)
            models[name] = fit(
                model.loss, params, plan, optimizer, pace=Pace(log_every=1000)
            ).params
    users = 100 if settings.quick else 400
    offsets = data.validation.user_offsets[: users + 1]
    held_out = _View(offsets, data.validation.read)
    rows: list[dict[str, Any]] = []
    for name, tuned in models.items():
        with settings.console.status(f"personalising {name}"):
            found = personalize(model.loss, tuned, held_out)
        rows.append({"model": name, **dataclasses.asdict(found)})
    gain = {r["model"]: r["before"] - r["after"] for r in rows}
    after = {r["model"]: r["after"] for r in rows}
    before = {r["model"]: r["before"] for r in rows}
    order = sorted(before, key=lambda name: before[name])
    claims = [
        Claim(
            "personalisation lowers the loss of every model",
            {k: round(v, 4) for k, v in gain.items()},
            "above 0",
            min(gain.values()) > 0,
        ),
        Claim(
            "by about the same for ELS and ULS",
            {k: round(gain[k], 4) for k in mechanisms},
            "within 30 % of each other",
            max(gain[k] for k in mechanisms) <= 1.3 * min(gain[k] for k in mechanisms),
        ),
        Claim(
            "and does not change their order",
            sorted(after, key=lambda name: after[name]),
            order,
            (after["ELS"] < after["ULS"]) == (before["ELS"] < before["ULS"])
            or abs(after["ELS"] - after["ULS"]) < 0.005,
        ),
    ]
    file = settings.out / "userlevel-figure-18.png"
    _draw(rows, file)
    notes = [small.NOTE, "a user's own tuned copy is not private with respect to that user"]
    return Outcome(claims, [file], rows, notes)


@dataclasses.dataclass(frozen=True)
class _View:
    """The first users of a store."""

    user_offsets: np.ndarray
    read: Any


def _draw(rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file, size=(5, 4)) as ax:
        for k, row in enumerate(rows):
            ax.plot([0, 1], [row["before"], row["after"]], "o-", color=f"C{k}", label=row["model"])
        ax.set_xticks([0, 1], ["as it is", "personalised"])
        ax.set(ylabel="loss of held-out users")
        ax.legend()
