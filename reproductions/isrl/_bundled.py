"""scikit-learn's bundled real sets, for whoever has not the papers' files: no download."""

from __future__ import annotations

import numpy as np

from dpfl_jax.errors import BadInputError

NOTE = (
    "DPFL_DATA_DIR names no {what}: {instead}, bundled with scikit-learn, stand in, so that the "
    "paper's own numbers are not compared"
)


def bundled(name: str, missing: str) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels of ``digits`` or ``diabetes``.

    Raises:
      BadInputError: scikit-learn is not installed, so that ``missing`` is needed after all.
    """
    try:
        from sklearn import datasets
    except ImportError:
        raise BadInputError(
            f"this figure needs {missing} in a folder that DPFL_DATA_DIR names, or scikit-learn "
            "(pip install scikit-learn), whose bundled data can stand in"
        ) from None
    found = getattr(datasets, f"load_{name}")()
    return np.asarray(found.data, np.float64), np.asarray(found.target)
