"""A silo: it answers a server's requests, within its policy, and writes down what it did.

Requests, each answered by one reply (``wire``):

    hello   the server's study               -> public sizes and task; or why the studies differ
    plan    all silos, noise                 -> the silo's own guarantee; or a refusal
    round   run, plan, round, parameters     -> a message, "absent" by its own coin, or a refusal
    done    run, plan                        -> the ledger is told that the run has ended

A round is answered once: whoever asks for it again with the same bytes gets the same bytes, and
with other parameters a refusal, because the same noise on two sums would cancel. What was asked is
on the disk before it is computed, and what is sent before it is sent. A round's draws come from a
number that is drawn when it is asked for, so that a folder restored from a copy draws anew.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import secrets
import shlex
import traceback
from typing import Any

from pydantic import Field, ValidationError
from rich.console import Console

from dpfl_jax import accounting
from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.config import RunConfig, validate_config
from dpfl_jax.config.base import NAME, Section
from dpfl_jax.config.load import config_to_dict, read_sections, refuse_code
from dpfl_jax.config.text import read_yaml
from dpfl_jax.errors import BadInputError
from dpfl_jax.flower import federated, isrl
from dpfl_jax.flower.log import Log
from dpfl_jax.flower.plan import Plan, first_difference, study_of
from dpfl_jax.flower.policy import Policy, RefusedError
from dpfl_jax.flower.wire import MessageError, is_finite, pack, tree_of, unpack
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import private_folder, write_atomically
from dpfl_jax.run.pipeline import Charge
from dpfl_jax.run.report import environment

CONFIG, KEY, LEDGER, LOG = "silo.yaml", "private/root_key", "ledger.jsonl", "log.jsonl"
# All that a server hears of what may tell of the silo's data: of every failure the same.
UNSAID = "its operator knows why (its log says so)"
_NO_CODE = "a silo runs what is installed with it: name a column, or a data set of the library"
_MOST_TOLD = 500  # characters of a request that are written down
_HELD: dict[str, Any] = {"silos": federated.Subjects, "isrl": isrl.Records}


class SiloConfig(Section):
    """``silo.yaml``: what is the silo's own.

    Attributes:
      name: of the silo; the order of names is the order of silos.
      config: the study's configuration, agreed on by all parties; relative to the silo's folder.
      data: keys of its section ``data`` that are the silo's own, such as path.
      policy: limits.
      server: HOST:PORT of the server's SuperLink.
      root_certificates: file with the certificate that the server's is checked with; null: those of
        the system.
      certificate: file with the silo's own, for a server that asks for one
        (``--silo-certificates``), and its key ``certificate_key``; null: none.
      certificate_key: likewise.
    """

    name: str = Field(pattern=NAME)
    config: str
    data: dict[str, Any] = Field(default_factory=dict)
    policy: Policy
    server: str = "127.0.0.1:8000"
    root_certificates: str | None = None
    certificate: str | None = None
    certificate_key: str | None = None


def read_silo_config(folder: pathlib.Path) -> SiloConfig:
    """The file of a silo's folder.

    Raises:
      BadInputError: it is missing, or something in it is wrong.
    """
    path = folder / CONFIG
    try:
        return SiloConfig.model_validate(read_yaml(path.read_text(), str(path)))
    except FileNotFoundError:
        raise BadInputError(
            f"{folder} is no folder of a silo (it has no {CONFIG}): make one with `dpfl silo init`"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise BadInputError(f"{path}: {key}: {first['msg']}") from None


def make_key(folder: pathlib.Path) -> None:
    """Writes a new secret root key, which only the owner can read; never over another one."""
    private_folder((folder / KEY).parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(folder / KEY, flags, 0o600), "w") as file:
        file.write(RootKey.generate().secret.hex() + "\n")


def read_key(folder: pathlib.Path) -> RootKey:
    """The root key of a silo.

    Raises:
      BadInputError: there is none, or others can read it.
    """
    path = folder / KEY
    try:
        mode, text = path.stat().st_mode, path.read_text().strip()
    except FileNotFoundError:
        raise BadInputError(f"{path} is missing: a silo without its key cannot go on") from None
    if mode & 0o077:
        raise BadInputError(f"{path} can be read by others: chmod 600 {shlex.quote(str(path))}")
    try:
        return RootKey(bytes.fromhex(text))
    except ValueError:
        raise BadInputError(f"{path} holds no root key: bring the file back") from None


def read_study(path: pathlib.Path) -> RunConfig:
    """Reads a study, which a server may have sent, without expanding environment variables.

    Otherwise a server could name a variable, and learn its value from how the studies differ.

    Raises:
      BadInputError: it is wrong, or names code.
    """
    raw = read_sections(path)
    refuse_code(raw, str(path), _NO_CODE)
    return validate_config(raw, str(path))


def study_config(folder: pathlib.Path, silo: SiloConfig) -> Any:
    """The study's configuration with the silo's own data.

    Raises:
      BadInputError: a configuration of another kind, or one that silos elsewhere cannot run.
    """
    path = folder / silo.config
    config = read_study(path)
    study_of(config)
    own = dict(silo.data)
    # A path of the silo's file is relative to its folder.
    if isinstance(own.get("path"), str) and not own["path"].startswith("hf:"):
        own["path"] = str(folder / os.path.expandvars(os.path.expanduser(own["path"])))
    raw = config_to_dict(config)
    whole, where = {**raw, "data": {**raw["data"], **own}}, f"{path} with silo.yaml"
    refuse_code(whole, where, _NO_CODE)
    merged = validate_config(whole, where)
    before, after = study_of(config), study_of(merged)
    if before != after:
        raise BadInputError(
            f"{folder / CONFIG}: data: {first_difference(after, before)}: that part is the "
            "study's, the same at all silos"
        )
    return merged


@dataclasses.dataclass
class _Run:
    """A run that was accepted."""

    plan: Plan
    work: Any
    folder: pathlib.Path
    nonce: str


class Silo:
    """Answers requests from the folder that ``dpfl silo init`` made.

    Examples:
      >>> import tempfile
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.flower import Silo
      >>> try:
      ...     Silo(tempfile.mkdtemp())
      ... except dpfl.BadInputError:
      ...     print("no silo.yaml there: `dpfl silo init` makes one")
      no silo.yaml there: `dpfl silo init` makes one
    """

    def __init__(self, folder: str | os.PathLike[str], console: Console | None = None) -> None:
        """Reads data, key, ledger and log; one process at a time.

        Raises:
          BadInputError: anything wrong with them.
        """
        self.folder = pathlib.Path(folder).absolute()
        self.console = console or Console(quiet=True)
        self.config = read_silo_config(self.folder)
        self._key = read_key(self.folder)
        # Of the key itself: who deletes what is locked has no silo any more.
        self._lock = (self.folder / KEY).open("r+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInputError(f"another process works for the silo in {self.folder}") from None
        self.name, self.policy = self.config.name, self.config.policy
        study = study_config(self.folder, self.config)
        self.study = study_of(study)
        self.held = _HELD[study.variant](study)
        self.log = Log(self.folder / LOG, self._key)
        self.ledger = accounting.Ledger(self.folder / LEDGER)
        self.runs: dict[str, _Run] = {}
        self._check_ledger()

    def _check_ledger(self) -> None:
        """Raises BadInputError where the log knows of a run that the ledger does not."""
        charged = self._charged()
        for row in self.log.rows:
            if row["kind"] == "accepted" and row["run"] not in charged:
                raise BadInputError(
                    f"run {row['run']} is in {self.folder / LOG} but not in {LEDGER}, so that "
                    "nobody knows any more what was spent: bring the ledger back, or begin a new "
                    "silo with `dpfl silo init`"
                )

    def _charged(self) -> set[str]:
        """Runs of the ledger, in all its accounts."""
        return {run for account in self.ledger.accounts() for run in self.ledger.runs(account)}

    @property
    def largest_request(self) -> int:
        """Bytes of the largest message that a server has a reason to send: parameters, or a plan.

        Parameters have four bytes each, or eight; a plan has a line for each silo.
        """
        return (1 << 20) + 8 * self.held.num_params

    def close(self) -> None:
        """Releases the folder's lock, so that another process may open it."""
        self._lock.close()

    # ---- requests --------------------------------------------------------------------------

    def answer(self, request: bytes) -> bytes:
        """The reply to a request; a refusal is a reply, too.

        What is wrong with the silo's own data is told to its operator alone: a sentence may name a
        record.
        """
        header: dict[str, Any] = {}
        try:
            return self._answer(request, header)
        except Exception as error:
            kept = {key: header.get(key) for key in ("kind", "run", "round")}
            told = {k: str(v)[:_MOST_TOLD] for k, v in kept.items() if isinstance(v, str | int)}
            expected = isinstance(error, BadInputError | RecursionError)
            # A server's words move no cursor on the operator's screen, and fill no disk.
            why = str(error) if expected else f"it failed with {type(error).__name__}"
            why = "".join(c if c.isprintable() else "?" for c in why)[:_MOST_TOLD]
            self.log.append("refused", asked=told, why=why)
            self.console.print(f"refused: {why}", markup=False, highlight=False)
            if not expected:
                self.console.print(traceback.format_exc(), markup=False, highlight=False)
            if not isinstance(error, RefusedError | MessageError):
                why = UNSAID
            return pack({"kind": "refused", "silo": self.name, "why": why})

    def _answer(self, request: bytes, header: dict[str, Any]) -> bytes:
        """The reply; ``header`` is filled in as soon as it is known."""
        found, arrays = unpack(request)
        header |= found
        kind = header.get("kind")
        if read_silo_config(self.folder) != self.config:
            raise RefusedError(f"{CONFIG} has changed since this silo began: start it again")
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
        if task.table is not None:  # how a silo writes its decimals is its own
            task = dataclasses.replace(task, table=dataclasses.replace(task.table, decimal="point"))
        told = {
            "name": self.name,
            "facts": self.held.facts,
            "task": dataclasses.asdict(task),
            # The server knows it again by this, when it was restarted; nobody else can say it.
            "token": self._key.keyed_digest("hello", json.dumps(self.study, sort_keys=True)),
        }
        self.log.append("hello", told=told)
        return pack({"kind": "hello", **told})

    def _plan(self, header: dict[str, Any]) -> bytes:
        plan = Plan.from_json(header.get("plan"))
        accepted = self.log.find("accepted", run=plan.run)
        known = accepted or self.log.find("accepting", run=plan.run)
        if known is not None and known["plan"] != plan.digest:
            raise RefusedError(
                f"run {plan.run} began with another plan: a changed plan is another run"
            )
        run = self._opened(plan, known)
        if accepted is None:
            self._accept(run, known)
        self.runs[plan.run] = run
        return pack({"kind": "accepted", "silo": self.name, "plan": plan.digest})

    def _accept(self, run: _Run, begun: dict[str, Any] | None) -> None:
        """Everything that is irrevocable, in an order in which a crash can only over-report."""
        plan, work = run.plan, run.work
        guarantee = self.held.about(work.guarantee(), self.name)
        self._check_ledger()  # somebody may have removed it since this process began
        (charge, account), most = self._charge(work), self.policy.total_epsilon
        others = [other for other in self.ledger.accounts() if other != account]
        if others and most is not None:
            raise BadInputError(
                f"the ledger counts other runs by another measure ({others[0].adjacency}), which "
                f"does not add up with this run's ({account.adjacency}): keep to one policy.unit "
                "and to plans of one measure, or remove policy.total_epsilon"
            )
        if begun is None and plan.run in self._charged():
            raise RefusedError(
                f"run {plan.run} is in the ledger but not in the log, so that nobody knows what "
                "was sent in it: begin another run"
            )
        told = {"run": plan.run, "plan": plan.digest, "nonce": run.nonce, "data": self._data(work)}
        if begun is None:
            self.log.append("accepting", **told)  # if it dies now, the same plan goes on
        found = self.ledger.reserve(account, plan.run, charge.event, charge.delta, most)
        work.check()  # looks at drawn records: what it says, by failing or not, is paid for by now
        write_atomically(run.folder / "plan.json", json.dumps(plan.to_json()), mode=0o600)
        self.log.append(
            "accepted",
            **told,
            guarantee=guarantee.to_json(),
            ledger={"before": found.before, "after": found.after, "delta": found.delta},
        )
        said = f"accepted run {plan.run}: {guarantee.summary()}; the whole of it is in {LOG}"
        self.console.print("\n".join([said, *found.notes]), markup=False, highlight=False)

    def _charge(self, work: Any) -> tuple[Charge, accounting.Account]:
        """What the ledger is charged, and whose account."""
        charge = work.charge(self.policy)
        return charge, charge.account(self.name)

    def _opened(self, plan: Plan, known: dict[str, Any] | None) -> _Run:
        """The run of a plan, after everything about it was checked."""
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
            raise RefusedError(f"the plan's silos are not told by {sorted(self.held.facts)} alone")
        index = plan.names.index(self.name)
        different = first_difference(self.held.facts | {"name": self.name}, plan.silos[index])
        if different:
            raise RefusedError(f"the plan's facts of this silo are not what it holds: {different}")
        nonce = secrets.token_hex(32) if known is None else known["nonce"]
        # Of the plan, and of a number that only this silo drew: no other run has these draws.
        key = self._key.child(f"run:{plan.digest}:{nonce}")
        work = self.held.work(plan, index, key)
        if known is not None and known["data"] != self._data(work):
            raise BadInputError(
                f"this silo's data are not those that run {plan.run} began with: bring them back, "
                "or begin another run"
            )
        self.policy.check(work.asked(self.policy))
        most = self.policy.total_epsilon
        if known is not None and most is not None:  # signed off anew since the run began
            charge, account = self._charge(work)
            if (spent := self.ledger.spent(account, charge.delta)) > most:
                raise BadInputError(
                    f"{self.folder / LEDGER} counts epsilon {rounded_up(spent, 6)}, but "
                    f"policy.total_epsilon is {most:g}: raise it, or begin no more runs"
                )
        folder = self._place(plan.run)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _Run(plan, work, folder, nonce)

    def _data(self, work: Any) -> str:
        return self._key.keyed_digest("data", work.fingerprint)

    def _place(self, run: str) -> pathlib.Path:
        return self.folder / "runs" / hashlib.sha256(run.encode()).hexdigest()[:24]

    def accepted_run(self, header: dict[str, Any]) -> _Run:
        """The run that a request is about."""
        name = header.get("run")
        known = self.log.find("accepted", run=name)
        if known is None:
            raise RefusedError(f"this silo has accepted no run {name!r}")
        if known["plan"] != header.get("plan"):
            raise RefusedError(f"run {name} began with another plan: a changed plan is another run")
        if name in self.runs:
            return self.runs[name]
        path = self._place(str(name)) / "plan.json"
        plan = Plan.from_json(json.loads(path.read_text()))
        if plan.digest != known["plan"]:
            raise BadInputError(f"{path} is not the plan of run {name}: bring it back")
        self.runs[plan.run] = self._opened(plan, known)
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
        told = None if reply is None else hashlib.sha256(reply).hexdigest()
        if told != (None if answered is None else answered["message"]):
            raise RefusedError(
                f"what was sent in round {number} of run {name} is not what the log says, so that "
                "nobody knows what a second answer would give away: begin another run"
            )
        if reply is not None:
            self.log.append("repeated", run=name, round=number)
            return reply
        here = self._computed_with()
        if asked is not None and asked["computed_with"] != here:
            raise RefusedError(
                f"round {number} of run {name} was begun with other software: it could not be "
                "repeated to the last bit"
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

    def _catch_up(self, run: _Run) -> None:
        """Logs what was sent, perhaps, before the silo died or its disk was full."""
        name = run.plan.run
        for number in sorted({*self._rounds(name, "asked")} - {*self._rounds(name, "answered")}):
            path = run.folder / f"{number:06d}.message"
            if path.exists():
                self._answered(name, number, path.read_bytes())

    def _answered(self, name: str, number: int, reply: bytes) -> None:
        sent = unpack(reply)[0]["kind"] == "message"
        told = hashlib.sha256(reply).hexdigest()
        self.log.append("answered", run=name, round=number, sent=sent, message=told)

    def _state(self, run: _Run, answered: list[int]) -> Any:
        """What the silo kept after the last round in which it took part."""
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

    @staticmethod
    def _computed_with() -> str:
        return json.dumps(environment(), sort_keys=True)


def drawn_key(run_key: RootKey, nonce: str) -> RootKey:
    """What a round's coin, sample and noise come from: ``nonce`` is in the log, drawn for it."""
    return run_key.child(f"drawn:{nonce}")
