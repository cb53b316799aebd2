"""Mechanisms named in configurations: found where they are defined, and one of each name."""

import dataclasses
import json

import pytest

from dpfl_jax.config.kinds import CENTRAL, SILOS, Kinds
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import Independent, els, non_private, uls


def test_the_library_registers_its_own():
    assert set(CENTRAL.names()) >= {"els", "uls", "none"}
    assert set(SILOS.names()) >= {
        *("fed_avg", "local_item", "local_group", "hi_grad_avg", "user_ldp", "subject_uls", "rpdp")
    }


@pytest.mark.parametrize(
    "made",
    [
        uls(group_size=3, cohort_size=2.5, clip_norm=0.25, clipping="normalized"),
        els(group_size=3, batch_size=8, sampling_prob=0.5),
        non_private(batch_size=8),
    ],
)
def test_a_section_is_the_object(made):
    section = CENTRAL.dump(made)
    assert CENTRAL.parse(section) == made
    assert CENTRAL.parse(made) is made


def test_equal_values_have_one_section():
    """What a run draws follows from it: 20 and 20.0 are two texts."""
    whole = uls(group_size=1, cohort_size=20, sampling_prob=1, clip_norm=1)
    parts = uls(group_size=1, cohort_size=20.0, sampling_prob=1.0, clip_norm=1.0)
    assert whole == parts
    assert json.dumps(whole.to_section()) == json.dumps(parts.to_section())


def test_derived_fields_are_no_keys():
    assert "rates" not in SILOS.dump(SILOS.parse({"kind": "rpdp"}))
    with pytest.raises(BadInputError, match="unknown key 'mechanism"):
        SILOS.parse({"kind": "rpdp", "rates": [0.5]})


def test_a_kind_of_a_module_of_ones_own():
    place = "dpfl_jax.mechanisms.presets"
    section = {"kind": f"{place}:uls", "group_size": 1, "cohort_size": 4}
    assert CENTRAL.parse(section) == uls(group_size=1, cohort_size=4)
    with pytest.raises(BadInputError, match=r"presets:vls', which is not a mechanism, or"):
        CENTRAL.parse(section | {"kind": f"{place}:vls"})
    with pytest.raises(BadInputError, match="did you mean 'uls'"):
        CENTRAL.parse(section | {"kind": "ulss"})


def test_a_class_is_run_under_its_own_name():
    """Else another algorithm could run, and go on, as its parent."""
    with pytest.raises(BadInputError, match=r"Louder does not define `kind`"):

        class Louder(Independent):
            pass

    for kind in ("dpfl_jax.errors:BadInputError", ["uls"], 3, "tests.conftest_absent:X"):
        with pytest.raises(BadInputError, match=r"mechanism\.kind is"):
            CENTRAL.parse({"kind": kind, "group_size": 1, "cohort_size": 4})


def test_a_name_is_given_once():
    kinds = Kinds("dpfl_jax.mechanisms")
    one, two = (
        dataclasses.make_dataclass(name, [], namespace={"kind": "same"}) for name in ("One", "Two")
    )
    kinds.register(one)
    kinds.register(one)
    with pytest.raises(BadInputError, match=r"has the kind 'same' of .*One: give it another"):
        kinds.register(two)
