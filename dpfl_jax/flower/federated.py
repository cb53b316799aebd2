"""Federated rounds with remote silos: what a silo computes, and what the server does with it.

Both run the programs of the simulation (``federation.engine``). A silo runs the compiled round on a
chunk with itself alone, as the simulation does with ``execution.chunk_silos=1``. The server adds up
the results and applies the server rule.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dpfl_jax.accounting import Guarantee
from dpfl_jax.clipping.result import StepStats
from dpfl_jax.config import RunConfig
from dpfl_jax.data.store import unit_key_of
from dpfl_jax.federation.accountant import dominating_event, federated_epsilon, subject_epsilon
from dpfl_jax.federation.data import FederatedData
from dpfl_jax.federation.engine import Released
from dpfl_jax.federation.federated import FederatedAlgorithm, FederatedSteps, add_released
from dpfl_jax.federation.federated_run import (
    FederatedStudy,
    build_federation,
    federated_inputs,
    identity,
    make_algorithm,
    read_subjects,
    round_optimizers,
    unit_key_in,
    with_calibrated_noise,
)
from dpfl_jax.federation.federation import Federation
from dpfl_jax.federation.guarantee import federated_guarantee
from dpfl_jax.federation.participation import SiloFacts
from dpfl_jax.federation.partition import capped, subject_keys
from dpfl_jax.federation.personal import personal_guarantee, personalise
from dpfl_jax.federation.rounds import RoundBuilder
from dpfl_jax.flower.remote import Ask, RemoteRun, RemoteSilos
from dpfl_jax.flower.silo_folder import PlanDemands, Policy, RefusedError, check_memory
from dpfl_jax.flower.study import StudyPlan
from dpfl_jax.mesh import data_parallel_mesh, place, replicated
from dpfl_jax.models import build_by_name
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.algorithm import StepOutput, Steps
from dpfl_jax.run.pipeline import Charge
from dpfl_jax.run.public_inputs import about
from dpfl_jax.run.state import TrainState
from dpfl_jax.run.terms import Terms
from dpfl_jax.training.augmentation import with_augmentation

PyTree = Any
_AS_THIS_ONE = (
    "it is stated for this silo's people, as if all silos did what this one does: what the plan "
    "says of others, which cannot be checked here, makes it no smaller"
)


def one_device() -> Any:
    """Returns the mesh of a silo's or server's process: its first device."""
    return data_parallel_mesh(jax.devices()[:1])


def one_silo_at_a_time(config: RunConfig) -> Any:
    """Returns the execution section with chunks of one silo."""
    return config.execution.model_copy(update={"width": 1, "chunk_silos": 1})


def facts_of(rows: Sequence[Mapping[str, Any]]) -> list[SiloFacts]:
    """Returns the public sizes of all silos, from the rows of a plan."""
    return [SiloFacts(row["num_records"], row["num_subjects"]) for row in rows]


# ---- the silo ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _OneSiloBuilder(RoundBuilder):
    """The rounds of one silo, drawn from its key; ``index`` is its place among all silos."""

    index: int = 0

    def silo_key(self, silo: int, round_index: int) -> RootKey:
        return round_key(self.key, round_index)

    def cohort(self, round_index: int) -> np.ndarray:
        takes_part = self.federation.takes_part(self.silo_key(self.index, round_index))
        return np.array([self.index] * takes_part, np.int64)


def round_key(key: RootKey, round_index: int) -> RootKey:
    """Returns the key of a round, from a silo's key of a run."""
    return key.child("round", round_index)


class FederatedSiloData:
    """The records of one silo, for a federated study."""

    def __init__(self, config: RunConfig) -> None:
        """Reads the data.

        Args:
          config: the study's configuration, with the data section of this silo.

        Raises:
          BadInputError: the data cannot be read, or do not fit the study.
        """
        self.config = config
        read = read_subjects(config)
        self.store = store = read.train
        self.task, self.description = read.task, read.description
        self.subjects = np.repeat(np.arange(store.num_users), store.examples_per_user)
        self.keys = subject_keys(store, config.federation.partition_seed)
        silos = np.zeros(len(self.subjects), np.int64)
        self.keep = capped(config, self.subjects, silos, self.keys)

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """The silo's public sizes."""
        return dataclasses.asdict(SiloFacts.of(self.as_silo(0, 1).silos[0]))

    @property
    def num_params(self) -> int:
        """Number of parameters of the study's model."""
        model = self.config.model
        return build_by_name(model.kind, self.task, model.options).num_params

    def as_silo(self, index: int, count: int) -> FederatedData:
        """Returns the data of a federation of ``count`` silos, with records only in this one."""
        silos = np.full(len(self.subjects), index)
        return FederatedData.from_assignment(self.store, self.subjects, silos, count, self.keep)

    def about(self, guarantee: Guarantee, account: str) -> Guarantee:
        """Returns a guarantee with this silo's user key, public inputs and ledger account."""
        inputs = federated_inputs(self.config, self.task, "the sizes of all silos, by the plan")
        return about(guarantee, unit_key_in(self.config.mechanism, self.store), inputs, account)

    def work(self, plan: StudyPlan, index: int, key: RootKey) -> FederatedSiloRun:
        """Returns this silo's part in a plan; ``key`` must be used for nothing else."""
        return FederatedSiloRun(self, plan, index, key)


class FederatedSiloRun:
    """What one silo computes for a plan."""

    def __init__(self, held: FederatedSiloData, plan: StudyPlan, index: int, key: RootKey) -> None:
        config, facts = held.config, facts_of(plan.silos)
        self.config, self.index, self.key = config, index, key
        data = held.as_silo(index, len(facts))
        self.federation, self.published = with_calibrated_noise(config, facts, plan.noise)
        self.public = self.federation
        personal, delta = None, config.privacy.delta
        assert delta is not None
        if config.mechanism.participation.personal:
            uncalibrated = build_federation(config, facts)
            self.federation, data, personal = personalise(
                config, uncalibrated, data, held.store, held.keys, delta, plan.noise[0]
            )
            personal.check(config.federation.rounds)
            personal.check_rates(data)
        self._personal, self._data, self.unit_key = personal, data, unit_key_of(held.store)
        model = build_by_name(config.model.kind, held.task, config.model.options)
        model = with_augmentation(model, config.model, held.task)
        self.algorithm = make_algorithm(
            config,
            model,
            data,
            self.federation,
            delta,
            mesh=one_device(),
            execution=one_silo_at_a_time(config),
            show_spent=False,
            here=index,
        )
        self.rounds, self.like = self.federation.rounds, self.algorithm.given

    @functools.cached_property
    def steps(self) -> FederatedSteps:
        """The rounds of the simulation, with this silo alone."""
        builder = functools.partial(_OneSiloBuilder, index=self.index)
        return FederatedSteps(self.algorithm, self.key, 0, builder=builder)

    @property
    def fingerprint(self) -> str:
        """Identifies all that is sampled from: records, subjects and personal rates. Sensitive."""
        return identity(self._data, self._personal)

    @property
    def state_like(self) -> PyTree:
        """Zeros with the shapes and types of the state that the silo keeps between rounds."""
        return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(self.start))

    def start(self) -> PyTree:
        """Returns the first state that the silo keeps between rounds: its optimiser's, or ()."""
        return self.algorithm.local_optimizer.init(self.like) if self.algorithm.keep else ()

    def check(self) -> None:
        """Checks that the compiled round does what is accounted (``FederatedSteps.check``)."""
        self.steps.check(self.algorithm.init())

    def demands(self, policy: Policy) -> PlanDemands:
        data = self.config.data
        check_memory(self.steps.builder.public_bytes)
        if policy.unit == "subject" and data.target_column is not None and data.user_column is None:
            raise RefusedError(
                "data.user_column is null, so that it is not known which rows belong to one "
                "person: set it in silo.yaml, or set policy.unit to record"
            )
        epsilon, _, subject = self._priced(policy.delta, policy.unit)
        return PlanDemands(
            self.public.mechanism.kind,
            self.rounds,
            self.public.silos[self.index].sigma,
            epsilon,
            "subject" if subject else "record",
        )

    def charge(self, policy: Policy) -> Charge:
        """Returns what a ledger is charged for the whole run: the price that ``demands`` states."""
        _, federation, subject = self._priced(policy.delta, policy.unit)
        event = dominating_event(federation, policy.delta, subject)
        key = self.unit_key if policy.unit == "subject" else "row"
        return Charge(event, policy.delta, key, policy.unit, f"add-or-remove one {policy.unit}")

    def _priced(self, delta: float, unit: str) -> tuple[float, Federation, bool]:
        """Epsilon of a unit, the federation that it holds for, and whether the unit is a subject.

        What the plan says about other silos is only the server's claim. So epsilon is at least what
        it would be if all silos that hold a person's records did what this silo does. If no other
        silo may hold any, it is just that.
        """
        subject = not unit == self.public.mechanism.privacy_unit == "record"
        price = subject_epsilon if subject else federated_epsilon
        silos = (self.public.silos[self.index],) * len(self.public.silos)
        views: tuple[Federation, ...] = (dataclasses.replace(self.public, silos=silos),)
        if subject and self.public.max_silos_per_subject > 1:
            views = (self.public, *views)
        epsilons = [price(federation, delta) for federation in views]
        return max(epsilons), views[int(np.argmax(epsilons))], subject

    def guarantee(self) -> Guarantee:
        """Returns the guarantee of the whole run for this silo's people."""
        delta = self.algorithm.delta
        _, priced, _ = self._priced(delta, "subject")
        caveats = self.config.data.caveats()
        caveats += () if priced is self.public else (_AS_THIS_ONE,)
        if self.published is None:
            return federated_guarantee(priced, delta, self.rounds, caveats)
        records = sum(plan.facts.num_records for plan in priced.silos)
        public = dataclasses.replace(self.published, records=records)
        return personal_guarantee(public, self.rounds, caveats)

    def message(
        self, round_index: int, key: RootKey, params: PyTree, state: PyTree, answered: int
    ) -> tuple[PyTree | None, PyTree]:
        """Returns what leaves the silo in a round, and the silo's new state.

        Args:
          round_index: number of the round, from 0.
          key: key of the round's draws, used for nothing else.
          params: parameters that the server sent.
          state: state after the last round in which the silo took part.
          answered: number of rounds in which it took part before.

        Returns:
          The message, or None if by its coin the silo does not take part, and the state.
        """
        del answered
        builder = dataclasses.replace(self.steps.builder, key=key)
        cohort = builder.cohort(round_index)
        if not len(cohort):
            return None, state
        work = builder.build(round_index, cohort)
        kept = jax.tree.map(lambda x: x[None], state) if self.algorithm.keep else None
        placed = place(params, replicated(self.algorithm.mesh))
        released, kept, _ = self.steps.release(placed, kept, work.chunk)
        if self.algorithm.keep:
            state = jax.device_get(jax.tree.map(lambda x: x[0], kept))
        return jax.device_get(released), state


# ---- the server -------------------------------------------------------------------------------


class RemoteFederatedRun(RemoteRun, FederatedStudy):
    """A federated study with remote silos."""

    def __init__(self, silos: RemoteSilos, noise: Sequence[float] | None = None) -> None:
        super().__init__(silos)
        config = self.config
        assert config.privacy.delta is not None
        self.delta = config.privacy.delta
        self.model = build_by_name(config.model.kind, silos.task, config.model.options)
        self.federation, self.public = with_calibrated_noise(config, facts_of(silos.rows), noise)
        self.multipliers = [plan.sigma for plan in self.federation.silos]
        self.num_params = self.model.num_params

    @property
    def num_subjects(self) -> int:
        return self.federation.least_subjects

    @property
    def message_like(self) -> Released:
        params = jax.eval_shape(self.model.init, jax.random.key(0))
        zeros = jax.tree.map(lambda p: np.zeros(p.shape, np.float32), params)
        return Released(zeros, np.float32(0), np.int32(0), np.int32(0))  # type: ignore[arg-type]

    def remote_algorithm(self, ask: Ask) -> RemoteFederatedAlgorithm:
        return RemoteFederatedAlgorithm(self, ask)

    @property
    def public_inputs(self) -> tuple[str, ...]:
        return federated_inputs(self.config, self.task, self.counts, remote=True)


class RemoteFederatedAlgorithm(FederatedAlgorithm):
    """The server's part of the algorithm; ``ask`` returns what silos released."""

    def __init__(self, run: RemoteFederatedRun, ask: Ask) -> None:
        config, federation = run.config, run.federation
        self.ask, self.federation, self.mesh = ask, federation, one_device()
        _, self.server = round_optimizers(config)
        assert config.privacy.delta is not None
        self.delta, self.keep, self.show_spent = config.privacy.delta, False, True
        self.execution = one_silo_at_a_time(config)
        self.steps, self.private = federation.rounds, True
        self.layout_fingerprint = [self.hardware, self.execution.model_dump()]
        self.given = run.model.init(jax.random.key(config.init_seed))
        self.start = place(self.given, replicated(self.mesh))
        self.stated = {"plan": run.mechanism_facts, "noise": run.multipliers, "delta": self.delta}

    def terms(self) -> Terms:
        """Returns the public terms of the run; each silo checks its own secret ones."""
        return Terms(stated=self.stated, secret={})

    def begin(self, key: RootKey, start: int) -> RemoteFederatedSteps:  # type: ignore[override]
        del key
        return RemoteFederatedSteps(self, start)


class RemoteFederatedSteps(Steps):
    """The server's rounds."""

    def __init__(self, run: RemoteFederatedAlgorithm, start: int) -> None:
        self.run, self.start = run, start
        self.apply = run.compiled_apply()

    def inputs(self) -> Iterator[tuple[int, int]]:
        for r in range(self.start, self.run.steps):
            yield r + 1, r

    def step(self, state: TrainState, inputs: int) -> tuple[TrainState, StepOutput]:
        """Adds up what the silos sent, in the order of silos, and applies the server rule."""
        run, now = self.run, dict(state.opt_state)
        params = jax.device_get(run.server.broadcast(now["server"]))
        total: Released | None = None
        for _, released in sorted(run.ask(inputs, params).items()):
            placed = place(released, replicated(run.mesh))
            total = placed if total is None else add_released(total, placed)
        if total is not None:
            now["server"] = self.apply(now["server"], total, inputs)
        return run.packed(now, inputs + 1), StepOutput((total, StepStats.zero()), 0)
