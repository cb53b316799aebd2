"""The filter: what records spend, and what one record can move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpfl_jax.accounting.accountant import epsilon
from dpfl_jax.accounting.events import gaussian
from dpfl_jax.errors import BadInputError
from dpfl_jax.noise import GaussianNoise
from reproductions.rpdp._renyi_filter import (
    epsilon_of_norms,
    filtered_descent,
    norms_of_epsilon,
)
from tests.federation.fed_zoo import loss_fn, make_params


def test_published_budgets_of_norms():
    """MNIST: sigma 5, B of 4, 20 and 100 full steps cost 2.0, 4.7, 11.8 by Mironov's conversion;
    the tighter conversion is below, and no Renyi bound is below the exact Gaussian."""
    found = epsilon_of_norms(np.array([4.0, 20.0, 100.0]), 5.0, 1e-5)
    assert np.all(found < [1.9994, 4.7026, 11.7565])
    assert np.all(found > 0.8 * np.array([1.9994, 4.7026, 11.7565]))
    for cost, steps in zip(found, (4, 20, 100), strict=True):
        assert cost >= epsilon(gaussian(5.0, steps), 1e-5)


def test_inversion_is_the_inverse():
    budgets = np.array([0.05, 0.3, 1.0, 5.0, 12.0])
    allowed = norms_of_epsilon(budgets, 5.0, 1e-5)
    assert np.all(np.diff(allowed) > 0)
    assert epsilon_of_norms(allowed, 5.0, 1e-5) == pytest.approx(budgets, rel=1e-9)
    assert np.all(epsilon_of_norms(allowed, 5.0, 1e-5) <= budgets)
    assert norms_of_epsilon(np.array([1e-4]), 5.0, 1e-12)[0] == 0.0


def records(n, scale, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": (scale * rng.normal(size=(n, 5))).astype(np.float32),
        "y": (scale * rng.normal(size=(n, 3))).astype(np.float32),
    }


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e6])
def test_no_record_spends_more_than_its_allowance(scale):
    allowed = np.array([0.0, 0.3, 1.0, 2.5, 7.0, 1e9] * 4)
    data = records(24, scale)
    data["y"][5] = np.nan
    options = {"sigma": 2.0, "clip_norm": 0.5, "learning_rate": 0.05, "divisor": 24.0}
    _, spent = filtered_descent(
        loss_fn, make_params(), data, allowed, steps=12, key=jax.random.key(0), **options
    )
    spent = np.asarray(spent, np.float64)
    assert np.all(spent <= allowed)
    assert spent[5] == 0.0  # a gradient that is not finite takes no part
    assert np.all(spent <= 12 * (1 + 1e-5))
    if scale == 1.0:  # clipped at every step: small budgets are used up
        assert spent[1] == pytest.approx(0.3, rel=1e-4)
        assert spent[0] == 0.0


@pytest.mark.slow
def test_one_record_moves_a_step_by_what_it_pays():
    data, allowed = records(8, 3.0), np.full(8, 0.36)
    options = {"sigma": 0.0, "clip_norm": 0.5, "learning_rate": 1.0, "steps": 1, "divisor": 1.0}
    options["key"] = jax.random.key(0)
    params = make_params()
    whole, spent = filtered_descent(loss_fn, params, data, allowed, **options)
    fewer = {k: v[1:] for k, v in data.items()}
    rest, _ = filtered_descent(loss_fn, params, fewer, allowed[1:], **options)
    moved = sum(float(jnp.sum((a - b) ** 2)) for a, b in zip(*map(jax.tree.leaves, (whole, rest))))
    assert moved == pytest.approx(0.25 * float(spent[0]), rel=1e-3)
    assert moved <= 0.25 * 0.36


def test_noise_is_that_of_the_one_implementation():
    """Where no record may pay, a step is noise alone: its tails are tested with the noise."""
    options = {"sigma": 2.0, "clip_norm": 0.5, "learning_rate": 1.0, "steps": 1, "divisor": 4.0}
    key, params = jax.random.key(7), make_params()
    moved, spent = filtered_descent(
        loss_fn, params, records(3, 1.0), np.zeros(3), key=key, **options
    )
    assert np.all(np.asarray(spent) == 0)
    noise = GaussianNoise(2.0 * 0.5 / 4.0).sample(jax.random.split(key, 1)[0], params)
    for a, b, z in zip(*map(jax.tree.leaves, (params, moved, noise)), strict=True):
        np.testing.assert_allclose(a - b, z, atol=1e-6)


def test_bad_input_is_one_sentence():
    options = {"sigma": 1.0, "clip_norm": 1.0, "learning_rate": 1.0, "steps": 1}
    options["key"] = jax.random.key(0)
    with pytest.raises(BadInputError, match="divisor"):
        filtered_descent(
            loss_fn, make_params(), records(3, 1.0), np.ones(3), divisor=0.0, **options
        )
    with pytest.raises(BadInputError, match="give one each"):
        filtered_descent(
            loss_fn, make_params(), records(3, 1.0), np.ones(2), divisor=3.0, **options
        )
