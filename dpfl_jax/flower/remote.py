"""A run with remote silos: the server holds no data, and asks the silos in every round."""

from __future__ import annotations

import abc
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from rich.console import Console

from dpfl_jax.accounting import Guarantee
from dpfl_jax.errors import BadInputError, StoppedError
from dpfl_jax.flower.study import StudyPlan, study_of
from dpfl_jax.flower.wire import is_finite, pack, tree_of, unpack, why_of
from dpfl_jax.run.algorithm import Algorithm, RunResult
from dpfl_jax.run.directory import RunDirectory, write_atomically
from dpfl_jax.run.pipeline import Charge, Run
from dpfl_jax.run.public_inputs import OTHER_RUNS_CAVEAT
from dpfl_jax.run.report import TUNING_CAVEAT
from dpfl_jax.task import Task

# (round, parameters) -> what each silo that takes part has sent, by the silo's index.
Ask = Callable[[int, Any], Mapping[int, Any]]
# File with the silos of a run, for a server that resumes it.
SILOS = "silos.json"
NO_LEDGER = (
    "privacy.ledger is set, but a server holds no records, and every silo keeps its own ledger: "
    "remove it"
)
# Seconds to wait until silos confirm the end. One that never hears of it keeps its reservation in
# the ledger, which costs the same.
_DONE_S = 30.0
_LATE: dict[str, Any] = {"kind": "late", "why": "it did not answer"}
_SILO_CAVEAT = (
    "each silo computed its own guarantee and holds it in its own log; what is stated here assumes "
    "that every silo runs this plan"
)
_LEDGERS = (
    "other runs on these people are not counted here: each silo charged this one to a ledger of "
    "its own"
)
_Remote = TypeVar("_Remote", bound="RemoteRun")


class Transport(Protocol):
    """Sends requests to silos by name."""

    def hello(self, request: bytes, count: int, most_s: float = math.inf) -> dict[str, bytes]:
        """Asks all nodes until ``count`` silos have answered; returns replies by silo name."""

    def ask(self, requests: Mapping[str, bytes], most_s: float = math.inf) -> dict[str, bytes]:
        """Returns the replies of silos that answer in time; a request may be sent several times."""


@dataclasses.dataclass(frozen=True)
class RemoteSilos:
    """The silos that have introduced themselves for a study.

    Attributes:
      config: the study's configuration.
      task: what is learned, the same at all silos.
      rows: ``name`` and public sizes of each silo, in order.
      transport: sends requests to the silos.
    """

    config: Any
    task: Task
    rows: list[dict[str, Any]]
    transport: Transport


class RemoteRun(Run, abc.ABC):
    """A study with remote silos.

    Attributes:
      silos: the silos.
      rows: ``name`` and public sizes of each silo, in order.
      plan: the plan that the silos accepted; set by ``algorithm``.
      multipliers: noise multiplier of each silo.
      num_params: number of parameters of the model.
    """

    task: Task
    plan: StudyPlan
    multipliers: list[float]
    num_params: int
    evaluation_caveat = ""

    def __init__(self, silos: RemoteSilos, noise: Any = None) -> None:
        """Calibrates the noise if ``noise`` is None; else it is a noise multiplier per silo."""
        del noise
        self.silos, self.config, self.task, self.rows = silos, silos.config, silos.task, silos.rows

    @property
    @abc.abstractmethod
    def message_like(self) -> Any:
        """A pytree with the shapes and dtypes of what a silo sends."""

    @abc.abstractmethod
    def remote_algorithm(self, ask: Ask) -> Algorithm:
        """Returns the algorithm whose rounds ask the silos."""

    def algorithm(self, directory: RunDirectory, console: Console) -> Algorithm:
        """Asks the silos to accept the plan, and returns the algorithm.

        Raises:
          BadInputError: a silo refuses; the message has its reason.
          StoppedError: a silo does not answer.
        """
        study, names = study_of(self.config), [row["name"] for row in self.rows]
        self.plan = plan = StudyPlan(directory.run_id, study, self.rows, self.multipliers)
        request = pack({"kind": "plan", "plan": plan.to_json()})
        replies = self.silos.transport.ask(dict.fromkeys(names, request))
        for name in names:
            if name not in replies and directory.resumed:  # it has accepted the plan already
                console.print(f"{name} is left out until it comes back", markup=False)
                continue
            if name not in replies:
                raise StoppedError(
                    f"{name} did not answer the plan; run the same command again to resume"
                )
            header, _ = unpack(replies[name])
            if header["kind"] != "accepted" or header["plan"] != plan.digest:
                raise BadInputError(f"silo {name} refuses: {why_of(header)}")
        write_atomically(directory.path / SILOS, json.dumps(self.rows))
        ask = _RoundRequester(self.silos.transport, plan, console, self.message_like)
        return self.remote_algorithm(ask)

    def without_privacy(self, algorithm: Algorithm) -> Algorithm:
        raise BadInputError("remote silos do not train without privacy: set eval.baseline to false")

    def evaluator(self) -> None:
        """Returns None, because the server holds no data."""

    def after_steps(self, algorithm: Algorithm, result: RunResult) -> dict[str, Any]:
        """Tells the silos that the run is over."""
        del algorithm
        if result.interrupted is None:
            done = pack({"kind": "done", "run": self.plan.run, "plan": self.plan.digest})
            self.silos.transport.ask(dict.fromkeys(self.plan.names, done), _DONE_S)
        return {}

    def facts(self) -> dict[str, Any]:
        return {"data": json.dumps(self.rows, sort_keys=True), "noise": self.multipliers}

    def resume_from(self: _Remote, directory: RunDirectory) -> _Remote:
        return type(self)(self.silos, directory.facts["noise"])

    def caveats(self) -> tuple[str, ...]:
        config = self.config
        return (TUNING_CAVEAT, _SILO_CAVEAT, *config.data.caveats(), *config.metrics.caveats())

    def charge(self) -> Charge:
        """Raises BadInputError, because each silo charges its own ledger."""
        raise BadInputError(NO_LEDGER)

    @property
    def unit_key(self) -> str:
        return "what each silo's own data.user_column names"

    @property
    def counts(self) -> str:
        return f"{len(self.rows)} silos, and the sizes of each"

    def about(self, guarantee: Guarantee) -> Guarantee:
        made = super().about(guarantee)
        caveats = [_LEDGERS if c == OTHER_RUNS_CAVEAT else c for c in made.caveats]
        return dataclasses.replace(made, caveats=tuple(caveats))

    def headline(self) -> list[str]:
        silos = ", ".join(f"{row['name']} ({row['num_records']} records)" for row in self.rows)
        return [f"silos: {silos}", f"{self.num_params:,} parameters"]

    def price(self) -> dict[str, Any]:
        return {"silos": self.rows, "rounds": self.steps, "parameters": self.num_params}

    def report(
        self, directory: RunDirectory, result: RunResult, guarantee: Guarantee
    ) -> dict[str, Any]:
        return {
            "silos": self.rows,
            "model": {"parameters": self.num_params},
            "data": {"description": "held by the silos", "silos": len(self.rows)},
            "plan": {"run": self.plan.run, "digest": self.plan.digest},
        }


@dataclasses.dataclass
class _RoundRequester:
    """An ``Ask`` that sends requests over a transport."""

    transport: Transport
    plan: StudyPlan
    console: Console
    like: Any

    def __call__(self, number: int, params: Any) -> dict[int, Any]:
        header = {"kind": "round", "run": self.plan.run, "plan": self.plan.digest, "round": number}
        request, names = pack(header, params=params), self.plan.names
        replies = self.transport.ask(dict.fromkeys(names, request))
        messages, absent = {}, 0
        for index, name in enumerate(names):
            reply, arrays = unpack(replies[name]) if name in replies else (_LATE, {})
            if reply["kind"] in ("message", "absent"):
                self._check(reply, name, number)
            if reply["kind"] == "message":
                released = tree_of(arrays, "released", self.like)
                if is_finite(released):
                    messages[index] = released
                    continue
                reply = {"kind": "refused", "why": "it sent numbers that are not finite"}
            absent += reply["kind"] == "absent"
            if reply["kind"] != "absent":
                text = f"round {number}: {name} is left out: {why_of(reply)}"
                self.console.print(text, markup=False, highlight=False)
        if not messages and not absent:
            raise StoppedError(
                f"no silo answered round {number}; run the same command again to resume"
            )
        return messages

    def _check(self, header: dict[str, Any], name: str, number: int) -> None:
        expected = {"run": self.plan.run, "plan": self.plan.digest, "round": number, "silo": name}
        for key, value in expected.items():
            if header.get(key) != value:
                raise BadInputError(
                    f"{name} sent a message with {key} {header.get(key)!r}, not {value!r}: it does "
                    "not belong to this run"
                )
