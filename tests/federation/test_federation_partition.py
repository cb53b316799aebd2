"""Spreading and capping subjects: each decision looks at one subject alone."""

import numpy as np
import pytest

from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.data import ArrayRecords, FederatedData
from dpfl_jax.federation.partition import (
    assign_to_silos,
    cap_per_subject,
    record_numbers,
)


def population(subjects=200, items=30, seed=0):
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 2**63, subjects).astype(np.uint64)
    return rng.permutation(np.repeat(np.arange(subjects), items)), keys


def test_uniform_and_power_law_have_the_stated_masses():
    subjects, keys = population(400, 50)
    uniform = np.bincount(assign_to_silos(subjects, keys, 16), minlength=16)
    assert np.abs(uniform / len(subjects) - 1 / 16).max() < 5 * np.sqrt(1 / 16 / len(subjects))
    for a in (1.0, 4.0, 16.0):
        rank = assign_to_silos(subjects, keys, 16, "power", alpha=a, order="common")
        edges = (np.arange(17) / 16) ** a
        mass = np.bincount(rank, minlength=16) / len(rank)
        assert np.abs(mass - np.diff(edges)).max() < 5 * np.sqrt(0.25 / len(rank))
    skewed = assign_to_silos(subjects, keys, 16, "power", alpha=16.0)
    # An order per subject keeps the silos equal, and gives each subject a home.
    assert np.bincount(skewed, minlength=16).min() > 0.6 * len(subjects) / 16
    home = [np.bincount(skewed[subjects == s]).max() / 50 for s in range(400)]
    assert np.mean(home) == pytest.approx(1 - (15 / 16) ** 16, abs=0.03)


def test_confined_subjects_have_one_silo():
    subjects, keys = population()
    silos = assign_to_silos(subjects, keys, 7, "confined")
    assert all(len(np.unique(silos[subjects == s])) == 1 for s in range(200))
    assert len(np.unique(silos)) == 7


@pytest.mark.parametrize("how", ["uniform", "power", "confined"])
def test_removing_a_subject_moves_and_drops_nothing_of_the_others(how):
    subjects, keys = population(60, 20)
    silos = assign_to_silos(subjects, keys, 5, how, alpha=3.0)
    keep = cap_per_subject(subjects, silos, keys, 3)
    rest = subjects != 17
    fewer = subjects[rest] - (subjects[rest] > 17)
    silos_without = assign_to_silos(fewer, np.delete(keys, 17), 5, how, alpha=3.0)
    np.testing.assert_array_equal(silos[rest], silos_without)
    kept = cap_per_subject(fewer, silos_without, np.delete(keys, 17), 3)
    np.testing.assert_array_equal(keep[rest], kept)


def test_caps_hold_in_every_silo_and_keep_what_they_can():
    subjects, keys = population(60, 20)
    silos = assign_to_silos(subjects, keys, 4)
    keep = cap_per_subject(subjects, silos, keys, 3)
    pairs, counts = np.unique(np.stack([subjects, silos]), axis=1, return_counts=True)
    kept = {tuple(p): 0 for p in pairs.T}
    for s, i in zip(subjects[keep], silos[keep]):
        kept[s, i] += 1
    assert all(kept[tuple(p)] == min(3, c) for p, c in zip(pairs.T, counts))


def test_federated_data_sorts_records_and_finds_them_again():
    subjects, keys = population(40, 10)
    silos = assign_to_silos(subjects, keys, 6, "power", alpha=2.0)
    keep = cap_per_subject(subjects, silos, keys, 2)
    records = ArrayRecords({"subject": subjects, "silo": silos})
    data = FederatedData.from_assignment(records, subjects, silos, 7, keep=keep)
    assert data.num_records == keep.sum()
    assert data.num_silos == 7
    assert data.silos[6].num_records == 0
    for silo in data.silos:
        stop = silo.first + silo.num_records
        found = data.read(np.arange(silo.first, stop))
        assert (found["silo"] == silo.index).all()
        np.testing.assert_array_equal(found["subject"], data.subjects[silo.first : stop])
        assert (np.diff(found["subject"]) >= 0).all()
        assert len(np.unique(found["subject"])) == silo.num_subjects
        np.testing.assert_array_equal(
            np.unique(silo.subject_of_record), np.arange(silo.num_subjects)
        )
    assert data.largest_counts().max() == 2
    assert data.silos_of_subjects().max() <= 6


def test_record_numbers_count_within_a_subject():
    np.testing.assert_array_equal(record_numbers(np.array([5, 2, 5, 5, 2])), [0, 0, 1, 2, 1])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"num_silos": 0}, "at least 1"), ({"alpha": 0.5}, "alpha"), ({"how": "zipf"}, "partition")],
)
def test_bad_spreads_are_named(kwargs, message):
    subjects, keys = population(5, 2)
    with pytest.raises(BadInputError, match=message):
        assign_to_silos(subjects, keys, **{"num_silos": 3} | kwargs)
