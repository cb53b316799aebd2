"""Training with each mechanism at equal epsilon and compute, and what their noise foretells."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from dpfl_jax.config import load_config
from dpfl_jax.config.execution import Execution
from dpfl_jax.config.schema import OptimizerConfig
from dpfl_jax.mechanisms import Mechanism, allocation, bandmf, blt, uls
from dpfl_jax.mesh import make_mesh
from dpfl_jax.planning import Option, Planner, Sensitivities, UserStatistics
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.driver import LoopConfig
from dpfl_jax.training import fit
from dpfl_jax.training.central_run import read_data
from dpfl_jax.training.evaluate import Evaluator
from dpfl_jax.training.optimizers import make_optimizer
from dpfl_jax.training.start import starting_params
from reproductions._plots import panel
from reproductions._seeds import of
from reproductions.registry import Claim, Outcome, Settings, Source, Tried, Tuning, less

DELTA = 1e-4
RATES = {"sgd": (0.03, 0.1, 0.3, 0.9), "adam": (0.001, 0.003, 0.01, 0.03)}
# From so many times less noise on, one is said to be ahead. Of less it is only asked that it does
# no harm, against the gain of training; of more noise than NEARLY ULS's, nothing is said.
TELLING, NEARLY, ROOM = 1.5, 1.1, 0.05
MECHANISMS: dict[str, tuple[Callable[..., Mechanism], str, Source]] = {
    "uls": (uls, "ULS", "paper"),
    "bandmf": (bandmf, "BandMF", "paper"),
    "blt": (blt, "BLT", "ours"),
    "allocation": (allocation, "allocation", "ours"),
}


def compared(settings: Settings, name: str, file: pathlib.Path, cohort: int, group: int) -> Outcome:
    """Tunes the learning rate of each by one run, and trains at the best one with other keys.

    Args:
      settings: of the reproduction; quick: 16 steps, at one epsilon, with one rate.
      name: of the picture.
      file: the configuration: its data, model and clip norm.
      cohort: M of every mechanism.
      group: G of every mechanism.
    """
    steps, epsilons = (16, (8.0,)) if settings.quick else (64, (1.0, 8.0))
    seeds = settings.seeds or 5
    config: Any = load_config(str(file), [])
    quiet, mesh = Console(quiet=True), make_mesh()
    data, model = read_data(config, quiet)
    params, _ = starting_params(config, data, model, mesh, quiet)
    evaluate = Evaluator(model.loss, mesh)
    held_out: Any = data.validation
    before = evaluate(params, held_out).loss
    rows: list[dict[str, Any]] = []
    for epsilon in epsilons:
        options = _options(data.train.num_users, epsilon, steps, group, cohort)
        for optimizer in ("sgd",) if settings.quick else RATES:
            for option in options:

                def loss(
                    rate: float, seed: int, option: Option = option, optimizer: str = optimizer
                ) -> float:
                    plan = _mechanism(option).plan(
                        data.train,
                        steps=steps,
                        noise_multiplier=option.noise_multiplier,
                        execution=Execution(microbatch_size=16, strategy="vmap"),
                        delta=DELTA,
                    )
                    found = fit(
                        model.loss,
                        params,
                        plan,
                        make_optimizer(OptimizerConfig(name=optimizer, learning_rate=rate), steps),
                        loop=LoopConfig(log_every=1000),
                        key=RootKey.from_seed(of(seed)),
                    )
                    return evaluate(found.params, held_out).loss

                shown = MECHANISMS[option.kind][1]
                with settings.console.status(f"{shown}, {optimizer}, epsilon {epsilon:g}"):
                    rates = RATES[optimizer][2:3] if settings.quick else RATES[optimizer]
                    tuned = {rate: loss(rate, 100) for rate in rates}
                    rate = min(tuned, key=lambda r: tuned[r])
                    losses = [loss(rate, seed) for seed in range(seeds)]
                row = {
                    "epsilon": epsilon,
                    "optimizer": optimizer,
                    **option.to_json(),
                    "algorithm": shown,
                    "rate": rate,
                    "tuned": tuned,
                    "losses": losses,
                    "mean": float(np.mean(losses)),
                }
                rows.append(row)
                settings.console.print(
                    f"epsilon {epsilon:g}, {optimizer}, {shown}: {row['mean']:.4f} "
                    f"({min(losses):.4f} to {max(losses):.4f}) at rate {rate:g}",
                    highlight=False,
                )
    notes = [
        f"{data.train.num_users} users of which {cohort} are expected a step, {steps} steps; "
        f"held-out loss {before:.4f} before training",
        "each learning rate was chosen by a run with another key, on the held-out people of these "
        "losses, for all alike",
        "what is foretold follows from the noise in prefix sums alone",
        "keys are public seeds, so these runs protect nobody",
    ]
    picture = settings.out / f"correlated-{name}.png"
    _draw(rows, before, picture)
    tuning = {
        f"{r['algorithm']}, {r['optimizer']}, epsilon {r['epsilon']:g}": Tuning(
            {"learning rate": list(r["tuned"])}, {"learning rate": r["rate"]}, [of(100)]
        )
        for r in rows
    }
    tried = Tried(
        f"{data.train.num_users} users, {steps} steps",
        tuning=tuning,
        reported=[of(seed) for seed in range(seeds)],
    )
    return Outcome(_claims(rows, before), [picture], rows, notes, tried)


def _options(users: int, epsilon: float, steps: int, group: int, cohort: int) -> list[Option]:
    """All, calibrated; bands as the planner chooses them. ULS is the first."""
    known = Sensitivities.assumed(0.0, [group])
    planner = Planner(UserStatistics(users), known, epsilon=epsilon, delta=DELTA, steps=steps)
    found = [planner.try_option(kind, group, cohort) for kind in MECHANISMS]
    return [option for option in found if option is not None]


def _mechanism(option: Option) -> Mechanism:
    fields: dict[str, Any] = {
        "group_size": option.group_size,
        "cohort_size": option.size,
        "clip_norm": 0.5,
        "clipping": "normalized",
    }
    fields |= {"bands": option.bands} if option.kind == "bandmf" else {}
    return MECHANISMS[option.kind][0](**fields)


def _claims(rows: Sequence[Mapping[str, Any]], before: float) -> list[Claim]:
    claims = []
    cells = {(row["epsilon"], row["optimizer"], row["kind"]): row for row in rows}
    for (epsilon, optimizer, kind), row in cells.items():
        uls = cells[epsilon, optimizer, "uls"]
        gain = uls["noise"] / row["noise"]
        if kind == "uls" or 1 / TELLING < gain < 1 / NEARLY:
            continue
        shown, source = MECHANISMS[kind][1:]
        room, smaller, larger = 0.0, row["losses"], uls["losses"]
        if gain >= TELLING:
            what = "ahead of ULS"
        elif gain <= 1 / TELLING:
            what, smaller, larger = "behind ULS", larger, smaller
        else:
            what = f"not behind ULS by more than {ROOM:.0%} of ULS's gain"
            room = ROOM * max(before - uls["mean"], 0.0)
        bands = f" with {row['bands']} bands" if row["bands"] > 1 else ""
        claims.append(
            less(
                f"epsilon {epsilon:g}, {optimizer}: {shown} is {what}",
                smaller,
                larger,
                f"losses {row['mean']:.4f}{bands} and {uls['mean']:.4f} (ULS); noise in its prefix "
                f"sums {1 / gain:.2f} times that of ULS",
                source=source,
                room=room,
            )
        )
    return claims


def _draw(rows: Sequence[Mapping[str, Any]], before: float, file: pathlib.Path) -> None:
    kinds = [kind for kind in MECHANISMS if any(row["kind"] == kind for row in rows)]
    arms = list(dict.fromkeys((row["epsilon"], row["optimizer"]) for row in rows))
    with panel(file, size=(2.2 + 1.6 * len(arms), 4)) as ax:
        for row in rows:
            arm, kind = arms.index((row["epsilon"], row["optimizer"])), kinds.index(row["kind"])
            x, colour = arm + 0.18 * (kind - (len(kinds) - 1) / 2), f"C{kind}"
            ax.plot([x] * len(row["losses"]), row["losses"], "o", color=colour, markersize=3)
            name = row["algorithm"] if arm == 0 else None
            ax.plot(x, row["mean"], "_", color=colour, markersize=14, label=name)
        ax.axhline(before, color="black", linestyle=":", label="before training")
        ax.set_xticks(range(len(arms)), [f"epsilon {e:g}\n{name}" for e, name in arms], fontsize=8)
        ax.set_xlim(-0.6, len(arms) - 0.4)
        ax.set(ylabel="held-out loss")
