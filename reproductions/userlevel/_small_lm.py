"""Fine-tuning in small: a one-layer byte model on the embedded corpus, swept over what is asked.

The paper fine-tunes 350 M parameters on Stack Overflow and CC-News; here a model of 40,000
parameters, pre-trained on Python's standard library, is fine-tuned on the installed packages; a
user is a source file. Directions are compared, not numbers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import yaml
from rich.console import Console

from dpfl_jax.config import RunConfig, validate_config
from dpfl_jax.config.kinds import CENTRAL
from dpfl_jax.data import limit_store
from dpfl_jax.mesh import make_mesh
from dpfl_jax.planning import (
    Option,
    Planner,
    Sensitivities,
    Users,
    estimate_sensitivities,
    median_group_size,
)
from dpfl_jax.planning.sweep import Sweep, at_budget
from dpfl_jax.training.central_run import read_data
from dpfl_jax.training.evaluate import Evaluator
from dpfl_jax.training.start import starting_params
from reproductions._seeds import of
from reproductions.registry import Claim, Settings, less

NOTE = (
    "a one-layer byte model on the embedded corpus (a user is a source file) instead of 350 M "
    "parameters on Stack Overflow and CC-News: directions, not numbers"
)
SEED_NOTE = "sampling and noise of all cells come from public seeds, and so protect nobody"
OPTIONS = ("seeds",)
RATES = (0.004, 0.012)
GROUPS = (1, 2, 4, 8, 16)


def base(quick: bool) -> dict[str, Any]:
    """The configuration that all figures start from."""
    return {
        "name": "small",
        "seed": 0,
        "data": {
            "source": "python_source",
            "seq_len": 64,
            "validation_fraction": 0.15,
            "test_fraction": 0.0,
        },
        "model": {"size": "tiny", "overrides": {"num_layers": 1, "embed_dim": 48, "num_heads": 2}},
        "pretrain": {
            "steps": 300,
            "batch_size": 64,
            "optimizer": {
                "name": "adamw",
                "learning_rate": 6e-3,
                "schedule": "cosine",
                "warmup_steps": 10,
            },
        },
        "mechanism": {
            "kind": "uls",
            "group_size": 4,
            "cohort_size": 64,
            "clip_norm": 0.3,
            "clipping": "normalized",
        },
        "privacy": {"epsilon": 4.0},
        "optimizer": {"name": "adam", "learning_rate": 5e-3},
        "train": {
            "steps": 25 if quick else 60,
            "checkpoint_every": 1000,
            "log_every": 1000,
        },
        "execution": {"microbatch_size": 64},
        "eval": {"max_examples_per_user": 2, "max_users": 300},
    }


def config(quick: bool) -> RunConfig:
    """``base``, validated."""
    made = validate_config(base(quick))
    assert isinstance(made, RunConfig)
    return made


@functools.cache
def start(quick: bool) -> tuple[Any, Any, Any, RunConfig]:
    """Data set, model, pre-trained parameters, configuration."""
    made = config(quick)
    quiet = Console(quiet=True)
    data, model = read_data(made, quiet)
    params, _ = starting_params(made, data, model, make_mesh(), quiet)
    return data, model, params, made


@functools.cache
def sensitivities(quick: bool) -> Sensitivities:
    """Median gradient norms at the pre-trained model, of 128 users (Appendix F)."""
    data, model, params, _ = start(quick)
    return estimate_sensitivities(model.loss, params, data.train, GROUPS, users=128, batch=16)


def planner(quick: bool, epsilon: float) -> Planner:
    """Of the users there are; delta as in the paper."""
    data, _, _, made = start(quick)
    sizes = np.diff(data.train.user_offsets)
    return Planner(
        Users(len(sizes), sizes=sizes),
        sensitivities(quick),
        epsilon=epsilon,
        delta=float(sizes.sum()) ** -1.1,
        steps=made.train.steps,
    )


def least_noise(planner: Planner, budget: int) -> Option:
    """The planner's ULS at a budget."""
    users = planner.users.num_users
    cells = [planner.uls(g, budget // g) for g in GROUPS if budget // g <= users]
    return min(cells, key=lambda option: option.noise)


@functools.cache
def median(quick: bool) -> int:
    """The ELS group size of the heuristic."""
    data, *_ = start(quick)
    return median_group_size(np.diff(data.train.user_offsets))


@functools.cache
def initial_loss(quick: bool) -> float:
    """Held-out loss of the pre-trained checkpoint."""
    data, model, params, made = start(quick)
    held_out = limit_store(data.validation, made.eval.max_users, made.eval.max_examples_per_user)
    return Evaluator(model.loss, make_mesh())(params, held_out).loss


def by_seed(rows: Sequence[Mapping[str, Any]], *keys: str) -> dict[Any, np.ndarray]:
    """Held-out losses [seeds] of the rows that agree in ``keys``, by their values."""
    found: dict[Any, dict[int, float]] = {}
    for row in rows:
        key = tuple(row[k] for k in keys) if len(keys) > 1 else row[keys[0]]
        found.setdefault(key, {})[row["seed"]] = row["loss"]
    return {key: np.array([of[seed] for seed in sorted(of)]) for key, of in found.items()}


def better_than_before(where: str, losses: np.ndarray, initial: float) -> Claim:
    """That held-out losses [seeds] lie below the pre-trained checkpoint's."""
    before = np.full(len(losses), initial)
    return less(f"{where}: better than the pre-trained checkpoint", losses, before, source="paper")


def mean_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the first seed, with means over seeds as losses, and the losses."""
    axes = [k for k in rows[0] if k in ("kind", "group_size", "cohort_size", "budget", "epsilon")]
    found = by_seed(rows, *axes)
    first = [row for row in rows if row["seed"] == of(0)]
    losses = [found[tuple(row[k] for k in axes)] for row in first]
    return [
        {**row, "loss": float(of.mean()), "losses": of.tolist()} for row, of in zip(first, losses)
    ]


def cells(
    settings: Settings,
    kind: str,
    group: int,
    axes: Mapping[str, Sequence[Any]],
    extra: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Best held-out losses (over learning rates) of one mechanism and group size, of each seed.

    The clip norm is the typical gradient norm at that group size, as the paper's plans assume.
    Finished cells are kept beside the figures, for the next figure and after an interruption.
    """
    norms = sensitivities(settings.quick)
    clip_norm = norms.example if kind == "els" else norms.at(group)
    chosen = config(settings.quick).mechanism
    mechanism = CENTRAL.dump(at_budget(chosen, kind, chosen.compute_budget, group))
    mechanism["clip_norm"] = float(f"{clip_norm:.4g}")
    overrides = (f"mechanism={json.dumps(mechanism)}", *extra)
    content = base(settings.quick)
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]
    folder = (settings.out / "userlevel-cells").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    file: pathlib.Path = folder / f"base-{digest}.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    sweep = Sweep(
        folder,
        file,
        {
            **axes,
            "seed": [of(k) for k in range(settings.seeds or (1 if settings.quick else 3))],
            "learning_rate": list(RATES[-1:] if settings.quick else RATES),
        },
        overrides,
        tuned=("learning_rate",),
    )
    sweep.run(settings.console)
    return [{"kind": kind, "group_size": group, **row} for row in sweep.best()]
