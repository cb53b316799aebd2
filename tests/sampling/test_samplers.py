"""Contribution limits: never exceeded, uniform, nothing repeated."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import choose_within_users, limit_contributions, limited_size

KEY = RootKey.from_seed(3)
counts_strategy = st.lists(st.integers(1, 30), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(counts=counts_strategy, group_size=st.integers(1, 12), seed=st.integers(0, 1000))
def test_no_user_exceeds_the_limit(counts, group_size, seed):
    offsets = np.cumsum([0, *counts])
    kept = limit_contributions(np.random.default_rng(seed), offsets, group_size)
    assert (np.diff(kept) > 0).all()
    owner = np.searchsorted(offsets, kept, side="right") - 1
    np.testing.assert_array_equal(
        np.bincount(owner, minlength=len(counts)), np.minimum(counts, group_size)
    )
    assert limited_size(offsets, group_size) == len(kept)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(counts=counts_strategy, group_size=st.integers(1, 12), seed=st.integers(0, 1000))
def test_choice_within_users_stays_within_them(counts, group_size, seed):
    offsets = np.cumsum([0, *counts])
    users = np.arange(len(counts))[:: 1 + seed % 3]
    chosen = choose_within_users(np.random.default_rng(seed), offsets, users, group_size)
    assert chosen.shape == (len(users), group_size)
    for user, row in zip(users, chosen, strict=True):
        own = row[row >= 0]
        assert len(set(own)) == len(own) == min(group_size, counts[user])
        assert ((offsets[user] <= own) & (own < offsets[user + 1])).all()


def test_the_limited_set_is_a_uniform_subset():
    """4 of 8 examples: each is kept half of the time, pairs 3/14. False alarm 1e-6."""
    offsets = np.array([0, 8])
    rounds = 4000
    kept = np.zeros((rounds, 8))
    for i in range(rounds):
        kept[i, limit_contributions(KEY.numpy("limit", i), offsets, 4)] = 1
    singles = (kept.sum(0) - rounds / 2) / np.sqrt(rounds / 4)
    assert np.abs(singles).max() < stats.norm.isf(1e-6 / 8)
    pairs = (kept.T @ kept)[np.triu_indices(8, 1)]
    z = (pairs - rounds * 3 / 14) / np.sqrt(rounds * (3 / 14) * (11 / 14))
    assert np.abs(z).max() < stats.norm.isf(1e-6 / 28)


def test_a_group_size_below_one_is_refused():
    with pytest.raises(BadInputError, match="group_size"):
        limit_contributions(np.random.default_rng(0), np.array([0, 3]), 0)
