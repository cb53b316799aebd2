"""Which code made a guarantee: versions of the package and, in a git checkout, its commit."""

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
      order: later versions have larger ones.
      commit: of the checkout, or its beginning; "" of an installed package.
    """

    order: tuple[int, ...]
    commit: str


@functools.cache
def this_version() -> str:
    """The package's version; of a git checkout with its commit, ``1.2.0.dev0+g0123456789ab``.

    It ends with ``.dirty`` if files of the checkout were changed since.
    """
    try:
        project = (_ROOT / "pyproject.toml").read_text(encoding="utf-8")
        # A copy of the package in somebody else's repository has a commit of theirs above it.
        if 'name = "dpfl_jax"' not in project or not (_ROOT / ".git").exists():
            return __version__
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        found = subprocess.run(
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
    return f"{__version__}+g{found.stdout.strip()}"


def library(versions: Iterable[str] = ()) -> str:
    """What ``library`` of guarantee.json says of these versions, or of this one."""
    return f"dpfl_jax {', '.join(versions) or this_version()}"


def versions_of(text: str) -> list[Version | None]:
    """The versions that ``library`` names; None for one that cannot be read."""
    return [version_of(one) for one in text.removeprefix("dpfl_jax ").split(", ")]


def version_of(text: str) -> Version | None:
    """A version that can be compared; None if it cannot be read."""
    match = _VERSION.fullmatch(text)
    if match is None:
        return None
    major, minor, patch, stage, number, development, commit = match.groups()
    # What is in development comes before candidates, and these before the release.
    last = (0, int(development)) if development else (_STAGES.get(stage, 4), int(number or 0))
    return Version((int(major), int(minor), int(patch), *last), commit or "")
