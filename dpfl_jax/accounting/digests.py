"""SHA-256 digests that tie a guarantee to files: a run's configuration and checkpoints, an export.

They tie files together and sign nothing: whoever changes a file can also change its digest.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

CONFIG = "config.yaml"
# What may lie beside an export without being part of it.
_ADDED = ("*.md", "LICENSE*", "NOTICE*", ".*")


def digest(path: pathlib.Path) -> str:
    """SHA-256 of a file's bytes, or of the names and digests of all files in a folder."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        lines = (f"{digest(file)}  {file.relative_to(path).as_posix()}\n" for file in files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoint(step: int | str) -> str:
    """Path in a run's directory of what was released after ``step`` steps; "*" for a glob."""
    return f"checkpoints/{step}/state"


def of_run(directory: pathlib.Path, steps: Iterable[int | None]) -> dict[str, str]:
    """Digests of a run's configuration, and of its checkpoints of these steps."""
    names = [CONFIG, *(checkpoint(step) for step in steps if step is not None)]
    return {name: digest(directory / name) for name in names if (directory / name).exists()}


def of_export(directory: pathlib.Path, guarantee: str) -> dict[str, str]:
    """Digests of all files of an export but its guarantee, which holds them."""
    files = (file for file in sorted(directory.iterdir()) if file.name != guarantee)
    return {file.name: digest(file) for file in files}


class Comparison(NamedTuple):
    """Which files of a folder are as its guarantee says.

    Attributes:
      same: names of files that are unchanged.
      changed: a sentence for each file that is not.
      missing: names that have a digest, but no file here.
      untied: checkpoints without a digest: any model may lie there.
    """

    same: list[str]
    changed: list[str]
    missing: list[str]
    untied: list[str]


def compare(
    directory: pathlib.Path, known: Mapping[str, str], names: Iterable[str] | None = None
) -> Comparison:
    """Compares files with their digests.

    Args:
      directory: where the files are.
      known: digests by name.
      names: which of them; default all. A name without a digest counts as changed.
    """
    comparison = Comparison([], [], [], [])
    for name in known if names is None else names:
        path = directory / name
        if ".." in pathlib.PurePath(name).parts or pathlib.PurePath(name).is_absolute():
            comparison.changed.append(f"the guarantee names a file outside its folder: {name!r}")
        elif not (path.is_file() or path.is_dir()):
            comparison.missing.append(name)
        elif name in known and digest(path) == known[name]:
            comparison.same.append(name)
        else:
            comparison.changed.append(f"{path} is not the one that the guarantee was written for")
    for path in sorted(directory.glob(checkpoint("*"))):
        if (name := path.relative_to(directory).as_posix()) not in known:
            comparison.untied.append(name)
    return comparison


def compare_export(directory: pathlib.Path, known: Mapping[str, str], guarantee: str) -> Comparison:
    """As ``compare``, for an export: all files of its folder must have digests."""
    comparison = compare(directory, known)
    for path in sorted(directory.iterdir()):
        added = any(path.match(pattern) for pattern in _ADDED)
        if path.name not in known and path.name != guarantee and not added:
            why = "is no file of this export, and might be read in its place"
            comparison.changed.append(f"{path} {why}")
    return comparison
