"""Silos of a table: replacing a record, its owner's name too, moves no other record."""

import csv

import numpy as np
import pytest

from dpfl_jax.config.schema import FederationConfig
from dpfl_jax.data import DataConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl.silos import load_silos

SILOS, RECORDS = ("north", "south", "west"), 300


def silos(folder, changed=None, **settings):
    path = folder / "table.csv"
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["who", "site", "a", "y"])
        for i in range(RECORDS):
            a, y = rng.normal(size=2)
            if i == changed:
                writer.writerow(["somebody else", SILOS[i % 3], 5.0, -5.0])
            else:
                writer.writerow([f"p{i}", SILOS[i % 3], a, y])
    federation = FederationConfig(silos=settings.pop("silos", 3), partition="natural")
    settings = {"validation_fraction": 0.2, "public_fraction": 0.1} | settings
    settings = {"scale": {"a": (0.0, 1.0)}} | settings
    config = DataConfig(
        source="csv",
        path=str(path),
        user_column="who",
        silo_column="site",
        target_column="y",
        **settings,
    )
    return load_silos(config, federation, softmax=False, signed=False)


def records(found, silo):
    n = int(found.train.sizes[silo])
    x, y = (np.asarray(found.train.examples[name])[silo][:n] for name in ("x", "y"))
    return {tuple(row) for row in np.concatenate([x, y[:, None]], axis=1).round(5).tolist()}


def test_one_record_changes_one_record(tmp_path):
    """The guarantee is for replacing a record; whoever it is of must not move the others."""
    before = silos(tmp_path)
    for changed in (0, 1, 77, 299):
        after = silos(tmp_path, changed)
        for silo in range(3):
            old, new = records(before, silo), records(after, silo)
            most = 1 if silo == changed % 3 else 0
            assert len(old - new) <= most
            assert len(new - old) <= most


def test_public_records_are_named_and_chosen_one_by_one(tmp_path):
    before = silos(tmp_path, scale={})
    assert before.public
    assert not silos(tmp_path).public
    told = int(before.description.partition("scaled by ")[2].split()[0])
    assert abs(told - 0.1 * RECORDS) < 25  # five standard deviations of a binomial
    held = int(before.test.sizes.sum())
    assert int(before.train.sizes.sum()) + held + told == RECORDS


def test_silos_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(BadInputError, match=r"set federation\.silos=3"):
        silos(tmp_path, silos=4)
    config, federation = DataConfig(source="breast_cancer"), FederationConfig(partition="natural")
    with pytest.raises(BadInputError, match="name their silo"):
        load_silos(config, federation, softmax=False, signed=False)
