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
# Of a round's records. Arrays have one shape for all silos: it follows from what the plan says of
# the others, too.
_MOST_BYTES = 4 << 30


# ---- policy --------------------------------------------------------------------------------------


class RefusedError(BadInputError):
    """A silo refuses a request.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.flower import RefusedError
      >>> issubclass(RefusedError, dpfl.BadInputError)
      True
    """


def check_memory(arrays: float) -> None:
    """Raises RefusedError where a plan's arrays would take too many bytes."""
    if arrays > _MOST_BYTES:
        raise RefusedError(
            f"with the sizes that the plan says silos have, a round would take {arrays:.3g} bytes "
            f"of memory here, but {_MOST_BYTES:.3g} is the most: take smaller batches or fewer "
            "local steps"
        )


@dataclasses.dataclass(frozen=True)
class PlanDemands:
    """What a plan needs a silo to allow, computed by the silo.

    Attributes:
      mechanism: kind of the mechanism.
      rounds: number of rounds.
      noise_multiplier: of the silo's steps.
      epsilon: of one of the silo's people (``Policy.unit``), at the policy's delta.
      unit: whom that is for.
    """

    mechanism: str
    rounds: int
    noise_multiplier: float
    epsilon: float
    unit: str


class Policy(Section):
    """What a silo's operators signed off. Each limit is checked against what the silo computes.

    Attributes:
      epsilon: largest of one run, for one of the silo's people. Personal budgets (rPDP) hold per
        run, too: a person's add up over runs, and total_epsilon counts each run's epsilon alone.
      delta: at which epsilon is computed.
      unit: who these people are: subject (with all records here and in other silos), or record.
      total_epsilon: largest of all runs together, by the silo's ledger, also if a run is chosen by
        what earlier ones showed. The first run fixes it, and a larger one later is what holds for
        all. null: no limit but an earlier one, so that a server may begin one run after the other.
      least_noise_multiplier: of a step.
      most_rounds: of a run.
      mechanisms: kinds that are allowed (mechanism.kind).

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
        """Raises RefusedError, in one sentence, unless all of it is allowed."""
        if demands.mechanism not in self.mechanisms:
            raise RefusedError(
                f"the plan is of mechanism {demands.mechanism}, but policy.mechanisms allows "
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
    """``silo.yaml``: what concerns this silo alone.

    Attributes:
      name: of the silo; the order of names is the order of silos.
      config: the study's configuration, agreed on by all parties; relative to the silo's folder.
      data: keys of its section ``data`` that each silo sets for itself, such as path.
      policy: limits.
      server: HOST:PORT of the server's SuperLink.
      root_certificates: file with the certificate that the server's is checked with; null: those of
        the system.
      certificate: file with the silo's certificate, for a server that asks for one
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
    """Reads ``silo.yaml`` in a silo's folder.

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
    """Reads a silo's root key.

    Raises:
      BadInputError: there is none, or others can read it.
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
    """What a silo was asked and what it answered; it holds no records and no keys.

    Append-only: each line has the hash of the one before it, and the silo's seal.
    """

    def __init__(self, path: pathlib.Path, key: RootKey) -> None:
        """Reads the file, if there is one.

        Args:
          path: the file.
          key: of the silo, which seals its lines.

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
                    f"{path}, line {number}: a line was changed or removed, so that it is not "
                    "known any more what this silo has answered: bring the file back, or begin a "
                    "new silo with `dpfl silo init`"
                ) from None
            self.rows.append(row)
            self._previous = hashlib.sha256(line).hexdigest()
        if torn:  # cut off by a crash before anything depended on it
            with path.open("r+b") as file:
                file.truncate(len(data) - len(torn))

    def append(self, kind: str, **row: Any) -> dict[str, Any]:
        """Writes a row, and returns once it is on the disk."""
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
        except BaseException:  # a part of a line would make the next one unreadable
            os.truncate(self.path, before)
            raise
        self._previous = hashlib.sha256(line).hexdigest()
        self.rows.append(row)
        return row

    def _seal(self, row: dict[str, Any]) -> str:
        return self._key.keyed_digest("log", json.dumps(row, sort_keys=True))

    def all(self, kind: str, **like: Any) -> list[dict[str, Any]]:
        """The rows of this kind with these values."""
        wanted = {"kind": kind, **like}
        return [row for row in self.rows if all(row.get(k) == v for k, v in wanted.items())]

    def find(self, kind: str, **like: Any) -> dict[str, Any] | None:
        """The last row of this kind with these values, if there is one."""
        rows = self.all(kind, **like)
        return rows[-1] if rows else None
