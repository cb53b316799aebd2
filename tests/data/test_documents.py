"""Readers of user-partitioned text: what they give and how they refuse bad files."""

import gzip
import json
import tracemalloc

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from dpfl_jax.data.documents import DocumentFiles, read_documents
from dpfl_jax.data.keys import UserKey
from dpfl_jax.data.rows import expand_paths, guess_format, read_rows
from dpfl_jax.errors import BadInputError

ROWS = [("ann", "one"), ("bob", 'two\nlines, "quoted"'), ("ann", "three é")]


def write(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps({"user": u, "text": t}) for u, t in ROWS) + "\n\n")
    elif kind == "jsonl.gz":
        with gzip.open(path, "wt") as file:
            file.writelines(json.dumps({"user": u, "text": t}) + "\n" for u, t in ROWS)
    elif kind == "parquet":
        table = pa.table({"user": [u for u, _ in ROWS], "text": [t for _, t in ROWS]})
        pa.parquet.write_table(table, path)
    else:
        lines = ["n,user,text"]
        for i, (u, t) in enumerate(ROWS):
            quoted = t.replace('"', '""')
            lines.append(f'{i},{u},"{quoted}"')
        path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "csv"])
def test_reads_every_format_alike(tmp_path, kind):
    assert list(read_documents([write(tmp_path, kind)])) == ROWS


def test_numbers_become_decimal_ids(tmp_path):
    pa.parquet.write_table(pa.table({"user": [7, 8], "text": ["a", "b"]}), tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_text('{"user": 7, "text": "a"}\n')
    (tmp_path / "x.csv").write_text("user,text\n007,a\n")
    assert [u for u, _ in read_documents([tmp_path / "x.parquet"])] == ["7", "8"]
    assert [u for u, _ in read_documents([tmp_path / "x.jsonl"])] == ["7"]
    assert [u for u, _ in read_documents([tmp_path / "x.csv"])] == ["007"]  # an id, not a number


def test_folder_gives_one_user_per_entry(tmp_path):
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann" / "b.txt").write_text("second")
    (tmp_path / "ann" / "a.txt").write_text("first")
    (tmp_path / "bob.txt").write_text("alone")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    expected = [("ann", "first"), ("ann", "second"), ("bob.txt", "alone")]
    assert list(read_documents([tmp_path])) == expected


def test_a_folder_of_texts_has_no_links_to_others(tmp_path):
    (tmp_path / "ours").write_text("secret")
    for place in ("texts/ann/b.txt", "texts/bob"):
        link = tmp_path / place
        link.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / "one.txt").write_text("a")
        link.symlink_to(tmp_path / "ours")
        with pytest.raises(
            BadInputError, match=f"{link.name} links to .*ours, outside of the folder"
        ):
            list(read_documents([tmp_path / "texts"]))
        link.unlink()
    (tmp_path / "texts" / "two.txt").symlink_to("one.txt")
    assert list(read_documents([tmp_path / "texts"])) == [("one.txt", "a"), ("two.txt", "a")]


def test_a_batch_of_many_nulls_is_read_in_parts(tmp_path):
    """A file of a few hundred bytes, whose rows would take gigabytes at once."""
    batch = pa.record_batch([pa.nulls(10**6)] * 2, names=["user", "text"])
    with pa.ipc.new_file(str(tmp_path / "n.arrow"), batch.schema) as writer:
        writer.write_batch(batch)
    tracemalloc.start()
    try:
        assert next(read_rows(tmp_path / "n.arrow", "arrow"))[1] == {"user": None, "text": None}
        assert tracemalloc.get_traced_memory()[1] < 10**7
    finally:
        tracemalloc.stop()


def test_globs_and_lists(tmp_path):
    for name in ("b.csv", "a.csv"):
        (tmp_path / name).write_text("user,text\nu,t\n")
    assert [p.name for p in expand_paths(str(tmp_path / "*.csv"))] == ["a.csv", "b.csv"]
    assert len(expand_paths((str(tmp_path / "a.csv"), str(tmp_path / "b.csv")))) == 2
    with pytest.raises(BadInputError, match="does not exist"):
        expand_paths(str(tmp_path / "*.parquet"))
    with pytest.raises(BadInputError, match="no data files"):
        expand_paths(None)
    with pytest.raises(BadInputError, match="cannot tell the format"):
        guess_format(tmp_path / "data.xyz")


BAD = {
    "missing column.jsonl": (b'{"user": "a", "txt": "b"}\n', "line 1: there is no column 'text'"),
    "missing column.csv": (
        b"user,txt\na,b\n",
        "no column 'text'; the columns are .*data.target_column",
    ),
    "null user.jsonl": (b'{"user":"a","text":"x"}\n{"user":null,"text":"x"}\n', "line 2"),
    "nan user.jsonl": (b'{"user": NaN, "text": "x"}\n', "a user id is nan .*line 1"),
    "true user.jsonl": (b'{"user": true, "text": "x"}\n', "a user id is true or false"),
    "blank user.csv": (b"user,text\na,b\n,b\n", "a user id is '' .*row 2"),
    "null text.jsonl": (
        b'{"user": "a", "text": null}\n',
        "line 1: 'text' holds NoneType, not text",
    ),
    "not utf8.jsonl": (b'{"user":"a","text":"x"}\n{"user":"a","text":"\xff"}\n', "line 2.*UTF-8"),
    "surrogate.jsonl": (b'{"user": "a", "text": "\\ud800"}\n', "line 1: the text is not UTF-8"),
    "not utf8.csv": (b"user,text\na,b\na,\xff\xfe\n", "not UTF-8"),
    # Read to the end, it would make one text of all people behind it.
    "quotation.csv": (b'user,text\na,b\nb,"never closed\nc,d\ne,f\n', "line 5 .*not closed"),
    "quotation closed late.csv": (b'user,text\na,"b\nc,"d"\n', "line 3 .*not closed"),
    "too few cells.csv": (b"user,text\na,b\nc\n", "line 3: 1 cells, but there are 2 columns"),
    "too many cells.csv": (b"user,text\na,b,c\n", "line 2: 3 cells"),
    "not json.jsonl": (b'{"user": "a"\n', "line 1: not a JSON object"),
    "a list.jsonl": (b"[1]\n", "line 1: not a JSON object but list"),
    "empty.jsonl": (b"", "is empty"),
    "empty.csv": (b"", "is empty"),
    "empty.parquet": (b"", "is empty"),
    "only header.csv": (b"user,text\n", "is empty"),
    "not parquet.parquet": (b"PAR1 but no more", "not a readable parquet file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named_with_their_line(tmp_path, name):
    content, message = BAD[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=message) as caught:
        list(read_documents([path]))
    assert name in str(caught.value)


def test_csv_cells_may_hold_quotations_line_breaks_and_long_texts(tmp_path):
    path, long = tmp_path / "posts.csv", "word " * 60_000
    path.write_text(f'\ufeffuser,text\n\na,"said ""so"",\nand went"\nb,5" wide\nc,{long}\n')
    assert list(read_documents([path])) == [
        ("a", 'said "so",\nand went'), ("b", '5" wide'), ("c", long)
    ]  # fmt: skip


def test_parquet_null_user_is_named_by_row(tmp_path):
    path = tmp_path / "x.parquet"
    pa.parquet.write_table(pa.table({"user": ["a", None], "text": ["x", "y"]}), path)
    with pytest.raises(BadInputError, match=r"a user id is None \(.*x.parquet, row 2\)"):
        list(read_documents([path]))
    with pytest.raises(BadInputError, match="no column 'author'"):
        list(read_documents([path], DocumentFiles(user_column="author")))


@pytest.mark.parametrize("saved", [True, False])
def test_huggingface_folders(tmp_path, saved):
    """What ``datasets`` writes: Arrow streams, with ``state.json`` giving their order."""
    table = pa.table({"user": [u for u, _ in ROWS], "text": [t for _, t in ROWS]})
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table.slice(0, 2), table.slice(2))):
        writer = pa.ipc.new_stream if saved else pa.ipc.new_file
        with pa.OSFile(str(tmp_path / name), "wb") as file, writer(file, table.schema) as out:
            out.write_table(part)
    order = list(ROWS)
    if saved:
        state = {"_data_files": [{"filename": n} for n in reversed(names)]}
        (tmp_path / "state.json").write_text(json.dumps(state))
        order = [ROWS[2], *ROWS[:2]]
    assert list(read_documents([tmp_path], DocumentFiles("huggingface"))) == order
    with pytest.raises(BadInputError, match=r"arrow: there is no column 'author'"):
        list(read_documents([tmp_path], DocumentFiles("huggingface", "author")))
    (tmp_path / names[0]).write_bytes(b"ARROW1 no more")
    with pytest.raises(BadInputError, match=r"00000-of-00002.arrow: not a readable arrow file"):
        list(read_documents([tmp_path], DocumentFiles("huggingface")))


def test_the_state_of_a_saved_data_set_names_its_own_files(tmp_path):
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "../own.arrow"}]}')
    with pytest.raises(BadInputError, match="names a file outside its folder"):
        list(read_documents([tmp_path], DocumentFiles("huggingface")))


def test_huggingface_folder_without_files(tmp_path):
    with pytest.raises(BadInputError, match=r"holds no \.arrow or \.parquet"):
        list(read_documents([tmp_path], DocumentFiles("huggingface")))


def user_of_row(row):
    """A key function, as a user would write one."""
    return row["a"]["b"] + "!"


def test_key_expressions():
    row = {"a": {"b": "deep"}, "n": 7, "url": "HTTP://www.X.org/1", "a.b": "flat", "none": None}
    where = "file, line 3"
    for expression, user in (
        ("n", "7"),
        ("a.b", "flat"),
        ("{n}/{a.b}", "7/flat"),
        ("domain(url)", "x.org"),
        (f"{__name__}:user_of_row", "deep!"),
    ):
        assert UserKey(expression)(row, where) == user
    assert UserKey("a.b")({"a": {"b": "deep"}}, where) == "deep"
    assert UserKey("{play}/{who.name}").columns == ["play", "who"]
    assert UserKey(f"{__name__}:user_of_row").columns is None
    for expression, message in (
        ("x", "line 3: there is no column 'x'"),
        ("{n}/{none}", "a user id is None .*line 3"),
        ("domain(none)", "a user id is None"),
        ("a", "a user id is an object"),
    ):
        with pytest.raises(BadInputError, match=message):
            UserKey(expression)(row, where)
    with pytest.raises(BadInputError, match=r"domain\(n\)"):
        UserKey("domain(n)")({"n": "///"}, where)
    with pytest.raises(BadInputError, match="unknown function"):
        UserKey("eval(url)")
    with pytest.raises(BadInputError, match="which cannot be used"):
        UserKey("no_module_of_that_name:f")
    with pytest.raises(BadInputError, match="floating-point"):
        UserKey("n")({"n": 7.0}, where)


@pytest.mark.parametrize(
    "missing",
    ["", " ", "\t", "\u00a0", "N/A", "n/a", "NA", "none", "None", r"\N", "NULL", "<NA>", "NaT", "?",
     "-", None, float("nan")],
)  # fmt: skip
def test_what_stands_for_nobody_is_nobody(missing):
    with pytest.raises(BadInputError, match="every row needs a user id"):
        UserKey("who")({"who": missing}, "row 1")
    with pytest.raises(BadInputError, match="every row needs a user id"):
        UserKey("{play}/{who}")({"play": "Hamlet", "who": missing}, "row 1")


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ("1.23457E+15", "a number in powers of ten"),
        ("1,23457e+15", "a number in powers of ten"),
        ("7E+20", "a number in powers of ten"),
        (12.5, "store ids as integers or text"),
        (True, "store ids as text or whole numbers"),
        ({"b": 1}, "store ids as text or whole numbers"),
        (["zebra"], None),
        ("7e20", None),  # a code
        ("nobody", None),
        ("None of the above", None),
    ],
)
def test_an_id_of_the_wrong_type_is_not_a_row_to_drop(user, message):
    if message is None:
        assert UserKey("who")({"who": user}, "row 1")
        return
    with pytest.raises(BadInputError, match=message) as error:
        UserKey("who")({"who": user}, "row 1")
    assert "drop such rows" not in str(error.value)
    assert str(user) not in str(error.value)
