"""Every damage to a store is caught, and the sentence names the file."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from dpfl_jax.data import ArrayStore
from dpfl_jax.data.build import write_store
from dpfl_jax.data.shards import Manifest, open_store
from dpfl_jax.data.splits import limit_store
from dpfl_jax.errors import BadInputError

FORMATS = ["arrayrecord", "ragged"]


@pytest.fixture(scope="module")
def memory():
    rng = np.random.default_rng(0)
    users = ((f"u{i}", {"x": rng.integers(0, 99, (i % 7 + 1, 64))}) for i in range(120))
    return ArrayStore.from_users(users)


@pytest.fixture(params=FORMATS)
def store(request, memory, tmp_path, monkeypatch):
    from dpfl_jax.data import build

    monkeypatch.setattr(build, "default_num_shards", lambda size: 3)
    write_store(memory, tmp_path / "store", request.param)
    return tmp_path / "store"


def shard(store, number=1):
    return sorted(store.glob("shard-*"))[number]


def flip(path, where=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if where is None else where] ^= 0x10
    path.write_bytes(data)


def test_a_sound_store_passes(store):
    open_store(store).verify()


def test_truncated_shard(store):
    path = shard(store)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(BadInputError, match=rf"{path.name} has \d+ bytes.*truncated"):
        open_store(store)


def test_missing_shard(store):
    path = shard(store)
    path.unlink()
    with pytest.raises(BadInputError, match=f"{path.name} is missing"):
        open_store(store)


def test_flipped_byte_anywhere_is_found_by_verify(store):
    path = shard(store)
    good = path.read_bytes()
    for where in np.random.default_rng(0).integers(0, len(good), 12):
        path.write_bytes(good)
        flip(path, int(where))
        with pytest.raises(BadInputError, match=rf"{path.name}.*checksum"):
            open_store(store).verify()
    path.write_bytes(good)
    open_store(store).verify()


def test_flipped_byte_in_an_array_record_is_found_by_reading(memory, tmp_path):
    store = tmp_path / "store"
    write_store(memory, store, "arrayrecord")
    path = shard(store, 0)
    flip(path)
    opened = open_store(store)
    with pytest.raises(BadInputError, match=f"{path.name} is damaged"):
        opened.read(np.arange(opened.num_examples))


def test_two_shards_swapped(store):
    a, b = shard(store, 0), shard(store, 1)
    spare = store / "spare"
    a.rename(spare)
    b.rename(a)
    spare.rename(b)
    with pytest.raises(BadInputError, match=a.name):
        open_store(store).verify()


@pytest.mark.parametrize("name", ["offsets.npy", "ids.npy", "ids_ends.npy"])
def test_index_of_another_build(store, memory, tmp_path, name):
    write_store(limit_store(memory, 60), tmp_path / "other", "ragged")
    shutil.copy(tmp_path / "other" / name, store / name)
    with pytest.raises(BadInputError, match=rf"{name}.*another build"):
        open_store(store)


def test_index_of_the_same_size_from_another_build(store):
    offsets = np.load(store / "offsets.npy")
    offsets[1] += 1  # the first user is given an example of the second
    np.save(store / "offsets.npy", offsets)
    with pytest.raises(BadInputError, match=r"offsets.npy.*checksum"):
        open_store(store)


def test_a_whole_shard_of_another_build_with_the_same_size(store, memory, tmp_path):
    changed = ArrayStore.from_users(
        (name, {"x": memory.read(np.arange(*memory.user_offsets[u : u + 2]))["x"] + 1})
        for u, name in enumerate(memory.user_ids(range(memory.num_users)))
    )
    format = Manifest.read(store).shard_format
    write_store(changed, tmp_path / "other", format)
    path = shard(store)
    shutil.copy(tmp_path / "other" / path.name, path)
    with pytest.raises(BadInputError, match=path.name):
        open_store(store).verify()


def test_manifest_damage(store):
    path = store / "manifest.json"
    good = path.read_text()
    body = json.loads(good)
    path.write_text(json.dumps({**body, "num_users": 3}))
    with pytest.raises(BadInputError, match=r"manifest.json was changed"):
        open_store(store)
    path.write_text(good[: len(good) // 2])
    with pytest.raises(BadInputError, match=r"manifest.json is not a readable"):
        open_store(store)
    path.write_text("[]")
    with pytest.raises(BadInputError, match=r"manifest.json is not a readable"):
        open_store(store)
    path.write_text(json.dumps({**body, "version": 99}))
    with pytest.raises(BadInputError, match="version 99"):
        open_store(store)
    path.unlink()
    with pytest.raises(BadInputError, match=r"has no manifest.json"):
        open_store(store)


def test_a_store_that_somebody_sent_names_its_own_files(memory, tmp_path):
    """Another file of ours would be read as records, and trained on."""
    write_store(memory, tmp_path / "store", "ragged")
    good = Manifest.read(tmp_path / "store")
    path = tmp_path / "store" / good.shards[0].file
    path.rename(tmp_path / "moved")
    for name, place in (("../moved", None), (str(tmp_path / "moved"), None), (path.name, path)):
        if place is not None:
            place.symlink_to(tmp_path / "moved")
        entry = dataclasses.replace(good.shards[0], file=name)
        dataclasses.replace(good, shards=(entry,)).write(tmp_path / "store")
        with pytest.raises(BadInputError, match="outside of the folder"):
            open_store(tmp_path / "store")
    path.unlink()
    (tmp_path / "moved").rename(path)
    dataclasses.replace(good, index=good.index[:2]).write(tmp_path / "store")
    with pytest.raises(BadInputError, match=r"does not list ids\.npy"):
        open_store(tmp_path / "store")
