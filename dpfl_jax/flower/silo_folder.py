"""A silo's folder: its configuration, the policy in it, its root key and its log."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import os
import pathlib
import shlex
from typing import Any, Literal

from pydantic import Field, ValidationError

from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.config.execution import NAME, Section
from dpfl_jax.config.load import read_yaml
from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.directory import private_folder

CONFIG, KEY, LEDGER, LOG = "silo.yaml", "private/root_key", "ledger.jsonl", "log.jsonl"
# Largest memory for a round's records. Arrays have one shape for all silos, which depends on what
# the plan says about other silos, too.
_MOST_BYTES = 4 << 30


# ---- policy --------------------------------------------------------------------------------------


class RefusedError(BadInputError):
    """Raised when a silo refuses a request.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.flower import RefusedError
      >>> issubclass(RefusedError, dpfl.BadInputError)
      True
    """


def check_memory(arrays: float) -> None:
    """Raises RefusedError if a plan's arrays would take too many bytes."""
    if arrays > _MOST_BYTES:
        raise RefusedError(
            f"with the silos' sizes in the plan, a round would take {arrays:.3g} bytes of memory "
            f"here, but at most {_MOST_BYTES:.3g} are allowed: take smaller batches or fewer "
            "local steps"
        )


@dataclasses.dataclass(frozen=True)
class PlanDemands:
    """What a plan needs a silo's policy to allow, as computed by the silo.

    Attributes:
      mechanism: kind of the mechanism.
      rounds: number of rounds.
      noise_multiplier: noise multiplier of the silo's steps.
      epsilon: epsilon of one unit of the silo, at the policy's delta.
      unit: the unit, ``"subject"`` or ``"record"``.
    """

    mechanism: str
    rounds: int
    noise_multiplier: float
    epsilon: float
    unit: str


class Policy(Section):
    """The limits that a silo's operators agreed to, checked against what the silo computes itself.

    Attributes:
      epsilon: largest epsilon of one run for one unit. Personal budgets (rPDP) also hold per run:
        a person's budgets add up over runs, and total_epsilon counts only each run's epsilon.
      delta: delta at which epsilon is computed.
      unit: what is protected: subject (a person with all their records here and in other silos),
        or record.
      total_epsilon: largest epsilon of all runs together, by the silo's ledger. It also holds if
        runs are chosen by the results of earlier ones. The first run sets it; if it is raised
        later, the raised one is what holds for all runs. null: no limit unless an earlier run set
        one, so that a server may begin any number of runs.
      least_noise_multiplier: least noise multiplier of a step.
      most_rounds: largest number of rounds in a run.
      mechanisms: kinds of mechanisms that are allowed (mechanism.kind).

    Examples:
      >>> from dpfl_jax.flower import Policy
      >>> policy = Policy(
      ...     epsilon=4.0, delta=1e-5, total_epsilon=8.0,
      ...     least_noise_multiplier=0.5, most_rounds=100, mechanisms=("hi_grad_avg",),
      ... )
      >>> policy.unit
      'subject'
    """

    epsilon: float = Field(gt=0, lt=math.inf)
    delta: float = Field(gt=0, lt=1)
    unit: Literal["subject", "record"] = "subject"
    total_epsilon: float | None = Field(gt=0)
    least_noise_multiplier: float = Field(gt=0)
    most_rounds: int = Field(gt=0)
    mechanisms: tuple[str, ...] = Field(min_length=1)

    def check(self, demands: PlanDemands) -> None:
        """Raises RefusedError unless the policy allows all that a plan demands."""
        if demands.mechanism not in self.mechanisms:
            raise RefusedError(
                f"the plan has the mechanism {demands.mechanism}, but policy.mechanisms allows "
                f"{', '.join(self.mechanisms)}"
            )
        if demands.rounds > self.most_rounds:
            raise RefusedError(
                f"the plan has {demands.rounds} rounds, but policy.most_rounds is "
                f"{self.most_rounds}"
            )
        if not demands.noise_multiplier >= self.least_noise_multiplier:
            raise RefusedError(
                f"the plan has noise multiplier {demands.noise_multiplier:.6g}, but "
                f"policy.least_noise_multiplier is {self.least_noise_multiplier:g}"
            )
        if not demands.epsilon <= self.epsilon:
            epsilon = f"epsilon {rounded_up(demands.epsilon, 6)}"
            shown = "no guarantee" if math.isinf(demands.epsilon) else epsilon
            raise RefusedError(
                f"the plan gives a {demands.unit} {shown} at delta {self.delta:g}, but "
                f"policy.epsilon is {self.epsilon:g}"
            )


# ---- configuration and key -----------------------------------------------------------------------


class SiloConfig(Section):
    """``silo.yaml``: the configuration of one silo.

    Attributes:
      name: name of the silo; silos are ordered by name.
      config: file of the study's configuration, on which all parties agreed, relative to the silo's
        folder.
      data: keys of the section ``data`` that each silo sets for itself, such as path.
      policy: limits on what the silo accepts.
      server: HOST:PORT of the server.
      root_certificates: file with the certificate that the server's certificate is checked with;
        null: the system's root certificates.
      certificate: file with the silo's certificate, for a server that asks for one
        (``--silo-certificates``); null: none.
      certificate_key: file with the private key of ``certificate``; null: none.
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
    """Reads ``silo.yaml`` in a silo's folder.

    Raises:
      BadInputError: it is missing, or something in it is wrong.
    """
    path = folder / CONFIG
    try:
        return SiloConfig.model_validate(read_yaml(path.read_text(), str(path)))
    except FileNotFoundError:
        raise BadInputError(
            f"{folder} is not a silo's folder (it has no {CONFIG}): make one with `dpfl silo init`"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise BadInputError(f"{path}: {key}: {first['msg']}") from None


def make_key(folder: pathlib.Path) -> None:
    """Writes a new secret root key, readable only by its owner; fails if there already is one."""
    private_folder((folder / KEY).parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(folder / KEY, flags, 0o600), "w") as file:
        file.write(RootKey.generate().secret.hex() + "\n")


def read_key(folder: pathlib.Path) -> RootKey:
    """Reads a silo's root key.

    Raises:
      BadInputError: the key is missing or damaged, or other users can read it.
    """
    path = folder / KEY
    try:
        mode, text = path.stat().st_mode, path.read_text().strip()
    except FileNotFoundError:
        raise BadInputError(f"{path} is missing: a silo cannot continue without its key") from None
    if mode & 0o077:
        raise BadInputError(f"{path} can be read by others: chmod 600 {shlex.quote(str(path))}")
    try:
        return RootKey(bytes.fromhex(text))
    except ValueError:
        raise BadInputError(f"{path} holds no root key: bring the file back") from None


# ---- log -----------------------------------------------------------------------------------------


class SiloLog:
    """The log of what a silo was asked and what it answered. It holds no records and no keys.

    The log is append-only: each line has the hash of the line before it, and the silo's seal.
    """

    def __init__(self, path: pathlib.Path, key: RootKey) -> None:
        """Reads the file, if there is one.

        Args:
          path: the file.
          key: the silo's root key, which seals the lines.

        Raises:
          BadInputError: a line was changed or removed.
        """
        self.path, self._key = path, key
        self.rows: list[dict[str, Any]] = []
        self._previous = ""
        data = path.read_bytes() if path.exists() else b""
        *lines, torn = data.split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                seal = row.pop("seal")
                if seal != self._seal(row) or row.pop("previous") != self._previous:
                    raise ValueError
            except (ValueError, KeyError, AttributeError):
                raise BadInputError(
                    f"{path}, line {number}: a line was changed or removed, so that it is no "
                    "longer known what this silo has answered: bring the file back, or begin a "
                    "new silo with `dpfl silo init`"
                ) from None
            self.rows.append(row)
            self._previous = hashlib.sha256(line).hexdigest()
        if torn:  # cut off by a crash before anything depended on it
            with path.open("r+b") as file:
                file.truncate(len(data) - len(torn))

    def append(self, kind: str, **row: Any) -> dict[str, Any]:
        """Writes a row to the disk, and returns it with its kind and time."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        row = {"kind": kind, "time": now, **row}
        sealed = json.loads(json.dumps({**row, "previous": self._previous}))
        line = json.dumps({**sealed, "seal": self._seal(sealed)}, sort_keys=True).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        descriptor = os.open(self.path, flags, 0o600)
        before = os.fstat(descriptor).st_size
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(line + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except BaseException:  # removes a partial line, which would make the next one unreadable
            os.truncate(self.path, before)
            raise
        self._previous = hashlib.sha256(line).hexdigest()
        self.rows.append(row)
        return row

    def _seal(self, row: dict[str, Any]) -> str:
        return self._key.keyed_digest("log", json.dumps(row, sort_keys=True))

    def all(self, kind: str, **like: Any) -> list[dict[str, Any]]:
        """Returns the rows of this kind with these values."""
        wanted = {"kind": kind, **like}
        return [row for row in self.rows if all(row.get(k) == v for k, v in wanted.items())]

    def find(self, kind: str, **like: Any) -> dict[str, Any] | None:
        """Returns the last row of this kind with these values, or None."""
        rows = self.all(kind, **like)
        return rows[-1] if rows else None
