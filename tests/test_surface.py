"""What is public changes on purpose alone."""

import difflib
import importlib
import re

from tests.surface import FILE, ROOT, surface


def test_the_public_surface_is_the_one_that_was_agreed_on():
    """Names, signatures, keys with their types and defaults, options: see docs/stability.md."""
    change = difflib.unified_diff(
        FILE.read_text().splitlines(), surface().splitlines(), FILE.name, "now", n=0, lineterm=""
    )
    assert "\n".join(change) == "", "if that is meant: python -m tests.surface"


def test_the_stable_names_are_there_and_none_is_experimental():
    page = (ROOT / "docs" / "stability.md").read_text()
    table = page[page.index("## Stable") : page.index("## Provisional")]
    names = re.findall(r"`(dpfl_jax\.[\w.]+)`", table)
    assert 25 <= len(names) == len(set(names)) <= 60
    experimental = importlib.import_module("dpfl_jax.experimental").__all__
    for name in names:
        package, _, last = name.rpartition(".")
        assert last in importlib.import_module(package).__all__, name
        assert last not in experimental, name


def test_what_is_experimental_is_nowhere_else():
    experimental = importlib.import_module("dpfl_jax.experimental").__all__
    listed = FILE.read_text()
    for name in experimental:
        assert len(re.findall(rf"^(?:class )?{name}\b", listed, re.M)) == 1, name
