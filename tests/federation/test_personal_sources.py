"""Tables of patients, their own silos, silos of half of the classes, budgets from columns."""

import csv
import dataclasses
import types

import numpy as np
import pytest
from rich.console import Console

from dpfl_jax.audit.attacks.simulate import trials_of
from dpfl_jax.config.schema import BudgetConfig, RunConfig
from dpfl_jax.data import ArrayStore, DataConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.data import FederatedData
from dpfl_jax.federation.federated_run import identity, prepare
from dpfl_jax.federation.partition import (
    assign_by_labels,
    load_subjects,
    silos_of_records,
    spread,
    subject_keys,
)
from dpfl_jax.federation.personal import read_records
from dpfl_jax.federation.personal_budgets import budgets_of_column, column_budgets, record_budgets
from dpfl_jax.randomness import RootKey

pytest.importorskip("sklearn")
QUIET = Console(quiet=True)
RPDP = {"kind": "rpdp", "max_records_per_subject": 1}


def config(**sections):
    base = {
        "data": {"source": "breast_cancer", "validation_fraction": 0.34},
        "federation": {"silos": 4, "rounds": 3, "local_steps": 2},
        "model": {"kind": "logistic"},
        "mechanism": dict(RPDP),
        "privacy": {"epsilon": 10.0, "delta": 1e-3},
    }
    for name, section in sections.items():
        base[name] = base[name] | section
    return RunConfig.model_validate(base)


def test_the_embedded_patients_are_real_and_of_order_one():
    data = load_subjects(DataConfig(source="breast_cancer", validation_fraction=0.34))
    assert data.train.num_users + data.held_out.num_users == 569
    records = data.train.read(np.arange(data.train.num_examples))
    assert records["x"].shape == (data.train.num_examples, 30)
    assert np.abs(records["x"]).max() <= 1.0
    assert 0.55 < records["label"].mean() < 0.7  # 357 of 569 are benign


def test_hospitals_are_their_silos_of_records(data_dir):
    path = str(data_dir / "heart_disease")
    found = config(
        data={"source": "heart_disease", "path": path, "validation_fraction": 0.34},
        federation={"partition": "natural"},
    )
    prepared = prepare(found, Console(quiet=True))
    sizes = [plan.facts.num_records for plan in prepared.federation.silos]
    # 303, 261, 46 and 130 patients, two thirds of each in training (by hash: not exactly).
    for size, whole in zip(sizes, (303, 261, 46, 130), strict=True):
        assert abs(size - 0.66 * whole) < 4 * np.sqrt(whole * 0.66 * 0.34)
    for i, silo in enumerate(prepared.data.silos):
        read = prepared.data.read(np.arange(silo.first, silo.first + silo.num_records))
        assert set(read["silo"].tolist()) == {i}
        assert np.abs(read["x"]).mean() < 1.5
    names = prepared.personal.names
    hospitals = ("cleveland", "hungarian", "switzerland", "va")
    assert all(n.startswith(hospitals[s]) for n, s in zip(names, prepared.personal.silos))


def test_silos_of_half_of_the_classes():
    labels = np.random.default_rng(0).integers(0, 10, 4000)
    keys = np.random.default_rng(1).integers(0, 2**63, 4000).astype(np.uint64)
    silos = assign_by_labels(np.arange(4000), keys, labels, 10, 10)
    for silo in range(10):
        held = set(labels[silos == silo].tolist())
        assert held == {(silo + j) % 10 for j in range(5)}
        assert 280 < np.sum(silos == silo) < 520
    # A record's place is its own: taking others away moves nobody.
    keep = np.arange(4000) % 3 != 0
    again = assign_by_labels(np.arange(keep.sum()), keys[keep], labels[keep], 10, 10)
    assert again.tolist() == silos[keep].tolist()
    for silo_count, classes in ((3, 10), (4, 2), (2, 3)):
        some = labels % classes
        spread_over = assign_by_labels(np.arange(4000), keys, some, silo_count, classes)
        assert set(spread_over.tolist()) == set(range(silo_count))
    with pytest.raises(BadInputError, match=r"federation\.silos to 2 or more"):
        assign_by_labels(np.arange(4000), keys, labels, 1, 10)
    with pytest.raises(BadInputError, match=r"labels in 0\.\.4"):
        assign_by_labels(np.arange(4000), keys, labels, 4, 5)


def stored(**fields):
    count = len(next(iter(fields.values())))
    return ArrayStore.from_users(
        (f"p{i}", {k: np.asarray(v)[i : i + 1] for k, v in fields.items()}) for i in range(count)
    )


def test_natural_silos_and_missing_fields_are_one_sentence():
    store = stored(x=np.zeros((4, 2), np.float32), silo=np.array([0, 1, 2, 1], np.int32))
    assert sorted(silos_of_records(store, 3).tolist()) == [0, 1, 1, 2]
    with pytest.raises(BadInputError, match=r"set federation\.silos to 3"):
        silos_of_records(store, 2)
    patients = load_subjects(DataConfig(source="breast_cancer", validation_fraction=0.2)).train
    with pytest.raises(BadInputError, match="partition=natural needs a field 'silo'"):
        spread(patients, config(federation={"partition": "natural"}))


def test_budgets_from_a_field_or_a_file_follow_their_records(tmp_path):
    asked = np.array([0.5, 1.5, 2.5, 3.5, 4.5])
    store = stored(x=np.arange(5.0, dtype=np.float32)[:, None], eps=asked)
    setting = config(federation={"silos": 2})
    data = spread(store, setting)
    keys = subject_keys(store, 0)
    field = BudgetConfig(kind="column", column="eps")
    found = record_budgets(field, store, data, keys)
    read = data.read(np.arange(5))
    assert found.tolist() == (read["x"][:, 0] + 0.5).tolist()
    file = tmp_path / "b.csv"
    with file.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerows([["record", "eps"], *((f"p{i}", asked[i]) for i in (3, 0, 4, 1, 2))])
    listed = BudgetConfig(kind="column", column="eps", path=str(file))
    assert record_budgets(listed, store, data, keys).tolist() == found.tolist()
    with pytest.raises(BadInputError, match="no field 'epsilon'"):
        column_budgets(BudgetConfig(kind="column"), store)
    with pytest.raises(BadInputError, match="needs the columns 'record' and 'epsilon'"):
        column_budgets(BudgetConfig(kind="column", path=str(file)), store)
    file.write_text("record,eps\np0,1\np4,2\np1,x1\np2,1\np3,1\n")
    with pytest.raises(BadInputError, match=r"b.csv, line 4 \(record 'p1'\), has 'x1' in column"):
        column_budgets(listed, store)
    file.write_text("record,eps\np0,1\np4,2\np1,1\np2,-3\np3,1\n")
    with pytest.raises(BadInputError, match=r"line 5 \(record 'p2'\), has '-3' in column"):
        column_budgets(listed, store)
    negative = stored(x=np.zeros((3, 1), np.float32), eps=np.array([1.0, -0.5, 2.0]))
    with pytest.raises(BadInputError, match=r"record \d of the data, of 'p1', has -0.5 in column"):
        column_budgets(field, negative)
    file.write_text("record,eps\np0,1\np0,5\n")
    with pytest.raises(BadInputError, match="two rows for the record 'p0'"):
        column_budgets(listed, store)
    with pytest.raises(BadInputError, match="2 numbers for each record"):
        budgets_of_column(np.ones((5, 2)), "eps")
    file.write_text("record,eps\np0,1\n")
    with pytest.raises(BadInputError, match="no budget for the record"):
        column_budgets(listed, store)
    with pytest.raises(BadInputError, match="does not exist"):
        column_budgets(BudgetConfig(kind="column", path=str(tmp_path / "none.csv")), store)


def test_a_drawn_budget_depends_on_its_record_alone():
    store = stored(x=np.zeros((300, 1), np.float32))
    fewer = ArrayStore.from_users(
        (f"p{i}", {"x": np.zeros((1, 1), np.float32)}) for i in range(300) if i % 4
    )
    budgets = BudgetConfig(kind="mix_gauss")
    tables = []
    for people in (store, fewer):
        data = spread(people, config())
        values = record_budgets(budgets, people, data, subject_keys(people, 0))
        names = people.user_ids(range(people.num_users))
        tables.append({names[s]: v for s, v in zip(data.subjects, values, strict=True)})
    assert len(tables[1]) == 225
    assert all(tables[0][name] == value for name, value in tables[1].items())
    assert abs(np.mean([v < 0.2 for v in tables[0].values()]) - 0.7) < 0.12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mechanism": {"sampling_prob": 0.1}},
            "unknown key 'mechanism.sampling_prob' of kind=rpdp",
        ),
        ({"mechanism": {"max_records_per_subject": 2}}, "rpdp protects records"),
        ({"federation": {"participation_prob": 0.5, "silos_per_round": 2}}, "keep one"),
    ],
)
def test_contradictions_are_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_secret_budgets_need_a_declared_batch_or_typical_budgets(tmp_path):
    file = tmp_path / "budgets.csv"
    rows = "\n".join(f"patient {i:05d},{1 + i % 3}" for i in range(569))
    file.write_text(f"record,epsilon\n{rows}\n")
    secret = {"budgets": {"kind": "column", "path": str(file)}}
    quiet = Console(quiet=True)
    with pytest.raises(BadInputError, match=r"set mechanism\.expected_batch"):
        prepare(config(privacy=secret), quiet)
    with pytest.raises(BadInputError, match=r"privacy\.budgets\.declared"):
        prepare(config(privacy=secret | {"policy": "minimum"}), quiet)
    prepared = prepare(config(privacy=secret, mechanism={"expected_batch": 30}), quiet)
    assert {p.mechanism.participation.expected_batch for p in prepared.federation.silos} == {30.0}
    assert prepared.personal.groups == ()


def test_a_resumed_run_keeps_its_noise_and_rates_follow_it():
    prepared = prepare(config(), Console(quiet=True))
    began = 1.5 * prepared.personal.setting.noise_multiplier
    facts = {"noise": [began] * 4, "delta": prepared.delta}
    resumed = prepared.resume_from(types.SimpleNamespace(facts=facts, resumed=True, writes=False))
    assert {p.sigma for p in resumed.federation.silos} == {began}
    assert resumed.personal.setting.noise_multiplier == began
    ours, before = resumed.personal.assignment.rates, prepared.personal.assignment.rates
    assert np.all(ours > before)
    assert np.all(resumed.personal.check(3) <= resumed.personal.budgets)
    assert resumed.guarantee(3).epsilon < prepared.guarantee(3).epsilon


def test_an_edited_budget_is_named_when_a_run_goes_on(tmp_path):
    personal = prepare(config(), Console(quiet=True)).personal
    run = tmp_path / "run"
    (run / "private").mkdir(parents=True)
    personal.check_unchanged(run, "b.csv")  # a run that has not begun
    personal.save_budgets(run)
    assert (run / "private" / "budgets.csv").stat().st_mode & 0o077 == 0
    personal.check_unchanged(run, "b.csv")
    edited = personal.budgets.copy()
    before, edited[5] = edited[5], 7.25
    name = personal.names[5]
    with pytest.raises(
        BadInputError, match=f"'{name}' has the budget 7.25 in b.csv, .* {before:g}"
    ):
        dataclasses.replace(personal, budgets=edited).check_unchanged(run, "b.csv")


def test_an_id_is_no_formula_of_a_spreadsheet(tmp_path):
    """Whoever chose it would have whoever opens the private tables send them somewhere."""
    personal = prepare(config(), Console(quiet=True)).personal
    odd = ('=HYPERLINK("http://evil")', "+1", "-2", "@a", "'=b", "'c", "d")
    personal = dataclasses.replace(personal, names=(*odd, *personal.names[len(odd) :]))
    (tmp_path / "private").mkdir()
    personal.save_budgets(tmp_path)
    personal.write(tmp_path, 3)
    for name in ("budgets.csv", "records.csv"):
        with (tmp_path / "private" / name).open(newline="") as file:
            cells = [row[0] for row in csv.reader(file)][name == "records.csv" :]
        assert cells[: len(odd)] == [f"'{text}" for text in odd[:-1]] + ["d"]
    assert [row["record"] for row in read_records(tmp_path)[1]] == list(personal.names)
    edited = dataclasses.replace(personal, budgets=personal.budgets + 1)
    with pytest.raises(BadInputError, match=r"record '=HYPERLINK.*has the budget"):
        edited.check_unchanged(tmp_path, "b.csv")


def test_a_run_does_not_go_on_with_other_budgets():
    prepared = prepare(config(), Console(quiet=True))
    same = prepare(config(), Console(quiet=True))
    assert identity(prepared.data, prepared.personal) == identity(same.data, same.personal)
    withdrawn = prepared.personal.budgets.copy()
    withdrawn[0] = 0.0
    personal = dataclasses.replace(prepared.personal, budgets=withdrawn)
    assert identity(prepared.data, personal) != identity(prepared.data, prepared.personal)


def test_rates_of_other_records_stop_a_run_and_an_audit_before_they_begin(monkeypatch):
    """Each silo's own records, but in another order: nothing else that is stated changes."""
    real = FederatedData.with_rates

    def wrong(data, rates, stay):
        other = np.concatenate(
            [silo.first + np.arange(silo.num_records)[::-1] for silo in data.silos]
        )
        return real(data, rates[other], stay[other])

    levels = {"kind": "three_levels", "levels": [0.5, 1.0, 5.0], "shares": [0.7, 0.2, 0.1]}
    asked = config(privacy={"budgets": levels})
    right = prepare(asked, QUIET)
    right.personal.check_rates(right.data)
    monkeypatch.setattr(FederatedData, "with_rates", wrong)
    made = prepare(asked, QUIET)
    assert (made.personal.spent(3) <= made.personal.budgets).all()  # by the rates that were meant
    said = r"record '.*' allows epsilon 0.5, but silo 0 would draw it at the rate .* and spend"
    with pytest.raises(BadInputError, match=said):
        made.algorithm()
    with pytest.raises(BadInputError, match=said):
        trials_of(asked, RootKey.from_seed(0), QUIET, 400)
