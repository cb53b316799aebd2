"""What a silo refuses, repeats and writes down, without compiling anything."""

import dataclasses
import hashlib
import json
import os

import jax
import numpy as np
import pytest
import yaml
from safetensors.numpy import save

from dpfl_jax.accounting import epsilon, events
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.federated_run import with_calibrated_noise
from dpfl_jax.federation.federation import Federation
from dpfl_jax.federation.guarantee import federated_guarantee
from dpfl_jax.flower import StudyPlan, federated
from dpfl_jax.flower import silo as silo_module
from dpfl_jax.flower.federated import FederatedSiloData, facts_of
from dpfl_jax.flower.silo import SiloClient
from dpfl_jax.flower.silo_folder import PlanDemands, RefusedError, SiloLog, make_key, read_key
from dpfl_jax.flower.study import study_of
from dpfl_jax.flower.wire import pack, tree_of, unpack
from dpfl_jax.run.pipeline import Charge
from tests.flower.studies import ISRL, POLICY, config_of, drawn, kind_of, make_silos, study, why

PARAMS = {"w": np.arange(3, dtype=np.float32)}


class Work:
    """A message that is the parameters plus numbers of the silo's key; nothing is compiled."""

    like = PARAMS
    computed = 0

    def __init__(self, held, plan, index, key):
        config = held.config
        self.config, self.plan, self.key = config, plan, key
        self.fingerprint = held.as_silo(0, 1).fingerprint
        self.rounds = config.federation.rounds
        self.federation: Federation = with_calibrated_noise(
            config, facts_of(plan.silos), plan.noise
        )[0]
        self.sigma = plan.noise[index]
        self.state_like = {"taken": np.int32(0)}

    def start(self):
        return self.state_like

    def check(self):
        pass

    def demands(self, policy):
        epsilon = 1.0 if self.sigma >= 1 else 100.0
        return PlanDemands("hi_grad_avg", self.rounds, self.sigma, epsilon, "subject")

    def charge(self, policy):
        return Charge(
            events.gaussian(2.0, 1), policy.delta, "column patient", "subject", "add-or-remove one"
        )

    def guarantee(self):
        return federated_guarantee(self.federation, self.config.privacy.delta, self.rounds)

    def message(self, number, key, params, state, answered):
        assert int(state["taken"]) == answered
        Work.computed += 1
        noise = key.child("round", number).numpy("noise").normal(size=3)
        state = {"taken": np.int32(answered + 1)}
        return {"w": (params["w"] + noise).astype(np.float32)}, state


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A folder of one silo, whose plans compile nothing."""
    folder = make_silos(tmp_path, study(), POLICY)["bern"]
    monkeypatch.setattr(
        FederatedSiloData, "work", lambda held, plan, index, key: Work(held, plan, index, key)
    )
    Work.computed = 0
    return folder


def plan_of(silo, run="run-1", noise=2.0, **changes):
    rows = [{"name": "aarau", "num_records": 20, "num_subjects": 10},
            {"name": "bern", **silo.held.facts},
            {"name": "chur", "num_records": 30, "num_subjects": 20}]  # fmt: skip
    plan = StudyPlan(run, study_of(config_of(silo.folder.parent)), rows, [noise] * 3)
    return dataclasses.replace(plan, **changes)


def agree(silo, plan):
    return silo.answer(pack({"kind": "plan", "plan": plan.to_json()}))


def ask(silo, plan, number=0, params=PARAMS, **changes):
    told = {"kind": "round", "run": plan.run, "plan": plan.digest, "round": number, **changes}
    return silo.answer(pack(told, params=params))


def again(silo):
    """The silo after a kill -9: nothing but its folder is left."""
    silo.close()
    return SiloClient(silo.folder)


def test_a_silo_states_what_its_guarantee_is_about(made):
    """In its log: its own column, what is taken as public, and the ledger that counts all runs."""
    silo = SiloClient(made)
    agree(silo, plan_of(silo))
    stated = silo.log.find("accepted", run="run-1")["guarantee"]
    assert stated["unit_key"] == "column person"
    assert any(name.startswith("class list: ") for name in stated["public_inputs"])
    assert "add up in the account 'bern' of the ledger" in stated["caveats"][-1]


def test_a_round_is_answered_once_and_repeated_to_the_bit(made):
    silo = SiloClient(made)
    plan = plan_of(silo)
    assert kind_of(agree(silo, plan)) == "accepted"
    first = ask(silo, plan)
    assert kind_of(first) == "message"
    assert ask(silo, plan) == first
    silo = again(silo)
    assert ask(silo, plan) == first
    assert kind_of(agree(silo, plan)) == "accepted"  # a server that was restarted
    assert Work.computed == 1
    other = {"w": PARAMS["w"] + 1}
    assert "would cancel" in why(ask(silo, plan, params=other))
    assert kind_of(ask(silo, plan, 2, other)) == "message"  # another round has noise of its own
    assert "round 1 of run run-1 is past" in why(ask(silo, plan, 1))
    assert Work.computed == 2


def test_a_silo_that_died_between_asking_and_answering_computes_the_same(made, monkeypatch):
    silo = SiloClient(made)
    plan = plan_of(silo)
    agree(silo, plan)
    with monkeypatch.context() as patch:
        patch.setattr(
            silo_module,
            "write_atomically",
            lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt),
        )
        with pytest.raises(KeyboardInterrupt):
            ask(silo, plan)
    silo = again(silo)
    other = {"w": PARAMS["w"] + 1}
    assert "would cancel" in why(ask(silo, plan, params=other))
    found = unpack(ask(silo, plan))[1]["released['w']"]
    noise = drawn(silo)[0].child("round", 0).numpy("noise").normal(size=3)
    np.testing.assert_array_equal(found, (PARAMS["w"] + noise).astype(np.float32))
    # ... and it died once more, after the message was on the disk and before the log said so.
    rows = silo.log.path.read_bytes().split(b"\n")
    kept = [row for row in rows if b'"answered"' not in row]
    assert len(kept) == len(rows) - 1
    silo.log.path.write_bytes(b"\n".join(kept))
    silo = again(silo)
    assert kind_of(ask(silo, plan)) == "message"
    assert kind_of(ask(silo, plan, 1)) == "message"  # its state is that after round 0


def messages(silo):
    return sorted(silo.folder.glob("runs/*/*.message"))


def test_an_answer_that_is_gone_is_not_computed_again(made):
    silo = SiloClient(made)
    plan = plan_of(silo)
    agree(silo, plan)
    ask(silo, plan)
    (path,) = messages(silo)
    kept = path.read_bytes()
    for damaged in (None, kept[:-1] + bytes([kept[-1] ^ 1])):
        path.unlink(missing_ok=True)
        if damaged is not None:
            path.write_bytes(damaged)
        silo = again(silo)
        assert "is not the one in the log" in why(ask(silo, plan))
    path.write_bytes(kept)
    path.with_name("000001.message").write_bytes(kept)  # of a log that was cut
    assert "is not the one in the log" in why(ask(silo, plan, 1))
    assert ask(silo, plan) == kept
    assert Work.computed == 1


def test_a_round_that_was_sent_counts_although_the_log_could_not_say_so(made, monkeypatch):
    silo = SiloClient(made)
    plan = plan_of(silo)
    agree(silo, plan)
    append = silo.log.append

    def full(kind, **row):
        if kind == "answered":
            raise OSError("disk full")
        return append(kind, **row)

    with monkeypatch.context() as patch:
        patch.setattr(silo.log, "append", full)
        assert why(ask(silo, plan)) == silo_module.UNSAID
        assert silo.log.rows[-1]["why"] == "it failed with OSError"
    silo = again(silo)
    # Work asserts that the second turn is given out, with the state after the first.
    assert kind_of(ask(silo, plan, 1)) == "message"
    assert [row["round"] for row in silo.log.all("answered", run=plan.run, sent=True)] == [0, 1]


def test_another_plan_in_the_place_of_the_accepted_one_is_noticed(made):
    silo = SiloClient(made)
    plan = plan_of(silo)
    agree(silo, plan)
    (path,) = silo.folder.glob("runs/*/plan.json")
    path.write_text(json.dumps(plan_of(silo, noise=1.0).to_json()))  # within the policy, too
    silo = again(silo)
    assert kind_of(ask(silo, plan)) == "refused"
    assert "is not the plan of run run-1" in silo.log.rows[-1]["why"]


def rewritten(silo, **policy):
    """The silo's file, with another policy."""
    path = silo.folder / "silo.yaml"
    raw = yaml.safe_load(path.read_text())
    path.write_text(json.dumps({**raw, "policy": {**raw["policy"], **policy}}))


def test_a_policy_that_changes_ends_what_it_forbids(made):
    silo = SiloClient(made)
    plan = plan_of(silo)
    agree(silo, plan)
    assert kind_of(ask(silo, plan)) == "message"
    rewritten(silo, most_rounds=2)
    assert "has changed" in why(ask(silo, plan, 1))
    silo = again(silo)
    assert "policy.most_rounds is 2" in why(ask(silo, plan, 1))
    rewritten(silo, most_rounds=10, total_epsilon=0.1)
    silo = again(silo)
    assert kind_of(ask(silo, plan, 1)) == "refused"
    assert "policy.total_epsilon is 0.1" in silo.log.rows[-1]["why"]
    rewritten(silo, total_epsilon=50.0)
    assert kind_of(ask(again(silo), plan, 1)) == "message"


def test_a_policy_says_what_all_runs_may_cost(made):
    path = made / "silo.yaml"
    raw = yaml.safe_load(path.read_text())
    del raw["policy"]["total_epsilon"]
    path.write_text(json.dumps(raw))
    with pytest.raises(BadInputError, match=r"policy\.total_epsilon: Field required"):
        SiloClient(made)


def test_a_folder_from_a_copy_draws_anew(made):
    silo = SiloClient(made)
    plan = plan_of(silo)
    agree(silo, plan)
    log = silo.log.path.read_bytes()
    sums = []
    for shift in (0, 1):  # the same noise on both would show the shift
        sums.append(unpack(ask(silo, plan, params={"w": PARAMS["w"] + shift}))[1]["released['w']"])
        silo.log.path.write_bytes(log)
        for path in messages(silo):
            path.unlink()
        silo = again(silo)
    assert abs(sums[1] - sums[0] - 1).max() > 1e-3  # false alarms: about 1e-10


def test_two_processes_do_not_answer_for_one_silo(made):
    silo = SiloClient(made)
    for path in made.glob("*lock*"):  # "a stale lock"
        path.unlink()
    with pytest.raises(BadInputError, match="another process"):
        SiloClient(made)
    silo.close()
    SiloClient(made).close()


def test_other_software_repeats_what_is_stored_and_computes_no_half_done_round(made, monkeypatch):
    silo = SiloClient(made)
    plan = plan_of(silo)
    agree(silo, plan)
    first = ask(silo, plan)
    told = {"kind": "round", "run": plan.run, "plan": plan.digest, "round": 1}
    request = pack(told, params=PARAMS)
    digest = hashlib.sha256(request).hexdigest()
    silo.log.append(
        "asked", run=plan.run, round=1, request=digest, computed_with="another", nonce="1"
    )
    silo = again(silo)
    monkeypatch.setattr(silo_module, "environment", lambda: {"jax": "a third"})
    assert ask(silo, plan) == first
    assert "other software" in why(silo.answer(request))


def test_a_server_that_changes_the_plan_is_refused(made):
    silo = SiloClient(made)
    plan = plan_of(silo)
    agree(silo, plan)
    ask(silo, plan)
    less = plan_of(silo, noise=1.5)  # still within the policy
    assert "another plan" in why(agree(silo, less))
    assert "another plan" in why(ask(silo, less, 1))
    assert kind_of(ask(silo, plan, 1)) == "message"
    assert "rounds 0 to 3" in why(ask(silo, plan, 4))


def test_foreign_and_damaged_requests_are_refused(made):
    silo = SiloClient(made)
    plan = plan_of(silo)
    assert "accepted no run" in why(ask(silo, plan))
    agree(silo, plan)
    assert "accepted no run 'run-2'" in why(ask(silo, plan, run="run-2"))
    assert "no message of this protocol" in why(silo.answer(b"rubbish"))
    assert "does not know the request" in why(silo.answer(pack({"kind": "key"})))
    wrong = {"w": np.zeros(4, np.float32)}
    assert "the models are not the same" in why(ask(silo, plan, params=wrong))
    assert "not finite" in why(ask(silo, plan, params={"w": np.full(3, np.nan, np.float32)}))
    assert Work.computed == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"most_rounds": 3}, "policy.most_rounds is 3"),
        ({"least_noise_multiplier": 3.0}, "policy.least_noise_multiplier is 3"),
        ({"mechanisms": ["rpdp"]}, "policy.mechanisms allows rpdp"),
        ({"epsilon": 0.5}, "policy.epsilon is 0.5"),
        ({"total_epsilon": 0.1}, "beyond the budget of 0.1"),
    ],
)
def test_a_plan_beyond_the_policy_is_refused_in_one_sentence(made, change, said):
    path = made / "silo.yaml"
    raw = yaml.safe_load(path.read_text())
    path.write_text(json.dumps({**raw, "policy": {**POLICY, **change}}))
    silo = SiloClient(made)
    plan = plan_of(silo)
    found = why(agree(silo, plan))
    told = silo.log.rows[-1]["why"]
    assert said in told
    assert "\n" not in told
    assert found == told or "total_epsilon" in change  # a ledger is the silo's own
    assert "accepted no run" in why(ask(silo, plan))


def test_what_is_wrong_with_a_record_is_told_to_the_operator_alone(made, monkeypatch):
    def fails(held, plan, index, key):
        raise BadInputError("record 'bern-7' has no budget")

    monkeypatch.setattr(FederatedSiloData, "work", fails)
    silo = SiloClient(made)
    reply = agree(silo, plan_of(silo))
    assert b"bern-7" not in reply
    assert "bern-7" in silo.log.rows[-1]["why"]


def test_no_server_hears_of_the_environment(made, monkeypatch):
    """A study may name a variable: the silo would put it in, and say how the studies differ."""
    monkeypatch.setenv("DB_PASSWORD", "hunter2")
    path = made.parent / "study.yaml"
    path.write_text(path.read_text().replace("options:", "options:\n    note: ${DB_PASSWORD}"))
    silo = SiloClient(made)
    assert silo.study["model"]["options"]["note"] == "${DB_PASSWORD}"
    theirs = {**silo.study, "model": {**silo.study["model"], "options": {"note": "?"}}}
    reply = silo.answer(pack({"kind": "hello", "study": theirs}))
    assert "model.options.hidden is not the same here and there" in why(reply)
    silo.study["model"]["options"]["note"] = "hunter2"  # whatever it is, it is not said
    theirs["model"]["options"] |= {"hidden": silo.study["model"]["options"]["hidden"]}
    reply = silo.answer(pack({"kind": "hello", "study": theirs}))
    assert "model.options.note is not the same here" in why(reply)
    assert b"hunter2" not in reply


def test_neither_study_nor_silo_names_code(made):
    """The study comes from the server's people."""
    path, own = made.parent / "study.yaml", made / "silo.yaml"
    before = path.read_text()
    for change in ({"source": "subprocess:run"}, {"user_column": "os:system"}):
        raw = yaml.safe_load(before)
        path.write_text(yaml.safe_dump({**raw, "data": {**raw["data"], **change}}))
        with pytest.raises(BadInputError, match="code that would be run: a silo runs what is"):
            SiloClient(made)
        path.write_text(before)
        raw = yaml.safe_load(kept := own.read_text())
        own.write_text(yaml.safe_dump({**raw, "data": {**raw["data"], **change}}))
        with pytest.raises(BadInputError, match="code that would be run: a silo runs what is"):
            SiloClient(made)
        own.write_text(kept)


def test_all_that_a_silo_tells_of_itself_is_in_its_log(made):
    silo = SiloClient(made)
    header, arrays = unpack(silo.answer(pack({"kind": "hello", "study": silo.study})))
    assert header == {"kind": "hello", **again(silo).log.rows[-1]["told"]}
    assert (set(header), arrays) == ({"kind", "name", "facts", "task", "token"}, {})


def test_a_plan_that_is_not_of_this_silo_is_refused(made):
    silo = SiloClient(made)
    plan = plan_of(silo)
    rows = [dict(row) for row in plan.silos]
    rows[1]["num_records"] += 1  # a larger silo would seem to need less noise
    assert "num_records is not the same here" in why(
        agree(silo, dataclasses.replace(plan, silos=rows))
    )
    rows[1]["name"] = "basel"
    assert "not for bern" in why(agree(silo, dataclasses.replace(plan, silos=rows)))
    longer = {**plan.study, "federation": {**plan.study["federation"], "rounds": 5}}
    assert "federation.rounds is not the same here" in why(
        agree(silo, dataclasses.replace(plan, study=longer))
    )


def test_nothing_is_spent_without_the_log(made):
    silo = SiloClient(made)
    plan = plan_of(silo)
    agree(silo, plan)
    first = ask(silo, plan)
    silo.log.path.unlink()
    silo = again(silo)
    assert "in the ledger but not in the log" in why(agree(silo, plan))
    assert "accepted no run" in why(ask(silo, plan))
    # Another run of the same study draws anew.
    other = plan_of(silo, "run-2")
    assert kind_of(agree(silo, other)) == "accepted"
    assert unpack(ask(silo, other))[1]["released['w']"].tolist() != (
        unpack(first)[1]["released['w']"].tolist()
    )


def test_a_ledger_that_lags_behind_the_log_is_noticed(made):
    silo = SiloClient(made)
    agree(silo, plan_of(silo))
    before = silo.ledger.path.read_bytes()
    agree(silo, plan_of(silo, "run-2"))
    silo.ledger.path.write_bytes(before)
    silo.close()
    with pytest.raises(BadInputError, match=r"run run-2 is in .* but not in ledger.jsonl"):
        SiloClient(made)


def test_a_ledger_that_is_removed_under_a_silo_makes_no_budget_new(made):
    silo = SiloClient(made)
    plan = plan_of(silo)
    agree(silo, plan)
    silo.ledger.path.unlink()
    assert kind_of(agree(silo, plan_of(silo, "run-2"))) == "refused"
    assert "bring the ledger back" in silo.log.rows[-1]["why"]


def test_a_silo_that_died_while_it_accepted_goes_on_with_the_same_plan_alone(made, monkeypatch):
    silo = SiloClient(made)
    plan = plan_of(silo)
    write = SiloLog.append

    def dies(log, kind, **row):
        if kind == "accepted":
            raise KeyboardInterrupt
        return write(log, kind, **row)

    with monkeypatch.context() as patch:
        patch.setattr(SiloLog, "append", dies)
        with pytest.raises(KeyboardInterrupt):
            agree(silo, plan)
    silo = again(silo)
    assert "another plan" in why(agree(silo, plan_of(silo, noise=1.5)))
    assert kind_of(agree(silo, plan)) == "accepted"
    assert kind_of(ask(silo, plan)) == "message"


def test_runs_of_another_measure_are_not_left_out_of_the_total(made, monkeypatch):
    silo = SiloClient(made)
    silo.policy = silo.policy.model_copy(update={"total_epsilon": 50.0})
    assert kind_of(agree(silo, plan_of(silo))) == "accepted"
    assert kind_of(agree(silo, plan_of(silo, "run-2"))) == "accepted"
    charge = Charge(events.gaussian(2.0, 1), 1e-3, "row", "record", "replace one record")
    monkeypatch.setattr(Work, "charge", lambda *_: charge)
    assert kind_of(agree(silo, plan_of(silo, "run-3"))) == "refused"
    assert "with another adjacency" in silo.log.rows[-1]["why"]


def test_a_full_disk_leaves_a_log_that_can_be_read(made, monkeypatch):
    silo = SiloClient(made)
    plan = plan_of(silo)
    agree(silo, plan)

    def full(descriptor):
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - 9)  # a part of the line
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("dpfl_jax.flower.silo_folder.os.fsync", full)
        with pytest.raises(OSError, match="disk full"):
            ask(silo, plan)
    assert Work.computed == 0
    assert kind_of(ask(silo, plan)) == "message"
    assert again(silo).log.rows[-1]["kind"] == "answered"


def test_what_a_stranger_sends_fills_no_log_and_moves_no_cursor(made):
    silo = SiloClient(made)
    silo.answer(pack({"kind": "hello", "study": {"\x1b[2J" + "a" * 10**5: 1}}))
    silo.answer(pack({"kind": "k" * 10**5, "run": ["r" * 10**5], "round": {"a": 1}}))
    bomb = '{"kind":"x","run":' + "[" * 10**5 + "]" * 10**5 + "}"
    assert kind_of(silo.answer(save({}, {"dpfl": bomb}))) == "refused"
    assert silo.log.path.stat().st_size < 5000
    assert all(row["why"].isprintable() for row in silo.log.rows)
    assert all(set(row["asked"]) <= {"kind"} for row in silo.log.rows)
    assert len(again(silo).log.rows) == 3


def local_item(folder, data=None, **federation):
    """A silo whose records are its mechanism's unit."""
    mechanism = {
        "kind": "local_item", "sampling_prob": 0.4, "max_records_per_subject": 5, "clip_norm": 1.0
    }  # fmt: skip
    policy = {**POLICY, "mechanisms": ["local_item"]}
    raw = study(mechanism=mechanism, federation=federation, data=data or {})
    return SiloClient(make_silos(folder, raw, policy)["bern"])


@pytest.mark.parametrize("unit", ["subject", "record"])
def test_the_ledger_is_charged_what_the_policy_is_held_against(tmp_path, unit):
    silo = local_item(tmp_path)
    policy = silo.policy.model_copy(update={"unit": unit})
    work = silo.held.work(plan_of(silo), 1, read_key(silo.folder).child("run"))
    asked, charge = work.demands(policy), work.charge(policy)
    assert asked.unit == charge.unit == unit
    assert charge.adjacency == f"add-or-remove one {unit}"
    assert charge.unit_key == ("column person" if unit == "subject" else "row")
    stated = silo.held.about(work.guarantee(), "bern")
    assert (stated.unit, stated.unit_key) == ("record", "row (subjects by column person)")
    assert epsilon(charge.event, policy.delta) >= asked.epsilon * (1 - 1e-9)


def test_rows_of_nobody_are_no_people(tmp_path):
    silo = local_item(tmp_path, data={"user_column": None, "input_columns": ["age", "dose"]})
    assert "policy.unit to record" in why(agree(silo, plan_of(silo)))
    work = silo.held.work(plan_of(silo), 1, read_key(silo.folder).child("run"))
    assert work.demands(silo.policy.model_copy(update={"unit": "record"})).unit == "record"
    assert any("somebody with several rows" in text for text in work.guarantee().caveats)


def test_what_is_said_of_others_makes_no_silo_cheaper(tmp_path):
    silo = local_item(tmp_path, max_silos_per_subject=3)

    def cost(others):
        plan = plan_of(silo, noise=2.0)
        plan = dataclasses.replace(plan, noise=[others, 2.0, others])
        work = silo.held.work(plan, 1, read_key(silo.folder).child("run"))
        charge = work.charge(silo.policy)
        return work.demands(silo.policy).epsilon, epsilon(charge.event, silo.policy.delta)

    honest, lie = cost(2.0), cost(1e6)
    assert min(lie) >= honest[0] * (1 - 1e-9)
    assert min(cost(1.0)) > honest[0]  # and the plan's own price, where that is larger


def test_people_of_one_silo_alone_pay_for_that_silo_alone(tmp_path):
    mechanism = {"kind": "subject_uls", "batch_size": 4}
    policy = {**POLICY, "mechanisms": ["subject_uls"], "total_epsilon": 8.0}
    raw = study(mechanism=mechanism, federation={"max_silos_per_subject": 1})
    silo = SiloClient(make_silos(tmp_path, raw, policy)["bern"])
    plan = plan_of(silo)
    rows = [{**row, "num_subjects": 900} if row["name"] != "bern" else row for row in plan.silos]
    plan = dataclasses.replace(plan, silos=rows, noise=[0.5, 2.0, 0.5])
    work = silo.held.work(plan, 1, read_key(silo.folder).child("run"))
    own = epsilon(work.public.silos[1].event(work.rounds), 1e-3)
    asked, charge = work.demands(silo.policy), work.charge(silo.policy)
    assert asked.epsilon == pytest.approx(own, rel=1e-6)
    assert epsilon(charge.event, 1e-3) == pytest.approx(own, rel=1e-6)
    assert work.guarantee().epsilon == pytest.approx(own, rel=1e-6)


def test_what_is_said_of_others_lowers_no_stated_guarantee(tmp_path):
    silo = SiloClient(make_silos(tmp_path, study(federation={"max_silos_per_subject": 3}))["bern"])
    stated = []
    for others in (2.0, 1e6):
        plan = dataclasses.replace(plan_of(silo), noise=[others, 2.0, others])
        work = silo.held.work(plan, 1, read_key(silo.folder).child("run"))
        stated.append(work.guarantee())
        assert stated[-1].epsilon >= work.demands(silo.policy).epsilon * (1 - 1e-9)
    assert stated[1].epsilon == stated[0].epsilon
    assert any("as if all silos did" in text for text in stated[1].caveats)


@pytest.mark.parametrize("size", [0, -5, 2.5, "x", True, None, 2**31])
def test_sizes_that_are_none_are_refused(made, size):
    silo = SiloClient(made)
    plan = plan_of(silo)
    rows = [{**plan.silos[0], "num_records": size}, *plan.silos[1:]]
    assert "is no plan" in why(agree(silo, dataclasses.replace(plan, silos=rows)))


@pytest.mark.parametrize("isrl", [False, True])
def test_sizes_said_of_others_take_no_memory_without_bound(tmp_path, isrl):
    policy = {**POLICY, "unit": "record", "mechanisms": ["minibatch_sgd", "local_item"]}
    mechanism = {"kind": "local_item", "sampling_prob": 0.4, "max_records_per_subject": 5}
    raw = study(ISRL) if isrl else study(mechanism=mechanism)
    silo = SiloClient(make_silos(tmp_path, raw, policy)["bern"])

    def answer(records):
        others = {**silo.held.facts, "num_records": records}
        rows = [{"name": "aarau", **others}, {"name": "bern", **silo.held.facts},
                {"name": "chur", **others}]  # fmt: skip
        plan = StudyPlan("run-1", study_of(config_of(tmp_path)), rows, [8.0] * 3)
        return silo.held.work(plan, 1, read_key(silo.folder).child("run")).demands(silo.policy)

    with pytest.raises(RefusedError, match="bytes of memory here"):
        answer(2**31 - 1)
    assert answer(10**6).unit == "record"


def test_odd_plans_are_refused(made):
    silo = SiloClient(made)
    plan = plan_of(silo)
    rows = [{**plan.silos[0], "num_children": 3}, *plan.silos[1:]]
    assert "must describe silos by name" in why(agree(silo, dataclasses.replace(plan, silos=rows)))
    fewer = dataclasses.replace(plan, silos=plan.silos[:2], noise=[2.0] * 2)
    assert "the plan has 2 silos, but the study 3" in why(agree(silo, fewer))
    assert "is no plan" in why(agree(silo, dataclasses.replace(plan, run="\x1b[2J")))
    assert "is no plan" in why(agree(silo, dataclasses.replace(plan, run="a/b")))
    agree(silo, dataclasses.replace(plan, noise=[1e7, 2.0, 2.0]))
    assert "noise_multiplier is 10000000.0" in silo.log.rows[-1]["why"]


@pytest.mark.parametrize(("unit", "kind"), [("subject", "refused"), ("record", "accepted")])
def test_messages_protect_records_and_no_people(tmp_path, unit, kind):
    policy = {**POLICY, "unit": unit, "mechanisms": ["minibatch_sgd"]}
    raw = study(ISRL, data={"user_column": "person"})
    silo = SiloClient(make_silos(tmp_path, raw, policy)["bern"])
    others = {"num_records": 20}
    named = [{"name": "aarau", **others}, {"name": "bern", **silo.held.facts},
             {"name": "chur", **others}]  # fmt: skip
    plan = StudyPlan("run-1", study_of(config_of(tmp_path)), named, [8.0] * 3)
    reply = agree(silo, plan)
    assert kind_of(reply) == kind, why(reply)
    if kind == "refused":
        assert "set policy.unit to record" in why(reply)
    else:
        assert silo.ledger.accounts()[0].unit == unit


def test_a_log_that_was_changed_is_noticed(made):
    silo = SiloClient(made)
    agree(silo, plan_of(silo))
    silo.log.path.write_bytes(silo.log.path.read_bytes().replace(b"run-1", b"run-0"))
    silo.close()
    with pytest.raises(BadInputError, match="changed or removed"):
        SiloClient(made)


def test_data_that_changed_end_the_run(made):
    silo = SiloClient(made)
    plan = plan_of(silo)
    agree(silo, plan)
    table = made.parent / "bern.csv"
    table.write_text(table.read_text().replace("bern-3", "bern-300"))
    silo = again(silo)
    reply = ask(silo, plan)
    assert kind_of(reply) == "refused"
    told = silo.log.rows[-1]["why"]
    assert ("not those that run" in told) != ("but it holds" in why(reply))


def with_budgets(tmp_path, expected_batch):
    """A silo whose people have epsilons of their own, in budgets.csv; and those people."""
    mechanism = {"kind": "rpdp", "clip_norm": 1.0, "expected_batch": expected_batch}
    budgets = {"kind": "column", "column": "eps", "path": str(tmp_path / "budgets.csv")}
    privacy = {"epsilon": 10.0, "delta": 1e-3, "budgets": budgets, "unreachable": "exclude"}
    policy = {**POLICY, "unit": "record", "mechanisms": ["rpdp"]}
    raw = study(mechanism=mechanism, privacy=privacy, data={"max_examples_per_user": 1})
    folder = make_silos(tmp_path, raw, policy)["bern"]
    people = {row.split(",")[1] for row in (tmp_path / "bern.csv").read_text().splitlines()[1:]}
    return folder, people


def test_budgets_that_changed_end_the_run(tmp_path):
    folder, people = with_budgets(tmp_path, 8.0)

    def fingerprint(least):
        rows = [f"{name},{least if name == 'bern-3' else 2.0}" for name in sorted(people)]
        (tmp_path / "budgets.csv").write_text("\n".join(["record,eps", *rows]))
        silo = SiloClient(folder)
        work = silo.held.work(plan_of(silo), 1, read_key(silo.folder).child("run"))
        silo.close()
        return work.fingerprint

    assert fingerprint(0.2) == fingerprint(0.2) != fingerprint(0.1)


def test_memory_is_judged_without_budgets(tmp_path, monkeypatch):
    folder, people = with_budgets(tmp_path, 0.01)
    rows = [f"{name},2.0" for name in sorted(people)]
    (tmp_path / "budgets.csv").write_text("\n".join(["record,eps", *rows]))
    silo = SiloClient(folder)
    work = silo.held.work(plan_of(silo, noise=3.0), 1, read_key(silo.folder).child("run"))
    looked: list[float] = []
    monkeypatch.setattr(federated, "check_memory", looked.append)
    work.demands(silo.policy)
    taken = []
    for rate in (0.0, 1.0):
        builder = work.steps.builder
        data = builder.data.with_rates(np.full(builder.data.num_records, rate))
        builder = dataclasses.replace(builder, data=data)
        taken.append(builder.silo_bytes)
        assert builder.public_bytes == looked[0]
    assert taken[0] < taken[1] <= looked[0]


def test_what_looks_at_records_is_paid_for_before_it_can_fail(made, monkeypatch):
    def fails(self):
        raise RuntimeError("patient 17")

    monkeypatch.setattr(Work, "check", fails)
    silo = SiloClient(made)
    plan = plan_of(silo)
    reply = silo.answer(pack({"kind": "plan", "plan": plan.to_json()}))
    assert why(reply) == silo_module.UNSAID
    assert any(plan.run in silo.ledger.runs(account) for account in silo.ledger.accounts())
    assert silo.log.rows[-1]["why"] == "it failed with RuntimeError"


def test_a_key_is_secret_and_no_other_takes_its_place(tmp_path):
    make_key(tmp_path)
    key = read_key(tmp_path)
    assert (tmp_path / "private/root_key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        make_key(tmp_path)
    (tmp_path / "private/root_key").chmod(0o644)
    with pytest.raises(BadInputError, match="chmod 600"):
        read_key(tmp_path)
    assert not key.public


def test_what_is_packed_is_found_again():
    tree = {"a": np.float32(2), "b": [np.zeros((0, 2), np.int32), np.ones(2, np.float32)]}
    header, arrays = unpack(pack({"round": 3}, params=tree))
    assert header == {"round": 3}
    assert tree_of(arrays, "params", tree)["b"][1].tolist() == [1, 1]
    assert pack({"round": 3}, params=tree) == pack({"round": 3}, params=tree)


@pytest.mark.parametrize("isrl", [False, True])
def test_a_silo_reads_as_much_as_its_study_needs(tmp_path, isrl):
    """It knows that before any plan, so that who poses as its server fills no memory."""
    silo = SiloClient(make_silos(tmp_path, study(ISRL) if isrl else study(), POLICY)["bern"])
    others = {**silo.held.facts, "num_records": 20}
    rows = [{"name": name, **(silo.held.facts if name == "bern" else others)}
            for name in ("aarau", "bern", "chur")]  # fmt: skip
    plan = StudyPlan("run-1", study_of(config_of(tmp_path)), rows, [8.0] * 3)
    like = silo.held.work(plan, 1, read_key(silo.folder).child("run")).like
    wide = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float64), like)
    assert len(pack({"kind": "round", "run": "r" * 300}, params=wide)) < silo.largest_request
    assert silo.largest_request < 2 << 20
    assert sum(leaf.size for leaf in jax.tree.leaves(like)) <= silo.held.num_params
