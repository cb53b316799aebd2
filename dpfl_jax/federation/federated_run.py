"""Federated training from a configuration: data, silos, noise, guarantee and report."""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from dpfl_jax import buckets
from dpfl_jax.accounting import Guarantee
from dpfl_jax.accounting.guarantee import without_infinities
from dpfl_jax.accounting.statement import Statement
from dpfl_jax.config import RunConfig
from dpfl_jax.data.load import limit_store
from dpfl_jax.data.store import Store, scale_warning, unit_key_of
from dpfl_jax.federation.accountant import (
    calibrate_federation,
    dominating_event,
    silo_epsilons,
)
from dpfl_jax.federation.data import FederatedData
from dpfl_jax.federation.engine import OptimizerServer
from dpfl_jax.federation.federated import FederatedAlgorithm
from dpfl_jax.federation.federation import Federation, SiloPlan
from dpfl_jax.federation.guarantee import federated_guarantee, federated_statement
from dpfl_jax.federation.mechanisms import SiloMechanism
from dpfl_jax.federation.participation import Records, SiloFacts, Subjects, WholeBatch
from dpfl_jax.federation.partition import SubjectData, load_subjects, spread, subject_keys
from dpfl_jax.federation.personal import (
    BudgetTable,
    PublicBudgets,
    personal_guarantee,
    personal_statement,
    personalise,
    public_part,
    public_setting,
)
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.run.algorithm import RunResult
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.driver import Evaluate
from dpfl_jax.run.pipeline import Balance, Charge, Knob, Run, doubled, knob
from dpfl_jax.run.public_inputs import not_people, public_inputs
from dpfl_jax.sampling import FixedSize, Poisson
from dpfl_jax.task import Task
from dpfl_jax.training.evaluate import Evaluator
from dpfl_jax.training.optimizers import make_optimizer
from dpfl_jax.training.start import build_model

EVALUATION_CAVEAT = {
    "by_user": "held-out figures are computed without noise on subjects who are not in the "
    "training set: the guarantee does not cover those subjects",
    "within_user": "held-out figures are computed without noise on other records of the training "
    "subjects: the guarantee does not cover them; do not publish them",
}
# A run warns if the cap leaves out more than this share of the records.
_MANY = 0.2


def build_federation(config: RunConfig, facts: Sequence[SiloFacts]) -> Federation:
    """Returns the federation of a configuration, for silos of these sizes, not yet calibrated."""
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
        SiloPlan(mechanism, sizes, section.local_steps, weight, config.privacy.noise_multiplier)
        for sizes, weight in zip(facts, weights, strict=True)
    )
    return Federation(plans, section.rounds, reach, cohort)


def calibrated(config: RunConfig, federation: Federation, delta: float) -> Federation:
    """Returns the federation with the configured noise, or with noise for the target epsilon."""
    if not federation.mechanism.private or config.privacy.noise_multiplier is not None:
        return federation
    assert config.privacy.epsilon is not None
    return calibrate_federation(federation, config.privacy.epsilon, delta)


def with_calibrated_noise(
    config: RunConfig, facts: Sequence[SiloFacts], noise: Sequence[float] | None = None
) -> tuple[Federation, PublicBudgets | None]:
    """Returns the federation of a configuration with its noise, from public numbers only.

    Args:
      config: the study's configuration.
      facts: public sizes of all silos.
      noise: noise multipliers of a plan; None: the noise is calibrated.

    Returns:
      The federation, and what is public about personal budgets (None without personal budgets).

    Raises:
      BadInputError: no noise meets the target.
    """
    federation, delta = build_federation(config, facts), config.privacy.delta
    assert delta is not None
    if config.mechanism.participation.personal:
        setting = public_setting(config, federation, delta, None if noise is None else noise[0])
        federation, groups = public_part(config, federation, setting)
        records = sum(sizes.num_records for sizes in facts)
        law = federation.mechanism.noise.arithmetic
        return federation, PublicBudgets(setting, config.privacy.policy, records, groups, law)
    if noise is not None:
        return federation.with_noise(noise), None
    return calibrated(config, federation, delta), None


class FederatedStudy(Run, abc.ABC):
    """A federated run, whose silos may be here or remote: all that follows from its plan.

    Attributes:
      config: the configuration.
      federation: the federation, with its noise.
      public: what is public about personal budgets; None without personal budgets.
      delta: delta of the guarantee.
      num_params: number of parameters of the model.
    """

    config: RunConfig
    task: Task
    federation: Federation
    delta: float
    public: PublicBudgets | None
    num_params: int

    @property
    def steps(self) -> int:
        return self.federation.rounds

    @property
    def private(self) -> bool:
        return self.federation.mechanism.private

    @property
    def mechanism_facts(self) -> dict[str, Any]:
        return self.federation.mechanism.to_json()

    @property
    @abc.abstractmethod
    def num_subjects(self) -> int:
        """The number of subjects in all silos together, or a lower bound if it is not known."""

    def guarantee(self, steps: int, caveats: tuple[str, ...] = ()) -> Guarantee:
        if self.public is not None:
            return personal_guarantee(self.public, steps, caveats)
        return federated_guarantee(
            self.federation, self.delta, steps, caveats, num_subjects=self.num_subjects
        )

    def statement(self, steps: int, guarantee: Guarantee) -> Statement:
        if self.public is not None:
            return personal_statement(self.federation.mechanism, self.public, steps, guarantee)
        return federated_statement(self.federation, steps, self.num_subjects, guarantee)

    def balance(self, config: Any = None) -> Balance:
        federation = self.federation
        if config is not None:
            facts = [plan.facts for plan in federation.silos]
            federation, _ = with_calibrated_noise(config, facts)
        return federation.balance(self.num_params)

    def knobs(self) -> Iterator[Knob]:
        # Fixes a delta that follows from the data.
        privacy = self.config.privacy.model_copy(update={"delta": self.delta})
        config = self.config.model_copy(update={"privacy": privacy})
        return knobs(config, [plan.facts for plan in self.federation.silos])


@dataclasses.dataclass
class FederatedRun(FederatedStudy):
    """A federated run with all silos here, ready to run.

    Attributes:
      config: the configuration.
      subjects: the subjects, before their records were spread over silos.
      data: the records of the silos.
      federation: the federation, with its noise.
      delta: delta of the guarantee.
      model: the model.
      held_out: subjects, or records, that are evaluated.
      personal: budgets and rates of records; None without personal budgets.
    """

    config: RunConfig
    subjects: SubjectData
    data: FederatedData
    federation: Federation
    delta: float
    model: Any
    held_out: Store
    personal: BudgetTable | None = None

    def __post_init__(self) -> None:
        self.task, self.num_params = self.subjects.task, self.model.num_params
        self.public = None if self.personal is None else self.personal.public
        self.evaluation_caveat = EVALUATION_CAVEAT[self.config.data.split]

    @property
    def num_subjects(self) -> int:
        return self.subjects.train.num_users

    def algorithm(
        self, directory: RunDirectory | None = None, console: Console | None = None
    ) -> FederatedAlgorithm:
        del directory, console
        if self.personal is not None:
            self.personal.check_rates(self.data)
        return make_algorithm(self.config, self.model, self.data, self.federation, self.delta)

    def without_privacy(self, algorithm: Any = None) -> FederatedAlgorithm:
        # The baseline still clips, because its learning rate is made for clipped gradients.
        del algorithm
        without_noise = self.federation.with_noise([0.0] * len(self.federation.silos))
        given = (self.config, self.model, self.data, without_noise, self.delta)
        return make_algorithm(*given, show_spent=False)

    def evaluator(self) -> Evaluate:
        mesh, size = data_parallel_mesh(), self.config.eval.batch_size
        return Evaluator.of_model(self.model, self.task, mesh, size).of(self.held_out)

    def facts(self) -> dict[str, Any]:
        noise = [p.noise_multiplier for p in self.federation.silos]
        return {"data": identity(self.data, self.personal), "noise": noise, "delta": self.delta}

    def resume_from(self, directory: RunDirectory) -> FederatedRun:
        # Personal rates are made again for the noise that the run began with.
        if self.personal is not None and directory.writes:
            self.personal.save_budgets(directory.path)
        noise = directory.facts["noise"]
        resumed = dataclasses.replace(self, delta=directory.facts["delta"])
        if not directory.resumed or any(sigma is None for sigma in noise):
            return resumed
        if self.personal is not None:
            return _personalised(resumed, noise[0])
        return dataclasses.replace(resumed, federation=self.federation.with_noise(noise))

    def check_directory(self, path: str | os.PathLike[str]) -> None:
        """Raises BadInputError if the run began with other budgets of the records."""
        if self.personal is not None:
            section = self.config.privacy.budgets
            source = section.path or f"privacy.budgets.column={section.column} of the data"
            self.personal.check_unchanged(buckets.folder(path), source)

    def guarantee(self, steps: int, caveats: tuple[str, ...] = ()) -> Guarantee:
        if self.personal is not None:
            self.personal.check(steps)
        return super().guarantee(steps, caveats)

    def charge(self) -> Charge:
        """Returns what a ledger is charged: all rounds, for one unit of the whole federation."""
        event = dominating_event(self.federation, self.delta)
        key = unit_key_of(self.subjects.train)
        if not self.private:
            return Charge(event, self.delta, key, "subject", "add-or-remove one subject")
        guarantee = self.guarantee(self.steps)
        key = key if guarantee.unit == "subject" else "row"
        return Charge(event, self.delta, key, guarantee.unit, guarantee.adjacency)

    @property
    def unit_key(self) -> str:
        return unit_key_in(self.federation.mechanism, self.subjects.train)

    @property
    def public_inputs(self) -> tuple[str, ...]:
        if not self.private:
            return ()
        counts = f"{self.data.num_silos} silos, {self.data.num_records:,} records after the cap, "
        counts += f"{self.num_subjects:,} subjects, and those of each silo"
        return federated_inputs(self.config, self.task, counts)

    def warnings(self) -> list[str]:
        store, texts = self.subjects.train, [self.kept.get("warning")]
        if self.private and self.federation.mechanism.privacy_unit == "subject":
            texts.append(not_people(store, "subject"))
        if self.private:
            texts.append(scale_warning(store))
        return [f"warning: {text}" for text in texts if text is not None]

    def headline(self) -> list[str]:
        kept, config = self.kept, self.config
        return [
            self.subjects.description,
            f"{config.federation.silos} silos, {kept['records']} records in training, "
            f"{kept['dropped_by_cap']} left out by the cap; {config.model.what} with "
            f"{self.num_params:,} parameters",
        ]

    @functools.cached_property
    def kept(self) -> dict[str, Any]:
        """Counts of records before and after the cap, which the guarantee takes as public."""
        before, after = self.subjects.train.num_examples, self.data.num_records
        counts: dict[str, Any] = {
            "records": after,
            "records_before_cap": before,
            "dropped_by_cap": before - after,
        }
        if before - after <= _MANY * before:
            return counts
        cap = self.config.mechanism.participation.max_records_per_subject
        help_ = "raise it"
        if self.config.federation.partition != "natural":  # the partition may be changed
            help_ += ", or spread subjects over more silos"
        counts["warning"] = (
            f"mechanism.max_records_per_subject={cap} leaves out {before - after} of {before} "
            f"records ({(before - after) / before:.0%}): {help_}"
        )
        return counts

    def price(self) -> dict[str, Any]:
        federation, steps = self.federation, self.federation.silos[0].local_steps
        members = federation.members
        sigmas = [p.sigma for p in members]
        means = [p.noise_stddev / p.mechanism.participation.divisor(p.facts) for p in members]
        records = sum(p.mechanism.participation.expected_records(p.facts) for p in members)
        return {
            "population": {
                "silos": len(members),
                "subjects": self.num_subjects,
                **self.kept,
                "source": self.subjects.description,
            },
            "parameters": self.num_params,
            "rounds": federation.rounds,
            "local_steps": steps,
            "records_per_round": records * steps,
            "noise_multiplier": {"least": min(sigmas), "most": max(sigmas)},
            "noise_on_mean": max(means),
        }

    def report(
        self, directory: RunDirectory, result: RunResult, guarantee: Guarantee
    ) -> dict[str, Any]:
        outside = {}
        if self.personal is not None:
            summary = self.personal.write(directory.path, result.accounted)
            # Other values are computed from private budgets, and stay with the silos.
            published = ("policy", "rounds", "over_budget")
            outside["personal"] = {name: summary[name] for name in published}
        rows = [r for r in result.metrics if "outside_guarantee" in r]
        return {
            "dropped_silos": sum(r["dropped_silos"] for r in rows),
            "silos": self._silo_rows(),
            "model": {**self.config.model.identity, "parameters": self.num_params},
            "data": {
                "description": self.subjects.description,
                "held_out": self.subjects.rule,
                "silos": self.data.num_silos,
                **self.kept,
            },
            "outside_guarantee": outside,
        }

    def _silo_rows(self) -> list[dict[str, Any]]:
        alone = silo_epsilons(self.federation, self.delta)
        return [
            {
                "silo": i,
                "records": plan.facts.num_records,
                "subjects": plan.facts.num_subjects,
                "sampling_prob": plan.mechanism.participation.sampling_prob_of(plan.facts),
                "local_steps": plan.local_steps,
                "noise_multiplier": plan.sigma,
                "epsilon_alone": without_infinities(epsilon),
            }
            for i, (plan, epsilon) in enumerate(zip(self.federation.silos, alone))
        ]


def round_optimizers(config: RunConfig) -> tuple[Any, OptimizerServer]:
    """Returns the optimiser of silos' local steps, and the server rule."""
    section = config.federation
    local = make_optimizer(section.local_optimizer, section.rounds * section.local_steps)
    return local, OptimizerServer(make_optimizer(section.server_optimizer, section.rounds))


def make_algorithm(
    config: RunConfig,
    model: Any,
    data: FederatedData,
    federation: Federation,
    delta: float,
    **options: Any,
) -> FederatedAlgorithm:
    """Returns the algorithm of a configuration; ``options`` go to ``FederatedAlgorithm``."""
    local, server = round_optimizers(config)
    usual: dict[str, Any] = {"mesh": data_parallel_mesh(), "execution": config.execution}
    return FederatedAlgorithm(
        loss_fn=model.loss,
        params=model.init(jax.random.key(config.init_seed)),
        data=data,
        federation=federation,
        local_optimizer=local,
        delta=delta,
        server=server,
        keep_local_state=config.federation.local_state == "keep",
        **(usual | options),
    )


def unit_key_in(mechanism: SiloMechanism, store: Store) -> str:
    """Returns in words what identifies a subject, or a record, of a store."""
    key = unit_key_of(store)
    return key if mechanism.privacy_unit == "subject" else f"row (subjects by {key})"


def federated_inputs(
    config: RunConfig, task: Task, counts: str, *, remote: bool = False
) -> tuple[str, ...]:
    """Returns in words what a study takes as public; ``remote`` if silos hold the data."""
    more: list[str] = []
    if config.mechanism.participation.personal:
        budgets = config.privacy.budgets
        declared = budgets.kind != "column" or budgets.declared is not None
        more += ["typical budgets: privacy.budgets"] if declared else []
    if config.federation.weights is not None:
        more.append("weights of silos: federation.weights")
    return public_inputs(counts, config.mechanism.bounds, config, task, more=more, remote=remote)


def knobs(config: RunConfig, facts: Sequence[SiloFacts]) -> Iterator[Knob]:
    """Yields the keys that could be changed if there is too much noise, with values to try.

    Args:
      config: the study's configuration.
      facts: public sizes of all silos.
    """
    mechanism, participation = config.mechanism, config.mechanism.participation
    by_parts = "mechanism.participation" if mechanism.kind == "custom" else "mechanism"
    largest = max(sizes.num_records for sizes in facts)
    names = [field.name for field in dataclasses.fields(participation)]
    options = {name: getattr(participation, name) for name in names}
    if options.get("batch_size") is not None:
        yield knob(config, f"{by_parts}.batch_size", doubled(options["batch_size"], largest))
    elif options.get("sampling_prob") is not None:
        yield knob(config, f"{by_parts}.sampling_prob", doubled(options["sampling_prob"], 1.0))
    elif participation.personal and participation.expected_batch is None:
        steps = doubled(config.federation.local_steps, 1e3, 3)
        yield knob(config, "federation.local_steps", steps)
    if (cap := options.get("max_records_per_subject")) is not None:
        smaller = [c for c in (cap // 2, cap // 4, 1) if 0 < c < cap]
        yield knob(config, f"{by_parts}.max_records_per_subject", smaller)
    if config.privacy.epsilon is not None:
        yield knob(config, "privacy.epsilon", doubled(config.privacy.epsilon, math.inf, 4))
    if isinstance(participation, Records | WholeBatch) and mechanism.privacy_unit == "subject":
        same = {name: options[name] for name in ("batch_size", "sampling_prob")}
        most = participation.max_records_per_subject
        whole = Subjects(**same, max_records_per_subject=most, group_size=most)
        uls = dataclasses.replace(mechanism, participation=whole)
        kind = whole.kind if uls.kind == "custom" else uls.kind
        changed = config.model_copy(update={"mechanism": uls})
        yield f"{by_parts}.kind", [(kind, lambda: changed)]
    rounds = [int(r) for r in doubled(config.federation.rounds, 1e6, 3)]
    yield knob(config, "federation.rounds", rounds)


def _personalised(run: FederatedRun, noise: float | None = None) -> FederatedRun:
    """The run with noise and rates for its personal budgets."""
    config, store = run.config, run.subjects.train
    keys = subject_keys(store, config.federation.partition_seed)
    federation, data, personal = personalise(
        config, run.federation, run.data, store, keys, run.delta, noise
    )
    return dataclasses.replace(run, federation=federation, data=data, personal=personal)


def read_subjects(config: RunConfig) -> SubjectData:
    """Reads the subjects of a configuration, with the column of their budgets if it has one."""
    budgets = config.privacy.budgets
    column = budgets.column if budgets.kind == "column" and budgets.path is None else None
    return load_subjects(config.data, () if column is None else (column,))


def prepare(
    config: RunConfig, console: Console, subjects: SubjectData | None = None
) -> FederatedRun:
    """Reads the data, spreads them over silos, and calibrates the noise.

    Args:
      config: the configuration.
      console: shows progress.
      subjects: data to use instead of those that the configuration names.

    Raises:
      BadInputError: the configuration or the data are wrong.
    """
    round_optimizers(config)
    with console.status("reading data"):
        subjects = read_subjects(config) if subjects is None else subjects
        data = spread(subjects.train, config, subjects.task.classes or None)
    model = build_model(config, subjects.task, subjects.train)
    federation = build_federation(config, [SiloFacts.of(silo) for silo in data.silos])
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


def identity(data: FederatedData, personal: BudgetTable | None) -> str:
    """Returns a hex digest of what is sampled from: data with rates, and personal budgets.

    A run that resumes must have the same digest. With other rates it would spend more than its
    report says, and add the same noise in the rounds that it repeats.
    """
    if personal is None:
        return data.fingerprint
    digest = hashlib.sha256(data.fingerprint.encode())
    digest.update(np.ascontiguousarray(personal.budgets).tobytes())
    return digest.hexdigest()
