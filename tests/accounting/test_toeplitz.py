"""Turns without sampling: the sensitivity of a Toeplitz strategy, against all that users may do."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_jax.accounting import epsilon, events
from dpfl_jax.errors import BadInputError


def norm_of(column, separation, steps):
    return 1 / events.toeplitz(1.0, column, separation, steps).noise_multiplier


def matrix(column, steps):
    column = np.r_[column, np.zeros(steps)][:steps]
    return np.array([[column[i - j] if i >= j else 0 for j in range(steps)] for i in range(steps)])


def patterns(steps, separation):
    """All sets of steps of which no two are closer than that."""
    for size in range(1, steps + 1):
        for times in itertools.combinations(range(steps), size):
            if all(b - a >= separation for a, b in itertools.pairwise(times)):
                yield list(times)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    falls=st.lists(st.floats(0, 1), min_size=1, max_size=8),
    separation=st.integers(1, 5), steps=st.integers(1, 9),
)  # fmt: skip
def test_no_pattern_that_is_allowed_moves_more(falls, separation, steps):
    """Any set of turns, and any vectors of norm 1 at them: the worst is early, often and alike."""
    column = np.cumprod(np.r_[1.0, falls])
    found, made = norm_of(column, separation, steps), matrix(column, steps)
    rng, worst = np.random.default_rng(0), 0.0
    for times in patterns(steps, separation):
        worst = max(worst, float(np.linalg.norm(made[:, times].sum(axis=1))))
        vectors = rng.normal(size=(len(times), 3))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        assert np.linalg.norm(made[:, times] @ vectors) <= found
    assert worst <= found <= worst * (1 + 1e-13)


def test_the_norm_is_rounded_upwards():
    """Against exact arithmetic, of numbers that floats hold."""
    rng = np.random.default_rng(1)
    for separation, steps in ((1, 40), (3, 50), (7, 200), (50, 50)):
        column = np.sort(rng.random(steps))[::-1]
        exact = [Fraction(float(c)) for c in column]
        moved = [sum(exact[t - j] for j in range(0, t + 1, separation)) for t in range(steps)]
        squared = sum(m * m for m in moved)
        found = Fraction(norm_of(column, separation, steps))
        # A multiplier that is rounded up by half a unit is allowed for.
        assert squared <= found**2 <= squared * Fraction(1 + 1e-12)


def test_epsilon_is_that_of_one_gaussian_and_only_grows_with_steps():
    column = [0.5**i for i in range(30)]
    before = 0.0
    for steps in (1, 2, 5, 6, 17, 30, 40):
        moved = [sum((column + [0] * 50)[t - j] for j in range(0, t + 1, 5)) for t in range(steps)]
        wanted = epsilon(events.gaussian(3.0 / math.hypot(*moved), 1), 1e-5)
        found = epsilon(events.toeplitz(3.0, column, 5, steps), 1e-5)
        assert found == pytest.approx(wanted, rel=1e-9)
        assert found >= before
        before = found
    assert epsilon(events.toeplitz(3.0, column, 5, 0), 1e-5) == 0.0
    assert math.isinf(epsilon(events.toeplitz(0.0, column, 5, 7), 1e-5))


def test_the_identity_is_as_many_gaussians_as_turns():
    for steps, separation in ((12, 4), (13, 4), (3, 7), (5, 1)):
        turns = -(-steps // separation)
        found = epsilon(events.toeplitz(2.0, [1.0], separation, steps), 1e-6)
        assert found == pytest.approx(epsilon(events.gaussian(2.0, turns), 1e-6), rel=1e-9)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([], "the first above 0"),
        ([0.0, 0.0], "the first above 0"),
        ([1.0, math.nan], "finite"),
        ([1.0, 0.5, -0.1], "0 or more"),
        ([1.0, 0.5, 0.6], "do not increase"),
        ([[1.0]], "finite"),
    ],
)
def test_columns_that_are_not_bounded_so_are_refused(column, message):
    with pytest.raises(BadInputError, match=message):
        events.toeplitz(1.0, column, 2, 5)


def test_separations_and_steps_are_whole_numbers():
    with pytest.raises(BadInputError, match="separation is 0"):
        events.toeplitz(1.0, [1.0], 0, 5)
    with pytest.raises(BadInputError, match="number of steps is -1"):
        events.toeplitz(1.0, [1.0], 1, -1)
