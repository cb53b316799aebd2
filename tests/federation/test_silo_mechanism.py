"""A silo's mechanism as a value: presets and their parts, and what is refused."""

import dataclasses

import numpy as np
import pytest

from dpfl_jax.audit import audit
from dpfl_jax.audit.attacks import simulate
from dpfl_jax.clipping import Adaptive, Automatic, Flat, NoClip, Normalized, PerLayer
from dpfl_jax.config.kinds import SILOS
from dpfl_jax.config.load import validate_config
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation import federated_epsilon
from dpfl_jax.federation.federated_run import knobs, with_calibrated_noise
from dpfl_jax.federation.federation import Federation, SiloPlan
from dpfl_jax.federation.mechanisms import (
    SiloMechanism,
    fed_avg,
    hi_grad_avg,
    local_group,
    local_item,
    rpdp,
    subject_uls,
    user_ldp,
)
from dpfl_jax.federation.participation import (
    PersonalRecords,
    Records,
    SiloFacts,
    Subjects,
    WholeBatch,
)
from dpfl_jax.mechanisms import Banded, Independent, NoNoise
from dpfl_jax.randomness import RootKey

FACTS = SiloFacts(100, 40)
DRAWN = {"batch_size": 20, "max_records_per_subject": 4}
EVERY = {
    "fed_avg": (fed_avg(**DRAWN), Records(**DRAWN)),
    "local_item": (local_item(**DRAWN), Records(**DRAWN, protected="record")),
    "local_group": (local_group(**DRAWN, batch_cap=2), Records(**DRAWN, batch_cap=2)),
    "hi_grad_avg": (
        hi_grad_avg(**DRAWN, average="average_then_clip"),
        Records(**DRAWN, average="average_then_clip"),
    ),
    "user_ldp": (user_ldp(**DRAWN), WholeBatch(**DRAWN)),
    "subject_uls": (subject_uls(**DRAWN, group_size=3), Subjects(**DRAWN, group_size=3)),
    "rpdp": (rpdp(expected_batch=20.0), PersonalRecords(expected_batch=20.0)),
}


def planned(mechanism, sigma):
    return SiloPlan(mechanism, FACTS, 1, noise_multiplier=sigma)


@pytest.mark.parametrize("kind", EVERY)
def test_a_preset_and_its_parts_are_one_value(kind):
    preset, participation = EVERY[kind]
    assert (preset.participation, preset.kind) == (participation, kind)
    assert SILOS.parse(preset.to_section()) == preset
    parts = {"participation": SILOS.dump(participation), "clip": SILOS.dump(preset.clip)}
    assert SILOS.parse(parts | {"noise": SILOS.dump(preset.noise)}) == preset


def test_other_combinations_are_said_by_their_parts():
    made = SiloMechanism(
        participation=Records(**DRAWN, average="clip_then_average"),
        clip=Normalized(0.5),
        noise=Independent(arithmetic="float"),
    )
    assert made.kind == "custom"
    assert made.to_section()["clip"] == {"kind": "normalized", "clip_norm": 0.5}
    assert SILOS.parse(made.to_section()) == made
    # Noise is scaled to what a unit may add, and costs what it costs under the flat rule.
    assert planned(made, 3.0).noise_stddev == 3.0
    flat = hi_grad_avg(**DRAWN, clip_norm=0.5)
    assert planned(flat, 3.0).noise_stddev == 1.5
    assert planned(made, 3.0).event(10) == planned(flat, 3.0).event(10)


def test_silos_differ_in_numbers_alone():
    def together(*mechanisms):
        return Federation(tuple(planned(m, 2.0 + i) for i, m in enumerate(mechanisms)), 2, 1)

    some = local_group(**DRAWN, clip_norm=0.5)
    found = together(some, local_group(sampling_prob=0.1))
    assert 0 < federated_epsilon(found, 1e-5) < np.inf
    changed = dataclasses.replace(some, clip=PerLayer(0.5))
    for other in (changed, local_group(**DRAWN, batch_cap=1), hi_grad_avg(**DRAWN)):
        with pytest.raises(BadInputError, match="silos have different mechanisms"):
            together(some, other)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"clip": NoClip()}, "noise hides only what is bounded"),
        ({"clip": Adaptive()}, "silos need a constant clip norm"),
        ({"noise": Banded(bands=2)}, "support only independent noise"),
        ({"noise": Flat(1.0)}, "noise is Flat"),
        ({"participation": NoNoise()}, "must be one of .*whole_batch"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(parts, words):
    with pytest.raises(BadInputError, match=words):
        SiloMechanism(**{"participation": Records(**DRAWN)} | parts)


def test_noise_of_a_silo_that_is_none_is_refused():
    made = hi_grad_avg(**DRAWN)
    with pytest.raises(BadInputError, match="noise_multiplier is -1"):
        planned(made, -1.0)
    with pytest.raises(BadInputError, match="no noise multiplier"):
        planned(made, None).event(1)


@pytest.mark.parametrize(
    "fields",
    [
        {"protected": "record", "batch_cap": 2},
        {"protected": "record", "average": "clip_then_average"},
        {"batch_cap": 2, "average": "average_then_clip"},
    ],
)
def test_draws_of_which_nothing_is_proven_are_refused(fields):
    """A record's place, or its weight, would depend on others of its subject."""
    with pytest.raises(BadInputError, match="nothing is proven"):
        Records(**DRAWN, **fields)


def test_rules_without_a_clip_norm_are_the_same_in_all_silos():
    made = SiloMechanism(participation=Records(**DRAWN), clip=Automatic())
    assert (made.rule(7.0), made.clip_norm) == (Automatic(), 1.0)
    assert planned(made, 2.0).noise_stddev == 2.0


def test_what_may_be_changed_is_named_where_it_stands():
    sections = {
        "federation": {"silos": 2, "rounds": 5, "local_steps": 1},
        "privacy": {"epsilon": 1.0, "delta": 1e-4},
    }
    drawn = {"sampling_prob": 0.1, "max_records_per_subject": 4}
    for mechanism, names in (
        ({"kind": "local_group", **drawn}, {"mechanism.sampling_prob", "mechanism.kind"}),
        (
            {
                "participation": {"kind": "records", **drawn},
                "clip": {"kind": "per_layer", "clip_norm": 2.0},
            },
            {"mechanism.participation.sampling_prob", "mechanism.participation.kind"},
        ),
    ):
        config = validate_config(sections | {"mechanism": mechanism}, "here")
        found = dict(knobs(config, [FACTS] * 2))
        assert names < found.keys()
        ((kind, changed),) = found[max(n for n in names if n.endswith("kind"))]
        assert kind in ("subject_uls", "subjects")
        federation, _ = with_calibrated_noise(changed(), [FACTS] * 2)
        assert 0 < federation.balance(10).ratio < np.inf


@pytest.mark.slow
@pytest.mark.parametrize("clip", [Normalized(0.5), PerLayer(2.0)])
def test_an_audit_holds_what_is_claimed_of_any_clip_rule_and_refutes_less(clip):
    made = SiloMechanism(
        participation=Records(sampling_prob=0.5, max_records_per_subject=2),
        clip=clip,
    )
    plan, key = SiloPlan(made, FACTS, 2, 1.0, 1.0), RootKey.from_seed(0)
    trials = simulate.silos([plan], 2, 1e-3, key, trials=2000)
    assert not audit(trials, 0.999).exceeds
    louder = dataclasses.replace(plan, noise_multiplier=2.0).event(2)
    assert audit(dataclasses.replace(trials, event=louder), 0.999).exceeds
