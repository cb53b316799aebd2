"""ISRL rounds with remote silos: what a silo computes, and what the server does with it.

A silo runs the program of the simulation (``isrl.rounds.CompiledRound``) with all other silos
empty, and sends its row of the result. The server puts the rows together, and takes the step of the
simulation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax import accounting
from dpfl_jax.accounting import REPLACE, Guarantee
from dpfl_jax.config import RunConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl.isrl_run import IsrlStudy, isrl_inputs, loss_for_data
from dpfl_jax.federation.isrl.losses import LinearLoss
from dpfl_jax.federation.isrl.message import SiloData
from dpfl_jax.federation.isrl.parameters import Parameters, choose
from dpfl_jax.federation.isrl.privacy import SiloNoise, silo_guarantee
from dpfl_jax.federation.isrl.rounds import CompiledRound, IsrlAlgorithm, blocks, make_method
from dpfl_jax.federation.isrl.schedule import silo_draws
from dpfl_jax.federation.isrl.silos import load_silos
from dpfl_jax.flower.remote import Ask, RemoteRun, RemoteSilos
from dpfl_jax.flower.silo_folder import PlanDemands, Policy, RefusedError, check_memory
from dpfl_jax.flower.study import StudyPlan
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.algorithm import StepOutput, Steps
from dpfl_jax.run.pipeline import Charge
from dpfl_jax.run.public_inputs import about
from dpfl_jax.run.state import TrainState
from dpfl_jax.run.terms import Terms
from dpfl_jax.task import Task


def _from_public(
    config: RunConfig, task: Task, rows: Sequence[Mapping[str, Any]], noise: Any
) -> tuple[LinearLoss, Parameters, np.ndarray]:
    """Loss, parameters and sizes of silos (int [silos]), from public inputs only."""
    sizes = np.array([row["num_records"] for row in rows])
    loss = loss_for_data(config, sizes, task.input_shape[0], task.classes)
    parameters = choose(config, loss, sizes)
    return loss, parameters.with_noise(noise, config.mechanism.arithmetic), sizes


class IsrlSiloData:
    """The records of one silo, for a study without a trusted server."""

    def __init__(self, config: RunConfig) -> None:
        """Reads the data.

        Raises:
          BadInputError: the data cannot be read, or do not fit the study.
        """
        self.config, loss = config, config.model.loss
        one = config.federation.model_copy(update={"silos": 1})
        records = load_silos(config.data, one, softmax=loss == "softmax", signed=loss == "hinge")
        self.train, self.unit_key = records.train, records.unit_key
        self.fingerprint, self.description = records.fingerprint, records.description
        self.learned = records.learned
        kind: Any = "classes" if records.classes else "regression"
        table = records.learned.table
        self.task = Task(kind, (records.features,), records.classes, table=table)
        self.facts = {"num_records": int(np.asarray(records.train.sizes)[0])}

    @property
    def num_params(self) -> int:
        """Upper bound on the model's parameters: one weight for each feature and class."""
        return self.task.input_shape[0] * max(self.task.classes, 1)

    def about(self, guarantee: Guarantee, account: str) -> Guarantee:
        """Returns a guarantee with this silo's user key, public inputs and ledger account."""
        inputs = isrl_inputs(self.config, self.learned, "the sizes of all silos, by the plan")
        return about(guarantee, self.unit_key, inputs, account)

    def work(self, plan: StudyPlan, index: int, key: RootKey) -> IsrlSiloRun:
        """Returns this silo's part in a plan; ``key`` must be used for nothing else."""
        return IsrlSiloRun(self, plan, index, key)


class IsrlSiloRun:
    """What one silo computes for a plan."""

    state_like: Any = ()

    def __init__(self, held: IsrlSiloData, plan: StudyPlan, index: int, key: RootKey) -> None:
        config = held.config
        self.held, self.config, self.index, self.key = held, config, index, key
        self.loss, self.parameters, self.sizes = _from_public(
            config, held.task, plan.silos, plan.noise
        )
        assert self.parameters.noise is not None
        self.noise: SiloNoise = self.parameters.noise[index]
        self.rounds = self.parameters.rounds
        self.like = np.zeros(self.loss.shape, np.float32)

    @property
    def fingerprint(self) -> str:
        """Identifies the records. Sensitive: it must not leave the silo."""
        return self.held.fingerprint

    def start(self) -> Any:
        """Returns an empty state, as nothing is kept between rounds."""
        return ()

    def check(self) -> None:
        """Does nothing, as in the simulation."""

    def demands(self, policy: Policy) -> PlanDemands:
        if policy.unit == "subject":
            raise RefusedError(
                f"{self.config.mechanism.kind} protects records, and does not bound how many "
                "records a person has in all silos: set policy.unit to record"
            )
        record = sum(leaf.nbytes / leaf.shape[1] for leaf in jax.tree.leaves(self._mine))
        check_memory(len(self.sizes) * int(self.sizes.max()) * record)
        multiplier = self.noise.noise_multiplier
        epsilon = accounting.epsilon(self.noise.event, policy.delta, relation=REPLACE)
        return PlanDemands(
            self.config.mechanism.kind, self.rounds, multiplier, epsilon, policy.unit
        )

    def charge(self, policy: Policy) -> Charge:
        """Returns what a ledger is charged for the whole run."""
        adjacency = f"replace one {policy.unit}"
        return Charge(self.noise.event, policy.delta, "row", policy.unit, adjacency)

    def guarantee(self) -> Guarantee:
        """Returns the guarantee of the whole run for this silo's records."""
        made = silo_guarantee(self.noise)
        return dataclasses.replace(made, caveats=(*made.caveats, *self.config.data.caveats()))

    @property
    def _most(self) -> int:
        """The largest number of rounds in which the silo answers, which its noise is made for."""
        if self.config.mechanism.sampling == "disjoint":
            batch = max(self.parameters.batches[self.index], 1.0)
            return min(self.noise.rounds, int(self.sizes[self.index] // batch))
        return self.noise.rounds

    @functools.cached_property
    def _mine(self) -> Any:
        """The silo's examples: a pytree of arrays [1, records, ...]."""
        return jax.device_get(self.held.train.examples)

    @functools.cached_property
    def _program(self) -> tuple[CompiledRound, SiloData, np.ndarray]:
        """The compiled round, padded data with records of this silo only, and record order."""
        silos, capacity = len(self.sizes), int(self.sizes.max())

        def padded(leaf: np.ndarray) -> np.ndarray:
            out = np.zeros((silos, capacity, *leaf.shape[2:]), leaf.dtype)
            out[self.index, : leaf.shape[1]] = leaf[0]
            return out

        data = SiloData(
            jax.tree.map(lambda x: jnp.asarray(padded(x)), self._mine),
            jnp.asarray(self.sizes, jnp.int32),
        )
        size = int(self.sizes[self.index])
        _, order = silo_draws(self.key, self.rounds, size, capacity)
        rank = np.zeros((silos, capacity), np.int32)
        rank[self.index] = order
        method = make_method(self.config, self.parameters)
        return CompiledRound(self.config, self.loss, self.parameters, method), data, rank

    def message(
        self, round_index: int, key: RootKey, params: Any, state: Any, answered: int
    ) -> tuple[Any, Any]:
        """Returns the silo's message (None once records or rounds are used up) and its state."""
        if answered >= self._most:
            return None, state
        del round_index
        program, data, rank = self._program
        silos = len(self.sizes)
        keys = np.zeros((silos, 2, 8), np.uint32)
        keys[self.index] = round_words(key)
        turn = np.zeros(silos, np.int32)
        turn[self.index] = answered
        row = {
            "present": jnp.zeros(silos, bool),
            "turn": jnp.asarray(turn),
            "keys": jnp.asarray(keys),
        }
        sent = program.messages(jnp.asarray(params), row, data, jnp.asarray(rank))
        return jax.device_get(sent[self.index]), state


def round_words(key: RootKey) -> np.ndarray:
    """Returns the keys of a round's sample and noise, uint32 [2, 8], as in ``Schedule.keys``."""
    return key.numpy("isrl-keys").integers(0, 2**32, (2, 8), dtype=np.uint32)


class RemoteIsrlRun(RemoteRun, IsrlStudy):
    """A study without a trusted server, with remote silos."""

    def __init__(self, silos: RemoteSilos, noise: Sequence[float] | None = None) -> None:
        super().__init__(silos)
        self.loss, self.parameters, self.sizes = _from_public(
            self.config, silos.task, silos.rows, noise
        )
        if self.parameters.noise is None:
            raise BadInputError(
                "privacy.epsilon is null, but remote silos run only with privacy: set it"
            )
        self.multipliers = [float(z.noise_multiplier) for z in self.parameters.noise]
        self.num_params = self.loss.dim

    @property
    def message_like(self) -> Any:
        return np.zeros(self.loss.shape, np.float32)

    def remote_algorithm(self, ask: Ask) -> RemoteIsrlAlgorithm:
        return RemoteIsrlAlgorithm(self, ask)

    @property
    def public_inputs(self) -> tuple[str, ...]:
        return isrl_inputs(self.config, self.task, self.counts, remote=True)


class RemoteIsrlAlgorithm(IsrlAlgorithm):
    """The server's part of the algorithm; ``ask`` returns what silos sent."""

    def __init__(self, run: RemoteIsrlRun, ask: Ask) -> None:
        config, parameters = run.config, run.parameters
        self.ask, self.config, self.loss, self.parameters = ask, config, run.loss, parameters
        self.mesh = data_parallel_mesh(jax.devices()[:1])
        self.method = make_method(config, parameters)
        self.layout_fingerprint = [self.hardware, config.execution.model_dump()]
        self.steps, self.private, self.silos = parameters.rounds, True, len(run.rows)
        self.delta = max(z.budget.delta for z in parameters.noise or [])
        self.stated = {"mechanism": run.mechanism_facts, "noise": run.multipliers}

    def terms(self) -> Terms:
        """Returns the public terms of the run; each silo checks its own secret ones."""
        return Terms(stated=self.stated, secret={})

    def row(self, stats: int) -> dict[str, Any]:  # type: ignore[override]
        return {"messages": stats, "outside_guarantee": {"train_loss": None}}

    def begin(self, key: RootKey, start: int) -> RemoteIsrlSteps:  # type: ignore[override]
        del key
        return RemoteIsrlSteps(self, start)


class RemoteIsrlSteps(Steps):
    """The server's rounds, in blocks."""

    def __init__(self, run: RemoteIsrlAlgorithm, start: int) -> None:
        self.run, self.start = run, start
        self.round = CompiledRound(run.config, run.loss, run.parameters, run.method)

    def inputs(self) -> Iterator[tuple[int, tuple[int, int]]]:
        size, rounds = self.run.config.execution.rounds_per_block, self.run.steps
        yield from blocks(self.start, rounds, size)

    def step(self, state: TrainState, inputs: tuple[int, int]) -> tuple[TrainState, StepOutput]:
        run, now, answered = self.run, state.opt_state["state"], 0
        for r in range(*inputs):
            values = jax.tree.map(lambda x, r=r: x[r], run.method.values)
            w = self.round.where(now, values)
            messages = run.ask(r, jax.device_get(w))
            sent = np.zeros((run.silos, *run.loss.shape), np.float32)
            present = np.zeros(run.silos, bool)
            for index, message in messages.items():
                sent[index], present[index] = message, True
            row = {
                "present": jnp.asarray(present),
                "turn": jnp.zeros(run.silos, jnp.int32),
                "keys": jnp.zeros((run.silos, 2, 8), jnp.uint32),
            }
            now = self.round.server(now, values, w, jnp.asarray(sent), row)
            answered += len(messages)
        return run.packed(now, inputs[1]), StepOutput(answered, 0)
