"""Turns: at most k steps of a unit, at least s apart, for every unit; nobody moves another."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Cyclic, UserSampler

KEY = RootKey.from_seed(5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    users=st.integers(1, 60), separation=st.integers(1, 40), steps=st.integers(1, 120),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_every_unit_takes_part_k_times_at_most_and_s_steps_apart(users, separation, steps, seed):
    """In whatever order steps are asked for."""
    scheme, key = Cyclic(separation), RootKey.from_seed(seed)
    sampler = UserSampler(scheme, np.arange(users + 1), 1, key)
    order = np.random.default_rng(seed).permutation(steps)
    drawn = {int(step): sampler.draw(int(step)).units for step in order}
    taken = [[t for t in range(steps) if user in drawn[t]] for user in range(users)]
    for user, times in enumerate(taken):
        assert len(times) <= -(-steps // separation)
        assert (np.diff(times) == separation).all()
        first = scheme.turn_of(key, users)[user]
        assert times == list(range(first, steps, separation))
    assert all(len(set(found.tolist())) == len(found) for found in drawn.values())


def test_turns_are_uniform_and_independent():
    """False-alarm rate at most 1e-6 each."""
    scheme = Cyclic(8)
    turns = scheme.turn_of(KEY, 20_000)
    assert stats.chisquare(np.bincount(turns, minlength=8)).pvalue > 1e-6
    table = np.bincount(8 * turns[:-1] + turns[1:], minlength=64).reshape(8, 8)
    assert stats.chi2_contingency(table).pvalue > 1e-6
    assert not np.array_equal(scheme.turn_of(KEY.child("other"), 20_000), turns)


def test_who_is_last_has_no_part_in_the_turns_of_others():
    for users in (5, 64, 333):
        more = Cyclic(4).turn_of(KEY, users + 1)
        np.testing.assert_array_equal(Cyclic(4).turn_of(KEY, users), more[:-1])


def test_what_is_expected_and_told():
    scheme = Cyclic(25)
    assert scheme.expected_size(1000) == 40
    assert stats.binom.sf(scheme.size_bound(1000, 1e-9), 1000, 0.04) <= 1e-9
    assert scheme.describe("1000 users", "user").startswith(
        "each of 1000 users at every 25-th step, "
    )
