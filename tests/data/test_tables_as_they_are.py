"""A hundred CSV files and a hundred frames as people have them: right numbers, or one sentence."""

import dataclasses
import datetime
import itertools

import numpy as np
import pytest

from dpfl_jax.data import SourceConfig, from_pandas, load_examples
from dpfl_jax.errors import BadInputError

# Ten public tables: by column (what it holds, what it is scaled by).
NUMBER, WORD, DATE, FLAG, CODE = "number", "word", "date", "flag", "code"
SHAPES = {
    "heart disease": ("patient", "sick", [("age", NUMBER), ("chol", NUMBER), ("cp", CODE)]),
    "adult": ("person", "income", [("age", NUMBER), ("work", WORD), ("gain", NUMBER)]),
    "medical cost": ("policy", "charges", [("bmi", NUMBER), ("smoker", WORD), ("region", WORD)]),
    "bike sharing": ("station", "count", [("day", DATE), ("temp", NUMBER), ("holiday", FLAG)]),
    "titanic": ("passenger", "survived", [("fare", NUMBER), ("class", CODE), ("sex", WORD)]),
    "wine": ("bottle", "quality", [("acid", NUMBER), ("sugar", NUMBER), ("red", FLAG)]),
    "readmission": ("nr", "back", [("stay", NUMBER), ("admitted", DATE), ("drug", WORD)]),
    "credit": ("client", "default", [("limit", NUMBER), ("bill", NUMBER), ("pay", CODE)]),
    "students": ("pupil", "grade", [("absences", NUMBER), ("school", WORD), ("sex", WORD)]),
    "air quality": ("site", "ozone", [("hour", DATE), ("wind", NUMBER), ("co", NUMBER)]),
}
CLASSES = {"sick", "income", "survived", "back", "default"}
WORDS, CODES, SCALE = ("zebrastreifen", "élan"), (1, 2, 4), (50.0, 20.0)
START = datetime.datetime(2000, 1, 1)


def people_and_rows(shape):
    """Rows of Python's own values, two or three of each person, and what they should become."""
    user, target, columns = SHAPES[shape]
    rng = np.random.default_rng(list(SHAPES).index(shape))
    rows = []
    for i in range(30):
        row = {user: f"person-{i % 13}"}
        for name, kind in columns:
            row[name] = {
                NUMBER: round(float(rng.uniform(20, 90)), 2), WORD: WORDS[rng.integers(2)],
                DATE: START + datetime.timedelta(days=int(rng.integers(8000))),
                FLAG: int(rng.integers(2)), CODE: CODES[rng.integers(3)],
            }[kind]  # fmt: skip
        row[target] = int(i % 3 == 0) if target in CLASSES else round(float(rng.uniform(20, 90)), 2)
        rows.append(row)
    return rows


def numbers(kind, value, coded):
    if value is None:  # a gap
        return [0.0]
    if kind == NUMBER:
        return [(value - SCALE[0]) / SCALE[1]]
    if kind == DATE:
        return [((value - START).days / 365.25 - 10) / 10]
    if kind == FLAG or (kind == CODE and not coded):
        return [float(value)]
    return [float(word == value) for word in (WORDS if kind == WORD else CODES)]


def wanted(shape, rows, coded=True):
    """By person: inputs with their labels, as they should be read; codes are words or numbers."""
    user, target, columns = SHAPES[shape]
    found = {}
    for row in rows:
        x = [n for name, kind in columns for n in numbers(kind, row[name], coded)]
        label = row[target] if target in CLASSES else (row[target] - SCALE[0]) / SCALE[1]
        found.setdefault(str(row[user]), []).append([*x, label])
    return found


def of_store(store):
    found = {}
    for u, name in enumerate(store.user_ids(range(store.num_users))):
        read = store.read(np.arange(*store.user_offsets[u : u + 2]))
        found[name] = np.concatenate([read["x"], read["label"][:, None]], axis=1)
    return found


def same(found, rows):
    assert set(found) == set(rows)
    for name, held in rows.items():
        np.testing.assert_allclose(found[name], held, rtol=1e-5, atol=1e-5)


def declared(shape):
    """What the owner of the table knows of it."""
    _, target, columns = SHAPES[shape]
    kinds = dict(columns) | ({} if target in CLASSES else {target: NUMBER})
    scale = {n: SCALE for n, kind in kinds.items() if kind == NUMBER}
    return {
        "scale": scale | {n: (10.0, 10.0) for n, kind in columns if kind == DATE},
        "categories": {n: CODES if k == CODE else WORDS for n, k in columns if k in (CODE, WORD)},
        "dates": {n: "%d.%m.%Y" for n, kind in columns if kind == DATE},
        "classes": 2 if target in CLASSES else None,
    }


def gap(shape, rows):
    """Every seventh row lacks what may be lacking."""
    _, _, columns = SHAPES[shape]
    name = next(name for name, kind in columns if kind == NUMBER)
    return name, [row | {name: None} if i % 7 == 0 else row for i, row in enumerate(rows)]


def text(value, decimal="."):
    if value is None:
        return ""
    if isinstance(value, datetime.datetime):
        return value.strftime("%d.%m.%Y")
    return str(value).replace(".", decimal) if isinstance(value, float) else str(value)


# ---- files --------------------------------------------------------------------------------------


@dataclasses.dataclass
class File:
    """How a file is written; what its owner sets; whether it reads without that, or never."""

    sign: str = ","
    encoding: str = "utf-8"
    decimal: str = "."
    settings: dict = dataclasses.field(default_factory=dict)
    refused: str = ""


FILES = {
    "as it should be": File(),
    "with a BOM": File(encoding="utf-8-sig"),
    "of Excel in Vienna": File(";", "cp1252", ",", {"delimiter": ";", "encoding": "cp1252",
                               "decimal": "comma"}),
    "of tabs": File("\t", settings={"delimiter": "\t"}),
    "of bars in UTF-16": File("|", "utf-16", settings={"delimiter": "|"}),
    "with pandas' index": File(),
    "with gaps": File(),
    "with a count of rows": File(refused="numbers of rows, .* in 'nummer'"),
    "with a name twice": File(refused="two columns are called"),
    "with ids of a spreadsheet": File(refused="powers of ten"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_file(shape, kind, tmp_path):
    user, target, _ = SHAPES[shape]
    rows, how, settings = people_and_rows(shape), FILES[kind], declared(shape)
    if kind == "with gaps":
        name, rows = gap(shape, rows)
        settings["missing"] = (name,)
    shown = [{name: text(value, how.decimal) for name, value in row.items()} for row in rows]
    if kind == "with pandas' index":
        shown = [{"": str(i), **row} for i, row in enumerate(shown)]
    if kind == "with a count of rows":
        shown = [{**row, "nummer": str(i + 1)} for i, row in enumerate(shown)]
    if kind == "with ids of a spreadsheet":
        shown = [{**row, user: "1.23457E+15"} for row in shown]
    header = [target if kind == "with a name twice" and n == user else n for n in shown[0]]
    path = tmp_path / "table.csv"
    lines = [how.sign.join(cells) for cells in (header, *(row.values() for row in shown))]
    path.write_text("\n".join(lines), encoding=how.encoding)
    plain = SourceConfig(source="csv", path=str(path), user_column=user, target_column=target)
    whole = dataclasses.replace(plain, **settings, **how.settings)
    if how.refused:
        with pytest.raises(BadInputError, match=how.refused):
            load_examples(whole)
    else:
        same(of_store(load_examples(whole).store), wanted(shape, rows))
    # With less said it is read as well, or refused in a sentence that holds nobody's cells.
    for left_out in (set(), {"categories"}, {"scale"}, {"classes", "dates"}, set(settings)):
        given = {n: v for n, v in settings.items() if n not in left_out}
        for more in ({}, how.settings):
            refuses_or_is_right(dataclasses.replace(plain, **given, **more), shape, rows, left_out)


def refuses_or_is_right(config, shape, rows, left_out):
    try:
        found = of_store(load_examples(config).store)
    except BadInputError as error:
        told = str(error)
        assert not any(word in told for word in (*WORDS, "person-", "E+15"))
    else:
        assert "scale" not in left_out or not any(k == NUMBER for _, k in SHAPES[shape][2])
        same(found, wanted(shape, rows, coded=bool(config.categories)))


# ---- frames -------------------------------------------------------------------------------------

MISSING = ("", " \t", "\u00a0", "N/A", "none", r"\N", None, float("nan"), "?", "NULL")
FRAMES = {
    "as it should be": "",
    "of huge ids": "",
    "of ids that became floats": "floating-point number",
    "with gaps": "",
    "of pandas' own types": "",
    "of categories and times": "",
    "with its index as a column": "numbers of rows, from which nothing is learned, in 'index'",
    "with a name twice": "two columns of the frame",
    "of objects": "",
    "with an id missing": "a user id is",
}


@pytest.mark.parametrize("kind", FRAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_frame(shape, kind):
    pandas = pytest.importorskip("pandas")
    user, target, columns = SHAPES[shape]
    rows, settings = people_and_rows(shape), declared(shape)
    if kind == "of huge ids":
        rows = [row | {user: 2**60 + int(row[user][7:])} for row in rows]
    if kind == "of ids that became floats":
        rows = [row | {user: float(row[user][7:])} for row in rows]
    if kind == "with gaps":
        name, rows = gap(shape, rows)
        settings["missing"] = (name,)
    if kind == "with an id missing":
        rows[5][user] = MISSING[list(SHAPES).index(shape)]
    frame = pandas.DataFrame(rows)
    if kind == "of pandas' own types":
        frame = frame.convert_dtypes()
    if kind == "of categories and times":
        frame = frame.astype({n: "category" for n, k in columns if k in (WORD, CODE)})
        frame = frame.astype({n: "datetime64[ns]" for n, k in columns if k == DATE})
    if kind == "with its index as a column":
        frame = frame.reset_index()
    if kind == "with a name twice":
        frame = frame.set_axis([n if n != user else target for n in frame.columns], axis=1)
    if kind == "of objects":
        frame = frame.astype(object)
    if message := FRAMES[kind]:
        with pytest.raises(BadInputError, match=message):
            from_pandas(frame, user=user, target=target, **settings)
    else:
        found = from_pandas(frame, user=user, target=target, **settings)
        same(of_store(found), wanted(shape, rows))
    for left_out in ("categories", "scale", "dates"):
        given = {n: v for n, v in settings.items() if n != left_out}
        try:
            store = from_pandas(frame, user=user, target=target, **given)
        except BadInputError as error:
            told = str(error)
        else:
            told = ""
            assert left_out != "scale"
            same(of_store(store), wanted(shape, rows, coded="categories" in given))
        assert not any(word in told for word in (*WORDS, "person-", str(2**60)[:9]))


# ---- cells --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "settings", "message"),
    [
        (["1_000"], {}, "words, not numbers, in 'a'"),
        (["12,5"], {}, r"numbers with commas in 'a'.*data\.decimal=comma"),
        (["1,234.5"], {}, "numbers with commas"),
        (["1.234,5"], {"decimal": "comma"}, r"numbers with points in 'a', with data\.decimal"),
        (["2020-01-02T03:04:05"], {}, "dates in 'a'"),
        (["31.12.2020"], {"decimal": "comma"}, "dates in 'a'"),
        (["31.12.2020"], {"dates": {"a": "%Y-%m-%d"}}, "not written as data.dates says"),
        (["inf"], {}, "float32 cannot hold"),
        (["?", "."], {}, r"cells without a value in 'a' \(first: .*row 1\).*data\.missing=\[a\]"),
        (["w"], {"categories": {"a": ("f", "m")}}, "that data.categories does not list"),
        ([""], {"categories": {"a": ("f", "m")}}, "cells without a value in 'a'"),
        (["1"], {"missing": ("a",)}, r"so declare data\.scale=\{a:"),
        (["1"], {"missing": ("b",)}, "data.missing names 'b', but the inputs are"),
        (["1"], {"categories": {"a": ("f",)}}, "two words or more"),
        (["1"], {"categories": {"a": ("f", "f")}}, "each of them once"),
        (["f"], {"categories": {"a": ("f", "m")}, "scale": {"a": (0, 1)}}, "words of data.cat"),
        (["1"], {"dates": {"b": "%Y"}}, r"data\.dates names \['b'\]"),
        (
            ["1"],
            {"categories": {"y": ("0", "1", "2")}, "classes": 2},
            "lists 3 words",
        ),
    ],
)
def test_what_is_wrong_with_a_cell(cells, settings, message, tmp_path):
    path = tmp_path / "table.tsv"
    path.write_text("\n".join(["who\ta\ty", *(f"w{i}\t{c}\t0" for i, c in enumerate(cells))]))
    config = SourceConfig(source="tsv", path=str(path), user_column="who", target_column="y")
    with pytest.raises(BadInputError, match=message):
        load_examples(dataclasses.replace(config, **settings))


def test_all_that_is_wrong_is_told_at_once_a_line_for_each_column(tmp_path):
    path = tmp_path / "table.csv"
    rows = [f"p{i},{i % 4}.01.2020,{'fm'[i % 2]},{'' if i % 5 else 1},{40 + i % 9},ab,{i % 2}"
            for i in range(40)]  # fmt: skip
    path.write_text("\n".join(["who,seen,sex,bmi,age,ward,y", *rows]))
    config = SourceConfig(source="csv", path=str(path), user_column="who", target_column="y")
    with pytest.raises(BadInputError) as error:
        load_examples(config)
    told = str(error.value)
    lines = [line.partition(" (first: ")[0] for line in told.splitlines()]
    assert [line for line in lines if line.startswith("- ")] == [
        "- dates in 'seen'",
        "- words, not numbers, in 'sex'",
        "- words, not numbers, in 'ward'",
        "- cells without a value in 'bmi'",
        "- numbers far from order 1 in 'age', which would swamp all others",
        "- two values in 'y'",
    ]
    assert told.count("data.categories={sex: [...]}") == 1
    assert lines[-1] == "or name the columns to learn from as data.input_columns"


def test_a_word_may_be_none_and_a_gap_a_word(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("who,sex,b,y\n" + "".join(f"w{i},{c},1,0.5\n" for i, c in enumerate("fm?")))
    config = SourceConfig(source="csv", path=str(path), user_column="who", target_column="y")
    for settings, rows in (
        ({"categories": {"sex": ("m", "f")}, "missing": ("s*",)}, [[0, 1], [1, 0], [0, 0]]),
        ({"categories": {"sex": ("m", "f", "")}}, [[0, 1, 0], [1, 0, 0], [0, 0, 1]]),
    ):
        found = of_store(load_examples(dataclasses.replace(config, **settings)).store)
        assert [found[f"w{i}"][0, :-2].tolist() for i in range(3)] == rows


def test_pandas_index_is_no_input_unless_it_is_named(tmp_path):
    path = tmp_path / "table.csv"
    names = ("", "Unnamed: 0", "Unnamed: 0.1", "__index_level_0__")
    for name, inputs in itertools.product(names, (None, ("*",))):
        path.write_text(f"{name},who,a,y\n" + "".join(f"{i},w{i},1,.5\n" for i in range(5)))
        config = SourceConfig(
            source="csv", path=str(path), user_column="who", target_column="y", input_columns=inputs
        )
        assert load_examples(config).task.table.inputs == ("a",)
        named = dataclasses.replace(config, input_columns=("a", name))
        assert load_examples(named).task.table.inputs == ("a", name)
