"""``dpfl predict`` and ``load_exported(...).predict``: columns by name, in words of the data."""

import csv
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import dpfl_jax as dpfl
from dpfl_jax.cli.main import main

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "table"
# In a file the inputs stand neither in alphabetical order nor beside each other.
COLUMNS = ("", "zeta", "patient", "hospital", "age", "sex", "seen", "outcome")
DECLARED = (
    "data.path=visits.csv", "data.user_column=patient", "data.target_column=outcome",
    "data.silo_column=hospital", "data.categories={sex: [f, m], outcome: [alive, dead]}",
    "data.scale={age: [50, 25], seen: [20, 5], zeta: [0, 1]}", "data.missing=[zeta]",
    "data.dates={seen: '%d.%m.%Y'}",
)  # fmt: skip


SPLIT = ("data.test_fraction=0", "data.validation_fraction=0.5")


def rows_of(people=60, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(3 * people):
        age, zeta = rng.integers(20, 80), rng.normal()
        dead = age / 15 + zeta + 2 * (i % 2) > 4.5
        seen = f"{1 + i % 28:02}.{1 + i % 12:02}.20{10 + i % 10}"
        cells = (i, "" if i % 9 == 0 else round(zeta, 3), f"p{i % people}", f"h{i % 3}", age)
        rows.append(dict(zip(COLUMNS, (*cells, "fm"[i % 2], seen, ("alive", "dead")[int(dead)]))))
    return rows


def write(path, rows, columns=COLUMNS):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write(tmp_path / "visits.csv", rows_of())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(capsys, system, *args):
    command = ["train", str(CONFIGS / f"{system}.yaml"), *DECLARED, *args, "--run-dir", "run"]
    assert main([*command, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def auc(scores, labels):
    """The probability that somebody who died has the higher score."""
    pairs = scores[labels][:, None] - scores[~labels][None]
    return float((pairs > 0).mean() + (pairs == 0).mean() / 2)


@pytest.mark.slow
def test_a_table_is_predicted_by_another_process_as_by_the_run(folder, capsys):
    """The same people give the AUC of the run itself, in whatever order their columns come."""
    report = trained(capsys, "uls", "train.steps=4", *SPLIT)
    assert report["model"]["kind"] == "linear"
    inputs = next(e for e in report["privacy"]["public_inputs"] if e.startswith("input columns"))
    assert inputs == "input columns: zeta, age, sex, seen; target: outcome"
    assert main(["export", "run", "out"]) == 0
    config = dpfl.DataConfig(
        source="csv", path="visits.csv", user_column="patient", target_column="outcome",
        silo_column="hospital", missing=("zeta",), dates={"seen": "%d.%m.%Y"},
        categories={"sex": ("f", "m"), "outcome": ("alive", "dead")},
        scale={"age": (50, 25), "seen": (20, 5), "zeta": (0, 1)}, test_fraction=0.0,
        validation_fraction=0.5,
    )  # fmt: skip
    held = dpfl.load_dataset(config).validation
    examples = held.read(np.arange(held.num_examples))
    found = dpfl.load_exported("out")
    scores = jax.vmap(found.model.outputs, (None, 0))(found.params, examples["x"])
    wanted = auc(np.asarray(scores), examples["label"] == 1)
    people = set(held.user_ids(range(held.num_users)))
    new = [row for row in rows_of() if row["patient"] in people]
    write(folder / "new.csv", new, ("sex", "age", "patient", "seen", "zeta"))  # and no target
    command = [
        sys.executable,
        "-P",
        "-m",
        "dpfl_jax",
        "predict",
        "out",
        "new.csv",
        "--out",
        "p.csv",
    ]
    subprocess.run(command, check=True, capture_output=True)
    predicted = list(csv.DictReader((folder / "p.csv").open()))
    assert [row["patient"] for row in predicted] == [row["patient"] for row in new]
    dead = np.array([row["outcome"] == "dead" for row in new])
    sure = np.array([float(row["probability_dead"]) for row in predicted])
    assert auc(sure, dead) == pytest.approx(wanted, abs=1e-12)
    right = np.mean([p["prediction"] == row["outcome"] for p, row in zip(predicted, new)])
    assert right == pytest.approx(report["eval"]["final"]["accuracy"])
    # The run's directory predicts the same; frames, columns and dictionaries, too.
    assert main(["predict", "run", "new.csv", "--out", "p.parquet"]) == 0
    capsys.readouterr()
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv("new.csv")
    for rows in (frame, frame[frame.columns[::-1]], frame.to_dict("list"), new):
        np.testing.assert_array_equal(found.predict(rows)["probability_dead"], sure)
    again = pandas.read_parquet("p.parquet")["probability_dead"]
    np.testing.assert_array_equal(again, sure)


@pytest.mark.slow
def test_who_was_held_out_is_found_without_running_somebody_elses_code(folder, capsys, monkeypatch):
    (folder / "owners_in.py").write_text(
        "import pathlib; pathlib.Path('ran').touch()\ndef owner(row): return row['patient']"
    )
    monkeypatch.syspath_prepend(folder)
    by_code = ["data.user_column=owners_in:owner", "--allow-code"]
    trained(
        capsys,
        "uls",
        "train.steps=2",
        "data.input_columns=[zeta, age, sex, seen]",
        *SPLIT,
        *by_code,
    )
    pathlib.Path("ran").unlink()
    sys.modules.pop("owners_in")
    command = ["predict", "run", "visits.csv", "--held-out", "--out", "p.csv"]
    assert main(command) == 2
    assert "is 'owners_in:owner', code that would be run" in capsys.readouterr().err
    assert not pathlib.Path("ran").exists()
    assert main([*command, "--allow-code"]) == 0
    assert pathlib.Path("ran").exists()


SEMICOLONS = ("data.delimiter=';'", "data.decimal=comma", "data.encoding=cp1252")


@pytest.mark.slow
@pytest.mark.parametrize("limit", [(), ("data.user_column=null", "eval.max_users=50")])
def test_five_commands_from_a_csv_file_to_the_auc_of_the_report(limit, folder, capsys):
    """The file is one of a hospital's, and so is what is written; or each row is a person."""
    rows = [{**row, "zeta": str(row["zeta"]).replace(".", ",")} for row in rows_of()]
    bad = [row | {name: "", "": f"no {name}"} for row in rows[:99] for name in ("age", "outcome")]
    for name, some in (("visits.csv", rows + bad), ("good.csv", rows)):
        lines = [";".join(map(str, [*row.values(), "Zürich"])) for row in some]
        text = "\n".join([";".join([*COLUMNS, "town"]), *lines])
        (folder / name).write_text(text, encoding="cp1252")
    inputs = "data.on_bad_row=drop", "data.input_columns=[zeta, age, sex, seen]"
    settings = [*DECLARED, *SEMICOLONS, *SPLIT, *inputs, "train.steps=4", *limit]
    assert main(["init", "table/uls"]) == 0
    account = "privacy.account=patients"
    assert main(["train", "uls.yaml", *settings, account, "--run-dir", "run", "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    rule = "chosen by a hash of their ids; data.validation_fraction=0.5, data.split_seed=0"
    assert rule in report["data"]["held_out"]
    assert f"held out: {report['data']['held_out']}" in printed.err
    assert "by book-keeping" in report["clipping"]["summary"]
    assert "book-keeping" not in printed.err
    assert main(["predict", "run", "visits.csv", "--held-out", "--out", "held_out.csv"]) == 0
    assert main(["export", "run", "out"]) == 0
    command = [sys.executable, "-P", "-m", "dpfl_jax", "predict", "out", "good.csv"]
    more = ["--delimiter", ";", "--encoding", "cp1252", "--out", "p.csv"]
    subprocess.run([*command, *more], check=True, capture_output=True)
    found = {}
    for name in ("held_out.csv", "p.csv"):
        table = (folder / name).read_text(encoding="cp1252")
        assert "Zürich;" in table
        found[name] = list(csv.DictReader(table.splitlines(), delimiter=";"))
    held, everybody = found["held_out.csv"], found["p.csv"]
    assert len(held) == report["eval"]["final"]["examples"] < len(everybody)
    numbers = {row[""] for row in held}  # of rows
    assert [row for row in everybody if row[""] in numbers] == held
    if not limit:
        people = {row["patient"] for row in held}
        assert [row for row in everybody if row["patient"] in people] == held
    assert all("." not in row["probability_dead"] for row in held)
    sure = np.array([float(row["probability_dead"].replace(",", ".")) for row in held])
    dead = np.array([row["outcome"] == "dead" for row in held])
    assert auc(sure, dead) == pytest.approx(report["eval"]["final"]["auc"], abs=1e-9)


def test_what_new_rows_lack_is_one_sentence(folder, capsys):
    trained(capsys, "uls", "train.steps=2")
    assert main(["export", "run", "out"]) == 0
    found = dpfl.load_exported("out")
    good = {"zeta": 0.1, "age": 40, "sex": "f", "seen": "01.02.2020"}
    for rows, message in (
        ([{k: v for k, v in good.items() if k != "age"}], r"row 1: there is no column 'age'"),
        (
            [good, good | {"age": "", "sex": "w"}],
            r"without a value in 'age' \(first: row 2\)\n- words in 'sex'",
        ),
        (np.zeros((2, 5)), "does not say which column is which"),
        ("new.csv", "the table is 'new.csv'"),
    ):
        with pytest.raises(dpfl.BadInputError, match=message):
            found.predict(rows)
    assert set(found.predict([])) == {"prediction", "probability_alive", "probability_dead"}
    for args, message in (
        (["out", "visits.csv", "--out", "visits.csv"], "give a new file"),
        (["out", "visits.csv", "--out", "p.txt"], "give a new file"),
        (["out", "no.csv", "--out", "p.csv"], "no.csv does not exist"),
        (["nowhere", "visits.csv", "--out", "p.csv"], "nowhere"),
        (["out", "visits.csv", "--held-out", "--out", "p.csv"], "for runs (not exports)"),
    ):
        assert main(["predict", *args]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


SYSTEMS = {
    "hi_grad_avg": ("federation.rounds=2",),
    "rpdp": ("federation.rounds=2", "federation.local_steps=2", "data.user_column=null",
             'data.input_columns=[zeta, age, sex, seen]'),
    "isrl": ("federation.rounds=3", "model.loss=logistic"),
}  # fmt: skip


@pytest.mark.slow("rpdp", "hi_grad_avg")
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_predicts(system, folder, capsys):
    report = trained(capsys, system, *SYSTEMS[system])
    assert main(["predict", "run", "visits.csv", "--out", "p.csv"]) == 0
    predicted = list(csv.DictReader((folder / "p.csv").open()))
    assert {row["prediction"] for row in predicted} <= {"alive", "dead"}
    sums = [float(row["probability_alive"]) + float(row["probability_dead"]) for row in predicted]
    np.testing.assert_allclose(sums, 1.0)
    assert report["status"] == "finished"
    code = main(["predict", "run", "visits.csv", "--held-out", "--out", "held_out.csv"])
    if system == "isrl":  # where single rows are held out
        assert code == 2
        assert report["data"]["held_out"].startswith("data.validation_fraction=0.2 of each silo's")
        return
    assert code == 0
    held = list(csv.DictReader((folder / "held_out.csv").open()))
    assert len(held) == report["eval"]["final"]["examples"]
    assert all(row in predicted for row in held)


@pytest.mark.slow
def test_numbers_come_in_the_units_of_the_target(folder, capsys):
    """Of ULS, and of ISRL where records declared public set the scale."""
    columns = [
        "data.path=days.csv", "data.user_column=patient", "data.target_column=days",
        "data.silo_column=hospital", "data.input_columns=[age]",
    ]  # fmt: skip
    rows = [{**row, "days": 100 + row["age"]} for row in rows_of()]
    write(folder / "days.csv", rows, ("patient", "hospital", "age", "days"))
    scale = "data.scale={age: [50, 25], days: [150, 25]}"
    for system, more in (
        ("uls", [scale, "train.steps=20", "privacy.epsilon=50", "data.test_fraction=0"]),
        ("isrl", ["federation.rounds=20", "privacy.epsilon=50"]),
    ):
        command = ["train", str(CONFIGS / f"{system}.yaml"), *columns, *more, "seed=1"]
        assert main([*command, "--run-dir", system]) == 0, capsys.readouterr().err
        assert main(["export", system, f"{system}-out"]) == 0
        found = dpfl.load_exported(f"{system}-out").predict([{"age": 30}, {"age": 70}])
        low, high = found["prediction"]
        assert 110 < low < high < 190, system


@pytest.mark.slow
def test_arrays_and_modules_of_fit_predict(folder, capsys):
    from flax import linen, nnx

    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2)).astype(np.float32)
    users = [i % 30 for i in range(60)]
    table = [{"who": f"u{u}", "b": float(a), "a": float(b), "y": int(a > 0)}
             for u, (a, b) in zip(users, x)]  # fmt: skip
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(table)
    net = linen.Dense(2)
    params = net.init(jax.random.key(0), x[0])
    for name, data, model, more, back, rows in (
        ("frame", dpfl.from_pandas(frame, user="who", target="y", classes=2),
         nnx.Linear(2, 2, rngs=nnx.Rngs(0)), {}, {}, frame[["a", "b"]]),
        ("array", dpfl.from_arrays({"x": x, "label": 1 * (x[:, 0] > 0)}, users),
         params, {"model": net}, {"model": net}, x),
    ):  # fmt: skip
        plan = dpfl.uls(group_size=2, cohort_size=8).plan(data, steps=2, epsilon=8.0)
        result = dpfl.fit("classification", model, plan, optax.sgd(0.1), run_dir=name, **more)
        dpfl.export(name, f"{name}-out")
        found = dpfl.load_exported(f"{name}-out", like=model, **back).predict(rows)
        forward = result.params if name == "frame" else lambda v, p=result.params: net.apply(p, v)
        wanted = jax.nn.softmax(jax.vmap(forward)(x))
        np.testing.assert_allclose(found["probability_1"], wanted[:, 1], rtol=1e-5)
    with pytest.raises(dpfl.BadInputError, match="what computes with these parameters"):
        dpfl.load_exported("array-out").predict(x)
    plan = dpfl.uls(group_size=2, cohort_size=8).plan(data, steps=1, epsilon=8.0)

    def loss(p, example):
        return ((p["w"] @ example["x"] - example["label"]) ** 2).mean()

    dpfl.fit(loss, {"w": np.zeros(2, np.float32)}, plan, optax.sgd(0.1), run_dir="own")
    dpfl.export("own", "own-out")
    with pytest.raises(dpfl.BadInputError, match="a custom loss"):
        dpfl.load_exported("own-out").predict(x)


@pytest.mark.nightly
def test_images_predict_from_an_array(folder, capsys):
    pytest.importorskip("sklearn")
    config = {
        "data": {"source": "digits"}, "model": {"kind": "mlp", "options": {"hidden": [8]}},
        "mechanism": {"kind": "uls", "cohort_size": 20, "group_size": 1, "clip_norm": 1.0},
        "privacy": {"epsilon": 8.0}, "train": {"steps": 2},
    }  # fmt: skip
    (folder / "digits.yaml").write_text(json.dumps(config))
    assert main(["train", "digits.yaml", "--run-dir", "run"]) == 0
    np.save("x.npy", np.zeros((3, 8, 8), np.float32))
    assert main(["predict", "run", "x.npy", "--out", "p.csv"]) == 0
    assert len(list(csv.DictReader((folder / "p.csv").open()))) == 3
    for bad, message in (
        (np.zeros((3, 9), np.float32), "give one of shape [3, 8, 8]"),
        (np.zeros((3, 8, 8), np.uint8), "a store divides by 255"),
    ):
        np.save("bad.npy", bad)
        capsys.readouterr()
        assert main(["predict", "run", "bad.npy", "--out", "q.csv"]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
