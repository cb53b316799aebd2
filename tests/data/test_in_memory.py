"""Ways in: the same people give the same store, whatever holds their texts."""

import csv
import json
import uuid

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from dpfl_jax.cli.main import main
from dpfl_jax.data import (
    SourceConfig,
    from_arrays,
    from_grain,
    from_huggingface,
    from_pandas,
    from_rows,
    from_texts,
    load_examples,
    load_tokenizer,
)
from dpfl_jax.errors import BadInputError

ROWS = [{"who": f"u{i % 5}", "post": f"Text {i} «é» " * (1 + i % 3), "n": i / 2} for i in range(17)]
PAIRS = [(row["who"], row["post"]) for row in ROWS]
SEQ_LEN = 16


@pytest.fixture(scope="module")
def digest():
    return from_texts(PAIRS, seq_len=SEQ_LEN).fingerprint


def loaded(source, path, **more):
    return load_examples(
        SourceConfig(source=source, path=str(path), seq_len=SEQ_LEN, **more)
    ).store.fingerprint


COLUMNS = {"user_column": "who", "text_column": "post"}


def test_pandas(digest):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS)
    assert from_pandas(frame, user="who", text="post", seq_len=SEQ_LEN).fingerprint == digest
    table = from_pandas(frame[["who", "n"]].assign(y=1.0), user="who", target="y")
    assert table.num_examples == 17


def test_a_hugging_face_data_set_in_memory_and_on_disk(digest, tmp_path):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    assert from_huggingface(made, user="who", text="post", seq_len=SEQ_LEN).fingerprint == digest
    made.save_to_disk(str(tmp_path / "saved"))
    assert loaded("huggingface", tmp_path / "saved", **COLUMNS) == digest
    with pytest.raises(BadInputError, match=r"dictionary of splits \(train\)"):
        from_huggingface({"train": made}, user="who", text="post")


def test_grain(digest):
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.source(ROWS)
    assert from_grain(source, user="who", text="post", seq_len=SEQ_LEN).fingerprint == digest


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "utf-16", "arrow"])
def test_files(kind, digest, tmp_path):
    path = tmp_path / f"posts.{'csv' if kind == 'utf-16' else kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        assert loaded("jsonl", path, **COLUMNS) == digest
    elif kind == "parquet":
        pa.parquet.write_table(pa.Table.from_pylist(ROWS), path)
        assert loaded("parquet", path, **COLUMNS) == digest
    elif kind == "arrow":
        table = pa.Table.from_pylist(ROWS)
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
        assert loaded("arrow", path, **COLUMNS) == digest
    else:
        with path.open("w", newline="", encoding="utf-16") as file:
            writer = csv.DictWriter(file, ROWS[0], delimiter=";")
            writer.writeheader()
            writer.writerows(ROWS)
        assert loaded("csv", path, delimiter=";", **COLUMNS) == digest
        with pytest.raises(BadInputError, match=r"data\.delimiter=.;"):
            loaded("csv", path, **COLUMNS)


def test_latin_text_needs_its_encoding(digest, tmp_path):
    path = tmp_path / "posts.tsv"
    lines = ["who\tpost", *(f"{who}\t{post}" for who, post in PAIRS)]
    path.write_text("\n".join(lines) + "\n", encoding="latin-1")
    assert loaded("tsv", path, encoding="latin-1", **COLUMNS) == digest
    with pytest.raises(BadInputError, match="not UTF-8"):
        loaded("tsv", path, **COLUMNS)
    with pytest.raises(BadInputError, match=r"data\.encoding=latin-99 is not known"):
        loaded("tsv", path, encoding="latin-99", **COLUMNS)


def test_the_command_reads_csv_of_any_make(digest, tmp_path, capsys):
    path = tmp_path / "posts.csv"
    lines = ["who;post", *(f"{who};{post}" for who, post in PAIRS)]
    path.write_text("\n".join(lines) + "\n", encoding="latin-1")
    columns = ["--user-column", "who", "--text-column", "post", "--seq-len", str(SEQ_LEN)]
    build = ["data", "build", "--input", str(path), *columns, "--out", str(tmp_path / "store")]
    assert main([*build, "--delimiter", ";"]) == 2
    assert "not UTF-8" in capsys.readouterr().err
    assert main([*build, "--delimiter", "; ", "--encoding", "latin-1"]) == 2
    assert "--delimiter: '; ': string should have at most 1 character" in capsys.readouterr().err
    assert main([*build, "--delimiter", ";", "--encoding", "latin-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["fingerprint"] == digest


def test_folder(tmp_path):
    """Its files are users; each holds one document."""
    for who in ("u0", "u1"):
        (tmp_path / who).write_text(f"of {who}")
    pairs = [("u0", "of u0"), ("u1", "of u1")]
    assert loaded("folder", tmp_path) == from_texts(pairs, seq_len=SEQ_LEN).fingerprint


def test_arrays(digest):
    store = from_texts(PAIRS, seq_len=SEQ_LEN)
    batch = store.read(np.arange(store.num_examples))
    owners = np.repeat(store.user_ids(range(store.num_users)), store.examples_per_user)
    assert from_arrays(batch, owners, "bytes").fingerprint == digest
    plain = from_arrays({"x": np.ones((3, 2)), "label": np.arange(3)}, ["a", "b", "a"])
    assert plain.examples_per_user.sum() == 3
    with pytest.raises(BadInputError, match="2 users for 3 rows of 'x'"):
        from_arrays({"x": np.ones((3, 2))}, ["a", "b"])


def test_ten_ways_in_give_one_store(tmp_path):
    """The same people, each with one text (a folder holds one document a person)."""
    people = [{"who": f"u{i:02}", "post": f"Text {i} «é» " * (1 + i % 3)} for i in range(12)]
    pairs, names = [(row["who"], row["post"]) for row in people], {"user": "who", "text": "post"}
    length = {"seq_len": SEQ_LEN}
    want = from_texts(pairs, **length)  # a list

    def csv_file(folder):
        lines = [f"{who};{post}" for who, post in [("who", "post"), *pairs]]
        (folder / "p.csv").write_text("\n".join(lines), encoding="utf-16")
        return loaded("csv", folder / "p.csv", delimiter=";", **COLUMNS)

    def jsonl(folder):
        (folder / "p.jsonl").write_text("\n".join(map(json.dumps, people)))
        return loaded("jsonl", folder / "p.jsonl", **COLUMNS)

    def parquet(folder):
        pa.parquet.write_table(pa.Table.from_pylist(people), folder / "p.parquet")
        return loaded("parquet", folder / "p.parquet", **COLUMNS)

    def folder_of_files(folder):
        for who, post in pairs:
            (folder / who).write_text(post)
        return loaded("folder", folder)

    def arrays(folder):
        batch = want.read(np.arange(want.num_examples))
        owners = np.repeat(want.user_ids(range(want.num_users)), want.examples_per_user)
        return from_arrays(batch, owners, "bytes").fingerprint

    def pandas(folder):
        frame = pytest.importorskip("pandas").DataFrame(people)
        return from_pandas(frame, **names, **length).fingerprint

    def huggingface(folder):
        made = pytest.importorskip("datasets").Dataset.from_list(people)
        return from_huggingface(made, **names, **length).fingerprint

    def grain(folder):
        source = pytest.importorskip("grain").MapDataset.source(people)
        return from_grain(source, **names, **length).fingerprint

    def tfds(folder):
        made_with = pytest.importorskip("tensorflow_datasets")
        core, features = made_with.core, made_with.features

        class People(core.GeneratorBasedBuilder):
            VERSION = core.Version("1.0.0")

            def _info(self):
                columns = {name: features.Text() for name in people[0]}
                return core.DatasetInfo(builder=self, features=features.FeaturesDict(columns))

            def _split_generators(self, dl_manager):
                return {"train": enumerate(people)}

            def _generate_examples(self):
                raise AssertionError

        made = People(data_dir=folder, file_format="array_record")
        made.download_and_prepare()
        return from_grain(made.as_data_source("train"), **names, **length).fingerprint

    ways = (csv_file, jsonl, parquet, folder_of_files, arrays, pandas, huggingface, grain, tfds)
    for way in ways:
        (tmp_path / way.__name__).mkdir()
        assert way(tmp_path / way.__name__) == want.fingerprint, way.__name__


def test_ids_of_any_kind():
    ids = [uuid.UUID(int=7), 7, np.int64(8), "7b"]
    store = from_texts([(i, "some text") for i in ids])
    assert sorted(store.user_ids(range(4))) == sorted(map(str, ids))


def test_tokenisers_at_hand(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "[BOS]": 1, "[EOS]": 2, "Text": 3, "«": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"), pretty=False)
    stores = [
        from_texts(PAIRS, t, seq_len=4) for t in (made, tmp_path, tmp_path / "tokenizer.json")
    ]
    assert len({s.fingerprint for s in stores}) == 1
    assert stores[0].read(np.arange(1))["tokens"].max() <= 4
    for wrong, message in ((3, "the tokenizer is int"), (tmp_path / "no", "neither 'bytes' nor")):
        with pytest.raises(BadInputError, match=message):
            load_tokenizer(wrong)


def test_mistakes_are_named():
    rows = [{"who": "a", "post": "text", "y": 1.0}]
    for call, message in (
        (lambda: from_rows(rows, user="who"), "either text= .* or target="),
        (lambda: from_rows(rows, user=None, text="post"), "need user="),
        (lambda: from_rows(rows, user="id", text="post"), "row 0: there is no column 'id'"),
        (lambda: from_rows(rows, user="who", text="y"), "row 0: 'y' holds float, not text"),
        (lambda: from_rows([], user="who", target="y", inputs=["post"]), "has no rows"),
        (lambda: from_rows(rows, user="who", target="y"), "name them as data.input_columns"),
        (
            lambda: from_rows(rows, user="who", target="y", inputs=["post"]),
            "words, not numbers, in 'post'",
        ),
        (lambda: from_texts(["just text"]), r"document 0 is str, .* pair \(user, text\)"),
        (lambda: from_texts([(None, "text")]), "a user id is None"),
        (lambda: from_texts([("a", 3)]), "document 0: 'text' holds int, not text"),
        (lambda: from_texts([("a", "")]), "zero usable examples"),
    ):
        with pytest.raises(BadInputError, match=message):
            call()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([1_700_000_000_000, 1, 2]), "holds int64 beyond -2147483648"),
        (np.array([2**40, 1, 2], np.uint64), "holds uint64 beyond 0 to 4294967295"),
        (np.array([1e39, 1, 2]), "beyond float32, first in row 0"),
        (np.array([1.0, 2.0, np.nan]), "missing .NaN., infinite or beyond float32, first in row 2"),
        (["zebra", "b", "c"], "holds str.*, not numbers"),
        ([{"zebra": 1}, None, 3], "holds object, not numbers"),
        ([[1, 2], [3], [4]], "the rows of 'x' differ in length"),
        ([1j, 2, 3], "holds complex128, not numbers"),
        (np.array(["2020-01-01"] * 3, "M8[D]"), r"holds datetime64\[D\], not numbers"),
        (3.0, "'x' is a single number"),
    ],
)
def test_arrays_hold_what_devices_do_not_change(values, message):
    with pytest.raises(BadInputError, match=message) as error:
        from_arrays({"x": values}, ["a", "b", "c"])
    assert "zebra" not in str(error.value)


def test_arrays_that_fit_stay_as_they_are():
    import ml_dtypes

    for dtype in (bool, np.int64, np.uint64, np.uint8, np.float16, np.float64, ml_dtypes.bfloat16):
        array = np.array([0, 1, 1]).astype(dtype)
        found = from_arrays({"x": array}, np.array([5, 6, 5])).read(np.arange(3))["x"]
        assert found.dtype == array.dtype
        assert sorted(found.astype(float)) == [0, 1, 1]
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"who": ["a", "b"], "x": [0.5, 1.5]})
    assert from_arrays({"x": frame["x"]}, frame["who"]).num_users == 2
    with pytest.raises(BadInputError, match=r"arrays is \(list\): give arrays by name"):
        from_arrays([["zebra"]], ["a"])
    for arrays in ({"x": [1.0]}, {"tokens": [1]}):
        with pytest.raises(BadInputError, match="a tokenizer goes with tokens"):
            from_arrays(arrays, ["a"], "bytes")
