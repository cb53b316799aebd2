"""The versions of the code that made a guarantee, with the commit in a git checkout."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import subprocess
from collections.abc import Iterable
from typing import NamedTuple

from dpfl_jax import __version__

_ROOT = pathlib.Path(__file__).parents[2]
_GIT = ("git", "describe", "--always", "--dirty=.dirty", "--abbrev=12", "--exclude=*")
_VERSION = re.compile(
    r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?:(a|b|rc)(\d{1,9})|\.dev(\d{1,9}))?"
    r"(?:\+g([0-9a-f]{7,40})(?:\.dirty)?)?"
)
_STAGES = {"a": 1, "b": 2, "rc": 3}


class Version(NamedTuple):
    """A version that a file names.

    Attributes:
      order: sorts versions by time.
      commit: the checkout's commit, or its beginning; "" for an installed package.
    """

    order: tuple[int, ...]
    commit: str


@functools.cache
def this_version() -> str:
    """Returns the package's version, for a git checkout as ``1.2.0.dev0+g0123456789ab``.

    It ends with ``.dirty`` if files were changed since that commit.
    """
    try:
        project = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
        # A copy of the package in another repository must not report that repository's commit.
        if 'name = "dpfl_jax"' not in project or not (_ROOT / ".git").exists():
            return __version__
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        described = subprocess.run(
            _GIT,
            cwd=_ROOT,
            env={**kept, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):  # installed, or without git
        return __version__
    return f"{__version__}+g{described.stdout.strip()}"


def library(versions: Iterable[str] = ()) -> str:
    """Returns ``library`` of guarantee.json for these versions; default: this version."""
    return f"dpfl_jax {', '.join(versions) or this_version()}"


def versions_of(text: str) -> list[Version | None]:
    """Returns the versions that ``library`` names; None for one that cannot be read."""
    return [version_of(one) for one in text.removeprefix("dpfl_jax ").split(", ")]


def is_newer(text: str) -> bool:
    """Whether ``library`` names a version that is newer than this one."""
    mine = version_of(this_version())
    return mine is not None and any(one and one.order > mine.order for one in versions_of(text))


def version_of(text: str) -> Version | None:
    """Returns a version that can be compared, or None if it cannot be read."""
    match = _VERSION.fullmatch(text)
    if match is None:
        return None
    major, minor, patch, stage, number, development, commit = match.groups()
    # Development versions come before release candidates, and these before the release.
    last = (0, int(development)) if development else (_STAGES.get(stage, 4), int(number or 0))
    return Version((int(major), int(minor), int(patch), *last), commit or "")
