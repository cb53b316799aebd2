"""Stores in memory, views of them, splits by user."""

import dataclasses

import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_jax.data import (
    ArrayStore,
    ByteTokenizer,
    Schema,
    Store,
    UserView,
    limit_store,
    split_by_user,
    split_within_users,
    store_from_documents,
)
from dpfl_jax.data.build import write_store
from dpfl_jax.data.documents import chunk_documents
from dpfl_jax.errors import BadInputError


def make_store(counts, prefix="u"):
    """Each example holds (user number, index within the user)."""
    users = [
        (f"{prefix}{u}", {"x": np.stack([np.full(n, u), np.arange(n)], axis=1)})
        for u, n in enumerate(counts)
    ]
    return ArrayStore.from_users(users)


def test_users_lie_together_and_in_order():
    counts = [3, 1, 0, 5, 2]
    store = make_store(counts)
    assert isinstance(store, Store)
    assert (store.num_users, store.num_examples) == (4, 11)
    for u, name in enumerate(store.user_ids(range(store.num_users))):
        positions = np.arange(store.user_offsets[u], store.user_offsets[u + 1])
        rows = store.read(positions)["x"]
        assert (rows[:, 0] == int(name[1:])).all()
        assert rows[:, 1].tolist() == list(range(counts[int(name[1:])]))
    with pytest.raises(IndexError):
        store.read(np.array([-1]))
    with pytest.raises(IndexError):
        store.read(np.array([11]))


def test_order_and_fingerprint_do_not_depend_on_input_order_but_on_content():
    a = [("ann", {"x": np.arange(3)}), ("bob", {"x": np.arange(2)}), ("cy", {"x": np.arange(1)})]
    one, two = ArrayStore.from_users(a), ArrayStore.from_users(a[::-1])
    assert one.user_ids(range(3)) == two.user_ids(range(3))
    assert one.fingerprint == two.fingerprint
    for changed in (
        [*a[:2], ("cyd", {"x": np.arange(1)})],
        [*a[:2], ("cy", {"x": np.array([1])})],
        a[:2],
        [("ann", {"x": np.arange(2)}), ("bob", {"x": np.r_[0, 1, 2]}), a[2]],
    ):
        assert ArrayStore.from_users(changed).fingerprint != one.fingerprint


def test_bad_users_are_refused():
    with pytest.raises(BadInputError, match="occurs twice"):
        ArrayStore.from_users([("a", {"x": np.zeros(1)}), ("a", {"x": np.zeros(1)})])
    with pytest.raises(BadInputError, match="a user id is ''"):
        ArrayStore.from_users([("", {"x": np.zeros(1)})])
    with pytest.raises(BadInputError, match="no users"):
        ArrayStore.from_users([])
    with pytest.raises(BadInputError, match="no usable examples"):
        ArrayStore.from_users([("a", {"x": np.zeros(0)})])
    with pytest.raises(BadInputError, match="shape"):
        ArrayStore.from_users([("a", {"x": np.zeros((1, 2))}), ("b", {"x": np.zeros((1, 3))})])


def test_token_schema_checks_mask_and_vocabulary():
    schema = Schema.tokens(4, 10)
    good = {"tokens": np.array([[5, 0, 9, 0]]), "mask": np.array([[1, 1, 1, 0]], bool)}
    store = ArrayStore.from_users([("a", good)], schema)
    read = store.read(np.array([0]))
    assert read["tokens"].dtype == np.int32
    assert read["mask"].dtype == bool
    np.testing.assert_array_equal(read["tokens"], good["tokens"])
    np.testing.assert_array_equal(read["mask"], good["mask"])
    with pytest.raises(BadInputError, match="mask"):
        schema.pack({"tokens": good["tokens"], "mask": np.array([[1, 0, 1, 0]], bool)})
    with pytest.raises(BadInputError, match="token id"):
        schema.pack({"tokens": np.array([[10, 0, 0, 0]]), "mask": good["mask"]})
    assert pydantic.TypeAdapter(Schema).validate_python(dataclasses.asdict(schema)) == schema
    assert Schema.tokens(4, 70000).record_dtype["tokens"].base == np.dtype("<u4")


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 23), min_size=1, max_size=8),
    st.integers(1, 9),
    st.booleans(),
    st.integers(1, 4),
)
def test_chunks_keep_every_token_of_every_document(lengths, seq_len, with_eos, min_tokens):
    rng = np.random.default_rng(0)
    documents = [rng.integers(3, 200, n) for n in lengths]
    schema = Schema.tokens(seq_len, 259)
    eos = 2 if with_eos else None
    records, counts = chunk_documents(documents, schema, eos, min_tokens)
    assert counts.sum() == len(records)
    row = 0
    for document, count in zip(documents, counts):
        whole = [*document.tolist(), *([eos] if with_eos and len(document) else [])]
        pieces = [whole[i : i + seq_len] for i in range(0, len(whole), seq_len)]
        if pieces and len(pieces[-1]) < min(min_tokens, seq_len):
            pieces.pop()
        assert count == len(pieces)
        for piece in pieces:
            assert records[row]["length"] == len(piece)
            padded = piece + [0] * (seq_len - len(piece))
            assert records[row]["tokens"].tolist() == padded
            row += 1


def test_documents_round_trip_through_the_byte_tokenizer():
    texts = {"ann": ["héllo wörld", "second"], "bob": ["x" * 50]}
    documents = [(u, t) for u, ts in texts.items() for t in ts]
    store = store_from_documents(documents, ByteTokenizer(), 8)
    for u, name in enumerate(store.user_ids(range(2))):
        batch = store.read(np.arange(store.user_offsets[u], store.user_offsets[u + 1]))
        ids = np.concatenate([t[m] for t, m in zip(batch["tokens"], batch["mask"])])
        pieces, current = [], []
        for i in ids:
            if i == 2:
                pieces.append(ByteTokenizer().decode(current))
                current = []
            else:
                current.append(i)
        assert pieces == texts[name]


def test_no_usable_example_is_an_error():
    with pytest.raises(BadInputError, match="zero usable examples"):
        store_from_documents([("a", ""), ("b", "")], ByteTokenizer(), 8)
    with pytest.raises(BadInputError, match="no users"):
        store_from_documents([], ByteTokenizer(), 8)


def test_adding_a_user_moves_no_other_user():
    small, large = make_store([1] * 400), make_store([1] * 401)
    fractions = {"validation": 0.2, "test": 0.1}

    def sides(store):
        parts = split_by_user(store, fractions, seed=3)
        return {u: n for n, p in parts.items() for u in p.user_ids(range(p.num_users))}

    before, after = sides(small), sides(large)
    assert len(before) == 400
    assert len(after) == 401
    assert all(after[u] == side for u, side in before.items())
    other = split_by_user(small, fractions, seed=4)["test"]
    assert set(other.user_ids(range(other.num_users))) != {
        u for u, s in before.items() if s == "test"
    }


def test_split_fractions_hold():
    # 4,000 users: each count within 4.5 standard deviations (false alarm 7e-6 a side).
    parts = split_by_user(make_store([1] * 4000), {"validation": 0.2, "test": 0.1})
    for name, share in (("validation", 0.2), ("test", 0.1)):
        spread = np.sqrt(4000 * share * (1 - share))
        assert abs(parts[name].num_users - 4000 * share) < 4.5 * spread
    with pytest.raises(BadInputError, match="leave no users"):
        split_by_user(make_store([1]), {"validation": 0.6, "test": 0.4})
    with pytest.raises(BadInputError, match="validation_fraction"):
        split_by_user(make_store([1]), {"validation": -0.1})


def test_views_read_what_the_parent_holds():
    store = make_store([4, 1, 7, 3])
    view = UserView(
        store, np.array([0, 2, 3]), first=np.array([1, 0, 9]), counts=np.array([2, 3, 1])
    )
    names = store.user_ids([0, 2, 3])
    expected = []
    for name, first, count in zip(names, (1, 0, 9), (2, 3, 1)):
        n = [4, 1, 7, 3][int(name[1:])]
        expected += [(int(name[1:]), i) for i in range(first, min(first + count, n))]
    read = view.read(np.arange(view.num_examples))["x"]
    assert [tuple(r) for r in read.tolist()] == expected
    shuffled = np.random.default_rng(0).permutation(view.num_examples)
    assert (view.read(shuffled)["x"] == read[shuffled]).all()
    copy = ArrayStore.from_users(
        (name, view.read(np.arange(*view.user_offsets[u : u + 2])))
        for u, name in enumerate(view.user_ids(range(view.num_users)))
    )
    assert copy.fingerprint == view.fingerprint


@pytest.mark.parametrize("chosen", [{}, {"counts": np.full(4, 2)}, {"first": np.ones(4, int)}])
def test_users_are_read_for_a_fingerprint_only_if_a_part_of_them_counts(tmp_path, chosen):
    memory, users = make_store([3, 1, 2, 5, 2]), np.array([0, 1, 3, 4])
    disk, read = write_store(memory, tmp_path / "store"), []
    disk.records = lambda positions: read.extend(positions) or memory.records(positions)
    view = UserView(disk, users, **chosen)
    assert view.fingerprint == UserView(memory, users, **chosen).fingerprint
    sizes = np.diff(memory.user_offsets)[users]
    kept = np.minimum(sizes, 2) if "counts" in chosen else sizes - len(chosen)
    assert len(read) == kept[kept < sizes].sum()


def test_views_of_every_second_example_share_none():
    store = make_store([4, 1, 7, 3])
    seen = [UserView(store, np.arange(4), first=np.full(4, first), every=2) for first in (0, 1)]
    rows = [{tuple(r) for r in v.read(np.arange(v.num_examples))["x"].tolist()} for v in seen]
    assert not rows[0] & rows[1]
    assert len(rows[0] | rows[1]) == store.num_examples
    assert all(index % 2 == part for part in (0, 1) for _, index in rows[part])
    assert [v.num_users for v in seen] == [4, 3]  # one has a single example


def test_held_out_within_users_follows_the_cc_news_rule():
    counts = [1, 2, 10, 11, 30, 1000]
    store = make_store(counts)
    train, held = split_within_users(store, 0.1, most=32, smallest=2)
    expected = {2: 1, 10: 1, 11: 2, 30: 3, 1000: 32}
    sizes = {
        counts[int(name[1:])]: int(n)
        for name, n in zip(held.user_ids(range(held.num_users)), held.examples_per_user)
    }
    assert sizes == expected
    assert train.num_examples + held.num_examples == sum(counts) - 1
    rows = held.read(np.arange(held.num_examples))["x"]
    assert all(index < expected[counts[user]] for user, index in rows.tolist())
    rows = train.read(np.arange(train.num_examples))["x"]
    assert all(index >= expected[counts[user]] for user, index in rows.tolist())


def test_limits():
    store = make_store([4, 1, 7, 3])
    limited = limit_store(store, 2, 3)
    assert limited.user_ids([0, 1]) == store.user_ids([0, 1])
    assert (limited.examples_per_user == np.minimum(store.examples_per_user[:2], 3)).all()
    assert limit_store(store) is store
    with pytest.raises(BadInputError, match="max_users"):
        limit_store(store, 0)
