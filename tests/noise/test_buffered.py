"""Noise by buffers: its matrix, its rounding among large sums, and no buffers are no memory."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from noising import Recorded, buffered_matrix, key_of, released

from dpfl_jax.accounting import events
from dpfl_jax.matrices import buffered_column, buffered_strategy
from dpfl_jax.mechanisms import Population, blt
from dpfl_jax.noise import Noise, buffered, transformation

BUFFERS = ((0.75, 0.25), (0.5, 0.125))  # exact in float32


def test_the_column_is_that_of_its_matrix_upwards_and_never_grows():
    for buffers in (BUFFERS, ((1.0, 0.999), (0.25, 0.75)), ((0.0,), (1.0,)), ((0.9,), (0.0,))):
        for steps in (1, 2, 3, 400):
            column, made = buffered_column(buffers, steps), buffered_matrix(buffers, steps)
            np.testing.assert_allclose(column, made[:, 0], rtol=1e-12)
            assert (column >= made[:, 0]).all()
            assert (np.diff(column) <= 0).all()


@pytest.mark.parametrize("buffers", [((0.0,), (0.0,)), ((0.9, 0.5), (0.0, 0.0))])
def test_buffers_that_are_not_read_are_independent_noise(buffers):
    """Bit for bit, of one step after the other; and its event is that of independent Gaussians."""
    rng, params = np.random.default_rng(1), {"w": jnp.zeros(50)}
    sums = [{"w": jnp.float32(rng.normal(size=50))} for _ in range(4)]
    noise = Noise(1.3, 0.7, "float", rows=16)
    rows, _ = released(buffered(noise, buffers, 7.0), sums, params)
    alone, _ = released(transformation(noise, 7.0), sums, params)
    np.testing.assert_array_equal([r["w"] for r in rows], [r["w"] for r in alone])
    event = events.toeplitz(1.3, buffered_column(buffers, 12), 4, 12)
    assert event.noise_multiplier == pytest.approx(1.3 / math.sqrt(3), rel=1e-12)


@pytest.mark.slow
def test_what_a_unit_adds_is_moved_as_accounted_among_sums_that_are_far_larger():
    """6 million units that all push one way for 400 steps; one more in every 50th step, or not.

    In float32 alone rows move 146 times as far: what is forgotten slowly is never forgotten.
    """
    steps, buffers = 400, buffered_strategy(2, 2000, 100)
    rng = np.random.default_rng(0)
    way, own = (x / np.linalg.norm(x) for x in rng.normal(size=(2, 500)))
    found = []
    for extra in (0.0, 1.0):
        noise = Recorded()
        transform = buffered(noise, buffers, 1.0)
        state, sums = transform.init({"w": jnp.zeros(500)}), []
        for step in range(steps):
            total = np.float32(1e5 * way) + np.float32(extra * (step % 50 == 0) * 2**-6 * own)
            sums.append(total.astype(float))
            _, state = transform.update({"w": jnp.asarray(total)}, state, noise_key=key_of(step))
        wanted = buffered_matrix(buffers, steps) @ np.array(sums)
        np.testing.assert_allclose(noise.rows, wanted, rtol=1e-9)
        found.append((np.array(noise.rows), wanted))
    moved, wanted = (b - a for a, b in zip(*found, strict=True))
    assert np.linalg.norm(moved) == pytest.approx(np.linalg.norm(wanted), rel=1e-3)


def test_the_grid_of_exact_noise_is_fine_enough_for_every_row():
    """A unit moves all rows from its first turn on: each is cut off, of all of the run's steps."""
    population, steps = Population(100, 200, 100), 50
    made = blt(group_size=1, cohort_size=20).calibrate(population, steps, noise_multiplier=3.0)
    assert made.mechanism.noise.horizon == steps
    column = buffered_column(made.mechanism.noise.chosen, steps)
    for t in range(1, steps + 1):
        reach = np.linalg.norm(column) * math.sqrt(t / steps)
        assert 3.0 / made.event(t).noise_multiplier >= reach * (1 - 1e-12)
