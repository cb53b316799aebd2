"""Rows that cannot be used are left out one by one: none of them moves another row or its owner."""

import csv
import dataclasses
import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from dpfl_jax.cli.main import main
from dpfl_jax.data import DataConfig, load_dataset, load_examples
from dpfl_jax.data import build as building
from dpfl_jax.data.shards import open_store
from dpfl_jax.errors import BadInputError

PEOPLE = [f"p{i % 7}" for i in range(30)]
TEXTS = [{"user": user, "text": f"text {i}"} for i, user in enumerate(PEOPLE)]
TABLE = [{"user": user, "a": float(i % 9), "b": i / 7, "y": i % 2} for i, user in enumerate(PEOPLE)]
# By kind of data and file: rows that are bad by themselves.
BAD = {
    ("text", "jsonl"): [{"text": "nobody"}, {"user": None, "text": "x"}, {"user": "p1"},
                        {"user": "p1", "text": 3.5}, "not JSON",
                        '{"user": "ann", "user": "bob", "text": "x"}', b'{"user": "p\xff"}', "[1]"],
    ("text", "csv"): [{"user": "", "text": "nobody"}, {"user": "1.0", "text": "a gap"}],
    ("text", "tsv"): [{"user": "", "text": "nobody"}],
    ("text", "parquet"): [{"user": None, "text": "nobody"}, {"user": "p1", "text": None}],
    ("table", "jsonl"): [{"user": "p1", "a": "x", "b": 1, "y": 0}, "{",
                         {"user": None, "a": 1, "b": 1, "y": 0}],
    ("table", "csv"): [{"user": "p1", "a": "", "b": 1, "y": 0},
                       {"user": "p2", "a": 1, "b": "nan", "y": 0},
                       {"user": "p3", "a": 1, "b": 1, "y": 2},
                       {"user": "", "a": 1, "b": 1, "y": 0}],
    ("table", "tsv"): [{"user": "p1", "a": "?", "b": 1, "y": 0}],
    ("table", "parquet"): [{"user": "p1", "a": None, "b": 1.0, "y": 0}],
}  # fmt: skip


PARTS = {"validation_fraction": 0.0, "test_fraction": 0.0}


def write(path, rows):
    if path.suffix == ".jsonl":
        lines = [json.dumps(row) if isinstance(row, dict) else row for row in rows]
        lines = [line.encode() if isinstance(line, str) else line for line in lines]
        path.write_bytes(b"\n".join(lines))
    elif path.suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            delimiter = "\t" if path.suffix == ".tsv" else ","
            writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    return path


def config_of(kind, format, path, **changes):
    given = {"target_column": "y", "classes": 2} if kind == "table" else {}
    given |= {"source": format, "path": str(path), "seq_len": 16}
    return DataConfig(**(given | changes))


@pytest.mark.parametrize(("kind", "format"), BAD)
def test_the_others_stay_as_they_are(kind, format, tmp_path):
    good = {"text": TEXTS, "table": TABLE}[kind]
    alone = write(tmp_path / f"good.{format}", good)
    for owner in ("user", None)[: 1 + (kind == "table")]:
        more, bad = {"user_column": owner}, BAD[kind, format]
        if kind == "table":
            more |= {"input_columns": ("a", "b")}
        if owner is None:  # every row is a person of its own
            bad = [row for row in bad if not isinstance(row, dict) or row["user"]]
        mixed = list(good)
        for number, row in enumerate(bad):
            mixed.insert(4 * number, row)
        path = write(tmp_path / f"mixed.{format}", mixed)
        wanted = load_examples(config_of(kind, format, alone, **more))
        found = load_examples(config_of(kind, format, path, on_bad_row="drop", **more))
        assert found.store.fingerprint == wanted.store.fingerprint
        assert (found.dropped, wanted.dropped) == (len(bad), 0)
        with pytest.raises(BadInputError, match="mixed") as caught:
            load_examples(config_of(kind, format, path, **more))
        assert kind == "table" or "\n" not in str(caught.value)  # a line for each column


def test_the_count_is_stated_and_named_as_not_covered(tmp_path):
    path = write(tmp_path / "posts.jsonl", [*TEXTS, *BAD["text", "jsonl"]])
    config = config_of("text", "jsonl", path, on_bad_row="drop", **PARTS)
    assert "; 8 bad rows left out, a number that no guarantee covers" in (
        load_dataset(config).description
    )
    assert any("data.on_bad_row=drop" in caveat for caveat in config.caveats())
    assert not config_of("text", "jsonl", path).caveats()


def test_what_is_not_of_one_row_is_an_error_all_the_same(tmp_path):
    def refused(path, match, **more):
        kind = "text" if "target_column" not in more else "table"
        config = config_of(kind, path.suffix[1:], path, on_bad_row="drop", **more)
        with pytest.raises(BadInputError, match=match):
            load_examples(config)

    # Where a row of a CSV file ends is not told by that row alone.
    torn = tmp_path / "torn.csv"
    torn.write_text('user,text\np1,one\np2,"two\np3,three"\np4,four,five\n')
    refused(torn, "torn.csv")
    # Rows do not say what columns there are.
    rows = write(tmp_path / "first.jsonl", [{"user": "p", "a": 1, "y": 0}, *TABLE])
    refused(
        rows, "the first person's row would choose the inputs for all", target_column="y", classes=2
    )
    everything = write(tmp_path / "all.jsonl", TEXTS)
    refused(everything, "no row can be used, 30 were left out: .* no column 'body'",
            text_column="body")  # fmt: skip
    with pytest.raises(BadInputError, match=r"data\.on_bad_row is for files"):
        load_examples(DataConfig(on_bad_row="drop"))


def test_a_column_of_numbers_is_no_text(tmp_path):
    rows = [{"user": user, "text": i * 1.5} for i, user in enumerate(PEOPLE)]
    for format in ("csv", "tsv", "jsonl", "parquet"):
        path = write(tmp_path / f"numbers.{format}", rows)
        with pytest.raises(BadInputError, match=r"is a number: set data\.text_column|not text"):
            load_examples(config_of("text", format, path))
    # One text that is a number is a text.
    path = write(tmp_path / "mixed.csv", [*rows, {"user": "p1", "text": "words"}])
    assert load_examples(config_of("text", "csv", path)).store.num_users == 7


def test_a_store_is_built_without_them(tmp_path, capsys, monkeypatch):
    good = write(tmp_path / "good.jsonl", TEXTS)
    path = write(tmp_path / "posts.jsonl", [*BAD["text", "jsonl"], *TEXTS])

    def build(path, out, *more):
        out = tmp_path / out
        command = ["data", "build", "--input", path, "--out", out, "--seq-len", "16", "--json"]
        code = main([*map(str, command), *more])
        said = capsys.readouterr()
        return code, json.loads(said.out.splitlines()[-1]) if code == 0 else said.err

    assert build(path, "one")[0] == 2
    plain, dropped = build(good, "good")[1], build(path, "two", "--on-bad-row", "drop")[1]
    assert dropped["fingerprint"] == plain["fingerprint"]
    assert (plain["dropped_rows"], dropped["dropped_rows"]) == (0, 8)
    # A build that goes on has counted already.
    real = building.finish
    monkeypatch.setattr(building, "finish", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build(path, "three", "--on-bad-row", "drop")
    monkeypatch.setattr(building, "finish", real)
    assert build(path, "three", "--on-bad-row", "drop")[1]["dropped_rows"] == 8
    assert open_store(tmp_path / "three").manifest.build["dropped_rows"] == 8
    config = DataConfig(source="store", path=str(tmp_path / "three"), seq_len=16, **PARTS)
    assert "8 bad rows left out" in load_dataset(config).description
    code, said = build(path, "four", "--on-bad-row", "drop", "--engine", "beam")
    assert (code, "read by the local engine" in said) == (2, True)


def test_a_bad_row_is_judged_by_itself(tmp_path):
    """Whichever rows stand beside it, what is left of the others is the same."""
    path = tmp_path / "posts.jsonl"
    config = config_of("text", "jsonl", path, on_bad_row="drop")
    kept = {}
    for row in BAD["text", "jsonl"]:
        for place in (0, 3, 30):
            write(path, [*TEXTS[:place], row, *TEXTS[place:]])
            found = load_examples(dataclasses.replace(config))
            kept[found.store.fingerprint] = found.dropped
    assert list(kept.values()) == [1]
