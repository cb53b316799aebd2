"""Sets of arrays: LEAF's FEMNIST, MNIST, heart disease, what scikit-learn bundles.

Every reader yields (user, dict of arrays with a leading axis). Features are raw, or scaled by
published constants: means and deviations of the data would be information about people that no
guarantee counts.
"""

from __future__ import annotations

import csv
import io
import math
import pathlib
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from dpfl_jax.data.rows import open_binary
from dpfl_jax.data.sections import SourceConfig
from dpfl_jax.data.sets.text import read_leaf
from dpfl_jax.errors import BadInputError

User = tuple[str, dict[str, np.ndarray]]

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
# Kinds of chest pain and of resting ECG, by UCI's description.
_CODES = {2: (1, 2, 3, 4), 6: (0, 1, 2)}


def read_femnist(path: pathlib.Path, split: str) -> Iterator[User]:
    """Yields ``x`` float32 [28, 28] (1 = white) and ``label`` int32 in 0..61 per writer.

    Reads ``<split>.json``, ``<split>/*.json`` or ``*.json`` files whose name contains the split.
    LEAF lists a writer in both splits; a writer may also be spread over files of one split.
    """
    files = sorted({*path.glob(f"{split}.json"), *path.glob(f"{split}/*.json")})
    files = files or sorted(path.glob(f"*{split}*.json"))
    if not files:
        raise BadInputError(
            f"{path} holds no {split}.json or {split}/*.json: put LEAF's files there"
        )
    parts: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        for user, data in read_leaf(file):
            parts.setdefault(user, []).append(data)
    for user, pieces in parts.items():
        pixels = [image for piece in pieces for image in piece["x"]]
        images = np.asarray(pixels, np.float32)
        if len(pixels) and images.shape[1:] != (784,):
            raise BadInputError(f"{path}: user {user!r} has images of {images.shape[1:]}, not 784")
        labels = np.asarray([y for piece in pieces for y in piece["y"]], np.int32)
        if len(pixels):
            yield user, {"x": images.reshape(-1, 28, 28), "label": labels}


def read_idx(path: pathlib.Path) -> np.ndarray:
    """Reads an idx file of unsigned bytes, gzip or not.

    Raises:
      BadInputError: it is no idx file, or is cut short.
    """
    try:
        with open_binary(path) as file:
            data = file.read()
    except (OSError, EOFError) as error:
        if isinstance(error, BadInputError):
            raise
        raise BadInputError(f"{path}: damaged ({error})") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise BadInputError(f"{path}: not an idx file of bytes")
    shape = struct.unpack_from(f">{data[3]}I", data, 4)
    body = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])
    if body.size != math.prod(shape):
        raise BadInputError(f"{path}: has {body.size} values, but its header says {shape}")
    return body.reshape(shape)


def read_mnist(path: pathlib.Path, split: str) -> Iterator[User]:
    """Yields ``x`` float32 [28, 28] in 0..1 and ``label`` int32; each image is its own user."""
    stem = {"train": "train", "test": "t10k"}[split]
    arrays = []
    for name in (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"):
        files = [p for p in (path / name, path / f"{name}.gz") if p.is_file()]
        if not files:
            raise BadInputError(f"{path} holds no {name}[.gz]: put MNIST's four idx files there")
        arrays.append(read_idx(files[0]))
    images, labels = arrays
    if len(images) != len(labels):
        raise BadInputError(f"{path}: {len(images)} images but {len(labels)} labels")
    for i in range(len(images)):
        image = images[i : i + 1].astype(np.float32) / np.float32(255)
        yield f"{split}-{i:05d}", {"x": image, "label": labels[i : i + 1].astype(np.int32)}


def read_heart_disease(path: pathlib.Path, split: str) -> Iterator[User]:
    """Yields ``x`` float32 [13], ``label`` int32 (disease or not), ``silo`` int32 (hospital).

    FLamby's rules (Ogier du Terrail et al. 2022, Fed-Heart-Disease): columns 10 to 12 are dropped,
    then rows with a missing value; chest pain (column 2) and resting ECG (column 6) become
    indicators, the first value left out; the label is whether the last column is above 0. 740
    patients remain: 303, 261, 46, 130. ``path`` holds all four files, or is the one of a hospital,
    which then is silo 0.
    """
    rows: list[tuple[int, int, list[float]]] = []
    for silo, hospital in enumerate(HOSPITALS):
        name = f"processed.{hospital}.data"
        if path.is_file() and path.name != name:
            continue
        file = path if path.is_file() else path / name
        if not file.is_file():
            raise BadInputError(
                f"{path} holds no {file.name}: put UCI's four processed files there"
            )
        with open_binary(file) as binary:
            text = binary.read().decode(errors="replace")
        for number, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
            if not cells:
                continue
            if len(cells) != 14:
                raise BadInputError(f"{file}, line {number}: {len(cells)} columns instead of 14")
            kept = [*cells[:10], cells[13]]
            if "?" in kept:
                continue
            try:
                rows.append((silo, number, [float(c) for c in kept]))
            except ValueError as error:
                raise BadInputError(f"{file}, line {number}: {error}") from error
    if not rows:
        raise BadInputError(f"{path} is no file of a hospital: processed.va.data, or another's")
    table = np.array([r[2] for r in rows])
    features: list[np.ndarray] = []
    for column in range(10):
        values = table[:, column]
        if column in _CODES:
            features += [values == v for v in _CODES[column][1:]]
        else:
            features.append(values)
    x = np.stack(features, axis=1).astype(np.float32)
    for i, (silo, number, cells_kept) in enumerate(rows):
        yield (
            f"{HOSPITALS[silo]}/{number:04d}",
            {
                "x": x[i : i + 1],
                "label": np.array([cells_kept[-1] > 0], np.int32),
                "silo": np.array([0 if path.is_file() else silo], np.int32),
            },
        )


# (middle, half width) of age, sex, chest pain x3, resting blood pressure, cholesterol, fasting
# blood sugar, resting ECG x2, largest heart rate, angina, ST depression: usual values in medicine.
_FLAG = (0.5, 0.5)
HEART_SCALE = np.array(
    [
        *((55, 10), _FLAG, _FLAG, _FLAG, _FLAG, (130, 20), (220, 90), _FLAG, _FLAG, _FLAG),
        *((140, 25), _FLAG, (1, 1)),
    ],
    np.float64,
)


def read_scaled_heart_disease(path: pathlib.Path, split: str) -> Iterator[User]:
    """As ``read_heart_disease``, with features brought to order 1 by ``HEART_SCALE``."""
    middle, width = HEART_SCALE.T
    for name, patient in read_heart_disease(path, split):
        yield name, {**patient, "x": ((patient["x"] - middle) / width).astype(np.float32)}


# ---- what scikit-learn bundles: real, and no download --------------------------------------------

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
    bunch: Any = getattr(datasets, f"load_{name}")()
    return np.asarray(bunch.data, np.float64), np.asarray(bunch.target)


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
        "patient", 2 * np.sqrt(np.clip((x - low) / (high - low), 0, 1)) - 1, label.astype(np.int32)
    )


def read_diabetes(section: SourceConfig, split: str) -> Iterator[User]:
    """442 patients: ``x`` float32 [10], ``label`` float32 (progression after a year); unscaled."""
    x, label = _load("diabetes")
    return _people("patient", x, label.astype(np.float32))
