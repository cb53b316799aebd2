"""The server of a study: it holds no data, asks silos, and trains with the one loop of ``run``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rich.console import Console

from dpfl_jax.accounting import Guarantee
from dpfl_jax.accounting.statement import Statement
from dpfl_jax.errors import BadInputError, StoppedError
from dpfl_jax.flower import federated, isrl
from dpfl_jax.flower.plan import Plan, study_of
from dpfl_jax.flower.wire import is_finite, pack, tree_of, unpack, why_of
from dpfl_jax.run.directory import RunDirectory, write_atomically
from dpfl_jax.run.driver import RunResult, drive
from dpfl_jax.run.prepared import Charge, MakeReport, Prepared, run_prepared
from dpfl_jax.run.public_inputs import OTHER_RUNS_CAVEAT
from dpfl_jax.run.report import TUNING_CAVEAT, build_report
from dpfl_jax.task import Task

_SERVERS: dict[str, Any] = {"silos": federated.SubjectServer, "isrl": isrl.MessageServer}
# A silo that never hears that the run is over keeps its reservation, which is no less.
_DONE_S = 30.0
# How long a server that goes on waits for all its silos to come back.
_RETURN_S = 60.0
_LATE: dict[str, Any] = {"kind": "late", "why": "it did not answer"}
_SILOS = "silos.json"
_CAVEATS = (
    TUNING_CAVEAT,
    "each silo computed its own guarantee and holds it in its own log; what is stated here assumes "
    "that every silo runs this plan",
)


_LEDGERS = (
    "other runs on these people are not counted here: each silo charged this one to a ledger of "
    "its own"
)


_NO_LEDGER = (
    "privacy.ledger is set, but a server holds nobody's records: remove it; every silo keeps a "
    "ledger of its own"
)


class Transport(Protocol):
    """Brings requests to silos, by name."""

    def hello(self, request: bytes, count: int, most_s: float = math.inf) -> dict[str, bytes]:
        """Asks everybody until ``count`` silos have answered: reply by the silo's name."""

    def ask(self, requests: Mapping[str, bytes], most_s: float = math.inf) -> dict[str, bytes]:
        """Replies of those who answer in time; asking a silo again for the same does no harm."""


@dataclasses.dataclass(frozen=True)
class RemoteRun(Prepared):
    """A study whose silos have introduced themselves."""

    config: Any
    transport: Transport
    rows: list[dict[str, Any]]
    task: Task
    server: Any
    console: Console

    def facts(self) -> dict[str, Any]:
        """Names and sizes of the silos; noise."""
        return {"data": json.dumps(self.rows, sort_keys=True), "noise": self.server.noise}

    def going_on(self, directory: RunDirectory) -> RemoteRun:
        """With the noise that the run began with."""
        made = type(self.server)(self.config, self.task, self.rows, directory.facts["noise"])
        return dataclasses.replace(self, server=made)

    def headline(self) -> list[str]:
        """Silos, model, noise beside signal."""
        told = ", ".join(f"{row['name']} ({row['num_records']} records)" for row in self.rows)
        return [
            f"silos: {told}",
            f"{self.server.num_params:,} parameters",
            *self.server.advice(),
        ]

    def charge(self) -> Charge:
        """Never asked for: each silo charges its own ledger."""
        raise BadInputError(_NO_LEDGER)

    @property
    def unit_key(self) -> str:
        """What makes a unit, as each silo alone knows."""
        return "what each silo's own data.user_column names"

    @property
    def public_inputs(self) -> tuple[str, ...]:
        """Bounds, and the counts that silos tell."""
        return self.server.public_inputs(f"{len(self.rows)} silos, and the sizes of each")

    def about(self, guarantee: Guarantee) -> Guarantee:
        """With ledgers that only the silos have."""
        made = super().about(guarantee)
        caveats = [_LEDGERS if c == OTHER_RUNS_CAVEAT else c for c in made.caveats]
        return dataclasses.replace(made, caveats=tuple(caveats))

    def plan(self, directory: RunDirectory) -> Plan:
        """What the silos are asked to do."""
        return Plan(directory.run_id, study_of(self.config), self.rows, list(self.server.noise))

    def train(
        self, directory: RunDirectory, console: Console, charge: Callable[[str], Any]
    ) -> tuple[RunResult, MakeReport]:
        """Runs the rounds."""
        del charge
        plan, every = self.plan(directory), [row["name"] for row in self.rows]
        request = pack({"kind": "plan", "plan": plan.to_json()})
        replies = self.transport.ask(dict.fromkeys(every, request))
        for name in every:
            if name not in replies and directory.resumed:  # it has accepted the plan already
                console.print(f"{name} is left out until it comes back", markup=False)
                continue
            if name not in replies:
                raise StoppedError(f"{name} did not answer to the plan; the same command goes on")
            header, _ = unpack(replies[name])
            if header["kind"] != "accepted" or header["plan"] != plan.digest:
                raise BadInputError(f"silo {name} refuses: {why_of(header)}")
        write_atomically(directory.path / _SILOS, json.dumps(self.rows))
        asking = _Asking(self.transport, plan, console)
        algorithm = self.server.algorithm(asking)
        asking.like = self.server.message_like
        result = drive(algorithm, run_dir=directory, pace=self.server.pace, console=console)
        if result.interrupted is None:
            done = pack({"kind": "done", "run": plan.run, "plan": plan.digest})
            self.transport.ask(dict.fromkeys(every, done), _DONE_S)

        def report() -> tuple[dict[str, Any], Statement]:
            caveats = (*_CAVEATS, *self.config.data.caveats(), *result.caveats)
            guarantee = self.server.guarantee(result.accounted, caveats)
            made = build_report(
                self.config.name,
                result,
                guarantee,
                silos=self.rows,
                task=dataclasses.asdict(self.task),
                model={"parameters": self.server.num_params},
                data={"description": "held by the silos", "silos": len(self.rows)},
                mechanism=self.server.mechanism(),
                plan={"run": plan.run, "digest": plan.digest},
            )
            return made, self.server.statement(result.accounted, guarantee)

        return result, report


@dataclasses.dataclass
class _Asking:
    """``(round, parameters) -> what each silo that takes part has sent``, by its place."""

    transport: Transport
    plan: Plan
    console: Console
    like: Any = None

    def __call__(self, number: int, params: Any) -> dict[int, Any]:
        told = {"kind": "round", "run": self.plan.run, "plan": self.plan.digest, "round": number}
        request, names = pack(told, params=params), self.plan.names
        replies = self.transport.ask(dict.fromkeys(names, request))
        found, absent = {}, 0
        for place, name in enumerate(names):
            header, arrays = unpack(replies[name]) if name in replies else (_LATE, {})
            if header["kind"] in ("message", "absent"):
                self._check(header, name, number)
            if header["kind"] == "message":
                released = tree_of(arrays, "released", self.like)
                if is_finite(released):
                    found[place] = released
                    continue
                header = {"kind": "refused", "why": "it sent numbers that are not finite"}
            absent += header["kind"] == "absent"
            if header["kind"] != "absent":
                text = f"round {number}: {name} is left out: {why_of(header)}"
                self.console.print(text, markup=False, highlight=False)
        if not found and not absent:
            raise StoppedError(
                f"no silo answered round {number}; the same command goes on once they do"
            )
        return found

    def _check(self, header: dict[str, Any], name: str, number: int) -> None:
        expected = {"run": self.plan.run, "plan": self.plan.digest, "round": number, "silo": name}
        for key, value in expected.items():
            if header.get(key) != value:
                raise BadInputError(
                    f"{name} sent a message of {key} {header.get(key)!r}, not {value!r}: it is not "
                    "of this run"
                )


def prepare(
    config: Any, transport: Transport, console: Console, known: list[dict[str, Any]] | None = None
) -> RemoteRun:
    """Asks the silos who they are, and calibrates.

    Args:
      config: the study's configuration.
      transport: brings requests to the silos.
      console: for people.
      known: silos of a run that goes on: some may be gone.

    Raises:
      BadInputError: studies or schemas that differ, named with the silo.
    """
    if config.privacy.ledger is not None:
        raise BadInputError(_NO_LEDGER)
    study = study_of(config)
    count = config.federation.silos
    console.print(f"waiting for {count} silos", highlight=False)
    most_s = math.inf if known is None else _RETURN_S
    replies = transport.hello(pack({"kind": "hello", "study": study}), count, most_s)
    headers = {}
    for name, reply in sorted(replies.items(), key=_in_order(replies)):
        header, _ = unpack(reply)
        if header["kind"] != "hello":
            raise BadInputError(f"silo {name} refuses: {why_of(header)}")
        headers[name] = header
    if known is not None:  # a stranger ends no run that goes on
        names = {row["name"] for row in known}
        headers = {name: header for name, header in headers.items() if name in names}
    if known is None and len(headers) != count:
        raise BadInputError(f"{count} silos are expected, but there are {sorted(headers)}")
    if not headers:
        raise StoppedError("no silo is there; the same command goes on once one is")
    introduced = {name: _introduced(name, header) for name, header in headers.items()}
    tasks = {name: json.dumps(header["task"], sort_keys=True) for name, header in headers.items()}
    first = next(iter(tasks))
    for name, learned in tasks.items():
        if learned != tasks[first]:
            raise BadInputError(
                f"the tables of {first} and {name} are not alike: {tasks[first]} and {learned}"
            )
    rows = [row for row, _ in introduced.values()]
    if known is not None:
        for row in rows:
            if row not in known:
                raise BadInputError(f"the run began with the silos {known}, and not with {row}")
        rows = known
    _, task = introduced[first]
    with console.status("calibrating noise"):
        server = _SERVERS[config.variant](config, task, rows, None)
    return RemoteRun(config, transport, rows, task, server, console)


def _introduced(name: str, header: Mapping[str, Any]) -> tuple[dict[str, Any], Task]:
    """What a silo tells of itself: its row of the plan, and what it learns.

    Raises:
      BadInputError: it is nothing of the kind.
    """
    try:
        facts, task = header["facts"], Task.of(header["task"])
        whole = "name" not in facts and all(
            type(size) is int and 0 < size < 2**31 for size in facts.values()
        )
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise BadInputError(f"silo {name} tells no sizes and task: it runs other software")
    return {"name": name, **facts}, task


def _in_order(names: Mapping[str, Any]) -> Callable[[tuple[str, Any]], Any]:
    """As ``data.table`` numbers the names of a silo column."""
    whole = all(name.isdecimal() for name in names)
    return lambda item: int(item[0]) if whole else item[0]


def run_study(
    config: Any, run_dir: str | os.PathLike[str], transport: Transport, console: Console
) -> dict[str, Any]:
    """Runs (or resumes) a study with silos that are elsewhere, and returns its report.

    Args:
      config: the study's configuration.
      run_dir: of the server; a server that was killed goes on from its last checkpoint.
      transport: brings requests to the silos.
      console: for people.

    Raises:
      BadInputError: silos that refuse, with their own sentence.
      StoppedError: nobody answers.
    """
    path = pathlib.Path(run_dir) / _SILOS
    known = json.loads(path.read_text()) if path.exists() else None
    return run_prepared(
        config, run_dir, console, lambda: prepare(config, transport, console, known)
    )


def digest_of(config: Any) -> str:
    """16 digits by which parties can compare their studies."""
    text = json.dumps(study_of(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


__all__ = ["RemoteRun", "Transport", "digest_of", "prepare", "run_study"]
