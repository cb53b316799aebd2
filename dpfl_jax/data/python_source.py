"""The embedded default corpus: Python source that is already on every machine.

Public: the standard library (without its tests). Private: each source file of the installed
third-party packages is one user, several thousand with heavy-tailed sizes. Nothing is downloaded;
what is installed decides the users, and the store's fingerprint says which they were.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pathlib
import re
import sysconfig
from collections.abc import Iterator

from dpfl_jax.data.documents import encode_user
from dpfl_jax.data.schema import Schema
from dpfl_jax.data.store import ArrayStore, user_order_key
from dpfl_jax.data.tokenizers import Tokenizer
from dpfl_jax.errors import BadInputError

_OWN_NAME = "dpfl-jax"
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}


def _walk(root: pathlib.Path, skipped: set[str]) -> Iterator[pathlib.Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in skipped)
        for name in sorted(files):
            if name.endswith(".py"):
                yield pathlib.Path(folder, name)


def _read(path: pathlib.Path) -> bytes | None:
    """Returns the file's bytes, or None if it is empty, unreadable or not UTF-8."""
    try:
        data = path.read_bytes()
        data.decode()
    except (OSError, UnicodeDecodeError):
        return None
    return data if data.strip() else None


def standard_library_files(with_tests: bool = False) -> dict[str, bytes]:
    """Returns the standard library's source files: path relative to its root -> contents."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"} if with_tests else _SKIPPED_FOLDERS
    found = {}
    for path in _walk(root, skipped):
        data = _read(path)
        if data is not None:
            found[path.relative_to(root).as_posix()] = data
    return found


def _installed_paths() -> dict[str, pathlib.Path]:
    """Source files of installed distributions: package-relative path -> file."""
    stdlib = pathlib.Path(sysconfig.get_paths()["stdlib"]).resolve()
    site_names = {"site-packages", "dist-packages"}
    found: dict[str, pathlib.Path] = {}
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
            found.setdefault(relative, path)
    return found


def installed_package_files() -> dict[str, bytes]:
    """Returns one file per private user: package-relative path (the user id) -> contents.

    Left out: this package, empty files, files that are not UTF-8, files equal to a standard-library
    file, and of equal files all but the first in path order. (Two users with the same text would be
    one text protected as if it belonged to either.)
    """
    seen = {hashlib.sha256(d).digest() for d in standard_library_files(with_tests=True).values()}
    found = {}
    for relative, path in sorted(_installed_paths().items()):
        data = _read(path)
        if data is None:
            continue
        digest = hashlib.sha256(data).digest()
        if digest not in seen:
            seen.add(digest)
            found[relative] = data
    return found


def private_store(
    tokenizer: Tokenizer,
    seq_len: int,
    max_users: int | None = None,
    max_examples_per_user: int | None = None,
) -> ArrayStore:
    """Returns the installed packages' files as a store: one user per file.

    Args:
      tokenizer: makes the ids.
      seq_len: tokens in an example.
      max_users: keep that many users, a pseudo-random choice fixed by their ids.
      max_examples_per_user: keep each user's first examples.

    Raises:
      BadInputError: if no third-party package is installed.
    """
    files = installed_package_files()
    if not files:
        raise BadInputError(
            "no third-party packages are installed, so there are no private users: use another "
            "data source"
        )
    return _encode(files, tokenizer, seq_len, max_users, max_examples_per_user)


def public_store(
    tokenizer: Tokenizer, seq_len: int, max_examples_per_user: int | None = None
) -> ArrayStore:
    """Returns the standard library as a store, for non-private pre-training."""
    files = standard_library_files()
    return _encode(files, tokenizer, seq_len, None, max_examples_per_user)


def _encode(
    files: dict[str, bytes],
    tokenizer: Tokenizer,
    seq_len: int,
    max_users: int | None,
    max_examples: int | None,
) -> ArrayStore:
    schema = Schema.tokens(seq_len, tokenizer.vocab_size, tokenizer.fingerprint)
    users = sorted(files, key=user_order_key)[:max_users]
    packed = {u: encode_user([files[u].decode()], tokenizer, schema, max_examples) for u in users}
    return ArrayStore.from_records(packed, schema)
