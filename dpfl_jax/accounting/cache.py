"""Calibrations remembered on disk, by content.

One small JSON file per entry, named by the hash of everything that determines the answer, written
to a temporary name and renamed: concurrent writers are harmless and a reader sees a whole file or
none. Nothing is trusted: whoever reads an entry certifies it again, so that a corrupt or forged
file can cost time but never privacy. An unwritable folder means no cache, not an error.

``DPFL_CACHE_DIR`` names the folder; set to ``off`` (or empty) it disables the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import tempfile
from typing import Any

# Raise when the numerics change their answers.
VERSION = "2"


def directory() -> pathlib.Path | None:
    """The cache folder (not necessarily existing), or None if disabled."""
    chosen = os.environ.get("DPFL_CACHE_DIR")
    if chosen is not None:
        if chosen.strip().lower() in ("", "off", "none", "0"):
            return None
        return pathlib.Path(chosen).expanduser() / "accounting"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    with contextlib.suppress(RuntimeError):
        return pathlib.Path(base).expanduser() / "dpfl_jax" / "accounting"
    return None


def key_of(*content: Any) -> str:
    """Hash of the ``repr`` of everything that determines an answer."""
    text = "\n".join([VERSION, *(repr(item) for item in content)])
    return hashlib.sha256(text.encode()).hexdigest()


def read(key: str) -> dict[str, Any] | None:
    """The entry, or None if there is none or it cannot be read as this entry."""
    folder = directory()
    if folder is None:
        return None
    try:
        entry = json.loads((folder / key[:2] / f"{key}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(entry, dict) or entry.get("key") != key:
        return None
    value = entry.get("value")
    return value if isinstance(value, dict) else None


def write(key: str, value: dict[str, Any]) -> None:
    """Stores an entry atomically; does nothing if the folder cannot be written."""
    folder = directory()
    if folder is None:
        return
    with contextlib.suppress(OSError):
        parent = folder / key[:2]
        parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"key": key, "value": value}, file)
            os.replace(temporary, parent / f"{key}.json")
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
