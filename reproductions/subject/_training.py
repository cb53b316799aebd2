"""Training the papers' five algorithms on one federation: shared by the figures that train."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dpfl_jax.config import RunConfig
from dpfl_jax.config.schema import PrivacyConfig
from dpfl_jax.data import DataConfig
from dpfl_jax.federation.data import FederatedData
from dpfl_jax.federation.engine import OptimizerServer
from dpfl_jax.federation.federated_run import build_federation, spread
from dpfl_jax.federation.participation import SiloFacts
from dpfl_jax.federation.partition import SubjectData, load_subjects
from dpfl_jax.federation.rounds import RoundBuilder
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.models import build_by_name
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.driver import LoopConfig, drive
from dpfl_jax.training.evaluate import Evaluator
from dpfl_jax.training.start import make_optimizer
from reproductions._seeds import of
from reproductions.registry import Settings, Tried
from reproductions.subject._closed_forms import rounds_printed
from reproductions.subject._recipes import (
    Claim,
    DistinctSubjects,
    Horizontal,
    NoiseByBatch,
    Recipe,
    Rounds,
    apply_recipe,
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One algorithm under one recipe.

    Attributes:
      label: in tables and figures.
      kind: of the mechanism.
      recipe: of its noise.
      horizontal: how a paper's recipe pays for several silos.
      optimizer: name and learning rate of the local optimiser; None for the setting's.
    """

    label: str
    kind: str
    recipe: Recipe = "sound"
    horizontal: Horizontal = "paper_sqrt"
    optimizer: tuple[str, float] | None = None


# A verdict on it must say that there is also text A's Theorem 3.11.
USER = "UserLDP, text B"
USER_NOTE = "UserLDP's noise is without text A's Theorem 3.11, which asks for more"
TEXT_A_NOTE = (
    "with Adam; K q is cut to 1 here (the paper's: 0.15), so that text A's noise is UserLDP's"
)
FEW_NOTE = 'text B, E.3, has itself "a noticable drop" with 350 subjects'
# What the papers compare where the federation itself varies.
COMPARED = (
    Run("LocalItemDP", "local_item"),
    Run("LocalGroupDP, papers", "local_group", "paper_batch_z"),
    Run("HiGradAvgDP, text B", "hi_grad_avg", "paper_b"),
)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run gave.

    Attributes:
      run: which.
      accuracy: held-out accuracy after the last round, one per seed.
      curves: per seed, (round, loss, accuracy) of every evaluation.
      claim: what the recipe claims and what is real.
      noise_multiplier: of the first silo.
    """

    run: Run
    accuracy: list[float]
    curves: list[list[tuple[int, float, float]]]
    claim: Claim
    noise_multiplier: float

    @property
    def mean(self) -> float:
        """Mean accuracy over seeds."""
        return float(np.mean(self.accuracy))

    @property
    def loss(self) -> float:
        """Mean held-out loss after the last round, over seeds."""
        return float(np.mean([curve[-1][1] for curve in self.curves]))

    def row(self) -> dict[str, Any]:
        """For the table of numbers."""
        return {
            "run": self.run.label,
            "accuracy": self.mean,
            "accuracies": self.accuracy,
            "loss": self.loss,
            "claimed_epsilon": self.claim.epsilon,
            # A subject is in few batches, and no sampling is counted here.
            "unit": "user" if self.run.kind == "user_ldp" else self.claim.unit,
            "real_epsilon": self.claim.real_epsilon
            if math.isfinite(self.claim.real_epsilon)
            else "none follows",
            "subject_epsilon": self.claim.subject_epsilon,
            "if_constant": self.claim.if_constant,
            "rounds": self.claim.rounds,
            "noise_multiplier": self.noise_multiplier,
            "curve": self.curves[0],
        }


@functools.lru_cache(maxsize=4)
def _subjects(section: str) -> SubjectData:
    return load_subjects(DataConfig(**json.loads(section)))


@functools.lru_cache(maxsize=8)
def _spread(config_json: str) -> FederatedData:
    config = RunConfig.model_validate_json(config_json)
    return spread(_subjects(json.dumps(dataclasses.asdict(config.data))).train, config)


def people_of(data: dict[str, Any]) -> int:
    """Number of subjects who are trained on."""
    return round(0.8 * data["max_users"]) if "max_users" in data else 71


def tried_of(raw: dict[str, Any], seeds: int) -> Tried:
    """The size of a federation as trained here. Nothing is tuned."""
    data, federation = raw["data"], raw["federation"]
    name, rate = federation["local_optimizer"].values()
    rounds, silos = federation["rounds"], federation["silos"]
    return Tried(
        f"{people_of(data)} subjects in {silos} silos, {rounds} rounds (the papers' recipes for "
        f"subjects: {rounds_printed(rounds, silos)}) of {federation['local_steps']} local steps, "
        "batches of "
        f"{raw['mechanism'].get('batch_size', 64):g}, {seeds} seeds (papers: 3,500 subjects of "
        "FEMNIST, 660 of Shakespeare, 100 and 200 rounds, batches of 512 and 100; 350 subjects and "
        "batches of 256 for text B's Small-FEMNIST)",
        fixed=f"nothing ({name.capitalize()}, learning rate {rate:g} and clip norm "
        f"{raw['mechanism'].get('clip_norm', 1.0):g} where no other is named; the papers tune, and "
        "their pseudocode is plain SGD)",
    )


def base_config(settings: Settings, rounds: int, local_steps: int, subjects: int = 350) -> Any:
    """A FEMNIST-like federation on the data at hand: (raw config, note).

    MNIST over 16 silos if ``DPFL_DATA_DIR`` has it, with synthetic writers of 145 images, or of as
    many as there are for so many writers; else scikit-learn's digits with writers of 15 images over
    4 silos.
    """
    mnist = None if settings.data_dir is None else settings.data_dir / "mnist"
    raw: dict[str, Any] = {
        "seed": of(0),
        "federation": {
            "rounds": rounds,
            "local_steps": local_steps,
            "local_optimizer": {"name": "adam", "learning_rate": 0.003},
        },
        "model": {"kind": "mlp", "options": {"hidden": [32]}},
        "mechanism": {"clip_norm": 1.0},
        "privacy": {"epsilon": 4.0, "delta": 1e-5},
        "execution": {"microbatch_size": 64},
    }
    if mnist is not None and pathlib.Path(mnist).is_dir():
        writers = round(subjects / 0.8)  # a fifth is held out
        images = min(145, 60_000 // writers)
        raw["data"] = {
            "source": "mnist",
            "path": str(mnist),
            "records_per_user": images,
            "max_users": writers,
        }
        raw["federation"]["silos"] = 16
        raw["mechanism"] |= {"batch_size": 256, "max_records_per_subject": 16}
        return raw, f"MNIST; 16 silos; writers are synthetic: {images} images of mixed labels each"
    raw["data"] = {"source": "digits", "records_per_user": 15}
    raw["federation"]["silos"] = 4
    raw["mechanism"] |= {"batch_size": 64, "max_records_per_subject": 6}
    return raw, (
        "DPFL_DATA_DIR holds no mnist: scikit-learn's 1,797 digits stand in, 4 silos, synthetic "
        "writers of 15 images; orders of accuracies may differ at this size"
    )


def confined(raw: dict[str, Any]) -> dict[str, Any]:
    """As many records of as many kinds, but people of K records each, all in one silo (H = 1)."""
    cap, data = raw["mechanism"]["max_records_per_subject"], dict(raw["data"])
    if "max_users" in data:
        data["max_users"] = data["max_users"] * data["records_per_user"] // cap
    data["records_per_user"] = cap
    return raw | {"data": data, "federation": raw["federation"] | {"partition": "confined"}}


def train(settings: Settings, raw: dict[str, Any], run: Run, seeds: int, evals: int = 6) -> Trained:
    """Trains one run with several seeds."""
    raw = {k: dict(v) if isinstance(v, dict) else v for k, v in raw.items()}
    raw["mechanism"]["kind"] = run.kind
    if run.optimizer is not None:
        name, rate = run.optimizer
        raw["federation"]["local_optimizer"] = {"name": name, "learning_rate": rate}
    config = RunConfig.model_validate(raw)
    subjects = _subjects(json.dumps(dataclasses.asdict(config.data)))
    data_part = config.model_copy(
        update={
            "privacy": PrivacyConfig(noise_multiplier=1.0),
        }
    )
    data = _spread(data_part.model_dump_json())
    federation = build_federation(config, [SiloFacts.of(silo) for silo in data.silos])
    settings.console.print(f"[dim]{run.label}: calibrating[/dim]")
    delta = config.privacy.delta or 1e-5
    epsilon = config.privacy.epsilon or math.inf
    applied = apply_recipe(federation, run.recipe, epsilon, delta, run.horizontal)
    federation = applied.federation
    builder: Callable[..., RoundBuilder] = RoundBuilder
    if applied.by_group is not None:
        builder = functools.partial(NoiseByBatch, by_group=applied.by_group)
    elif applied.by_subjects:
        builder = DistinctSubjects
    model = build_by_name(config.model.kind, subjects.task, config.model.options)
    mesh = data_parallel_mesh()
    evaluator = Evaluator(model.loss, mesh, 256, model.predict)
    curves = []
    for seed in range(seeds):
        rounds = Rounds(
            builder,
            loss_fn=model.loss,
            params=model.init(jax.random.key(of(seed))),
            data=data,
            federation=federation,
            local_optimizer=make_optimizer(config.federation.local_optimizer, 10**6),
            delta=delta,
            mesh=mesh,
            server=OptimizerServer(),
            keep_local_state=False,
            execution=config.execution,
            show_spent=False,
        )
        result = drive(
            rounds,
            key=RootKey.from_seed(of(seed)),
            evaluate=evaluator.of(subjects.held_out),
            loop=LoopConfig(checkpoint_every=5, eval_every=max(1, federation.rounds // evals)),
            console=settings.console,
        )
        curves.append(
            [
                (r["step"], r["eval"]["loss"], r["eval"]["accuracy"])
                for r in result.metrics
                if "eval" in r
            ]
        )
    return Trained(
        run,
        [curve[-1][2] for curve in curves],
        curves,
        applied.claim,
        federation.silos[0].sigma,
    )
