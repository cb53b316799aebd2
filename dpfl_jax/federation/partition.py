"""Which subjects are held out, which silo holds which record, and caps per subject.

Where a record goes, and whether it is kept, depends only on its subject: on a keyed hash of the
subject's id and the record's number within the subject. So adding or removing a subject moves no
other subject's records.

Source of the skewed spread: Marathe et al., "Subject Granular Differential Privacy in Federated
Learning", section 5: the power law P(x; a) = a x^(a-1) on [0, 1], where a = 1 is uniform. The paper
does not say how x picks a silo. Here x is drawn per record, and the record goes to the
floor(n x)-th silo in an order that is permuted independently for each subject. (A common order
would leave the number of subjects in a batch unchanged, which is not what the paper reports.)
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from dpfl_jax.config import RunConfig
from dpfl_jax.data import DataConfig
from dpfl_jax.data.load import hold_out, load_examples, rule_of
from dpfl_jax.data.store import Store
from dpfl_jax.errors import BadInputError, at_least, one_of
from dpfl_jax.federation.data import FederatedData
from dpfl_jax.sampling.samplers import places_in_runs
from dpfl_jax.task import Task

Spread = Literal["uniform", "power", "confined"]
_BLOCK = 1 << 22


def mixed(*words: np.ndarray | int) -> np.ndarray:
    """Returns a hash of uint64 words, broadcast together (SplitMix64 rounds)."""
    state = np.uint64(0x9E3779B97F4A7C15)
    out = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            out = out ^ np.asarray(word, np.uint64)
            out = out + state
            out = (out ^ (out >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            out = (out ^ (out >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            out = out ^ (out >> np.uint64(31))
    return out


def uniforms(*words: np.ndarray | int) -> np.ndarray:
    """Returns float64 numbers in [0, 1) that are a fixed function of the words."""
    return (mixed(*words) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def record_numbers(subjects: np.ndarray) -> np.ndarray:
    """Returns how many earlier records the subject of each record has, int64 [n]."""
    order = np.argsort(subjects, kind="stable")
    numbers = np.empty(len(subjects), np.int64)
    numbers[order] = places_in_runs(subjects[order])
    return numbers


def assign_to_silos(
    subjects: np.ndarray,
    subject_keys: np.ndarray,
    num_silos: int,
    how: Spread = "uniform",
    *,
    alpha: float = 1.0,
    order: Literal["per_subject", "common"] = "per_subject",
) -> np.ndarray:
    """Chooses the silo of each record.

    Args:
      subjects: int [n], subject of each record.
      subject_keys: uint64 [num_subjects], a hash of each subject's id.
      num_silos: number of silos.
      how: ``"uniform"`` (each record anywhere), ``"power"`` (skewed by ``alpha``), ``"confined"``
        (all records of a subject in one silo).
      alpha: a >= 1 of the power law; 1 is uniform.
      order: whether the power law ranks silos in one order per subject, or in one for all.

    Returns:
      int64 [n], silo of each record.

    Raises:
      BadInputError: there is no silo, or alpha is below 1.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.federation import assign_to_silos
      >>> subjects, keys = np.array([0, 0, 1, 1]), np.array([11, 12], np.uint64)
      >>> silos = assign_to_silos(subjects, keys, num_silos=3, how="confined")
      >>> silos.shape, len(set(silos[:2].tolist()))  # a subject is in one silo
      ((4,), 1)
    """
    at_least("federation.silos", num_silos, 1)
    at_least("federation.alpha", alpha, 1, advice="1 is uniform")
    one_of("federation.partition", how, get_args(Spread))
    subjects = np.asarray(subjects, np.int64)
    keys = np.asarray(subject_keys, np.uint64)
    if how == "confined":
        return np.floor(num_silos * uniforms(keys, 0, 1)).astype(np.int64)[subjects]
    numbers = record_numbers(subjects)
    x = uniforms(keys[subjects], numbers, 0, 2)
    if how == "uniform":
        return np.floor(num_silos * x).astype(np.int64)
    rank = np.floor(num_silos * x ** (1.0 / alpha)).astype(np.int64)
    if order == "common":
        return rank
    silos = np.empty(len(subjects), np.int64)
    step = max(1, _BLOCK // num_silos)
    by_subject = np.argsort(subjects, kind="stable")
    ordered = subjects[by_subject]
    for low in range(0, len(keys), step):
        block = keys[low : low + step]
        tickets = uniforms(block[:, None], np.arange(num_silos)[None, :], 0, 3)
        permuted = np.argsort(tickets, axis=1, kind="stable")
        begin, end = np.searchsorted(ordered, [low, low + len(block)])
        some = by_subject[begin:end]
        silos[some] = permuted[subjects[some] - low, rank[some]]
    return silos


def assign_by_labels(
    subjects: np.ndarray,
    subject_keys: np.ndarray,
    labels: np.ndarray,
    num_silos: int,
    num_classes: int,
) -> np.ndarray:
    """Chooses the silo of each record so that each silo holds half of the classes.

    By a public table, silo i holds the ceil(classes / 2) classes from number i * classes / silos
    on, cyclically. A record goes to one of the silos that hold its class, by a hash of its
    subject's id. (In the non-IID split of Liu et al. 2024, ten silos hold five digits each.)

    Args:
      subjects: int [n], subject of each record.
      subject_keys: uint64 [num_subjects], a hash of each subject's id.
      labels: int [n], in 0..num_classes-1.
      num_silos: number of silos.
      num_classes: number of classes.

    Returns:
      int64 [n], silo of each record.

    Raises:
      BadInputError: a label is out of range, or no silo holds some class.
    """
    labels = np.asarray(labels, np.int64)
    if num_classes < 2 or (len(labels) and not 0 <= labels.min() <= labels.max() < num_classes):
        raise BadInputError(
            f"federation.partition=labels needs labels in 0..{num_classes - 1} of two classes or "
            "more: use another partition for these data"
        )
    first = np.arange(num_silos) * num_classes // num_silos
    held = (np.arange(num_classes)[:, None] - first[None, :]) % num_classes < -(-num_classes // 2)
    if not held.any(axis=1).all():
        raise BadInputError(
            f"{num_silos} silos with half of the classes each do not hold all {num_classes}: "
            "set federation.silos to 2 or more for federation.partition=labels"
        )
    counts = held.sum(axis=1)
    table = np.argsort(~held, axis=1, kind="stable")  # silos of each class first
    subjects = np.asarray(subjects, np.int64)
    x = uniforms(np.asarray(subject_keys, np.uint64)[subjects], record_numbers(subjects), 0, 6)
    return table[labels, np.floor(x * counts[labels]).astype(np.int64)].astype(np.int64)


def cap_per_subject(
    subjects: np.ndarray,
    silos: np.ndarray,
    subject_keys: np.ndarray,
    cap: int,
) -> np.ndarray:
    """Chooses the records that are kept if a subject may have at most ``cap`` in each silo.

    A subject's records in a silo are ranked by a hash of the subject's id and the record's number
    in the silo. So a cap never makes one person's records depend on another's, and each silo can
    apply it alone.

    Args:
      subjects: int [n], subject of each record.
      silos: int [n], silo of each record.
      subject_keys: uint64 [num_subjects], a hash of each subject's id.
      cap: most records of a subject in a silo, at least 1.

    Returns:
      bool [n], whether each record is kept.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.federation import cap_per_subject
      >>> subjects, silos = np.array([0, 0, 0, 1]), np.zeros(4, int)
      >>> int(cap_per_subject(subjects, silos, np.array([11, 12], np.uint64), cap=2).sum())
      3
    """
    at_least("max_records_per_subject", cap, 1)
    subjects, silos = np.asarray(subjects, np.int64), np.asarray(silos, np.int64)
    if not len(subjects):
        return np.zeros(0, bool)
    # A record's number counts within its silo, because a silo does not know other silos' records.
    groups = subjects * (int(silos.max()) + 1) + silos
    numbers = record_numbers(groups)
    # proof: cap-1
    ticket = mixed(np.asarray(subject_keys, np.uint64)[subjects], numbers, 0, 4)
    order = np.lexsort((ticket, groups))
    keep = np.zeros(len(order), bool)
    keep[order] = places_in_runs(groups[order]) < cap
    return keep


@dataclasses.dataclass(frozen=True)
class SubjectData:
    """The subjects of a data set, split into training and held-out data.

    Attributes:
      train: the store that is spread over silos; its users are the subjects.
      held_out: the store that is evaluated.
      description: one line about the data.
      task: what is learned.
      rule: how ``held_out`` was chosen, in words.
    """

    train: Store
    held_out: Store
    description: str
    task: Task
    rule: str = ""


def load_subjects(config: DataConfig, keep: Sequence[str] = ()) -> SubjectData:
    """Reads and splits the data of a configuration.

    Args:
      config: the section ``data``.
      keep: further columns to keep in a table's records, such as a budget.

    Raises:
      BadInputError: a file or package is missing, or a part of the split is empty.
    """
    loaded = load_examples(config, keep)
    fractions = {"held_out": config.validation_fraction}
    parts = hold_out(loaded.store, config, fractions, config.split)
    train, held_out = parts["train"], parts["held_out"]
    description = (
        f"{config.source}: {train.num_users} subjects with {train.num_examples} records "
        f"(before the cap per silo) in training, {held_out.num_users} with "
        f"{held_out.num_examples} held out; a subject is {loaded.unit}{loaded.left_out}"
    )
    rule = rule_of(config, config.split, "validation", config.validation_fraction)
    return SubjectData(train, held_out, description, loaded.task, rule)


def subject_keys(store: Store, seed: int) -> np.ndarray:
    """Returns a keyed hash of each subject's id, uint64 [num_users]."""
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


def silos_of_records(store: Store, num_silos: int) -> np.ndarray:
    """Returns the silo that is stored with each record, int64 [n].

    Raises:
      BadInputError: records have no silo, or there are more silos than ``num_silos``.
    """
    silos = _field(store, "silo", "natural")
    if len(silos) and int(silos.max()) >= num_silos:
        raise BadInputError(
            f"the data have records of silo {int(silos.max())}, counted from 0: set "
            f"federation.silos to {int(silos.max()) + 1} for federation.partition=natural"
        )
    return silos


def spread(store: Store, config: RunConfig, classes: int | None = None) -> FederatedData:
    """Spreads a store's records over silos, and applies the cap per subject.

    Args:
      store: the records; its users are the subjects.
      config: the configuration, of which ``federation`` and ``mechanism`` are used.
      classes: number of classes, for ``partition=labels``; None: from the labels.
    """
    section = config.federation
    subjects = np.repeat(np.arange(store.num_users), store.examples_per_user)
    keys = subject_keys(store, section.partition_seed)
    if section.partition == "natural":
        silos = silos_of_records(store, section.silos)
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
    """Returns whether the cap per subject and silo keeps each record, bool [n].

    Raises:
      BadInputError: records have personal budgets, and the cap of one record per subject would drop
        some, which the configuration must allow first.
    """
    participation = config.mechanism.participation
    keep = cap_per_subject(subjects, silos, keys, participation.max_records_per_subject)
    if participation.personal and not keep.all():
        raise BadInputError(
            "mechanism.kind=rpdp takes one record of each user in a silo, but users have several: "
            "set data.user_column=null to treat every row as another person, or "
            "data.max_examples_per_user=1 to train only on the first record of each user"
        )
    return keep
