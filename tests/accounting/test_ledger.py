"""The ledger composes, refuses, survives crashes on the safe side, and notices damage."""

import math
import multiprocessing
import os

import dp_accounting
import pytest

from dpfl_jax import accounting
from dpfl_jax.accounting import Account, BudgetExceededError, Guarantee, Ledger, events, serialize
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
        assert serialize.from_json(serialize.to_json(event)) == event
    with pytest.raises(BadInputError):
        serialize.from_json({"type": "os.system", "command": "true"})
    with pytest.raises(BadInputError):
        serialize.to_json(dp_accounting.UnsupportedDpEvent())


def test_runs_compose_more_tightly_than_adding(tmp_path):
    ledger = Ledger(tmp_path / "new folder" / "ledger.jsonl")
    assert ledger.spent(USERS, DELTA) == 0.0
    one = ledger.reserve(USERS, "a", run_of(100), DELTA)
    assert one.before == 0.0
    two = ledger.reserve(USERS, "b", run_of(150), DELTA)
    whole = accounting.epsilon(run_of(250), DELTA)
    assert two.after == pytest.approx(whole, rel=1e-6)
    assert ledger.spent(USERS, DELTA) == two.after
    alone = accounting.epsilon(run_of(150), DELTA)
    assert two.after < one.after + alone
    assert ledger.runs(USERS) == ["a", "b"]


def test_budget_is_refused_before_anything_is_recorded(tmp_path):
    ledger = Ledger(tmp_path / "l")
    budget = accounting.epsilon(run_of(200), DELTA) * 1.001
    first = ledger.reserve(USERS, "a", run_of(150), DELTA, budget)
    assert first.left == pytest.approx(budget - first.after)
    size = os.path.getsize(ledger.path)
    with pytest.raises(BudgetExceededError, match="is left"):
        ledger.reserve(USERS, "b", run_of(60), DELTA, budget)
    assert os.path.getsize(ledger.path) == size
    assert ledger.reserve(USERS, "b", run_of(50), DELTA, budget).after <= budget
    assert 0 <= ledger.remaining(USERS, DELTA, budget) < 0.002 * budget


def test_reservation_counts_in_full_until_committed(tmp_path):
    ledger = Ledger(tmp_path / "l")
    ledger.reserve(USERS, "a", run_of(100), DELTA)
    # A crash here: another process sees the full amount.
    assert Ledger(ledger.path).spent(USERS, DELTA) == pytest.approx(
        accounting.epsilon(run_of(100), DELTA)
    )
    ledger.commit("a", run_of(40))
    assert ledger.spent(USERS, DELTA) == pytest.approx(accounting.epsilon(run_of(40), DELTA))
    # Resumed: counts in full again.
    ledger.reserve(USERS, "a", run_of(100), DELTA)
    assert ledger.spent(USERS, DELTA) == pytest.approx(accounting.epsilon(run_of(100), DELTA))
    ledger.commit("a")
    assert ledger.spent(USERS, DELTA) == pytest.approx(accounting.epsilon(run_of(100), DELTA))


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
    assert both.after > both.before
    assert both.after <= both.before + 0.5 + 0.05
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
    ledger.commit("a", run_of(1))
    commit = ledger.path.read_bytes()[len(whole) :]
    for cut in (1, len(commit) // 2, len(commit) - 2):
        ledger.path.write_bytes(whole + commit[:cut])
        # The commit was lost, so the reservation stands: over-reported, never under.
        assert ledger.spent(USERS, DELTA) == pytest.approx(accounting.epsilon(run_of(100), DELTA))
        ledger.reserve(USERS, "b", run_of(50), DELTA)
        assert ledger.runs(USERS) == ["a", "b"]
        assert ledger.spent(USERS, DELTA) == pytest.approx(
            accounting.epsilon(run_of(150), DELTA), rel=1e-6
        )


def test_record_that_lost_only_its_line_end_stands(tmp_path):
    ledger = Ledger(tmp_path / "l")
    ledger.reserve(USERS, "a", run_of(100), DELTA)
    ledger.commit("a", run_of(1))
    ledger.path.write_bytes(ledger.path.read_bytes()[:-1])
    assert ledger.spent(USERS, DELTA) == pytest.approx(accounting.epsilon(run_of(1), DELTA))
    ledger.reserve(USERS, "b", run_of(50), DELTA)
    assert ledger.runs(USERS) == ["a", "b"]


def test_damage_in_the_middle_is_noticed(tmp_path):
    ledger = Ledger(tmp_path / "l")
    for name in ("a", "b", "c"):
        ledger.reserve(USERS, name, run_of(10), DELTA)
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    for damaged in ([lines[0], lines[2]], [lines[0].replace(b"10", b"11"), *lines[1:]], lines[1:]):
        ledger.path.write_bytes(b"".join(damaged))
        with pytest.raises(BadInputError, match="damaged"):
            ledger.spent(USERS, DELTA)


def _take(path, name, budget, queue):
    try:
        Ledger(path).reserve(USERS, name, run_of(50), DELTA, budget)
        queue.put(1)
    except BudgetExceededError:
        queue.put(0)


@pytest.mark.slow
def test_concurrent_runs_cannot_both_take_what_is_left(tmp_path):
    budget = accounting.epsilon(run_of(100), DELTA) * 1.001  # room for two of fifty steps
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
