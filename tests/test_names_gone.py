"""Names that a stranger cannot look up are gone from the package, and stay so.

They are the old names of the design's table of words, as it qualifies them: some of them (``cut``,
``hidden``, ``layout``) are fine in other places. CHANGELOG.md says what each is called now.
"""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1] / "dpfl_jax"

# Nowhere: neither a function, a class, an argument nor an attribute.
# fmt: off
GONE = {
    "told_sampling", "tell", "told", "remembers", "for_steps", "calibrated_for", "taken_back",
    "once_in", "InTurns", "Turns", "Staying", "going_on", "goes_on", "Taken", "Pace",
    "Judgement", "Solution", "judge", "movable", "whole_of", "by_set", "told_apart",
    "show_beside", "primary_first", "ending_together", "whole_event", "unmixed", "hold",
}
# fmt: on
# Gone where the table says so: within these modules, or as the name of a module.
GONE_IN = {
    "run/": {"at_once", "together", "ask", "look", "hear", "unsaid"},
    "run/algorithm.py": {"smaller", "layout", "seen", "asked", "places"},
    "training/": {"hidden", "nobody", "look", "_below", "in_pieces", "beside"},
    "mechanisms/individual_budget.py": {"hidden", "shown", "nobody", "look", "_below"},
    "mechanisms/plan/sum_check.py": {"cut"},
    "mechanisms/": {"in_pieces", "at_once", "along", "multiplied"},
    "federation/federated_run.py": {"noised"},
}
MODULES_GONE = {"beside", "own_budgets", "told"}


def names(tree):
    """What a module defines: functions and classes with their arguments and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
            yield from (a.arg for a in (*node.args.args, *node.args.kwonlyargs))
        elif isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def left_over():
    found = set()
    for path in ROOT.rglob("*.py"):
        file = path.relative_to(ROOT).as_posix()
        gone = GONE.union(*(words for place, words in GONE_IN.items() if file.startswith(place)))
        found |= {(file, name) for name in names(ast.parse(path.read_text())) if name in gone}
    return found


def test_names_of_a_private_language_are_gone():
    assert not left_over()


def test_modules_of_a_private_language_are_gone():
    assert not {path.stem for path in ROOT.rglob("*.py")} & MODULES_GONE
