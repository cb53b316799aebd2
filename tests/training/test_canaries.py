"""Canaries in a run: they change nothing for people, and show what the run releases."""

import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import death_after_a_checkpoint
from scipy import linalg

import dpfl_jax as dpfl
from benchmarks import audit as bench
from dpfl_jax.audit import proof
from dpfl_jax.data.schema import Schema
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import allocation, bandmf, blt, els, non_private, uls
from dpfl_jax.noise import Noise
from dpfl_jax.randomness import RootKey
from dpfl_jax.training.canaries import WithCanaries, check_fit
from dpfl_jax.training.central import Central
from tests.noised import noised

USERS, EACH, WIDTH, STEPS = 60, 3, 5, 4
KINDS = {
    "uls": uls(group_size=2, cohort_size=30),
    "els": els(group_size=2, batch_size=40),
    "allocation": allocation(group_size=2, cohort_size=30),
}
BANDED = bandmf(group_size=2, cohort_size=15, bands=2, column=(0.8, 0.6))


def loss(params, example):
    return jnp.mean((example["x"] @ params["w"] + params["b"] - example["y"]) ** 2)


def people():
    rng = np.random.default_rng(0)
    users = {
        f"u{i}": {"x": rng.normal(size=(EACH, WIDTH)).astype("f4"), "y": rng.normal(size=EACH)}
        for i in range(USERS)
    }
    for examples in users.values():
        examples["y"] = examples["y"].astype("f4")
    return dpfl.ArrayStore.from_users(users.items())


def plan(kind="uls", **options):
    options = {"steps": STEPS, "epsilon": 4.0, "delta": 1e-4} | options
    return (KINDS | {"bandmf": BANDED})[kind].plan(people(), **options)


def start():
    return {"w": jnp.zeros(WIDTH), "b": jnp.zeros(())}


def fitted(made, canaries=None, key=1, **options):
    audit = None if canaries is None else dpfl.AuditConfig(canaries=canaries)
    key = None if key is None else RootKey.from_seed(key)
    return dpfl.fit(loss, start(), made, optax.adam(0.1), key=key, audit=audit, **options)


def with_canaries(made, canaries=100, texts=0, seed=1):
    run = Central(loss, start(), made, optax.adam(0.1))
    audit = dpfl.AuditConfig(canaries=canaries, texts=texts)
    return run, WithCanaries(run, audit, RootKey.from_seed(seed).child("audit"))


@pytest.mark.parametrize("kind", KINDS)
def test_people_are_drawn_and_accounted_as_without_canaries(kind):
    run, audited = with_canaries(plan(kind, steps=300), 400)
    assert audited.plan.stated == run.plan.stated
    assert audited.plan.event() == run.plan.event()
    assert audited.plan.guarantee() == run.plan.guarantee()
    assert audited.plan.data_digest == run.plan.data_digest
    alone, both = (made.sampler(RootKey.from_seed(5)) for made in (run.plan, audited.plan))
    drawn = 0
    for step in range(run.steps):
        mine, all_of_them = alone.draw(step), both.draw(step)
        np.testing.assert_array_equal(all_of_them.positions[: mine.size], mine.positions)
        np.testing.assert_array_equal(all_of_them.units[: mine.size], mine.units)
        rest = all_of_them.positions[mine.size :]
        assert (rest >= USERS * EACH).all()
        drawn += len(rest)
    # Canaries' units (two rows each: a unit of els is a row) are drawn at people's rate.
    units = audited.inside.sum() * (2 if kind == "els" else 1) * run.steps
    rate = run.plan.calibrated.scheme.draw_prob
    assert abs(drawn - units * rate) < 5 * np.sqrt(units * rate * (1 - rate))


def test_coins_are_the_audits_own_and_designs_do_not_depend_on_people():
    other = dpfl.ArrayStore.from_users(
        (f"v{i}", {"x": np.full((1, WIDTH), i, "f4"), "y": np.ones(1, "f4")}) for i in range(40)
    )
    _, here = with_canaries(plan())
    _, again = with_canaries(plan())
    _, there = with_canaries(uls(group_size=2, cohort_size=9).plan(other, steps=2, epsilon=1.0))
    _, drawn = with_canaries(plan(), seed=2)
    np.testing.assert_array_equal(here.inside, again.inside)
    np.testing.assert_array_equal(here.inside, there.inside)
    assert (here.inside != drawn.inside).any()
    rows = there.plan.data.read(np.array([0, 40]))
    assert rows["canary"][0] == -1
    assert rows["canary"][1] == np.flatnonzero(there.inside)[0]
    np.testing.assert_array_equal(rows["x"][1], np.ones(WIDTH))


@pytest.mark.nightly
@pytest.mark.slow("uls")
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_the_same_without_canaries(kind):
    alone, beside = fitted(plan(kind)), fitted(plan(kind), 200)
    assert alone.guarantee == beside.guarantee
    for name in ("w", "b"):
        # One grid of the noise is finer by 1e-9 of it: more coordinates are noised.
        np.testing.assert_allclose(beside.params[name], alone.params[name], rtol=1e-5, atol=1e-6)
    first, other = (run.metrics[0]["outside_guarantee"] for run in (alone, beside))
    assert first["units"] == other["units"]
    assert first["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)
    assert first["mean_norm"] == pytest.approx(other["mean_norm"], rel=1e-3)
    assert alone.audit is None


@pytest.mark.slow
@pytest.mark.nightly("bandmf")
@pytest.mark.parametrize("kind", ["uls", "bandmf"])
def test_canaries_show_the_noise_that_was_claimed_and_nothing_else(kind):
    made = plan(kind, steps=6)
    found = fitted(made, 4000).audit
    outside, inside = found.seen[~found.inside], found.seen[found.inside]
    assert abs(outside.mean()) < 5 / np.sqrt(outside.size)
    assert outside.var() == pytest.approx(1.0, abs=5 * np.sqrt(2 / outside.size))
    # Each is drawn at the rate of the event, and moves the sum by all that clipping allows.
    step = made.event().event
    rate, shift = step.sampling_probability, 1 / step.event.noise_multiplier
    spread = np.sqrt((1 + rate * (1 - rate) * shift**2) / inside.size)
    assert abs(inside.mean() - rate * shift) < 5 * spread
    stated = made.statement(made.guarantee())
    (proved,) = found.audits(stated, 0.999)
    assert not proved.exceeds
    assert 0.4 * proved.claimed < proved.proved < proved.claimed == made.guarantee().epsilon
    with bench.BUGS["noise / 2"][0]():
        (broken,) = fitted(made, 4000).audit.audits(stated, 0.999)
    assert broken.exceeds
    assert broken.proved > broken.claimed


@pytest.mark.nightly
def test_canaries_with_turns_show_all_turns_together():
    """One number for each: of variance 1, and moved by as much as the rows of its own turns."""
    made = blt(group_size=2, cohort_size=20).plan(people(), steps=6, epsilon=4.0, delta=1e-4)
    found = fitted(made, 4000).audit
    assert found.seen.shape == (4000, 1)
    outside, inside = (
        x[~np.isnan(x)] for x in (found.seen[~found.inside], found.seen[found.inside])
    )
    assert abs(outside.mean()) < 5 / np.sqrt(outside.size)
    assert outside.var() == pytest.approx(1.0, abs=5 * np.sqrt(2 / outside.size))
    turns = (np.arange(6) % 3 == np.arange(3)[:, None]).astype(float)
    column = made.calibrated.matrix.column
    moved = np.linalg.norm(turns @ linalg.toeplitz(column, np.zeros(6)).T, axis=1)
    moved /= made.calibrated.noise_multiplier
    assert moved.max() == pytest.approx(1 / made.event().noise_multiplier, rel=1e-9)
    spread = np.sqrt((1 + moved.var()) / inside.size)
    assert abs(inside.mean() - moved.mean()) < 5 * spread
    (proved,) = found.audits(made.statement(made.guarantee()), 0.999)
    assert not proved.exceeds
    assert 0.4 * proved.claimed < proved.proved


@pytest.mark.slow
def test_a_run_that_goes_on_has_the_same_canaries_and_sees_the_same(tmp_path, monkeypatch):
    loop = dpfl.LoopConfig(checkpoint_every=1)
    fitted(plan(), 200, run_dir=tmp_path / "whole", loop=loop)
    with death_after_a_checkpoint(monkeypatch):
        fitted(plan(), 200, run_dir=tmp_path / "killed", loop=loop)
    fitted(plan(), 200, run_dir=tmp_path / "killed", loop=loop, key=None)
    first, second = (proof.read_run_audit(tmp_path / name) for name in ("whole", "killed"))
    np.testing.assert_array_equal(first.seen, second.seen)
    texts = [(tmp_path / name / proof.SUMMARY).read_text() for name in ("whole", "killed")]
    assert texts[0] == texts[1]
    assert json.loads(texts[0])["holds"]
    with pytest.raises(BadInputError, match="another configuration"):
        fitted(plan(), 300, run_dir=tmp_path / "killed")


def words(rng):
    """Texts of people, each with a word or two of its own."""
    schema = Schema.tokens(8, 600)
    users = {}
    for u in range(80):
        users[f"u{u}"] = records = np.zeros(2, schema.record_dtype)
        records["length"], records["tokens"] = 8, rng.integers(600, size=(2, 8))
    return dpfl.ArrayStore.from_records(users, schema)


def unigram(params, example):
    said = jax.nn.log_softmax(params)[example["tokens"]]
    return -jnp.sum(said * example["mask"]) / jnp.maximum(example["mask"].sum(), 1)


@pytest.mark.slow
def test_the_final_model_gives_made_up_users_away_if_there_is_no_noise():
    made = uls(group_size=1, cohort_size=60, sampling_prob=0.75)
    made = made.plan(words(np.random.default_rng(0)), steps=6, epsilon=0.5, delta=1e-5)
    stated = made.statement(made.guarantee())

    def proved(seed):
        audit = dpfl.AuditConfig(canaries=0, texts=400, confidence=0.999)
        run = dpfl.fit(
            unigram, jnp.zeros(600), made, optax.sgd(20.0), key=RootKey.from_seed(seed), audit=audit
        )
        (found,) = run.audit.audits(stated)
        return found

    assert not proved(1).exceeds
    with mock.patch.object(Noise, "add", lambda self, key, tree: tree):
        broken = proved(1)
    assert broken.exceeds
    assert broken.proved > 1.0


def test_what_canaries_do_not_fit_is_said():
    audit = dpfl.AuditConfig()
    with pytest.raises(BadInputError, match="sampling scheme"):
        check_fit(noised(non_private(batch_size=3), 0.0), people(), audit)
    layered = uls(group_size=2, cohort_size=30, clipping="per_layer")
    with pytest.raises(BadInputError, match="to one norm: remove the section audit"):
        check_fit(noised(layered, 1.0), people(), audit)
    with pytest.raises(BadInputError, match="language models"):
        check_fit(noised(KINDS["uls"], 1.0), people(), dpfl.AuditConfig(texts=100))
    with pytest.raises(ValueError, match="prove nothing"):
        dpfl.AuditConfig(canaries=50)
    with pytest.raises(ValueError, match="no canaries"):
        dpfl.AuditConfig(canaries=0)


def test_made_up_users_each_say_a_word_of_their_own():
    schema = Schema.tokens(8, 300)
    records = np.zeros(4, schema.record_dtype)
    records["length"] = 8
    store = dpfl.ArrayStore.from_records({"a": records[:2], "b": records[2:]}, schema)
    made = uls(group_size=2, cohort_size=1).plan(store, steps=1, epsilon=1.0)

    def token_loss(params, example):
        return jnp.sum(params[example["tokens"]] * example["mask"])

    run = Central(token_loss, jnp.zeros(300), made, optax.sgd(0.1))
    audit = dpfl.AuditConfig(canaries=0, texts=100)
    found = WithCanaries(run, audit, RootKey.from_seed(3))
    texts = found.texts["tokens"]
    assert texts.shape == (200, 8)
    assert texts.min() >= 0
    assert texts.max() < 300
    assert (texts == texts[:, :1]).all()
    assert len(set(texts[::2, 0])) == 100
    rows = found.plan.data.read(np.array([4, 5]))
    first = np.flatnonzero(found.texts_inside)[0]
    np.testing.assert_array_equal(rows["tokens"], texts[2 * first : 2 * first + 2])
    assert (rows["canary"] == -1).all()


def test_runs_of_one_key_with_other_texts_share_no_noise():
    """Made-up users' texts are in the sum: with the same noise, two runs would show somebody."""
    rng = np.random.default_rng(0)
    tokens = {f"u{i}": {"tokens": rng.integers(0, 9, (2, 4)).astype("i4")} for i in range(60)}
    for rows in tokens.values():
        rows["mask"] = np.ones((2, 4), bool)
    store = dpfl.ArrayStore.from_users(tokens.items(), Schema.tokens(4, 9))
    made = uls(group_size=1, cohort_size=30).plan(store, steps=2, epsilon=4.0, delta=1e-4)

    def loss(params, example):
        return jnp.mean(params["w"][example["tokens"]] ** 2)

    run = Central(loss, {"w": jnp.zeros(9)}, made, optax.sgd(0.1))
    root = RootKey.from_seed(1)

    def terms(**counts):
        audit = dpfl.AuditConfig(**counts)
        return WithCanaries(run, audit, root.child("audit")).terms().sealed(root)

    alone = run.terms().sealed(root)
    assert terms(canaries=100) == alone  # which are in no sum of the model's
    more = [terms(canaries=0, texts=100), terms(canaries=0, texts=101), terms(texts=100)]
    assert len({json.dumps(t) for t in [alone, *more]}) == 4


@pytest.mark.slow
def test_steps_without_canaries_are_steps():
    made = uls(group_size=2, cohort_size=1.0).plan(people(), steps=6, epsilon=4.0, delta=1e-4)
    result = fitted(made, 100)
    assert result.audit.seen.shape == (100, 6)


def test_what_canaries_do_not_fit_is_refused():
    bad = uls(group_size=2, cohort_size=30)
    audit = dpfl.AuditConfig(canaries=100)
    with pytest.raises(BadInputError, match="noise_multiplier is 0"):
        check_fit(noised(bad, 0.0), people(), audit)
    named = {f"u{i}": {"x": np.ones((1, 2), "f4"), "canary": np.ones(1, "f4")} for i in range(4)}
    with pytest.raises(BadInputError, match="a column 'canary'"):
        check_fit(noised(KINDS["uls"], 1.0), dpfl.ArrayStore.from_users(named.items()), audit)

    def steep(params, example):
        return loss(params, example) + jnp.sqrt(jnp.abs(jnp.sum(example["x"] - 1.0) * params["b"]))

    with pytest.raises(BadInputError, match="of a row of ones is not finite"):
        dpfl.fit(steep, start(), plan(), optax.sgd(0.1), key=RootKey.from_seed(1), audit=audit)
