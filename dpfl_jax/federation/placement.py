"""Which silo holds which record: by a configuration's partition, then capped."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from dpfl_jax.config import RunConfig
from dpfl_jax.data.store import Store
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.data import FederatedData
from dpfl_jax.federation.partition import assign_by_labels, assign_to_silos, cap_per_subject


def subject_keys(store: Store, seed: int) -> np.ndarray:
    """uint64 [num_users]: a keyed hash of each subject's id."""
    key = hashlib.sha256(b"dpfl_jax silo partition %d" % seed).digest()
    words = [
        hashlib.blake2b(name.encode(), digest_size=8, key=key).digest()
        for name in store.user_ids(range(store.num_users))
    ]
    return np.frombuffer(b"".join(words), "<u8").copy()


def _field(store: Store, name: str, partition: str) -> np.ndarray:
    if name not in {field.name for field in store.schema.fields}:
        raise BadInputError(
            f"federation.partition={partition} needs a field {name!r}, which these data do not "
            "have: use uniform, power or confined"
        )
    return np.asarray(store.read(np.arange(store.num_examples))[name], np.int64)


def own_silos(store: Store, num_silos: int) -> np.ndarray:
    """The silo that each record of a store says it is in, int64 [n].

    Raises:
      BadInputError: records without a silo, or more silos than ``num_silos``.
    """
    silos = _field(store, "silo", "natural")
    if len(silos) and int(silos.max()) >= num_silos:
        raise BadInputError(
            f"the data have records of silo {int(silos.max())}, counted from 0: set "
            f"federation.silos to {int(silos.max()) + 1} for federation.partition=natural"
        )
    return silos


def spread(store: Store, config: RunConfig, classes: int | None = None) -> FederatedData:
    """Spreads a store's subjects over silos, and caps them.

    Args:
      store: what is spread; its users are the subjects.
      config: its ``federation`` and ``mechanism`` sections.
      classes: number of classes, for ``partition=labels``; default from the labels.
    """
    section = config.federation
    subjects = np.repeat(np.arange(store.num_users), store.examples_per_user)
    keys = subject_keys(store, section.partition_seed)
    if section.partition == "natural":
        silos = own_silos(store, section.silos)
    elif section.partition == "labels":
        labels = _field(store, "label", "labels")
        most = int(labels.max(initial=0)) + 1 if classes is None else classes
        silos = assign_by_labels(subjects, keys, labels, section.silos, most)
    else:
        how: Any = section.partition
        silos = assign_to_silos(subjects, keys, section.silos, how, alpha=section.alpha)
    keep = None
    if config.mechanism.private:
        keep = capped(config, subjects, silos, keys)
    return FederatedData.from_assignment(store, subjects, silos, section.silos, keep)


def capped(
    config: RunConfig, subjects: np.ndarray, silos: np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """The records that the cap per subject and silo leaves, bool [n].

    Raises:
      BadInputError: of personal budgets, which take one record of a subject, some would be left out
        that nobody said may be.
    """
    participation = config.mechanism.participation
    keep = cap_per_subject(subjects, silos, keys, participation.max_records_per_subject)
    if participation.personal and not keep.all():
        raise BadInputError(
            "mechanism.kind=rpdp protects records, one of a user in a silo, but users have "
            "several: set data.user_column=null to train on every row as a person of its own, or "
            "data.max_examples_per_user=1 to train on the first of each user alone"
        )
    return keep
