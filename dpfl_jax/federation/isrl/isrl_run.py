"""Learning without a trusted server from a configuration: data, parameters, noise and report."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import dp_accounting
import numpy as np
from rich.console import Console

from dpfl_jax.accounting import Guarantee
from dpfl_jax.accounting.guarantee import without_infinities
from dpfl_jax.accounting.statement import Statement
from dpfl_jax.config import RunConfig
from dpfl_jax.federation.isrl import theory
from dpfl_jax.federation.isrl.losses import LinearLoss, linear_loss
from dpfl_jax.federation.isrl.parameters import (
    Parameters,
    check_noise,
    choose,
    effective_silos,
    smoothing,
)
from dpfl_jax.federation.isrl.privacy import (
    SiloNoise,
    at_one_delta,
    isrl_statement,
    relations,
    silo_guarantee,
    worst_guarantee,
)
from dpfl_jax.federation.isrl.rounds import IsrlAlgorithm, make_scores
from dpfl_jax.federation.isrl.silos import SiloRecords, load_silos
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.run.algorithm import RunResult
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.driver import Evaluate, LoopConfig
from dpfl_jax.run.pipeline import Balance, Charge, Knob, Run, doubled, knob
from dpfl_jax.run.public_inputs import public_inputs
from dpfl_jax.task import Task

EVALUATION_CAVEAT = (
    "held-out figures are computed without noise on other records of the same silos: the guarantee "
    "does not cover them; do not publish them"
)
_PUBLIC_CAVEAT = (
    "a share of the records, data.public_fraction, is declared public and sets the scale of all: "
    "those records are not protected; data.scale would need none"
)
_OWNERS_CAVEAT = (
    "the unit is a record: somebody who owns several is protected less, as if by several runs"
)
_SILOS_CAVEAT = "the silos are cut from one data set: who holds which record is taken as given"


class IsrlStudy(Run, abc.ABC):
    """An ISRL run, whose silos may be here or remote: all that follows from their sizes.

    Attributes:
      config: the configuration.
      loss: the loss of single records, with its constants.
      parameters: every number of the algorithm, noise included.
      sizes: int [N], records of each silo.
    """

    config: RunConfig
    loss: LinearLoss
    parameters: Parameters
    sizes: np.ndarray

    @property
    def steps(self) -> int:
        return self.parameters.rounds

    @property
    def private(self) -> bool:
        return self.parameters.noise is not None

    @property
    def loop(self) -> LoopConfig:
        return LoopConfig.of(self.config, self.config.execution.rounds_per_block)

    def noise(self, rounds: int) -> list[SiloNoise]:
        """Returns every silo's noise for the first ``rounds`` rounds; empty without privacy."""
        law, rounds = self.config.mechanism.arithmetic, max(rounds, 1)
        return [
            dataclasses.replace(z, rounds=min(z.rounds, rounds), noise=law)
            for z in self.parameters.noise or []
        ]

    def guarantee(self, steps: int, caveats: tuple[str, ...] = ()) -> Guarantee:
        """Returns the guarantee for all silos: the largest epsilon, at the largest delta."""
        if self.private:
            return worst_guarantee(self.noise(steps), caveats)
        return Guarantee(
            unit="none",
            adjacency="none",
            trust="silo-local",
            epsilon=math.inf,
            delta=1.0,
            noise_multiplier=0.0,
            accountant="none",
            sampling=self.config.mechanism.sampling,
            caveats=("this run is not private: it is a baseline", *caveats),
            steps=steps,
            released="every message of every silo",
        )

    def statement(self, steps: int, guarantee: Guarantee) -> Statement:
        return isrl_statement(self.noise(steps), guarantee)

    @property
    def mechanism_facts(self) -> dict[str, Any]:
        mechanism = self.config.mechanism
        return {
            "kind": mechanism.kind,
            "sampling": mechanism.sampling,
            "clip_norm": float(self.parameters.clip_norms[0]),
        }

    def balance(self, config: Any = None) -> Balance:
        if config is None:
            return balance_of_messages(self.config, self.loss, self.parameters)
        return balance_of_messages(config, self.loss, choose(config, self.loss, self.sizes))

    def knobs(self) -> Iterator[Knob]:
        config, epsilon = self.config, self.config.privacy.epsilon
        share = self.parameters.sources["batch_fraction"][0]
        yield knob(config, "mechanism.batch_fraction", [] if share >= 1.0 else doubled(share, 1.0))
        if isinstance(epsilon, float):
            yield knob(config, "privacy.epsilon", doubled(epsilon, math.inf, 4))
        if config.mechanism.sampling != "disjoint":
            yield knob(config, "federation.rounds", [int(r) for r in doubled(self.steps, 1e5, 3)])


@dataclasses.dataclass
class IsrlRun(IsrlStudy):
    """An ISRL run with all silos here, ready to run; ``records`` are the records of all silos."""

    config: RunConfig
    records: SiloRecords
    loss: LinearLoss
    parameters: Parameters

    def __post_init__(self) -> None:
        self.task, self.evaluation_caveat = self.records.learned, EVALUATION_CAVEAT
        self.sizes = np.asarray(self.records.train.sizes)

    def algorithm(
        self, directory: RunDirectory | None = None, console: Console | None = None
    ) -> IsrlAlgorithm:
        del directory, console
        check_noise(self.config, self.sizes, self.parameters)
        mesh = data_parallel_mesh()
        return IsrlAlgorithm(self.config, self.loss, self.records.train, self.parameters, mesh)

    def without_privacy(self, algorithm: Any = None) -> IsrlAlgorithm:
        """Returns the algorithm with the parameters that theory gives without privacy."""
        del algorithm
        privacy = self.config.privacy.model_copy(update={"epsilon": None, "delta": None})
        config = self.config.model_copy(update={"privacy": privacy})
        parameters = choose(config, self.loss, self.sizes)
        return dataclasses.replace(self, config=config, parameters=parameters).algorithm()

    def evaluator(self) -> Evaluate:
        return make_scores(self.loss, self.records.test)

    def facts(self) -> dict[str, Any]:
        noise = self.parameters.noise
        return {
            "data": self.records.fingerprint,
            "noise": None if noise is None else [float(z.noise_multiplier) for z in noise],
        }

    def resume_from(self, directory: RunDirectory) -> IsrlRun:
        parameters = self.parameters.with_noise(directory.facts["noise"])
        return dataclasses.replace(self, parameters=parameters)

    def own_caveats(self) -> tuple[str, ...]:
        public = (_PUBLIC_CAVEAT,) if self.records.public else ()
        owners = (_OWNERS_CAVEAT,) if self.records.owners else ()
        return (_SILOS_CAVEAT, *public, *owners)

    def charge(self) -> Charge:
        """Returns what a ledger is charged: all rounds, with the largest rate and least noise."""
        unit, adjacency = "record", "replace one record"
        noise = self.parameters.noise
        if not noise:
            # Epsilon is infinite at any delta.
            return Charge(dp_accounting.NonPrivateDpEvent(), 0.5, "row", unit, adjacency)
        worst = max(noise, key=lambda z: z.rate)
        worst = dataclasses.replace(
            worst,
            noise_multiplier=min(z.noise_multiplier for z in noise),
            rounds=max(z.rounds for z in noise),
        )
        return Charge(worst.event, max(z.budget.delta for z in noise), "row", unit, adjacency)

    @property
    def unit_key(self) -> str:
        return self.records.unit_key

    @property
    def public_inputs(self) -> tuple[str, ...]:
        if not self.private:
            return ()
        counts = f"{self.config.federation.silos} silos, and the records of each"
        return isrl_inputs(self.config, self.records.learned, counts)

    def headline(self) -> list[str]:
        mechanism = self.config.mechanism
        return [
            self.records.description,
            f"{mechanism.kind}, {self.steps} rounds, {mechanism.sampling} batches; "
            f"{self.loss.kind} loss, {self.loss.dim} parameters",
        ]

    def price(self) -> dict[str, Any]:
        return {
            "population": {
                "silos": self.config.federation.silos,
                "records": int(self.sizes.sum()),
                "source": self.records.description,
            },
            "rounds": self.steps,
            **self._tables(self.noise(self.steps)),
        }

    def report(
        self, directory: RunDirectory, result: RunResult, guarantee: Guarantee
    ) -> dict[str, Any]:
        del directory, guarantee
        data = self.config.data
        return {
            **self._tables(self.noise(result.accounted)),
            "model": {"kind": self.loss.kind, "parameters": self.loss.dim},
            "inputs": self.records.inputs,
            "data": {
                "description": self.records.description,
                "held_out": f"data.validation_fraction={data.validation_fraction:g} of each silo's "
                f"records, chosen by a hash of their owner's id; data.split_seed={data.split_seed}",
                "silos": self.config.federation.silos,
                "records": int(self.sizes.sum()),
            },
        }

    def _tables(self, noise: list[SiloNoise]) -> dict[str, Any]:
        config = self.config
        return {
            "relations": without_infinities(_relations(config, noise)),
            "silos": self._silo_rows(noise),
            "participation": {
                "silos": config.federation.silos,
                "available": config.federation.answering or config.federation.silos,
                "effective": effective_silos(config.federation.answering, config.federation.silos),
            },
            "possible_risk": possible_risk(config, self.parameters),
            "parameters": {
                name: {"value": value, "from": source}
                for name, (value, source) in self.parameters.sources.items()
            },
        }

    def _silo_rows(self, noise: list[SiloNoise]) -> list[dict[str, Any]]:
        prices = {z: silo_guarantee(z).epsilon for z in set(noise)}
        rows = []
        sizes, batches = self.sizes.tolist(), self.parameters.batches.tolist()
        for i, (size, batch) in enumerate(zip(sizes, batches, strict=True)):
            row: dict[str, Any] = {"silo": i, "records": size, "batch": batch}
            if noise:
                row |= {
                    "noise_multiplier": noise[i].noise_multiplier,
                    "target_epsilon": noise[i].budget.epsilon,
                    "epsilon": without_infinities(prices[noise[i]]),
                    "delta": noise[i].budget.delta,
                }
            rows.append(row)
        return rows


def isrl_inputs(
    config: RunConfig, task: Task, counts: str, *, remote: bool = False
) -> tuple[str, ...]:
    """Returns in words what a study takes as public; ``remote`` if silos hold the data."""
    data, clip_norm = config.data, config.mechanism.clip_norm
    more = [
        "clip norm: " + ("the loss's own bound" if clip_norm is None else f"{clip_norm:g}"),
        f"bounds: data.max_norm {data.max_norm:g}, data.max_target {data.max_target:g}, "
        f"model.radius {config.model.radius:g}, and those of the theorems that `mechanism` names",
    ]
    if config.federation.weights is not None:
        more.append("weights of silos: federation.weights")
    return public_inputs(counts, None, config, task, more=more, remote=remote)


def balance_of_messages(config: RunConfig, loss: LinearLoss, parameters: Parameters) -> Balance:
    """Returns noise and signal of the mean message of a round, in units of the step size."""
    silos = len(parameters.batches)
    weights = config.federation.weights
    shares = np.full(silos, 1 / silos) if weights is None else np.asarray(weights)
    answering = effective_silos(config.federation.answering, silos) / silos
    stddevs = shares * parameters.stddevs / parameters.batches
    noise = math.sqrt(loss.dim * float((stddevs**2).sum()) / answering)
    return Balance(noise, float((shares * parameters.clip_norms).sum()), parameters.rounds)


def prepare(config: RunConfig, console: Console) -> IsrlRun:
    """Reads the data, chooses all parameters, and calibrates the noise.

    Raises:
      BadInputError: the configuration or the data are wrong.
    """
    kind = config.model.loss
    with console.status("reading data"):
        records = load_silos(
            config.data, config.federation, softmax=kind == "softmax", signed=kind == "hinge"
        )
    sizes = np.asarray(records.train.sizes)
    loss = loss_for_data(config, sizes, records.features, records.classes)
    with console.status("calibrating noise"):
        parameters = choose(config, loss, sizes)
    if kind in ("hinge", "absolute") and config.model.smoothing is None:
        parameters.sources["smoothing"] = (loss.smoothness, "section 2, or Theorem F.2")
    return IsrlRun(config, records, loss, parameters)


def loss_for_data(config: RunConfig, sizes: np.ndarray, features: int, classes: int) -> LinearLoss:
    """Returns the loss of a configuration for data with these public sizes."""
    bound, beta = config.data.max_norm, None
    if config.model.loss in ("hinge", "absolute") and config.model.smoothing is None:
        beta = smoothing(config, sizes, features, bound)
    return linear_loss(config.model, features, classes, bound, config.data.max_target, beta)


def possible_risk(config: RunConfig, parameters: Parameters) -> list[dict[str, Any]]:
    """Returns the theorems' bounds on the excess risk, with constants 1 and without logarithms."""
    if parameters.noise is None:
        return []
    lipschitz = float(parameters.clip_norms.max())
    problem = dataclasses.replace(parameters.problem, lipschitz=lipschitz)
    upper = ("silos alike, Theorem 2.1", theory.risk_upper_bound(problem))
    if config.mechanism.kind != "minibatch_sgd":
        if config.mechanism.sampling == "disjoint":
            upper = ("any silos, Theorem 3.1", theory.one_pass_risk_upper_bound(problem))
        else:
            upper = (
                "of the empirical risk, Theorem 4.1",
                theory.empirical_risk_upper_bound(problem),
            )
    rows = [
        ("own silo not trusted, either, upper bound", theory.local_risk_upper_bound(problem)),
        (f"this trust model, upper bound ({upper[0]})", upper[1]),
        ("this trust model, lower bound (Theorem 2.2)", theory.risk_lower_bound(problem)),
        ("a shuffler, upper bound (Theorem 5.1)", theory.shuffled_risk_upper_bound(problem)),
        ("a trusted server, convex lower bound", theory.central_risk_lower_bound(problem)),
    ]
    return [
        {"bound": name, "sampling": risk.statistical, "privacy": risk.private}
        for name, risk in rows
    ]


def _relations(config: RunConfig, noise: list[SiloNoise]) -> list[dict[str, Any]]:
    """The rows of ``relations``, with the largest epsilon of any silo; [] if one is infinite."""
    distinct = list(dict.fromkeys(at_one_delta(noise))) if noise else []
    if not all(math.isfinite(z.epsilon) for z in distinct):
        return []
    available = config.federation.answering
    same = len(distinct) == 1 and available in (None, config.federation.silos)
    tables = [relations(z, config.federation.silos, shuffled=same) for z in distinct]
    rows = []
    for column in zip(*tables, strict=True):
        worst = max(column, key=lambda row: row["epsilon"])
        rows.append({**worst, "delta": max(row["delta"] for row in column)})
    return rows
