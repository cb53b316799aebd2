"""Labels of classes, which are whole numbers from 0 on, and numbers, which are of order 1.

Other labels train something else, and are refused. Other numbers train badly under privacy, unless
the model scales them, which only its author knows: that is a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dpfl_jax.data.owners import by_set
from dpfl_jax.data.store import Readable
from dpfl_jax.errors import BadInputError

# Reading all of a store that lies on a disk may take longer than training on it.
_AT_ONCE, _MOST = 2**12, 2**18
_FAR, _SHARE, _LOOKED_AT = 10.0, 0.01, 256  # as of tables (``table``), of the first examples


def are_classes(labels: np.ndarray, classes: int) -> bool:
    """Whether all labels are whole numbers from 0 to ``classes - 1``, of whatever type."""
    if labels.dtype.kind not in "biuf":
        return False
    return bool(((labels >= 0) & (labels < classes) & (labels == np.floor(labels))).all())


def check_labels(store: Readable, classes: int) -> None:
    """Raises BadInputError if a ``label`` among a store's first 2^18 examples is no class."""
    first = int(store.user_offsets[0])
    stop = min(int(store.user_offsets[-1]), first + _MOST)
    for start in range(first, stop, _AT_ONCE):
        labels = store.read(np.arange(start, min(start + _AT_ONCE, stop))).get("label")
        if labels is not None and not are_classes(np.asarray(labels), classes):
            few = "the model has one output: two classes need two. " if classes == 1 else ""
            raise BadInputError(
                f"a label is none of the whole numbers from 0 to {classes - 1}, one for each class "
                f"that the model tells apart: {few}number the classes from 0 "
                "(np.unique(labels, return_inverse=True)[1]), or predict a number "
                '("regression")'
            )


def far_from_order_1(store: Any) -> str | None:
    """What to tell before training if numbers are far from order 1; for the terminal alone.

    Tables are checked where they are read.
    """
    store = by_set(store)
    task = getattr(store, "task", None)
    if task is not None and task.table is not None:
        return None
    first = int(store.user_offsets[0])
    stop = min(int(store.user_offsets[-1]), first + _LOOKED_AT)
    found: Any = store.read(np.arange(first, stop)) if first < stop else {}
    far = []
    for name in ("x", "label"):
        values = np.asarray(found[name] if isinstance(found, Mapping) and name in found else 0)
        # Of vectors each number by itself, of images all.
        axis = 0 if values.ndim == 2 else None
        if values.dtype.kind == "f" and ((np.abs(values) > _FAR).mean(axis) > _SHARE).any():
            far.append(name)
    if not far:
        return None
    return (
        f"numbers of {' and '.join(far)} are far from order 1, which leaves little of a clipped "
        "gradient to learn from: unless the model scales them, bring them to order 1 by constants "
        "known without these data (images of 0 to 255: divide by 255)"
    )
