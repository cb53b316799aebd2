"""What the users of a data set have spent over several runs: an append-only file.

A run *reserves* its whole event before its first step, and that counts in full even if it ends
early, as when it ends may follow from what it showed. *commit* notes that it has ended. A privacy
filter (``filters``) keeps the events of one account (data set, unit, adjacency) within its
budget, also if runs are chosen after looking at earlier ones. All runs of an account have one unit
key: what visits spend does not add up to what a patient spends.

The file has one JSON record per line, each with the hash of the record before it: a record removed
or changed in the middle is noticed. Records are written by one ``write`` and synced to disk under
an exclusive lock, so that concurrent runs cannot both take what is left.
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
from collections.abc import Iterable, Iterator
from typing import Any

import dp_accounting

from dpfl_jax.accounting import event_types
from dpfl_jax.accounting.accountant import ADD_OR_REMOVE, REPLACE, check_delta, check_epsilon
from dpfl_jax.accounting.event_types import ApproximateDpEvent
from dpfl_jax.accounting.filters import filtered_epsilon
from dpfl_jax.accounting.guarantee import Guarantee, rounded_up
from dpfl_jax.errors import BadInputError, one_line


class LedgerError(BadInputError):
    """The ledger refuses a run, which must not begin.

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
    "none": ADD_OR_REMOVE,  # of runs without a guarantee
    "replace": REPLACE,
    "replace-one": REPLACE,
}


@dataclasses.dataclass(frozen=True)
class Account:
    """Whose budget it is.

    Attributes:
      dataset: fingerprint of the data set, or a declared name shared by all its versions (a rebuilt
        store has another fingerprint although its users are the same people).
      unit: "user", "subject", "record".
      adjacency: as in ``Guarantee``; its first word says how it is accounted: "replace" or
        "replace-one", or "add-or-remove", "zero-out" or "empty".
      unit_key: as in ``Guarantee``: what makes a unit, the same in all runs of the account; "" if
        that is not known. It is no part of the account's name.

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
        """The unit, and the column or key that makes one, as of a guarantee."""
        return f"{self.unit} by {self.unit_key}" if self.unit_key else self.unit


@dataclasses.dataclass(frozen=True)
class Reservation:
    """What a run may spend.

    Attributes:
      run: the run's own name.
      before: what the account has spent without it, at ``delta`` (``Ledger.spent``).
      after: what it has spent with it in full.
      delta: at which both are computed.
      budget: largest epsilon allowed, or None.
      new_ledger: whether nothing was in the file before: it should be the first run of all.
      notes: what people should know of the account, in sentences.

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
        """Budget minus what is spent once this run has run, or None without a budget."""
        return None if self.budget is None else self.budget - self.after


class Ledger:
    """An append-only record of what each account has spent.

    Args:
      path: the file; created, with its folder, at the first reservation.

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

        Calling it again for the same run and event (a resumed run) records nothing twice. Runs that
        are declared together, before any of them begins, may be one reservation of one event
        (``events.composed``), which costs less.

        Args:
          account: whose budget.
          run: unique name of the run (its directory or an identifier).
          event: what the whole run may do to one unit; a ``Guarantee`` if only that is known, which
            must have the account's unit and adjacency.
          delta: of the account, in (0, 1).
          budget: largest epsilon of the account at ``delta``: fixed before its first run, and the
            same for all (one that is raised by what runs showed bounds nothing); None: no other
            than the account already has.

        Raises:
          BudgetExceededError: a budget of the account would be exceeded; nothing is recorded.
          LedgerError: if the run already reserved something else, what makes a unit is not what it
            is in other runs of the account, or the file is damaged.
          BadInputError: if the guarantee has another unit, unit key or adjacency than the account,
            or it is not known how the account's adjacency is accounted.
        """
        delta, budget = check_delta(delta), None if budget is None else check_epsilon(budget)
        if not run:
            raise BadInputError("a reservation needs the name of its run")
        stored = event_types.to_json(_as_event(event, account))
        with self._locked() as handle:
            records, tail = _parse(handle, self.path)
            entries, budgets = _entries(records, account), _budgets(records, account)
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
            unit_key = account.unit_key or getattr(event, "unit_key", "")
            notes = _notes_on_units(records, account, run, unit_key)
            notes += _notes(records, account, run, budgets, delta, budget)
            others = [entry for name, entry in entries.items() if name != run]
            # In the order in which they were first reserved.
            runs = (entries if run in entries else entries | {run: {"events": [stored]}}).values()
            before, after = (_spent(some, account, delta) for some in (others, runs))
            # Smaller budgets than the account's, and those at other deltas, are kept to, too.
            limits = budgets | ({} if budget is None else {delta: budget})
            for at, most in limits.items():
                needed = after if at == delta else _spent(runs, account, at)
                if not needed <= most:
                    why = _refusal(account, needed, at, most, _spent(others, account, at))
                    if at != delta:
                        why += f", a budget that the account has beside that at delta {delta:g}"
                    raise BudgetExceededError("; ".join([f"{why} (ledger {self.path})", *notes]))
            # proof: ledger-reserve-1
            promised = None if budget is None else max(budget, budgets.get(delta, 0.0))
            known = promised is None or budgets.get(delta) == promised
            if run not in entries or entries[run]["committed"] or not known:
                _append(
                    handle,
                    tail,
                    {
                        "kind": "reserve",
                        "account": _key(account),
                        "unit_key": unit_key,
                        "run": run,
                        "event": stored,
                        "budget": promised,
                        "delta": delta,
                    },
                )
        limit = budgets.get(delta) if budget is None else budget
        return Reservation(run, before, after, delta, limit, not records, notes)

    def commit(self, run: str) -> None:
        """Notes that a run has ended; what it reserved counts in full all the same.

        Args:
          run: name given to :meth:`reserve`.

        Raises:
          LedgerError: if the run has reserved nothing, or the file is damaged.
        """
        with self._locked() as handle:
            records, tail = _parse(handle, self.path)
            mine = [r for r in records if r["run"] == run and r["kind"] == "reserve"]
            if not mine:
                raise LedgerError(f"run {run!r} has reserved nothing in {self.path}")
            last = {key: mine[-1][key] for key in ("account", "run", "event")}
            _append(handle, tail, {"kind": "commit", **last})

    def spent(self, account: Account, delta: float) -> float:
        """The least budget at ``delta`` that allows all runs of the account so far.

        One run has this epsilon. Of several it is no guarantee by itself, as when to stop may
        follow from what they showed: what the account guarantees is the budget that was fixed
        before them.
        """
        delta = check_delta(delta)
        return _spent(self._account(account).values(), account, delta)

    def remaining(self, account: Account, delta: float, budget: float) -> float:
        """Budget minus what is spent, at least 0; a run that costs slightly more may still fit."""
        return max(float(budget) - self.spent(account, delta), 0.0)

    def budgets(self, account: Account) -> dict[float, float]:
        """From delta to epsilon: the most that the account was ever given.

        It guarantees that if it was fixed before the first run, and nothing if it was raised by
        what runs showed: the sum of what was allowed is then no bound that stood beforehand.
        """
        return _budgets(self._records(), account)

    def runs(self, account: Account) -> list[str]:
        """Names of the account's runs, in order of their first reservation."""
        return list(self._account(account))

    def accounts(self) -> list[Account]:
        """All accounts of the file, in order of their first reservation."""
        return list(dict.fromkeys(Account(**record["account"]) for record in self._records()))

    def _account(self, account: Account) -> dict[str, dict[str, Any]]:
        return _entries(self._records(), account)

    def _records(self) -> list[dict[str, Any]]:
        try:
            handle = _opened(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return []
        with handle:
            fcntl.flock(handle, fcntl.LOCK_SH)
            return _parse(handle, self.path)[0]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[io.FileIO]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = _opened(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        except OSError as error:
            raise LedgerError(
                f"the ledger {self.path} cannot be written ({error.strerror}): choose another path"
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
        raise LedgerError(f"the ledger {path} is a link: name the file that it leads to") from None
    if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
        handle.close()
        raise LedgerError(f"the ledger {path} is not a file: choose another path")
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
            f"the account's adjacency is {account.adjacency!r}, which cannot be accounted: let it "
            "begin with add-or-remove, zero-out, empty, replace or replace-one"
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
            f"no budget of {people} at delta {delta:g} allows this run beside the others: it has "
            "no guarantee, or one whose own delta is above an eighth of that"
        )
    return (
        f"this run would take {people} to epsilon {needed:.6g} at delta {delta:g}, beyond the "
        f"budget of {budget:g}: {spent:.6g} is spent, about {max(budget - spent, 0.0):.6g} is left"
    )


def _entries(records: list[dict[str, Any]], account: Account) -> dict[str, dict[str, Any]]:
    """Run -> {reserved, events, committed}, in the order of first reservations.

    The costliest event counts. There are several where an earlier version committed less than was
    reserved (or more).
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
    """The largest budget that the ledger records for the account, by delta."""
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
            "the runs of this account were recorded by an earlier version, which took them all to "
            "be chosen before the first: they are counted anew, in full and as chosen one after "
            "the other, so that more is spent than was said"
        )
    if budget is None:
        if others and not budgets:
            notes.append(
                "this account has no budget: what is spent is what one would have had to be, and "
                "no guarantee, as runs may have been chosen by what earlier ones showed "
                "(privacy.budget fixes one)"
            )
    elif known is None:
        if others:
            notes.append(
                f"this account had runs before it had the budget {now} (delta {at}), "
                "which holds for all of them unless they showed what it should be"
            )
    elif budget > known:
        notes.append(
            f"the budget of this account was {before} and is now {now} (delta {at}): "
            "that is guaranteed for its runs only if it was settled before the first of them, and "
            "nothing is if it was raised by what they showed"
        )
    elif budget < known:
        notes.append(
            f"the budget of this account is {before} (delta {at}), which is what can be "
            f"guaranteed, although this run keeps to {now}"
        )
    return tuple(notes)


def _notes_on_units(
    records: list[dict[str, Any]], account: Account, run: str, unit_key: str
) -> tuple[str, ...]:
    """Sentences about runs whose cost is not, or may not be, on the units of this one.

    Raises:
      LedgerError: what makes a unit is not what it is in other runs of the account.
    """
    key, reserved = _key(account), [r for r in records if r["kind"] == "reserve"]
    mine = [r for r in reserved if r["account"] == key]
    known = next((r["unit_key"] for r in mine if r.get("unit_key")), unit_key)
    if unit_key and known != unit_key:
        raise LedgerError(
            f"this run protects each {account.unit} by {unit_key!r}, but the runs of this account "
            f"did by {known!r}, and what is spent on these does not add up: name the same column "
            "(data.user_column), or another account (privacy.account), whose budget is its own"
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
            f"{account.dataset} has further accounts in this ledger, of another unit or adjacency "
            f"({'; '.join(listed)}): what their runs spent is not counted here"
        )
    return tuple(notes)


_START = b'{"account": {"adjacency": "'  # keys are sorted


def _append(handle: io.FileIO, tail: tuple[str, bool], record: dict[str, Any]) -> None:
    previous, torn = tail
    record = {**record, "time": time.time(), "previous": previous}
    line = json.dumps(record, sort_keys=True, allow_nan=False).encode() + b"\n"
    # A line cut short by a crash is closed first; the record after it says so.
    data = (b"\n" + line) if torn else line
    written = os.write(handle.fileno(), data)
    os.fsync(handle.fileno())
    if written != len(data):
        raise OSError("the ledger could not be written in full: is the disk full?")


def _parse(handle: io.FileIO, path: pathlib.Path) -> tuple[list[dict[str, Any]], tuple[str, bool]]:
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
        except (ValueError, RecursionError):
            # Of a crash of the machine zeros may be left.
            if _START.startswith(line.rstrip(b"\0")[: len(_START)]):
                continue  # A cut line; a forged one breaks the chain of hashes below.
            whole = False
        if not whole:
            # Something else reads this file, and would read what is written into it.
            raise LedgerError(
                f"the ledger {path} is damaged, or something else: line {number} is no record; "
                "restore it from a copy, or name another file"
            )
        if record.get("previous") != previous:
            raise LedgerError(
                f"the ledger {path} is damaged before line {number}: a record was changed or "
                "removed; restore it from a copy"
            )
        previous = hashlib.sha256(line).hexdigest()[:32]
        records.append(record)
    return records, (previous, torn)
