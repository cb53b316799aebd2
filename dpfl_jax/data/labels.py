"""Labels of classes, which are whole numbers from 0 on: anything else trains something else."""

from __future__ import annotations

import numpy as np

from dpfl_jax.data.store import Readable
from dpfl_jax.errors import BadInputError

# Reading all of a store that lies on a disk may take longer than training on it.
_AT_ONCE, _MOST = 2**12, 2**18


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
