"""What the README says works (tests/docs runs all of it): its program learns, its files exist."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.S)


@pytest.mark.slow
def test_a_model_of_ones_own_is_trained_with_a_guarantee(capsys):
    program = PROGRAMS[0]
    assert "nnx" in program
    assert len(program.splitlines()) <= 16
    made = {}
    exec(program, made)
    said = capsys.readouterr().out
    assert "differential privacy for each user" in said
    assert made["result"].guarantee.epsilon <= 4.0
    # It learnt: the sign of the first number is the label.
    model, rng = made["result"].params, made["np"].random.default_rng(1)
    x = rng.normal(size=(400, 8)).astype("float32")
    assert (model(x).argmax(-1) == (x[:, 0] > 0)).mean() > 0.8


def test_what_it_names_is_there():
    named = set(re.findall(r"\b(?:configs|docs|examples)/[\w./-]+\.\w+", TEXT))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
