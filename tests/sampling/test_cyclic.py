"""Groups in turns: as accounted. Thresholds have a false-alarm rate of at most 1e-6."""

import numpy as np
import pytest
from scipy import stats

from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import CyclicPoisson, Poisson

ALARM = 1e-6
KEY = RootKey.from_seed(11)


def test_one_group_is_poisson_draw_by_draw():
    for step in range(50):
        np.testing.assert_array_equal(
            CyclicPoisson(0.1, period=1).indices(KEY, step, 300),
            Poisson(0.1).indices(KEY, step, 300),
        )


def test_groups_are_coins_of_each_unit():
    """Sizes are multinomial (equal ones would depend on everybody), and neighbours independent."""
    groups = np.stack(
        [CyclicPoisson(0.5, period=4).group_of(KEY.child("k", i), 40) for i in range(2000)]
    )
    sizes = (groups == 0).sum(axis=1)
    edges = np.arange(4, 17)
    observed = [(sizes < 4).sum(), *((sizes == k).sum() for k in edges), (sizes > 16).sum()]
    law = stats.binom(40, 0.25)
    expected = np.array([law.cdf(3), *law.pmf(edges), law.sf(16)]) * 2000
    assert stats.chisquare(observed, expected).pvalue > ALARM
    pairs = np.bincount(4 * groups[:, 0] + groups[:, 1], minlength=16)
    assert stats.chisquare(pairs).pvalue > ALARM


def test_who_is_last_moves_nobody():
    """With one key, too: the others' groups do not depend on how many follow them."""
    for users in (5, 64, 333):
        more = CyclicPoisson(0.5, period=3).group_of(KEY, users + 1)
        np.testing.assert_array_equal(CyclicPoisson(0.5, period=3).group_of(KEY, users), more[:-1])


def test_what_is_expected_and_bounded():
    scheme = CyclicPoisson(0.2, period=5)
    assert scheme.expected_size(1000) == pytest.approx(40)
    assert stats.binom.sf(scheme.size_bound(1000, 1e-9), 1000, 0.04) <= 1e-9
