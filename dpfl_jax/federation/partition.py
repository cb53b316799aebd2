"""Spreading subjects over silos, and capping what one subject has in one silo.

Where a record goes and whether it is kept depends on its subject alone (a keyed hash of its id and
of the record's number within the subject): adding or removing a subject moves nothing of another's.

Source of the skewed spread: Marathe et al., "Subject Granular Differential Privacy in Federated
Learning", section 5: the power law P(x; a) = a x^(a-1) on [0, 1], a = 1 being uniform. How x picks
a silo is not said there; here x is drawn per record, its silo is the floor(n x)-th in an order of
the silos that is permuted independently for each subject (a common order leaves the number of
subjects in a batch unchanged, which is not what the paper reports).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from dpfl_jax.errors import BadInputError

Spread = Literal["uniform", "power", "confined"]
_BLOCK = 1 << 22


def mixed(*words: np.ndarray | int) -> np.ndarray:
    """Mixes uint64 words, broadcast together, into well-spread ones (SplitMix64 rounds)."""
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
    """Numbers in [0, 1) that are a fixed function of the words; float64."""
    return (mixed(*words) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def record_numbers(subjects: np.ndarray) -> np.ndarray:
    """int64 [n]: how many earlier records the subject of each record has."""
    order = np.argsort(subjects, kind="stable")
    ordered = subjects[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    run = np.diff(np.concatenate([starts, [len(ordered)]]))
    numbers = np.empty(len(subjects), np.int64)
    numbers[order] = np.arange(len(subjects)) - np.repeat(starts, run)
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
      order: of the silos that the power law ranks: one per subject, or the same for all.

    Returns:
      int64 [n], silo of each record.

    Raises:
      BadInputError: no silo, or alpha below 1.
    """
    if num_silos < 1:
        raise BadInputError(f"federation.silos is {num_silos}, but it must be at least 1")
    if not alpha >= 1.0:
        raise BadInputError(f"federation.alpha is {alpha}, but it must be 1 (uniform) or more")
    subjects = np.asarray(subjects, np.int64)
    keys = np.asarray(subject_keys, np.uint64)
    if how == "confined":
        return np.floor(num_silos * uniforms(keys, 0, 1)).astype(np.int64)[subjects]
    numbers = record_numbers(subjects)
    x = uniforms(keys[subjects], numbers, 0, 2)
    if how == "uniform":
        return np.floor(num_silos * x).astype(np.int64)
    if how != "power":
        raise BadInputError(
            f"federation.partition is {how!r}, but it must be uniform, power or confined"
        )
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

    Silo i holds the ceil(classes / 2) classes from number i * classes / silos on, cyclically: a
    public table. A record goes to one of the silos that hold its class, by a hash of its own id.
    (As the non-IID split of Liu et al. 2024, whose ten silos hold five digits each.)

    Args:
      subjects: int [n], subject of each record.
      subject_keys: uint64 [num_subjects], a hash of each subject's id.
      labels: int [n], in 0..num_classes-1.
      num_silos: number of silos.
      num_classes: number of classes.

    Returns:
      int64 [n], silo of each record.

    Raises:
      BadInputError: a label out of range, or a class that no silo holds.
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
            f"{num_silos} silos of half of the classes each do not hold all {num_classes}: "
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
    """Which records stay when a subject may have at most ``cap`` in each silo.

    The choice ranks a subject's records in a silo by a hash of its id and the record's number
    there: it looks at nothing but that subject in that silo, so that a cap never makes one person's
    records depend on another's, and a silo can apply it alone.

    Args:
      subjects: int [n], subject of each record.
      silos: int [n], silo of each record.
      subject_keys: uint64 [num_subjects], a hash of each subject's id.
      cap: K, at least 1.

    Returns:
      bool [n].
    """
    if cap < 1:
        raise BadInputError(f"max_records_per_subject is {cap}, but it must be at least 1")
    subjects, silos = np.asarray(subjects, np.int64), np.asarray(silos, np.int64)
    if not len(subjects):
        return np.zeros(0, bool)
    # Of its place in this silo: a silo knows no other one's records.
    numbers = record_numbers(subjects * (int(silos.max()) + 1) + silos)
    # proof: cap-1
    ticket = mixed(np.asarray(subject_keys, np.uint64)[subjects], numbers, 0, 4)
    order = np.lexsort((ticket, subjects, silos))
    new = np.diff(subjects[order], prepend=-1) != 0
    new |= np.diff(silos[order], prepend=-1) != 0
    starts = np.flatnonzero(new)
    run = np.diff(np.concatenate([starts, [len(order)]]))
    rank = np.arange(len(order)) - np.repeat(starts, run)
    keep = np.zeros(len(order), bool)
    keep[order] = rank < cap
    return keep
