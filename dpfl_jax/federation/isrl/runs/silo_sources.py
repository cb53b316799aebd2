"""Records for ISRL-DP: read, scaled by public records, bounded one by one, cut into silos."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import pathlib
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from dpfl_jax.config.isrl import IsrlDataConfig
from dpfl_jax.data.sets import arrays
from dpfl_jax.data.sets.obesity import LEVELS, read_obesity
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl.message import SiloData


@dataclasses.dataclass(frozen=True)
class Records:
    """Records before they are scaled.

    Attributes:
      x: float64 [m, features].
      y: float64 [m], a number, or a class 0, 1, ...
      classes: 0 for numbers.
      fine: what silos differ in: classes finer than y, or y itself.
      public_scale: divisor of x that is public knowledge; None: public records set it.
    """

    x: np.ndarray
    y: np.ndarray
    classes: int
    fine: np.ndarray
    public_scale: float | None = None


@dataclasses.dataclass(frozen=True)
class SiloRecords:
    """Silos, split.

    Attributes:
      train, test: of each silo; features end with a constant 1 (scaled with the record).
      classes: 0 for numbers.
      features: the constant among them.
      description: one line.
      fingerprint: of the training records; sensitive.
    """

    train: SiloData
    test: SiloData
    classes: int
    features: int
    description: str
    fingerprint: str


def load_silos(config: IsrlDataConfig, *, softmax: bool, signed: bool) -> SiloRecords:
    """Reads what a configuration names.

    Args:
      config: the data section.
      softmax: keep all classes (digits: ten; otherwise odd and even).
      signed: two classes are -1 and 1.

    Raises:
      BadInputError: missing files or packages, or silos that would be empty.
    """
    found = _READERS[config.source](config, softmax)
    rng = np.random.default_rng(config.split_seed)
    order = rng.permutation(len(found.y))
    if config.max_records is not None:
        order = order[: config.max_records]
    x, y = found.x[order], found.y[order].astype(np.float64)
    fine, what = found.fine[order], "scaled by public constants"
    if found.public_scale is None:
        public = math.ceil(config.public_fraction * len(y))
        if public < 2 or public >= len(y):
            raise BadInputError(
                f"data.public_fraction={config.public_fraction} leaves {public} of {len(y)} "
                "records to set the scale: it must leave at least 2, and others to train on"
            )
        mean, spread = x[:public].mean(0), x[:public].std(0)
        x = (x - mean) / np.where(spread > 0, spread, 1.0)
        if not found.classes:
            y = (y - y[:public].mean()) / max(float(y[:public].std()), 1e-12)
        x, y, fine = x[public:], y[public:], fine[public:]
        what = f"scaled by {public} records declared public"
    else:
        x = x / found.public_scale
    if not found.classes:
        y = np.clip(y, -config.max_target, config.max_target)
    if signed and found.classes == 2:
        y = 2 * y - 1
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    # Each record by itself: its place on the ball depends on no other record.
    x *= np.minimum(1.0, config.max_norm / np.linalg.norm(x, axis=1, keepdims=True))
    parts = _cut(config, fine, rng)
    train, test = [], []
    for part in parts:
        held = round(config.test_fraction * len(part))
        if held < 1 or len(part) - held < 1:
            raise BadInputError(
                f"a silo of {len(part)} records cannot be split: use fewer silos than "
                f"{config.silos}, or more records"
            )
        test.append((x[part[:held]], y[part[:held]]))
        train.append((x[part[held:]], y[part[held:]]))
    sizes = [len(v) for _, v in train]
    between = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
    description = (
        f"{config.source}: {config.silos} silos ({config.partition}) of {between} records in "
        f"training, {sum(len(v) for _, v in test)} held out; {x.shape[1]} features, {what}"
    )
    digest = hashlib.sha256()
    for a, b in train:
        digest.update(np.int64(len(b)).tobytes() + a.astype("<f8").tobytes() + b.tobytes())
    return SiloRecords(
        padded(train), padded(test), found.classes, x.shape[1], description, digest.hexdigest()
    )


def padded(parts: list[tuple[np.ndarray, np.ndarray]]) -> SiloData:
    """Silos of unequal sizes as one array, padded with zeros."""
    n = max(len(y) for _, y in parts)
    x = np.zeros((len(parts), n, parts[0][0].shape[1]), np.float32)
    y = np.zeros((len(parts), n), np.float32)
    for i, (a, b) in enumerate(parts):
        x[i, : len(b)], y[i, : len(b)] = a, b
    sizes = jnp.asarray([len(b) for _, b in parts], jnp.int32)
    return SiloData({"x": jnp.asarray(x), "y": jnp.asarray(y)}, sizes)


def _cut(config: IsrlDataConfig, fine: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Indices of each silo, disjoint, in random order."""
    silos = config.silos
    if config.partition == "pairs":
        if config.source not in ("digits", "mnist") or silos not in (5, 25):
            raise BadInputError(
                "data.partition=pairs gives a silo an even and an odd digit: it needs digits or "
                "mnist, and 5 or 25 silos"
            )
        pairs = list(itertools.product(range(0, 10, 2), range(1, 10, 2)))
        if silos == 5:
            pairs = [(d, d + 1) for d in range(0, 10, 2)]
        share = silos // 5  # silos that a digit is spread over
        pools = [np.array_split(np.flatnonzero(fine == d), share) for d in range(10)]
        taken = [0] * 10
        parts = []
        for pair in pairs:
            mine = []
            for digit in pair:
                mine.append(pools[digit][taken[digit]])
                taken[digit] += 1
            parts.append(np.concatenate(mine))
    elif config.partition == "sorted":
        parts = np.array_split(np.argsort(fine, kind="stable"), silos)
    else:
        parts = np.array_split(np.arange(len(fine)), silos)
    return [rng.permutation(part) for part in parts]


def _digit_task(x: np.ndarray, digits: np.ndarray, softmax: bool, scale: float) -> Records:
    if softmax:
        return Records(x, digits, 10, digits, scale)
    return Records(x, digits % 2 == 0, 2, digits, scale)


def _sklearn(name: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn import datasets
    except ImportError:
        raise BadInputError(
            f"data.source={name} needs scikit-learn, which bundles it: install it, or use a "
            "source with data.path"
        ) from None
    found = getattr(datasets, f"load_{name}")()
    return np.asarray(found.data, np.float64), np.asarray(found.target)


def _digits(config: IsrlDataConfig, softmax: bool) -> Records:
    x, digits = _sklearn("digits")
    return _digit_task(x, digits, softmax, 16.0)


def _mnist(config: IsrlDataConfig, softmax: bool) -> Records:
    users = list(arrays.read_mnist(_path(config), "train"))
    x = np.concatenate([d["image"] for _, d in users]).reshape(-1, 784).astype(np.float64)
    digits = np.concatenate([d["label"] for _, d in users]).astype(int)
    return _digit_task(x, digits, softmax, 1.0)


def _breast_cancer(config: IsrlDataConfig, softmax: bool) -> Records:
    x, y = _sklearn("breast_cancer")
    return Records(x, y, 2, y)


def _diabetes(config: IsrlDataConfig, softmax: bool) -> Records:
    x, y = _sklearn("diabetes")
    return Records(x, y, 0, y)


def _medical_cost(config: IsrlDataConfig, softmax: bool) -> Records:
    people = [person for _, person in arrays.read_medical_cost(_path(config), "train")]
    x = np.concatenate([p["x"] for p in people]).astype(np.float64)
    y = np.concatenate([p["y"] for p in people]).astype(np.float64)
    return Records(x, y, 0, y)


def _obesity(config: IsrlDataConfig, softmax: bool) -> Records:
    people = [person for _, person in read_obesity(_path(config))]
    x = np.concatenate([p["x"] for p in people]).astype(np.float64)
    y = np.concatenate([p["label"] for p in people])
    return Records(x, y, len(LEVELS), y)


def _path(config: IsrlDataConfig) -> pathlib.Path:
    if config.path is None:
        raise BadInputError(
            f"data.source={config.source} needs data.path: the folder that holds its files"
        )
    path = pathlib.Path(config.path)
    if not path.exists():
        raise BadInputError(f"{path} does not exist: put the {config.source} files there")
    return path


_READERS: dict[str, Callable[[IsrlDataConfig, bool], Records]] = {
    "digits": _digits,
    "mnist": _mnist,
    "breast_cancer": _breast_cancer,
    "diabetes": _diabetes,
    "medical_cost": _medical_cost,
    "obesity": _obesity,
}
