"""A configuration made into a run: the same way for every system, in any number of processes."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from dpfl_jax import accounting
from dpfl_jax.accounting import Guarantee
from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.accounting.statement import Statement
from dpfl_jax.config import config_fingerprint, config_to_dict
from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.run import processes
from dpfl_jax.run.directory import FINISHED, RunDirectory
from dpfl_jax.run.driver import RunResult
from dpfl_jax.run.public_inputs import about
from dpfl_jax.run.report import told, write_report
from dpfl_jax.run.sinks import Sink, sink_of


@dataclasses.dataclass(frozen=True)
class Charge:
    """What a whole run does to one unit, for a ledger.

    Attributes:
      event: what it may spend at most.
      delta: at which the account is kept.
      unit_key: what makes a unit: costs of others do not add up with it. A record is a row,
        whoever's it is.
      unit: whose account it is.
      adjacency: as in ``Guarantee``.
    """

    event: Any
    delta: float
    unit_key: str
    unit: str = "user"
    adjacency: str = "add-or-remove one user"

    def account(self, name: str) -> accounting.Account:
        """Of this name."""
        return accounting.Account(name, self.unit, self.adjacency, self.unit_key)


# report.json and guarantee.json of a run.
MakeReport = Callable[[], tuple[dict[str, Any], Statement]]


class Prepared(abc.ABC):
    """A configuration whose data are read and whose noise is set, before anything is written.

    Attributes:
      config: the configuration.
    """

    config: Any

    @abc.abstractmethod
    def facts(self) -> dict[str, Any]:
        """What a run that goes on must find again (``data``), or goes on with (noise, delta)."""

    @abc.abstractmethod
    def going_on(self, directory: RunDirectory) -> Prepared:
        """With the noise that the run began with, whatever calibration would say today.

        Raises:
          BadInputError: something is not what it was; the sentence names it.
        """

    @abc.abstractmethod
    def headline(self) -> list[str]:
        """What is run, in a few lines for people."""

    @property
    @abc.abstractmethod
    def unit_key(self) -> str:
        """What makes a unit: the column or key of the data."""

    @property
    @abc.abstractmethod
    def public_inputs(self) -> tuple[str, ...]:
        """All that enters the run and is taken as public (``public_inputs.public_inputs``).

        Nothing, of a run without privacy.
        """

    @property
    def account(self) -> str | None:
        """Of the ledger that is charged; None if there is none."""
        privacy = self.config.privacy
        return None if privacy.ledger is None else privacy.account

    def about(self, guarantee: Guarantee) -> Guarantee:
        """``guarantee`` with what it is about; of a run without privacy, as it is."""
        return about(guarantee, self.unit_key, self.public_inputs, self.account)

    @abc.abstractmethod
    def charge(self) -> Charge:
        """What a ledger is charged before the first step."""

    @abc.abstractmethod
    def train(
        self, directory: RunDirectory, console: Console, charge: Callable[[str], Any]
    ) -> tuple[RunResult, MakeReport]:
        """Runs; returns the result, and what makes its report (called where it is written)."""


def run_prepared(
    config: Any,
    run_dir: str | os.PathLike[str],
    console: Console,
    prepare: Callable[[], Prepared],
    key: RootKey | None = None,
) -> dict[str, Any]:
    """Runs (or resumes) a configuration and returns its report.

    Args:
      config: the configuration.
      run_dir: where the run lives.
      console: for people.
      prepare: reads the data and calibrates.
      key: root key of a new run whose configuration has no seed; None: a secret one.

    Raises:
      BadInputError: anything wrong with config, data or run directory; nothing is overwritten.
    """
    ledger_path = config.privacy.ledger
    if ledger_path is not None and not os.path.isabs(ledger_path):  # load_config makes it absolute
        raise BadInputError(
            f"privacy.ledger is the relative path {ledger_path!r}, but this configuration was read "
            "from no file that it could be relative to: give the full path"
        )
    kept = config_to_dict(config)
    kept.pop("processes")  # where a run computes is no part of it
    fingerprint = config_fingerprint(config)
    processes.check_same({"configuration": fingerprint})
    processes.on_primary(lambda: RunDirectory.check(run_dir, fingerprint, kept))
    openers = [sink_of(name) for name in config.metrics.sinks]
    prepared = processes.on_all_hosts(prepare)
    key = key if config.seed is None else RootKey.from_seed(config.seed)
    directory = open_directory(run_dir, kept, key, prepared.facts(), fingerprint)
    sinks: tuple[Sink, ...] = ()
    try:
        prepared = processes.on_all_hosts(lambda: prepared.going_on(directory))
        verb = "resuming" if directory.resumed else "starting"
        console.print(f"{verb} {config.name} in {directory.path}")
        for line in prepared.headline():
            console.print(line)
        if inputs := prepared.public_inputs:
            listed = "; ".join(inputs)
            console.print(f"assumed to be public, and not protected: {listed}", markup=False)
        if directory.writes:
            everything = config.metrics.not_private
            directory.listeners = sinks = tuple(o(directory.path, everything) for o in openers)
        bill = _Bill(prepared, directory, console)
        result, make_report = prepared.train(directory, console, bill)
        if not directory.writes:
            status = FINISHED if result.interrupted is None else "interrupted"
            return {"status": status, "steps": result.steps, "run_dir": str(directory.path)}
        report, statement = make_report()
        statement = statement.about(prepared.about(statement.privacy))
        report |= told(result, statement.privacy)
        report["run_dir"] = str(directory.path)
        report["data"]["keyed_digest"] = directory.facts["data"]
        if result.interrupted is None:
            bill.commit()
        write_report(directory.path, report, statement, result.metrics)
        return report
    finally:
        for sink in sinks:
            sink.close()
        directory.close()


def open_directory(
    run_dir: str | os.PathLike[str],
    content: Mapping[str, Any],
    key: RootKey | None,
    facts: Mapping[str, Any],
    fingerprint: str | None = None,
) -> RunDirectory:
    """Process 0 opens (and locks) the directory of a run, the others read the same one.

    Args:
      run_dir: where the run lives.
      content: what the run is, as plain JSON; kept as config.yaml.
      key: root key of a new run; None: a secret one.
      facts: as ``RunDirectory`` takes them.
      fingerprint: identifies ``content``; default a digest of it.

    Raises:
      BadInputError: the directory holds something else, or a run with another key.
    """
    if fingerprint is None:
        plain = json.dumps(content, sort_keys=True)
        fingerprint = hashlib.sha256(plain.encode()).hexdigest()[:16]
    mine = processes.on_primary(lambda: RunDirectory(run_dir, content, fingerprint, key, facts))
    introduction = processes.broadcast(None if mine is None else mine.introduction())
    return processes.on_all_hosts(lambda: mine or RunDirectory.join(introduction, facts))


class _Bill:
    """Charges the whole run to the ledger before its first step, if the config names one."""

    def __init__(self, prepared: Prepared, directory: RunDirectory, console: Console) -> None:
        self._prepared, self._run, self._console = prepared, directory.run_id, console
        path = prepared.config.privacy.ledger
        self._ledger = None if path is None else accounting.Ledger(path)
        self._paid = ""

    def __call__(self, draws: str) -> None:
        """Charges the run under its own name and that of its draws."""
        if self._ledger is None:
            return
        privacy, charge = self._prepared.config.privacy, self._prepared.charge()
        account = charge.account(privacy.account)
        self._paid = f"{self._run}:{draws}"
        found = self._ledger.reserve(
            account, self._paid, charge.event, charge.delta, privacy.budget
        )
        # What is left is rounded down.
        left = "" if found.left is None else f", {-float(rounded_up(-found.left, 4)):.4g} left"
        before, after = rounded_up(found.before, 4), rounded_up(found.after, 4)
        delta = rounded_up(charge.delta, 3)
        lines = [f"a new ledger was made at {self._ledger.path}"] * found.new_ledger
        lines.append(
            f"ledger {self._ledger.path}, account {privacy.account}: epsilon "
            f"{before} spent before this run, {after} with it{left} (delta {delta})"
        )
        lines += found.notes
        self._console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)

    def commit(self) -> None:
        """The run is finished."""
        if self._ledger is not None and self._paid:
            self._ledger.commit(self._paid)
