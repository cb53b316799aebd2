"""Silos in processes of their own train what the simulation trains, to the last bit; what crosses
the wire is their noised messages and nothing else."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from dpfl_jax.federation.engine import Released
from dpfl_jax.flower import run_study
from dpfl_jax.flower.isrl import IsrlSiloRun
from dpfl_jax.flower.wire import pack, tree_of, unpack
from dpfl_jax.task import Task
from tests.flower.studies import (
    ISRL,
    NAMES,
    POLICY,
    QUIET,
    Here,
    bits,
    config_of,
    drawn,
    make_silos,
    opened,
    simulated,
    simulated_messages,
    study,
)  # fmt: skip
from tests.runs import final_state

RPDP = {
    "mechanism": {"kind": "rpdp", "clip_norm": 1.0},
    "privacy": {
        "epsilon": 10.0, "delta": 1e-3, "unreachable": "exclude",
        "budgets": {"levels": [0.5, 2.0, 6.0]},
    },
    "data": {"user_column": None, "input_columns": ["age", "dose"]},
    "federation": {"participation_prob": 0.7, "local_steps": 3, "rounds": 5},
}  # fmt: skip
KINDS = {
    "hi_grad_avg": {},
    "local_group": {
        "mechanism": {"kind": "local_group", "batch_size": 8, "max_records_per_subject": 2},
        "federation": {"weights": [1.0, 2.0, 0.7], "max_silos_per_subject": 2},
    },
    "user_ldp": {
        "mechanism": {"kind": "user_ldp", "sampling_prob": 0.3, "max_records_per_subject": 3},
        "execution": {"microbatch_size": 2},
    },
    "subject_uls": {
        "mechanism": {"kind": "subject_uls", "batch_size": 6, "group_size": 2},
        "federation": {
            "local_state": "keep", "server_optimizer": {"name": "adam", "learning_rate": 0.1},
            "local_optimizer": {"name": "sgd", "learning_rate": 0.5, "options": {"momentum": 0.9}},
        },
        "execution": {"microbatch_size": 1},  # of a unit one record after the other
    },
    "local_item": {"mechanism": {"kind": "local_item", "batch_size": 8}},
    "rpdp": RPDP,
}  # fmt: skip


ROUND = {"kind", "run", "plan", "silo", "round"}
SAID = {
    "hello": {"kind", "name", "facts", "task", "token"},
    "accepted": {"kind", "silo", "plan"},
    "message": ROUND,
    "absent": ROUND,
    "done": {"kind", "silo"},
}


def only_noised_messages_crossed(seen, silos):
    """Every reply, byte for byte: public words, and the arrays of one release."""
    kinds = set()
    for name, request, reply in seen:
        asked, _ = unpack(request)
        header, arrays = unpack(reply)
        assert set(header) == SAID[header["kind"]]
        kinds.add(header["kind"])
        assert header.get("silo", name) == header.get("name", name) == name
        digests = {run.plan.digest for run in silos[name].runs.values()}
        for word in set(header) & {"run", "plan", "round"}:
            assert header[word] == asked[word] or (word == "plan" and header[word] in digests)
        released = {}
        if header["kind"] == "hello":
            assert header["facts"] == silos[name].held.facts
            assert set(header["facts"]) <= {"num_records", "num_subjects"}
            logged = json.loads(json.dumps(silos[name].log.find("hello")["told"]))
            assert logged | {"kind": "hello"} == header
            assert Task.from_json(header["task"]) == silos[name].held.task
        if header["kind"] == "message":
            work = silos[name].runs[header["run"]].work
            if isinstance(work, IsrlSiloRun):
                sent = tree_of(arrays, "released", work.like)
            else:
                floats = jax.tree.map(lambda p: np.zeros(p.shape, np.float32), work.like)
                like = Released(floats, np.float32(0), np.int32(0), np.int32(0))
                sent = tree_of(arrays, "released", like)
                public = silos[name].held.config.federation.weights
                weight = 1 if public is None else public[work.index]
                assert (sent.weight, sent.silos, sent.dropped) == (weight, 1, 0)
            released = {"released": sent}
        assert reply == pack(header, **released)
    assert {"hello", "accepted", "message", "done"} <= kinds


def every_number_is_noised(silo):
    """One step's message from the same key, parameters and records, with the noise and with twice
    as much: no number of it stays (false alarms: the same float twice, about 1e-6 a number)."""
    run = next(iter(silo.runs.values()))
    number = silo.log.all("answered", run=run.plan.run, sent=True)[0]["round"]
    key, held = drawn(silo)[number], silo.held
    more = [2 * sigma for sigma in run.plan.noise]
    if isinstance(run.work, IsrlSiloRun):
        # Sample and noise are drawn anew where anything differs: only all records are the same.
        every = dataclasses.replace(held.config.mechanism, sampling="full", batch_fraction=None)
        held.config = held.config.model_copy(update={"mechanism": every})
        loud = dataclasses.replace(run.plan, noise=more)
        works = [held.work(plan, run.work.index, run.work.key) for plan in (run.plan, loud)]
    else:
        one = held.config.federation.model_copy(update={"local_steps": 1})
        held.config = held.config.model_copy(update={"federation": one})
        works = [held.work(run.plan, run.work.index, run.work.key) for _ in range(2)]
        builder = works[1].steps.builder
        louder = builder.federation.with_noise(more)
        works[1].steps.builder = dataclasses.replace(builder, federation=louder)
    sent = []
    for work in works:
        params = jax.tree.map(lambda x: np.full(x.shape, 0.1, x.dtype), work.like)
        found, _ = work.message(number, key, params, work.start(), 0)
        sent.append(jax.tree.leaves(getattr(found, "update", found)))
    for once, twice in zip(*sent, strict=True):
        assert (once != twice).all()


@pytest.mark.nightly
@pytest.mark.slow("rpdp")
@pytest.mark.parametrize("kind", KINDS)
def test_a_study_equals_the_simulation_to_the_last_bit(tmp_path, kind):
    raw = study(**KINDS[kind])
    unit = "record" if kind == "rpdp" else "subject"
    policy = {**POLICY, "mechanisms": [kind], "epsilon": 30.0, "unit": unit}
    folders = make_silos(tmp_path, raw, policy)
    silos = opened(folders)
    wire = Here(silos)
    report = run_study(config_of(tmp_path), tmp_path / "server", wire, QUIET)
    assert report["status"] == "finished"
    only_noised_messages_crossed(wire.seen, silos)
    noise = next(iter(silos[NAMES[0]].runs.values())).plan.noise
    there = final_state(tmp_path / "server")["params"]
    assert bits(there) == bits(simulated(tmp_path, silos, noise))
    sent = [row for silo in silos.values() for row in silo.log.rows if row.get("sent")]
    assert len(sent) > len(silos)  # and they were trained
    every_number_is_noised(silos["bern"])


MESSAGES = {
    "minibatch_sgd": {},
    "accelerated": {"mechanism": {"kind": "accelerated"}},
    "multi_stage": {
        "mechanism": {"kind": "multi_stage"},
        "model": {"regularization": 0.5},
    },
    "one_pass": {
        "mechanism": {"sampling": "disjoint", "batch_fraction": 0.2},
        "federation": {"rounds": 5},
        "execution": {"rounds_per_block": 5},
    },
    "weighted": {
        "mechanism": {"sampling": "full", "most_rounds": 4},
        "federation": {"weights": [0.2, 0.5, 0.3]},
    },
}


@pytest.mark.nightly
@pytest.mark.slow("one_pass")
@pytest.mark.parametrize("kind", MESSAGES)
def test_messages_equal_the_simulation_to_the_last_bit(tmp_path, kind):
    raw = study(ISRL, **MESSAGES[kind])
    policy = {**POLICY, "unit": "record", "mechanisms": [raw["mechanism"]["kind"]]}
    silos = opened(make_silos(tmp_path, raw, policy))
    wire = Here(silos)
    report = run_study(config_of(tmp_path), tmp_path / "server", wire, QUIET)
    assert report["status"] == "finished"
    only_noised_messages_crossed(wire.seen, silos)
    there = final_state(tmp_path / "server")["params"]
    assert bits(there) == bits(simulated_messages(tmp_path, silos))
    assert abs(there).max() > 0
    every_number_is_noised(silos["bern"])
