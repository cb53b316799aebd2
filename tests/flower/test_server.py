"""What a server finds out before the first round, and how it goes on without a silo or itself."""

import os
import signal

import pytest

from dpfl_jax.config import config_to_dict, validate_config
from dpfl_jax.errors import BadInputError, StoppedError
from dpfl_jax.flower import run_study
from dpfl_jax.flower.server import prepare
from dpfl_jax.flower.silo import SiloClient
from dpfl_jax.flower.study import study_of
from dpfl_jax.flower.wire import pack, unpack
from dpfl_jax.run import driver, pipeline
from tests.flower.studies import (
    FEDERATED,
    ISRL,
    NAMES,
    POLICY,
    QUIET,
    Here,
    bits,
    config_of,
    make_silos,
    opened,
    simulated,
    study,
)  # fmt: skip
from tests.runs import DiedError, death_after_a_checkpoint, final_state


def test_a_server_with_another_study_is_refused(tmp_path):
    silos = opened(make_silos(tmp_path, study()))
    other = validate_config(study(federation={"rounds": 5}))
    with pytest.raises(BadInputError, match=r"aarau refuses: .*federation.rounds is not the same"):
        prepare(other, Here(silos), QUIET)


def test_a_server_has_no_ledger_and_says_who_has(tmp_path):
    """It holds nobody's records: a ledger of its own would never be charged."""
    charged = study(privacy={"ledger": str(tmp_path / "spent.jsonl"), "account": "people"})
    with pytest.raises(
        BadInputError, match=r"privacy.ledger is set, but a server holds no records"
    ):
        prepare(validate_config(charged), None, QUIET)
    silos = opened(make_silos(tmp_path, study()))
    run = prepare(config_of(tmp_path), Here(silos), QUIET)
    guarantee = run.about(run.guarantee(1))
    assert "each silo charged this one to a ledger of its own" in guarantee.caveats[-1]
    assert "what each silo's own data.user_column names" in guarantee.summary()
    found = dict(entry.split(": ", 1) for entry in guarantee.public_inputs)
    assert found["input columns"] == "those of the silos"
    assert found["counts"] == "3 silos, and the sizes of each"


@pytest.mark.parametrize("change", ["a column more", "another order"])
def test_a_table_that_is_not_like_the_others_is_found_before_the_first_round(change, tmp_path):
    folders = make_silos(tmp_path, study())
    table = tmp_path / "bern.csv"
    rows = [line.split(",") for line in table.read_text().splitlines()]
    more = [[*row[:3], "height" if not i else "1.8", *row[3:]] for i, row in enumerate(rows)]
    more = [row[::-1] for row in rows] if change == "another order" else more
    table.write_text("\n".join(",".join(row) for row in more))
    with pytest.raises(BadInputError, match="the tables of aarau and bern differ"):
        prepare(config_of(tmp_path), Here(opened(folders)), QUIET)


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": None},
        {"facts": {"num_records": 1.5, "num_subjects": 1}},
        {"facts": {"num_records": 2**40, "num_subjects": 1}},
        {"facts": {"num_records": 9, "num_subjects": 3, "name": "bern"}},
        {"task": {}},
        {"task": {"kind": "classes", "input_shape": 3}},
    ],
)
def test_a_silo_that_tells_rubbish_is_named(tmp_path, changes):
    class Rubbish(Here):
        def hello(self, request, count, most_s=None):
            replies = super().hello(request, count)
            header, _ = unpack(replies["chur"])
            return {**replies, "chur": pack({**header, **changes})}

    silos = opened(make_silos(tmp_path, study()))
    with pytest.raises(BadInputError, match="silo chur sent no sizes and task"):
        prepare(config_of(tmp_path), Rubbish(silos), QUIET)


def test_a_silo_that_is_missing_or_refuses_stops_the_run_before_it_begins(tmp_path):
    folders = make_silos(tmp_path, study(), {**POLICY, "most_rounds": 3})
    silos = opened(folders)
    with pytest.raises(BadInputError, match="aarau refuses: the plan has 4 rounds, but policy"):
        run_study(config_of(tmp_path), tmp_path / "server", Here(silos), QUIET)
    with pytest.raises(BadInputError, match="3 silos are expected, but there are"):
        prepare(config_of(tmp_path), Here({**silos, "chur": None}), QUIET)
    assert not any(row["kind"] == "asked" for silo in silos.values() for row in silo.log.rows)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (study(seed=1), "seed is set"),
        (study(federation={"partition": "uniform"}), "set it to natural"),
        (study() | {"model": {"module": "a:b"}}, "model.module is code"),
        (study(federation={"silos_per_round": 2}), "federation.participation_prob"),
        (study(federation={"max_silos_per_subject": None}), "number of silos in which a person"),
        (study(privacy={"delta": None}), "privacy.delta is not set"),
        (study(mechanism={"kind": "rpdp"}), "would reveal to the server its people's least budget"),
        (study(mechanism={"kind": "fed_avg", "batch_size": 4}), "as configured has no guarantee"),
        (study(ISRL, data={"scale": {}}), "data.scale is not set"),
        (study(ISRL, federation={"silos_per_round": 2}), "federation.silos_per_round is set"),
        (study(ISRL, privacy={"epsilon": None}), "privacy.epsilon is null"),
    ],
)
def test_a_study_that_silos_elsewhere_cannot_run_says_why(raw, said):
    with pytest.raises(BadInputError, match=said):
        study_of(validate_config(raw))


def test_the_study_leaves_out_what_is_a_party_s_own(tmp_path):
    mine = study_of(validate_config(study(data={"path": "a.csv"}, name="one")))
    theirs = study_of(validate_config(study(data={"path": "b.csv"}, name="two")))
    assert mine == theirs
    assert mine["data"]["scale"] == {k: list(map(float, v))
                                     for k, v in FEDERATED["data"]["scale"].items()}  # fmt: skip


class Unreliable(Here):
    """Silos that do not answer in some rounds: name -> those rounds."""

    def __init__(self, silos, lost):
        super().__init__(silos)
        self.lost = lost

    def ask(self, requests, most_s=None):
        kept = {}
        for name, request in requests.items():
            if unpack(request)[0].get("round") not in self.lost.get(name, ()):
                kept[name] = request
        return super().ask(kept)


def test_a_stranger_ends_no_run_that_goes_on(tmp_path):
    class Strange(Here):
        def hello(self, request, count, most_s=None):
            found = super().hello(request, count)
            return found | {"basel": pack({"kind": "hello", "name": "basel", "facts": None})}

    silos = opened(make_silos(tmp_path, study()))
    known = prepare(config_of(tmp_path), Here(silos), QUIET).rows
    assert prepare(config_of(tmp_path), Strange(silos), QUIET, known).rows == known


@pytest.mark.slow
def test_killed_server_and_silos_go_on_and_equal_the_simulation(tmp_path, monkeypatch):
    keep = {"name": "sgd", "learning_rate": 0.5, "options": {"momentum": 0.9}}
    raw = study(federation={"local_state": "keep", "local_optimizer": keep})
    folders = make_silos(tmp_path, raw)
    silos = opened(folders)
    with death_after_a_checkpoint(monkeypatch):
        run_study(config_of(tmp_path), tmp_path / "server", Here(silos), QUIET)
    # Round 1 is answered, but the server dies before it can use that: it is asked for again.
    lost = Unreliable(silos, dict.fromkeys(NAMES, (2,)))
    with pytest.raises(StoppedError, match="no silo answered round 2"):
        run_study(config_of(tmp_path), tmp_path / "server", lost, QUIET)
    for silo in silos.values():
        silo.close()
    silos = {name: SiloClient(folder) for name, folder in folders.items()}
    transport = Here(silos)
    report = run_study(config_of(tmp_path), tmp_path / "server", transport, QUIET)
    assert report["status"] == "finished"
    for silo in silos.values():
        asked = [row["round"] for row in silo.log.rows if row["kind"] == "asked"]
        assert asked == [0, 1, 2, 3]
        assert len([row for row in silo.log.rows if row["kind"] == "accepted"]) == 1
    plan = next(iter(silos["bern"].runs.values())).plan
    there = final_state(tmp_path / "server")["params"]
    assert bits(there) == bits(simulated(tmp_path, silos, plan.noise))
    # What crossed: the header, and the arrays of a release, for each silo and round.
    sent = [reply for _, _, reply in transport.seen if unpack(reply)[0]["kind"] == "message"]
    assert sent
    for reply in sent:
        header, arrays = unpack(reply)
        assert set(header) == {"kind", "run", "round", "silo", "plan"}
        numbers = sum(array.size for array in arrays.values())
        assert numbers == report["model"]["parameters"] + 3  # weight, silos, dropped
        assert len(reply) < 4 * numbers + 2000


@pytest.mark.slow
def test_a_server_that_was_killed_accounts_for_all_that_silos_answered(tmp_path, monkeypatch):
    """Also if it begins again from an earlier checkpoint, and is stopped there."""

    class Ends(Here):
        def __init__(self, silos, number, end):
            super().__init__(silos)
            self.number, self.end = number, end

        def ask(self, requests, most_s=None):
            replies = super().ask(requests)
            if any(unpack(request)[0].get("round") == self.number for request in requests.values()):
                self.end()
            return replies

    def dies():
        raise DiedError

    monkeypatch.setattr(driver, "NOTED_EVERY_S", 0.0)
    silos = opened(make_silos(tmp_path, study(train={"checkpoint_every": 4})))
    config, place = config_of(tmp_path), tmp_path / "server"
    with pytest.raises(DiedError):
        run_study(config, place, Ends(silos, 2, dies), QUIET)
    stopped = Ends(silos, 0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    report = run_study(config, place, stopped, QUIET)
    assert (report["steps"], report["privacy"]["steps"]) == (1, 3 * 2)  # of two local steps each


@pytest.mark.nightly
def test_a_silo_that_is_gone_is_left_out(tmp_path):
    silos = opened(make_silos(tmp_path, study()))
    lost = Unreliable(silos, {"chur": (1, 2)})
    report = run_study(config_of(tmp_path), tmp_path / "server", lost, QUIET)
    assert report["status"] == "finished"
    answered = [row["round"] for row in silos["chur"].log.rows if row["kind"] == "answered"]
    assert answered == [0, 3]
    assert silos["chur"].log.find("finished")["rounds"] == 2


@pytest.mark.nightly
def test_a_server_goes_on_although_a_silo_is_gone_for_good(tmp_path, monkeypatch):
    silos = opened(make_silos(tmp_path, study()))
    with death_after_a_checkpoint(monkeypatch):
        run_study(config_of(tmp_path), tmp_path / "server", Here(silos), QUIET)
    left = Here({**silos, "bern": None})
    report = run_study(config_of(tmp_path), tmp_path / "server", left, QUIET)
    assert report["status"] == "finished"
    assert len(report["silos"]) == 3
    with pytest.raises(BadInputError, match="finished and is not overwritten"):
        run_study(config_of(tmp_path), tmp_path / "server", left, QUIET)


@pytest.mark.parametrize("isrl", [False, True])
def test_a_server_says_what_the_simulation_says_of_noise_and_signal(tmp_path, isrl):
    raw = study(ISRL) if isrl else study(model={"kind": "logistic", "options": {}})
    silos = opened(make_silos(tmp_path, raw))
    told = prepare(config_of(tmp_path), Here(silos), QUIET).advice()
    raw = config_to_dict(config_of(tmp_path))
    raw["data"]["path"] = str(tmp_path / "all.csv")
    expected = pipeline.prepare(validate_config(raw), QUIET).advice()
    assert "noise over signal (the largest possible update)" in expected[0]
    assert told == expected
