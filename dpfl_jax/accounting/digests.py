"""SHA-256 digests that tie a guarantee to files: a run's configuration and checkpoints, an export.

They are not signatures: whoever changes a file can also change its digest.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dpfl_jax.buckets import files_below, located

CONFIG = "config.yaml"
PRIVATE_REPORT = "NOT_TO_BE_PUBLISHED.md"  # beside no export
# Files that may be added to an export's folder without being part of the export.
_ADDED = ("*.md", "LICENSE*", "NOTICE*", ".*")


def digest(path: Any) -> str:
    """Returns the SHA-256 of a file's bytes, or of the names and digests of a folder's files.

    ``path`` is a path of this machine, or one of ``etils.epath`` in a bucket.
    """
    if path.is_dir():
        files = sorted(files_below(path))
        lines = (f"{digest(file)}  {file.relative_to(path).as_posix()}\n" for file in files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoint(step: int | str) -> str:
    """Returns the path, within a run's directory, of a step's checkpoint; "*" gives a glob."""
    return f"checkpoints/{step}/state"


def of_run(directory: pathlib.Path, steps: Iterable[int | None]) -> dict[str, str]:
    """Returns the digests of a run's configuration and of its checkpoints at ``steps``, by name."""
    names = [CONFIG, *(checkpoint(step) for step in steps if step is not None)]
    paths = {name: located(directory / name) for name in names}
    return {name: digest(path) for name, path in paths.items() if path.exists()}


def of_export(directory: pathlib.Path, guarantee: str) -> dict[str, str]:
    """Returns the digests of an export's files by name, without the guarantee that holds them."""
    files = (file for file in sorted(directory.iterdir()) if file.name != guarantee)
    return {file.name: digest(file) for file in files}


class Comparison(NamedTuple):
    """The result of comparing a folder's files with a guarantee's digests.

    Attributes:
      same: names of the unchanged files.
      changed: a sentence for each changed file.
      missing: names that have a digest but no file in the folder.
      untied: checkpoints without a digest, which may be any model.
    """

    same: list[str]
    changed: list[str]
    missing: list[str]
    untied: list[str]


def compare(
    directory: pathlib.Path, known: Mapping[str, str], names: Iterable[str] | None = None
) -> Comparison:
    """Compares the files of a folder with their digests.

    Args:
      directory: the folder.
      known: digests by file name.
      names: the files to compare; default: all in ``known``. A file without a digest counts as
        changed.
    """
    comparison = Comparison([], [], [], [])
    for name in known if names is None else names:
        path = located(directory / name)
        if ".." in pathlib.PurePath(name).parts or pathlib.PurePath(name).is_absolute():
            comparison.changed.append(f"the guarantee names a file outside its folder: {name!r}")
        elif not (path.is_file() or path.is_dir()):
            comparison.missing.append(name)
        elif name in known and digest(path) == known[name]:
            comparison.same.append(name)
        else:
            comparison.changed.append(f"{path} is not the one that the guarantee was written for")
    kept = located(directory / "checkpoints")
    for step in sorted(path.name for path in kept.iterdir()) if kept.is_dir() else ():
        if (name := checkpoint(step)) not in known and (kept / step / "state").exists():
            comparison.untied.append(name)
    return comparison


def compare_export(directory: pathlib.Path, known: Mapping[str, str], guarantee: str) -> Comparison:
    """Compares an export's files with their digests; a file without a digest counts as changed."""
    comparison = compare(directory, known)
    for path in sorted(directory.iterdir()):
        added = any(path.match(pattern) for pattern in _ADDED)
        if path.name not in known and path.name != guarantee and not added:
            why = "is not part of this export and might be loaded instead: move it elsewhere"
            comparison.changed.append(f"{path} {why}")
    for path in sorted(directory.rglob(PRIVATE_REPORT)):
        comparison.changed.append(f"{path} was computed from private data: move it elsewhere")
    return comparison
