"""The library's own releases under attack: sound ones stand, planted bugs are seen."""

import numpy as np
import pytest

from benchmarks import audit as bench
from dpfl_jax.audit import audit
from dpfl_jax.mechanisms import uls


@pytest.mark.slow
def test_a_sound_mechanism_stands():
    trials = bench.central(uls, 2.0, 4, 0.5, 1, trials=2400, directions=400)
    outside = trials.seen[~trials.inside]
    assert abs(outside.mean()) < 5 / np.sqrt(outside.size)
    assert outside.var() == pytest.approx(1.0, abs=5 * np.sqrt(2 / outside.size))
    found = audit(trials, 0.999)
    assert not found.exceeds, str(found)
    assert found.attack == "likelihood ratio"


@pytest.mark.slow
@pytest.mark.nightly(
    "sampling rate off by 2", "noise once for all silos", "division by the realised batch"
)
@pytest.mark.parametrize("bug", [name for name in bench.BUGS if name != "none"])
def test_planted_bugs_are_seen(bug):
    found = bench.planted(bug)
    assert found.exceeds
    assert found.proved > found.claimed, str(found)


@pytest.mark.nightly
@pytest.mark.slow(
    "uls",
    "els",
    "local_item",
    "hi_grad_avg",
    "user updates",
    "smallest budget",
    "isrl",
)
@pytest.mark.parametrize("kind", bench.SOUND)
def test_every_mechanism_stands_and_little_of_it_is_hidden_from_the_attack(kind):
    found = audit(bench.SOUND[kind](4.0, 7, 4000), 0.999)
    assert not found.exceeds, str(found)
    # 4,000 trials at this confidence prove 0.45 to 0.8, by luck; 800 less, a small budget is a weak
    # signal, and so are records of a subject that are seldom drawn together.
    weak = {"user_ldp": 0.3, "local_group": 0.3, "rpdp, smallest budget": 0.0}
    assert found.proved >= weak.get(kind, 0.4) * found.claimed, str(found)


@pytest.mark.slow
@pytest.mark.nightly("rpdp", "epsilon 1", "epsilon 8", "uls, T=100")
@pytest.mark.parametrize("name", bench.TIGHTNESS)
def test_the_attack_proves_most_of_what_is_claimed(name):
    found = audit(bench.TIGHTNESS[name]())
    assert found.proved >= 0.8 * found.claimed, str(found)
