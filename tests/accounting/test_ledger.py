"""The ledger composes, refuses, survives crashes on the safe side, and notices damage."""

import dataclasses
import hashlib
import json
import math
import multiprocessing
import os

import dp_accounting
import numpy as np
import pytest

from dpfl_jax import accounting
from dpfl_jax.accounting import Account, BudgetExceededError, Guarantee, Ledger, event_types, events
from dpfl_jax.accounting.filters import filtered_epsilon
from dpfl_jax.errors import BadInputError

USERS = Account("fingerprint-1")
DELTA = 1e-6


def run_of(steps, sigma=2.0):
    return events.els(sigma, 0.01, 4, steps)


def test_events_survive_json():
    samples = [
        run_of(7),
        events.composed(events.uls(1.5, 0.1, 3), events.gaussian(4.0, 2)),
        events.two_stage(2.0, 0.1, 0.5, 5, 4),
        events.fixed_size(3.0, 100, 10, 5),
        events.truncated_poisson(1.0, 0.1, 100, 30, 5),
        dp_accounting.NonPrivateDpEvent(),
        dp_accounting.NoOpDpEvent(),
    ]
    for event in samples:
        assert event_types.from_json(event_types.to_json(event)) == event
    with pytest.raises(BadInputError):
        event_types.from_json({"type": "os.system", "command": "true"})
    with pytest.raises(BadInputError):
        event_types.to_json(dp_accounting.UnsupportedDpEvent())


def test_runs_cost_less_than_their_epsilons_and_more_than_one_run(tmp_path):
    ledger = Ledger(tmp_path / "new folder" / "ledger.jsonl")
    assert ledger.spent(USERS, DELTA) == 0.0
    one = ledger.reserve(USERS, "a", run_of(100), DELTA)
    assert one.before == 0.0
    assert one.after == accounting.epsilon(run_of(100), DELTA)
    two = ledger.reserve(USERS, "b", run_of(150), DELTA)
    # Declared together they are one run, and cost what it does; chosen one after the other, more.
    together = Ledger(tmp_path / "together")
    whole = together.reserve(USERS, "plan", events.composed(run_of(100), run_of(150)), DELTA).after
    assert whole == pytest.approx(accounting.epsilon(run_of(250), DELTA), rel=1e-6)
    assert whole < two.after < one.after + accounting.epsilon(run_of(150), DELTA)
    assert two.after < 1.1 * whole
    assert ledger.spent(USERS, DELTA) == two.after
    assert ledger.runs(USERS) == ["a", "b"]


def test_budget_is_refused_before_anything_is_recorded(tmp_path):
    ledger = Ledger(tmp_path / "l")
    budget = filtered_epsilon([run_of(150), run_of(50)], DELTA) * 1.001
    first = ledger.reserve(USERS, "a", run_of(150), DELTA, budget)
    assert first.left == pytest.approx(budget - first.after)
    size = os.path.getsize(ledger.path)
    with pytest.raises(BudgetExceededError, match="is left"):
        ledger.reserve(USERS, "b", run_of(60), DELTA, budget)
    assert os.path.getsize(ledger.path) == size
    assert ledger.reserve(USERS, "b", run_of(50), DELTA, budget).after <= budget
    assert 0 <= ledger.remaining(USERS, DELTA, budget) < 0.002 * budget


def test_two_choices_that_are_each_within_a_budget_are_not_within_it_together(tmp_path):
    """The first run is seen, then one of two: delta is 1.93e-5, not 1e-5 (test_filters)."""
    for number, second in enumerate((events.uls(0.2676, 1e-4, 1), events.gaussian(3.1066, 1))):
        ledger = Ledger(tmp_path / f"{number}")
        ledger.reserve(USERS, "first", events.gaussian(2.6, 1), 1e-5, 2.0)
        with pytest.raises(BudgetExceededError):
            ledger.reserve(USERS, "second", second, 1e-5, 2.0)


def test_what_is_reserved_counts_however_early_a_run_ends(tmp_path):
    """When it ends may follow from what it showed; and no second commit lowers a first."""
    ledger = Ledger(tmp_path / "l")
    ledger.reserve(USERS, "a", run_of(100), DELTA)
    whole = accounting.epsilon(run_of(100), DELTA)
    # A crash here: another process sees the full amount.
    assert Ledger(ledger.path).spent(USERS, DELTA) == whole
    for _ in range(2):
        ledger.commit("a")
        assert ledger.spent(USERS, DELTA) == whole
    with pytest.raises(TypeError):
        ledger.commit("a", run_of(40))
    size = os.path.getsize(ledger.path)
    # Resumed: the same run, once.
    assert ledger.reserve(USERS, "a", run_of(100), DELTA).after == whole
    assert os.path.getsize(ledger.path) > size
    assert ledger.runs(USERS) == ["a"]


def old(path, *records):
    """A ledger as it was written before it was a filter."""
    previous, account = "", {"dataset": USERS.dataset, "unit": "user"}
    account["adjacency"] = USERS.adjacency
    for kind, run, event in records:
        record = {"kind": kind, "run": run, "event": event_types.to_json(event), "time": 0.0}
        record |= {"account": account, "previous": previous}
        line = json.dumps(record, sort_keys=True).encode() + b"\n"
        with path.open("ab") as file:
            file.write(line)
        previous = hashlib.sha256(line[:-1]).hexdigest()[:32]
    return Ledger(path)


def test_an_old_ledger_counts_in_full_and_says_so_once(tmp_path):
    ledger = old(
        tmp_path / "l",
        ("reserve", "a", run_of(100)),
        ("commit", "a", run_of(40)),
        ("commit", "a", run_of(1)),
        ("reserve", "b", events.gaussian(9.0, 5)),
        ("commit", "b", events.gaussian(9.0, 8)),  # more than was reserved: it did that
    )
    whole = filtered_epsilon([run_of(100), events.gaussian(9.0, 8)], DELTA)
    assert ledger.spent(USERS, DELTA) == whole
    with pytest.raises(BudgetExceededError, match="counted in full"):
        ledger.reserve(USERS, "c", events.gaussian(9.0, 1), DELTA, whole)
    found = ledger.reserve(USERS, "c", events.gaussian(9.0, 1), DELTA, 2 * whole)
    assert "by an earlier version" in found.notes[0]
    assert "before it had the budget" in found.notes[1]
    assert ledger.reserve(USERS, "d", events.gaussian(9.0, 1), DELTA, 2 * whole).notes == ()


def noisy(steps):
    return events.gaussian(40.0, steps)


def test_a_budget_is_fixed_when_its_account_is_opened(tmp_path):
    ledger = Ledger(tmp_path / "l")
    first = ledger.reserve(USERS, "a", noisy(100), DELTA, 2.0)
    assert first.notes == ()
    assert ledger.budgets(USERS) == {DELTA: 2.0}
    # Who names none keeps to it, and who names another hears what is guaranteed.
    with pytest.raises(BudgetExceededError, match="beyond the budget of 2"):
        ledger.reserve(USERS, "b", noisy(1000), DELTA)
    assert ledger.reserve(USERS, "b", noisy(10), DELTA).budget == 2.0
    (note,) = ledger.reserve(USERS, "c", noisy(10), DELTA, 1.5).notes
    assert "is its budget of 2 (delta 1e-06)" in note
    (note,) = ledger.reserve(USERS, "d", noisy(10), DELTA, 3.0).notes
    assert "was 2 and is now 3" in note
    assert "guaranteed if it was raised by what they showed" in note
    assert ledger.budgets(USERS) == {DELTA: 3.0}
    # A run that is in the ledger already, and comes with a larger budget.
    assert ledger.reserve(USERS, "d", noisy(10), DELTA, 4.0).notes
    assert ledger.reserve(USERS, "d", noisy(10), DELTA, 4.0).notes == ()
    # At another delta it is another budget, and each is kept.
    with pytest.raises(BudgetExceededError, match="also has a budget at delta 1e-05"):
        ledger.reserve(USERS, "e", noisy(2000), 1e-5, 50.0)


def test_a_budget_is_compared_as_what_it_is(tmp_path):
    ledger, one = Ledger(tmp_path / "l"), events.gaussian(4.0, 1)
    ledger.reserve(USERS, "none", dp_accounting.NoOpDpEvent(), DELTA, 10.0)
    less = np.float16(np.nextafter(np.float16(accounting.epsilon(one, DELTA)), np.float16(0)))
    for budget in (less, np.float16(accounting.epsilon(one, DELTA) * 0.9999)):
        assert float(budget) < accounting.epsilon(one, DELTA)
        with pytest.raises(BudgetExceededError):
            ledger.reserve(USERS, "a", one, np.float64(DELTA), budget)


@pytest.mark.parametrize(
    ("unit", "adjacency"),
    [
        ("record", "replace-one record"),
        ("record", "add-or-remove one example"),
        ("example", "add-or-remove one record"),
        ("user", "add-or-remove one user"),
    ],
)
def test_a_guarantee_of_another_unit_or_adjacency_is_refused(unit, adjacency, tmp_path):
    ledger = Ledger(tmp_path / "l")
    found = Guarantee("example", "add-or-remove one example", "central", 1.0, 1e-9, 1.0, "-", "-")
    with pytest.raises(BadInputError, match="adjacency='add-or-remove one example'"):
        ledger.reserve(Account("d", unit, adjacency), "r", found, 1e-8, 2.0)
    mine = Account("d", found.unit, found.adjacency)
    assert ledger.reserve(mine, "r", found, 1e-8, 2.0).after == pytest.approx(1.0)
    keyed = dataclasses.replace(found, unit_key="column a")
    with pytest.raises(BadInputError, match="unit_key='column a'"):
        ledger.reserve(dataclasses.replace(mine, unit_key="column b"), "k", keyed, 1e-8)
    nothing = dataclasses.replace(found, epsilon=math.inf, unit="none", adjacency="none")
    assert Ledger(tmp_path / "m").reserve(mine, "open", nothing, 1e-8).after == math.inf


def by(key, unit="user", adjacency="add-or-remove one user"):
    return Account("fingerprint-1", unit, adjacency, key)


def test_an_account_adds_up_units_by_one_key(tmp_path):
    """Ten visits of a patient may each spend what the patient has."""
    ledger, visits = Ledger(tmp_path / "l"), by("column visit")
    ledger.reserve(by("column patient"), "a", noisy(100), DELTA, 8.0)
    size = os.path.getsize(ledger.path)
    for run in ("a", "b"):
        with pytest.raises(BadInputError, match=r"by 'column visit', but .* by 'column patient'"):
            ledger.reserve(visits, run, noisy(100), DELTA, 8.0)
    guarantee = Guarantee("user", USERS.adjacency, "central", 1.0, 1e-9, 1.0, "-", "-")
    visit = dataclasses.replace(guarantee, unit_key="column visit")
    with pytest.raises(BadInputError, match="name the same column"):
        ledger.reserve(USERS, "b", visit, DELTA)
    assert os.path.getsize(ledger.path) == size
    assert ledger.reserve(by("column patient"), "b", noisy(100), DELTA, 8.0).notes == ()
    ledger.commit("b")
    assert ledger.spent(USERS, DELTA) == ledger.spent(visits, DELTA) > 0
    assert ledger.accounts() == [USERS]


def test_runs_that_do_not_say_what_a_unit_is_are_counted_with_a_note(tmp_path):
    """Those of a ledger of before, or of a loop of one's own."""
    ledger = old(tmp_path / "l", ("reserve", "a", noisy(100)))
    assert len(ledger.reserve(USERS, "b", noisy(100), DELTA, 8.0).notes) == 2  # of before
    for run in "cd":
        (note,) = ledger.reserve(by("column patient"), run, noisy(100), DELTA, 8.0).notes
        assert "only if it was 'column patient' in all of them" in note
    (note,) = ledger.reserve(USERS, "e", noisy(100), DELTA, 8.0).notes
    assert "do not say what makes a user" in note
    with pytest.raises(BadInputError, match="name the same column"):
        ledger.reserve(by("column visit"), "f", noisy(100), DELTA, 8.0)


def test_other_accounts_of_the_same_people_are_named(tmp_path):
    ledger = Ledger(tmp_path / "l")
    records = by("row", "record", "replace one record")
    subjects = by("column patient", "subject", "zero-out one subject")
    for number, account in enumerate((USERS, Account("others"), records)):
        notes = ledger.reserve(account, f"{number}", noisy(100), DELTA, 8.0).notes
        assert len(notes) == (account is records)
    (note,) = ledger.reserve(subjects, "3", noisy(100), DELTA, 8.0).notes
    assert "(user: add-or-remove one user; record: replace one record)" in note
    assert "is not counted here" in note


def test_an_adjacency_that_nobody_knows_is_refused(tmp_path):
    ledger = Ledger(tmp_path / "l")
    for adjacency in ("Replace-one record", "substitute one record", ""):
        with pytest.raises(BadInputError, match="begin with add-or-remove"):
            ledger.reserve(Account("d", "record", adjacency), "r", run_of(1), DELTA)
    assert ledger.accounts() == []
    one, two = (Account("d", "record", f"{how} record") for how in ("replace", "replace-one"))
    noise = events.gaussian(9.0, 1)
    costs = [ledger.reserve(a, a.adjacency, noise, DELTA).after for a in (one, two)]
    assert costs[0] == costs[1] > accounting.epsilon(noise, DELTA)


def test_without_a_budget_no_guarantee_is_claimed(tmp_path):
    ledger = Ledger(tmp_path / "l")
    assert ledger.reserve(USERS, "a", noisy(100), DELTA).notes == ()
    (note,) = ledger.reserve(USERS, "b", noisy(100), DELTA).notes
    assert "has no budget" in note
    assert "no guarantee" in note


def test_resuming_charges_once_and_changing_a_run_is_refused(tmp_path):
    ledger = Ledger(tmp_path / "l")
    ledger.reserve(USERS, "a", run_of(100), DELTA)
    size = os.path.getsize(ledger.path)
    ledger.reserve(USERS, "a", run_of(100), DELTA)
    assert os.path.getsize(ledger.path) == size
    with pytest.raises(BadInputError, match="another name"):
        ledger.reserve(USERS, "a", run_of(120), DELTA)
    with pytest.raises(BadInputError, match="choose another name"):
        ledger.reserve(Account("other"), "a", run_of(100), DELTA)
    with pytest.raises(BadInputError, match="reserved nothing"):
        ledger.commit("never")


def test_accounts_are_apart_and_a_bare_guarantee_counts(tmp_path):
    ledger = Ledger(tmp_path / "l")
    ledger.reserve(USERS, "a", run_of(100), DELTA)
    assert ledger.spent(Account("fingerprint-2"), DELTA) == 0.0
    foreign = Guarantee("user", "add-or-remove one user", "central", 0.5, 1e-7, 1.0, "-", "-")
    both = ledger.reserve(USERS, "foreign", foreign, DELTA)
    assert both.before + 0.5 < both.after < math.inf
    ledger.reserve(USERS, "open", dp_accounting.NonPrivateDpEvent(), DELTA)
    assert ledger.spent(USERS, DELTA) == math.inf


def test_a_new_ledger_is_told_from_one_that_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ledger = Ledger("new")
    assert ledger.path == tmp_path / "new"  # also after the working directory has changed
    with pytest.raises(BudgetExceededError):
        ledger.reserve(USERS, "a", run_of(100), DELTA, budget=1e-3)
    found = [ledger.reserve(USERS, name, run_of(1), DELTA).new_ledger for name in ("a", "a", "b")]
    assert found == [True, False, False]
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="cannot be written"):
        Ledger(tmp_path / "file" / "ledger").reserve(USERS, "a", run_of(1), DELTA)


def test_line_cut_by_a_crash_is_ignored_and_the_next_record_is_whole(tmp_path):
    ledger = Ledger(tmp_path / "l")
    ledger.reserve(USERS, "a", run_of(100), DELTA)
    whole = ledger.path.read_bytes()
    ledger.commit("a")
    commit = ledger.path.read_bytes()[len(whole) :]
    for cut in (1, len(commit) // 2, len(commit) - 2):
        ledger.path.write_bytes(whole + commit[:cut])
        assert ledger.spent(USERS, DELTA) == pytest.approx(accounting.epsilon(run_of(100), DELTA))
        ledger.reserve(USERS, "b", run_of(50), DELTA)
        assert ledger.runs(USERS) == ["a", "b"]
        assert ledger.spent(USERS, DELTA) == filtered_epsilon([run_of(100), run_of(50)], DELTA)


def test_record_that_lost_only_its_line_end_stands(tmp_path):
    ledger = Ledger(tmp_path / "l")
    ledger.reserve(USERS, "a", run_of(100), DELTA)
    ledger.reserve(USERS, "c", run_of(1), DELTA)
    ledger.path.write_bytes(ledger.path.read_bytes()[:-1])
    assert ledger.runs(USERS) == ["a", "c"]
    ledger.reserve(USERS, "b", run_of(50), DELTA)
    assert ledger.runs(USERS) == ["a", "c", "b"]


def test_damage_in_the_middle_is_noticed(tmp_path):
    ledger = Ledger(tmp_path / "l")
    for name in ("a", "b", "c"):
        ledger.reserve(USERS, name, run_of(10), DELTA)
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    for damaged in ([lines[0], lines[2]], [lines[0].replace(b"10", b"11"), *lines[1:]], lines[1:]):
        ledger.path.write_bytes(b"".join(damaged))
        with pytest.raises(BadInputError, match="damaged"):
            ledger.spent(USERS, DELTA)


def test_zeros_that_a_crash_left_are_a_cut_line(tmp_path):
    ledger = Ledger(tmp_path / "l")
    ledger.reserve(USERS, "a", run_of(1), DELTA)
    ledger.path.write_bytes(ledger.path.read_bytes() + b"\0" * 50)
    ledger.reserve(USERS, "b", run_of(1), DELTA)
    assert ledger.runs(USERS) == ["a", "b"]


def test_nothing_is_written_to_a_file_that_is_no_ledger(tmp_path):
    """A line of a .bashrc with $(...) would be run by the next shell."""
    other = tmp_path / ".bashrc"
    for held in (b"export A=1\n", b"alias l=ls", b"{}\n"):
        other.write_bytes(held)
        with pytest.raises(BadInputError, match="line 1 is no record"):
            Ledger(other).reserve(Account("$(touch x)"), "a", run_of(1), DELTA)
        assert other.read_bytes() == held
    (tmp_path / "link").symlink_to(tmp_path / "not there")
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("link", "is a link"), ("pipe", "is not a regular file")):
        with pytest.raises(BadInputError, match=message):
            Ledger(tmp_path / name).reserve(USERS, "a", run_of(1), DELTA)
    assert not (tmp_path / "not there").exists()


def _take(path, name, budget, queue):
    try:
        Ledger(path).reserve(USERS, name, run_of(50), DELTA, budget)
        queue.put(1)
    except BudgetExceededError:
        queue.put(0)


@pytest.mark.slow
def test_concurrent_runs_cannot_both_take_what_is_left(tmp_path):
    budget = filtered_epsilon([run_of(50)] * 2, DELTA) * 1.001  # room for two of fifty steps
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [
        context.Process(target=_take, args=(tmp_path / "l", f"r{i}", budget, queue))
        for i in range(4)
    ]
    for worker in workers:
        worker.start()
    taken = sum(queue.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join()
    assert taken == 2
    assert Ledger(tmp_path / "l").spent(USERS, DELTA) <= budget
