"""An ISRL-DP configuration made into a run: data, parameters, noise, rounds, report."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import dp_accounting
import numpy as np
from rich.console import Console

from dpfl_jax.accounting import Guarantee
from dpfl_jax.accounting.statement import Statement
from dpfl_jax.config import RunConfig
from dpfl_jax.federation.isrl import bounds
from dpfl_jax.federation.isrl.privacy import (
    SiloNoise,
    at_one_delta,
    silo_guarantee,
    worst_guarantee,
)
from dpfl_jax.federation.isrl.relations import relations
from dpfl_jax.federation.isrl.runs.messages import make_scores, run_rounds
from dpfl_jax.federation.isrl.runs.parameters import (
    Parameters,
    check_noise,
    choose,
    effective_silos,
    smoothing,
)
from dpfl_jax.federation.isrl.runs.silos import SiloRecords, load_silos
from dpfl_jax.federation.isrl.runs.tasks import Task, make_task
from dpfl_jax.federation.silo_statement import isrl_statement
from dpfl_jax.run.balance import Balance, Knobs, advice, doubled
from dpfl_jax.run.beside import BASELINE_CAVEAT, show_beside, without_privacy
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.driver import RunResult
from dpfl_jax.run.prepared import Charge, MakeReport, Prepared, run_prepared
from dpfl_jax.run.public_inputs import public_inputs
from dpfl_jax.run.report import PRIVATE_METRICS_CAVEAT, TUNING_CAVEAT, build_report
from dpfl_jax.task import Task as DataTask

_EVALUATION_CAVEAT = (
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


@dataclasses.dataclass(frozen=True)
class IsrlRun(Prepared):
    """Everything a run needs, checked, before anything is written."""

    config: RunConfig
    records: SiloRecords
    task: Task
    parameters: Parameters

    def facts(self) -> dict[str, Any]:
        """Data and noise."""
        noise = self.parameters.noise
        return {
            "data": self.records.fingerprint,
            "noise": None if noise is None else [float(z.noise_multiplier) for z in noise],
        }

    def going_on(self, directory: RunDirectory) -> IsrlRun:
        """With the noise that the run began with."""
        if self.parameters.noise is None:
            return self
        began = [
            dataclasses.replace(z, noise_multiplier=m)
            for z, m in zip(self.parameters.noise, directory.facts["noise"], strict=True)
        ]
        parameters = dataclasses.replace(self.parameters, noise=began)
        return dataclasses.replace(self, parameters=parameters)

    @property
    def unit_key(self) -> str:
        """What makes a record."""
        return self.records.unit_key

    @property
    def public_inputs(self) -> tuple[str, ...]:
        """Columns, bounds, counts."""
        if self.parameters.noise is None:
            return ()
        counts = f"{self.config.federation.silos} silos, and the records of each"
        return isrl_inputs(self.config, self.records.learned, counts)

    def advice(self) -> list[str]:
        """Noise beside signal (``guidance``)."""
        if self.parameters.noise is None:
            return []
        sizes = np.asarray(self.records.train.sizes)
        return advice_for(self.config, self.task, self.parameters, sizes)

    def headline(self) -> list[str]:
        """Data, algorithm."""
        return [
            self.records.description,
            f"{self.config.mechanism.kind}, {self.parameters.rounds} rounds, "
            f"{self.config.mechanism.sampling} batches; {self.task.kind} loss, {self.task.dim} "
            "parameters",
            *self.advice(),
        ]

    def charge(self) -> Charge:
        """All rounds, to the records of the silo that costs most, or of one worse than all."""
        unit, adjacency = "record", "replace one record"
        noise = self.parameters.noise
        if not noise:
            # Infinite at any delta.
            return Charge(dp_accounting.NonPrivateDpEvent(), 0.5, "row", unit, adjacency)
        worst = max(noise, key=lambda z: z.rate)
        worst = dataclasses.replace(
            worst,
            noise_multiplier=min(z.noise_multiplier for z in noise),
            rounds=max(z.rounds for z in noise),
        )
        return Charge(worst.event, max(z.budget.delta for z in noise), "row", unit, adjacency)

    def train(
        self, directory: RunDirectory, console: Console, charge: Callable[[str], Any]
    ) -> tuple[RunResult, MakeReport]:
        """Runs the rounds."""
        check_noise(self.config, np.asarray(self.records.train.sizes), self.parameters)
        evaluate = make_scores(self.task, self.records.test)
        result = self.rounds(evaluate, run_dir=directory, charge=charge, console=console)
        baseline = None
        if self.config.eval.baseline and self.parameters.noise and result.last is not None:
            key = directory.root_key.child("baseline")
            baseline = without_privacy(
                lambda: self.without_privacy().rounds(evaluate, key=key, console=console), console
            )

        def report() -> tuple[dict[str, Any], Statement]:
            made, stated = _report(self, result)
            show_beside(made, baseline)
            return made, stated

        return result, report

    def rounds(self, evaluate: Callable[[Any], dict[str, Any]], **options: Any) -> RunResult:
        """Runs the rounds alone; ``options`` are those of ``run.driver.drive``."""
        return run_rounds(
            self.config,
            self.task,
            self.records.train,
            self.parameters,
            evaluate=evaluate,
            **options,
        )

    def without_privacy(self) -> IsrlRun:
        """The same algorithm with what theory gives it where nobody asks for privacy."""
        open_to_all = self.config.privacy.model_copy(update={"epsilon": None, "delta": None})
        last = self.config.train.model_copy(update={"keep_best": False, "patience": None})
        config = self.config.model_copy(update={"privacy": open_to_all, "train": last})
        parameters = choose(config, self.task, np.asarray(self.records.train.sizes))
        return dataclasses.replace(self, config=config, parameters=parameters)


def isrl_inputs(
    config: RunConfig, learned: DataTask, counts: str, *, remote: bool = False
) -> tuple[str, ...]:
    """What a study takes as public; ``remote``: its silos are elsewhere."""
    data, clip_norm = config.data, config.mechanism.clip_norm
    more = [
        "clip norm: " + ("the loss's own bound" if clip_norm is None else f"{clip_norm:g}"),
        f"bounds: data.max_norm {data.max_norm:g}, data.max_target {data.max_target:g}, "
        f"model.radius {config.model.radius:g}, and those of the theorems that `mechanism` names",
    ]
    if config.federation.weights is not None:
        more.append("weights of silos: federation.weights")
    return public_inputs(counts, None, config, learned, more=more, remote=remote)


def balance_of_messages(config: RunConfig, task: Task, parameters: Parameters) -> Balance:
    """Noise and signal of the mean message of a round, in units of the step size."""
    silos = len(parameters.batches)
    weights = config.federation.weights
    shares = np.full(silos, 1 / silos) if weights is None else np.asarray(weights)
    answering = effective_silos(config.federation.answering, silos) / silos
    stddevs = shares * parameters.stddevs / parameters.batches
    noise = math.sqrt(task.dim * float((stddevs**2).sum()) / answering)
    return Balance(noise, float((shares * parameters.clip_norms).sum()), parameters.rounds)


def advice_for(
    config: RunConfig, task: Task, parameters: Parameters, sizes: np.ndarray
) -> list[str]:
    """Noise beside signal (``guidance``), for silos with so many records."""
    balance = balance_of_messages(config, task, parameters)
    return advice(balance, _knobs(config, task, parameters, sizes))


def _knobs(config: RunConfig, task: Task, parameters: Parameters, sizes: np.ndarray) -> Knobs:
    """What may be changed where noise swamps signal, and what it would do."""

    def would(section: str, key: str, value: Any) -> Callable[[], Balance]:
        def ask() -> Balance:
            before = getattr(config, section)
            if section == "mechanism":
                changed = dataclasses.replace(before, **{key: value})
            else:
                changed = before.model_copy(update={key: value})
            new = config.model_copy(update={section: changed})
            return balance_of_messages(new, task, choose(new, task, sizes))

        return ask

    share = parameters.sources["batch_fraction"][0]
    values = [] if share >= 1.0 else doubled(share, 1.0)
    yield "mechanism.batch_fraction", [(v, would("mechanism", "batch_fraction", v)) for v in values]
    if isinstance(config.privacy.epsilon, float):
        values = doubled(config.privacy.epsilon, math.inf, 4)
        yield "privacy.epsilon", [(v, would("privacy", "epsilon", v)) for v in values]
    if config.mechanism.sampling != "disjoint":
        rounds = [int(r) for r in doubled(parameters.rounds, 1e5, 3)]
        yield "federation.rounds", [(v, would("federation", "rounds", v)) for v in rounds]


def prepare(config: RunConfig, console: Console) -> IsrlRun:
    """Reads the data, fills in what theory gives, calibrates.

    Raises:
      BadInputError: anything wrong with the configuration or the data.
    """
    loss = config.model.loss
    with console.status("reading data"):
        records = load_silos(
            config.data, config.federation, softmax=loss == "softmax", signed=loss == "hinge"
        )
    sizes = np.asarray(records.train.sizes)
    task = dataset_task(config, sizes, records.features, records.classes)
    with console.status("calibrating noise"):
        parameters = choose(config, task, sizes)
    if loss in ("hinge", "absolute") and config.model.smoothing is None:
        parameters.sources["smoothing"] = (task.smoothness, "section 2, or Theorem F.2")
    return IsrlRun(config, records, task, parameters)


def dataset_task(config: RunConfig, sizes: np.ndarray, features: int, classes: int) -> Task:
    """The loss of a configuration for data of these public sizes."""
    bound, beta = config.data.max_norm, None
    if config.model.loss in ("hinge", "absolute") and config.model.smoothing is None:
        beta = smoothing(config, sizes, features, bound)
    return make_task(config.model, features, classes, bound, config.data.max_target, beta)


def run_experiment(
    config: RunConfig, run_dir: str | os.PathLike[str], console: Console
) -> dict[str, Any]:
    """Runs (or resumes) an ISRL-DP configuration and returns its report.

    Raises:
      BadInputError: anything wrong with config, data or run directory; nothing is overwritten.
    """
    return run_prepared(config, run_dir, console, lambda: prepare(config, console))


def guarantee_of(
    prepared: IsrlRun, rounds: int, caveats: tuple[str, ...] = ()
) -> tuple[Guarantee, list[SiloNoise]]:
    """One guarantee that all silos give, and every silo's noise, after ``rounds``.

    Silos may differ in delta: it is stated at the largest, with the largest epsilon there.
    """
    noise = prepared.parameters.noise
    config = prepared.config
    outside = [_EVALUATION_CAVEAT, _SILOS_CAVEAT]
    outside += [*config.data.caveats(), *config.metrics.caveats()]
    if prepared.records.public:
        outside.append(_PUBLIC_CAVEAT)
    if prepared.records.owners:
        outside.append(_OWNERS_CAVEAT)
    if noise is None:
        none = Guarantee(
            unit="none",
            adjacency="none",
            trust="silo-local",
            epsilon=math.inf,
            delta=1.0,
            noise_multiplier=0.0,
            accountant="none",
            sampling=prepared.config.mechanism.sampling,
            caveats=("this run is not private: it is a baseline", *outside),
            steps=rounds,
            released="every message of every silo",
        )
        return none, []
    law = prepared.config.mechanism.arithmetic
    taken = [dataclasses.replace(z, rounds=min(z.rounds, max(rounds, 1)), noise=law) for z in noise]
    if config.eval.baseline:
        outside.append(BASELINE_CAVEAT)
    more = (PRIVATE_METRICS_CAVEAT, *outside, TUNING_CAVEAT, *caveats)
    return worst_guarantee(taken, more), taken


def possible_risk(parameters: Parameters) -> list[dict[str, Any]]:
    """Excess risk that the theorems allow (constants 1, no logarithms): known before training."""
    if parameters.noise is None:
        return []
    lipschitz = float(parameters.clip_norms.max())
    problem = dataclasses.replace(parameters.problem, lipschitz=lipschitz)
    rows = [
        ("this trust model, upper bound (Theorem 2.1)", bounds.upper(problem)),
        ("this trust model, lower bound (Theorem 2.2)", bounds.lower(problem)),
        ("a trusted server, convex lower bound", bounds.central(problem)),
    ]
    return [
        {"bound": name, "sampling": risk.statistical, "privacy": risk.private}
        for name, risk in rows
    ]


def _silo_rows(prepared: IsrlRun, taken: list[SiloNoise]) -> list[dict[str, Any]]:
    sizes, batches = np.asarray(prepared.records.train.sizes), prepared.parameters.batches
    prices = {z: silo_guarantee(z).epsilon for z in set(taken)}
    rows = []
    for i, (size, batch) in enumerate(zip(sizes.tolist(), batches.tolist(), strict=True)):
        row: dict[str, Any] = {"silo": i, "records": size, "batch": batch}
        if taken:
            epsilon = prices[taken[i]]
            row |= {
                "noise_multiplier": taken[i].noise_multiplier,
                "target_epsilon": taken[i].budget.epsilon,
                "epsilon": epsilon if math.isfinite(epsilon) else "inf",
                "delta": taken[i].budget.delta,
            }
        rows.append(row)
    return rows


def _facts(prepared: IsrlRun, guarantee: Guarantee, taken: list[SiloNoise]) -> dict[str, Any]:
    config = prepared.config
    private = bool(taken) and guarantee.private
    return {
        "relations": _plain(_relations(config, taken)) if private else [],
        "silos": _silo_rows(prepared, taken),
        "participation": {
            "silos": config.federation.silos,
            "available": config.federation.answering or config.federation.silos,
            "effective": effective_silos(config.federation.answering, config.federation.silos),
        },
        "possible_risk": possible_risk(prepared.parameters),
        "parameters": {
            name: {"value": value, "from": source}
            for name, (value, source) in prepared.parameters.sources.items()
        },
    }


def _relations(config: RunConfig, taken: list[SiloNoise]) -> list[dict[str, Any]]:
    """Each notion for the silo for which it promises least."""
    distinct = list(dict.fromkeys(at_one_delta(taken)))
    available = config.federation.answering
    alike = len(distinct) == 1 and available in (None, config.federation.silos)
    tables = [relations(z, config.federation.silos, shuffled=alike) for z in distinct]
    rows = []
    for column in zip(*tables, strict=True):
        worst = max(column, key=lambda row: row["epsilon"])
        rows.append({**worst, "delta": max(row["delta"] for row in column)})
    return rows


def _plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {k: "inf" if isinstance(v, float) and math.isinf(v) else v for k, v in row.items()}
        for row in rows
    ]


def _report(prepared: IsrlRun, result: RunResult) -> tuple[dict[str, Any], Statement]:
    config = prepared.config
    guarantee, taken = guarantee_of(prepared, result.accounted, result.caveats)
    report = build_report(
        config.name,
        result,
        guarantee,
        **_facts(prepared, guarantee, taken),
        model={"kind": prepared.task.kind, "parameters": prepared.task.dim},
        task=dataclasses.asdict(prepared.records.learned),
        inputs=prepared.records.inputs,
        data={
            "description": prepared.records.description,
            "held_out": f"data.validation_fraction={config.data.validation_fraction:g} of each "
            "silo's records, chosen by a hash of their owner's id; "
            f"data.split_seed={config.data.split_seed}",
            "silos": config.federation.silos,
            "records": int(np.asarray(prepared.records.train.sizes).sum()),
        },
        mechanism={
            "kind": config.mechanism.kind,
            "sampling": config.mechanism.sampling,
            "clip_norm": float(prepared.parameters.clip_norms[0]),
        },
    )
    return report, isrl_statement(taken, guarantee)


def dry_run(config: RunConfig, console: Console) -> dict[str, Any]:
    """Validates and prices a configuration: parameters, noise, epsilon, possible risk."""
    prepared = prepare(config, console)
    guarantee, taken = guarantee_of(prepared, prepared.parameters.rounds)
    guarantee = prepared.about(guarantee)
    for line in prepared.advice():
        console.print(line, highlight=False)
    balance = balance_of_messages(config, prepared.task, prepared.parameters)
    return {
        "status": "dry-run",
        "name": config.name,
        "population": {
            "silos": config.federation.silos,
            "records": int(np.asarray(prepared.records.train.sizes).sum()),
            "source": prepared.records.description,
        },
        "rounds": prepared.parameters.rounds,
        "noise_over_signal": balance.to_json(),
        "epsilon": guarantee.epsilon if guarantee.private else None,
        "delta": guarantee.delta,
        "privacy": guarantee.to_json(),
        "guarantee": str(guarantee),
        "meaning": isrl_statement(taken, guarantee).in_words(),
        **_facts(prepared, guarantee, taken),
    }
