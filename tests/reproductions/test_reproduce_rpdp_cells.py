"""Trainings of a figure: none lost, none taken for another's, seed after seed."""

import dataclasses
import functools
import json

import numpy as np
import pytest
from rich.console import Console

from dpfl_jax.accounting.rates import TwoStage
from dpfl_jax.cli.main import main
from dpfl_jax.federation.data import ArrayRecords, FederatedData
from dpfl_jax.federation.personal_budgets import ThreeLevels
from dpfl_jax.models import LogisticRegression
from reproductions.registry import Settings
from reproductions.rpdp import mnist
from reproductions.rpdp._cells import Cell, Kept, always, fingerprint, train
from reproductions.rpdp._tables import Beside, above, beside, row
from reproductions.rpdp._training import Bench

SETTING = TwoStage(3.0, 2, 3, 1.0, 1e-3)


def bench(**changed):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    label = (x[:, 0] > 0).astype(np.int32)
    records = ArrayRecords({"x": x[:30], "label": label[:30]})
    data = FederatedData.from_assignment(records, np.arange(30), np.arange(30) % 2, 2)
    given = {"optimizer": ("adam", 0.1), "local_steps": 2, "rounds": 3, "participation": 1.0}
    test = {"x": x[30:], "label": label[30:]}
    return Bench(LogisticRegression(3), data, test, weights=(1.0, 1.0), **(given | changed))


def personal(table, **changed):
    setting = dataclasses.replace(SETTING, **changed)
    return functools.partial(
        table.personal, setting, ThreeLevels((0.5, 1.0, 3.0), (0.7, 0.2, 0.1)), "certified"
    )


def cells():
    table = bench()
    return [
        Cell(table, "certified", "ThreeLevels", personal(table)),
        Cell(table, "non-private", "all", always(table.non_private(8)), {"split": "IID"}),
    ]


def settings(folder, **more):
    return Settings(False, folder, Console(quiet=True), **more)


def lines(folder):
    return [json.loads(line) for line in (folder / "x.runs.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_an_interrupted_figure_goes_on_where_it_was(tmp_path, monkeypatch):
    whole, _ = train("x", cells(), 2, settings(tmp_path))
    assert [line["training"] for line in lines(tmp_path)] == [
        "certified, ThreeLevels", "non-private, all, split IID",
    ] * 2  # fmt: skip
    assert [line["seed"] for line in lines(tmp_path)] == [0, 0, 1, 1]

    part = tmp_path / "part"
    part.mkdir()
    text = (tmp_path / "x.runs.jsonl").read_text().splitlines(keepends=True)
    # Killed while it wrote the third line.
    (part / "x.runs.jsonl").write_text("".join(text[:2]) + text[2][:50])
    ran = []
    run = Bench.run
    monkeypatch.setattr(Bench, "run", lambda *args: ran.append(args[3]) or run(*args))
    again, note = train("x", cells(), 2, settings(part))
    assert ran == [1, 1]
    assert again == whole
    assert "4 of 4 trainings are finished, 2 of them in earlier runs" in note
    assert train("x", cells(), 2, settings(part, minutes=0.0))[0] == whole
    assert ran == [1, 1]


@pytest.mark.nightly
def test_tables_of_what_is_finished_when_time_is_up(tmp_path):
    found, note = train("x", cells(), 2, settings(tmp_path, minutes=0.0))
    assert found == []
    assert note.startswith("0 of 4 trainings are finished")
    train("x", cells()[:1], 1, settings(tmp_path))
    found, note = train("x", cells(), 2, settings(tmp_path, minutes=0.0))
    assert [(r["run"], r["seeds"], r["over_budget"]) for r in found] == [("certified", 1, 0)]
    assert note.startswith("1 of 4 trainings are finished")


def test_trainings_that_differ_have_other_fingerprints():
    table = bench()
    found = [
        fingerprint(table, personal(table)(0), 0),
        fingerprint(table, personal(table)(0), 1),  # other noise, same budgets
        fingerprint(table, personal(table)(1), 0),  # other budgets
        fingerprint(table, personal(table, noise_multiplier=4.0)(0), 0),
        fingerprint(table, personal(table, delta=1e-2)(0), 0),
        fingerprint(table, table.non_private(8), 0),
        fingerprint(table, table.non_private(4), 0),
        fingerprint(bench(optimizer=("adam", 0.2)), personal(table)(0), 0),
        fingerprint(bench(optimizer=("sgd", 0.1)), personal(table)(0), 0),
    ]
    other = bench(rounds=4)
    found.append(fingerprint(other, personal(other, rounds=4)(0), 0))
    part = bench(participation=0.5)
    found.append(fingerprint(part, personal(part, participation_prob=0.5)(0), 0))
    moved = bench()
    moved.test["label"][0] ^= 1
    found.append(fingerprint(moved, personal(moved)(0), 0))
    assert len(set(found)) == len(found)
    assert fingerprint(bench(), personal(bench())(0), 0) == found[0]


def test_a_file_of_something_else_is_no_training(tmp_path):
    file = tmp_path / "x.runs.jsonl"
    file.write_text('[1]\n{"fingerprint": "a"}\nnot json')
    kept = Kept(file)
    assert kept.get("a") is None
    kept.add("b", np.array([0.5]), seed=0)
    assert Kept(file).get("b").tolist() == [0.5]


def test_mnist_claims_of_what_is_there():
    def line(split, run, values):
        curves = [np.full(15, v) for v in values]
        budgets = "all" if run == "non-private" else "ThreeLevels"
        return row(run, budgets, curves, split=split, over_budget=0)

    rows = [
        line("IID", "certified", (0.87, 0.86)),
        line("IID", "curve fit (paper)", (0.874,)),
        line("IID", "dropout", (0.9,)),
        line("non-IID", "certified", (0.68,)),
    ]
    found = {c.claim: c for c in mnist._claims(rows)}
    assert not any("beat" in name for name in found)  # minimum is missing
    # Over the seeds that both have.
    cost = found["IID, ThreeLevels: certifying costs at most 0.5 points of accuracy"]
    assert cost.measured == "0.004, 1 seed"
    assert cost.holds is None
    assert found["certified: non-IID silos lower accuracy"].measured == "-0.19, 1 seed"
    assert mnist._claims([]) == []


def test_one_seed_has_the_deviation_of_the_others():
    one = row("certified", "all", [np.full(5, 0.70)])
    # 0.04 is less than 2.8 (Student's t, 4 degrees) times 0.02 * sqrt(1 + 1 / 5), 0.08 is more.
    near, far = (beside([Beside("x", one, mean, 0.02, 5)])[0] for mean in (0.74, 0.78))
    assert (near.holds, far.holds) == (None, False)
    two = row("curve", "all", [np.full(5, 0.72), np.full(5, 0.9)])
    assert above("x", two, one, source="ours").measured == "-0.02, 1 seed"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("rpdp/heart", "--seeds", "0"), "--seeds is 0"),
        (("rpdp/heart", "--minutes", "-1"), "--minutes is -1"),
        (("rpdp/curve", "--seeds", "3"), "rpdp/curve does not use it"),
        (("rpdp/centralised", "--minutes", "3"), "rpdp/centralised does not use it"),
    ],
)
def test_options_that_mean_nothing_are_one_sentence(tmp_path, capsys, arguments, said):
    assert main(["reproduce", *arguments, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.nightly
def test_a_torn_curve_and_other_code_are_trained_again(tmp_path, monkeypatch):
    whole, _ = train("x", cells()[:1], 1, settings(tmp_path))
    file = tmp_path / "x.runs.jsonl"
    line = json.loads(file.read_text())
    file.write_text(json.dumps(line | {"curve": [1.0]}) + "\n")
    assert train("x", cells()[:1], 1, settings(tmp_path))[0] == whole
    assert len(lines(tmp_path)) == 2
    monkeypatch.setattr("reproductions.rpdp._cells.code", lambda: "another")
    assert train("x", cells()[:1], 1, settings(tmp_path))[0] == whole
    assert len(lines(tmp_path)) == 3
