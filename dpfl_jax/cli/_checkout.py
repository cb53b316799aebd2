"""What a checkout of the repository has and the installed package has not."""

from __future__ import annotations

import importlib
import pathlib
import sys
from types import ModuleType

import dpfl_jax
from dpfl_jax.errors import BadInputError


def from_checkout(name: str) -> ModuleType:
    """Imports a module of ``reproductions`` or ``benchmarks``.

    The checkout is the folder that holds the running ``dpfl_jax``: what lies in the folder one is
    in is not run for lying there.

    Args:
      name: e.g. "benchmarks" or "reproductions.registry".

    Raises:
      BadInputError: there is no checkout.
    """
    top = name.partition(".")[0]
    root = pathlib.Path(dpfl_jax.__file__).parents[1]
    # A folder of installed packages may hold benchmarks too, but no pyproject.toml.
    if not all((root / part).is_file() for part in ("pyproject.toml", f"{top}/__init__.py")):
        raise BadInputError(
            f"{top} are not part of the installed package: clone the repository, and run "
            "`uv run dpfl` in it"
        )
    if sys.path[0] != str(root):
        sys.path.insert(0, str(root))
    return importlib.import_module(name)
