"""Stores on disk: one content however built, resumable, all or nothing."""

import itertools
import json
import os
import pathlib
import pickle
import random
import subprocess
import sys

import duckdb
import numpy as np
import pyarrow.dataset
import pytest

from dpfl_jax.data import (
    ArrayStore,
    ByteTokenizer,
    DataConfig,
    Schema,
    from_texts,
    load_dataset,
    records,
    store_from_documents,
)
from dpfl_jax.data import build as build_module
from dpfl_jax.data.build import BuildPlan, build_store, default_num_shards, write_store
from dpfl_jax.data.documents import read_documents
from dpfl_jax.data.shards import open_store
from dpfl_jax.data.sources import file_source
from dpfl_jax.errors import BadInputError


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Three files whose users are interleaved and spread over files; heavy-tailed."""
    folder = tmp_path_factory.mktemp("input")
    rng = random.Random(0)
    for f in range(3):
        with (folder / f"{f}.jsonl").open("w") as out:
            for i in range(300):
                user = f"user {int(rng.paretovariate(0.7)) % 90} é"
                text = f"document {f}/{i} " + "word " * rng.randrange(0, 60)
                out.write(json.dumps({"user": user, "text": text}) + "\n")
    return folder


@pytest.fixture(scope="module")
def memory(files):
    documents = read_documents(sorted(files.glob("*.jsonl")))
    return store_from_documents(documents, ByteTokenizer(), 32)


def build(files, out, shards=4, format="arrow", **settings):
    source = file_source(str(files / "*.jsonl"))
    plan = BuildPlan.for_text("bytes", 32, num_shards=shards, shard_format=format)
    return build_store(source.rows, out, plan, sources=source.identity, **settings)


def assert_same(a, b):
    assert a.num_users == b.num_users
    np.testing.assert_array_equal(a.user_offsets, b.user_offsets)
    assert a.user_ids(range(a.num_users)) == b.user_ids(range(b.num_users))
    positions = np.random.default_rng(0).permutation(a.num_examples)
    left, right = a.read(positions), b.read(positions)
    for name in left:
        assert left[name].dtype == right[name].dtype
        np.testing.assert_array_equal(left[name], right[name])
    assert a.fingerprint == b.fingerprint


@pytest.mark.parametrize("format", ["arrow", "arrayrecord"])
@pytest.mark.parametrize("shards", [1, 7, 40])
def test_disk_and_memory_are_the_same_store(files, memory, tmp_path, format, shards):
    store = build(files, tmp_path / "store", shards, format)
    assert_same(store, memory)
    assert_same(open_store(tmp_path / "store"), memory)
    store.verify()
    assert not (tmp_path / "store.building").exists()
    assert_same(pickle.loads(pickle.dumps(store)), memory)


@pytest.mark.nightly
def test_two_processes_build_the_same_bytes(files, tmp_path):
    one = build(files, tmp_path / "one")
    two = build(files, tmp_path / "two", workers=2)
    assert one.manifest.shards == two.manifest.shards


@pytest.mark.parametrize("format", ["arrow", "arrayrecord"])
def test_saving_a_view_and_loading_it(memory, tmp_path, format):
    from dpfl_jax.data import limit_store

    view = limit_store(memory, 20, 3)
    write_store(view, tmp_path / "store", format)
    assert_same(open_store(tmp_path / "store"), view)


def test_array_store_save_load_of_plain_arrays(tmp_path):
    rng = np.random.default_rng(0)
    users = [
        (f"u{i}", {"x": rng.normal(size=(i + 1, 2, 3)).astype("f4"), "y": np.arange(i + 1) * 0})
        for i in range(30)
    ]
    store = ArrayStore.from_users(users)
    write_store(store, tmp_path / "store")
    assert_same(open_store(tmp_path / "store"), store)
    # All-zero records survive the removal of trailing zeros.
    zeros = ArrayStore.from_users([("a", {"x": np.zeros((3, 4))})])
    for format in ("arrow", "arrayrecord"):
        assert_same(write_store(zeros, tmp_path / format, format), zeros)


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "float16", "float64", "bfloat16", "float8_e4m3fn", "complex128"]
)
def test_numbers_of_every_kind_come_back(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_BATCH_BYTES", 100)  # several record batches
    rng = np.random.default_rng(0)
    users = [
        (
            f"u{i}",
            {"a": (rng.integers(0, 3, (i + 1, 3, 2)) / 2).astype(dtype), "b": -np.arange(i + 1)},
        )
        for i in range(9)
    ]
    store = ArrayStore.from_users(users)
    written = write_store(store, tmp_path / "store")
    assert_same(written, store)
    shard = pyarrow.dataset.dataset(
        tmp_path / "store" / written.manifest.shards[0].file, format="arrow"
    )
    held, numbers = shard.to_table(), store.read(np.arange(store.num_examples))
    assert held["b"].to_pylist() == numbers["b"].tolist()
    if dtype in ("uint8", "float16", "float64"):  # which others read as what they are
        assert held["a"].to_pylist() == numbers["a"].tolist()


@pytest.mark.parametrize("pairs", [False, True])
def test_answers_of_any_length_come_back(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_BATCH_BYTES", 300)
    schema = Schema.answers(11, 259, pairs=pairs)
    rng = np.random.default_rng(0)
    lead = (2,) if pairs else ()
    users = []
    for i in range(20):
        lengths = rng.integers(0, 12, (i % 3 + 1, *lead, 1))
        tokens = np.where(
            np.arange(11) < lengths, rng.integers(0, 259, (*lengths.shape[:-1], 11)), 0
        )
        users.append((f"u{i}", {"tokens": tokens, "mask": rng.integers(0, 2, tokens.shape) > 0}))
    store = ArrayStore.from_users(users, schema)
    assert_same(write_store(store, tmp_path / "store"), store)


def test_duckdb_reads_the_files(memory, tmp_path):
    write_store(memory, tmp_path / "store")
    shards = sorted(map(str, (tmp_path / "store").glob("shard-*.arrow")))
    examples = duckdb.from_arrow(pyarrow.dataset.dataset(shards, format="arrow"))
    tokens = memory.read(np.arange(memory.num_examples))["mask"].sum()
    found = examples.aggregate("count(*), sum(len(tokens))").fetchall()
    assert found == [(memory.num_examples, tokens)]
    index = pyarrow.dataset.dataset(tmp_path / "store" / "users.arrow", format="arrow")
    users = duckdb.from_arrow(index).fetchall()
    names = memory.user_ids(range(memory.num_users))
    assert users == list(zip(names, memory.examples_per_user.tolist(), strict=True))


def test_polars_reads_the_files(memory, tmp_path):
    polars = pytest.importorskip("polars")
    write_store(memory, tmp_path / "store")
    frame = polars.scan_ipc(tmp_path / "store" / "shard-*.arrow")
    assert frame.select(polars.len()).collect().item() == memory.num_examples


@pytest.mark.slow  # of which importing it is most
def test_datasets_reads_the_files(memory, tmp_path):
    datasets = pytest.importorskip("datasets")
    write_store(memory, tmp_path / "store")
    shards = sorted(map(str, (tmp_path / "store").glob("shard-*.arrow")))
    found = datasets.Dataset(pyarrow.dataset.dataset(shards, format="arrow").to_table())
    assert found.num_rows == memory.num_examples
    first = memory.read(np.arange(1))
    assert found[0]["tokens"] == first["tokens"][first["mask"]].tolist()


def test_a_store_of_short_texts_is_as_small_as_its_text(tmp_path):
    texts = [("u", "x" * length) for length in (1, 40, 60, 3000)] * 500
    store = from_texts(texts, ByteTokenizer(), seq_len=4096)
    written = write_store(store, tmp_path / "store", "arrow")
    assert_same(written, store)
    # Two bytes a token, four where a text ends.
    held = sum(2 * (len(text) + 2) + 4 for _, text in texts)
    assert sum(entry.bytes for entry in written.manifest.shards) < 1.01 * held + 1500


def test_a_store_is_a_data_source_and_knows_its_tokenizer(files, tmp_path):
    build(files, tmp_path / "store")
    data = load_dataset(DataConfig(source="store", path=str(tmp_path / "store")))
    assert data.train.schema.seq_len == 32
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(
        str(tmp_path / "other.json")
    )
    config = DataConfig(
        source="store", path=str(tmp_path / "store"), tokenizer=str(tmp_path / "other.json")
    )
    with pytest.raises(BadInputError, match="another tokeniser"):
        load_dataset(config)


def test_interrupted_build_opens_not_and_resumes(files, memory, tmp_path, monkeypatch):
    out = tmp_path / "store"
    reads, encoded = [], []
    source = file_source(str(files / "*.jsonl"))
    plan = BuildPlan.for_text("bytes", 32, num_shards=5)

    def rows():
        reads.append(1)
        return source.rows()

    real = build_module.encode_partition

    def stop_at_third(users, staging, plan, shard):
        if len(encoded) == 2:
            raise KeyboardInterrupt
        encoded.append(shard)
        return real(users, staging, plan, shard)

    monkeypatch.setattr(build_module, "encode_partition", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        build_store(rows, out, plan, sources=source.identity)
    for path in (out, tmp_path / "store.building"):
        with pytest.raises(BadInputError, match="is not a store"):
            open_store(path)
    resumed = []

    def count(users, staging, plan, shard):
        resumed.append(shard)
        return real(users, staging, plan, shard)

    monkeypatch.setattr(build_module, "encode_partition", count)
    assert_same(build_store(rows, out, plan, sources=source.identity), memory)
    assert len(reads) == 1  # the rows were not read again
    assert sorted(encoded + resumed) == [0, 1, 2, 3, 4]


def test_a_store_is_closed_to_others(memory, tmp_path):
    """As the files that it was made of may be."""
    write_store(memory, tmp_path / "store")
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


def test_an_interrupted_build_that_was_sent_changes_no_other_file(tmp_path):
    plan = BuildPlan.for_text("bytes", 8, num_shards=1)
    (tmp_path / "precious").write_text("kept")
    staging = build_module.prepare(tmp_path / "store", plan, {})
    entry = {"file": "../precious", "bytes": 0, "sha256": "", "examples": 0}
    side = {key: [] for key in ("users", "counts", "digests", "lengths")} | {"dropped": 0}
    side["entry"] = entry
    build_module.side_path(staging, plan, 0).write_text(json.dumps(side))
    with pytest.raises(BadInputError, match="usable"):
        build_module.finish(staging, tmp_path / "store", plan, {})
    assert (tmp_path / "precious").read_text() == "kept"
    staging = build_module.prepare(tmp_path / "store", plan, {})
    (staging / "offsets.npy").symlink_to(tmp_path / "precious")
    with pytest.raises(BadInputError, match="holds links"):
        build_module.prepare(tmp_path / "store", plan, {})


def test_changed_input_starts_over(files, tmp_path, monkeypatch):
    out = tmp_path / "store"
    real = build_module.finish
    monkeypatch.setattr(build_module, "finish", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build(files, out)
    monkeypatch.setattr(build_module, "finish", real)
    copy = tmp_path / "input"
    copy.mkdir()
    (copy / "0.jsonl").write_text('{"user": "only", "text": "one document"}\n')
    store = build(copy, out)
    assert store.user_ids(range(store.num_users)) == ["only"]


def test_a_table_of_rows_that_was_sent_reads_no_other_file(tmp_path):
    plan = BuildPlan.for_text("bytes", 8)
    (tmp_path / "secret").write_text("kept")
    staging = build_module.prepare(tmp_path / "store", plan, {})
    with duckdb.connect(str(staging / "rows.duckdb")) as made:
        made.execute(
            "CREATE VIEW rows AS SELECT 7::UBIGINT AS key, 'a'::BLOB AS user, 0::BIGINT AS seq, "
            f"content AS data, false AS large FROM read_blob('{tmp_path / 'secret'}')"
        )
        assert made.execute("SELECT data FROM rows").fetchall() == [(b"kept",)]
    (staging / "rows.large").touch()
    (staging / "grouped").write_text("0")
    with pytest.raises(BadInputError, match="Permission Error"):
        build_store(lambda: [], tmp_path / "store", plan)
    assert not (tmp_path / "store").exists()


def test_rows_of_any_size_keep_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(build_module, "_LARGE_BYTES", 300)
    documents = [(f"u{i % 3}", f"{i} " * (1 + 97 * i % 200)) for i in range(60)]
    plan = BuildPlan.for_text("bytes", 32, num_shards=2)
    built = build_store(lambda: ((u, t.encode()) for u, t in documents), tmp_path / "store", plan)
    assert_same(built, from_texts(documents, seq_len=32))


def test_what_a_killed_sort_left_is_in_no_way(files, memory, tmp_path):
    source = file_source(str(files / "*.jsonl"))
    plan = BuildPlan.for_text("bytes", 32)
    staging = build_module.prepare(tmp_path / "store", plan, source.identity)
    (staging / "rows.duckdb").write_bytes(b"half a table")
    (staging / "rows.duckdb.7.sorting").mkdir()
    built = build_store(source.rows, tmp_path / "store", plan, sources=source.identity)
    assert_same(built, memory)
    assert len(list(built.path.iterdir())) == len((*built.manifest.files, "manifest.json"))


@pytest.mark.slow
def test_killed_build_resumes(files, memory, tmp_path):
    """kill -9 between two shards, in a real process."""
    program = f"""
import os, signal
from dpfl_jax.data import build as b
from dpfl_jax.data.build import BuildPlan
from dpfl_jax.data.sources import file_source
real, done = b.encode_partition, []
def encode(*args):
    if len(done) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(1)
    return real(*args)
b.encode_partition = encode
source = file_source({str(files / "*.jsonl")!r})
plan = BuildPlan.for_text("bytes", 32, num_shards=6)
b.build_store(source.rows, {str(tmp_path / "store")!r}, plan, sources=source.identity)
"""
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert killed.returncode == -9, killed.stderr.decode()
    assert not (tmp_path / "store").exists()
    assert len(list((tmp_path / "store.building").glob("shard-*.json"))) == 3
    assert_same(build(files, tmp_path / "store", 6), memory)


@pytest.mark.nightly
@pytest.mark.parametrize("format", ["arrow", "arrayrecord"])
def test_disk_full_is_one_sentence_and_the_build_goes_on_later(files, memory, tmp_path, format):
    """A file-size limit makes every larger write fail, in C++ writers too."""
    program = f"""
import resource, signal, sys
sys.dont_write_bytecode = True  # a compiled module cut short would be read by everybody else
from dpfl_jax.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))
sys.exit(main(["data", "build", "--input", {str(files / "*.jsonl")!r}, "--out",
    {str(tmp_path / "store")!r}, "--shards", "1", "--seq-len", "32",
    "--store-format", {format!r}, "--workers", "1"]))
"""
    full = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert full.returncode == 2, full.stderr
    last = full.stderr.strip().splitlines()[-1]
    assert last.startswith("dpfl: error: cannot write ")
    assert "free space" in last
    assert not (tmp_path / "store").exists()
    assert_same(build(files, tmp_path / "store", 1, format), memory)


def test_disk_full_while_encoding_names_the_shard(files, memory, tmp_path, monkeypatch):
    def full(path, schema, blocks):
        next(iter(blocks))
        path.write_bytes(b"half")
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(records, "_write_arrow", full)
        with pytest.raises(BadInputError, match=r"shard-00000-of-00004.*No space left on device"):
            build(files, tmp_path / "store", format="arrow")
    assert not list((tmp_path / "store.building").glob("*.arrow*"))
    assert_same(build(files, tmp_path / "store", format="arrow"), memory)


def test_bad_rows_leave_nothing_behind(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"user": "a", "text": "x"}\n{"user": null, "text": "x"}\n')
    with pytest.raises(BadInputError, match=r"x.jsonl, line 2"):
        build(tmp_path, tmp_path / "store")
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]
    path.write_text('{"user": "a", "text": ""}\n')
    with pytest.raises(BadInputError, match="zero usable examples"):
        build(tmp_path, tmp_path / "store")
    assert [p.name for p in tmp_path.iterdir()] == ["x.jsonl"]


def test_existing_output_is_not_overwritten(files, tmp_path):
    (tmp_path / "store").mkdir()
    with pytest.raises(BadInputError, match="exists"):
        build(files, tmp_path / "store")


def test_settings_are_checked():
    with pytest.raises(BadInputError, match="must be one of arrow, arrayrecord"):
        BuildPlan.for_text("bytes", 8, shard_format="zip")
    with pytest.raises(BadInputError, match="number of shards"):
        BuildPlan.for_text("bytes", 8, num_shards=0)
    assert default_num_shards(1) == 1
    assert default_num_shards(2**40) == 4096


def test_a_shard_has_the_users_of_its_keys():
    for shards in (1, 3, 7):
        plan = BuildPlan.for_text("bytes", 8, num_shards=shards)
        bounds = [plan.keys(shard) for shard in range(shards)]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == 2**64 - 1
        for (_, high), (low, _) in itertools.pairwise(bounds):
            assert low == high + 1
            assert ((high * shards) >> 64) + 1 == (low * shards) >> 64


def test_users_are_spread_evenly_over_shards():
    plan = BuildPlan.for_text("bytes", 8, num_shards=8)
    counts = np.bincount([plan.partition(f"u{i}") for i in range(8000)], minlength=8)
    # Chi-square with 7 degrees of freedom: 40 is passed by chance with probability 1e-6.
    assert ((counts - 1000) ** 2 / 1000).sum() < 40


def test_beam_builds_the_same_bytes(files, memory, tmp_path):
    pytest.importorskip("apache_beam", reason="needs the beam extra")
    from dpfl_jax.data.build import build_with_beam

    plan = BuildPlan.for_text("bytes", 32, num_shards=4)
    flags = ["--runner=DirectRunner"]
    store = build_with_beam(str(files / "*.jsonl"), tmp_path / "beam", plan, flags=flags)
    assert_same(store, memory)
    local = build(files, tmp_path / "local")
    assert store.manifest.shards == local.manifest.shards
    assert store.manifest.index == local.manifest.index
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"user": null, "text": "x"}\n')
    with pytest.raises(BadInputError, match=r"bad.jsonl, line 1"):
        build_with_beam(str(bad), tmp_path / "other", plan, flags=flags)


def test_without_beam_one_sentence(files, tmp_path, monkeypatch):
    from dpfl_jax.data.build import build_with_beam

    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(BadInputError, match=r"apache_beam: pip install 'dpfl_jax\[beam\]'"):
        build_with_beam(str(files / "*.jsonl"), pathlib.Path("x"), BuildPlan.for_text("bytes", 8))
