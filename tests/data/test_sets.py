"""The papers' sets: real files where there are any, made ones in the same formats otherwise."""

import gzip
import hashlib
import json
import struct

import numpy as np
import pyarrow as pa
import pytest

from dpfl_jax.cli.main import main
from dpfl_jax.data import ByteTokenizer, DataConfig, SourceConfig, load_dataset, load_examples
from dpfl_jax.data.keys import base_domain
from dpfl_jax.data.sets import SETS, SHAKESPEARE, installed_package_files, standard_library_files
from dpfl_jax.data.shards import open_store
from dpfl_jax.errors import BadInputError

TOKENIZER = ByteTokenizer()


def load_set(name, path, seq_len=8):
    path = None if path is None else str(path)
    return load_examples(SourceConfig(source=name, path=path, seq_len=seq_len))


def texts_of(store, user):
    names = store.user_ids(range(store.num_users))
    u = names.index(user)
    batch = store.read(np.arange(*store.user_offsets[u : u + 2]))
    ids = np.concatenate([t[m] for t, m in zip(batch["tokens"], batch["mask"])])
    pieces = [TOKENIZER.decode(piece) for piece in np.split(ids, np.flatnonzero(ids == 2))]
    return [piece for piece in pieces if piece]


# ---- real files -------------------------------------------------------------------------------


@pytest.mark.nightly
def test_shakespeare_plays_from_the_command_line(data_dir, tmp_path, capsys):
    out = tmp_path / "store"
    folder = str(data_dir / "shakespeare_plays")
    command = ["data", "build", "--source", "shakespeare", "--input", folder, "--out", str(out)]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result["users"] == 1567
    store = open_store(out)
    store.verify()
    speeches = {}
    with gzip.open(data_dir / "shakespeare_plays" / "speeches.jsonl.gz", "rt") as file:
        for line in file:
            row = json.loads(line)
            speeches.setdefault(f"{row['play']}/{row['speaker']}", []).append(row["text"])
    users = ("hamlet/Hamlet", "alls-well-that-ends-well/Lafew")
    for user in users:
        # An end mark that would be alone in a row is left out: compare the whole text.
        assert "".join(texts_of(store, user)) == "".join(speeches[user])
    # The same by a key expression, with no knowledge of the set.
    same = tmp_path / "same"
    pattern = str(data_dir / "shakespeare_plays" / "speeches.jsonl.gz")
    command = ["data", "build", "--input", pattern, "--user-column", "{play}/{speaker}"]
    assert main([*command, "--out", str(same), "--workers", "2"]) == 0
    assert open_store(same).fingerprint == store.fingerprint


def test_one_play_from_its_xml(data_dir):
    path = data_dir / "shakespeare_plays" / "ps_hamlet.xml"
    plays = load_set("shakespeare", data_dir / "shakespeare_plays", 64).store
    one = load_set("shakespeare", path, 64).store
    names = plays.user_ids(range(plays.num_users))
    roles = {n for n in names if n.startswith("hamlet/")}
    found = set(one.user_ids(range(one.num_users)))
    assert len(roles & found) > 0.9 * len(roles)
    user = max(roles & found, key=lambda name: len(texts_of(plays, name)))
    assert texts_of(one, user) == texts_of(plays, user)


def test_tiny_shakespeare(data_dir):
    config = DataConfig(source="shakespeare", path=str(data_dir / "tinyshakespeare"))
    data = load_dataset(config)
    users = data.train.num_users + data.validation.num_users + data.test.num_users
    assert users == 299  # 309 names occur, ten of them only without a line
    store = load_set("shakespeare", data_dir / "tinyshakespeare", 64).store
    assert texts_of(store, "First Citizen")[0] == ("Before we proceed any further, hear me speak.")
    total = sum(len(texts_of(store, u)) for u in store.user_ids(range(store.num_users)))
    assert total > 7000  # of 7,097 speeches with a line; an end mark alone in a row is left out


def test_femnist_sample(data_dir):
    stores = load_set("femnist", data_dir / "femnist_leaf_sample", 1)
    assert (stores.store.num_users, stores.store.num_examples) == (5, 78)
    assert stores.test.num_examples == 89
    batch = stores.store.read(np.arange(78))
    assert batch["x"].shape == (78, 28, 28)
    assert batch["x"].dtype == np.float32
    assert 0 <= batch["x"].min() <= batch["x"].max() <= 1
    assert 0 <= batch["label"].min() <= batch["label"].max() < 62
    names = stores.store.user_ids(range(5))
    u = names.index("f3797_07")
    rows = stores.store.read(np.arange(*stores.store.user_offsets[u : u + 2]))
    assert rows["label"][:5].tolist() == [33, 21, 1, 9, 8]


@pytest.mark.nightly
def test_mnist(data_dir):
    config = DataConfig(source="mnist", path=str(data_dir / "mnist"), max_examples_per_user=1)
    data = load_dataset(config)
    assert data.train.num_examples + data.validation.num_examples == 60000
    assert data.test.num_examples == 10000
    assert data.tokenizer is None
    ids = data.test.user_ids(range(10000))
    batch = data.test.read(np.array([ids.index(f"test-{i:05d}") for i in range(5)]))
    assert batch["label"].tolist() == [7, 2, 1, 0, 4]  # the known first labels
    assert batch["x"].max() == 1.0


def test_heart_disease_follows_flamby(data_dir):
    store = load_set("heart_disease", data_dir / "heart_disease", 1).store
    assert store.num_users == store.num_examples == 740
    batch = store.read(np.arange(740))
    assert np.bincount(batch["silo"]).tolist() == [303, 261, 46, 130]  # FLamby's four centres
    assert batch["x"].shape == (740, 13)
    assert np.isfinite(batch["x"]).all()
    assert set(batch["label"].tolist()) == {0, 1}
    hospitals = ("cleveland", "hungarian", "switzerland", "va")
    ids = store.user_ids(range(740))
    for name in hospitals:  # a hospital's own file is its part of the four, and one silo
        path = data_dir / "heart_disease" / f"processed.{name}.data"
        own = load_set("heart_disease", path, 1).store
        found = own.read(np.arange(own.num_users))
        expected = store.read(np.array([ids.index(i) for i in own.user_ids(range(own.num_users))]))
        for field in ("x", "label"):
            np.testing.assert_array_equal(found[field], expected[field])
        assert set(found["silo"].tolist()) == {0}


# ---- made files -------------------------------------------------------------------------------


def test_stack_overflow_splits_at_2018(tmp_path):
    rows = [
        {"client_id": 1, "tokens": "old", "creation_date": "2017-12-31 23:59:59.99 UTC"},
        {"client_id": 1, "tokens": "new", "creation_date": "2018-01-01 00:00:00 UTC"},
        {"client_id": 2, "tokens": "later", "creation_date": "2019-05-05T10:00:00+00:00"},
        {"client_id": 3, "tokens": "zone", "creation_date": "2018-01-01T00:30:00+01:00"},
        {"client_id": 4, "tokens": "epoch", "creation_date": 1514764799},
    ]
    path = tmp_path / "posts.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    stores = load_set("stack_overflow", tmp_path, 16)
    train, test = stores.store, stores.test
    assert sorted(train.user_ids(range(train.num_users))) == ["1", "3", "4"]
    assert sorted(test.user_ids(range(test.num_users))) == ["1", "2"]
    assert texts_of(train, "1") == ["old"]
    assert texts_of(test, "1") == ["new"]
    path.write_text(json.dumps({**rows[0], "creation_date": "yesterday"}) + "\n")
    with pytest.raises(BadInputError, match=r"posts.jsonl, line 1: 'yesterday' is not a time"):
        load_set("stack_overflow", tmp_path, 16)


def test_cc_news_by_domain_with_the_papers_split(tmp_path):
    urls = ["https://www.a.com/1", "http://a.com:80/2", "https://A.com/3", "https://b.org/x"]
    urls += [f"https://c.net/{i}" for i in range(400)]
    table = pa.table({"url": urls, "text": [f"article {i}" for i in range(len(urls))]})
    pa.parquet.write_table(table, tmp_path / "part.parquet")
    config = DataConfig(
        source="cc_news",
        path=str(tmp_path),
        seq_len=32,
        split="within_user",
        validation_fraction=0.0,
        test_fraction=0.1,
    )
    data = load_dataset(config)
    sizes = dict(zip(data.test.user_ids(range(2)), data.test.examples_per_user.tolist()))
    assert sizes == {"a.com": 1, "c.net": 32}  # b.org has a single article
    assert texts_of(data.test, "a.com") == ["article 0"]
    assert texts_of(data.train, "a.com") == ["article 1", "article 2"]
    assert data.validation is None
    assert base_domain("//User@WWW.x.co.uk:8/p") == "x.co.uk"


BUNDLED = {"digits", "breast_cancer", "diabetes"}


@pytest.mark.parametrize("name", sorted(SETS.keys() - BUNDLED))
def test_missing_files_say_what_to_put_where(name, tmp_path):
    with pytest.raises(BadInputError, match=r"put (there|LEAF|UCI|MNIST|the|CC-|Stack|speeches)"):
        load_set(name, tmp_path, 8)
    with pytest.raises(BadInputError, match="does not exist"):
        load_set(name, tmp_path / "nothing", 8)


def idx(shape, data):
    return b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + data


def test_damaged_files(tmp_path):
    images, labels = "train-images-idx3-ubyte", "train-labels-idx1-ubyte.gz"
    (tmp_path / images).write_bytes(idx((2, 28, 28), bytes(2 * 784)))
    (tmp_path / labels).write_bytes(gzip.compress(idx((2,), b"\1")))
    with pytest.raises(BadInputError, match=rf"{labels}: has 1 values"):
        load_set("mnist", tmp_path, 1)
    (tmp_path / labels).write_bytes(gzip.compress(idx((2,), b"\1\2"))[:-9])
    with pytest.raises(BadInputError, match=rf"{labels}: damaged"):
        load_set("mnist", tmp_path, 1)
    leaf = {"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[0.0] * 784], "y": [1]}}}
    (tmp_path / "train.json").write_text(json.dumps(leaf))
    with pytest.raises(BadInputError, match=r"train.json: user 'a' has 1 inputs.*says 2"):
        load_set("femnist", tmp_path, 1)
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        (tmp_path / f"processed.{hospital}.data").write_text("1,2,3\n")
    with pytest.raises(BadInputError, match="line 1: 3 columns instead of 14"):
        load_set("heart_disease", tmp_path, 1)
    with pytest.raises(BadInputError, match="unknown data source"):
        load_set("nothing", tmp_path, 1)


# ---- what comes with the package ----------------------------------------------------------------


@pytest.mark.nightly
def test_shakespeare_needs_no_files(tmp_path, capsys):
    """36 plays' roles, as its SOURCE.txt counts them; from the command line and as windows, too."""
    store = load_set("shakespeare", None, 64).store
    names = store.user_ids(range(store.num_users))
    source = (SHAKESPEARE / "SOURCE.txt").read_text()
    plays = {name.partition("/")[0] for name in names}
    assert f"{len(plays)} plays, {store.num_users:,} roles" in source
    assert "public domain" in source
    assert texts_of(store, "Hamlet/HAMLET")[0] == (
        "[Aside] A little more than kin, and less than kind."
    )
    out = tmp_path / "store"
    command = ["data", "build", "--source", "shakespeare", "--seq-len", "64", "--out", str(out)]
    assert main(command) == 0
    assert open_store(out).fingerprint == store.fingerprint
    windows = load_set("characters", None, 20).store
    assert 1000 < windows.num_users < store.num_users  # a few roles say less than a window


# ---- the default corpus, on the packages that happen to be installed ----------------------------


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
