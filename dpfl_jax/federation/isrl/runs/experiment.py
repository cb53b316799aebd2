"""An ISRL-DP configuration made into a run: data, parameters, noise, rounds, report."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from dpfl_jax.accounting import Guarantee
from dpfl_jax.config import config_fingerprint, config_to_dict
from dpfl_jax.config.isrl import IsrlConfig
from dpfl_jax.federation.isrl.arms import SiloNoise, at_one_delta, silo_guarantee
from dpfl_jax.federation.isrl.message import SiloData
from dpfl_jax.federation.isrl.relations import relations
from dpfl_jax.federation.isrl.runs.loop import Result, run_rounds
from dpfl_jax.federation.isrl.runs.parameters import Parameters, choose, effective_silos, smoothing
from dpfl_jax.federation.isrl.runs.report import possible_risk, write_isrl_report
from dpfl_jax.federation.isrl.runs.sources import SiloRecords, load_silos
from dpfl_jax.federation.isrl.runs.tasks import Task, make_task
from dpfl_jax.federation.report import PRIVATE_METRICS_CAVEAT, TUNING_CAVEAT
from dpfl_jax.run.directory import FINISHED, RunDirectory
from dpfl_jax.training.report import environment

_EVALUATION_CAVEAT = (
    "held-out figures are computed without noise on other records of the same silos: the guarantee "
    "does not cover them; do not publish them"
)
_SILOS_CAVEAT = "the silos are cut from one data set: who holds which record is taken as given"


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything a run needs, checked, before anything is written."""

    config: IsrlConfig
    records: SiloRecords
    task: Task
    parameters: Parameters


def prepare(config: IsrlConfig, console: Console) -> Prepared:
    """Reads the data, fills in what theory gives, calibrates.

    Raises:
      BadInputError: anything wrong with the configuration or the data.
    """
    loss = config.model.loss
    with console.status("reading data"):
        records = load_silos(config.data, softmax=loss == "softmax", signed=loss == "hinge")
    sizes = np.asarray(records.train.sizes)
    bound = config.data.max_norm
    beta = None
    if loss in ("hinge", "absolute") and config.model.smoothing is None:
        beta = smoothing(config, sizes, records.features, bound)
    task = make_task(
        config.model, records.features, records.classes, bound, config.data.max_target, beta
    )
    with console.status("calibrating noise"):
        parameters = choose(config, task, sizes)
    if beta is not None:
        parameters.sources["smoothing"] = (beta, "section 2, or Theorem F.2")
    return Prepared(config, records, task, parameters)


def run_isrl(
    config: IsrlConfig, run_dir: str | os.PathLike[str], console: Console
) -> dict[str, Any]:
    """Runs (or resumes) an ISRL-DP configuration and returns its report.

    Raises:
      BadInputError: anything wrong with config, data or run directory; nothing is overwritten.
    """
    fingerprint = config_fingerprint(config)
    RunDirectory.check(run_dir, fingerprint)
    prepared = prepare(config, console)
    noise = prepared.parameters.noise
    facts = {
        "data": prepared.records.fingerprint,
        "noise": None if noise is None else [float(z.noise_multiplier) for z in noise],
    }
    directory = RunDirectory(run_dir, config_to_dict(config), fingerprint, config.seed, facts)
    try:
        if noise is not None:
            # A resumed run goes on with the noise it began with.
            began = [
                dataclasses.replace(z, noise_multiplier=m)
                for z, m in zip(noise, directory.facts["noise"], strict=True)
            ]
            parameters = dataclasses.replace(prepared.parameters, noise=began)
            prepared = dataclasses.replace(prepared, parameters=parameters)
        return _run(prepared, directory, console)
    finally:
        directory.close()


def make_evaluation(task: Task, data: SiloData) -> Any:
    """``w -> dict``: mean loss over records and over silos, the worst silo's, and accuracy."""

    def per_silo(value: Any, w: jax.Array, data: SiloData) -> jax.Array:
        real = jnp.arange(data.capacity)[None, :] < data.sizes[:, None]
        each = jax.vmap(jax.vmap(value, (None, 0)), (None, 0))(w, data.examples)
        return jnp.where(real, each, 0.0).sum(1)

    @jax.jit  # of the data too: what it captured would be written into the compiled program
    def measured(w: jax.Array, data: SiloData) -> tuple[jax.Array, jax.Array]:
        hits = jnp.zeros(data.num_silos) if task.hit is None else per_silo(task.hit, w, data)
        return per_silo(task.loss, w, data), hits

    def evaluate(w: jax.Array) -> dict[str, Any]:
        losses, hits = (np.asarray(v, np.float64) for v in measured(w, data))
        sizes = np.asarray(data.sizes, np.float64)
        accuracy = None if task.hit is None else float(hits.sum() / sizes.sum())
        return {
            "loss": float(losses.sum() / sizes.sum()),
            "loss_by_silo": float((losses / sizes).mean()),
            "worst_silo": float((losses / sizes).max()),
            "accuracy": accuracy,
            "examples": int(sizes.sum()),
        }

    return evaluate


def _run(prepared: Prepared, directory: RunDirectory, console: Console) -> dict[str, Any]:
    config, records, task = prepared.config, prepared.records, prepared.task
    console.print(
        f"{'resuming' if directory.resumed else 'starting'} [bold]{config.name}[/bold] in "
        f"{directory.path}"
    )
    console.print(records.description)
    console.print(
        f"{config.isrl.algorithm}, {prepared.parameters.rounds} rounds, {config.isrl.sampling} "
        f"batches; {task.kind} loss, {task.dim} parameters"
    )
    trained = make_evaluation(task, records.train)
    result = run_rounds(
        config,
        task,
        records.train,
        prepared.parameters,
        run_dir=directory,
        evaluate=make_evaluation(task, records.test),
        train_loss=lambda w: float(trained(w)["loss_by_silo"]),
        console=console,
    )
    report = _report(prepared, result)
    report["run_dir"] = str(directory.path)
    report["data"]["keyed_digest"] = directory.facts["data"]
    write_isrl_report(directory.path, report, result.metrics)
    return report


def guarantee_of(
    prepared: Prepared, rounds: int, caveats: tuple[str, ...] = ()
) -> tuple[Guarantee, list[SiloNoise]]:
    """One guarantee that all silos give, and every silo's noise, after ``rounds``.

    Silos may differ in delta: it is stated at the largest, with the largest epsilon there.
    """
    noise, outside = prepared.parameters.noise, (_EVALUATION_CAVEAT, _SILOS_CAVEAT)
    if noise is None:
        none = Guarantee(
            unit="none",
            adjacency="none",
            trust="silo-local",
            epsilon=math.inf,
            delta=1.0,
            noise_multiplier=0.0,
            accountant="none",
            sampling=prepared.config.isrl.sampling,
            caveats=("this run is not private: it is a baseline", *outside),
            steps=rounds,
            released="every message of every silo",
        )
        return none, []
    taken = [dataclasses.replace(z, rounds=min(z.rounds, max(rounds, 1))) for z in noise]
    known = {(z.event, z.budget): silo_guarantee(z) for z in at_one_delta(taken)}
    worst = max(known.values(), key=lambda g: g.epsilon)
    more = [PRIVATE_METRICS_CAVEAT, *outside, TUNING_CAVEAT]
    if len(known) > 1:
        more.insert(
            0,
            "silos differ: this holds for all, at the largest of their deltas; the table has what "
            "each promises",
        )
    return (
        dataclasses.replace(
            worst,
            caveats=(*worst.caveats, *more, *caveats),
            released="every message of every silo, hence every model",
        ),
        taken,
    )


def _silo_rows(prepared: Prepared, taken: list[SiloNoise]) -> list[dict[str, Any]]:
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


def _facts(prepared: Prepared, guarantee: Guarantee, taken: list[SiloNoise]) -> dict[str, Any]:
    config = prepared.config
    private = bool(taken) and guarantee.private
    return {
        "privacy": guarantee.to_json(),
        "guarantee": str(guarantee),
        "relations": _plain(_relations(config, taken)) if private else [],
        "silos": _silo_rows(prepared, taken),
        "participation": {
            "silos": config.data.silos,
            "available": config.isrl.available or config.data.silos,
            "effective": effective_silos(config.isrl.available, config.data.silos),
        },
        "possible_risk": possible_risk(prepared.parameters),
        "parameters": {
            name: {"value": value, "from": source}
            for name, (value, source) in prepared.parameters.sources.items()
        },
    }


def _relations(config: IsrlConfig, taken: list[SiloNoise]) -> list[dict[str, Any]]:
    """Each notion for the silo for which it promises least."""
    distinct = list(dict.fromkeys(at_one_delta(taken)))
    available = config.isrl.available
    alike = len(distinct) == 1 and available in (None, config.data.silos)
    tables = [relations(z, config.data.silos, shuffled=alike) for z in distinct]
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


def _report(prepared: Prepared, result: Result) -> dict[str, Any]:
    config = prepared.config
    guarantee, taken = guarantee_of(prepared, result.rounds, result.caveats)
    evaluation = {"initial": result.evaluation(0)}
    if result.interrupted is None:
        evaluation["final"] = result.evaluation(result.rounds)
    rows = [r for r in result.metrics if "outside_guarantee" in r]
    per_second = round(result.messages / result.seconds, 1) if result.seconds else None
    return {
        "status": FINISHED if result.interrupted is None else "interrupted",
        "name": config.name,
        "finished_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "steps": result.rounds,
        **_facts(prepared, guarantee, taken),
        "eval": {name: value for name, value in evaluation.items() if value is not None},
        "throughput": {
            "messages_per_s": per_second,
            "examples_per_s": None
            if per_second is None
            else round(per_second * float(prepared.parameters.batches.mean()), 1),
            "tokens_per_s": None,
        },
        "outside_guarantee": {
            "final_train_loss": rows[-1]["outside_guarantee"]["train_loss"] if rows else None,
        },
        "model": {"kind": prepared.task.kind, "parameters": prepared.task.dim},
        "data": {
            "description": prepared.records.description,
            "silos": config.data.silos,
            "records": int(np.asarray(prepared.records.train.sizes).sum()),
        },
        "mechanism": {
            "kind": f"isrl/{config.isrl.algorithm}",
            "sampling": config.isrl.sampling,
            "arm": config.isrl.arm,
            "clip_norm": float(prepared.parameters.clip_norms[0]),
        },
        "environment": environment(),
    }


def dry_run_isrl(config: IsrlConfig, console: Console) -> dict[str, Any]:
    """Validates and prices a configuration: parameters, noise, epsilon, possible risk."""
    prepared = prepare(config, console)
    guarantee, taken = guarantee_of(prepared, prepared.parameters.rounds)
    return {
        "status": "dry-run",
        "name": config.name,
        "population": {
            "silos": config.data.silos,
            "records": int(np.asarray(prepared.records.train.sizes).sum()),
            "source": prepared.records.description,
        },
        "rounds": prepared.parameters.rounds,
        "epsilon": guarantee.epsilon if guarantee.private else None,
        "delta": guarantee.delta,
        **_facts(prepared, guarantee, taken),
    }
