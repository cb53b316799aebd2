"""Personalisation of models fine-tuned by ELS and ULS (Appendix G.2, Figure 18)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dpfl_jax.config.execution import Execution
from dpfl_jax.config.schema import OptimizerConfig
from dpfl_jax.mechanisms import els, uls
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.driver import LoopConfig
from dpfl_jax.training import fit
from dpfl_jax.training.evaluate import personalize
from dpfl_jax.training.optimizers import make_optimizer
from reproductions._plots import band, panel
from reproductions._seeds import of
from reproductions.registry import Claim, Outcome, Settings, Tried, between, less
from reproductions.userlevel import _small_lm as small

TITLE = "loss of held-out users before and after local tuning"
SOURCE = "Charles et al. 2024, Appendix G.2, Figure 18"

OPTIONS = small.OPTIONS
BUDGET, EPSILON = 512, 4.0


def run(settings: Settings) -> Outcome:
    """Fine-tunes by both mechanisms, then lets each held-out user tune a copy."""
    data, model, params, config = small.start(settings.quick)
    norms, median = small.sensitivities(settings.quick), small.median(settings.quick)
    common: dict[str, Any] = {"clipping": "normalized"}
    option = small.uls(small.planner(settings.quick, EPSILON), BUDGET)
    group = option.group_size
    mechanisms = {
        "ELS": els(group_size=median, batch_size=BUDGET, clip_norm=norms.example, **common),
        "ULS": uls(group_size=group, cohort_size=option.size, clip_norm=norms.at(group), **common),
    }
    sizes = np.diff(data.train.user_offsets)
    users = 100 if settings.quick else 400
    offsets = data.validation.user_offsets[: users + 1]
    held_out = _View(offsets, data.validation.read)
    found: dict[str, list[Any]] = {"pre-trained": [personalize(model.loss, params, held_out)]}
    for name, mechanism in mechanisms.items():
        plan = mechanism.plan(
            data.train,
            steps=config.train.steps,
            epsilon=EPSILON,
            delta=float(sizes.sum()) ** -1.1,
            execution=Execution(microbatch_size=64),
        )
        for seed in range(settings.seeds or 3):
            with settings.console.status(f"fine-tuning with {name}, seed {seed}"):
                optimizer = make_optimizer(
                    OptimizerConfig(learning_rate=small.RATE), config.train.steps
                )
                tuned = fit(
                    model.loss,
                    params,
                    plan,
                    optimizer,
                    key=RootKey.from_seed(of(seed)),
                    loop=LoopConfig(log_every=1000),
                )
                found.setdefault(name, []).append(personalize(model.loss, tuned.params, held_out))
    before = {name: np.array([f.before for f in of]) for name, of in found.items()}
    after = {name: np.array([f.after for f in of]) for name, of in found.items()}
    rows = [
        {"model": n, "before": float(before[n].mean()), "after": float(after[n].mean()),
         "by_seed": [dataclasses.asdict(f) for f in of]}
        for n, of in found.items()
    ]  # fmt: skip
    first, second = sorted(mechanisms, key=lambda name: before[name].mean())
    claims: list[Claim] = [
        less(f"personalisation lowers the loss of {n}", after[n], before[n], source="paper")
        for n in mechanisms
    ]
    claims += [
        between(
            "by about the same for ELS and ULS (ratio of the gains)",
            (before["ELS"] - after["ELS"]) / (before["ULS"] - after["ULS"]),
            1 / 1.3,
            1.3,
            "the paper gives no number: within 30 % of each other",
            source="paper",
        ),
        less(
            f"and does not change their order: {first} stays below {second}",
            after[first],
            after[second],
            source="paper",
        ),
    ]
    file = settings.out / "userlevel-figure-18.png"
    _draw(rows, file)
    notes = [
        small.NOTE,
        "both train with the noise that their sampling calls for; sampling and noise come from "
        "public seeds, and so protect nobody",
        "a user's own tuned copy is not private with respect to that user",
    ]
    tried = Tried(
        f"40,000 parameters, {config.train.steps} steps; {users} held-out users",
        fixed=f"nothing (learning rate {small.RATE:g} for both)",
        data=small.fingerprint(settings.quick),
    )
    return Outcome(claims, [file], rows, notes, tried)


@dataclasses.dataclass(frozen=True)
class _View:
    """The first users of a store."""

    user_offsets: np.ndarray
    read: Any


def _draw(rows: list[dict[str, Any]], file: Any) -> None:
    with panel(file, size=(5, 4)) as ax:
        for k, row in enumerate(rows):
            ends = [[f[end] for f in row["by_seed"]] for end in ("before", "after")]
            band(ax, [0, 1], ends, color=f"C{k}", label=row["model"])
        ax.set_xticks([0, 1], ["as it is", "personalised"])
        ax.set(ylabel="loss of held-out users")
