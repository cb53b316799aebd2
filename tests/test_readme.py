"""What the README says works (tests/docs runs all of it): its program learns, its files exist."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_a_model_of_ones_own_is_trained_with_a_guarantee(capsys):
    program, printed = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", TEXT, re.S).groups()
    assert "nnx" in program
    assert len([line for line in program.splitlines() if line]) == 12
    made = {}
    exec(program, made)
    epsilon, accuracy = capsys.readouterr().out.splitlines()
    assert epsilon == printed.splitlines()[0]
    assert made["result"].guarantee.epsilon <= 4.0
    # It learnt: the sign of the first number is the label. Noise differs from run to run.
    assert abs(float(accuracy.split()[1]) - float(printed.split()[-1])) < 0.1
    assert "differential privacy for each user" in str(made["result"].guarantee)


def test_it_is_short_and_what_it_names_is_there():
    assert len(TEXT.splitlines()) <= 100
    named = set(re.findall(r"\b(?:configs|docs|examples)/[\w./-]+\.\w+", TEXT))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
