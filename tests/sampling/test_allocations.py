"""Random allocation: once in every stretch, as accounted. False-alarm rate at most 1e-6 each."""

import numpy as np
import pytest
from scipy import stats

from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import RandomAllocation

ALARM = 1e-6
KEY = RootKey.from_seed(5)


def turns(units, period, stretches, key=KEY):
    """The step of each unit in each stretch, int [stretches, units]; exactly one, or it fails."""
    found = np.full((stretches, units), -1)
    for step in range(stretches * period):
        drawn = RandomAllocation(period).indices(key, step, units)
        assert (np.diff(drawn) > 0).all()
        stretch, turn = divmod(step, period)
        assert (found[stretch, drawn] == -1).all()
        found[stretch, drawn] = turn
    assert found.min() >= 0
    return found


def test_a_step_is_drawn_without_those_before_it():
    scheme = RandomAllocation(7)
    later = scheme.indices(KEY, 1000, 100)
    np.testing.assert_array_equal(RandomAllocation(7).indices(KEY, 1000, 100), later)
    assert not np.array_equal(scheme.indices(KEY.child("other"), 1000, 100), later)


def test_who_is_last_moves_nobody():
    """With one key, too: the others' steps do not depend on how many follow them."""
    for users in (5, 64, 333):
        more = turns(users + 1, 4, 3)
        np.testing.assert_array_equal(turns(users, 4, 3), more[:, :-1])


def test_what_is_expected_and_bounded():
    scheme = RandomAllocation(25)
    assert scheme.expected_size(1000) == 40
    assert stats.binom.sf(scheme.size_bound(1000, 1e-9), 1000, 0.04) <= 1e-9
    assert "in exactly one of every 25 steps" in scheme.describe("1000 users", "user")
    for wrong in (0, 2.5, float("nan")):
        with pytest.raises(BadInputError, match=f"period is {wrong}"):
            RandomAllocation(wrong)
    assert len(RandomAllocation(10**9).indices(KEY, 0, 100)) == 0  # as fast as with few steps
