"""Pictures and configurations that a command was asked for."""

from __future__ import annotations

import pathlib
from typing import Any

from dpfl_jax.config import config_to_dict
from dpfl_jax.errors import BadInputError


def save_figure(figure: Any, path: pathlib.Path, dpi: int = 150) -> None:
    """Writes a figure of Matplotlib.

    Raises:
      BadInputError: it cannot be written there.
    """
    try:
        figure.savefig(path, dpi=dpi)
    except (OSError, ValueError) as error:
        raise BadInputError(f"the plot cannot be written to {path}: {error}") from error


def write_config(path: pathlib.Path, config: Any, reason: str) -> None:
    """Writes a configuration as YAML, below why it is this one.

    Raises:
      BadInputError: it cannot be written there.
    """
    from dpfl_jax.config.text import write_yaml

    text = write_yaml(config_to_dict(config))
    try:
        path.write_text(f"# {reason}.\n{text}")
    except OSError as error:
        raise BadInputError(f"cannot write {path}: {error.strerror}") from error
