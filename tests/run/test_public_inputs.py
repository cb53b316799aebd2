"""What a guarantee is about: its unit, what was taken as public, which other runs it counts."""

import contextlib
import io
import json
import types

import numpy as np
import pytest
import yaml
from rich.console import Console
from silo_configs import SILOS

import dpfl_jax as dpfl
from dpfl_jax.cli.main import main
from dpfl_jax.config.load import validate_config
from dpfl_jax.data.build import write_store
from dpfl_jax.data.shards import open_store
from dpfl_jax.errors import BadInputError
from dpfl_jax.run.pipeline import _Bill, prepare
from dpfl_jax.run.public_inputs import OTHER_RUNS_CAVEAT, not_people
from dpfl_jax.task import EACH_ROW

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
    assert not_people(several, "user") is None
    assert "(a user: column v)" in not_people(one, "user")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["2020-03-01", "2020-03-02"], "every user is a date (a user: column who)"),
        (["1.3.2020", "2/28/2021 10:15"], "every user is a date (a user: column who)"),
        (["A", "B"], "there are 2 users of many rows each (a user: column who)"),
        (["078-05-1120", "219-09-9999"], "there are 2 users"),  # social security numbers
        ([f"p{i}" for i in range(30)], None),
    ],
)
def test_users_that_are_no_people_warn(ids, message):
    rows = [{"who": who, "x": 1.0, "y": 0.0} for who in ids for _ in range(25)]
    told = not_people(dpfl.from_rows(rows, user="who", target="y", inputs=["x"]), "user")
    assert told is None if message is None else message in told


def test_the_key_of_a_unit_goes_with_the_data(tmp_path):
    """Through splits, limits and a store on disk, into the guarantee of a plan of one's own."""
    rows = [{"a": f"p{i % 9}", "x": 1.0, "y": 0.0} for i in range(36)]
    store = dpfl.from_rows(rows, user="{a}-{a}", target="y", inputs=["x"])
    write_store(store, tmp_path / "store")
    for data in (store, open_store(tmp_path / "store")):
        plan = dpfl.uls(group_size=2, cohort_size=3).plan(data, steps=2, epsilon=4.0, delta=1e-3)
        assert "for each user by key {a}-{a} (" in plan.guarantee().summary()


TEXTS = {
    "data": {"source": "jsonl", "path": "posts.jsonl", "seq_len": 16, "test_fraction": 0.0},
    "model": {"overrides": {"num_layers": 1, "embed_dim": 16, "num_heads": 2}},
    "mechanism": {"kind": "uls", "group_size": 2, "cohort_size": 8},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-3},
    "train": {"steps": 2},
}
POSTS = "\n".join(json.dumps({"user": f"u{i // 2}", "text": "stone lamp"}) for i in range(60))


def stated(config, tmp_path, monkeypatch):
    """What a run of a configuration would state."""
    monkeypatch.chdir(tmp_path)
    table(tmp_path)
    (tmp_path / "posts.jsonl").write_text(POSTS)
    (tmp_path / "diaries.txt").write_text("what the users wrote themselves " * 40)
    prepared = prepare(validate_config(config), Console(quiet=True))
    some = dpfl.Guarantee("user", "add-or-remove one user", "central", 1.0, 1e-5, 1.0, "PLD", "")
    return prepared, prepared.about(some)


def test_a_pre_training_corpus_is_named(tmp_path, monkeypatch):
    """It may be what the users wrote themselves: the guarantee says that it takes it as public."""
    data = TEXTS["data"] | {"public": "diaries.txt"}
    config = TEXTS | {"data": data, "pretrain": {"steps": 1}}
    prepared, guarantee = stated(config, tmp_path, monkeypatch)
    assert "pre-training corpus: data.public=diaries.txt" in guarantee.public_inputs
    assert "first parameters: drawn with init_seed=0" in guarantee.public_inputs
    assert "tokenizer: bytes" in guarantee.public_inputs
    assert "not protected: first parameters" in str(guarantee)
    caveats = prepared.caveats()
    assert any("the corpus of pre-training (data.public) is taken as public" in c for c in caveats)
    assert guarantee.unit_key == "column user"


def test_a_checkpoint_and_its_tokenizer_are_named(tmp_path, monkeypatch):
    data = TEXTS["data"] | {"tokenizer": "checkpoint"}
    config = TEXTS | {"data": data, "model": {"checkpoint": "bundled:quickstart", "lora": {}}}
    prepared, guarantee = stated(config, tmp_path, monkeypatch)
    digest = prepared.base["digest"][:16]
    assert f"initial checkpoint: bundled:quickstart ({digest})" in guarantee.public_inputs
    assert "tokenizer: that of the checkpoint" in guarantee.public_inputs
    assert "first adapters: drawn with init_seed=0" in guarantee.public_inputs


def test_a_ledger_is_charged_for_units_by_one_column(tmp_path, monkeypatch):
    """A run of visits, or of rows, does not spend of its patients' budget."""
    file = tmp_path / "spent.jsonl"
    privacy = CONFIG["privacy"] | {"ledger": str(file), "account": "patients", "budget": 8.0}

    def charged(column):
        config = CONFIG | {"data": CONFIG["data"] | {"user_column": column}, "privacy": privacy}
        prepared, _ = stated(config, tmp_path, monkeypatch)
        run = types.SimpleNamespace(run_id=str(column))
        _Bill(prepared, run, Console(quiet=True)).pay("draws")

    charged("patient")
    for column, name in (("visit_id", "column visit_id"), (None, EACH_ROW)):
        with pytest.raises(BadInputError, match=f"by '{name}', but .* by 'column patient'"):
            charged(column)
    (record,) = map(json.loads, file.read_text().splitlines())
    assert record["unit_key"] == "column patient"


KINDS = ("first parameters", "scaling constants", "class list", "input columns", "counts")


def test_columns_scale_classes_bounds_and_counts_are_named(tmp_path, monkeypatch):
    _, guarantee = stated(CONFIG, tmp_path, monkeypatch)
    found = dict(name.split(": ", 1) for name in guarantee.public_inputs)
    assert set(found) == {*KINDS, "clip norm", "group size"}
    assert found["scaling constants"] == "data.scale of age, dose"
    assert found["input columns"] == "age, dose; target: outcome"
    assert found["class list"] == "2, of data.classes"
    assert (found["clip norm"], found["group size"]) == ("1", "3 examples of a user")


@pytest.mark.slow
@pytest.mark.parametrize("name", SILOS)
def test_silos_name_what_they_take_as_public(name, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    _, guarantee = stated(SILOS[name], tmp_path, monkeypatch)
    found = dict(entry.split(": ", 1) for entry in guarantee.public_inputs)
    assert {*KINDS[2:], "first parameters"} <= set(found)
    assert ("typical budgets" in found) == (name == "personal")
    keys = {
        "federated": "synthetic group of 6 rows",
        "personal": "row (subjects by synthetic group of 1 rows)",
        "isrl": "row (users by image of digits)",
    }
    assert guarantee.unit_key == keys[name]


def test_other_runs_are_counted_by_a_ledger_alone(tmp_path, monkeypatch):
    """And so says every guarantee: of a run, of one with a ledger, and of a plan of one's own."""
    _, alone = stated(CONFIG, tmp_path, monkeypatch)
    assert alone.caveats[-1] == OTHER_RUNS_CAVEAT
    ledger = {"ledger": str(tmp_path / "spent.jsonl"), "account": "patients"}
    config = CONFIG | {"privacy": CONFIG["privacy"] | ledger}
    prepared, counted = stated(config, tmp_path, monkeypatch)
    assert OTHER_RUNS_CAVEAT not in counted.caveats
    assert "add up in the account 'patients' of the ledger" in counted.caveats[-1]
    plan = prepared.mechanism.plan(prepared.data.train, steps=2, epsilon=4.0, delta=1e-3)
    assert plan.guarantee().caveats[-1] == OTHER_RUNS_CAVEAT
    assert prepared.about(plan.guarantee()).caveats.count(OTHER_RUNS_CAVEAT) == 0
