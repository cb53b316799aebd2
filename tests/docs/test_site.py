"""The site builds without a warning, and has every public name."""

import importlib.util
import pathlib
import re
import subprocess
import sys
import zlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ABSENT = "needs mkdocs: `uv sync --group docs`"


def packages():
    """As docs/hooks.py finds them, which only mkdocs can import: {package: names}."""
    import hooks

    return hooks.public_packages()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason=ABSENT)
def test_the_site_builds_and_shows_every_public_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    found = packages()
    assert len(found) > 10
    inventory = zlib.decompress((tmp_path / "objects.inv").read_bytes().split(b"\n", 4)[4])
    shown = {line.split(" ")[0] for line in inventory.decode().splitlines()}
    public = {f"{package}.{name}" for package, names in found.items() for name in names}
    assert public - shown == set()
    assert len(public) > 200
    # Roles of docstrings are no text, and a page asks no other host for anything.
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        assert not re.search(r":(?:func|class|meth|mod):<", text), page
        assert not re.search(r'(?:src|<link[^>]* href)="https?://', text), page
    lines = (tmp_path / "theory" / "lines" / "index.html").read_text()
    steps = re.findall(
        r"^\[(\S+)\]: ", "".join(p.read_text() for p in (ROOT / "docs/theory").glob("*.md")), re.M
    )
    assert len(steps) > 50
    assert [step for step in steps if f'id="{step}"' not in lines] == []
