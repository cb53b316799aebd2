"""What trials refute, held against drawn numbers whose truth is known."""

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import stats

from dpfl_jax import accounting
from dpfl_jax.accounting import REPLACE, events
from dpfl_jax.audit import Trials, audit
from dpfl_jax.audit.proof import (
    FILES,
    SEEN,
    RunAudit,
    guessed,
    one_run_bound,
    plot_audits,
    read_run_audit,
)
from dpfl_jax.audit.trials import log_likelihood_ratio, scaled, step_shifts
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import Calibrated, Population, uls

DELTA = 1e-5


def drawn(event, rng, n, shift=1.0, relation=accounting.ADD_OR_REMOVE):
    """Trials of the mechanism that the event tells of, its unit moving the sum ``shift`` times."""
    inside = rng.random(n) < 0.5
    columns = []
    for law in step_shifts(event):
        shifts, weights = law.shifts, law.weights
        moved = shift * rng.choice(shifts, n, p=weights)
        sign = np.where(inside, 1.0, -1.0 if relation == REPLACE else 0.0)
        columns.append(rng.normal(size=n) + sign * moved)
    return Trials(inside, np.stack(columns, axis=1), event, DELTA, relation)


@pytest.mark.slow
@pytest.mark.parametrize("event", [events.gaussian(2.0, 1), events.uls(1.5, 0.3, 4)])
def test_true_claims_are_refuted_no_more_often_than_the_confidence_says(event):
    rng = np.random.default_rng(1)
    wrong = sum(audit(drawn(event, rng, 1500), 0.95).exceeds for _ in range(40))
    assert wrong <= stats.binom.isf(1e-4, 40, 0.05)


@pytest.mark.slow
def test_the_bound_for_any_mechanism_holds_where_it_is_nearly_attained():
    """Randomised response: a guess is right with e^eps / (1 + e^eps), and none may be surer."""
    rng, epsilon, over = np.random.default_rng(2), 1.5, 0
    for _ in range(100):
        inside = rng.random(400) < 0.5
        told = inside ^ (rng.random(400) > 1 / (1 + math.exp(-epsilon)))
        found = one_run_bound(told.astype(float), inside, (0.5, 0.5), 0.0, 0.05)
        over += found > epsilon
        assert found > epsilon - 1.0
    assert over <= stats.binom.isf(1e-4, 100, 0.05)


def test_scores_that_know_nothing_prove_nothing_though_they_depend_on_each_other():
    """All share one draw; at most 5 % may be over, by a bound that few of 60 meet."""
    rng, event, over = np.random.default_rng(7), events.uls(1.5, 0.3, 4), 0
    for _ in range(60):
        score = rng.normal() * rng.normal(size=300) + rng.normal()
        inside = rng.random(300) < 0.5
        found = guessed(score, inside, event, DELTA, 0.95, name="", how="")
        over += found.proved > 0.5
        assert not found.exceeds
    assert over <= 2
    sure = guessed(inside.astype(float), inside, event, DELTA, 0.95, name="", how="")
    assert sure.exceeds
    assert sure.proved > sure.claimed


def test_what_moves_the_sum_further_than_claimed_is_refuted():
    event = events.uls(1.5, 0.3, 4)
    rng = np.random.default_rng(3)
    sound, broken = (audit(drawn(event, rng, 8000, shift), 0.999) for shift in (1.0, 2.0))
    assert not sound.exceeds
    assert 0.5 * sound.claimed < sound.proved < sound.claimed
    assert broken.exceeds
    truth = accounting.epsilon(scaled(event, 2.0), DELTA)
    assert sound.claimed < broken.proved < truth


@pytest.mark.slow
def test_noise_that_comes_twice_is_seen_though_each_step_alone_looks_sound():
    event = events.uls(1.0, 0.5, 2)
    rng = np.random.default_rng(4)
    trials = drawn(event, rng, 4000)
    moved = np.where(trials.inside[:, None], rng.random((4000, 2)) < 0.5, 0.0)
    same = dataclasses.replace(trials, seen=moved + rng.normal(size=(4000, 1)))
    assert not audit(trials, 0.999).exceeds
    found = audit(same, 0.999)
    assert found.exceeds
    assert found.attack == "size"


@pytest.mark.slow
def test_noise_that_comes_twice_is_seen_in_more_steps_than_can_be_learned_one_by_one():
    """It is added to one step and taken from the next; draws are as claimed."""
    made = drawn(events.uls(3.0, 0.1, 200), np.random.default_rng(6), 2000)
    moved = made.inside[:, None] * (np.random.default_rng(7).random(made.seen.shape) < 0.1) / 3.0
    signs = (-1.0) ** np.arange(200)
    twice = moved + signs * np.random.default_rng(8).normal(size=(2000, 1))
    assert not audit(made, 0.999).exceeds
    assert audit(dataclasses.replace(made, seen=twice), 0.999).exceeds


@pytest.mark.slow
def test_what_is_seen_beside_may_give_it_away():
    event = events.gaussian(3.0, 1)
    rng = np.random.default_rng(5)
    trials = drawn(event, rng, 4000)
    noise = trials.seen - trials.inside[:, None] / 3.0
    assert not audit(dataclasses.replace(trials, beside=rng.normal(size=(4000, 1))), 0.999).exceeds
    assert audit(dataclasses.replace(trials, beside=noise), 0.999).exceeds


@pytest.mark.parametrize("relation", [accounting.ADD_OR_REMOVE, REPLACE])
def test_the_ratio_is_that_of_densities(relation):
    y = np.array([[-1.0, 0.3], [2.0, np.nan]])
    found = log_likelihood_ratio(y, events.mixture(2.0, [0, 1, 3], [0.5, 0.3, 0.2], 2), relation)
    for row, got in zip(y, found):
        want = 0.0
        for x in row[~np.isnan(row)]:
            there = sum(
                w * stats.norm.pdf(x - s / 2.0)
                for s, w in zip([0, 1, 3], [0.5, 0.3, 0.2], strict=True)
            )
            other = stats.norm.pdf(x)
            if relation == REPLACE:
                other = sum(
                    w * stats.norm.pdf(x + s / 2.0)
                    for s, w in zip([0, 1, 3], [0.5, 0.3, 0.2], strict=True)
                )
            want += math.log(there / other)
        assert got == pytest.approx(want)


def test_less_noise_is_the_same_event_with_less_noise():
    made = events.horizontal([events.els(2.0, 0.1, 3, 4), events.two_stage(2.0, 0.1, 0.5, 2, 3)])
    want = events.horizontal([events.els(1.0, 0.1, 3, 4), events.two_stage(1.0, 0.1, 0.5, 2, 3)])
    assert scaled(made, 2.0) == want


def test_what_cannot_be_audited_is_said():
    rng = np.random.default_rng(6)
    assert audit(drawn(events.uls(1.0, 0.5, 1), rng, 300)).attack == "likelihood ratio"
    with pytest.raises(BadInputError, match="add canaries"):
        audit(drawn(events.gaussian(1.0, 1), rng, 30))
    with pytest.raises(BadInputError, match="confidence"):
        audit(drawn(events.gaussian(1.0, 1), rng, 4000), 1.0)
    with pytest.raises(BadInputError, match="needs the likelihoods of steps"):
        list(step_shifts(events.fixed_size(1.0, 10, 2, 1)))


@pytest.mark.parametrize("sigma", [2.0, 0.25])
def test_numbers_of_the_picture_stand_in_its_legend_where_no_two_meet(sigma):
    event = events.gaussian(sigma, 1)
    figure = plot_audits([audit(drawn(event, np.random.default_rng(0), 600))])
    (axes,) = figure.axes
    said = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sum("falsely accused: " in text for text in said) == 3
    assert not axes.texts


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
    again = read_run_audit(tmp_path)
    np.testing.assert_array_equal(again.seen, found.seen)
    assert (again.confidence, again.cost) == (0.999, found.cost)
    assert json.loads((tmp_path / "audit.json").read_text()) == told
    assert [a.to_json() for a in again.audits(claim)] == told["audits"]
    (tmp_path / SEEN).write_bytes(b"PK")
    with pytest.raises(BadInputError, match=r"(was|were) changed"):
        read_run_audit(tmp_path)
    with pytest.raises(BadInputError, match="had no canaries"):
        read_run_audit(tmp_path / "nowhere")


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
    with pytest.raises(BadInputError, match=r"(was|were) changed"):
        read_run_audit(tmp_path)


def test_more_steps_than_are_stated_are_refused():
    found = seen(units=300)
    more = dataclasses.replace(found, seen=np.tile(found.seen, 2))
    with pytest.raises(BadInputError, match="saw 6 steps, but the guarantee is for 3"):
        more.audits(stated())
