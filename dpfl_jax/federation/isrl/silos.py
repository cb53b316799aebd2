"""The silos of an ISRL-DP run: their records, scaled, bounded in norm and cut into silos."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from dpfl_jax.config.schema import FederationConfig
from dpfl_jax.data import DataConfig, Store, load_examples
from dpfl_jax.data.store import unit_key_of
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl.message import SiloData
from dpfl_jax.federation.partition import record_numbers, subject_keys, uniforms
from dpfl_jax.task import Task


@dataclasses.dataclass(frozen=True)
class SiloRecords:
    """The records of all silos, split into training and test records.

    Attributes:
      train, test: records of each silo; features end with a constant 1, scaled with the record.
      classes: number of classes; 0 if the target is a number.
      features: number of features, the constant included.
      description: one line about the data.
      fingerprint: hex digest of the training records. Sensitive.
      owners: whether any user owns several records.
      public: whether some records were declared public.
      inputs: how features and target were made, besides a table's scale: ``scale`` and ``target``
        hold middle and width from the public records, ``names`` the names of classes.
      unit_key: what identifies a record, and a user with several records, in words.
      learned: the task of the data.
    """

    train: SiloData
    test: SiloData
    classes: int
    features: int
    description: str
    fingerprint: str
    unit_key: str
    learned: Task
    owners: bool = False
    public: bool = False
    inputs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def load_silos(
    config: DataConfig, federation: FederationConfig, *, softmax: bool, signed: bool
) -> SiloRecords:
    """Reads the data of a configuration, and cuts them into silos.

    Args:
      config: the section ``data``.
      federation: number of silos, and how records are spread over them.
      softmax: whether to keep all classes; otherwise ten digits become odd and even.
      signed: whether labels of two classes are -1 and 1, not 0 and 1.

    Raises:
      BadInputError: a file or package is missing, or a silo would be empty.
    """
    loaded = load_examples(config)
    task, classes = loaded.task, loaded.task.classes
    if task.vocab_size:
        raise BadInputError(
            f"data.source={config.source} holds text, but the models of this kind of run are "
            "linear: use a source of numbers"
        )
    # A record's place in the order depends only on its id, so that replacing one moves no other.
    chance, held_chance = _chances(loaded.store, config.split_seed)
    order = np.argsort(chance, kind="stable")
    rows, chance, held_chance = loaded.store.read(order), chance[order], held_chance[order]
    x = rows["x"].reshape(len(order), -1).astype(np.float64)
    y = fine = rows["label"].astype(np.float64)
    inputs: dict[str, Any] = {}
    if config.source in ("digits", "mnist") and not softmax:
        y, classes = (y % 2 == 0).astype(np.float64), 2
        inputs["names"] = ["odd", "even"]
    silo = rows.get("silo")
    what = "scaled by public constants"
    if not task.scaled:
        public = int(np.searchsorted(chance, config.public_fraction or 0.0))
        if public < 2 or public >= len(y):
            raise BadInputError(
                f"data.public_fraction={config.public_fraction} leaves {public} of {len(y)} "
                "records to set the scale: it must leave at least 2, and others to train on"
            )
        mean, spread = x[:public].mean(0), x[:public].std(0)
        spread = np.where(spread > 0, spread, 1.0)
        x = (x - mean) / spread
        inputs["scale"] = [mean.tolist(), spread.tolist()]
        if not classes:
            middle, width = float(y[:public].mean()), max(float(y[:public].std()), 1e-12)
            y = (y - middle) / width
            inputs["target"] = [middle, width]
        x, y, fine = x[public:], y[public:], fine[public:]
        silo = None if silo is None else silo[public:]
        held_chance = held_chance[public:]
        what = f"scaled by {public} records declared public"
    if not classes:
        y = np.clip(y, -config.max_target, config.max_target)
    if signed and classes == 2:
        y = 2 * y - 1
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    # Each record is bounded by itself, so that it depends on no other record.
    x *= np.minimum(1.0, config.max_norm / np.linalg.norm(x, axis=1, keepdims=True))
    parts = _cut(federation, fine, silo, task.classes)
    train, test = [], []
    for part in parts:
        # In natural silos each record is held out by chance; silos that are cut here stay equal.
        held = round(config.validation_fraction * len(part))
        if federation.partition == "natural":
            out = held_chance[part] < config.validation_fraction
            part, held = np.concatenate([part[out], part[~out]]), int(out.sum())
        if held < 1 or len(part) - held < 1:
            raise BadInputError(
                f"a silo of {len(part)} records cannot be split: use fewer silos than "
                f"{federation.silos}, or more records"
            )
        test.append((x[part[:held]], y[part[:held]]))
        train.append((x[part[held:]], y[part[held:]]))
    sizes = [len(v) for _, v in train]
    between = f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else f"{sizes[0]}"
    description = (
        f"{config.source}: {federation.silos} silos ({federation.partition}) of {between} records "
        f"in training, {sum(len(v) for _, v in test)} held out; {x.shape[1]} features, {what}"
        f"{loaded.left_out}"
    )
    digest = hashlib.sha256()
    for a, b in train:
        digest.update(np.int64(len(b)).tobytes() + a.astype("<f8").tobytes() + b.tobytes())
    return SiloRecords(
        padded(train),
        padded(test),
        classes,
        x.shape[1],
        description,
        digest.hexdigest(),
        f"row (users by {unit_key_of(loaded.store)})",
        task,
        loaded.store.num_users < loaded.store.num_examples,
        not task.scaled,
        inputs,
    )


def _chances(store: Store, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two numbers in [0, 1) for each record, fixed functions of its user's id and its number."""
    users = np.repeat(np.arange(store.num_users), store.examples_per_user)
    keys, numbers = subject_keys(store, seed)[users], record_numbers(users)
    return uniforms(keys, numbers, seed, 7), uniforms(keys, numbers, seed, 8)


def padded(parts: list[tuple[np.ndarray, np.ndarray]]) -> SiloData:
    """Returns silos of unequal sizes as arrays [silos, largest size, ...], padded with zeros."""
    n = max(len(y) for _, y in parts)
    x = np.zeros((len(parts), n, parts[0][0].shape[1]), np.float32)
    y = np.zeros((len(parts), n), np.float32)
    for i, (a, b) in enumerate(parts):
        x[i, : len(b)], y[i, : len(b)] = a, b
    sizes = jnp.asarray([len(b) for _, b in parts], jnp.int32)
    return SiloData({"x": jnp.asarray(x), "y": jnp.asarray(y)}, sizes)


def _cut(
    federation: FederationConfig,
    fine: np.ndarray,
    silo: np.ndarray | None,
    classes: int,
) -> list[np.ndarray]:
    """The indices of each silo's records, disjoint."""
    silos = federation.silos
    if federation.partition == "natural":
        if silo is None and silos == 1:  # all records are of the only silo
            silo = np.zeros(len(fine), np.int64)
        if silo is None:
            raise BadInputError(
                "federation.partition=natural needs records that name their silo: set "
                "data.silo_column, or use uniform or sorted"
            )
        count = int(silo.max()) + 1
        if count != silos:
            raise BadInputError(
                f"federation.silos is {silos}, but the data have {count} silos of their own: set "
                f"federation.silos={count} for federation.partition=natural"
            )
        parts = [np.flatnonzero(silo == i) for i in range(silos)]
    elif federation.partition == "pairs":
        if classes != 10 or silos not in (5, 25):
            raise BadInputError(
                "federation.partition=pairs gives a silo an even and an odd digit: it needs digits "
                "or mnist, and 5 or 25 silos"
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
    elif federation.partition == "sorted":
        parts = np.array_split(np.argsort(fine, kind="stable"), silos)
    else:
        parts = np.array_split(np.arange(len(fine)), silos)
    return [np.sort(part) for part in parts]
