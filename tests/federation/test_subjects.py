"""Where subjects come from: embedded data, and real files where they are."""

import numpy as np
import pytest

from dpfl_jax.config import RunConfig
from dpfl_jax.data import DataConfig
from dpfl_jax.data.sets import LEAF_CHARACTERS
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.federated_run import spread
from dpfl_jax.federation.partition import load_subjects
from dpfl_jax.models import build_by_name


def test_digits_have_declared_synthetic_writers():
    pytest.importorskip("sklearn")
    config = DataConfig(source="digits", validation_fraction=0.2, records_per_user=15)
    data = load_subjects(config)
    assert data.train.num_users + data.held_out.num_users == 120
    assert data.train.num_examples + data.held_out.num_examples == 1797
    assert "synthetic" in data.description
    ids = set(data.train.user_ids(range(data.train.num_users)))
    assert not ids & set(data.held_out.user_ids(range(data.held_out.num_users)))
    first = data.train.read(np.arange(15))
    assert first["x"].shape == (15, 8, 8)
    assert 0 <= first["x"].min() <= first["x"].max() <= 1
    assert load_subjects(config).train.fingerprint == data.train.fingerprint


def test_splitting_by_record_keeps_every_subject_on_both_sides():
    pytest.importorskip("sklearn")
    config = DataConfig(
        source="digits", validation_fraction=0.2, records_per_user=15, split="within_user"
    )
    data = load_subjects(config)
    names = [set(p.user_ids(range(p.num_users))) for p in (data.train, data.held_out)]
    assert names[0] == names[1]
    assert data.train.num_examples + data.held_out.num_examples == 1797


@pytest.mark.nightly
def test_the_embedded_corpus_needs_no_files_and_fits_the_transformer():
    raw = {
        "data": {
            "source": "python_source",
            "seq_len": 16,
            "max_users": 50,
            "max_examples_per_user": 4,
        },
        "federation": {"rounds": 1, "local_steps": 1, "silos": 3},
        "model": {"kind": "transformer", "options": {"num_layers": 1, "embed_dim": 16}},
        "mechanism": {"kind": "local_item", "sampling_prob": 0.1},
        "privacy": {"epsilon": 8.0},
    }
    config = RunConfig.model_validate(raw)
    data = load_subjects(config.data)
    model = build_by_name(config.model.kind, data.task, config.model.options)
    assert model.num_params > 0
    spread_data = spread(data.train, config)
    assert spread_data.largest_counts().max() == 1
    assert spread_data.num_silos == 3
    with pytest.raises(BadInputError, match=r"model\.kind=cnn does not fit .*: use transformer"):
        build_by_name("cnn", data.task, {})


def test_femnist_sample_in_leafs_format(data_dir):
    config = DataConfig(
        source="femnist", path=str(data_dir / "femnist_leaf_sample"), split="within_user"
    )
    data = load_subjects(config)
    assert data.task.classes == 62
    assert data.train.num_users == 5
    assert data.train.read(np.arange(2))["x"].shape == (2, 28, 28)


def test_shakespeare_windows_are_those_of_the_text(data_dir):
    config = DataConfig(
        source="characters",
        path=str(data_dir / "shakespeare_plays"),
        seq_len=20,
        stride=7,
        max_users=30,
        max_examples_per_user=40,
    )
    data = load_subjects(config)
    assert data.task.classes == 81
    windows = data.train.read(np.arange(min(2000, data.train.num_examples)))
    # Consecutive windows of a subject overlap by all but seven characters.
    first, second = windows["x"][0], windows["x"][1]
    np.testing.assert_array_equal(first[7:], second[:-7])
    assert windows["label"][0] == second[13]
    characters = [LEAF_CHARACTERS[i - 1] for i in windows["x"].ravel() if i > 0]
    assert characters.count("e") > len(characters) * 0.06
    assert (windows["x"] == 0).mean() < 0.02


def test_missing_files_are_named(tmp_path):
    with pytest.raises(BadInputError, match=r"data\.path"):
        load_subjects(DataConfig(source="femnist"))
    with pytest.raises(BadInputError, match="does not exist"):
        load_subjects(DataConfig(source="mnist", path=str(tmp_path / "no")))
