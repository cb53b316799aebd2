"""Pictures that a command was asked for."""

from __future__ import annotations

import pathlib
from typing import Any

from dpfl_jax.errors import BadInputError


def save(figure: Any, path: pathlib.Path, dpi: int = 150) -> None:
    """Writes a figure of Matplotlib.

    Raises:
      BadInputError: it cannot be written there.
    """
    try:
        figure.savefig(path, dpi=dpi)
    except (OSError, ValueError) as error:
        raise BadInputError(f"the plot cannot be written to {path}: {error}") from error
