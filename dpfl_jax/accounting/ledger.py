"""What the users of a data set have spent over several runs: an append-only file.

A run *reserves* its whole event before its first step, and may *commit* a smaller one at its end.
A reservation counts in full until it is committed, so a crash at any moment can only over-report.
Events of one account (data set, unit, adjacency) are composed, not their epsilons added.

The file has one JSON record per line, each with the hash of the record before it: a record removed
or changed in the middle is noticed. Records are written by one ``write`` and synced to disk under
an exclusive lock, so that concurrent runs cannot both take what is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import dp_accounting

from dpfl_jax.accounting import serialize
from dpfl_jax.accounting.accountant import (
    ADD_OR_REMOVE,
    REPLACE,
    Accountant,
    TooLittleNoiseError,
    accountant_of,
    check_delta,
    check_epsilon,
)
from dpfl_jax.accounting.accountant import epsilon as epsilon_of
from dpfl_jax.accounting.composition import TableTooLargeError
from dpfl_jax.accounting.event_types import ApproximateDpEvent
from dpfl_jax.accounting.guarantee import Guarantee
from dpfl_jax.errors import BadInputError


class LedgerError(BadInputError):
    """The ledger cannot take what a run would do, so that the run must not begin."""


class BudgetExceededError(LedgerError):
    """The event would take the account beyond its budget; nothing was recorded."""


@dataclasses.dataclass(frozen=True)
class Account:
    """Whose budget it is.

    Attributes:
      dataset: fingerprint of the data set, or a declared name shared by all its versions (a rebuilt
        store has another fingerprint although its users are the same people).
      unit: "user", "subject", "record".
      adjacency: as in ``Guarantee``; one that starts with "replace" is accounted as replace-one.
    """

    dataset: str
    unit: str = "user"
    adjacency: str = "add-or-remove one user"


@dataclasses.dataclass(frozen=True)
class Reservation:
    """What a run may spend.

    Attributes:
      run: the run's own name.
      before: epsilon of the account without it, at ``delta``.
      after: epsilon of the account with it in full.
      delta: at which both are computed.
      budget: largest epsilon allowed, or None.
      new_ledger: whether nothing was in the file before: it should be the first run of all.
    """

    run: str
    before: float
    after: float
    delta: float
    budget: float | None
    new_ledger: bool

    @property
    def left(self) -> float | None:
        """Budget minus what is spent once this run has run, or None without a budget."""
        return None if self.budget is None else self.budget - self.after


class Ledger:
    """An append-only record of what each account has spent."""

    def __init__(self, path: str | os.PathLike[str]):
        """Args: path: the file; created, with its folder, at the first reservation."""
        self.path = pathlib.Path(path).absolute()

    def reserve(
        self,
        account: Account,
        run: str,
        event: dp_accounting.DpEvent | Guarantee,
        delta: float,
        budget: float | None = None,
    ) -> Reservation:
        """Records the whole event of a run before its first step.

        Calling it again for the same run and event (a resumed run) records nothing twice.

        Args:
          account: whose budget.
          run: unique name of the run (its directory or an identifier).
          event: what the whole run may do to one unit; a ``Guarantee`` if only that is known.
          delta: of the account, in (0, 1).
          budget: largest epsilon of the account at ``delta``; None to record without limit.

        Raises:
          BudgetExceededError: if the budget would be exceeded; nothing is recorded.
          LedgerError: if the run already reserved something else, or the file is damaged.
        """
        check_delta(delta)
        if budget is not None:
            check_epsilon(budget)
        if not run:
            raise BadInputError("a reservation needs the name of its run")
        stored = serialize.to_json(_as_event(event))
        with self._locked() as handle:
            records, tail = _parse(handle, self.path)
            entries = _entries(records, account)
            if run in entries and entries[run]["reserved"] != stored:
                raise LedgerError(
                    f"run {run!r} has already reserved something else in {self.path}: give the "
                    "changed run another name, so that both are counted"
                )
            if any(r["run"] == run and r["account"] != _key(account) for r in records):
                raise LedgerError(
                    f"run {run!r} is in {self.path} under another data set, unit or adjacency: "
                    "choose another name"
                )
            others = [e["event"] for name, e in entries.items() if name != run]
            before = _spent(others, account, delta)
            after = _spent([*others, stored], account, delta)
            if budget is not None and not after <= budget:
                raise BudgetExceededError(
                    f"this run would take the {account.unit}s of this data set to epsilon "
                    f"{after:.6g} at delta {delta:g}, beyond the budget of {budget:g}: "
                    f"{before:.6g} is spent, about {max(budget - before, 0.0):.6g} is left "
                    f"(ledger {self.path})"
                )
            if run not in entries or entries[run]["committed"]:
                # A committed run that starts again counts in full again.
                _append(
                    handle,
                    tail,
                    {"kind": "reserve", "account": _key(account), "run": run, "event": stored},
                )
        return Reservation(run, before, after, delta, budget, new_ledger=not records)

    def commit(self, run: str, event: dp_accounting.DpEvent | Guarantee | None = None) -> None:
        """Replaces a run's reservation by what it really did.

        Args:
          run: name given to :meth:`reserve`.
          event: what the run did; None for all it reserved. If that is more than was reserved
            (which should not happen), it is recorded all the same, and counts.

        Raises:
          LedgerError: if the run has reserved nothing, or the file is damaged.
        """
        with self._locked() as handle:
            records, tail = _parse(handle, self.path)
            mine = [r for r in records if r["run"] == run and r["kind"] == "reserve"]
            if not mine:
                raise LedgerError(f"run {run!r} has reserved nothing in {self.path}")
            stored = mine[-1]["event"] if event is None else serialize.to_json(_as_event(event))
            _append(
                handle,
                tail,
                {"kind": "commit", "account": mine[-1]["account"], "run": run, "event": stored},
            )

    def spent(self, account: Account, delta: float) -> float:
        """Upper bound on epsilon of all runs of the account at ``delta``; 0 if there are none."""
        check_delta(delta)
        return _spent([e["event"] for e in self._account(account).values()], account, delta)

    def remaining(self, account: Account, delta: float, budget: float) -> float:
        """Budget minus what is spent, at least 0; as runs compose, slightly more may still fit."""
        return max(budget - self.spent(account, delta), 0.0)

    def runs(self, account: Account) -> list[str]:
        """Names of the account's runs, in order of their first reservation."""
        return list(self._account(account))

    def accounts(self) -> list[Account]:
        """All accounts of the file, in order of their first reservation."""
        return list(dict.fromkeys(Account(**record["account"]) for record in self._records()))

    def _account(self, account: Account) -> dict[str, dict[str, Any]]:
        return _entries(self._records(), account)

    def _records(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with open(self.path, "rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH)
            return _parse(handle, self.path)[0]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Any]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = open(self.path, "a+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise LedgerError(
                f"the ledger {self.path} cannot be written ({error.strerror}): choose another path"
            ) from error
        with handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield handle


def _as_event(event: dp_accounting.DpEvent | Guarantee) -> dp_accounting.DpEvent:
    if isinstance(event, Guarantee):
        if not event.private:
            return dp_accounting.NonPrivateDpEvent()
        return ApproximateDpEvent(event.epsilon, event.delta)
    return event


def _key(account: Account) -> dict[str, str]:
    return dataclasses.asdict(account)


def _spent(stored: list[Any], account: Account, delta: float) -> float:
    parts = [serialize.from_json(values) for values in stored]
    if not parts:
        return 0.0
    relation = REPLACE if account.adjacency.startswith("replace") else ADD_OR_REMOVE
    by: dict[Accountant, list[dp_accounting.DpEvent]] = {"pld": [], "rdp": []}
    for part in parts:
        by[accountant_of(part, relation)].append(part)

    def cost(some: list[dp_accounting.DpEvent], delta: float, accountant: Accountant) -> float:
        try:
            event = dp_accounting.ComposedDpEvent(some)
            return epsilon_of(event, delta, relation=relation, accountant=accountant)
        except (TooLittleNoiseError, TableTooLargeError):
            return math.inf

    for accountant, some in by.items():
        if len(some) == len(parts):
            return cost(parts, delta, accountant)
    # Of some only Renyi divergences are known: all by these, or each kind with half of delta.
    apart = sum(cost(some, delta / 2, accountant) for accountant, some in by.items())
    try:
        return min(apart, cost(parts, delta, "rdp"))
    except BadInputError:  # events of which no Renyi divergences are known
        return apart


def _entries(records: list[dict[str, Any]], account: Account) -> dict[str, dict[str, Any]]:
    """Run -> {reserved, event, committed}, the latest record of each run.

    A run reserved again after its commit (resumed for the rest of its steps) reserves the same
    whole event, of which the committed part is a part: the reservation replaces the commit.
    """
    out: dict[str, dict[str, Any]] = {}
    for record in records:
        if record["account"] != _key(account):
            continue
        run, event = record["run"], record["event"]
        if record["kind"] == "reserve":
            out[run] = {"reserved": event, "event": event, "committed": False}
        else:
            out[run] = {**out[run], "event": event, "committed": True}
    return out


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()[:32]


def _append(handle: Any, tail: tuple[str, bool], record: dict[str, Any]) -> None:
    previous, torn = tail
    record = {**record, "time": time.time(), "previous": previous}
    line = json.dumps(record, sort_keys=True, allow_nan=False).encode() + b"\n"
    # A line cut short by a crash is closed first; the record after it says so.
    data = (b"\n" + line) if torn else line
    written = os.write(handle.fileno(), data)
    os.fsync(handle.fileno())
    if written != len(data):
        raise OSError("the ledger could not be written in full: is the disk full?")


def _parse(handle: Any, path: pathlib.Path) -> tuple[list[dict[str, Any]], tuple[str, bool]]:
    """All records, and (hash of the last one, whether the file ends in a cut line).

    A line that was cut by a crash was never acknowledged: no step ran on the strength of it.
    """
    handle.seek(0)
    lines = handle.read().split(b"\n")
    # A last line without its end is a record if it is whole, and nothing if it is cut.
    torn = lines[-1] != b""
    records: list[dict[str, Any]] = []
    previous = ""
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            whole = isinstance(record, dict) and {"kind", "account", "run", "event"} <= set(record)
        except ValueError:
            whole = False
        if not whole:
            continue  # A cut line; a forged one breaks the chain of hashes below.
        if record.get("previous") != previous:
            raise LedgerError(
                f"the ledger {path} is damaged before line {number}: a record was changed or "
                "removed; restore it from a copy"
            )
        previous = _digest(line)
        records.append(record)
    return records, (previous, torn)
