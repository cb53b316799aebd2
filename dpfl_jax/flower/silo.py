"""A silo: it answers a server's requests within its policy, and logs what it did.

Requests, each answered by one reply (``wire``):

    hello   the server's study               -> public sizes and task; or why the studies differ
    plan    all silos, noise                 -> that the silo accepts the plan; or a refusal
    round   run, plan, round, parameters     -> a message, "absent" by a coin, or a refusal
    done    run, plan                        -> that the run is committed to the ledger

A round is answered once. The same request gets the same bytes again. A request for the same round
with other parameters is refused, because the same noise on two sums would cancel. A request is
logged to the disk before it is computed, and a reply before it is sent. A round's randomness comes
from a number that is drawn when the round is requested, so that a folder that was restored from a
copy draws other noise.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import secrets
import traceback
from typing import Any

from rich.console import Console

from dpfl_jax import accounting
from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.config import validate_config
from dpfl_jax.config.load import config_to_dict, refuse_code
from dpfl_jax.errors import BadInputError
from dpfl_jax.files import on_disk
from dpfl_jax.flower import federated, isrl
from dpfl_jax.flower.silo_folder import (
    CONFIG,
    KEY,
    LEDGER,
    LOG,
    RefusedError,
    SiloConfig,
    SiloLog,
    read_key,
    read_silo_config,
)
from dpfl_jax.flower.study import NO_CODE, StudyPlan, first_difference, read_study, study_of
from dpfl_jax.flower.wire import MessageError, is_finite, pack, tree_of, unpack
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import write_atomically
from dpfl_jax.run.pipeline import Charge
from dpfl_jax.run.report import environment

# The reply to every failure whose reason may depend on the silo's data.
UNSAID = "its operator knows why (its log says so)"
_MOST_LOGGED = 500  # characters of a request
_HELD: dict[str, Any] = {"silos": federated.FederatedSiloData, "isrl": isrl.IsrlSiloData}


def study_config(folder: pathlib.Path, silo: SiloConfig) -> Any:
    """Returns the study's configuration with the data section of this silo.

    Raises:
      BadInputError: remote silos cannot run the configuration, or ``silo.yaml`` changes a key on
        which all parties agreed.
    """
    path = folder / silo.config
    config = read_study(path)
    study_of(config)
    data = dict(silo.data)
    # A path in silo.yaml is relative to the silo's folder.
    if isinstance(data.get("path"), str) and not data["path"].startswith("hf:"):
        data["path"] = str(folder / os.path.expandvars(on_disk(data["path"]).expanduser()))
    raw = config_to_dict(config)
    whole, where = {**raw, "data": {**raw["data"], **data}}, f"{path} with silo.yaml"
    refuse_code(whole, where, NO_CODE)
    merged = validate_config(whole, where)
    before, after = study_of(config), study_of(merged)
    if before != after:
        raise BadInputError(
            f"{folder / CONFIG}: data: {first_difference(after, before)}: the study decides this "
            "key for all silos, so remove it there"
        )
    return merged


@dataclasses.dataclass
class _AcceptedRun:
    """A run whose plan this silo accepted."""

    plan: StudyPlan
    work: Any
    folder: pathlib.Path
    nonce: str


class SiloClient:
    """A silo that answers requests, from the folder that ``dpfl silo init`` made.

    Examples:
      >>> import tempfile
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.flower import SiloClient
      >>> try:
      ...     SiloClient(tempfile.mkdtemp())
      ... except dpfl.BadInputError:
      ...     print("no silo.yaml there: `dpfl silo init` makes one")
      no silo.yaml there: `dpfl silo init` makes one
    """

    def __init__(self, folder: str | os.PathLike[str], console: Console | None = None) -> None:
        """Reads data, key, ledger and log, and locks the folder for this process.

        Args:
          folder: the silo's folder.
          console: shows messages to the silo's operator; None: none are shown.

        Raises:
          BadInputError: one of them is missing or wrong, or another process has locked the folder.
        """
        self.folder = on_disk(folder).absolute()
        self.console = console or Console(quiet=True)
        self.config = read_silo_config(self.folder)
        self._key = read_key(self.folder)
        # The lock is on the key's file, because no silo can work without it.
        self._lock = (self.folder / KEY).open("r+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInputError(
                f"another process works for the silo in {self.folder}: end that one first"
            ) from None
        self.name, self.policy = self.config.name, self.config.policy
        study = study_config(self.folder, self.config)
        self.study = study_of(study)
        self.held = _HELD[study.variant](study)
        self.log = SiloLog(self.folder / LOG, self._key)
        self.ledger = accounting.Ledger(self.folder / LEDGER)
        self.runs: dict[str, _AcceptedRun] = {}
        self._check_ledger()

    def _check_ledger(self) -> None:
        """Raises BadInputError if the log has an accepted run that the ledger has not."""
        charged = self._charged()
        for row in self.log.rows:
            if row["kind"] == "accepted" and row["run"] not in charged:
                raise BadInputError(
                    f"run {row['run']} is in {self.folder / LOG} but not in {LEDGER}, so that it "
                    "is no longer known what was spent: bring the ledger back, or begin a new "
                    "silo with `dpfl silo init`"
                )

    def _charged(self) -> set[str]:
        """The runs in all accounts of the ledger."""
        return {run for account in self.ledger.accounts() for run in self.ledger.runs(account)}

    @property
    def largest_request(self) -> int:
        """Bytes of the largest message that a server may send: parameters, or a plan."""
        # At most eight bytes a parameter, and 1 MiB for a plan, which has a line for each silo.
        return (1 << 20) + 8 * self.held.num_params

    def close(self) -> None:
        """Unlocks the folder, so that another process can work for the silo."""
        self._lock.close()

    # ---- requests --------------------------------------------------------------------------

    def answer(self, request: bytes) -> bytes:
        """Returns the reply to a request; a refusal is a reply, too.

        What is wrong with the silo's data is shown only to its operator, because the sentence may
        name a record.
        """
        header: dict[str, Any] = {}
        try:
            return self._answer(request, header)
        except Exception as error:
            kept = {key: header.get(key) for key in ("kind", "run", "round")}
            about = {k: str(v)[:_MOST_LOGGED] for k, v in kept.items() if isinstance(v, str | int)}
            expected = isinstance(error, BadInputError | RecursionError)
            # A server's words must not control the operator's terminal, nor fill the disk.
            why = str(error) if expected else f"it failed with {type(error).__name__}"
            why = "".join(c if c.isprintable() else "?" for c in why)[:_MOST_LOGGED]
            self.log.append("refused", asked=about, why=why)
            self.console.print(f"refused: {why}", markup=False, highlight=False)
            if not expected:
                self.console.print(traceback.format_exc(), markup=False, highlight=False)
            if not isinstance(error, RefusedError | MessageError):
                why = UNSAID
            return pack({"kind": "refused", "silo": self.name, "why": why})

    def _answer(self, request: bytes, header: dict[str, Any]) -> bytes:
        """The reply; fills ``header`` in as soon as it is read, for the log of a failure."""
        unpacked, arrays = unpack(request)
        header |= unpacked
        kind = header.get("kind")
        if read_silo_config(self.folder) != self.config:
            raise RefusedError(f"{CONFIG} has changed since this silo started: restart it")
        if kind == "hello":
            return self._hello(header)
        if kind == "plan":
            return self._plan(header)
        if kind == "round":
            return self._round(header, arrays, hashlib.sha256(request).hexdigest())
        if kind == "done":
            return self._done(header)
        raise RefusedError(f"this silo does not know the request {kind!r}")

    def _hello(self, header: dict[str, Any]) -> bytes:
        different = first_difference(self.study, header.get("study"))
        if different:
            raise RefusedError(f"the server's study is not this silo's: {different}")
        task = self.held.task
        if task.table is not None:  # silos may write decimals in different ways
            task = dataclasses.replace(task, table=dataclasses.replace(task.table, decimal="point"))
        introduction = {
            "name": self.name,
            "facts": self.held.facts,
            "task": dataclasses.asdict(task),
            # With this the server recognises a silo that restarts; no other silo can compute it.
            "token": self._key.keyed_digest("hello", json.dumps(self.study, sort_keys=True)),
        }
        self.log.append("hello", told=introduction)
        return pack({"kind": "hello", **introduction})

    def _plan(self, header: dict[str, Any]) -> bytes:
        plan = StudyPlan.from_json(header.get("plan"))
        accepted = self.log.find("accepted", run=plan.run)
        begun = accepted or self.log.find("accepting", run=plan.run)
        if begun is not None and begun["plan"] != plan.digest:
            raise RefusedError(
                f"run {plan.run} began with another plan: a changed plan is another run"
            )
        run = self._opened(plan, begun)
        if accepted is None:
            self._accept(run, begun)
        self.runs[plan.run] = run
        return pack({"kind": "accepted", "silo": self.name, "plan": plan.digest})

    def _accept(self, run: _AcceptedRun, begun: dict[str, Any] | None) -> None:
        """Makes the irrevocable changes, in an order in which a crash can only over-report."""
        plan, work = run.plan, run.work
        guarantee = self.held.about(work.guarantee(), self.name)
        self._check_ledger()  # the ledger may have been removed since this process started
        (charge, account), most = self._charge(work), self.policy.total_epsilon
        others = [other for other in self.ledger.accounts() if other != account]
        if others and most is not None:
            raise BadInputError(
                f"the ledger has runs with another adjacency ({others[0].adjacency}), which do not "
                f"add up with this run's ({account.adjacency}): keep to one policy.unit and to "
                "plans with one adjacency, or remove policy.total_epsilon"
            )
        if begun is None and plan.run in self._charged():
            raise RefusedError(
                f"run {plan.run} is in the ledger but not in the log, so that it is not known what "
                "this silo sent in that run: begin another run"
            )
        row = {"run": plan.run, "plan": plan.digest, "nonce": run.nonce, "data": self._data(work)}
        if begun is None:
            self.log.append("accepting", **row)  # after a crash here the same plan is resumed
        spent = self.ledger.reserve(account, plan.run, charge.event, charge.delta, most)
        # Runs on sampled records, so that its outcome depends on them: it is paid for by now.
        work.check()
        write_atomically(run.folder / "plan.json", json.dumps(plan.to_json()), mode=0o600)
        self.log.append(
            "accepted",
            **row,
            guarantee=guarantee.to_json(),
            ledger={"before": spent.before, "after": spent.after, "delta": spent.delta},
        )
        text = f"accepted run {plan.run}: {guarantee.summary()}; the whole of it is in {LOG}"
        self.console.print("\n".join([text, *spent.notes]), markup=False, highlight=False)

    def _charge(self, work: Any) -> tuple[Charge, accounting.Account]:
        charge = work.charge(self.policy)
        return charge, charge.account(self.name)

    def _opened(self, plan: StudyPlan, begun: dict[str, Any] | None) -> _AcceptedRun:
        """The run of a plan, once everything about the plan is checked."""
        if plan.run in self.runs and self.runs[plan.run].plan.digest == plan.digest:
            return self.runs[plan.run]
        different = first_difference(self.study, plan.study)
        if different:
            raise RefusedError(f"the plan's study is not this silo's: {different}")
        if self.name not in plan.names:
            raise RefusedError(f"the plan is for the silos {plan.names}, not for {self.name}")
        if len(plan.names) != (count := self.held.config.federation.silos):
            raise RefusedError(f"the plan has {len(plan.names)} silos, but the study {count}")
        if any(set(row) != {"name", *self.held.facts} for row in plan.silos):
            raise RefusedError(
                f"the plan must describe silos by name and {sorted(self.held.facts)} and by "
                "nothing else"
            )
        index = plan.names.index(self.name)
        different = first_difference(self.held.facts | {"name": self.name}, plan.silos[index])
        if different:
            raise RefusedError(f"the plan's sizes of this silo are not those it has: {different}")
        nonce = secrets.token_hex(32) if begun is None else begun["nonce"]
        # From the plan and a random number of this silo, so that no other run has these draws.
        key = self._key.child(f"run:{plan.digest}:{nonce}")
        work = self.held.work(plan, index, key)
        if begun is not None and begun["data"] != self._data(work):
            raise BadInputError(
                f"this silo's data are not those that run {plan.run} began with: bring them back, "
                "or begin another run"
            )
        self.policy.check(work.demands(self.policy))
        most = self.policy.total_epsilon
        if (
            begun is not None and most is not None
        ):  # the policy may have changed since the run began
            charge, account = self._charge(work)
            if (spent := self.ledger.spent(account, charge.delta)) > most:
                raise BadInputError(
                    f"{self.folder / LEDGER} counts epsilon {rounded_up(spent, 6)}, but "
                    f"policy.total_epsilon is {most:g}: raise it, or begin no more runs"
                )
        folder = self._place(plan.run)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _AcceptedRun(plan, work, folder, nonce)

    def _data(self, work: Any) -> str:
        return self._key.keyed_digest("data", work.fingerprint)

    def _place(self, run: str) -> pathlib.Path:
        return self.folder / "runs" / hashlib.sha256(run.encode()).hexdigest()[:24]

    def accepted_run(self, header: dict[str, Any]) -> _AcceptedRun:
        """Returns the accepted run that a request is about, opening it again after a restart."""
        name = header.get("run")
        accepted = self.log.find("accepted", run=name)
        if accepted is None:
            raise RefusedError(f"this silo has accepted no run {name!r}")
        if accepted["plan"] != header.get("plan"):
            raise RefusedError(f"run {name} began with another plan: a changed plan is another run")
        if name in self.runs:
            return self.runs[name]
        path = self._place(str(name)) / "plan.json"
        plan = StudyPlan.from_json(json.loads(path.read_text()))
        if plan.digest != accepted["plan"]:
            raise BadInputError(f"{path} is not the plan of run {name}: bring it back")
        self.runs[plan.run] = self._opened(plan, accepted)
        return self.runs[plan.run]

    def _round(self, header: dict[str, Any], arrays: Any, digest: str) -> bytes:
        run, number = self.accepted_run(header), header.get("round")
        name, work = run.plan.run, run.work
        if type(number) is not int or not 0 <= number < work.rounds:
            raise RefusedError(f"run {name} has rounds 0 to {work.rounds - 1}, but no {number!r}")
        if self.log.find("finished", run=name):
            raise RefusedError(f"run {name} is finished")
        self._catch_up(run)
        asked = self.log.find("asked", run=name, round=number)
        if asked is not None and asked["request"] != digest:
            raise RefusedError(
                f"round {number} of run {name} was asked for with other parameters before: the "
                "same noise on two sums would cancel"
            )
        message, kept = run.folder / f"{number:06d}.message", run.folder / f"{number:06d}.state"
        answered = self.log.find("answered", run=name, round=number)
        reply = message.read_bytes() if message.exists() else None
        sent = None if reply is None else hashlib.sha256(reply).hexdigest()
        if sent != (None if answered is None else answered["message"]):
            raise RefusedError(
                f"the stored reply to round {number} of run {name} is not the one in the log, so "
                "that a second reply might reveal more than was accounted: begin another run"
            )
        if reply is not None:
            self.log.append("repeated", run=name, round=number)
            return reply
        here = json.dumps(environment(), sort_keys=True)
        if asked is not None and asked["computed_with"] != here:
            raise RefusedError(
                f"round {number} of run {name} was begun with other software, so that it cannot be "
                "repeated to the last bit: bring that software back, or begin another run"
            )
        later = [r for r in self._rounds(name, "asked") if r > number]
        if later:
            raise RefusedError(
                f"round {number} of run {name} is past: round {max(later)} was asked for"
            )
        params = tree_of(arrays, "params", work.like)
        if not is_finite(params):
            raise RefusedError(f"the parameters of round {number} are not finite")
        taken = self._rounds(name, "answered", sent=True)
        state = self._state(run, taken)
        if asked is None:
            drawn = {"nonce": secrets.token_hex(32), "computed_with": here}
            asked = self.log.append("asked", run=name, round=number, request=digest, **drawn)
        key = drawn_key(work.key, asked["nonce"])
        released, state = work.message(number, key, params, state, len(taken))
        header = {"run": name, "round": number, "silo": self.name, "plan": run.plan.digest}
        if released is None:
            reply = pack({"kind": "absent", **header})
        else:
            reply = pack({"kind": "message", **header}, released=released)
            write_atomically(kept, pack({}, state=state), mode=0o600)
        write_atomically(message, reply, mode=0o600)
        self._answered(name, number, reply)
        what = "not in this round" if released is None else "sent"
        self.console.print(f"round {number + 1} of {work.rounds}: {what}", highlight=False)
        return reply

    def _catch_up(self, run: _AcceptedRun) -> None:
        """Logs replies that may have been sent before the silo crashed or its disk was full."""
        name = run.plan.run
        for number in sorted({*self._rounds(name, "asked")} - {*self._rounds(name, "answered")}):
            path = run.folder / f"{number:06d}.message"
            if path.exists():
                self._answered(name, number, path.read_bytes())

    def _answered(self, name: str, number: int, reply: bytes) -> None:
        sent = unpack(reply)[0]["kind"] == "message"
        digest = hashlib.sha256(reply).hexdigest()
        self.log.append("answered", run=name, round=number, sent=sent, message=digest)

    def _state(self, run: _AcceptedRun, answered: list[int]) -> Any:
        """The silo's state after the last round in which it took part."""
        if not answered:
            return run.work.start()
        path = run.folder / f"{max(answered):06d}.state"
        if not path.exists():
            raise BadInputError(f"{path} is missing: bring it back, or begin another run")
        _, arrays = unpack(path.read_bytes())
        return tree_of(arrays, "state", run.work.state_like)

    def _rounds(self, name: str, kind: str, **like: Any) -> list[int]:
        return [row["round"] for row in self.log.all(kind, run=name, **like)]

    def _done(self, header: dict[str, Any]) -> bytes:
        run = self.accepted_run(header)
        if not self.log.find("finished", run=run.plan.run):
            self._catch_up(run)
            self.ledger.commit(run.plan.run)
            rounds = len(self._rounds(run.plan.run, "answered"))
            self.log.append("finished", run=run.plan.run, rounds=rounds)
        return pack({"kind": "done", "silo": self.name})


def drawn_key(run_key: RootKey, nonce: str) -> RootKey:
    """Returns the key of a round's coin, sample and noise, from the nonce drawn for the round."""
    return run_key.child(f"drawn:{nonce}")
