"""Noise by buffers: it is C^-1 Z, on every layout."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpfl_jax.accounting import events
from dpfl_jax.mechanisms import BLT, ULS, Population
from dpfl_jax.mesh import make_mesh, parameter_shardings, state_shardings
from dpfl_jax.noise import (
    Noise,
    buffered,
    buffered_column,
    buffered_strategy,
    multiplied,
    transformation,
)
from dpfl_jax.randomness import RootKey

pytestmark = pytest.mark.privacy
KEY = RootKey.from_seed(3)
BUFFERS = ((0.75, 0.25), (0.5, 0.125))  # exact in float32


def matrix(buffers, steps):
    """C, entry by entry."""
    made = np.eye(steps)
    for i in range(steps):
        for j in range(i):
            made[i, j] = sum(w * d ** (i - j - 1) for d, w in zip(*buffers, strict=True))
    return made


def key_of(step):
    """As a plan's."""
    return np.append(KEY.words("noise", step), np.uint32(step))


def released(transform, sums, params, place=lambda tree: tree):
    """What is released of the sums of each step, and the state after."""
    state = transform.init(params)
    state = state._replace(memory=place(state.memory))
    update, rows = jax.jit(transform.update), []
    for step, total in enumerate(sums):
        gradient, state = update(total, state, params, noise_key=key_of(step))
        rows.append(gradient)
    return rows, state


def test_the_column_is_that_of_its_matrix_upwards_and_never_grows():
    for buffers in (BUFFERS, ((1.0, 0.999), (0.25, 0.75)), ((0.0,), (1.0,)), ((0.9,), (0.0,))):
        for steps in (1, 2, 3, 400):
            column, made = buffered_column(buffers, steps), matrix(buffers, steps)
            np.testing.assert_allclose(column, made[:, 0], rtol=1e-12)
            assert (column >= made[:, 0]).all()
            assert (np.diff(column) <= 0).all()
    rows = np.random.default_rng(0).normal(size=(3, 20))
    np.testing.assert_allclose(multiplied(BUFFERS, rows), rows @ matrix(BUFFERS, 20).T)


@pytest.mark.parametrize("law", [pytest.param("exact", marks=pytest.mark.slow), "float"])
def test_noise_is_what_its_matrix_says(law):
    """x_t = g_t + (C^-1 Z)_t, with Z as independent noise would be drawn."""
    steps, rng = 8, np.random.default_rng(0)
    params = {"w": jnp.zeros((40, 3)), "frozen": None, "b": jnp.zeros(5, jnp.bfloat16)}
    sums = [
        {"w": jnp.float32(rng.normal(size=(40, 3))), "frozen": None, "b": jnp.ones(5)}
        for _ in range(steps)
    ]
    noise = Noise(2.0, 1.0, law, rows=4 * steps)
    rows, state = released(buffered(noise, BUFFERS, 4.0), sums, params)
    assert int(state.step) == steps
    assert state.memory["sums"]["w"].shape == (4, 40, 3)
    assert state.memory["released"]["w"].shape == (2, 40, 3)
    assert rows[0]["frozen"] is None
    assert rows[0]["b"].dtype == jnp.bfloat16
    nothing = {"w": jnp.zeros((40, 3)), "frozen": None, "b": jnp.zeros(5)}
    z = np.stack([noise.add(KEY.words("noise", t), nothing)["w"] for t in range(steps)])
    noises = np.tensordot(np.linalg.inv(matrix(BUFFERS, steps)), z, axes=1)
    wanted = (np.stack([g["w"] for g in sums]) + noises) / 4.0
    np.testing.assert_allclose(np.stack([r["w"] for r in rows]), wanted, atol=2e-5)


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
@pytest.mark.parametrize("law", ["exact", "float"])
def test_covariance_of_buffered_noise_on_eight_devices(law):
    """Parameters split eight ways: sample covariances over 120,000 coordinates are those of C^-1.

    Of the 21 entries none is more than 5 standard errors off, by luck 1e-5 of the time.
    """
    mesh, steps, shape = make_mesh(data=1, fsdp=4, tensor=2), 6, (200, 600)
    params = {"mlp": {"up": {"kernel": jnp.zeros(shape)}}}
    places = parameter_shardings(params, mesh)
    assert not places["mlp"]["up"]["kernel"].is_fully_replicated
    zero = jax.device_put(params, places)

    def place(memory):
        return jax.device_put(memory, state_shardings(params, memory, mesh))

    transform = buffered(Noise(1.5, 1.0, law, rows=4 * steps), BUFFERS, 2.0)
    rows, state = released(transform, [zero] * steps, zero, place)
    for name, numbers in (("sums", 4), ("released", 2)):
        kept = state.memory[name]["mlp"]["up"]["kernel"]
        assert kept.sharding.shard_shape(kept.shape) == (numbers, 50, 300)
    x = np.stack([np.asarray(r["mlp"]["up"]["kernel"]).ravel() for r in rows])
    inverse = np.linalg.inv(matrix(BUFFERS, steps))
    wanted = 0.75**2 * inverse @ inverse.T
    found = x @ x.T / x.shape[1]
    error = np.sqrt((np.outer(np.diag(wanted), np.diag(wanted)) + wanted**2) / x.shape[1])
    assert np.abs((found - wanted) / error).max() < 5
    # What is undone is white: C C^T is the covariance of the inverse.
    white = matrix(BUFFERS, steps) @ x
    assert np.abs(white @ white.T / x.shape[1] - 0.75**2 * np.eye(steps)).max() < 5 * error.max()
    # The numbers are the same on one device.
    alone, _ = released(transform, [params] * steps, params)
    np.testing.assert_array_equal(
        x, np.stack([np.asarray(r["mlp"]["up"]["kernel"]).ravel() for r in alone])
    )


class Recorded:
    """Noise that adds none, and keeps what it was to be added to."""

    def __init__(self):
        self.rows = []

    def add(self, key, tree, rest):
        del key
        self.rows.append(np.asarray(tree["w"], float) + np.asarray(rest["w"], float))
        return tree


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
        wanted = multiplied(buffers, np.array(sums).T).T
        np.testing.assert_allclose(noise.rows, wanted, rtol=1e-9)
        found.append((np.array(noise.rows), wanted))
    moved, wanted = (b - a for a, b in zip(*found, strict=True))
    assert np.linalg.norm(moved) == pytest.approx(np.linalg.norm(wanted), rel=1e-3)


def test_nothing_is_released_of_a_lost_state_of_buffers():
    """What would be released of a state begun anew shows past sums without noise."""
    transform, params = (
        buffered(Noise(2.0, 1.0, "float", rows=9), BUFFERS, 1.0), {"w": jnp.zeros(4)}
    )  # fmt: skip
    total, state = {"w": jnp.ones(4)}, transform.init(params)
    gradient, after = transform.update(total, state, params, noise_key=key_of(0))
    assert np.isfinite(gradient["w"]).all()
    for lost in (transform.init(params), after):  # begun anew at step 2; step 1 was left out
        gradient, broken = transform.update(total, lost, params, noise_key=key_of(2))
        assert np.isnan(gradient["w"]).all()
        gradient, _ = transform.update(total, broken, params, noise_key=key_of(int(broken.step)))
        assert np.isnan(gradient["w"]).all()  # and nothing after it


def test_the_grid_of_exact_noise_is_fine_enough_for_every_row():
    """A unit moves all rows from its first turn on: each is cut off, of all of the run's steps."""
    population, steps = Population(100, 200, 100), 50
    made = BLT(group_size=1, cohort_size=20, noise_multiplier=3.0).for_steps(population, steps)
    assert made.horizon == steps
    column = buffered_column(made.chosen, steps)
    for t in range(1, steps + 1):
        reach = np.linalg.norm(column) * math.sqrt(t / steps)
        assert 3.0 / made.event(population, t).noise_multiplier >= reach * (1 - 1e-12)
    assert not ULS(group_size=1, cohort_size=20).remembers
