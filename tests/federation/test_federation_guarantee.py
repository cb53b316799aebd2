"""What a federated run's guarantee says: numbers with their units, and what it rests on."""

import dataclasses
import io

import pytest
from fed_zoo import MECHANISMS, make_data, make_federation
from rich.console import Console

from dpfl_jax.accounting import IDEALISED
from dpfl_jax.accounting.guarantee import rounded_up
from dpfl_jax.config import RunConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.accountant import subject_epsilon
from dpfl_jax.federation.federated_run import prepare
from dpfl_jax.federation.guarantee import federated_guarantee
from dpfl_jax.run.pipeline import dry_run


def test_every_guarantee_says_what_is_idealised():
    data = make_data()
    for kind in ("hi_grad_avg", "local_item"):
        federation = make_federation(data, MECHANISMS[kind], uneven=False)
        guarantee = federated_guarantee(federation, 1e-5, 2)
        assert guarantee.assumptions.count(IDEALISED) == 1


@pytest.mark.parametrize(("kind", "given"), [("hi_grad_avg", 30), ("hi_grad_avg", None),
                                             ("local_item", 30)])  # fmt: skip
def test_a_large_delta_is_named(kind, given):
    data = make_data()
    federation = make_federation(data, MECHANISMS[kind], uneven=False)
    fewest = max(silo.num_subjects for silo in data.silos)  # more than all silos' over H
    what = f"{data.num_records} records" if kind == "local_item" else f"{given or fewest} subjects"
    for delta, said in ((0.5, True), (1e-3, False)):
        guarantee = federated_guarantee(federation, delta, 2, num_subjects=given)
        assert any(f"not below one over the {what}" in c for c in guarantee.caveats) is said


def test_silos_of_a_subject_are_counted_wherever_its_epsilon_is_stated():
    """Records are protected, but what a subject in five silos has is stated, too."""
    data = make_data(records=600, how="uniform")
    assert data.silos_of_subjects().max() == 5
    for kind in ("hi_grad_avg", "local_item"):
        federation = make_federation(data, MECHANISMS[kind], uneven=False)
        federation.check(data)
        with pytest.raises(BadInputError, match="in 5 silos, but max_silos_per_subject is 4"):
            dataclasses.replace(federation, max_silos_per_subject=4).check(data)


def test_where_records_are_protected_a_subject_is_told_what_it_has():
    federation = make_federation(make_data(), MECHANISMS["local_item"], uneven=False)
    guarantee = federated_guarantee(federation, 1e-5, 2)
    whole = subject_epsilon(federation, 1e-5, 2)
    assert whole > 2 * guarantee.epsilon
    assert any(f"has epsilon {rounded_up(whole, 4)}" in caveat for caveat in guarantee.caveats)


RPDP_MECHANISM = {"kind": "rpdp"}


def make_config(**sections):
    base = {
        "data": {"source": "digits", "records_per_user": 15},
        "federation": {"silos": 6, "rounds": 2, "local_steps": 2},
        "model": {"kind": "mlp", "options": {"hidden": [4]}},
        "mechanism": {"kind": "hi_grad_avg", "sampling_prob": 0.2, "max_records_per_subject": 3},
        "privacy": {"noise_multiplier": 2.0, "delta": 1e-4},
    }
    if sections.get("mechanism", {}).get("kind") == "rpdp":
        base["mechanism"] = {}
    return RunConfig.model_validate(
        {name: section | sections.get(name, {}) for name, section in base.items()}
    )


def test_personal_budgets_drop_no_record_that_nobody_allowed_to_be():
    """A user's second record was left out with a warning; now the run says what would allow it."""
    pytest.importorskip("sklearn")
    sections = {"federation": {"partition": "confined"}, "mechanism": RPDP_MECHANISM}
    with pytest.raises(BadInputError, match=r"user_column=null .*, or data\.max_examples_per_user"):
        prepare(make_config(**sections), Console(quiet=True))
    for data in ({"max_examples_per_user": 1}, {"records_per_user": None}):
        found = prepare(make_config(**sections, data=data), Console(quiet=True))
        assert found.data.num_records == found.subjects.train.num_examples


@pytest.mark.parametrize(
    ("federation", "mechanism", "warned"),
    [
        ({"partition": "confined"}, {}, "raise it, or spread subjects"),
        ({}, {"max_records_per_subject": 4}, None),
    ],
)  # fmt: skip
def test_what_a_cap_leaves_out_is_counted_and_warned_of(federation, mechanism, warned):
    pytest.importorskip("sklearn")
    config, output = make_config(federation=federation, mechanism=mechanism), io.StringIO()
    price = dry_run(config, Console(file=output, width=200))
    told, prepared = price["population"], prepare(config, Console(quiet=True))
    before, after = prepared.subjects.train.num_examples, prepared.data.num_records
    assert (told["records_before_cap"], told["records"]) == (before, after)
    assert told["dropped_by_cap"] == before - after > 0
    assert ("warning" in told) is (warned is not None) is (before - after > 0.2 * before)
    if warned is not None:
        assert f"leaves out {before - after} of {before} records" in told["warning"]
        assert warned in told["warning"]
        assert "warning:" in output.getvalue()
        # Where records lie as they do, nobody can spread them.
        natural = prepared.config.federation.model_copy(update={"partition": "natural"})
        there = config.model_copy(update={"federation": natural})
        said = dataclasses.replace(prepared, config=there).kept["warning"]
        assert "over more silos" not in said
    assert any("before and after the cap" in a for a in price["privacy"]["assumptions"])
