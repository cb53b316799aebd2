"""Named data sets: who owns an example, what is learned, which files are needed.

A data set of your own is a ``DataSource`` in any module; configurations name it by
``data.source: package.module:NAME``. Nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from dpfl_jax.data.rows import FORMATS, expand_paths
from dpfl_jax.data.sections import SourceConfig
from dpfl_jax.data.sets import arrays, text
from dpfl_jax.errors import BadInputError, imported
from dpfl_jax.task import Task


@dataclasses.dataclass(frozen=True)
class DataSource:
    """A data set.

    Attributes:
      read: ``(section, split) -> iterator`` of (user, text), in any order of users; or of (user,
        dict of arrays with a leading axis), each user once: ``x`` and ``label`` as ``task`` says,
        ``silo`` int32 if a silo is known, and any plain number of a record, such as its budget.
      unit: what a user is.
      task: what is learned; None for texts, which are tokenised.
      splits: the splits that the files define; ``("all",)`` if they define none.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.data import DataSource
      >>> def read(section, split):
      ...     yield "ann", {"x": np.zeros((2, 3), np.float32), "label": np.zeros(2, np.int32)}
      >>> source = DataSource(read, unit="person")  # `data.source: package.module:NAME` in YAML
      >>> [user for user, _ in source.read(None, "all")]
      ['ann']
    """

    read: Callable[[SourceConfig, str], Iterator[tuple[str, Any]]]
    unit: str
    task: Task | None = None
    splits: tuple[str, ...] = ("all",)


def _files(
    read: Callable[[pathlib.Path, str], Iterator[tuple[str, Any]]],
    bundled: pathlib.Path | None = None,
) -> Callable[[SourceConfig, str], Iterator[tuple[str, Any]]]:
    """Reads ``data.path``, or by default what comes with the package."""
    return lambda section, split: read(expand_paths(section.path or bundled)[0], split)


_PARTS = ("train", "test")
SETS: dict[str, DataSource] = {
    "shakespeare": DataSource(_files(text.read_shakespeare, text.SHAKESPEARE), "speaking role"),
    "stack_overflow": DataSource(_files(text.read_stack_overflow), "account", None, _PARTS),
    "cc_news": DataSource(_files(text.read_cc_news), "base domain"),
    "characters": DataSource(text.read_windows, "speaking role", text.CHARACTERS_TASK),
    "femnist": DataSource(
        _files(arrays.read_femnist), "writer", Task("classes", (28, 28), 62), _PARTS
    ),
    "mnist": DataSource(_files(arrays.read_mnist), "image", Task("classes", (28, 28), 10), _PARTS),
    "digits": DataSource(arrays.read_digits, "image", Task("classes", (8, 8), 10)),
    "heart_disease": DataSource(
        _files(arrays.read_scaled_heart_disease), "patient", Task("classes", (13,), 2)
    ),
    "breast_cancer": DataSource(arrays.read_breast_cancer, "patient", Task("classes", (30,), 2)),
    "diabetes": DataSource(
        arrays.read_diabetes, "patient", Task("regression", (10,), scaled=False)
    ),
}


def data_source(name: str) -> DataSource:
    """Returns the data set called ``name``.

    Raises:
      BadInputError: there is none.
    """
    if name in SETS:
        return SETS[name]
    if ":" not in name:
        known = ("python_source", "store", *FORMATS, *SETS)
        raise BadInputError(
            f"unknown data source {name!r}: use {', '.join(known)}, or package.module:NAME"
        )
    source = imported(name, "data.source")
    if not isinstance(source, DataSource):
        raise BadInputError(f"data.source is {name!r}, which is no dpfl_jax.data.DataSource")
    return source
