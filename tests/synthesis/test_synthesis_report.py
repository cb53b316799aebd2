"""The private report: what it measures, and that a planted copy stands out."""

import collections
import random

import pytest

from dpfl_jax.data.templates import RowTemplate
from dpfl_jax.errors import BadInputError
from dpfl_jax.synthesis.report import (
    NAME,
    PICTURE,
    Features,
    RealRows,
    accuracy,
    classifier,
    divergence,
    shared_runs,
    write_report,
)

TEMPLATE = RowTemplate.parse(
    "<kind> | <age> | <text>", {"kind": ["ode", "joke"]}, {"age": (0, 100)}
)
WORDS = {
    "ode": ["wind", "water", "night", "moon", "star", "sea"],
    "joke": ["dog", "pub", "bar", "duck", "nun", "egg"],
}


def make(rows, seed, noise=0.0):
    draw, made = random.Random(seed), []
    for _ in range(rows):
        kind = draw.choice([*WORDS])
        spoken = kind if draw.random() >= noise else draw.choice([*WORDS])
        words = " ".join(draw.choice(WORDS[spoken]) for _ in range(20))
        age = draw.randint(0, 49) + 50 * (spoken == "joke")
        made.append({"kind": kind, "age": age, "text": words})
    return made


def people(rows):
    return [(f"p{number // 3}", row) for number, row in enumerate(rows)]


def test_a_classifier_learns_what_the_rows_say():
    held_out = people(make(90, 1))
    features = Features(TEMPLATE, "kind")
    rows = make(200, 2)
    swapped = [{**row, "kind": "ode" if row["kind"] == "joke" else "joke"} for row in rows]
    for learnt, expected in ((rows, 1.0), (swapped, 0.0)):
        predict = classifier(learnt, "kind", ["ode", "joke"], features)
        assert accuracy(predict, "kind", held_out) == (expected, 0.0)
    half = accuracy(lambda row: "ode", "kind", held_out)
    assert half[0] == pytest.approx(0.5, abs=0.2)
    assert 0.05 < half[1] < 0.2
    assert "kind=ode" not in features(held_out[0][1])
    assert accuracy(lambda row: row["kind"], "kind", held_out) == (1.0, 0.0)


def test_divergence_is_0_for_equal_shares_and_1_for_none_in_common():
    one, two = collections.Counter("aab"), collections.Counter("cd")
    assert divergence(one, collections.Counter("aabaab")) == pytest.approx(0)
    assert divergence(one, two) == pytest.approx(1)
    assert divergence(one, two) == divergence(two, one)


def test_runs_of_words_are_counted_within_a_text():
    sources = ["a b c d e", "f g h"]
    assert shared_runs(["x a b c d y", "d e f g", "b c d e"], sources, 4) == (2 / 3, 1)
    assert shared_runs(["a b c d", "a b c d", "q"], sources, 4) == (2 / 3, 2)
    assert shared_runs(["a b"], sources, 4) == (0, 0)


def test_rows_without_a_label_and_empty_columns_are_no_fault(tmp_path):
    made = ("<kind> | <age>", {"kind": ["a", "b"]}, {"age": (0, 9)}, ("kind", "age"))
    template = RowTemplate.parse(*made)
    rows = [{"kind": kind, "age": None} for kind in ("a", "b", None)]
    numbers = write_report(tmp_path, rows, RealRows(rows, people(rows)), rows, template)
    assert numbers["accuracy"]["synthetic rows"][0] >= 0.5


def test_a_planted_copy_stands_out(tmp_path):
    planted = "my card lies beneath the copper kettle and nobody but gwendolyn may ever know it"
    copies = [{"kind": "joke", "age": 7, "text": planted}] * 50
    real = RealRows([*make(300, 3), *copies], people(make(90, 4)))
    clean = write_report(tmp_path / "clean", make(100, 5), real, [], TEMPLATE)
    copied = write_report(tmp_path / "copied", [*make(90, 5), *copies[:10]], real, [], TEMPLATE)
    runs = [numbers["copies"][8] for numbers in (clean, copied)]
    assert [found["share, of those trained on"] for found in runs] == [0.0, 0.1]
    assert [found["most rows with one run of theirs"] for found in runs] == [0, 10]
    assert runs[1]["of 90 held out"] == 0.0


def test_the_report_says_that_it_is_private_and_compares_all_sides(tmp_path):
    real = RealRows(make(300, 3), people(make(90, 4)))
    numbers = write_report(tmp_path / "report", make(100, 5), real, make(60, 6, 1.0), TEMPLATE)
    assert {path.name for path in (tmp_path / "report").iterdir()} == {NAME, PICTURE}
    text = (tmp_path / "report" / NAME).read_text()
    assert text.startswith("# NOT TO BE PUBLISHED\n\nEvery number here was computed from real")
    assert [*numbers["accuracy"]] == [
        "synthetic rows",
        "rows of those trained on",
        "rows of the model before training",
        "nothing (the commonest label)",
    ]
    assert numbers["accuracy"]["synthetic rows"][0] > 0.95
    assert [*numbers["columns"]] == ["kind", "age", "age x kind"]
    assert all(synthetic < 0.2 for synthetic, _ in numbers["columns"].values())
    texts = [{"text": row["text"]} for row in make(60, 7)]
    plain = write_report(tmp_path / "plain", texts, RealRows(texts, people(texts)), [], None)
    assert "accuracy" not in plain
    assert plain["texts"]["median words"]["synthetic"] == 20
    with pytest.raises(BadInputError, match="the run held out nobody"):
        write_report(tmp_path / "none", texts, RealRows(texts, []), [], None)
