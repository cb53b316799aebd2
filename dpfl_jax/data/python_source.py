"""The default corpus, Python source that is on every machine; nothing is downloaded.

Public is the standard library without its tests. Private are the source files of the installed
third-party packages, one user each: several thousand with heavy-tailed sizes. What is installed
decides the users, and the store's fingerprint says which they were.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pathlib
import re
import sysconfig

from dpfl_jax.errors import BadInputError

_OWN_NAME = "dpfl-jax"
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}


def _read(path: pathlib.Path) -> bytes | None:
    """Returns the file's bytes; None if it is empty, unreadable or not UTF-8."""
    try:
        data = path.read_bytes()
        data.decode()
    except (OSError, UnicodeDecodeError):
        return None
    return data if data.strip() else None


def standard_library_files(with_tests: bool = False) -> dict[str, bytes]:
    """Returns the source files of the standard library: relative path -> contents."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"} if with_tests else _SKIPPED_FOLDERS
    files = {}
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - skipped)
        for path in (pathlib.Path(folder, n) for n in sorted(names) if n.endswith(".py")):
            data = _read(path)
            if data is not None:
                files[path.relative_to(root).as_posix()] = data
    return files


def _installed_paths() -> dict[str, pathlib.Path]:
    """Source files of installed distributions: package-relative path -> file."""
    stdlib = pathlib.Path(sysconfig.get_paths()["stdlib"]).resolve()
    site_names = {"site-packages", "dist-packages"}
    paths: dict[str, pathlib.Path] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if re.sub(r"[-_.]+", "-", name).lower() == _OWN_NAME:
            continue
        for file in distribution.files or ():
            relative = file.as_posix()
            if not relative.endswith(".py") or relative.startswith(("..", "/")):
                continue
            path = pathlib.Path(str(distribution.locate_file(file)))
            parents = path.resolve().parents
            if stdlib in parents and not any(p.name in site_names for p in parents):
                continue
            paths.setdefault(relative, path)
    return paths


def installed_package_files() -> dict[str, bytes]:
    """Returns the private users: package-relative path (the user id) -> contents.

    Left out are this package, empty files, files that are not UTF-8, copies of files of the
    standard
    library, and of equal files all but the first in path order: one text of two users would be
    protected as if it belonged to either.

    Raises:
      BadInputError: no third-party package is installed.
    """
    seen = {hashlib.sha256(d).digest() for d in standard_library_files(with_tests=True).values()}
    files = {}
    for relative, path in sorted(_installed_paths().items()):
        data = _read(path)
        if data is None:
            continue
        digest = hashlib.sha256(data).digest()
        if digest not in seen:
            seen.add(digest)
            files[relative] = data
    if not files:
        raise BadInputError(
            "no third-party packages are installed, so there are no private users: use another "
            "data source"
        )
    return files
