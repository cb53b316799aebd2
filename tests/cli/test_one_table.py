"""One CSV file, never seen before: each system trains on it by one command."""

import csv
import json
import pathlib

import numpy as np
import pytest

from dpfl_jax.cli.main import main
from dpfl_jax.run.pipeline import BASELINE_CAVEAT, WITHOUT_PRIVACY

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "table"
SILOS = ("basel", "geneva", "zurich")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """20 numeric columns, whose sum is the target; 300 people with 1 to 5 rows in 3 silos."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("table") / "visits.csv"
    weights = rng.normal(size=20) / 4
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = [f"lab_{i:02d}" for i in range(20)]
        writer.writerow(["patient", *names[:10], "hospital", *names[10:], "days"])
        for person in range(300):
            for _ in range(rng.integers(1, 6)):
                x = rng.normal(size=20)
                silo = SILOS[rng.integers(3)]
                days = x @ weights + 0.1 * rng.normal()
                writer.writerow([f"p{person}", *x[:10], silo, *x[10:], days])
    return path


COLUMNS = ("data.user_column=patient", "data.target_column=days")
SILO = ("data.silo_column=hospital",)
RUNS = {
    "uls": (*COLUMNS, *SILO),
    "hi_grad_avg": (*COLUMNS, *SILO),
    "rpdp": ("data.target_column=days", "data.input_columns=[lab_*]", *SILO),
    "isrl": (*COLUMNS, *SILO),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
def test_it_trains(name, table, tmp_path, capsys):
    command = ["train", str(CONFIGS / f"{name}.yaml"), f"data.path={table}", "seed=1", *RUNS[name]]
    assert main([*command, "--run-dir", str(tmp_path / "run"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["status"] == "finished"
    before, after = (report["eval"][when]["loss"] for when in ("initial", "final"))
    # A linear model that has learned explains part of the target; noise alone explains nothing.
    assert after < 0.9 * before
    assert report["privacy"]["unit"] == {"uls": "user", "hi_grad_avg": "subject"}.get(
        name, "record"
    )
    caveats = " ".join(report["privacy"]["caveats"])
    assert ("owns several" in caveats) == (name in ("isrl", "rpdp"))
    assert ("every row counts as a person" in caveats) == (name == "rpdp")
    assert "silos there are, by data.silo_column, is taken as public" in caveats


CLASSES = {
    "uls": ("model.kind=logistic", "data.classes=2"),
    "hi_grad_avg": ("model.kind=logistic", "data.classes=2"),
    "rpdp": ("model.kind=logistic", "data.classes=2"),
    "isrl": ("model.loss=logistic", "data.classes=2"),
}


@pytest.mark.slow
@pytest.mark.nightly("uls-days", "isrl-days", "rpdp-long", "hi_grad_avg-long")
@pytest.mark.parametrize("target", ["days", "long"])
@pytest.mark.parametrize("name", RUNS)
def test_a_tab_separated_one_is_shown_beside_a_run_without_privacy(
    name, target, table, tmp_path, capsys
):
    """A number and a class as target; the run itself is the same, bit for bit."""
    rows = [line.split(",") for line in table.read_text().splitlines()]
    path = tmp_path / "visits.tsv"
    if target == "long":
        rows = [[*rows[0][:-1], target], *([*r[:-1], str(int(float(r[-1]) > 0))] for r in rows[1:])]
    path.write_text("".join("\t".join(row) + "\n" for row in rows))
    given = [f"data.path={path}", "data.source=tsv", "seed=1", *RUNS[name]]
    given += [] if target == "days" else ["data.target_column=long", *CLASSES[name]]
    command, reports = ["train", str(CONFIGS / f"{name}.yaml"), *given], []
    for baseline in ("false", "true"):
        place = str(tmp_path / baseline)
        more = [f"eval.baseline={baseline}", "--run-dir", place, "--json"]
        assert main([*command, *more]) == 0
        said = capsys.readouterr()
        reports.append(json.loads(said.out.strip().splitlines()[-1]))
        if name != "uls":
            assert "noise over signal (the largest possible update): about" in " ".join(
                said.err.split()
            )
    alone, both = reports
    assert both["eval"] == alone["eval"]
    assert both["privacy"]["epsilon"] == alone["privacy"]["epsilon"]
    assert "without_privacy" not in alone["outside_guarantee"]
    assert BASELINE_CAVEAT in both["privacy"]["caveats"]
    assert BASELINE_CAVEAT not in alone["privacy"]["caveats"]
    rows = both["outside_guarantee"]["without_privacy"]
    assert rows[0]["loss"] == both["eval"]["initial"]["loss"]
    assert rows[-1]["loss"] == both["baselines"][WITHOUT_PRIVACY]["loss"]
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "uls",
            "model.kind=transformer",
            "model.kind=transformer does not fit these data (regression, inputs of shape [20])",
        ),
        ("uls", "model.lora.rank=4", "model.lora does not go with model.kind=linear"),
        ("uls", "model.trainable=last_layers", "is for model.kind=transformer"),
        ("uls", "model.options.hidden=[3]", "model.options do not fit model.kind=linear"),
        ("isrl", "federation.silos=2", "set federation.silos=3"),
        ("isrl", "model.loss=logistic", "does not fit data with a number as target"),
        ("hi_grad_avg", "federation.silos=2", "set federation.silos to 3"),
        ("hi_grad_avg", "model.kind=logistic", "use mlp or linear"),
    ],
)
def test_what_does_not_fit_is_refused(name, change, message, table, tmp_path, capsys):
    command = ["train", str(CONFIGS / f"{name}.yaml"), f"data.path={table}", *RUNS[name], change]
    assert main([*command, "--run-dir", str(tmp_path / "run")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.nightly
def test_classes_are_scored_by_accuracy(table, tmp_path, capsys):
    """The same command on a target that is 0 or 1, with a network."""
    lines = table.read_text().splitlines()
    path = tmp_path / "signs.csv"
    signs = [
        f"{row.rpartition(',')[0]},{int(float(row.rpartition(',')[2]) > 0)}" for row in lines[1:]
    ]
    path.write_text("\n".join([lines[0], *signs]) + "\n")
    command = ["train", str(CONFIGS / "uls.yaml"), f"data.path={path}", *COLUMNS, "data.classes=2"]
    more = ["model.kind=mlp", "model.options.hidden=[8]", "seed=1", "privacy.epsilon=20"]
    more.append("data.input_columns=[lab_*]")
    assert main([*command, *more, "--run-dir", str(tmp_path / "run"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["eval"]["final"]["accuracy"] > 0.6
    assert report["model"]["kind"] == "mlp"
