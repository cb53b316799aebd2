"""Correlated noise: it is C^-1 Z on every layout, of the strategies and errors of jax-privacy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpfl_jax.accounting import events
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import ULS, BandMF
from dpfl_jax.mesh import make_mesh, parameter_shardings, state_shardings
from dpfl_jax.noise import Noise, banded, prefix_error, strategy
from dpfl_jax.randomness import RootKey

pytestmark = pytest.mark.privacy
KEY = RootKey.from_seed(3)
COLUMN = (0.75, 0.5, 0.4375)  # exact in float32


def matrix(column, steps):
    return sum(np.diag(np.full(steps - i, c), -i) for i, c in enumerate(column))


def key_of(step):
    """As a plan's."""
    return np.append(KEY.words("noise", step), np.uint32(step))


def released(transform, sums, params, place=lambda tree: tree):
    """What is released of the sums of each step, and the state after."""
    state = transform.init(params)
    state = state._replace(memory=place(state.memory))
    update, rows = jax.jit(transform.update), []
    for step, total in enumerate(sums):
        key = key_of(step) if state.memory else KEY.words("noise", step)
        gradient, state = update(total, state, params, noise_key=key)
        rows.append(gradient)
    return rows, state


@pytest.mark.parametrize("law", [pytest.param("exact", marks=pytest.mark.slow), "float"])
def test_noise_is_what_its_matrix_says(law):
    """x_t = g_t + (C^-1 Z)_t, with Z as independent noise would be drawn."""
    steps, rng = 8, np.random.default_rng(0)
    params = {"w": jnp.zeros((40, 3)), "frozen": None, "b": jnp.zeros(5, jnp.bfloat16)}
    sums = [
        {"w": jnp.float32(rng.normal(size=(40, 3))), "frozen": None, "b": jnp.ones(5)}
        for _ in range(steps)
    ]
    noise = Noise(2.0, 1.0, law, rows=3)
    rows, state = released(banded(noise, COLUMN, 4.0), sums, params)
    assert int(state.step) == steps
    assert rows[0]["frozen"] is None
    assert rows[0]["b"].dtype == jnp.bfloat16
    nothing = {"w": jnp.zeros((40, 3)), "frozen": None, "b": jnp.zeros(5)}
    z = np.stack([noise.add(KEY.words("noise", t), nothing)["w"] for t in range(steps)])
    noises = np.tensordot(np.linalg.inv(matrix(COLUMN, steps)), z, axes=1)
    wanted = (np.stack([g["w"] for g in sums]) + noises) / 4.0
    np.testing.assert_allclose(np.stack([r["w"] for r in rows]), wanted, atol=2e-5)


def test_one_band_is_independent_noise():
    total, params = {"w": jnp.arange(50.0)}, {"w": jnp.zeros(50)}
    common = {"group_size": 1, "cohort_size": 7, "noise_multiplier": 1.3, "clip_norm": 0.7}
    found = []
    for mechanism in (ULS(**common), BandMF(bands=1, **common)):
        transform = mechanism.noise_transform()
        (row,), state = released(transform, [total], params)
        assert state.memory == ()
        found.append(row["w"])
    np.testing.assert_array_equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("law", ["exact", "float"])
def test_covariance_on_eight_devices(law):
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

    noise = Noise(1.5, 1.0, law, rows=3)
    transform = banded(noise, COLUMN, 2.0)
    rows, state = released(transform, [zero] * steps, zero, place)
    kept = state.memory["sums"]["mlp"]["up"]["kernel"]
    assert kept.sharding.shard_shape(kept.shape) == (2, 50, 300)
    x = np.stack([np.asarray(r["mlp"]["up"]["kernel"]).ravel() for r in rows])
    inverse = np.linalg.inv(matrix(COLUMN, steps))
    wanted = 0.75**2 * inverse @ inverse.T
    found = x @ x.T / x.shape[1]
    error = np.sqrt((np.outer(np.diag(wanted), np.diag(wanted)) + wanted**2) / x.shape[1])
    assert np.abs((found - wanted) / error).max() < 5
    # The numbers are the same on one device.
    alone, _ = released(transform, [params] * steps, params)
    np.testing.assert_array_equal(
        x, np.stack([np.asarray(r["mlp"]["up"]["kernel"]).ravel() for r in alone])
    )


SETTINGS = [
    *((8, 2), (24, 4), (25, 4), (60, 8), (64, 16)),
    *((100, 3), (128, 32), (200, 10), (500, 8), (33, 33)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "bands"), SETTINGS)
def test_errors_and_sensitivities_are_jax_privacy_s(steps, bands):
    """By its own functions, in float64: to 1e-6."""
    toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    column = strategy(bands, steps)
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
    column = np.array(strategy(bands, steps))
    assert np.linalg.norm(column) == pytest.approx(1, abs=1e-6)

    def error(change):
        moved = column + change
        return prefix_error(tuple(moved), steps) * np.linalg.norm(moved)

    for band in range(1, bands):
        change = np.eye(bands)[band] * 1e-3
        worst = min(error(change), error(-change))
        assert worst > error(0 * change)


def test_fewer_steps_than_bands_are_one_sentence():
    with pytest.raises(BadInputError, match=r"bands is 5, .* at most the 4 steps"):
        strategy(5, 4)


def test_an_error_of_prefix_sums_is_that_of_their_matrix():
    sums = np.tril(np.ones((20, 20))) @ np.linalg.inv(matrix(COLUMN, 20))
    wanted = np.sqrt((sums**2).sum(axis=1).mean() / 10.5)
    assert prefix_error(COLUMN, 20) == pytest.approx(wanted)
    assert prefix_error((1.0,), 20) == 1.0


def test_nothing_is_released_of_a_lost_state_or_after_a_step_left_out():
    """What would be released of a state begun anew shows past sums without noise."""
    transform, params = banded(Noise(2.0, 1.0, "float", rows=3), COLUMN, 1.0), {"w": jnp.zeros(4)}
    total, state = {"w": jnp.ones(4)}, transform.init(params)
    gradient, after = transform.update(total, state, params, noise_key=key_of(0))
    assert np.isfinite(gradient["w"]).all()
    for lost in (transform.init(params), after):  # begun anew at step 2; step 1 was left out
        gradient, broken = transform.update(total, lost, params, noise_key=key_of(2))
        assert np.isnan(gradient["w"]).all()
        gradient, _ = transform.update(total, broken, params, noise_key=key_of(int(broken.step)))
        assert np.isnan(gradient["w"]).all()  # and nothing after it


def test_the_rows_of_the_noise_are_the_bands():
    with pytest.raises(BadInputError, match=r"for 1 rows, but there are 3 bands"):
        banded(Noise(2.0, 1.0, "float"), COLUMN, 1.0)
