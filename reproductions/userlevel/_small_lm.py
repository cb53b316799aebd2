"""Fine-tuning in small: a one-layer byte model on the embedded corpus, swept over what is asked.

The paper fine-tunes 350 M parameters on Stack Overflow and CC-News; here a model of 40,000
parameters, pre-trained on Python's standard library, is fine-tuned on the installed packages; a
user is a source file. Directions are compared, not numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import yaml
from rich.console import Console

from dpfl_jax.config import RunConfig, validate_config
from dpfl_jax.data import limit_store
from dpfl_jax.mesh import make_mesh
from dpfl_jax.planning import (
    Option,
    Planner,
    Sensitivities,
    UserStatistics,
    estimate_and_double,
    estimate_sensitivities,
    median_group_size,
)
from dpfl_jax.planning.proxy import Trial, run_trials
from dpfl_jax.training.central_run import read_data
from dpfl_jax.training.evaluate import Evaluator
from dpfl_jax.training.start import starting_params
from reproductions._seeds import of
from reproductions.registry import ERROR_RATE, Claim, Settings, Tried, Tuning, less

NOTE = (
    "a one-layer byte model on the embedded corpus (a user is a source file), Adam and Poisson "
    "batches, instead of 350 M parameters on Stack Overflow and CC-News, Adafactor and shuffled "
    "batches: directions, not numbers"
)
SEED_NOTE = (
    "every cell trains with the noise that its sampling calls for, at a learning rate of its own; "
    "sampling and noise come from public seeds, and so protect nobody"
)
OPTIONS = ("seeds",)
RATE = 0.004
RATES = (0.25, 0.5, 1.0, 2.0)  # factors on it, of which each cell has the best
TUNING_SEEDS = (100, 101)  # none of which is reported
GROUPS = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class Swept:
    """Held-out losses over seeds of each option, in their order, and how they were found."""

    losses: list[np.ndarray]
    tried: Tried


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
        },
        "privacy": {"epsilon": 4.0},
        "optimizer": {"name": "adam", "learning_rate": RATE},
        "train": {
            "steps": 25 if quick else 60,
            "checkpoint_every": 1000,
            "log_every": 1000,
        },
        "execution": {"microbatch_size": 64},
        "eval": {"max_examples_per_user": 64, "max_users": 150},
    }


def config(quick: bool) -> RunConfig:
    """``base``, validated."""
    made = validate_config(base(quick))
    return made


@functools.cache
def start(quick: bool) -> tuple[Any, Any, Any, RunConfig]:
    """Data set, model, pre-trained parameters, configuration."""
    made = config(quick)
    quiet = Console(quiet=True)
    data, model = read_data(made, quiet)
    params, _ = starting_params(made, data, model, make_mesh(), quiet)
    return data, model, params, made


def seeds(settings: Settings) -> int:
    """Per training."""
    return settings.seeds or 5


@functools.cache
def sensitivities(quick: bool) -> Sensitivities:
    """Median gradient norms at the pre-trained model, of 128 users (Appendix F)."""
    data, model, params, _ = start(quick)
    return estimate_sensitivities(model.loss, params, data.train, GROUPS, users=128, batch=16)


@functools.cache
def planner(quick: bool, epsilon: float) -> Planner:
    """Of the users there are; delta as in the paper."""
    data, _, _, made = start(quick)
    sizes = np.diff(data.train.user_offsets)
    return Planner(
        UserStatistics(len(sizes), sizes=sizes),
        sensitivities(quick),
        epsilon=epsilon,
        delta=float(sizes.sum()) ** -1.1,
        steps=made.train.steps,
    )


def uls(planner: Planner, budget: int) -> Option:
    """ULS at a budget, with the sizes of the paper's heuristic (Estimate-and-Double)."""
    group, cohort = estimate_and_double(
        planner.sensitivities.at,
        lambda size: planner.option("uls", 1, size).noise_multiplier,
        budget,
        most_users=planner.users.num_users,
        largest_group=max(GROUPS),
    )
    return planner.option("uls", group, cohort)


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


def better_than_before(where: str, losses: np.ndarray, initial: float) -> Claim:
    """That held-out losses [seeds] lie below the pre-trained checkpoint's."""
    before = np.full(len(losses), initial)
    return less(f"{where}: better than the pre-trained checkpoint", losses, before, source="paper")


def sweep(settings: Settings, options: Sequence[Option]) -> Swept:
    """Trains each option at every seed, with its noise, at the best of the learning rates for it.

    The clip norm is the typical gradient norm at that group size, as the paper's plans assume.
    Finished runs are kept beside the figures, for the next figure and after an interruption.
    """
    tuning = _tune(settings, options)
    best = [of_o.chosen["learning rate"] / RATE for of_o in tuning]
    reported = [of(k) for k in range(seeds(settings))]
    losses = _train(settings, options, best, reported)
    arms = dict(zip(map(name_of, options), tuning, strict=True))
    return Swept(losses, tried(settings, options, losses, arms, fingerprint(settings.quick)))


def name_of(option: Option) -> str:
    """Of an arm."""
    return (
        f"{option.kind.upper()}, G = {option.group_size}, {option.size} a step, noise "
        f"{option.noise_multiplier:.3g}"
    )


def _tune(settings: Settings, options: Sequence[Option]) -> list[Tuning]:
    seeds = [of(k) for k in TUNING_SEEDS]
    means = np.array([
        [found.mean() for found in _train(settings, options, [rate] * len(options), seeds)]
        for rate in RATES
    ])  # fmt: skip
    grid = {"learning rate": [RATE * rate for rate in RATES]}
    return [Tuning(grid, {"learning rate": RATE * RATES[k]}, seeds) for k in means.argmin(0)]


def tried(
    settings: Settings,
    options: Sequence[Option],
    losses: Sequence[np.ndarray],
    tuning: Mapping[str, Tuning],
    data: Mapping[str, str],
) -> Tried:
    """At which size, and whether less noise loses, which says that something is not tuned."""
    steps = 25 if settings.quick else 60
    return Tried(
        f"40,000 parameters, {steps} steps; scored on up to 64 examples of each of 150 users",
        tuning=tuning,
        fixed="clip norm: the median gradient norm at that group size (the paper tunes it)",
        reported=[of(k) for k in range(seeds(settings))],
        doubts=_losing(options, losses),
        data=data,
    )


def _losing(options: Sequence[Option], losses: Sequence[np.ndarray]) -> list[str]:
    """Where a run with less noise and no fewer gradients has the higher loss (Bonferroni)."""
    pairs = [
        (a, b)
        for a, b in itertools.permutations(range(len(options)), 2)
        if (options[a].kind, options[a].group_size) == (options[b].kind, options[b].group_size)
        and options[a].noise < 0.9 * options[b].noise
        and options[a].size >= options[b].size
    ]
    found = []
    for a, b in pairs:
        claim = less("", losses[a], losses[b], source="ours")
        if claim.holds is False and (claim.p_value or 0.0) < ERROR_RATE / len(pairs):
            found.append(f"less noise loses: {name_of(options[a])} to {name_of(options[b])}")
    return found


@functools.cache
def fingerprint(quick: bool) -> dict[str, str]:
    """Of the corpus, which is whatever packages are installed."""
    data, *_ = start(quick)
    return {"training": data.train.fingerprint, "held out": data.validation.fingerprint}


def _train(
    settings: Settings, options: Sequence[Option], rates: Sequence[float], at: Sequence[int]
) -> list[np.ndarray]:
    file = settings.out / f"userlevel-cells-{'quick' if settings.quick else 'full'}.yaml"
    file.write_text(yaml.safe_dump(base(settings.quick), sort_keys=False))
    steps = config(settings.quick).train.steps

    def told(count: int, row: dict[str, Any]) -> None:
        cell = f"{row['kind']}, G = {row['group_size']}, {row['size']} a step, seed {row['seed']}"
        settings.console.print(f"{cell}: loss {row['loss']}", highlight=False)

    found: dict[Trial, float] = {}
    trials = [
        [
            Trial(o.kind, o.group_size, o.size, steps, o.noise_multiplier / o.size, rate, seed)
            for seed in at
        ]
        for o, rate in zip(options, rates, strict=True)
    ]
    for clip in sorted({option.sensitivity for option in options}):
        part = [t for o, of_o in zip(options, trials) if o.sensitivity == clip for t in of_o]
        override = f"mechanism.clip_norm={clip:.4g}"
        rows = run_trials(file, [override], part, file.with_suffix(".jsonl"), done=told)
        for trial, row in zip(part, rows, strict=True):
            found[trial] = math.inf if row["loss"] is None else row["loss"]
    return [np.array([found[trial] for trial in of_o]) for of_o in trials]


def row(option: Option, losses: np.ndarray, **more: Any) -> dict[str, Any]:
    """Of the numbers behind a figure."""
    names = ("kind", "group_size", "size", "noise_multiplier")
    about = {name: getattr(option, name) for name in names}
    return {**about, **more, "loss": float(losses.mean()), "losses": losses.tolist()}
