"""No mechanism is named where all mechanisms are planned, accounted, audited and told of."""

import ast
import pathlib
import re

import pytest

from dpfl_jax.config.kinds import CENTRAL, SILOS
from dpfl_jax.planning.candidates import CANDIDATES

ROOT = pathlib.Path(__file__).parents[2] / "dpfl_jax"
FILES = [
    *(
        path
        for folder in ("planning", "cli", "audit/attacks")
        for path in (ROOT / folder).glob("*.py")
    ),
    ROOT / "accounting" / "statement.py",
]
ORDINARY = {"allocation", "individual", "none", "truncated"}  # words that say other things, too
KINDS = {*CENTRAL.names(), *SILOS.names()} - ORDINARY
NAMES = KINDS | {candidate.name for candidate in CANDIDATES.values()} - ORDINARY
# What may name some, and why.
ALLOWED = {
    "planning/candidates.py": "the table of presets that a planner weighs",
    "cli/account.py": "the table of `dpfl account`: its names are those of commands",
    "cli/finetune.py": "the configuration that `dpfl finetune` starts from, to be changed",
}


def prose(tree):
    """Docstrings, and pages of help with their examples."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "DESCRIPTION":
            yield from ast.walk(node.value)


def named(source):
    """Mechanisms that a file names: as words of its texts, or as names of its own."""
    tree = ast.parse(source)
    left_out = {id(node) for node in prose(tree)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in left_out else ""
        if isinstance(text, str):
            yield from {*re.findall(r"\w+", text)} & NAMES | {text} & (ORDINARY - {"none"})
        for field in ("attr", "id", "name", "arg"):
            if getattr(node, field, None) in KINDS | ORDINARY - {"none"}:
                yield getattr(node, field)


def test_no_mechanism_is_named():
    wrong = {}
    for path in FILES:
        where = str(path.relative_to(ROOT))
        if where not in ALLOWED and (found := sorted({*named(path.read_text())})):
            wrong[where] = found
    assert not wrong


@pytest.mark.parametrize(
    "source",
    ['x = "uls"', 'f"{x} ULS G"', "planner.bandmf(3)", "def els(): pass", 'k == "truncated"'],
)
def test_what_names_one_is_found(source):
    assert [*named(source)]


def test_pages_of_help_and_docstrings_may_name_them():
    assert not [*named('"""As uls."""\nDESCRIPTION = "dpfl account els"\nx = "none"')]
