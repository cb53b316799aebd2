"""Whether the group size should be chosen by the compute budget: speakers, and writers of digits.

Every cell trains with the noise that its sampling calls for, from public seeds.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import yaml
from rich.console import Console

from dpfl_jax.config import load_config
from dpfl_jax.mesh import make_mesh
from dpfl_jax.planning import (
    Option,
    Planner,
    UserStatistics,
    estimate_sensitivities,
    median_group_size,
)
from dpfl_jax.planning.proxy import Trial, run_trials
from dpfl_jax.training.central_run import read_data
from dpfl_jax.training.start import starting_params
from reproductions._plots import band, panel, ticks
from reproductions._seeds import of
from reproductions.registry import Claim, Outcome, Settings, Tried, less

TITLE = "the best group size by compute budget, on speakers and on writers"
SOURCE = "Charles et al. 2024, section 6 and Appendix F (users first, then examples of each)"
OPTIONS = ("seeds",)

GROUPS = (1, 4, 16)
BUDGETS = (64, 256, 1024)
EPSILON, DELTA = 2.0, 1e-4
ROOM = 0.01  # of the loss: what is called near the best
Losses = Mapping[tuple[str, int, int], np.ndarray]  # (kind, group, budget) -> [seeds]


def run(settings: Settings) -> Outcome:
    """Trains each cell at each seed; finished runs are kept beside the figure."""
    seeds = settings.seeds or 5
    claims: list[Claim] = []
    rows: list[dict[str, Any]] = []
    drawn = {}
    notes = [
        f"epsilon {EPSILON:g}, delta {DELTA:g}, {seeds} seed(s) of sampling and noise, public: the "
        "runs protect nobody; one learning rate"
    ]
    if seeds < 2:
        notes.append("with one seed there are no intervals: nothing is shown to differ")
    for name, content, note in _sets(settings):
        planner, losses = _losses(settings, name, content, seeds)
        picks = {b: min(_cells(planner, b), key=lambda o: o.noise) for b in BUDGETS}
        claims += _claims(name, losses, picks, planner.users.num_users)
        rows += _rows(name, losses, picks)
        drawn[f"{name}, {planner.users.num_users:,} users"] = (losses, picks)
        notes.append(note)
    file = settings.out / "userlevel-budgets.png"
    _draw(drawn, file)
    tried = Tried(
        f"320,000 parameters (Shakespeare), 51,000 (writers), {8 if settings.quick else 16} steps",
        fixed="nothing (learning rate 0.01 and clip norm 0.5 for all cells; the paper tunes both)",
    )
    return Outcome(claims, [file], rows, notes, tried)


def _sets(settings: Settings) -> list[tuple[str, dict[str, Any], str]]:
    """(name, configuration, what it is) of what there is."""
    steps, folder = 8 if settings.quick else 16, settings.data_dir
    shared = {
        "privacy": {"epsilon": EPSILON, "delta": DELTA},
        "train": {"steps": steps},
        "mechanism": {"kind": "uls", "cohort_size": 64, "group_size": 1, "clip_norm": 0.5},
    }  # fmt: skip
    plays = None if folder is None else folder / "shakespeare_plays"
    found = [(
        "Shakespeare",
        {
            **shared,
            "data": {
                "source": "shakespeare",
                "path": str(plays) if plays and plays.is_dir() else None,
                "tokenizer": "checkpoint",
                "seq_len": 24 if settings.quick else 48,
                "max_examples_per_user": 64,
                "validation_fraction": 0.1,
                "test_fraction": 0.0,
            },
            "model": {"checkpoint": "bundled:quickstart",
                      "overrides": {"remat": "none", "scan_layers": False}},
            "optimizer": {"name": "adam", "learning_rate": 1e-2, "schedule": "cosine"},
            "execution": {"microbatch_size": 32, "strategy": "vmap"},
            "eval": {"max_examples_per_user": 4},
        },
        "Shakespeare by speaking role: a small model of Python's documentation is fine-tuned",
    )]  # fmt: skip
    data, note = _writers(folder)
    if data is not None:
        images = {
            **shared,
            "data": {**data, "validation_fraction": 0.15},
            "model": {"kind": "mlp", "options": {"hidden": [64]}},
            "optimizer": {"name": "adam", "learning_rate": 1e-2, "schedule": "cosine"},
            "execution": {"microbatch_size": 64, "strategy": "vmap"},
            "eval": {"max_examples_per_user": 20},
        }
        found.append(("writers", images, note))
    return found


def _writers(folder: pathlib.Path | None) -> tuple[dict[str, Any] | None, str]:
    if folder is not None and (folder / "femnist").is_dir():
        return {"source": "femnist", "path": str(folder / "femnist")}, "FEMNIST by writer"
    if folder is not None and (folder / "mnist").is_dir():
        made = {"source": "mnist", "path": str(folder / "mnist"), "records_per_user": 40}
        return made, (
            "DPFL_DATA_DIR holds no femnist: writers are made up of 40 images of MNIST each, at "
            "random, so that their images are no more alike than those of others"
        )
    return None, ""


def _losses(
    settings: Settings, name: str, content: dict[str, Any], seeds: int
) -> tuple[Planner, Losses]:
    file = settings.out / f"userlevel-budgets-{name}.yaml"
    file.write_text(yaml.safe_dump({"name": "budgets", **content}, sort_keys=False))
    config: Any = load_config(file, [])
    quiet = Console(quiet=True)
    data, model = read_data(config, quiet)
    sizes = np.diff(data.train.user_offsets)
    params, _ = starting_params(config, data, model, make_mesh(), quiet)
    norms = estimate_sensitivities(model.loss, params, data.train, GROUPS)
    planner = Planner(
        UserStatistics(len(sizes), sizes=sizes),
        norms,
        epsilon=EPSILON,
        delta=DELTA,
        steps=config.train.steps,
    )
    median = median_group_size(sizes)
    keys, trials = [], []
    for budget in BUDGETS:
        arms = [*_cells(planner, budget), planner.option("els", median, budget)]
        for option in arms:
            for seed in range(seeds):
                keys.append((option.kind, option.group_size, budget))
                trials.append(
                    Trial(option.kind, option.group_size, option.size, planner.steps,
                          option.noise_multiplier / option.size, seed=of(seed))
                )  # fmt: skip
    done = settings.out / f"userlevel-budgets-{name}.jsonl"

    def told(count: int, row: dict[str, Any]) -> None:
        settings.console.print(f"{name}: {count} of {len(trials)} runs, loss {row['loss']}")

    found = run_trials(file, [], trials, done, done=told)
    losses: dict[tuple[str, int, int], list[float]] = {key: [] for key in keys}
    for key, row in zip(keys, found, strict=True):
        losses[key].append(math.inf if row["loss"] is None else row["loss"])
    return planner, {key: np.asarray(values) for key, values in losses.items()}


def _cells(planner: Planner, budget: int) -> list[Option]:
    most = planner.users.num_users
    return [planner.option("uls", g, budget // g) for g in GROUPS if 1 <= budget // g <= most]


# ---- verdicts -----------------------------------------------------------------------------------


def _uls(losses: Losses, budget: int) -> dict[int, np.ndarray]:
    return {g: v for (kind, g, b), v in losses.items() if kind == "uls" and b == budget}


def _claims(name: str, losses: Losses, picks: Mapping[int, Option], users: int) -> list[Claim]:
    small, large = BUDGETS[0], BUDGETS[-1]
    both = sorted(set(_uls(losses, small)) & set(_uls(losses, large)))
    few, many = both[0], both[-1]
    apart = {b: losses["uls", many, b] - losses["uls", few, b] for b in (small, large)}
    best = {b: min(_uls(losses, b), key=lambda g: _uls(losses, b)[g].mean()) for b in BUDGETS}

    def regret(choose: Mapping[int, int]) -> np.ndarray:
        """Of each seed, largest over budgets; a size that cannot be run is no choice."""
        found = []
        for b, g in choose.items():
            of = _uls(losses, b)
            found.append(of[g] / of[best[b]] - 1 if g in of else np.full(len(of[best[b]]), np.inf))
        return np.max(found, axis=0)

    kept = best[small] if best[small] in both else few  # too few users for it at the largest
    planned = regret({b: picks[b].group_size for b in BUDGETS})
    fixed = {g: regret(dict.fromkeys(BUDGETS, g)) for g in GROUPS}
    fixed = {g: of for g, of in fixed.items() if np.isfinite(of).all()}
    text = ", ".join(f"always G = {g}: {of.mean():.1%}" for g, of in fixed.items())
    els = {b: next(v for (k, _, c), v in losses.items() if (k, c) == ("els", b)) for b in BUDGETS}
    uls = {b: losses["uls", picks[b].group_size, b] for b in BUDGETS}
    sizes = ", ".join(f"B = {b}: G = {g}" for b, g in best.items())
    share = (
        f"at B = {large} G = {few} draws {large // few / users:.0%} of all users in a step (the "
        "paper's limit of M = 512: 0.15 %)"
    )
    return [
        less(
            f"{name}: examples of a user are worth more, against users, as compute grows",
            apart[large],
            apart[small],
            f"loss at G = {many} less that at G = {few}: at B = {large}, minus at {small}; {share}",
            source="paper",
        ),
        less(
            f"{name}: at the largest budget a larger group than the smallest's best is better",
            losses["uls", max(best[large], kept), large],
            losses["uls", kept, large],
            f"best by mean loss: {sizes}; {share}",
            source="paper",
        ),
        *(
            less(
                f"{name}: choosing G by budget (least noise) loses less than G = {g} for all",
                planned,
                of,
                f"largest excess over a budget's best cell: {planned.mean():.1%}; {text}",
                source="ours",
            )
            for g, of in fixed.items()
        ),
        less(
            f"{name}: the choice of least noise is near the best at every budget",
            planned,
            np.zeros(len(planned)),
            f"largest excess over a budget's best cell, relative; near: {ROOM:.0%}",
            source="ours",
            room=ROOM,
        ),
        less(
            f"{name}: ULS gains more from compute than ELS (median group size)",
            els[small] - els[large],
            uls[small] - uls[large],
            f"fall of the loss from B = {small} to {large}: ELS minus ULS of least noise",
            source="paper",
        ),
    ]


def _rows(name: str, losses: Losses, picks: Mapping[int, Option]) -> list[dict[str, Any]]:
    rows = []
    for (kind, group, budget), values in losses.items():
        planned = kind == "uls" and picks[budget].group_size == group
        row = {"set": name, "budget": budget, "kind": kind, "group_size": group, "planned": planned}
        rows.append({**row, "loss": float(values.mean()), "losses": values.tolist()})
    return rows


def _draw(drawn: Mapping[str, tuple[Losses, Mapping[int, Option]]], file: pathlib.Path) -> None:
    with panel(file, 1, len(drawn), size=(5 * len(drawn), 4), squeeze=False) as grid:
        for ax, (title, (losses, picks)) in zip(grid[0], drawn.items(), strict=True):
            arms = sorted({(kind, group) for kind, group, _ in losses}, reverse=True)
            for kind, group in arms:
                _line(ax, losses, kind, group)
            chosen = [losses["uls", picks[b].group_size, b].mean() for b in BUDGETS]
            ax.plot(BUDGETS, chosen, "o", ms=13, mfc="none", mec="black", label="least noise")
            ticks(ax, BUDGETS, base=2)
            ax.set(xlabel="compute budget B", ylabel="held-out loss", title=title)


def _line(ax: Any, losses: Losses, kind: str, group: int) -> None:
    x: Sequence[int] = [b for b in BUDGETS if (kind, group, b) in losses]
    style = {"uls": "-", "els": "--"}[kind]
    y = [losses[kind, group, b] for b in x]
    band(ax, x, y, linestyle=style, label=f"{kind.upper()}, G = {group}")
