"""ULS and BandMF on the bundled language model: held-out loss at equal epsilon and compute."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
from rich.console import Console

from dpfl_jax.config import load_config
from dpfl_jax.config.execution import Execution
from dpfl_jax.mechanisms import ULS, BandMF, Mechanism
from dpfl_jax.mesh import make_mesh
from dpfl_jax.planning import Option, Planner, Sensitivities, Users
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.driver import Pace
from dpfl_jax.training import fit
from dpfl_jax.training.central_run import read_data
from dpfl_jax.training.evaluate import Evaluator
from dpfl_jax.training.optimizers import build_optimizer
from dpfl_jax.training.start import starting_params
from reproductions._plots import panel
from reproductions._seeds import of
from reproductions.registry import Claim, Outcome, Settings, less

TITLE = "ULS and BandMF on the bundled language model, at equal epsilon and compute"
SOURCE = "Choquette-Choo et al. 2023 (arXiv 2306.08153), with users for examples"
OPTIONS = ("seeds",)

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "quickstart.yaml"
COHORT, DELTA = 16, 1e-4
RATES = {"sgd": (0.03, 0.1, 0.3, 0.9), "adam": (0.001, 0.003, 0.01, 0.03)}
# Of a smaller gain in noise it is only asked that it does no harm, against the gain of training.
TELLING, NEAR = 1.5, 0.05


def run(settings: Settings) -> Outcome:
    """Tunes the learning rate of each by one run, and trains at the best one with other keys."""
    steps, epsilons = (16, (8.0,)) if settings.quick else (64, (1.0, 8.0))
    seeds = settings.seeds or (3 if settings.quick else 5)
    config: Any = load_config(str(CONFIG), [])
    quiet, mesh = Console(quiet=True), make_mesh()
    data, model = read_data(config, quiet)
    params, _ = starting_params(config, data, model, mesh, quiet)
    evaluate = Evaluator(model.loss, mesh)
    held_out: Any = data.validation
    before = evaluate(params, held_out).loss
    rows: list[dict[str, Any]] = []
    for epsilon in epsilons:
        options = _options(data.train.num_users, epsilon, steps)
        for name in ("sgd",) if settings.quick else RATES:
            for kind, option in options.items():

                def loss(
                    rate: float, seed: int, option: Option = option, name: str = name
                ) -> float:
                    plan = _mechanism(option).plan(
                        data.train,
                        steps=steps,
                        execution=Execution(microbatch_size=COHORT, strategy="vmap"),
                        delta=DELTA,
                    )
                    found = fit(
                        model.loss,
                        params,
                        plan,
                        build_optimizer(name, rate, steps),
                        pace=Pace(log_every=1000),
                        key=RootKey.from_seed(of(seed)),
                    )
                    return evaluate(found.params, held_out).loss

                with settings.console.status(f"{kind}, {name}, epsilon {epsilon:g}"):
                    rates = RATES[name][2:3] if settings.quick else RATES[name]
                    tuned = {rate: loss(rate, 100) for rate in rates}
                    rate = min(tuned, key=lambda r: tuned[r])
                    losses = [loss(rate, seed) for seed in range(seeds)]
                row = {
                    "epsilon": epsilon,
                    "optimizer": name,
                    **option.to_json(),
                    "algorithm": kind,
                    "rate": rate,
                    "tuned": tuned,
                    "losses": losses,
                    "mean": float(np.mean(losses)),
                }
                rows.append(row)
                settings.console.print(
                    f"epsilon {epsilon:g}, {name}, {kind}: {row['mean']:.4f} "
                    f"({min(losses):.4f} to {max(losses):.4f}) at rate {rate:g}",
                    highlight=False,
                )
    file = settings.out / "correlated-language-model.png"
    _draw(rows, before, file)
    notes = [
        f"Shakespeare by role, {data.train.num_users} users of which {COHORT} are expected a step, "
        f"{steps} steps; held-out loss {before:.4f} before training",
        "each learning rate was chosen by a run with another key, on the held-out roles of these "
        "losses, for both alike",
        "keys are public seeds, so these runs protect nobody",
    ]
    return Outcome(_claims(rows, before), [file], rows, notes)


def _options(users: int, epsilon: float, steps: int) -> dict[str, Option]:
    """Both, calibrated; bands as the planner chooses them."""
    known = Sensitivities.assumed(0.0, [1])
    planner = Planner(Users(users), known, epsilon=epsilon, delta=DELTA, steps=steps)
    banded = planner.bandmf(1, COHORT)
    assert banded is not None  # cohorts are small
    return {"ULS": planner.uls(1, COHORT), "BandMF": banded}


def _mechanism(option: Option) -> Mechanism:
    fields: dict[str, Any] = {
        "group_size": 1,
        "cohort_size": COHORT,
        "clip_norm": 0.5,
        "clipping": "normalized",
        "noise_multiplier": option.noise_multiplier,
    }
    return ULS(**fields) if option.kind == "uls" else BandMF(bands=option.bands, **fields)


def _claims(rows: list[dict[str, Any]], before: float) -> list[Claim]:
    claims = []
    for uls, banded in zip(rows[::2], rows[1::2], strict=True):
        gain = uls["noise"] / banded["noise"]
        telling = gain >= TELLING
        room = 0.0 if telling else NEAR * max(before - uls["mean"], 0.0)
        what = "ahead" if telling else f"not behind by more than {NEAR:.0%} of ULS's gain"
        claims.append(
            less(
                f"epsilon {uls['epsilon']:g}, {uls['optimizer']}: BandMF is {what}",
                banded["losses"],
                uls["losses"],
                f"losses {banded['mean']:.4f} with {banded['bands']} bands and {uls['mean']:.4f} "
                f"(ULS); its prefix sums have {gain:.2f} times less noise",
                source="paper",
                room=room,
            )
        )
    return claims


def _draw(rows: list[dict[str, Any]], before: float, file: Any) -> None:
    with panel(file) as ax:
        labels = []
        for k, row in enumerate(rows):
            x, colour = k // 2 + 0.25 * (k % 2), f"C{k % 2}"
            ax.plot([x] * len(row["losses"]), row["losses"], "o", color=colour, markersize=3)
            name = row["algorithm"] if k < 2 else None
            ax.plot(x, row["mean"], "_", color=colour, markersize=18, label=name)
            if row["kind"] == "bandmf":
                labels.append(
                    f"epsilon {row['epsilon']:g}\n{row['optimizer']}, {row['bands']} bands"
                )
        ax.axhline(before, color="black", linestyle=":", label="before training")
        ax.set_xticks(np.arange(len(labels)) + 0.125, labels, fontsize=8)
        ax.margins(x=0.2)
        ax.set(ylabel="held-out loss")
