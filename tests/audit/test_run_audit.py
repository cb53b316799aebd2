"""What the audit of a run keeps, and what is proved of it against what the run states."""

import dataclasses
import json

import numpy as np
import pytest

from dpfl_jax.audit.run_audit import FILES, SEEN, RunAudit, read
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import Calibrated, Population, uls

STEPS = 3


def cost(inside):
    count = {"canaries": len(inside), "inside": int(inside.sum())}
    return {"sentences": ["nothing"], "texts": 0, "texts_inside": 0} | count


def stated(sigma=2.0):
    mechanism = uls(group_size=1, cohort_size=50)
    made = Calibrated(mechanism, sigma, Population(100, 100, 100), STEPS, 1e-4)
    return made.statement(made.guarantee())


def seen(sigma=2.0, units=3000):
    """As a run with this noise, which claims 2, would release it."""
    rng = np.random.default_rng(1)
    inside = rng.random(units) < 0.5
    moved = inside[:, None] * (rng.random((units, STEPS)) < 0.5) / 2.0
    values = moved + rng.normal(size=(units, STEPS)) * sigma / 2.0
    none = np.zeros(0, np.float32)
    return RunAudit(inside, values.astype("f4"), none.astype(bool), none, 0.999, cost(inside))


def test_what_is_stated_is_the_claim_whatever_its_event_costs():
    found, claim = seen(), stated()
    (sound,) = found.audits(claim)
    assert not sound.exceeds
    assert 0.3 < sound.proved < sound.claimed == claim.privacy.epsilon
    privacy = dataclasses.replace(claim.privacy, epsilon=0.9 * sound.proved)
    (lied,) = found.audits(claim.model_copy(update={"privacy": privacy}))
    assert lied.exceeds
    (broken,) = seen(1.0).audits(claim)
    assert broken.exceeds


def test_it_is_read_as_it_was_written(tmp_path):
    found, claim = seen(units=300), stated()
    told = found.write(tmp_path, claim)
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)
    again = read(tmp_path)
    np.testing.assert_array_equal(again.seen, found.seen)
    assert (again.confidence, again.cost) == (0.999, found.cost)
    assert json.loads((tmp_path / "audit.json").read_text()) == told
    assert [a.to_json() for a in again.audits(claim)] == told["audits"]
    (tmp_path / SEEN).write_bytes(b"PK")
    with pytest.raises(BadInputError, match="not as the run left it"):
        read(tmp_path)
    with pytest.raises(BadInputError, match="had no canaries"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "changed",
    [
        {"inside": np.zeros(0, bool), "seen": np.zeros((0, STEPS), "f4")},
        {"inside": np.arange(300)},
        {"seen": np.full((300, STEPS), np.nan, "f4")},
        {"seen": np.zeros(300, "f4")},
        {"seen": np.zeros((20, STEPS), "f4")},
        {"seen": np.full((300, STEPS), "x")},
        {"gains": np.zeros(3, "f4")},
    ],
)
def test_what_cannot_be_so_is_refused(tmp_path, changed):
    found = seen(units=300)
    found.write(tmp_path, stated())
    names = ("inside", "seen", "texts_inside", "gains")
    np.savez(tmp_path / SEEN, **{name: getattr(found, name) for name in names} | changed)
    with pytest.raises(BadInputError, match="not as the run left it"):
        read(tmp_path)


def test_more_steps_than_are_stated_are_refused():
    found = seen(units=300)
    more = dataclasses.replace(found, seen=np.tile(found.seen, 2))
    with pytest.raises(BadInputError, match="saw 6 steps, but the guarantee is of 3"):
        more.audits(stated())
