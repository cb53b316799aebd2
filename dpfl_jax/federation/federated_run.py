"""A federated configuration made into a run: data, silos, noise, rounds, report."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from dpfl_jax.accounting import Guarantee
from dpfl_jax.accounting.statement import Statement
from dpfl_jax.config import RunConfig
from dpfl_jax.data.labels import far_from_order_1
from dpfl_jax.data.splits import limit_store
from dpfl_jax.data.store import Store, unit_key_of
from dpfl_jax.federation.accountant import calibrate_federation, silo_epsilons, whole_event
from dpfl_jax.federation.data import FederatedData
from dpfl_jax.federation.federated import run_rounds
from dpfl_jax.federation.federation import Federation, SiloPlan
from dpfl_jax.federation.guarantee import federated_guarantee
from dpfl_jax.federation.guidance import balance_of
from dpfl_jax.federation.mechanisms import (
    Records,
    SiloFacts,
    SiloMechanism,
    Subjects,
    WholeBatch,
)
from dpfl_jax.federation.personal.personalise import (
    personal_guarantee,
    personalise,
    public_part,
    public_setting,
    published,
)
from dpfl_jax.federation.personal.records import Personal
from dpfl_jax.federation.placement import spread, subject_keys
from dpfl_jax.federation.server import OptimizerServer
from dpfl_jax.federation.silo_statement import federated_statement, personal_statement
from dpfl_jax.federation.subjects import SubjectData, load_subjects
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.models import build_by_name
from dpfl_jax.run.balance import Balance, Knobs, advice, doubled
from dpfl_jax.run.beside import BASELINE_CAVEAT, show_beside, without_privacy
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.driver import Pace, RunResult
from dpfl_jax.run.prepared import Charge, MakeReport, Prepared, run_prepared
from dpfl_jax.run.public_inputs import not_people, public_inputs
from dpfl_jax.run.report import PRIVATE_METRICS_CAVEAT, TUNING_CAVEAT, build_report
from dpfl_jax.sampling import FixedSize, Poisson
from dpfl_jax.task import Task
from dpfl_jax.training.central_run import make_optimizer
from dpfl_jax.training.evaluate import Evaluator
from dpfl_jax.training.own_model import OwnModel

EVALUATION_CAVEAT = {
    "by_user": "held-out figures are computed without noise on subjects who are not in the "
    "training set: the guarantee does not cover those subjects",
    "within_user": "held-out figures are computed without noise on other records of the training "
    "subjects: the guarantee does not cover them; do not publish them",
}
# Share of records left out by the cap beyond which a run says so aloud.
_MANY = 0.2


def build_federation(config: RunConfig, data: FederatedData) -> Federation:
    """The federation of a config on its data, not yet calibrated."""
    return federation_of(config, [SiloFacts.of(silo) for silo in data.silos])


def federation_of(config: RunConfig, facts: Sequence[SiloFacts]) -> Federation:
    """The federation of a config for silos of these public sizes, not yet calibrated."""
    section, mechanism = config.federation, config.mechanism
    weights = section.weights or (1.0,) * section.silos
    reach = section.max_silos_per_subject
    if reach is None:
        reach = 1 if section.partition == "confined" else section.silos
    cohort: FixedSize | Poisson | None = None
    if section.participation_prob is not None and section.participation_prob < 1:
        cohort = Poisson(section.participation_prob)
    if section.silos_per_round is not None and section.silos_per_round < section.silos:
        cohort = FixedSize(section.silos_per_round)
    plans = tuple(
        SiloPlan(mechanism, known, section.local_steps, weight)
        for known, weight in zip(facts, weights, strict=True)
    )
    return Federation(plans, section.rounds, reach, cohort)


def calibrated(config: RunConfig, federation: Federation, delta: float) -> Federation:
    """The federation with its noise: the one that is configured, or what the target asks for."""
    if not federation.mechanism.private or config.mechanism.noise_multiplier is not None:
        return federation
    assert config.privacy.epsilon is not None
    return calibrate_federation(federation, config.privacy.epsilon, delta)


def noised(
    config: RunConfig, facts: Sequence[SiloFacts], noise: Sequence[float] | None = None
) -> tuple[Federation, Any]:
    """The federation with its noise, and declared groups of budgets, from public numbers alone.

    Args:
      config: the study's.
      facts: of all silos.
      noise: of a plan; None: calibrated.

    Raises:
      BadInputError: no noise meets the target.
    """
    federation, delta = federation_of(config, facts), config.privacy.delta
    assert delta is not None
    if config.mechanism.participation.personal:
        setting = public_setting(config, federation, delta, None if noise is None else noise[0])
        return public_part(config, federation, setting)
    if noise is not None:
        return federation.with_noise(noise), ()
    return calibrated(config, federation, delta), ()


@dataclasses.dataclass(frozen=True)
class FederatedRun(Prepared):
    """Everything a run needs, checked, before anything is written."""

    config: RunConfig
    subjects: SubjectData
    data: FederatedData
    federation: Federation
    delta: float
    model: Any
    held_out: Store
    personal: Personal | None = None

    def facts(self) -> dict[str, Any]:
        """Data (with budgets and rates, where records have them), noise, delta."""
        noise = [p.mechanism.noise_multiplier for p in self.federation.silos]
        return {"data": identity(self.data, self.personal), "noise": noise, "delta": self.delta}

    def going_on(self, directory: RunDirectory) -> FederatedRun:
        """With the noise and delta that the run began with; personal rates follow them."""
        if self.personal is not None and directory.writes:
            self.personal.remember(directory.path)
        began = directory.facts["noise"]
        now = dataclasses.replace(self, delta=directory.facts["delta"])
        if not directory.resumed or any(sigma is None for sigma in began):
            return now
        if self.personal is not None:
            return _personalised(now, began[0])
        return dataclasses.replace(now, federation=self.federation.with_noise(began))

    @property
    def unit_key(self) -> str:
        """What makes a subject, or a record."""
        return unit_key_in(self.federation.mechanism, self.subjects.train)

    @property
    def public_inputs(self) -> tuple[str, ...]:
        """Columns, bounds, counts."""
        if not self.federation.mechanism.private:
            return ()
        subjects, records = self.subjects.train.num_users, self.data.num_records
        counts = f"{self.data.num_silos} silos, {records:,} records after the cap, "
        counts += f"{subjects:,} subjects, and those of each silo"
        return federated_inputs(self.config, self.subjects.task, counts)

    def warnings(self) -> list[str]:
        """Records that the cap leaves out; that subjects do not look like people."""
        mechanism = self.federation.mechanism
        alone = None
        if mechanism.private and mechanism.unit == "subject":
            alone = not_people(self.subjects.train, "subject")
        far = far_from_order_1(self.subjects.train) if mechanism.private else None
        found = (_kept(self).get("warning"), alone, far)
        return [f"warning: {text}" for text in found if text is not None]

    def headline(self) -> list[str]:
        """Data, silos, model."""
        kept, config = _kept(self), self.config
        lines = [
            self.subjects.description,
            f"{config.federation.silos} silos, {kept['records']} records in training, "
            f"{kept['dropped_by_cap']} left out by the cap; {config.model.what} with "
            f"{self.model.num_params:,} parameters",
        ]
        return [*lines, *self.warnings(), *self.advice()]

    def advice(self) -> list[str]:
        """Noise beside signal (``guidance``)."""
        if not self.federation.mechanism.private:
            return []
        facts = [plan.facts for plan in self.federation.silos]
        privacy = self.config.privacy.model_copy(update={"delta": self.delta})
        config = self.config.model_copy(update={"privacy": privacy})
        return advice(self.balance, knobs(config, facts, self.model.num_params))

    @property
    def balance(self) -> Balance:
        """Of noise and signal."""
        return balance_of(self.federation, self.model.num_params)

    def charge(self) -> Charge:
        """All rounds, to one unit of the whole federation."""
        event, key = whole_event(self.federation, self.delta), unit_key_of(self.subjects.train)
        if not self.federation.mechanism.private:
            return Charge(event, self.delta, key, "subject", "add-or-remove one subject")
        guarantee = self.guarantee(self.federation.rounds)
        key = key if guarantee.unit == "subject" else "row"
        return Charge(event, self.delta, key, guarantee.unit, guarantee.adjacency)

    def train(
        self, directory: RunDirectory, console: Console, charge: Callable[[str], Any]
    ) -> tuple[RunResult, MakeReport]:
        """Runs the rounds."""
        if self.personal is not None:
            self.personal.check_rates(self.data)
        config, model = self.config, self.model
        predict = model.predict if self.subjects.task.kind == "classes" else None
        evaluator = Evaluator(
            model.loss,
            data_parallel_mesh(),
            config.eval.batch_size,
            predict,
            classes=self.subjects.task.classes,
        )
        evaluate, pace = evaluator.of(self.held_out), Pace.of(config)
        result = self.rounds(
            evaluate=evaluate, pace=pace, run_dir=directory, charge=charge, console=console
        )
        baseline = None
        if config.eval.baseline and self.federation.mechanism.private and result.last is not None:
            key, plain = directory.root_key.child("baseline"), self.without_privacy()
            pace = dataclasses.replace(pace, keep_best=False, patience=None)
            baseline = without_privacy(
                lambda: plain.rounds(
                    evaluate=evaluate, pace=pace, key=key, console=console, show_spent=False
                ),
                console,
            )

        def report() -> tuple[dict[str, Any], Statement]:
            guarantee = self.guarantee(result.accounted, result.caveats)
            made = _report(self, result, guarantee)
            if self.personal is not None:
                summary = self.personal.write(directory.path, result.accounted)
                # The rest is computed from the budgets, and stays with the silos.
                told = ("policy", "rounds", "over_budget")
                made["outside_guarantee"]["personal"] = {name: summary[name] for name in told}
            show_beside(made, baseline)
            return made, _statement(self, result.accounted, guarantee)

        return result, report

    def rounds(self, **options: Any) -> RunResult:
        """Runs the rounds alone; ``options`` are those of ``run.driver.drive``."""
        config, section = self.config, self.config.federation
        return run_rounds(
            loss_fn=self.model.loss,
            params=self.model.init(jax.random.key(config.init_seed)),
            data=self.data,
            federation=self.federation,
            local_optimizer=make_optimizer(
                section.local_optimizer, section.rounds * section.local_steps
            ),
            delta=self.delta,
            server=OptimizerServer(make_optimizer(section.server_optimizer, section.rounds)),
            keep_local_state=section.local_state == "keep",
            mesh=data_parallel_mesh(),
            execution=config.execution,
            **options,
        )

    def without_privacy(self) -> FederatedRun:
        """The same without noise. It clips, too: its learning rate is that of clipped gradients."""
        quiet = self.federation.with_noise([0.0] * len(self.federation.silos))
        return dataclasses.replace(self, federation=quiet)

    def guarantee(self, rounds: int, caveats: tuple[str, ...] = ()) -> Guarantee:
        """What holds after so many rounds."""
        caveats = (*_caveats(self), *caveats)
        if self.personal is not None:
            return personal_guarantee(self.personal, rounds, caveats)
        return federated_guarantee(
            self.federation,
            self.delta,
            rounds,
            caveats,
            num_subjects=self.subjects.train.num_users,
        )


def unit_key_in(mechanism: SiloMechanism, store: Store) -> str:
    """What makes a subject, or a record, of a store in silos."""
    key = unit_key_of(store)
    return key if mechanism.unit == "subject" else f"row (subjects by {key})"


def federated_inputs(
    config: RunConfig, task: Task, counts: str, *, remote: bool = False
) -> tuple[str, ...]:
    """What a study takes as public; ``remote``: its silos are elsewhere."""
    more: list[str] = []
    if config.mechanism.participation.personal:
        budgets = config.privacy.budgets
        declared = budgets.kind != "column" or budgets.declared is not None
        more += ["typical budgets: privacy.budgets"] if declared else []
    if config.federation.weights is not None:
        more.append("weights of silos: federation.weights")
    return public_inputs(counts, config.mechanism.bounds, config, task, more=more, remote=remote)


def knobs(config: RunConfig, facts: Sequence[SiloFacts], dim: int) -> Knobs:
    """What may be changed where noise swamps signal, and what it would do.

    Args:
      config: with its ``privacy.delta``.
      facts: public sizes of all silos.
      dim: number of parameters.
    """
    mechanism, drawn = config.mechanism, config.mechanism.participation
    by_parts = "mechanism.participation" if mechanism.kind == "custom" else "mechanism"

    def would(section: str, key: str, value: Any) -> Callable[[], Balance]:
        def ask() -> Balance:
            old = getattr(config, section)
            if section == "mechanism":
                part = dataclasses.replace(old.participation, **{key: value})
                new = dataclasses.replace(old, participation=part)
            else:
                new = old.model_copy(update={key: value})
            federation, _ = noised(config.model_copy(update={section: new}), facts)
            return balance_of(federation, dim)

        return ask

    def knob(section: str, key: str, values: Sequence[Any]) -> tuple[str, list[Any]]:
        where = by_parts if section == "mechanism" else section
        return f"{where}.{key}", [(value, would(section, key, value)) for value in values]

    largest = max(known.num_records for known in facts)
    own = {field.name: getattr(drawn, field.name) for field in dataclasses.fields(drawn)}
    if own.get("batch_size") is not None:
        yield knob("mechanism", "batch_size", doubled(own["batch_size"], largest))
    elif own.get("sampling_prob") is not None:
        yield knob("mechanism", "sampling_prob", doubled(own["sampling_prob"], 1.0))
    elif drawn.personal and drawn.expected_batch is None:
        yield knob("federation", "local_steps", doubled(config.federation.local_steps, 1e3, 3))
    if (cap := own.get("max_items_per_subject")) is not None:
        smaller = [c for c in (cap // 2, cap // 4, 1) if 0 < c < cap]
        yield knob("mechanism", "max_items_per_subject", smaller)
    if config.privacy.epsilon is not None:
        yield knob("privacy", "epsilon", doubled(config.privacy.epsilon, math.inf, 4))
    if isinstance(drawn, Records | WholeBatch) and mechanism.unit == "subject":
        same = {name: own[name] for name in ("batch_size", "sampling_prob")}
        most = drawn.max_items_per_subject
        whole = Subjects(**same, max_items_per_subject=most, group_size=most)
        uls = dataclasses.replace(mechanism, participation=whole)

        def by_subject() -> Balance:
            federation, _ = noised(config.model_copy(update={"mechanism": uls}), facts)
            return balance_of(federation, dim)

        kind = whole.kind if uls.kind == "custom" else uls.kind
        yield f"{by_parts}.kind", [(kind, by_subject)]
    yield knob("federation", "rounds", [int(r) for r in doubled(config.federation.rounds, 1e6, 3)])


def _personalised(prepared: FederatedRun, noise: float | None = None) -> FederatedRun:
    """Sets noise and rates of a federation with personal budgets."""
    config, store = prepared.config, prepared.subjects.train
    keys = subject_keys(store, config.federation.partition_seed)
    federation, data, personal = personalise(
        config, prepared.federation, prepared.data, store, keys, prepared.delta, noise
    )
    return dataclasses.replace(prepared, federation=federation, data=data, personal=personal)


def read_subjects(config: RunConfig) -> SubjectData:
    """The subjects of a configuration, with the column of their budgets if there is one."""
    budgets = config.privacy.budgets
    column = budgets.column if budgets.kind == "column" and budgets.path is None else None
    return load_subjects(config.data, () if column is None else (column,))


def prepare(
    config: RunConfig, console: Console, subjects: SubjectData | None = None
) -> FederatedRun:
    """Reads the data, spreads it, calibrates.

    Args:
      config: the configuration.
      console: for people.
      subjects: instead of what the configuration names.

    Raises:
      BadInputError: anything wrong with the configuration or the data.
    """
    section = config.federation
    make_optimizer(section.local_optimizer, section.rounds * section.local_steps)
    make_optimizer(section.server_optimizer, section.rounds)
    with console.status("reading data"):
        subjects = read_subjects(config) if subjects is None else subjects
        data = spread(subjects.train, config, subjects.task.classes or None)
    if config.model.module is not None:
        model = OwnModel.of(config.model, subjects.task, subjects.train, config.init_seed)
    else:
        model = build_by_name(config.model.kind, subjects.task, config.model.options)
    federation = build_federation(config, data)
    federation.check(data)
    delta = config.privacy.delta
    delta = float(subjects.train.num_users) ** -1.1 if delta is None else delta
    held_out = limit_store(
        subjects.held_out, config.eval.max_users, config.eval.max_examples_per_user
    )
    prepared = FederatedRun(config, subjects, data, federation, delta, model, held_out)
    with console.status("calibrating noise"):
        if config.mechanism.participation.personal:
            return _personalised(prepared)
        federation = calibrated(config, federation, delta)
    return dataclasses.replace(prepared, federation=federation)


def run_experiment(
    config: RunConfig, run_dir: str | os.PathLike[str], console: Console
) -> dict[str, Any]:
    """Runs (or resumes) a federated configuration and returns its report.

    Raises:
      BadInputError: anything wrong with config, data or run directory; nothing is overwritten.
    """

    def ready() -> FederatedRun:
        prepared = prepare(config, console)
        if prepared.personal is not None:
            section = config.privacy.budgets
            source = section.path or f"privacy.budgets.column={section.column} of the data"
            prepared.personal.check_unchanged(pathlib.Path(run_dir), source)
        return prepared

    return run_prepared(config, run_dir, console, ready)


def identity(data: FederatedData, personal: Personal | None) -> str:
    """Identifies what is drawn from: data, rates in them and, where records have them, budgets.

    A run that went on with other rates would spend what its report does not say, and add the same
    noise to the rounds that it takes again.
    """
    if personal is None:
        return data.fingerprint
    digest = hashlib.sha256(data.fingerprint.encode())
    digest.update(np.ascontiguousarray(personal.budgets).tobytes())
    return digest.hexdigest()


def _caveats(prepared: FederatedRun) -> tuple[str, ...]:
    config = prepared.config
    evaluation = EVALUATION_CAVEAT[config.data.split]
    if not prepared.federation.mechanism.private:
        return (evaluation,)
    caveats = [PRIVATE_METRICS_CAVEAT, evaluation, TUNING_CAVEAT]
    if config.eval.baseline:
        caveats.append(BASELINE_CAVEAT)
    return (*caveats, *config.data.caveats(), *config.metrics.caveats())


def _kept(prepared: FederatedRun) -> dict[str, Any]:
    """What the cap per subject and silo left: counts that the guarantee takes as public."""
    before, after = prepared.subjects.train.num_examples, prepared.data.num_records
    found: dict[str, Any] = {
        "records": after,
        "records_before_cap": before,
        "dropped_by_cap": before - after,
    }
    if before - after <= _MANY * before:
        return found
    cap = prepared.config.mechanism.participation.max_items_per_subject
    advice = "raise it"
    if prepared.config.federation.partition != "natural":  # where records lie is ours to say
        advice += ", or spread subjects over more silos"
    found["warning"] = (
        f"mechanism.max_items_per_subject={cap} leaves out {before - after} of {before} records "
        f"({(before - after) / before:.0%}): {advice}"
    )
    return found


def _silo_rows(prepared: FederatedRun) -> list[dict[str, Any]]:
    federation = prepared.federation
    alone = silo_epsilons(federation, prepared.delta)
    return [
        {
            "silo": i,
            "records": plan.facts.num_records,
            "subjects": plan.facts.num_subjects,
            "sampling_prob": plan.mechanism.participation.probability(plan.facts),
            "local_steps": plan.local_steps,
            "noise_multiplier": plan.mechanism.sigma,
            "epsilon_alone": "inf" if math.isinf(epsilon) else epsilon,
        }
        for i, (plan, epsilon) in enumerate(zip(federation.silos, alone))
    ]


def _statement(prepared: FederatedRun, rounds: int, guarantee: Guarantee) -> Statement:
    federation, personal = prepared.federation, prepared.personal
    if personal is not None:
        return personal_statement(federation.mechanism, published(personal), rounds, guarantee)
    subjects = prepared.subjects.train.num_users
    return federated_statement(federation, rounds, subjects, guarantee)


def _report(prepared: FederatedRun, result: RunResult, guarantee: Guarantee) -> dict[str, Any]:
    config, federation = prepared.config, prepared.federation
    rows = [r for r in result.metrics if "outside_guarantee" in r]
    return build_report(
        config.name,
        result,
        guarantee,
        task=dataclasses.asdict(prepared.subjects.task),
        dropped_silos=sum(r["dropped_silos"] for r in rows),
        silos=_silo_rows(prepared),
        model={**config.model.told, "parameters": prepared.model.num_params},
        data={
            "description": prepared.subjects.description,
            "held_out": prepared.subjects.rule,
            "silos": prepared.data.num_silos,
            **_kept(prepared),
        },
        mechanism=federation.mechanism.to_json(),
    )


def dry_run(config: RunConfig, console: Console) -> dict[str, Any]:
    """Validates and prices a configuration: parameters, noise, epsilon. Trains nothing."""
    prepared = prepare(config, console)
    federation, plan = prepared.federation, prepared.federation.silos[0]
    guarantee = prepared.about(prepared.guarantee(federation.rounds))
    members = [federation.silos[i] for i in federation.participants.tolist()]
    sigmas = [p.mechanism.sigma for p in members]
    means = [p.mechanism.noise_stddev / p.mechanism.participation.divisor(p.facts) for p in members]
    kept = _kept(prepared)
    for line in prepared.warnings():
        console.print(line)
    for line in prepared.advice():
        console.print(line, highlight=False)
    per_step = sum(p.mechanism.participation.expected_records(p.facts) for p in members)
    return {
        "status": "dry-run",
        "name": config.name,
        "population": {
            "silos": len(members),
            "subjects": prepared.subjects.train.num_users,
            **kept,
            "source": prepared.subjects.description,
        },
        "parameters": prepared.model.num_params,
        "rounds": federation.rounds,
        "local_steps": plan.local_steps,
        "records_per_round": per_step * plan.local_steps,
        "noise_multiplier": {"least": min(sigmas), "most": max(sigmas)},
        "noise_on_mean": max(means),
        "noise_over_signal": prepared.balance.to_json(),
        "epsilon": guarantee.epsilon if math.isfinite(guarantee.epsilon) else None,
        "delta": prepared.delta,
        "privacy": guarantee.to_json(),
        "guarantee": str(guarantee),
        "meaning": _statement(prepared, federation.rounds, guarantee).in_words(),
    }
