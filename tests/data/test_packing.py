"""Packed rows: every token once, where its example is; shapes that hold whatever is drawn."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.packing import reads
from dpfl_jax.config.execution import Execution
from dpfl_jax.data import ArrayStore, Schema, UserView, limit_store
from dpfl_jax.data.build import BuildPlan, build_store, write_store
from dpfl_jax.data.packing import (
    Shape,
    choose_shapes,
    example_lengths,
    first_fit,
    lengths_warning,
    pack_units,
    split_by_shape,
)
from dpfl_jax.data.pipeline import Pipeline
from dpfl_jax.data.shards import ShardStore
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import els, uls
from dpfl_jax.mechanisms.plan.batches import check_packing
from dpfl_jax.models import LanguageModel, TransformerConfig
from dpfl_jax.randomness import RootKey

SEQ_LEN, VOCAB = 64, 32


def heavy_tailed(users=40, seq_len=SEQ_LEN, median=6.0, spread=1.0, seed=0, most=12, answers=False):
    """Users with 1 to ``most`` examples of log-normal lengths."""
    rng = np.random.default_rng(seed)
    schema = (Schema.answers if answers else Schema.tokens)(seq_len, VOCAB)

    def one():
        count = rng.integers(1, most + 1)
        lengths = np.clip(rng.lognormal(np.log(median), spread, count), 1, seq_len).astype(int)
        real = np.arange(seq_len) < lengths[:, None]
        tokens = np.where(real, rng.integers(0, VOCAB, (count, seq_len)), 0)
        mask = real & (rng.random((count, seq_len)) < 0.5) if answers else real
        return {"tokens": tokens, "mask": mask}

    return ArrayStore.from_users(((f"u{u}", one()) for u in range(users)), schema)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    units=st.integers(1, 5),
    examples=st.integers(1, 8),
    rows=st.integers(1, 8),
    length=st.integers(1, 20),
    seed=st.integers(0, 2**16),
)
def test_examples_do_not_overlap_and_no_row_overflows(units, examples, rows, length, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 13, (units, examples))
    real = rng.random((units, examples)) < 0.7
    row, start, whole = first_fit(lengths, real, Shape(rows, length))
    assert (row[~real] == -1).all()
    for u in range(units):
        taken = np.zeros((rows, length), int)
        for e in np.flatnonzero(row[u] >= 0):
            assert start[u, e] + lengths[u, e] <= length
            taken[row[u, e], start[u, e] : start[u, e] + lengths[u, e]] += 1
        assert taken.max() <= 1
        assert whole[u] == (row[u][real[u]] >= 0).all()
        # First fit leaves nothing out that has room in an empty row.
        if real[u].sum() <= rows and (lengths[u][real[u]] <= length).all():
            assert whole[u]


@pytest.mark.parametrize("answers", [False, True])
def test_every_example_is_read_back(answers):
    """In its own segment of its unit's rows: tokens and mask up to the last that is predicted."""
    store = heavy_tailed(answers=answers)
    offsets = store.user_offsets
    positions = np.full((store.num_users, 12), -1)
    for unit, low, high in zip(positions, offsets, offsets[1:]):
        unit[: high - low] = np.arange(low, high)
    lengths = example_lengths(store, positions)
    arrays, used, counts, real_tokens = pack_units(store, positions, Shape(12, SEQ_LEN), True)
    np.testing.assert_array_equal(counts, np.diff(offsets))
    whole = store.read(positions[positions >= 0])
    assert real_tokens == whole["mask"].sum()
    for u, e in np.argwhere(positions >= 0):
        here = arrays["segments"][u] == e + 1
        assert here.any(axis=1).sum() == (lengths[u, e] > 0)  # in one row
        want = store.read(positions[u, e : e + 1])
        kept = slice(lengths[u, e])
        np.testing.assert_array_equal(arrays["tokens"][u][here], want["tokens"][0, kept])
        np.testing.assert_array_equal(arrays["mask"][u][here], want["mask"][0, kept])
        assert not want["mask"][0, lengths[u, e] :].any()
    assert not arrays["mask"][arrays["segments"] == 0].any()
    np.testing.assert_array_equal(used, (arrays["segments"] > 0).any(axis=2))


@pytest.mark.parametrize(
    ("mechanism", "median"),
    [
        (uls(group_size=12, cohort_size=16, clip_norm=1.0), 6),
        (els(group_size=8, batch_size=64, clip_norm=1.0), 20),
    ],
    ids=["uls", "els"],
)
def test_steps_hold_what_was_drawn_and_little_else(mechanism, median):
    store = heavy_tailed(users=120, median=median)
    sampler = mechanism.sampler(store.user_offsets, RootKey.from_seed(1))
    shapes, shares = choose_shapes(store, sampler.group_size, sampler.expected_size, 2)
    assert shapes[-1].tokens == (sampler.group_size or 1) * SEQ_LEN
    assert sum(shares) == pytest.approx(1)
    plain = Pipeline(store, sampler, 2)
    pipeline = Pipeline(store, sampler, 2, shapes=shapes)
    real, places, before = 0, 0, 0
    for step in range(6):
        draw, batch = sampler.draw(step), pipeline.build(step)
        read = store.read(draw.positions[draw.positions >= 0])
        want = np.sort(read["tokens"][read["mask"]])
        got = [bucket.arrays["tokens"][bucket.arrays["mask"]] for bucket in batch.buckets]
        np.testing.assert_array_equal(np.sort(np.concatenate(got)), want)
        assert sum(b.unit_mask.sum() for b in batch.buckets) == draw.size
        if sampler.group_size:
            assert sum(b.counts.sum() for b in batch.buckets) == batch.num_examples
        real, places = real + batch.num_tokens, places + batch.num_places
        arrays = [b.arrays["tokens"][: b.num_rows] for b in batch.buckets]
        assert batch.num_places == sum(a.size for a in arrays)
        before += sum(b.num_rows * b.unit_mask.shape[1] for b in plain.build(step).buckets)
    whole = shapes[-1].tokens * before
    assert real / places > 0.6
    assert real / places > 1.5 * real / whole


@pytest.mark.parametrize("answers", [False, True])
def test_a_process_reads_its_part_of_a_draw(tmp_path, answers):
    """Lengths, by which all agree on the buffer of each unit, come from the store's index."""
    store = write_store(heavy_tailed(users=64, answers=answers), tmp_path / "store")
    mechanism = uls(group_size=4, cohort_size=32, clip_norm=1.0)
    one, two, four = (reads(store, mechanism, processes) for processes in (1, 2, 4))
    assert two["bytes"] < 0.65 * one["bytes"]
    assert four["examples"] < 0.4 * one["examples"]


@pytest.mark.parametrize("answers", [False, True])
def test_a_store_keeps_the_lengths_of_its_examples(tmp_path, answers):
    memory = heavy_tailed(users=12, answers=answers)
    positions = np.arange(memory.num_examples)[::-1]
    mask = memory.read(positions)["mask"]
    want = [int(row.nonzero()[0].max(initial=-1)) + 1 for row in mask]
    plan = BuildPlan(memory.schema, num_shards=3, tokenizer=None)
    rows = (
        (name, memory.records(np.arange(first, stop)).tobytes())
        for name, first, stop in zip(
            memory.user_ids(range(memory.num_users)),
            memory.user_offsets[:-1],
            memory.user_offsets[1:],
        )
    )
    store = build_store(lambda: rows, tmp_path / "store", plan)
    view = UserView(store, np.arange(store.num_users), first=np.ones(store.num_users, np.int64))
    for known in (memory, store):
        assert known.lengths(positions).tolist() == want
    assert view.has_lengths
    assert (
        view.lengths(np.arange(view.num_examples)).tolist()
        == example_lengths(_ReadOnly(view), np.arange(view.num_examples)).tolist()
    )
    store.verify()
    assert lengths_warning(view) is None
    assert lengths_warning(_ReadOnly(view)) is None
    # A store of an earlier version.
    (tmp_path / "store" / "lengths.arrow").unlink()
    dataclasses.replace(store.manifest, lengths=None).write(tmp_path / "store")
    old = ShardStore(tmp_path / "store")
    assert old.lengths(positions).tolist() == want
    assert "build it again" in lengths_warning(limit_store(old, 3))


class _ReadOnly:
    def __init__(self, store):
        self.read = store.read


def test_a_step_fills_several_rows_of_each_shape():
    """So that few units are missing from the last: of 200 a step at most a quarter a row."""
    store = heavy_tailed(users=300)
    for parts in (1, 4):
        shapes, shares = choose_shapes(store, None, 200.0, 16, parts)
        assert len(shapes) > 1
        for shape, share in zip(shapes, shares, strict=True):
            assert shape.units % parts == 0
            assert parts <= shape.units <= max(parts, 200 * share / 4)


def test_a_unit_is_in_the_cheapest_shape_that_holds_it():
    store = heavy_tailed(users=3)
    sampler = uls(group_size=12, cohort_size=3, clip_norm=1.0).sampler(
        store.user_offsets, RootKey.from_seed(0)
    )
    draw = sampler.draw(0)
    lengths = example_lengths(store, draw.positions)
    shapes = (Shape(1, 16), Shape(12, SEQ_LEN))
    small, large = split_by_shape(draw, lengths, shapes)
    assert small.size + large.size == draw.size
    assert (lengths[np.isin(draw.units, small.units)].sum(axis=1) <= 16).all()
    with pytest.raises(BadInputError, match="more than the 16 tokens of a row"):
        split_by_shape(draw, lengths + 17 * (draw.positions >= 0), shapes[:1])


MODEL = LanguageModel(TransformerConfig(vocab_size=VOCAB, max_seq_len=SEQ_LEN))


@pytest.mark.parametrize(
    ("loss", "store", "options", "said"),
    [
        (
            lambda params, example: 0.0,
            heavy_tailed(2),
            {},
            "a loss that handles several sequences in one row",
        ),
        (
            MODEL.loss,
            ArrayStore.from_users([("a", {"x": np.ones((1, 2), "f4")})]),
            {},
            "single sequences of tokens",
        ),
        (MODEL.loss, heavy_tailed(2), {"examples_at_once": 2}, "execution.examples_at_once"),
        (MODEL.loss, heavy_tailed(2), {"group_buckets": True}, "execution.group_buckets"),
    ],
    ids=["loss", "data", "pieces", "buckets"],
)
def test_what_cannot_be_packed_is_refused(loss, store, options, said):
    with pytest.raises(BadInputError, match=said):
        check_packing(loss, store, Execution(packing=8, **options))
    check_packing(loss, store, Execution(**options))
