"""Tables of numbers: columns by name, declared scales, one clear sentence for what is wrong."""

import collections
import csv
import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from dpfl_jax.accounting import Guarantee
from dpfl_jax.data import DataConfig, SourceConfig, load_dataset, load_examples
from dpfl_jax.data.store import unit_key_of
from dpfl_jax.errors import BadInputError
from dpfl_jax.run.public_inputs import about

ROWS = [
    {"who": "ann", "a": 1.0, "b": 4.0, "y": 2.0, "site": "north"},
    {"who": "bob", "a": 2.0, "b": 5.0, "y": 0.0, "site": "south"},
    {"who": "ann", "a": 3.0, "b": 6.0, "y": 1.0, "site": "east"},
]


def write(folder, format, rows=ROWS):
    path = folder / f"table.{format}"
    if format == "parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif format == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            delimiter = "\t" if format == "tsv" else ","
            writer = csv.DictWriter(file, rows[0].keys(), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


def config(path, **more):
    format = path.rpartition(".")[2]
    settings = {"user_column": "who", "target_column": "y", "silo_column": "site", **more}
    return SourceConfig(source=format, path=path, **settings)


def of_user(store, user):
    u = store.user_ids(range(store.num_users)).index(user)
    return store.read(np.arange(*store.user_offsets[u : u + 2]))


@pytest.mark.parametrize("format", ["csv", "tsv", "parquet", "jsonl"])
def test_every_format_gives_the_same_examples(format, tmp_path):
    inputs = ("a", "b") if format == "jsonl" else None
    found = load_examples(config(write(tmp_path, format), input_columns=inputs))
    assert found.task.kind == "regression"
    assert found.task.input_shape == (2,)
    assert not found.task.scaled
    ann = of_user(found.store, "ann")
    np.testing.assert_array_equal(ann["x"], [[1, 4], [3, 6]])
    np.testing.assert_array_equal(ann["label"], np.float32([2, 1]))
    np.testing.assert_array_equal(ann["silo"], [1, 0])  # east, north, south
    assert of_user(found.store, "bob")["silo"].tolist() == [2]


def test_classes_scales_patterns_and_kept_columns(tmp_path):
    path = write(tmp_path, "csv")
    found = load_examples(config(path, classes=3, input_columns=("[ab]",), scale={"b": (5, 0.5)}))
    assert (found.task.kind, found.task.classes, found.task.scaled) == ("classes", 3, True)
    ann = of_user(found.store, "ann")
    np.testing.assert_array_equal(ann["x"], [[1, -2], [3, 2]])
    assert ann["label"].dtype == np.int32
    # A column that is kept (a budget, say) is no input.
    kept = load_examples(config(path), keep=("a",))
    assert kept.task.input_shape == (1,)
    assert of_user(kept.store, "ann")["a"].tolist() == [1.0, 3.0]
    scaled = load_examples(config(path, scale={"y": (1, 2)}))
    np.testing.assert_array_equal(of_user(scaled.store, "ann")["label"], [0.5, 0.0])


def test_without_a_user_column_every_row_is_a_person(tmp_path):
    path = write(tmp_path, "csv")
    found = load_examples(config(path, user_column=None, input_columns=("a", "b")))
    assert found.store.num_users == found.store.num_examples == 3
    pairs = load_examples(
        config(path, user_column=None, input_columns=("a",), records_per_user=2)
    ).store
    assert sorted(pairs.examples_per_user.tolist()) == [1, 2]


def test_where_no_column_names_users_the_headline_says_row(tmp_path):
    path = write(
        tmp_path, "csv", [{"user": f"p{i % 50}", "a": i % 7 / 7, "y": i % 5 / 5} for i in range(99)]
    )
    told = {}
    for column in ("user", None):
        section = DataConfig("csv", str(path), column, target_column="y", input_columns=("a",))
        data = load_dataset(section)
        given = Guarantee("user", "add-or-remove one user", "central", 1.0, 1e-5, 1.0, "pld", "all")
        stated = about(given, unit_key_of(data.train), ())
        told[column] = data.description, stated.summary(), str(stated)
    assert "50 users" in told["user"][0]
    assert "for each user by column user" in told["user"][1]
    assert "99 rows" in told[None][0]
    assert " users" not in told[None][0]
    for text in told[None][1:]:
        assert "for each row, which counts as a user" in text
        assert "each user" not in text


def test_numbers_of_silos_follow_their_value(tmp_path):
    rows = [{**row, "site": site} for row, site in zip(ROWS, ("10", "9", "2"))]
    found = load_examples(config(write(tmp_path, "csv", rows)))
    assert of_user(found.store, "ann")["silo"].tolist() == [2, 0]


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({"a": "much"}, {}, r"words, not numbers, in 'a' \(first: .*row 3\).*data\.silo_column"),
        ({"y": "nan"}, {}, r"rows without the target 'y' \(first: .*row 3\)"),
        (
            {"y": "1.5"},
            {"classes": 3},
            r"labels in 'y' that are not whole numbers from 0 to 2 \(first: .*row 3\)",
        ),
        ({"y": "3"}, {"classes": 3}, "not whole numbers from 0 to 2"),
        ({"who": ""}, {}, "user id is ''"),
        ({"site": ""}, {}, "id is ''"),
        ({}, {"target_column": "z"}, "no column 'z'"),
        ({}, {"user_column": "id"}, r"data\.user_column .* or to null"),
        ({}, {"input_columns": ("a", "lab_*")}, r"no column 'lab_\*'"),
        ({}, {"scale": {"c": (0, 1)}}, r"data\.scale names \['c'\]"),
        ({}, {"scale": {"a": (0, 0)}}, r"scale of 'a' is \(0, 0\)"),
        ({}, {"scale": {"a": (float("nan"), 1)}}, "scale of 'a' is"),
        ({}, {"scale": {"y": (0, 1)}, "classes": 3}, "'y', whose values are classes"),
        ({}, {"input_columns": ("a", "who")}, "names 'who', which is the target, an id"),
        ({}, {"silo_column": "y"}, "one column has two uses"),
        ({"a": "1e39"}, {}, "numbers in 'a' that float32 cannot hold"),
        ({"who": "nan"}, {}, "a user id is 'nan'"),
        ({"who": "1.0"}, {}, "the user id is a number with decimals"),
        ({}, {"target_column": None}, r"data\.target_column"),
        ({}, {"records_per_user": 2}, "users of data.source=csv have several"),
    ],
)
def test_what_is_wrong_is_named(change, settings, message, tmp_path):
    path = write(tmp_path, "csv", [*ROWS[:2], {**ROWS[2], **change}])
    with pytest.raises(BadInputError, match=message):
        load_examples(config(path, **settings))


def test_a_data_source_of_ones_own_is_one_file(tmp_path, monkeypatch):
    (tmp_path / "my_coins.py").write_text(
        "import numpy as np\n"
        "from dpfl_jax.data import DataSource\n"
        "from dpfl_jax.task import Task\n"
        "def read(section, split):\n"
        "    for i in range(section.max_users):\n"
        "        x = np.full((2, 3), i, np.float32)\n"
        "        yield f'user {i}', {'x': x, 'label': np.array([0, 1], np.int32)}\n"
        "COINS = DataSource(read, 'a thrower', Task('classes', (3,), 2))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = load_examples(SourceConfig(source="my_coins:COINS", max_users=5))
    assert (found.store.num_users, found.store.num_examples) == (5, 10)
    for name, message in (
        ("my_coins:read", "not a dpfl_jax.data.DataSource"),
        ("my_coins:NO", "cannot be used"),
        ("my_coin", "unknown data source 'my_coin'"),
    ):
        with pytest.raises(BadInputError, match=message):
            load_examples(SourceConfig(source=name))


def test_removing_a_row_moves_no_other(tmp_path):
    """Every row a person of its own: what a row is called depends on the row alone."""
    rows = [{"a": i % 20 / 2, "y": i % 20 / 2} for i in range(60)]  # three of each
    options = {"user_column": None, "silo_column": None}
    whole = load_dataset(data_config(write(tmp_path, "csv", rows), **options))
    for gone in (0, 31, 59):
        rest = rows[:gone] + rows[gone + 1 :]
        fewer = load_dataset(data_config(write(tmp_path, "csv", rest), **options))
        for part in ("train", "validation", "test"):
            before, after = (counted(getattr(data, part)) for data in (whole, fewer))
            assert after - before == collections.Counter()
            assert before - after in (collections.Counter(), {rows[gone]["a"]: 1})
        total = sum(
            (counted(getattr(fewer, p)) for p in ("train", "validation", "test")),
            start=collections.Counter(),
        )
        assert total.total() == 59


def counted(store):
    return collections.Counter(store.read(np.arange(store.num_examples))["x"][:, 0].tolist())


def data_config(path, **more):
    plain = config(path, **more)
    fields = {f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
    return DataConfig(**fields, validation_fraction=0.2, test_fraction=0.2)


def test_a_column_of_few_values_is_asked_about(tmp_path):
    """Whoever takes the ward for the patient is not helped by other fractions."""
    rows = [{"who": "ABCD"[i % 4], "a": i % 7 / 7, "y": i % 5 / 5} for i in range(80)]
    whole = data_config(write(tmp_path, "csv", rows), silo_column=None)
    settings = dataclasses.replace(whole, test_fraction=0.001)
    asked = r"does data\.user_column=who, which has 4 values in 80 rows, name people\? If it does"
    with pytest.raises(BadInputError, match=asked):
        load_dataset(settings)


def test_ids_silos_and_targets_are_no_inputs(tmp_path):
    rows = [{**row, "who": str(i), "site": str(i)} for i, row in enumerate(ROWS)]
    path = write(tmp_path, "csv", rows)
    for inputs in (None, ("*",)):
        assert load_examples(config(path, input_columns=inputs), ("a",)).task.input_shape == (1,)
    with pytest.raises(BadInputError, match=r"name the inputs as data\.input_columns"):
        load_examples(config(path, user_column="dpfl_jax.data.keys:base_domain"))


def test_one_row_does_not_choose_the_columns_of_all(tmp_path):
    """Neither which they are nor their order, which decides what every weight learns."""
    rows = [{"lab": 9.0, "who": "ann", "a": 1.0, "y": 0.0}, {"who": "bob", "a": 2.0, "y": 0.0}]
    path = write(tmp_path, "jsonl", rows)
    for inputs in (None, ("*",), ("a", "la?")):
        with pytest.raises(
            BadInputError, match="the first person's row would choose the inputs for all"
        ):
            load_examples(config(path, silo_column=None, input_columns=inputs))
    named = config(path, silo_column=None, input_columns=("a",))
    assert load_examples(named).task.input_shape == (1,)
    # Bob's row is alone in lacking one of them.
    named = config(path, silo_column=None, input_columns=("a", "lab"), on_bad_row="drop")
    np.testing.assert_array_equal(of_user(load_examples(named).store, "ann")["x"], [[1, 9]])


@pytest.mark.parametrize("inputs", [None, ("*",), ("a", "b"), ("a", "[b-z]")])
def test_no_file_chooses_the_order_for_others(tmp_path, inputs):
    """The order of one file is kept; where files differ, the first would choose for all."""
    paths = []
    for number, names in enumerate((("b", "y", "who", "a"), ("who", "a", "b", "y"))):
        (tmp_path / str(number)).mkdir()
        rows = [{n: f"p{number}" if n == "who" else float(ord(n[0]) - 97) for n in names}]
        paths.append(write(tmp_path / str(number), "csv", rows))
    for order in (paths, paths[::-1]):
        plain = config(paths[0], silo_column=None, input_columns=inputs, scale={"y": (0, 30)})
        both = dataclasses.replace(plain, path=tuple(order))
        if inputs != ("a", "b"):
            with pytest.raises(BadInputError, match="another order than in the first file"):
                load_examples(both)
            continue
        found = load_examples(both)
        for user in ("p0", "p1"):
            np.testing.assert_array_equal(of_user(found.store, user)["x"], [[0, 1]])


def test_nobody_counts_double(tmp_path):
    path = write(tmp_path, "csv")
    with pytest.raises(BadInputError, match="given twice: its people would count double"):
        load_examples(dataclasses.replace(config(path), path=(path, path)))
    twice = tmp_path / "twice.csv"
    twice.write_text("who,who,a,y\n1,2,3,0\n")
    with pytest.raises(BadInputError, match="two columns are called 'who'"):
        load_examples(config(str(twice), silo_column=None))


def test_settings_of_tables_are_refused_elsewhere(tmp_path):
    with pytest.raises(BadInputError, match=r"data\.scale is for tables"):
        load_examples(SourceConfig(source="digits", scale={"x": (0.0, 1.0)}))


def test_people_of_a_given_test_part_may_be_known(tmp_path, monkeypatch):
    (tmp_path / "my_parts.py").write_text(
        "import numpy as np\n"
        "from dpfl_jax.data import DataSource\n"
        "from dpfl_jax.task import Task\n"
        "def read(section, split):\n"
        "    for i in range(20):\n"
        "        name = i if section.seq_len == 1 else f'{split} {i}'\n"
        "        x = np.full((2, 3), i, np.float32)\n"
        "        yield name, {'x': x, 'label': np.array([0, 1 + 8 * (section.stride - 1)])}\n"
        "PARTS = DataSource(read, 'a person', Task('classes', (3,), 2), ('train', 'test'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for length in (1, 2):
        data = load_dataset(DataConfig(source="my_parts:PARTS", seq_len=length))
        assert data.known == (length == 1)
    with pytest.raises(BadInputError, match="whole numbers from 0 to 1"):
        load_dataset(DataConfig(source="my_parts:PARTS", stride=2))


def numbers(path, **columns):
    names = ["who", *columns]
    rows = zip(*([f"p{i}" for i in range(40)], *columns.values()), strict=True)
    path.write_text("\n".join(",".join(map(str, row)) for row in (names, *rows)))
    return config(str(path), silo_column=None)


def test_what_would_burn_the_budget_is_refused_before_the_first_step(tmp_path):
    """Columns far from order 1 without a scale, a count of rows, a 0/1 target without classes."""
    path, spread = tmp_path / "table.csv", np.linspace(0, 1, 40)
    plain = numbers(path, a=60 + spread, gain=[5000] * 4 + [0] * 36, b=spread, y=9 * spread)
    with pytest.raises(BadInputError, match=r"order 1 in 'a', which .*\n- .* 1 in 'gain', which"):
        load_examples(plain)
    for scale in ({"a": (60, 1), "gain": (0, 5000)}, {"a": (0, 1), "gain": (0, 1)}):
        load_examples(dataclasses.replace(plain, scale=scale))
    for first in (0, 1, 1001):
        counted = numbers(path, nr=range(first, first + 40), b=spread, y=spread)
        with pytest.raises(BadInputError, match="from which nothing is learned, in 'nr'"):
            load_examples(counted)
        load_examples(dataclasses.replace(counted, scale={"nr": (first + 20, 20)}))
    for low, high in ((0, 1), (-1, 1), (1, 2)):
        binary = numbers(path, b=spread, y=[low if i % 3 else high for i in range(40)])
        with pytest.raises(BadInputError, match=r"two values in 'y': set data\.classes=2"):
            load_examples(binary)
        assert load_examples(dataclasses.replace(binary, classes=0)).task.kind == "regression"
    gaps = numbers(path, age=[-999, -999, *range(40, 78)], b=spread, y=9 * spread)
    with pytest.raises(BadInputError, match=r"ten half widths .* 'age': leave such cells empty"):
        load_examples(dataclasses.replace(gaps, scale={"age": (60, 30)}))
    # One person's typing error is no column far from order 1.
    load_examples(numbers(path, b=[*spread[1:], 1000], y=9 * spread, c=spread))


def test_the_order_of_the_file_is_kept(tmp_path):
    plain = numbers(tmp_path / "table.csv", c=[1] * 40, a=[2] * 40, b=[3] * 40, y=[4] * 40)
    for inputs, order in ((None, "cab"), (("*",), "cab"), (("b", "[ac]"), "bca")):
        found = load_examples(dataclasses.replace(plain, input_columns=inputs))
        assert found.task.table.inputs == tuple(order)
        np.testing.assert_array_equal(
            of_user(found.store, "p1")["x"], [["cab".index(n) + 1 for n in order]]
        )


def test_yes_and_no_are_quoted_in_a_configuration():
    from dpfl_jax.config.load import validate_config

    raw = {
        "data": {"source": "csv", "target_column": "y", "categories": {"smoker": [True, False]}},
        "mechanism": {"kind": "uls", "cohort_size": 8, "group_size": 1, "clip_norm": 1.0},
        "privacy": {"epsilon": 1.0}, "train": {"steps": 1},
    }  # fmt: skip
    with pytest.raises(BadInputError, match="true and false in YAML: put them in quotes"):
        validate_config(raw)
    raw["data"]["categories"] = {"smoker": ["yes", "no"], "cp": [1, 2]}
    # What nobody said is that of a table: a linear model.
    assert validate_config(raw).model.kind == "linear"
    assert validate_config(raw | {"model": {"kind": "mlp"}}).model.kind == "mlp"
