"""A silo's log: append-only, each line with the hash of the one before it and the silo's seal."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import pathlib
from typing import Any

from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey


class Log:
    """What a silo was asked and what it answered; it holds no records and no keys."""

    def __init__(self, path: pathlib.Path, key: RootKey) -> None:
        """Reads what is there.

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
                    f"{path}, line {number}: a line was changed or removed, so that nobody knows "
                    "any more what this silo has answered: bring the file back, or begin a new "
                    "silo with `dpfl silo init`"
                ) from None
            self.rows.append(row)
            self._previous = hashlib.sha256(line).hexdigest()
        if torn:  # cut by a crash: nothing was done on the strength of it
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
        """The last of these rows."""
        found = self.all(kind, **like)
        return found[-1] if found else None
