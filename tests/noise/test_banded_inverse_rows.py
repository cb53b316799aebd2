"""Noise whose matrix has few bands: its sensitivity, its search, its rounding among large sums."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from noising import Recorded, Silent, inverse_banded_matrix, key_of

from dpfl_jax.accounting import events
from dpfl_jax.errors import BadInputError
from dpfl_jax.matrices import (
    buffered_column,
    buffered_error,
    buffered_strategy,
    inverse_bound,
    inverse_error,
    inverse_strategy,
)
from dpfl_jax.noise import banded_inverse

SETTINGS = [  # steps, separation, bands
    *((8, 8, 2), (24, 4, 3), (25, 10, 4), (60, 20, 3), (100, 7, 8)),
    *((128, 128, 3), (200, 200, 5), (300, 40, 16), (500, 50, 3), (33, 33, 2)),
]
MOST = {(0.5,): True, (0.5, 0.25, 0.125): True, (0.3, 0.6): False, (0.0, 0.0, 1.0): False}


def bisr(bands):
    """Of (1 - x)^(1/2), whose series is -1/2, -1/8, -1/16, -5/128 (Kalinin et al. 2025)."""
    return tuple((0.5, 0.125, 0.0625, 5 / 128, 7 / 256)[: bands - 1])


def sensitivity(column, separation, steps):
    return 1 / events.toeplitz(1.0, column, separation, steps).noise_multiplier


@pytest.mark.parametrize(("taken", "falls"), MOST.items())
def test_the_column_is_that_of_its_matrix_upwards_and_never_grows(taken, falls):
    for steps in (1, 2, 3, 60):
        column, own = (
            inverse_bound(taken, steps),
            inverse_banded_matrix(taken, steps)[:, 0],
        )
        assert (column >= own).all()
        assert (np.diff(column) <= 0).all()
        assert column[0] == 1.0
        if falls:
            np.testing.assert_allclose(column, own, rtol=1e-12)
        else:  # the largest of what follows
            wanted = [own[t:].max() for t in range(steps)]
            np.testing.assert_allclose(column, wanted, rtol=1e-12)


@pytest.mark.parametrize(("taken", "falls"), MOST.items())
@pytest.mark.parametrize(("steps", "separation"), [(7, 2), (9, 3), (6, 6)])
def test_nobody_moves_rows_further_than_accounted(taken, falls, steps, separation):
    """All ways to take part with such gaps, whichever way each time: by the matrix itself."""
    matrix, most = inverse_banded_matrix(taken, steps), 0.0
    for present in itertools.product((0, 1, -1), repeat=steps):
        if (np.diff(np.flatnonzero(present)) >= separation).all():
            most = max(most, np.linalg.norm(matrix @ present))
    accounted = sensitivity(inverse_bound(taken, steps), separation, steps)
    assert most <= accounted
    if falls:
        assert most == pytest.approx(accounted, rel=1e-12)
    else:
        assert accounted < 1.8 * most


@pytest.mark.nightly
@pytest.mark.slow("8", "50")
@pytest.mark.parametrize(("steps", "separation", "bands"), SETTINGS)
def test_errors_and_sensitivities_are_jax_privacy_s(steps, separation, bands):
    """By its own functions, in float64, to 1e-6: of our bands, from the matrix of its inverse."""
    toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    taken = inverse_strategy(bands, steps, separation)
    with jax.enable_x64(True):
        noising = toeplitz.pad_coefs_to_n(jnp.array([1.0, *(-f for f in taken)]), steps)
        own = toeplitz.inverse_coef(noising, n=steps)
        error = toeplitz.per_query_error(noising_coef=noising, n=steps).mean()
        once = float(jnp.sqrt(toeplitz.sensitivity_squared(own, n=steps)))
        falls = bool((jnp.diff(own) <= 0).all())
        moved = toeplitz.minsep_sensitivity_squared(
            own, min_sep=separation, n=steps, skip_checks=not falls
        )
    wanted = math.sqrt(float(error) / ((steps + 1) / 2))
    assert inverse_error(taken, steps) == pytest.approx(wanted, rel=1e-6)
    column = inverse_bound(taken, steps)
    for theirs, apart in ((once, steps), (math.sqrt(float(moved)), separation)):
        found = sensitivity(column, apart, steps)
        if falls:
            assert found == pytest.approx(theirs, rel=1e-6)
        else:
            assert theirs * (1 - 1e-6) <= found < 1.08 * theirs


def quality(taken, steps, separation):
    """Root mean square of the noise in prefix sums at one epsilon, over independent noise's."""
    moved = sensitivity(inverse_bound(taken, steps), separation, steps)
    return inverse_error(taken, steps) * moved / math.sqrt(-(-steps // separation))


@pytest.mark.parametrize(
    ("steps", "separation"), [(2, 1), (2, 2), (50, 2), (200, 10), (1000, 50), (500, 500)]
)
def test_bands_that_are_chosen_beat_those_of_a_square_root_and_no_buffers(steps, separation):
    """And what they take back adds up to less than 1, so that rows stay finite."""
    buffers = buffered_strategy(2, steps, separation)
    two = buffered_error(buffers, steps) * sensitivity(
        buffered_column(buffers, steps), separation, steps
    )
    two /= math.sqrt(-(-steps // separation))
    for bands in (2, 3, 6):
        taken = inverse_strategy(bands, steps, separation)
        assert len(taken) == bands - 1
        assert all(f >= 0 and f == np.float32(f) for f in taken)
        assert math.fsum(taken) < 1
        found = quality(taken, steps, separation)
        assert found <= quality(bisr(bands), steps, separation) * (1 + 1e-3)
        # As much memory is 2 buffers: they are no worse, and better where users pause long.
        if bands == 3:
            assert found > (0.998 if separation <= 10 else 1.06) * two


def test_a_search_is_at_a_least_error_of_its_bands():
    """No step of a hundredth in any of them, or in what they add up to, is better."""
    steps, separation = 60, 6
    taken = np.array(inverse_strategy(4, steps, separation))
    found = quality(tuple(taken), steps, separation)
    for direction in (*np.eye(3), taken):
        for way in (-0.01, 0.01):
            other = tuple(np.maximum(taken + way * direction, 0))
            assert found <= quality(other, steps, separation) * (1 + 1e-9)


@pytest.mark.nightly
def test_what_a_unit_adds_is_moved_as_accounted_among_sums_that_are_far_larger():
    """6 million units that all push one way for 400 steps; one more in every 50th step, or not."""
    steps, taken = 400, inverse_strategy(4, 2000, 50)
    rng = np.random.default_rng(0)
    way, own = (x / np.linalg.norm(x) for x in rng.normal(size=(2, 500)))
    found = []
    for extra in (0.0, 1.0):
        noise = Recorded()
        transform = banded_inverse(noise, taken, 1.0)
        state, sums = transform.init({"w": jnp.zeros(500)}), []
        for step in range(steps):
            total = np.float32(1e5 * way) + np.float32(extra * (step % 50 == 0) * 2**-6 * own)
            sums.append(total.astype(float))
            _, state = transform.update({"w": jnp.asarray(total)}, state, noise_key=key_of(step))
        wanted = inverse_banded_matrix(taken, steps) @ np.array(sums)
        np.testing.assert_allclose(noise.rows, wanted, rtol=1e-12)
        found.append((np.array(noise.rows), wanted))
    moved, wanted = (b - a for a, b in zip(*found, strict=True))
    assert np.linalg.norm(moved) == pytest.approx(np.linalg.norm(wanted), rel=1e-3)


@pytest.mark.slow
def test_rows_with_long_memory_move_as_accounted_among_far_larger_sums():
    """A million units push one way for 5,000 steps; all remember the first, of one unit more."""
    steps, taken = 5000, (0.3, float(np.nextafter(np.float32(0.7), np.float32(0))))
    transform, rng = banded_inverse(Silent(), taken, 1.0), np.random.default_rng(1)
    way, own = np.abs(rng.normal(size=128)), rng.normal(size=128)
    others = 1e6 * way / np.linalg.norm(way)
    without = jnp.float32(others)
    with_one = jnp.float32(others + own / np.linalg.norm(own))

    def moved(states, step):
        key = jnp.zeros(11, jnp.uint32).at[8].set(step.astype(jnp.uint32))
        totals = without, jnp.where(step == 0, with_one, without)
        states = tuple(
            transform.update({"w": total}, state, noise_key=key)[1]
            for total, state in zip(totals, states, strict=True)
        )
        (a, b), (c, d) = ((x[0], x[2]) for x in (s.memory["sums"]["w"] for s in states))
        return states, jnp.linalg.norm((c - a) + (d - b))

    start = jax.tree.map(jnp.asarray, transform.init({"w": jnp.zeros(128)}))
    rows = jax.jit(lambda s: jax.lax.scan(moved, (s, s), jnp.arange(steps))[1])(start)
    accounted = np.linalg.norm(inverse_bound(taken, steps))
    # The first turn is a float32 sum of a million: .2 % of its rounding is nobody's memory.
    assert np.linalg.norm(rows) <= 1.003 * accounted


def test_too_many_bands_are_one_sentence():
    for wrong in (1, 65):
        with pytest.raises(BadInputError, match=f"bands is {wrong}, .* at least 2 and at most 64"):
            inverse_strategy(wrong, 100, 10)
