"""The ledger: an append-only file of what the users of a data set have spent over several runs.

A run *reserves* its whole event before its first step. The event counts in full even if the run
ends early, because when it ends may depend on what it showed. *commit* notes that a run has ended.
A privacy filter (``filters``) keeps the events of one account (data set, unit, adjacency) within
its budget, even if runs are chosen after looking at earlier ones. All runs of an account have one
unit key: what visits spend does not add up to what a patient spends.

The file has one JSON record per line, each with the hash of the record before it, so that a record
removed or changed in the middle is noticed. Each record is one ``write``, synced to disk under an
exclusive lock, so that concurrent runs cannot both take what is left. In a bucket each is one write
of the whole object, which fails if the object is not the one that was read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import io
import json
import math
import os
import pathlib
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import dp_accounting

from dpfl_jax import buckets
from dpfl_jax.accounting import event_types
from dpfl_jax.accounting.accountant import ADD_OR_REMOVE, REPLACE, check_delta, check_epsilon
from dpfl_jax.accounting.event_types import ApproximateDpEvent
from dpfl_jax.accounting.filters import filtered_epsilon
from dpfl_jax.accounting.guarantee import Guarantee, rounded_up
from dpfl_jax.errors import BadInputError, one_line
from dpfl_jax.files import on_disk

T = TypeVar("T")


class LedgerError(BadInputError):
    """The ledger refuses a run: it must not begin.

    Examples:
      >>> from dpfl_jax.accounting import BudgetExceededError, LedgerError
      >>> issubclass(BudgetExceededError, LedgerError)
      True
    """


class BudgetExceededError(LedgerError):
    """The run would exceed the account's budget; nothing was recorded.

    Examples:
      >>> import tempfile
      >>> from dpfl_jax import accounting
      >>> ledger = accounting.Ledger(tempfile.mkdtemp() + "/ledger.jsonl")
      >>> event = accounting.events.gaussian(0.5, steps=10)
      >>> try:
      ...     ledger.reserve(accounting.Account("visits"), "run", event, delta=1e-5, budget=1.0)
      ... except accounting.BudgetExceededError:
      ...     print("over the budget of 1")
      over the budget of 1
    """


_RELATIONS = {
    "add-or-remove": ADD_OR_REMOVE,
    "zero-out": ADD_OR_REMOVE,
    "empty": ADD_OR_REMOVE,
    "none": ADD_OR_REMOVE,  # runs without a guarantee
    "replace": REPLACE,
    "replace-one": REPLACE,
}


@dataclasses.dataclass(frozen=True)
class Account:
    """The privacy units that share a budget: those of one data set, unit and adjacency.

    Attributes:
      dataset: fingerprint of the data set, or a declared name shared by all its versions (a rebuilt
        store has another fingerprint although its users are the same people).
      unit: "user", "subject", "record" or another noun for one privacy unit.
      adjacency: as in ``Guarantee``; its first word says how it is accounted: "replace" or
        "replace-one", or "add-or-remove", "zero-out" or "empty".
      unit_key: as in ``Guarantee``: the column or key that defines a unit, one for all runs of the
        account, or "" if it is not known. Accounts that differ only in it are equal.

    Examples:
      >>> from dpfl_jax.accounting import Account
      >>> Account("heart disease", unit="patient", unit_key="column patient").unit
      'patient'
    """

    dataset: str
    unit: str = "user"
    adjacency: str = "add-or-remove one user"
    unit_key: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit_key", one_line(self.unit_key))

    @property
    def whose(self) -> str:
        """The unit with the column or key that defines it: "patient by column patient"."""
        return f"{self.unit} by {self.unit_key}" if self.unit_key else self.unit


@dataclasses.dataclass(frozen=True)
class Reservation:
    """What a run has reserved, and what that leaves of its account.

    Attributes:
      run: the run's name.
      before: epsilon that the account has spent without this run, at ``delta`` (``Ledger.spent``).
      after: epsilon that it has spent with the whole run.
      delta: delta of ``before``, ``after`` and ``budget``.
      budget: largest epsilon allowed, or None.
      new_ledger: whether the file was empty before, as it should be at the very first run only.
      notes: sentences that people should read about the account.

    Examples:
      >>> import tempfile
      >>> from dpfl_jax import accounting
      >>> ledger = accounting.Ledger(tempfile.mkdtemp() + "/ledger.jsonl")
      >>> event = accounting.events.uls(1.0, 0.01, steps=100)
      >>> account = accounting.Account("heart disease")
      >>> reserved = ledger.reserve(account, "first run", event, delta=1e-5, budget=4.0)
      >>> reserved.before, round(reserved.after, 2)
      (0.0, 0.72)
    """

    run: str
    before: float
    after: float
    delta: float
    budget: float | None
    new_ledger: bool
    notes: tuple[str, ...] = ()

    @property
    def left(self) -> float | None:
        """Budget minus what is spent after this run, or None without a budget."""
        return None if self.budget is None else self.budget - self.after


class Ledger:
    """An append-only record of what each account has spent.

    Args:
      path: the file, also an address (``gs://``, ``s3://``); created, with its folder, at the
        first reservation.

    Examples:
      >>> import tempfile
      >>> from dpfl_jax import accounting
      >>> ledger = accounting.Ledger(tempfile.mkdtemp() + "/ledger.jsonl")
      >>> account = accounting.Account("heart disease")
      >>> event = accounting.events.uls(1.0, 0.01, steps=100)
      >>> reserved = ledger.reserve(account, "first run", event, delta=1e-5, budget=4.0)
      >>> round(ledger.spent(account, delta=1e-5), 2), ledger.runs(account)
      (0.72, ['first run'])
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = buckets.address(path) or on_disk(path).absolute()

    def reserve(
        self,
        account: Account,
        run: str,
        event: dp_accounting.DpEvent | Guarantee,
        delta: float,
        budget: float | None = None,
    ) -> Reservation:
        """Records the whole event of a run before its first step.

        Calling it again for the same run and event (a resumed run) records nothing twice. Runs that
        are declared together, before any of them begins, may be one reservation of one event
        (``events.composed``), which costs less.

        Args:
          account: the account that pays.
          run: unique name of the run (its directory or an identifier).
          event: what the whole run may do to one unit; a ``Guarantee`` if only that is known, which
            must have the account's unit and adjacency.
          delta: the account's delta, in (0, 1).
          budget: largest epsilon of the account at ``delta``, fixed before its first run and equal
            for all runs: a budget that is raised after seeing results bounds nothing. None: only
            the budgets that the account already has.

        Raises:
          BudgetExceededError: a budget of the account would be exceeded; nothing is recorded.
          LedgerError: the run has already reserved something else, other runs of the account have
            another unit key, or the file is damaged.
          BadInputError: the guarantee has another unit, unit key or adjacency than the account, or
            the account's adjacency cannot be accounted.
        """
        delta, budget = check_delta(delta), None if budget is None else check_epsilon(budget)
        if not run:
            raise BadInputError("a reservation needs the name of its run")
        stored = event_types.to_json(_as_event(event, account))

        def decide(records: list[dict[str, Any]]) -> tuple[dict[str, Any] | None, Reservation]:
            entries, budgets = _entries(records, account), _budgets(records, account)
            if run in entries and entries[run]["reserved"] != stored:
                raise LedgerError(
                    f"run {run!r} has already reserved a different event in {self.path}: give the "
                    "changed run another name, so that both runs are counted"
                )
            if any(r["run"] == run and r["account"] != _key(account) for r in records):
                raise LedgerError(
                    f"run {run!r} is in {self.path} under another data set, unit or adjacency: "
                    "choose another name"
                )
            unit_key = account.unit_key or getattr(event, "unit_key", "")
            notes = _notes_on_units(records, account, run, unit_key)
            notes += _notes(records, account, run, budgets, delta, budget)
            others = [entry for name, entry in entries.items() if name != run]
            # The filter takes runs in the order in which they were first reserved.
            runs = (entries if run in entries else entries | {run: {"events": [stored]}}).values()
            before, after = (_spent(some, account, delta) for some in (others, runs))
            # A budget smaller than the account's holds as well, and so do budgets at other deltas.
            limits = budgets | ({} if budget is None else {delta: budget})
            for at, most in limits.items():
                needed = after if at == delta else _spent(runs, account, at)
                if not needed <= most:
                    why = _refusal(account, needed, at, most, _spent(others, account, at))
                    if at != delta:
                        why += f" (the account also has a budget at delta {delta:g})"
                    raise BudgetExceededError("; ".join([f"{why} (ledger {self.path})", *notes]))
            promised = None if budget is None else max(budget, budgets.get(delta, 0.0))
            known = promised is None or budgets.get(delta) == promised
            limit = budgets.get(delta) if budget is None else budget
            reservation = Reservation(run, before, after, delta, limit, not records, notes)
            if run in entries and not entries[run]["committed"] and known:
                return None, reservation
            record = {
                "kind": "reserve",
                "account": _key(account),
                "unit_key": unit_key,
                "run": run,
                "event": stored,
                "budget": promised,
                "delta": delta,
            }
            return record, reservation

        # proof: ledger-reserve-1
        return self._change(decide)

    def commit(self, run: str) -> None:
        """Notes that a run has ended; what it reserved still counts in full.

        Args:
          run: name given to :meth:`reserve`.

        Raises:
          LedgerError: the run has reserved nothing, or the file is damaged.
        """

        def decide(records: list[dict[str, Any]]) -> tuple[dict[str, Any], None]:
            mine = [r for r in records if r["run"] == run and r["kind"] == "reserve"]
            if not mine:
                raise LedgerError(f"run {run!r} has reserved nothing in {self.path}")
            return {"kind": "commit"} | {key: mine[-1][key] for key in _REPEATED}, None

        self._change(decide)

    def spent(self, account: Account, delta: float) -> float:
        """Returns the least budget at ``delta`` that allows all runs of the account so far.

        For a single run it is that run's epsilon. For several runs it is not a guarantee, because
        when to stop may depend on what they showed: the guarantee is the budget that was fixed
        before the first run.
        """
        delta = check_delta(delta)
        return _spent(self._account(account).values(), account, delta)

    def remaining(self, account: Account, delta: float, budget: float) -> float:
        """Returns ``budget`` minus what is spent, at least 0.

        As costs do not simply add up, a run that costs slightly more may still fit.
        """
        return max(float(budget) - self.spent(account, delta), 0.0)

    def budgets(self, account: Account) -> dict[float, float]:
        """Returns the largest budget that the account was ever given, as ``{delta: epsilon}``.

        It is a guarantee if it was fixed before the first run, and none if it was raised after
        seeing results.
        """
        return _budgets(self._records(), account)

    def runs(self, account: Account) -> list[str]:
        """Returns the names of the account's runs, in order of their first reservation."""
        return list(self._account(account))

    def accounts(self) -> list[Account]:
        """Returns all accounts of the file, in order of their first reservation."""
        return list(dict.fromkeys(Account(**record["account"]) for record in self._records()))

    def _account(self, account: Account) -> dict[str, dict[str, Any]]:
        return _entries(self._records(), account)

    def _records(self) -> list[dict[str, Any]]:
        if isinstance(self.path, str):
            return _parse(buckets.content(self.path), self.path)[0]
        try:
            handle = _opened(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return []
        with handle:
            fcntl.flock(handle, fcntl.LOCK_SH)
            return _parse(handle.read(), self.path)[0]

    def _change(
        self, decide: Callable[[list[dict[str, Any]]], tuple[dict[str, Any] | None, T]]
    ) -> T:
        """Appends the record that ``decide`` returns for all records, and returns the rest of that.

        No other process appends in between.
        """

        def appended(content: bytes) -> tuple[bytes, T]:
            records, tail = _parse(content, self.path)
            record, result = decide(records)
            return b"" if record is None else _line(record, tail), result

        if isinstance(self.path, str):
            return buckets.append(self.path, appended)
        with self._locked(self.path) as handle:
            line, result = appended(handle.read())
            if line:
                _append(handle, line)
            return result

    @contextlib.contextmanager
    def _locked(self, path: pathlib.Path) -> Iterator[io.FileIO]:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = _opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        except OSError as error:
            raise LedgerError(
                f"the ledger {self.path} cannot be written ({error.strerror}): choose another file"
            ) from error
        with handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield handle


def _opened(path: pathlib.Path, flags: int) -> io.FileIO:
    """Opens the file; a link, a pipe or a device is refused."""
    try:
        handle = open(os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "rb", 0)  # noqa: SIM115
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise LedgerError(f"the ledger {path} is a link: name the file it points to") from None
    if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
        handle.close()
        raise LedgerError(f"the ledger {path} is not a regular file: choose another path")
    return handle


def _as_event(event: dp_accounting.DpEvent | Guarantee, account: Account) -> dp_accounting.DpEvent:
    if not isinstance(event, Guarantee):
        return event
    if not event.private:
        return dp_accounting.NonPrivateDpEvent()
    same = (event.unit, event.adjacency) == (account.unit, account.adjacency)
    keys = {event.unit_key, account.unit_key} - {""}
    if not same or len(keys) > 1:
        raise BadInputError(
            f"the guarantee is for each {event.whose} ({event.adjacency}), but the account counts "
            f"what is spent on each {account.whose} ({account.adjacency}): reserve it in an "
            f"Account with unit={event.unit!r}, adjacency={event.adjacency!r} and "
            f"unit_key={event.unit_key!r}"
        )
    return ApproximateDpEvent(event.epsilon, event.delta)


def _key(account: Account) -> dict[str, str]:
    return {name: getattr(account, name) for name in ("dataset", "unit", "adjacency")}


def _spent(entries: Iterable[dict[str, Any]], account: Account, delta: float) -> float:
    relation = _RELATIONS.get(account.adjacency.partition(" ")[0])
    if relation is None:
        raise BadInputError(
            f"the account's adjacency {account.adjacency!r} cannot be accounted: let it begin with "
            "add-or-remove, zero-out, empty, replace or replace-one"
        )
    runs = []
    for entry in entries:
        events = [event_types.from_json(values) for values in entry["events"]]
        if len(events) > 1:
            events.sort(key=lambda event: filtered_epsilon([event], delta, relation))
        runs.append(events[-1])
    return filtered_epsilon(runs, delta, relation)


def _refusal(account: Account, needed: float, delta: float, budget: float, spent: float) -> str:
    people = f"the {account.unit}s of this data set"
    if math.isinf(needed):
        return (
            f"no budget of {people} at delta {delta:g} allows this run after the others: it has no "
            "guarantee, or one whose delta is above an eighth of the account's"
        )
    return (
        f"this run would take {people} to epsilon {needed:.6g} at delta {delta:g}, beyond the "
        f"budget of {budget:g}: {spent:.6g} is spent, about {max(budget - spent, 0.0):.6g} is left"
    )


def _entries(records: list[dict[str, Any]], account: Account) -> dict[str, dict[str, Any]]:
    """Run -> {reserved, events, committed}, in the order of first reservations.

    A run has several events, of which the costliest counts, where an earlier version of the library
    committed less or more than was reserved.
    """
    out: dict[str, dict[str, Any]] = {}
    for record in records:
        if record["account"] != _key(account):
            continue
        run, event = record["run"], record["event"]
        committed = record["kind"] == "commit"
        events = out[run]["events"] if run in out else []
        events = events if event in events else [*events, event]
        out[run] = {"reserved": events[0], "events": events, "committed": committed}
    return out


def _budgets(records: list[dict[str, Any]], account: Account) -> dict[float, float]:
    out: dict[float, float] = {}
    for record in records:
        if record["account"] == _key(account) and record.get("budget") is not None:
            out[record["delta"]] = max(out.get(record["delta"], 0.0), record["budget"])
    return out


def _notes(
    records: list[dict[str, Any]],
    account: Account,
    run: str,
    budgets: dict[float, float],
    delta: float,
    budget: float | None,
) -> tuple[str, ...]:
    """Sentences about the account's budget and earlier runs, to print before this run begins."""
    mine = [r for r in records if r["account"] == _key(account) and r["kind"] == "reserve"]
    others = any(record["run"] != run for record in mine)
    known, notes = budgets.get(delta), []
    before, now = (rounded_up(value or 0.0, 6) for value in (known, budget))
    at = rounded_up(delta, 6)
    if mine and not any("budget" in record for record in mine):
        notes.append(
            "the runs of this account were recorded by an earlier version, which assumed that all "
            "were chosen before the first: now they are counted in full, as chosen one after the "
            "other, so that more is spent than that version said"
        )
    if budget is None:
        if others and not budgets:
            notes.append(
                "this account has no budget, so what is spent is no guarantee, as runs may have "
                "been chosen by what earlier ones showed: set privacy.budget before the first run"
            )
    elif known is None:
        if others:
            notes.append(
                f"this account had runs before it had the budget {now} (delta {at}), which holds "
                "for all of them unless it was chosen by what they showed"
            )
    elif budget > known:
        notes.append(
            f"the budget of this account was {before} and is now {now} (delta {at}), which is "
            "guaranteed for its runs only if it was settled before the first of them; nothing is "
            "guaranteed if it was raised by what they showed"
        )
    elif budget < known:
        notes.append(
            f"the guarantee of this account is its budget of {before} (delta {at}), although this "
            f"run keeps to {now}"
        )
    return tuple(notes)


def _notes_on_units(
    records: list[dict[str, Any]], account: Account, run: str, unit_key: str
) -> tuple[str, ...]:
    """Sentences about runs whose costs are, or may be, on other units than this run's.

    Raises:
      LedgerError: other runs of the account have another unit key.
    """
    key, reserved = _key(account), [r for r in records if r["kind"] == "reserve"]
    mine = [r for r in reserved if r["account"] == key]
    known = next((r["unit_key"] for r in mine if r.get("unit_key")), unit_key)
    if unit_key and known != unit_key:
        raise LedgerError(
            f"this run protects each {account.unit} by {unit_key!r}, but the runs of this account "
            f"protected each by {known!r}, and their costs do not add up: name the same column "
            "(data.user_column), or another account with a separate budget (privacy.account)"
        )
    notes = []
    if known and not (unit_key and all(r.get("unit_key") for r in mine if r["run"] != run)):
        notes.append(
            f"some runs of this account do not say what makes a {account.unit}: costs add up only "
            f"if it was {known!r} in all of them"
        )
    apart = [r["account"] for r in reserved if r["account"] != key]
    apart = [other for other in apart if other["dataset"] == account.dataset]
    if apart:
        listed = dict.fromkeys(f"{other['unit']}: {other['adjacency']}" for other in apart)
        notes.append(
            f"{account.dataset} has other accounts in this ledger, with another unit or adjacency "
            f"({'; '.join(listed)}): what their runs spent is not counted here"
        )
    return tuple(notes)


_REPEATED = ("account", "run", "event")  # of a reservation, in the record that ends it
_START = b'{"account": {"adjacency": "'  # keys are sorted


def _line(record: dict[str, Any], tail: tuple[str, bool]) -> bytes:
    previous, torn = tail
    record = {**record, "time": time.time(), "previous": previous}
    line = json.dumps(record, sort_keys=True, allow_nan=False).encode() + b"\n"
    # First end a line that a crash has cut short.
    return (b"\n" + line) if torn else line


def _append(handle: io.FileIO, data: bytes) -> None:
    written = os.write(handle.fileno(), data)
    os.fsync(handle.fileno())
    if written != len(data):
        raise OSError("the ledger could not be written in full: is the disk full?")


def _parse(
    content: bytes, path: str | pathlib.Path
) -> tuple[list[dict[str, Any]], tuple[str, bool]]:
    """All records, and (hash of the last one, whether the file ends in a cut line).

    A line that was cut by a crash was never acknowledged, so no step ran on its account.
    """
    lines = content.split(b"\n")
    # A last line without a line break is a record if it is complete, and ignored if it is cut.
    torn = lines[-1] != b""
    records: list[dict[str, Any]] = []
    previous = ""
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            whole = isinstance(record, dict) and {"kind", "account", "run", "event"} <= set(record)
        except (ValueError, RecursionError):
            # A crash of the machine may leave zeros.
            if _START.startswith(line.rstrip(b"\0")[: len(_START)]):
                continue  # a cut line; a forged one breaks the chain of hashes below
            whole = False
        if not whole:
            # The file may belong to another program, which would read what is appended to it.
            raise LedgerError(
                f"the ledger {path} is damaged or not a ledger, as line {number} is no record: "
                "restore it from a copy, or name another file"
            )
        if record.get("previous") != previous:
            raise LedgerError(
                f"the ledger {path} is damaged before line {number}, where a record was changed or "
                "removed: restore it from a copy"
            )
        previous = hashlib.sha256(line).hexdigest()[:32]
        records.append(record)
    return records, (previous, torn)
