"""Tables of people: one record each, features brought to order 1 by published constants.

Means and deviations of the data themselves would be information about the people that no guarantee
here counts. What is used instead is known without them: usual values in medicine for heart disease,
and the ranges that the published description of the breast cancer set states.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np

from dpfl_jax.data.sets import arrays
from dpfl_jax.errors import BadInputError

Subject = tuple[str, dict[str, np.ndarray]]

# (middle, half width) of age, sex, chest pain x3, resting blood pressure, cholesterol, fasting
# blood sugar, resting ECG x2, largest heart rate, angina, ST depression.
_FLAG = (0.5, 0.5)
HEART_SCALE = np.array(
    [
        *((55, 10), _FLAG, _FLAG, _FLAG, _FLAG, (130, 20), (220, 90), _FLAG, _FLAG, _FLAG),
        *((140, 25), _FLAG, (1, 1)),
    ],
    np.float64,
)
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


def heart_disease(path: pathlib.Path) -> Iterator[Subject]:
    """Patients of four hospitals: ``x`` float32 [13], ``label``, ``silo`` (the hospital)."""
    middle, width = HEART_SCALE.T
    for name, patient in arrays.read_heart_disease(path, "all"):
        x = ((patient["x"] - middle) / width).astype(np.float32)
        yield name, {"x": x, "label": patient["y"], "silo": patient["silo"]}


def breast_cancer() -> Iterator[Subject]:
    """569 real patients, bundled with scikit-learn: ``x`` float32 [30] about in -1..1, ``label``.

    Features are square roots of their place in the published range, stretched to -1..1.
    """
    try:
        from sklearn.datasets import load_breast_cancer
    except ImportError:
        raise BadInputError(
            "data.source=breast_cancer needs scikit-learn: install it, or use "
            "data.source=heart_disease"
        ) from None
    found = load_breast_cancer()
    low, high = BREAST_CANCER_RANGES.T
    x = (2 * np.sqrt(np.clip((found.data - low) / (high - low), 0, 1)) - 1).astype(np.float32)
    for i in range(len(x)):
        label = found.target[i : i + 1].astype(np.int32)
        yield f"patient {i:05d}", {"x": x[i : i + 1], "label": label}
