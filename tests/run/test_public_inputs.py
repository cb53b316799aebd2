"""What a guarantee is about: its unit, what was taken as public, which other runs it counts."""

import contextlib
import io
import json

import numpy as np
import pytest
import yaml

import dpfl_jax as dpfl
from dpfl_jax.cli.main import main
from dpfl_jax.run.public_inputs import one_row_each

pytestmark = pytest.mark.privacy
CONFIG = {
    "name": "visits",
    "data": {
        "source": "csv",
        "path": "visits.csv",
        "user_column": "visit_id",
        "target_column": "outcome",
        "input_columns": ["age", "dose"],
        "classes": 2,
        "scale": {"age": [50, 40], "dose": [0, 3]},
        "validation_fraction": 0.2,
        "test_fraction": 0.0,
    },
    "model": {"kind": "logistic"},
    "mechanism": {"kind": "uls", "group_size": 3, "cohort_size": 8},
    "privacy": {"epsilon": 4.0, "delta": 1e-3},
    "train": {"steps": 2},
}


def table(folder):
    """Sixty visits of twenty patients."""
    dose = np.random.default_rng(0).normal(size=60)
    rows = [f"v{i},p{i % 20},{50 + i % 7},{dose[i]:.3f},{i % 2}" for i in range(60)]
    rows.insert(0, "visit_id,patient,age,dose,outcome")
    (folder / "visits.csv").write_text("\n".join(rows))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose user column has one row of each "user"."""
    folder = tmp_path_factory.mktemp("visits")
    table(folder)
    (folder / "visits.yaml").write_text(
        yaml.safe_dump(CONFIG | {"data": CONFIG["data"] | {"path": str(folder / "visits.csv")}})
    )
    return folder


@pytest.fixture(scope="module")
def trained(run):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run)
        patch.setenv("COLUMNS", "400")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main(["train", "visits.yaml", "--run-dir", "run"]) == 0
    return run / "run", " ".join(printed.getvalue().split())


def test_a_guarantee_names_the_column_of_its_unit(trained, capsys):
    """In the headline, in guarantee.json, report.json, report.md, `show` and `verify`."""
    folder, printed = trained
    assert "for each user by column visit_id (add-or-remove one user" in printed
    stated = json.loads((folder / "guarantee.json").read_text())
    report = json.loads((folder / "report.json").read_text())
    assert stated["privacy"] == report["privacy"]
    assert stated["privacy"]["unit_key"] == "column visit_id"
    listed = stated["privacy"]["public_inputs"]
    assert "group size: 3 examples of a user" in listed
    assert any(name.startswith("counts: ") and "users" in name for name in listed)
    for text in (stated["text"], report["guarantee"], report["summary"]):
        assert "each user by column visit_id" in text
    assert "each user by column visit_id" in (folder / "report.md").read_text()
    for command in ("show", "verify"):
        assert main([command, str(folder)]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert "column visit_id" in told
        assert "group size: 3 examples of a user" in told


def test_one_row_of_each_unit_warns_on_the_terminal_alone(trained):
    """Before training; how many rows units have is written nowhere."""
    folder, printed = trained
    warning = "every user has one row (a user: column visit_id)"
    assert warning in printed
    assert printed.index(warning) < printed.index("epsilon 4")
    for file in folder.rglob("*"):
        if file.suffix in (".json", ".jsonl", ".md", ".yaml"):
            assert "one row" not in file.read_text(), file


def test_units_of_several_rows_do_not_warn():
    rows = [{"p": f"p{i % 3}", "v": f"v{i}", "x": 1.0, "y": 0.0} for i in range(6)]
    several, one = (dpfl.from_rows(rows, user=u, target="y", inputs=["x"]) for u in "pv")
    assert one_row_each(several, "user") is None
    assert "(a user: column v)" in one_row_each(one, "user")


def test_the_key_of_a_unit_goes_with_the_data(tmp_path):
    """Through splits, limits and a store on disk, into the guarantee of a plan of one's own."""
    rows = [{"a": f"p{i % 9}", "x": 1.0, "y": 0.0} for i in range(36)]
    store = dpfl.from_rows(rows, user="{a}-{a}", target="y", inputs=["x"])
    store.save(tmp_path / "store")
    for data in (store, dpfl.ArrayStore.load(tmp_path / "store")):
        plan = dpfl.ULS(group_size=2, cohort_size=3).plan(data, steps=2, epsilon=4.0, delta=1e-3)
        assert "for each user by key {a}-{a} (" in plan.guarantee().summary()
