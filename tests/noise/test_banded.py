"""Banded noise: one band is independent, and strategies and errors are those of jax-privacy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from noising import released

from dpfl_jax.accounting import events
from dpfl_jax.errors import BadInputError
from dpfl_jax.matrices import banded_strategy, prefix_error
from dpfl_jax.mechanisms import Population, bandmf, uls
from dpfl_jax.noise import Noise, banded

COLUMN = (0.75, 0.5, 0.4375)  # exact in float32


def test_one_band_is_independent_noise():
    total, params = {"w": jnp.arange(50.0)}, {"w": jnp.zeros(50)}
    common = {"group_size": 1, "cohort_size": 7, "clip_norm": 0.7}
    found = []
    for mechanism in (uls(**common), bandmf(bands=1, **common)):
        made = mechanism.calibrate(Population(50, 100, 50), 2, noise_multiplier=1.3)
        transform = made.noise_transform()
        (row,), state = released(transform, [total], params)
        assert state.memory == ()
        found.append(row["w"])
    np.testing.assert_array_equal(*found)


SETTINGS = [
    *((8, 2), (24, 4), (25, 4), (60, 8), (64, 16)),
    *((100, 3), (128, 32), (200, 10), (500, 8), (33, 33)),
]


@pytest.mark.nightly
@pytest.mark.slow("24", "25", "33", "500")
@pytest.mark.parametrize(("steps", "bands"), SETTINGS)
def test_errors_and_sensitivities_are_jax_privacy_s(steps, bands):
    """By its own functions, in float64: to 1e-6."""
    toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    column = banded_strategy(bands, steps)
    made = toeplitz.optimize_banded_toeplitz(steps, bands)  # with its defaults
    with jax.enable_x64(True):
        given = jnp.asarray(column, jnp.float64)
        error, best = (
            float(jnp.sqrt(toeplitz.loss(c, n=steps) / ((steps + 1) / 2)))
            for c in (given, jnp.asarray(made, jnp.float64))
        )
        norm = float(jnp.linalg.norm(given))
        once = float(jnp.sqrt(toeplitz.sensitivity_squared(given, n=steps)))
        every = float(jnp.sqrt(toeplitz.minsep_sensitivity_squared(given, min_sep=bands, n=steps)))
    assert prefix_error(column, steps) * norm == pytest.approx(error, rel=1e-6)
    assert error == pytest.approx(best, rel=1e-6)
    # Of a user with one turn, and (everybody in all their turns) of the worst of groups.
    turn = events.banded(1.0, 1.0, column, bands)
    assert 1 / turn.event.event.noise_multiplier == pytest.approx(once, rel=1e-6)
    assert _norm(events.banded(1.0, 1.0, column, steps)) == pytest.approx(every, rel=1e-6)


def _norm(event):
    """The sensitivity of an event without sampling: squares add up over turns."""
    if hasattr(event, "events"):
        return np.sqrt(sum(_norm(part) ** 2 for part in event.events))
    return np.sqrt(event.count) / event.event.event.noise_multiplier


@pytest.mark.parametrize(("steps", "bands"), [(2, 2), (25, 4), (1000, 16), (10_000, 32)])
def test_no_neighbour_of_a_strategy_is_better(steps, bands):
    """At sensitivity 1, to second order: in every direction of a band, and its norm is 1."""
    column = np.array(banded_strategy(bands, steps))
    assert np.linalg.norm(column) == pytest.approx(1, abs=1e-6)

    def error(change):
        moved = column + change
        return prefix_error(tuple(moved), steps) * np.linalg.norm(moved)

    for band in range(1, bands):
        change = np.eye(bands)[band] * 1e-3
        worst = min(error(change), error(-change))
        assert worst > error(0 * change)
    assert prefix_error((1.0,), steps) == 1.0


def test_fewer_steps_than_bands_are_one_sentence():
    with pytest.raises(BadInputError, match=r"bands is 5, .* at most the 4 steps"):
        banded_strategy(5, 4)


def test_the_rows_of_the_noise_are_the_bands():
    with pytest.raises(BadInputError, match=r"for 1 rows, but there are 3 bands"):
        banded(Noise(2.0, 1.0, "float"), COLUMN, 1.0)
