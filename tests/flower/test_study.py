"""Silos in processes of their own train what the simulation trains, to the last bit."""

import pytest

from dpfl_jax.flower import run_study
from tests.flower.studies import (
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
        "mechanism": {"kind": "local_group", "batch_size": 8, "max_items_per_subject": 2},
        "federation": {"weights": [1.0, 2.0, 0.7], "max_silos_per_subject": 2},
    },
    "user_ldp": {
        "mechanism": {"kind": "user_ldp", "sampling_prob": 0.3, "max_items_per_subject": 3},
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


def in_ci(kinds, *chosen):
    """All kinds; those that protect most are run by CI, too."""
    return [pytest.param(k, marks=[pytest.mark.privacy] * (k in chosen)) for k in kinds]


@pytest.mark.slow
@pytest.mark.parametrize("kind", in_ci(KINDS, "subject_uls", "rpdp"))
def test_a_study_equals_the_simulation_to_the_last_bit(tmp_path, kind):
    raw = study(**KINDS[kind])
    unit = "record" if kind == "rpdp" else "subject"
    policy = {**POLICY, "mechanisms": [kind], "epsilon": 30.0, "unit": unit}
    folders = make_silos(tmp_path, raw, policy)
    silos = opened(folders)
    report = run_study(config_of(tmp_path), tmp_path / "server", Here(silos), QUIET)
    assert report["status"] == "finished"
    noise = next(iter(silos[NAMES[0]]._runs.values())).plan.noise
    there = final_state(tmp_path / "server")["params"]
    assert bits(there) == bits(simulated(tmp_path, silos, noise))
    sent = [row for silo in silos.values() for row in silo.log.rows if row.get("sent")]
    assert len(sent) > len(silos)  # and they were trained


MESSAGES = {
    "minibatch_sgd": {},
    "accelerated": {"isrl": {"algorithm": "accelerated", "step_size": None}},
    "multi_stage": {
        "isrl": {"algorithm": "multi_stage", "step_size": None},
        "model": {"regularization": 0.5},
    },
    "one_pass": {
        "isrl": {"sampling": "disjoint", "batch_fraction": 0.2, "rounds": 5},
        "execution": {"rounds_per_block": 5},
    },
    "weighted": {"isrl": {"silo_weights": [0.2, 0.5, 0.3], "sampling": "full", "most_rounds": 4}},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", in_ci(MESSAGES, "one_pass"))
def test_messages_equal_the_simulation_to_the_last_bit(tmp_path, kind):
    raw = study(ISRL, **MESSAGES[kind])
    policy = {**POLICY, "unit": "record", "mechanisms": [f"isrl/{raw['isrl']['algorithm']}"]}
    silos = opened(make_silos(tmp_path, raw, policy))
    report = run_study(config_of(tmp_path), tmp_path / "server", Here(silos), QUIET)
    assert report["status"] == "finished"
    there = final_state(tmp_path / "server")["params"]
    assert bits(there) == bits(simulated_messages(tmp_path, silos))
    assert abs(there).max() > 0
