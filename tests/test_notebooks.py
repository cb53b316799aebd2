"""Notebooks: what is stored in them is what comes out when they run from top to bottom."""

import json
import pathlib
import re

import matplotlib
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?")


def cells_of(path, kind):
    """Pairs (cell, source)."""
    cells = json.loads(path.read_text())["cells"]
    return [(c, "".join(c["source"])) for c in cells if c["cell_type"] == kind]


def printed(cell):
    return "".join("".join(o["text"]) for o in cell["outputs"] if o["output_type"] == "stream")


def pictures(cell):
    return sum("image/png" in output.get("data", {}) for output in cell["outputs"])


def numbers(text):
    return [float(n.replace(",", "")) for n in NUMBER.findall(text)]


def test_there_are_nine_which_install_alike():
    assert len(NOTEBOOKS) == 9
    (install,) = {cells_of(path, "code")[0][1] for path in NOTEBOOKS}
    assert "%pip install" in install
    assert "git+" in install


@EACH
def test_a_notebook_is_stored_with_its_outputs(path):
    first = cells_of(path, "markdown")[0][1]
    assert "**One idea: " in first
    assert "\nRuntime: " in first
    code = cells_of(path, "code")
    assert sum(pictures(cell) for cell, _ in code) >= 1
    assert "epsilon" in "".join(printed(cell) for cell, _ in code)
    for cell, _ in code:
        for output in cell["outputs"]:  # no errors, warnings or progress bars
            kinds = list(output.get("data", {}))
            assert output.get("name") == "stdout" or kinds in (["image/png"], ["text/html"])
        assert not re.search(r"/(?:home|root|tmp|usr|work)/|\d s\b|seconds", printed(cell))


@pytest.mark.nightly
@pytest.mark.slow("6_personal_epsilon")
@EACH
def test_a_notebook_says_again_what_is_stored(path, capsys, tmp_path, monkeypatch):
    """Word for word, and numbers to 5 %: seeds are fixed, rounding is not the same everywhere."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    monkeypatch.setattr(plt, "show", lambda: None)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for cell, source in cells_of(path, "code"):
        exec(re.sub(r"(?m)^( *)%pip .*$", r"\1pass", source), namespace)
        said, stored = capsys.readouterr().out, printed(cell)
        drawn = len(plt.get_fignums())
        plt.close("all")
        if "not-compared" in cell["metadata"].get("tags", []):  # follows what is installed
            continue
        assert NUMBER.sub("#", said) == NUMBER.sub("#", stored)
        assert numbers(said) == pytest.approx(numbers(stored), rel=0.05, abs=0.02)
        assert drawn == pictures(cell)
