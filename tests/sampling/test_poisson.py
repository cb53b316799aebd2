"""Poisson sampling is what is accounted, so it is what must run.

Statistical tests use fixed seeds; each threshold has a false-alarm rate of at most 1e-6.
"""

import numpy as np
import pytest
from scipy import stats

from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import (
    ExampleSampler,
    FixedSize,
    Poisson,
    UserSampler,
    poisson_indices,
)

ALARM = 1e-6
KEY = RootKey.from_seed(7)
STEPS = 4000


def examples(positions, prob):
    return ExampleSampler(Poisson(prob), positions, KEY)


def users(offsets, prob, group_size):
    return UserSampler(Poisson(prob), offsets, group_size, KEY)


@pytest.fixture(scope="module")
def inclusion() -> np.ndarray:
    """Bool [STEPS, 40]: who was drawn when, with probability 0.1 each."""
    sampler = examples(np.arange(100, 140), 0.1)
    drawn = np.zeros((STEPS, 40), bool)
    for step in range(STEPS):
        drawn[step, sampler.draw(step).positions - 100] = True
    return drawn


def test_sizes_follow_the_binomial_law(inclusion):
    sizes = inclusion.sum(axis=1)
    edges = np.arange(0, 10)
    observed = np.array([(sizes == k).sum() for k in edges] + [(sizes >= 10).sum()])
    expected = np.r_[stats.binom.pmf(edges, 40, 0.1), stats.binom.sf(9, 40, 0.1)] * STEPS
    assert stats.chisquare(observed, expected).pvalue > ALARM


def test_every_unit_is_included_equally_often(inclusion):
    counts = inclusion.sum(axis=0)
    z = (counts - STEPS * 0.1) / np.sqrt(STEPS * 0.1 * 0.9)
    assert stats.chi2.sf((z**2).sum(), 40) > ALARM
    assert stats.chi2.cdf((z**2).sum(), 40) > ALARM  # too even would be a shuffle


def test_units_and_steps_are_independent(inclusion):
    centred = (inclusion - 0.1) / np.sqrt(0.09)
    between_units = centred.T @ centred / np.sqrt(STEPS)
    off_diagonal = between_units[np.triu_indices(40, 1)]
    assert np.abs(off_diagonal).max() < stats.norm.isf(ALARM / len(off_diagonal))
    lagged = (centred[1:] * centred[:-1]).sum(axis=0) / np.sqrt(STEPS - 1)
    assert np.abs(lagged).max() < stats.norm.isf(ALARM / 40)


def test_draws_are_random_access():
    sampler = examples(np.arange(50), 0.3)
    forward = [sampler.draw(t).positions for t in range(5)]
    backward = [sampler.draw(t).positions for t in reversed(range(5))][::-1]
    for a, b in zip(forward, backward, strict=True):
        np.testing.assert_array_equal(a, b)
    assert any(len(forward[0]) != len(f) or (forward[0] != f).any() for f in forward[1:])


def test_no_unit_is_drawn_twice_in_a_step():
    for step in range(200):
        drawn = poisson_indices(KEY.numpy("t", step), 30, 0.7)
        assert len(np.unique(drawn)) == len(drawn)
        assert (np.diff(drawn) > 0).all()


def test_probability_one_takes_everybody():
    np.testing.assert_array_equal(poisson_indices(KEY.numpy("t"), 5, 1.0), np.arange(5))


@pytest.mark.parametrize("prob", [0.0, -0.1, 1.0001, float("nan")])
def test_impossible_probabilities_are_refused(prob):
    with pytest.raises(BadInputError, match="sampling probability"):
        examples(np.arange(5), prob)


def test_size_bound_is_exceeded_as_rarely_as_stated():
    sampler = examples(np.arange(1000), 0.05)
    bound = sampler.size_bound(1e-3)
    assert stats.binom.sf(bound, 1000, 0.05) <= 1e-3
    assert stats.binom.sf(bound - 1, 1000, 0.05) > 1e-3


@pytest.fixture(scope="module")
def offsets() -> np.ndarray:
    return np.cumsum([0, 1, 5, 2, 40, 3])


def test_users_bring_their_own_examples_up_to_the_group_size(offsets):
    sampler = users(offsets, 0.6, 3)
    for step in range(300):
        draw = sampler.draw(step)
        for user, positions, mask in zip(
            draw.units, draw.positions, draw.example_mask, strict=True
        ):
            own = positions[mask]
            assert len(np.unique(own)) == len(own) == min(3, offsets[user + 1] - offsets[user])
            assert ((offsets[user] <= own) & (own < offsets[user + 1])).all()


def test_users_are_included_with_the_stated_probability(offsets):
    sampler = users(offsets, 0.2, 2)
    counts = np.zeros(5)
    for step in range(STEPS):
        counts[sampler.draw(step).units] += 1
    z = (counts - STEPS * 0.2) / np.sqrt(STEPS * 0.16)
    assert stats.chi2.sf((z**2).sum(), 5) > ALARM


def test_examples_within_a_user_are_a_uniform_subset(offsets):
    """User 1 has 5 examples, of which 2 are taken: 10 subsets, equally likely."""
    sampler = users(offsets, 1.0, 2)
    counts: dict[tuple[int, ...], int] = {}
    for step in range(STEPS):
        chosen = tuple(np.sort(sampler.draw(step).positions[1]))
        counts[chosen] = counts.get(chosen, 0) + 1
    assert len(counts) == 10
    assert stats.chisquare(list(counts.values())).pvalue > ALARM


def test_an_empty_draw_has_the_right_shapes():
    sampler = users(np.array([0, 2, 5]), 1e-9, 4)
    draw = sampler.draw(0)
    assert draw.size == 0
    assert draw.positions.shape == (0, 4)


@pytest.mark.parametrize("law", [False, True])
def test_bounds_on_users_by_how_many_examples_they_hold(law):
    sizes_of_users = np.repeat([0, 1, 2, 3, 7, 50], [2, 300, 100, 40, 20, 5])
    offsets = np.r_[0, np.cumsum(sizes_of_users)]
    sizes, prob = (1, 2, 4, 8), 0.3
    if law:
        sampler = UserSampler(FixedSize(140), offsets, 8, KEY)
        # A law may draw users together: no less than all of a sort is sure.
        assert sampler.bucket_bounds(sizes) == (140, 100, 40, 25)
    else:
        sampler = users(offsets, prob, 8)
        bounds = sampler.bucket_bounds(sizes, 1e-3)
        for bound, held in zip(bounds, (302, 100, 40, 25)):
            assert stats.binom.sf(bound, held, prob) <= 1e-3 < stats.binom.sf(bound - 1, held, prob)
    bounds = sampler.bucket_bounds(sizes)
    for step in range(200):
        held = sampler.draw(step).example_mask.sum(axis=1)
        counts = np.bincount(np.searchsorted(sizes, held), minlength=4)
        assert (counts <= bounds).all()
