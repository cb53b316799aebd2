"""A run's directory: config.yaml, metrics.jsonl, checkpoints/, report.*, and what stays secret.

``private/`` holds the root key, from which all sampling and noise can be recomputed: it is needed
to resume and must never be published with the rest. Nor must checkpoints of correlated noise
(``mechanisms/noise_strategies.py``): they hold the noise that later steps cancel.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from dpfl_jax import buckets
from dpfl_jax.accounting import digests, statement
from dpfl_jax.accounting.versions import this_version
from dpfl_jax.audit import proof
from dpfl_jax.config.load import other_run, with_moved, write_yaml
from dpfl_jax.errors import BadInputError
from dpfl_jax.files import read_text
from dpfl_jax.randomness import RootKey

FINISHED = "finished"
_KEY = "root_key.json"
RELEASED_STEPS = "private/released_steps.json"  # the largest step that may have been released
# What each record of a run with personal budgets spent; only its silo reads it.
RECORDS, RECORDS_SUMMARY = "private/records.csv", "private/records.json"
SPENT = "private/users.csv"  # what each user of a central run with personal budgets has spent
# Written when a run ends or is interrupted.
REPORTS = (
    "report.json",
    "report.md",
    statement.NAME,
    RECORDS,
    RECORDS_SUMMARY,
    SPENT,
    *proof.FILES,
)


def open_plain(path: pathlib.Path) -> IO[str]:
    """Opens a file to lock or append to; links, which a folder from others may hold, are refused.

    Raises:
      BadInputError: it cannot be opened, or is not a regular file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.fdopen(os.open(path, flags, 0o644), "a", buffering=1)
    except OSError as error:
        raise BadInputError(f"{path} cannot be opened ({error.strerror}): remove it") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise BadInputError(f"{path} is not a regular file: remove it")
    return file


class _Facts(BaseModel):
    """What is kept of a run, as far as every kind of run has it; config.yaml is somebody else's."""

    model_config = ConfigDict(extra="allow", strict=True)

    data: str | None = None
    versions: list[str] = Field(default=[], min_length=1)
    hardware: list[str] = []
    layouts: list[str] = []
    caveats: list[str] = []
    terms: dict[str, Any] = {}
    start: dict[str, Any] = {}
    streams: str = ""
    delta: float | None = None
    noise: list[float | None] | None = None
    mechanism: dict[str, Any] = {}
    base: dict[str, Any] = {}


class _Envelope(BaseModel):
    """config.yaml of a run."""

    model_config = ConfigDict(extra="allow", strict=True)

    run_id: str
    facts: _Facts
    config: dict[str, Any]


class RunDirectory:
    """An exclusively locked run directory.

    Attributes:
      path: the directory; if it is in a bucket, its working copy (``buckets``).
      address: the directory as people name it.
      root_key: the key of the run, created with it.
      resumed: True if the directory existed before.
      run_id: unique to this run, also among runs that had the same path.
      facts: what the run was started with beyond its configuration.
      released: steps that may have been released when the directory was opened, whatever checkpoint
        the run resumes from; None if that is unknown.
      writes: whether this process writes into it (of many processes, one does).
      listeners: called with each row of metrics, where it is written.
    """

    path: pathlib.Path
    root_key: RootKey
    resumed: bool
    run_id: str
    facts: dict[str, Any]
    released: int | None
    writes: bool
    listeners: tuple[Callable[[Mapping[str, Any]], Any], ...] = ()
    _lock: contextlib.ExitStack | None
    _content: dict[str, Any]
    _opened: str

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: Mapping[str, Any],
        key: RootKey | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Creates the directory, or opens an unfinished one of the same configuration.

        Args:
          path: the directory, also an address (``gs://``, ``s3://``).
          config: resolved configuration, kept as config.yaml.
          key: root key of a new run; None for a secret one from the operating system.
          facts: what is stored of the run: on resume ``data`` (fingerprint of the training set)
            must be equal, the rest is kept as it was at the start. Somebody who knows all users
            but one could test by the fingerprint who that one is: only its keyed digest is written.

        Raises:
          BadInputError: it holds other files, another configuration, or a finished run, or another
            process works in it.
        """
        self.path, self.writes = buckets.folder(path).absolute(), True
        self.check(path, config)
        self._lock = self._acquire_lock()
        private, self._opened = self.path / "private", uuid.uuid4().hex
        try:
            self.check(path, config)  # again, now that no other process writes there
            self.resumed = (self.path / "config.yaml").exists()
            private_folder(private)
            if (private / _KEY).exists():
                close_to_others(private / _KEY)
            if self.resumed:
                self._resume(private, config, key, facts)
            else:
                self._begin(private, config, key, facts)
        except BaseException:
            self.close()
            raise

    def _begin(
        self, private: pathlib.Path, config: Mapping[str, Any], key: RootKey | None, facts: Any
    ) -> None:
        self.root_key = key or RootKey.generate()
        self._write_key(private)
        self.released = 0
        # People look for this name in a ledger, which others read: so no fingerprint of the key.
        self.run_id = f"{self.path.name}-{uuid.uuid4().hex[:16]}"
        self.facts = self._sealed(facts)
        self._content = {"run_id": self.run_id, "facts": self.facts, "config": dict(config)}
        self._write_content()  # last: a directory without config.yaml is not yet a run

    def _resume(
        self, private: pathlib.Path, config: Mapping[str, Any], key: RootKey | None, facts: Any
    ) -> None:
        self.root_key = read_root_key(private)
        if key is not None and key.fingerprint != self.root_key.fingerprint:
            raise BadInputError(
                f"the run in {self.path} has its own root key, and another was given: leave key "
                "out to resume, or start another run in another directory"
            )
        self._content = _parsed(self.path / "config.yaml")
        statement.parsed(_Envelope, self._content, self.path / "config.yaml")
        if self._content.pop("seal", None) != seal_of(self._content, self.root_key):
            raise BadInputError(
                f"{self.path / 'config.yaml'} was changed after the run began, and what it "
                "says would become the guarantee: bring the file back, or start another run in "
                "another --run-dir"
            )
        self.run_id, self.facts = self._content["run_id"], self._content["facts"]
        self.released = self._read_released()
        if self.facts.get("data") != self._sealed(facts).get("data"):
            raise BadInputError(
                f"the training data are not those that the run in {self.path} began with: "
                "bring them back, or start another run in another --run-dir"
            )
        # An export reads the path of the base model there.
        self._content["config"] = with_moved(self._content["config"], config)

    @property
    def versions(self) -> list[str]:
        """The versions of this library that took its steps, or will; the newest is the last."""
        # A run without a note is older than such notes.
        known = self.facts.get("versions", ["0.1.0"] if self.resumed else [])
        return list(dict.fromkeys((*known, this_version())))

    def begin_steps(self) -> None:
        """Notes the version, and removes the reports of an interrupted run; nothing refuses it now.

        What was stated before understates what will be spent.
        """
        self.facts["versions"] = self.versions
        if self.writes:
            self._write_content()
            for name in REPORTS:
                buckets.remove(self.path / name)

    def note(self, name: str, value: Any) -> None:
        """Keeps a further fact (plain JSON) for resuming; all processes pass the same."""
        if self.facts.get(name) == value:
            return
        self.facts[name] = value
        if self.writes:
            self._write_content()

    def keep_caveats(self, caveats: Iterable[str]) -> tuple[str, ...]:
        """Keeps caveats, and returns them after those of earlier parts of the run.

        What the run did before stays done: it may have sent metrics somewhere, say.
        """
        every = tuple(dict.fromkeys((*self.facts.get("caveats", ()), *caveats)))
        self.note("caveats", list(every))
        return every

    def record_released(self, steps: int) -> None:
        """Writes to disk, before it returns, that up to ``steps`` steps may be released.

        Without the file an interrupted run is accounted with all steps; an edited file has no valid
        seal.
        """
        if self.writes:
            seal = self.root_key.keyed_digest("released", str(steps))
            # Another process that resumes the run writes something else, whatever the steps are.
            content = {"steps": steps, "seal": seal, "opened": self._opened}
            write_atomically(self.path / RELEASED_STEPS, json.dumps(content), mode=0o600)

    def _read_released(self) -> int | None:
        file = self.path / RELEASED_STEPS
        if not file.exists():
            return None
        content = _parsed(file)
        steps: Any = content.get("steps")
        if content.get("seal") != self.root_key.keyed_digest("released", str(steps)):
            raise BadInputError(
                f"{file} was changed after it was written, and it says how many steps an "
                "interrupted run is accounted with: bring it back, or remove it, and all steps are"
            )
        return int(steps)

    def computed_with(self, hardware: str, layout: Any = None) -> bool:
        """Notes what the run is computed with; returns whether it was ever computed otherwise.

        Call it before the first step, as a run may die before its first checkpoint and resume
        elsewhere.

        Args:
          hardware: devices and versions.
          layout: other settings that change rounding.
        """
        moved = False
        for name, value in (("hardware", hardware), ("layouts", repr(layout))):
            known = list(self.facts.get(name, []))
            if value not in known:
                known.append(value)
                self.note(name, known)
            moved = moved or len(known) > 1
        return moved

    @property
    def address(self) -> str:
        """The directory as people name it: its path, or gs://... or s3://..."""
        return buckets.address(self.path) or str(self.path)

    def introduction(self) -> dict[str, Any]:
        """What another process needs to ``join``: plain JSON, nothing secret."""
        return {
            "path": self.address,
            "run_id": self.run_id,
            "resumed": self.resumed,
            "facts": self.facts,
            "released": self.released,
            "root_key": self.root_key.fingerprint,
        }

    @classmethod
    def join(
        cls,
        introduction: Mapping[str, Any],
        facts: Mapping[str, Any] | None = None,
        patience_s: float = 60.0,
    ) -> RunDirectory:
        """Opens, for reading, the directory that another process has opened.

        Args:
          introduction: from ``introduction()`` in the process that opened the directory.
          facts: as this process knows them; ``data`` is compared.
          patience_s: how long shared storage may take to show a new file.

        Raises:
          BadInputError: the directory is not the same here, or the data are not.
        """
        self = cls.__new__(cls)
        self.writes, self._lock = False, None
        self.run_id, self.facts = introduction["run_id"], dict(introduction["facts"])
        self.resumed, self.released = introduction["resumed"], introduction["released"]
        deadline = time.monotonic() + patience_s
        while True:
            self.path = buckets.folder(introduction["path"])
            try:
                self.root_key = read_root_key(self.path / "private")
                if self.root_key.fingerprint == introduction["root_key"]:
                    break
            except BadInputError:
                pass
            if time.monotonic() > deadline:
                raise BadInputError(
                    f"the run directory {self.path} of process 0 is not the one that this process "
                    "sees: put --run-dir on storage that all processes share"
                )
            time.sleep(0.2)
        if self.facts.get("data") != self._sealed(facts).get("data"):
            raise BadInputError(
                "the training data of this process are not those of process 0: give all the same"
            )
        return self

    def _sealed(self, facts: Mapping[str, Any] | None) -> dict[str, Any]:
        sealed = dict(facts or {})
        if sealed.get("data") is not None:
            sealed["data"] = self.root_key.keyed_digest("data", str(sealed["data"]))
        return sealed

    def _write_content(self) -> None:
        content = {**self._content, "seal": seal_of(self._content, self.root_key)}
        write_atomically(self.path / "config.yaml", write_yaml(content))

    @staticmethod
    def check(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
        """Raises BadInputError unless ``path`` is new, or an unfinished run like this one."""
        path = buckets.folder(path).absolute()
        if "\\" in str(path):
            raise BadInputError(
                f"the run directory {path} has a backslash in its path, which checkpoints take for "
                "another folder: choose a path without one"
            )
        above = next(p for p in (path, *path.parents) if p.exists())
        if not above.is_dir():
            raise BadInputError(
                f"{above} is a file, and {path} is to be a folder of a run: choose another"
            )
        if above != path:
            return
        config = path / "config.yaml"
        if not config.exists():
            # An interrupted write leaves a .tmp file.
            names = {p.name for p in path.iterdir() if not p.match(".*.tmp")}
            if names - {"run.lock", "private"}:
                raise BadInputError(
                    f"the run directory {path} is not empty and holds no run: choose another"
                )
            return
        known = _parsed(config)
        began = known.get("config")
        began = began if isinstance(began, Mapping) else {}
        key = other_run(began, json.loads(json.dumps(content)))
        if key is not None:
            raise BadInputError(
                f"the run directory {path} belongs to another configuration: {key} differs in its "
                "config.yaml; use that one, or choose another --run-dir"
            )
        # Writing to a link would write elsewhere. Weights & Biases makes links in its folder.
        for file in path.rglob("*"):
            if file.is_symlink() and path / "wandb" not in file.parents:
                raise BadInputError(
                    f"the run directory holds a link, {file}, which is not followed: put what it "
                    "links to in its place, or choose another --run-dir"
                )
        if finished_report(path) is not None:
            raise BadInputError(
                f"the run in {path} is finished and is not overwritten: see it with `dpfl show`, "
                "or choose another --run-dir"
            )

    def close(self) -> None:
        """Uploads what is only in the working copy, if there is one, and releases the lock."""
        if self._lock is not None:
            with self._lock:
                buckets.publish(self.path)

    def _acquire_lock(self) -> contextlib.ExitStack:
        held = contextlib.ExitStack()
        held.callback(buckets.Lease(self.path).close)
        self.path.mkdir(parents=True, exist_ok=True)
        lock = held.enter_context(open_plain(self.path / "run.lock"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            held.close()
            raise BadInputError(
                f"another process is training in {self.path}: wait for it, or choose another "
                "--run-dir"
            ) from None
        return held

    def _write_key(self, private: pathlib.Path) -> None:
        content = {"secret": self.root_key.secret.hex(), "public": self.root_key.public}
        write_atomically(private / _KEY, json.dumps(content), mode=0o600)

    # ---- metrics ---------------------------------------------------------------------------

    @property
    def metrics_path(self) -> pathlib.Path:
        """metrics.jsonl, one JSON object per line."""
        return self.path / "metrics.jsonl"

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Appends one line to metrics.jsonl."""
        if not self.writes:
            return
        try:
            with self.metrics_path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:  # the disk is full
            error.filename = str(self.metrics_path)
            raise
        for listener in self.listeners:
            listener(row)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Returns all complete lines (a crash may have cut the last one)."""
        rows = []
        if self.metrics_path.exists():
            for line in self.metrics_path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict) and "step" in row:
                    rows.append(row)
        return rows

    def drop_metrics_after(self, step: int) -> None:
        """Removes rows that were logged after the checkpoint that a run resumes from."""
        if not self.writes:
            return
        kept = [row for row in self.read_metrics() if row["step"] <= step]
        write_atomically(self.metrics_path, "".join(json.dumps(row) + "\n" for row in kept))


def read_root_key(private: pathlib.Path) -> RootKey:
    """Reads the root key in the folder ``private`` of a run.

    Raises:
      BadInputError: it cannot be read.
    """
    try:
        content = json.loads((private / _KEY).read_text())
        return RootKey(bytes.fromhex(content["secret"]), public=content["public"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadInputError(
            f"the root key in {private} cannot be read ({error}), so this run cannot go on "
            "with the noise it began with: start a new one in another --run-dir"
        ) from None


def finished_report(path: pathlib.Path) -> dict[str, Any] | None:
    """The report of a finished run; None if the run is not finished."""
    file = path / "report.json"
    report = _parsed(file) if file.exists() else {}
    return report if report.get("status") == FINISHED else None


def stated_report(path: pathlib.Path) -> tuple[statement.Statement, dict[str, Any]]:
    """Reads the statement of a run, and its report.

    Raises:
      BadInputError: the report states another guarantee than guarantee.json, or config.yaml was
        changed since.
    """
    stated = statement.read(path / statement.NAME)
    report, unlike = statement.read_report(path, stated)
    if unlike:
        raise BadInputError(f"{unlike}: bring it back")
    refuse_changed(path, stated, digests.CONFIG)
    return stated, report


def refuse_changed(path: pathlib.Path, stated: statement.Statement, name: str) -> None:
    """Raises BadInputError if a file of a run was changed since its guarantee was written."""
    if stated.digests is None:  # written before guarantees had digests
        return
    if changed := digests.compare(path, stated.digests.run, [name]).changed:
        raise BadInputError(f"{changed[0]}: bring it back")


def _parsed(file: pathlib.Path) -> dict[str, Any]:
    parse = json.loads if file.suffix == ".json" else _without_aliases
    try:
        result = parse(read_text(file))
    except (yaml.YAMLError, ValueError, RecursionError):
        result = None
    if not isinstance(result, dict):
        raise BadInputError(
            f"{file} is damaged: it holds no table of names and values; bring it back, or choose "
            "another --run-dir"
        )
    return result


def _without_aliases(text: str) -> Any:
    """Reads YAML; raises yaml.YAMLError for aliases, a few of which can make terabytes."""
    if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, yaml.SafeLoader)):
        raise yaml.YAMLError("aliases")
    return yaml.safe_load(text)


def seal_of(content: Mapping[str, Any], key: RootKey) -> str:
    """A digest, under the key, of config.yaml and of whether the key is public: it shows edits."""
    plain = yaml.safe_load(yaml.safe_dump(content))  # as it will be read
    text = json.dumps([plain, key.public], sort_keys=True, default=str)
    return key.keyed_digest("config.yaml", text)


def private_folder(path: pathlib.Path) -> None:
    """Makes a folder, or restricts an existing one, so that only its owner can open it.

    Raises:
      BadInputError: it is a link, or belongs to somebody else.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    close_to_others(path, 0o700)


def close_to_others(path: pathlib.Path, mode: int = 0o600) -> None:
    """Restricts a file or folder to its owner.

    Raises:
      BadInputError: it is a link, or belongs to somebody else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise BadInputError(
            f"{path} is to keep a secret, but it is a link or cannot be opened ({error.strerror}): "
            "remove it, or choose another folder"
        ) from None
    try:
        owner = os.fstat(descriptor).st_uid
        if owner not in (os.geteuid(), _owner_of_new_files(path.parent)):
            raise BadInputError(
                f"{path} is to keep a secret, but it belongs to somebody else (user {owner}): "
                "choose another folder, or take it over with chown"
            )
        with contextlib.suppress(OSError):  # some file systems have no modes
            os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def _owner_of_new_files(folder: pathlib.Path) -> int:
    """On some network file systems it is not the user of the process."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid


def write_atomically(path: pathlib.Path, content: str | bytes, mode: int = 0o644) -> None:
    """Writes a file so that a crash leaves the old content or the new, never a part.

    Once it returns, the new content is on the disk, and in the bucket of a working copy.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # of a killed process, or put there by somebody else
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(temporary, flags, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:  # the disk is full
        temporary.unlink(missing_ok=True)
        error.filename = str(path)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    buckets.publish(path)
