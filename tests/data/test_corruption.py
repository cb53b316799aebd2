"""Every damage to a store is caught, and the sentence names the file."""

import dataclasses
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest

from dpfl_jax.data import ArrayStore, from_texts
from dpfl_jax.data.build import write_store
from dpfl_jax.data.load import limit_store
from dpfl_jax.data.records import open_records
from dpfl_jax.data.shards import INDEX, FileEntry, Manifest, open_store
from dpfl_jax.errors import BadInputError

FORMATS = ["arrow", "arrayrecord"]


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


def read_all(path, store):
    opened = open_records(path, "arrow", store.schema, store.num_examples)
    return opened.read(np.arange(store.num_examples))


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


def test_index_of_another_build(store, memory, tmp_path):
    write_store(limit_store(memory, 60), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "users.arrow", store / "users.arrow")
    with pytest.raises(BadInputError, match=r"users.arrow.*another build"):
        open_store(store)


def test_index_of_the_same_size_from_another_build(store):
    path = store / "users.arrow"
    with pa.ipc.open_file(path.read_bytes()) as file:
        users = file.read_all()
    counts = users["examples"].to_numpy().copy()
    counts[:2] += (1, -1)  # the first user is given an example of the second
    with pa.ipc.new_file(str(path), users.schema) as writer:
        writer.write_table(pa.table({"user": users["user"], "examples": counts}))
    with pytest.raises(BadInputError, match=r"users.arrow.*checksum"):
        open_store(store)


def test_an_index_that_others_made_is_one_sentence(memory, tmp_path):
    write_store(memory, tmp_path / "store")
    good = Manifest.read(tmp_path / "store")
    path = tmp_path / "store" / "users.arrow"
    names = memory.user_ids(range(memory.num_users))
    counts = memory.examples_per_user
    for made in (
        pa.table({"user": names, "examples": counts}),  # ids of another type
        pa.table([pa.array(names), pa.array(counts)], names=["user", "count"]),
        pa.table([[*names[1:], None], counts], schema=INDEX),
        pa.table([names[1:], counts[1:]], schema=INDEX),
        pa.table([[], []], schema=INDEX),
        None,
    ):
        if made is None:
            path.write_bytes(b"ARROW1 no more")
        else:
            with pa.ipc.new_file(str(path), made.schema) as writer:
                writer.write_table(made)
        dataclasses.replace(good, index=FileEntry.of(path)).write(tmp_path / "store")
        with pytest.raises(BadInputError, match=r"users.arrow"):
            open_store(tmp_path / "store")


def test_files_that_others_made_are_read_within_their_bounds(memory, tmp_path):
    """Lengths that lead elsewhere, compressed columns, gaps, other columns: never other memory."""
    texts = from_texts([(f"u{i}", "words " * (i % 5 + 1)) for i in range(40)], seq_len=32)
    write_store(texts, tmp_path / "store")
    path = shard(tmp_path / "store", 0)
    good = path.read_bytes()
    table = pa.ipc.open_file(good).read_all()
    ends = table["tokens"].chunk(0).offsets.to_numpy().astype("<i4")
    for i, value in ((1, -5), (3, 10**9), (len(ends) - 1, 10**6), (2, int(ends[2]) + 40)):
        changed = ends.copy()
        changed[i] = value
        path.write_bytes(good.replace(ends.tobytes(), changed.tobytes()))
        with pytest.raises(BadInputError, match=f"{path.name} is damaged"):
            read_all(path, texts)
    gap = pa.array([None, *table["tokens"].to_pylist()[1:]], table.schema.field("tokens").type)
    for other, options in (
        (table, {"options": pa.ipc.IpcWriteOptions(compression="lz4")}),
        (pa.table({"tokens": gap}), {}),
        (pa.table({"tokens": table["tokens"].cast(pa.list_(pa.int32()))}), {}),
        (table.slice(1), {}),
    ):
        with pa.ipc.new_file(str(path), other.schema, **options) as writer:
            writer.write_table(other)
        with pytest.raises(BadInputError, match=f"{path.name} is damaged"):
            read_all(path, texts)


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
    dataclasses.replace(Manifest.read(store), num_users="three").write(store)
    with pytest.raises(BadInputError, match=r"manifest.json is not a readable"):
        open_store(store)
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
    write_store(memory, tmp_path / "store", "arrow")
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
    entry = dataclasses.replace(good.index, file=path.name)
    dataclasses.replace(good, index=entry).write(tmp_path / "store")
    with pytest.raises(BadInputError, match=r"does not list users\.arrow"):
        open_store(tmp_path / "store")
