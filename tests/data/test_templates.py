"""Rows as texts of a template: written, judged as they grow, and read back."""

import itertools
import json
import random

import pytest

from dpfl_jax.data import DataConfig, SourceConfig, load_dataset, load_examples
from dpfl_jax.data.templates import RowTemplate
from dpfl_jax.errors import BadInputError

KINDS = {"kind": ["ode", "odes", "joke"]}
PLAIN = RowTemplate.parse("<kind> | <age>, <text>", KINDS, {"age": (18, 65)})
JSON = RowTemplate.parse(
    '{"kind": "<kind>", "weight": <weight>}', KINDS, {"weight": (-1.0, 9.5)}, ["weight"]
)
SEVERAL = RowTemplate.parse("<kind>;<age>", KINDS, {"age": (0, 120)}, rows=3)
ROWS = [
    (PLAIN, [{"kind": "odes", "age": 20, "text": "O wind | of, 3\nnights"}]),
    (JSON, [{"kind": "ode", "weight": -0.5}]),
    (JSON, [{"kind": "joke", "weight": None}]),
    (SEVERAL, [{"kind": "ode", "age": 7}, {"kind": "joke", "age": 120}]),
]


@pytest.mark.parametrize(("template", "rows"), ROWS, ids=str)
def test_rows_come_back_and_no_beginning_is_a_fault(template, rows):
    text = template.write(rows, "row 1")
    assert template.read(text) == rows
    assert template.fault(text, ended=True) is None
    assert not any(template.fault(text[:end], ended=False) for end in range(len(text)))


def test_a_fault_is_where_its_column_begins_whatever_follows():
    for text, place in (
        ("limerick | 20, x", 0),
        ("ode | 17, x", 6),
        ("ode | 020, x", 6),
        ("ode | 2o, x", 6),
        ("ode / 20, x", 0),
        ("ode | 20; x", 6),
    ):
        found = [PLAIN.fault(text[:end], ended=False) for end in range(len(text) + 1)]
        assert {*found} == {None, place}
        assert found == sorted(found, key=lambda one: one is not None)  # once a fault, always one
        assert PLAIN.fault(text, ended=True) == place
    assert PLAIN.fault("ode | 20", ended=True) == 6  # it ends too early
    assert JSON.fault('{"kind": "ode", "weight": 1.0}!', ended=False) == 30
    assert SEVERAL.fault("ode;1\node;2\node;3\no", ended=False) == 17  # a fourth row


def test_numbers_are_written_with_the_decimals_of_their_range():
    template = RowTemplate.parse("<a> <b>", ranges={"a": (0, 100), "b": (0.0, 50.5)})
    assert template.write([{"a": "16.7", "b": 27}], "row 1") == "17 27.0"
    assert template.write([{"a": "-0,2", "b": "3,14"}], "row 1", "comma") == "0 3.1"
    assert template.read("17 27.0") == [{"a": 17, "b": 27.0}]


def test_a_word_for_nothing_is_a_word_where_it_is_listed():
    template = RowTemplate.parse("<pain> <age>", {"pain": ["none", "mild"]}, {"age": (0, 99)})
    assert template.write([{"pain": "none", "age": 7}], "row 1") == "none 7"
    for row in ({"pain": None, "age": 7}, {"pain": "mild", "age": "none"}):
        with pytest.raises(BadInputError, match="has no value"):
            template.write([row], "row 1")


def test_a_cell_that_would_not_come_back_is_refused_and_not_quoted():
    good = {"kind": "ode", "age": 30, "text": "x"}
    titled = RowTemplate.parse("<title> | <text>")
    for template, row, message in (
        (PLAIN, good | {"kind": "sonnet"}, "'kind' holds what data.categories does not allow"),
        (PLAIN, good | {"age": 99}, "'age' holds what data.ranges does not allow"),
        (PLAIN, good | {"age": "young"}, "'age' holds what data.ranges does not allow"),
        (PLAIN, good | {"text": ""}, "'text' has no value: name it in data.missing"),
        (titled, {"title": "secret |", "text": "x"}, r"'title' holds ' \| ', which ends it"),
        (SEVERAL, {"kind": "ode"}, "no column 'age'"),
    ):
        with pytest.raises(BadInputError, match=message) as caught:
            template.write([row], "row 1")
        assert "sonnet" not in str(caught.value)
        assert "secret" not in str(caught.value)


def malformed():
    """300 templates with settings that do not fit them, from a fixed seed."""
    draw = random.Random(0)
    names = ["kind", "age", "text", "a b", "ä"]
    ends = [" | ", ", ", '": "', "; ", "\n"]

    def whole(columns):
        text = draw.choice(["", "{", "row: "])
        return text + "".join(f"<{name}>{draw.choice(ends)}" for name in columns).rstrip()

    cases = {
        "no column": lambda c: (whole(c).replace("<", "[").replace(">", "]"), {}),
        "blank": lambda c: (f"< {c[0]}> | <x>", {}),
        "unnamed": lambda c: (f"<> | <{c[0]}>", {}),
        "twice": lambda c: (f"<{c[0]}> | <{c[1]}> | <{c[0]}>", {}),
        "together": lambda c: (f"<{c[0]}><{c[1]}>", {}),
        "unknown words": lambda c: (whole(c), {"categories": {"z": ["p", "q"]}}),
        "unknown range": lambda c: (whole(c), {"ranges": {"z": (0, 1)}}),
        "unknown gaps": lambda c: (whole(c), {"missing": ["z"]}),
        "no words": lambda c: (whole(c), {"categories": {c[0]: []}}),
        "an empty word": lambda c: (whole(c), {"categories": {c[0]: ["p", " "]}}),
        "a word twice": lambda c: (whole(c), {"categories": {c[0]: ["p", "q", "p"]}}),
        "both": lambda c: (whole(c), {"categories": {c[0]: ["p"]}, "ranges": {c[0]: (0, 1)}}),
        "a word with the end": lambda c: (
            f"<{c[0]}> - <{c[1]}>",
            {"categories": {c[0]: ["p - q"]}},
        ),
        "backwards": lambda c: (whole(c), {"ranges": {c[0]: (draw.randint(2, 9), 1)}}),
        "endless": lambda c: (whole(c), {"ranges": {c[0]: (0, float("inf"))}}),
        "a digit follows": lambda c: (f"<{c[0]}>0<{c[1]}>", {"ranges": {c[0]: (0, 9)}}),
        "lines": lambda c: (f"<{c[0]}>\n<{c[1]}>", {"rows": 2}),
    }
    for number, name in zip(range(300), itertools.cycle(cases)):
        columns = draw.sample(names, draw.randint(2, 4))
        yield pytest.param(*cases[name](columns), id=f"{name}-{number}")


@pytest.mark.parametrize(("template", "settings"), malformed())
def test_a_malformed_template_is_one_sentence(template, settings):
    with pytest.raises(BadInputError) as caught:
        RowTemplate.parse(template, **settings)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.startswith(("data.", "both data."))
    assert ": " in sentence  # what to change


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": "jsonl", "path": str(path), "categories": {"kind": ("ode", "joke")}}


def test_a_file_of_rows_is_texts_of_its_template(tmp_path):
    rows = [{"user": u, "kind": "ode", "age": 20 + n, "text": "x"} for u in "ab" for n in range(3)]
    given = write(tmp_path / "rows.jsonl", rows)
    given |= {"template": "<kind> | <age>", "ranges": {"age": (18, 65)}, "seq_len": 24}
    loaded = load_examples(SourceConfig(**given))
    texts = [loaded.tokenizer.decode(x) for x in loaded.store.read(range(6))["tokens"]]
    assert texts == [f"ode | {20 + n}" for _ in "ab" for n in range(3)]
    together = load_examples(SourceConfig(**given, rows_per_text=2)).store
    texts = [loaded.tokenizer.decode(x) for x in together.read(range(4))["tokens"]]
    assert texts == ["ode | 20\node | 21", "ode | 22"] * 2
    short = load_examples(SourceConfig(**given | {"seq_len": 4, "rows_per_text": 2})).store
    assert short.num_examples == 4  # what is too long is cut, not a beginning of its own


def test_random_rows_of_a_template_are_a_public_corpus(tmp_path):
    given = write(tmp_path / "rows.jsonl", [{"user": u, "kind": "ode", "age": 20} for u in "abcde"])
    given |= {"ranges": {"age": (18, 20)}, "public": "template", "validation_fraction": 0.0}
    given |= {"missing": ("age",), "seq_len": 24, "rows_per_text": 2, "test_fraction": 0.0}
    data = load_dataset(DataConfig(**given, template="<kind> | <age>"))
    tokens = data.public.read(range(400))["tokens"]
    texts = [data.tokenizer.decode(x).split("\n") for x in tokens]
    assert {len(text) for text in texts} == {2}
    rows = {row for text in texts for row in text}
    assert rows == {f"{kind} | {age}" for kind in ("ode", "joke") for age in ("", 18, 19, 20)}


def test_a_public_corpus_of_random_rows_needs_what_columns_may_hold(tmp_path):
    given = write(tmp_path / "rows.jsonl", [{"user": "a", "kind": "ode", "text": "x"}])
    given |= {"public": "template", "validation_fraction": 0.0, "test_fraction": 0.0}
    with pytest.raises(BadInputError, match="but 'text' holds any text: list its words"):
        load_dataset(DataConfig(**given, template="<kind> | <text>"))
    with pytest.raises(BadInputError, match="draws random rows of"):
        load_dataset(DataConfig(**given | {"categories": {}}))


def test_without_people_every_row_is_one_and_the_guarantee_says_so(tmp_path):
    given = write(tmp_path / "rows.jsonl", [{"kind": k} for k in ["ode"] * 30 + ["joke"] * 30])
    config = DataConfig(**given, template="<kind>", user_column=None, seq_len=8)
    data = load_dataset(config)
    assert data.train.num_users + data.validation.num_users + data.test.num_users == 60
    assert any("every row counts as a person" in caveat for caveat in config.caveats())
    assert any("data.template, data.categories are taken as" in c for c in config.caveats())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_column": "kind"}, "data.target_column does not go with"),
        ({"messages_column": "m"}, "data.messages_column does not go with"),
        ({"template": None, "categories": {}}, "data.ranges is for texts that data.template makes"),
        (
            {"template": None, "categories": {}, "ranges": {}, "rows_per_text": 2},
            "data.rows_per_text",
        ),
        ({"scale": {"age": (0, 1)}}, "data.scale is for tables"),
        ({"source": "shakespeare", "path": None}, "data.source does not go with"),
    ],
)
def test_settings_that_do_not_go_together(change, message, tmp_path):
    given = write(tmp_path / "rows.jsonl", [{"user": "a", "kind": "ode", "age": 20}])
    given |= {"template": "<kind> | <age>", "ranges": {"age": (18, 65)}}
    with pytest.raises(BadInputError, match=message):
        load_examples(SourceConfig(**given | change))
