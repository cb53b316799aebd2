"""Sets that scikit-learn bundles: digits, breast cancer and diabetes; real, and no download."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dpfl_jax.data.sections import SourceConfig
from dpfl_jax.errors import BadInputError

User = tuple[str, dict[str, np.ndarray]]

# Least and largest value of each of the 30 features, as scikit-learn's description prints them.
BREAST_CANCER_RANGES = np.array(
    [
        *((6.981, 28.11), (9.71, 39.28), (43.79, 188.5), (143.5, 2501.0), (0.053, 0.163)),
        *((0.019, 0.345), (0.0, 0.427), (0.0, 0.201), (0.106, 0.304), (0.05, 0.097)),
        *((0.112, 2.873), (0.36, 4.885), (0.757, 21.98), (6.802, 542.2), (0.002, 0.031)),
        *((0.002, 0.135), (0.0, 0.396), (0.0, 0.053), (0.008, 0.079), (0.001, 0.03)),
        *((7.93, 36.04), (12.02, 49.54), (50.41, 251.2), (185.2, 4254.0), (0.071, 0.223)),
        *((0.027, 1.058), (0.0, 1.252), (0.0, 0.291), (0.156, 0.664), (0.055, 0.208)),
    ],
    np.float64,
)


def _load(name: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn import datasets
    except ImportError:
        raise BadInputError(
            f"data.source={name} needs scikit-learn, which bundles it: install it, or use a source "
            "with data.path"
        ) from None
    found: Any = getattr(datasets, f"load_{name}")()
    return np.asarray(found.data, np.float64), np.asarray(found.target)


def _people(what: str, x: np.ndarray, label: np.ndarray) -> Iterator[User]:
    for i in range(len(x)):
        yield f"{what} {i:05d}", {"x": x[i : i + 1].astype(np.float32), "label": label[i : i + 1]}


def read_digits(section: SourceConfig, split: str) -> Iterator[User]:
    """1,797 images: ``x`` float32 [8, 8] in 0..1, ``label`` int32; each is a user of its own."""
    x, label = _load("digits")
    return _people("image", x.reshape(-1, 8, 8) / 16.0, label.astype(np.int32))


def read_breast_cancer(section: SourceConfig, split: str) -> Iterator[User]:
    """569 patients: ``x`` float32 [30] about in -1..1, ``label`` int32.

    Features are square roots of their place in the published range, stretched to -1..1.
    """
    x, label = _load("breast_cancer")
    low, high = BREAST_CANCER_RANGES.T
    return _people(
        "patient",
        2 * np.sqrt(np.clip((x - low) / (high - low), 0, 1)) - 1,
        label.astype(np.int32),
    )


def read_diabetes(section: SourceConfig, split: str) -> Iterator[User]:
    """442 patients: ``x`` float32 [10], ``label`` float32 (progression after a year); unscaled."""
    x, label = _load("diabetes")
    return _people("patient", x, label.astype(np.float32))
