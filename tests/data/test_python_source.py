"""The embedded default corpus, on the packages that happen to be installed."""

import hashlib

import numpy as np
import pytest

from dpfl_jax.data import ByteTokenizer, DataConfig, load_dataset
from dpfl_jax.data.python_source import installed_package_files, standard_library_files


@pytest.fixture(scope="module")
def private():
    return installed_package_files()


@pytest.mark.nightly
def test_users_are_distinct_third_party_files(private):
    assert len(private) > 1000
    public = {hashlib.sha256(d).digest() for d in standard_library_files(with_tests=True).values()}
    digests = [hashlib.sha256(d).digest() for d in private.values()]
    assert len(set(digests)) == len(digests)
    assert not public & set(digests)
    assert all(d.strip() for d in private.values())
    assert not any(u.startswith("dpfl_jax/") for u in private)
    assert any(u.startswith("jax/") for u in private)
    assert not any(u.startswith(("jax/", "numpy/")) for u in standard_library_files())
    sizes = np.sort([len(d) for d in private.values()])
    assert sizes[-len(sizes) // 10 :].sum() > 0.4 * sizes.sum()  # heavy tail


@pytest.mark.nightly
def test_loads_split_and_repeats(private):
    config = DataConfig(max_users=200, max_examples_per_user=20)
    data, again = load_dataset(config), load_dataset(config)
    assert data.train.fingerprint == again.train.fingerprint
    assert data.public is not None
    parts = [data.train, data.validation, data.test]
    assert sum(p.num_users for p in parts) == 200
    ids = [u for p in parts for u in p.user_ids(range(p.num_users))]
    assert len(set(ids)) == 200
    assert data.train.examples_per_user.max() <= 20
    user = data.train.user_ids([0])[0]
    batch = data.train.read(np.arange(data.train.user_offsets[1]))
    text = ByteTokenizer().decode(batch["tokens"][batch["mask"]])
    assert private[user].decode().startswith(text.rstrip("\ufffd"))


@pytest.mark.nightly
def test_public_corpus_can_be_left_out():
    assert load_dataset(DataConfig(max_users=50, public="none")).public is None
