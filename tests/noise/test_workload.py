"""What an optimiser makes of noise: by dense matrices, by Optax itself, and noise made for it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from noising import banded_matrix, buffered_matrix, inverse_banded_matrix
from scipy import optimize

from dpfl_jax.accounting import events
from dpfl_jax.config.schema import OptimizerConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.matrices import (
    PREFIX_SUMS,
    Workload,
    banded_strategy,
    buffered_column,
    buffered_error,
    buffered_strategy,
    inverse_bound,
    inverse_error,
    inverse_strategy,
    prefix_error,
)
from dpfl_jax.noise import workload_of
from dpfl_jax.training.optimizers import make_optimizer

COLUMN, BUFFERS, TAKEN = (0.75, 0.5, 0.4375), ((0.75, 0.25), (0.5, 0.125)), (0.5, 0.25, 0.125)
RUNS = {  # schedule, warm-up as a part of the steps, options of optax.sgd
    "linear": ("linear", 0.0, {}),
    "cosine": ("cosine", 0.1, {}),
    "momentum": ("constant", 0.0, {"momentum": 0.9}),
    "both": ("cosine", 0.1, {"momentum": 0.9}),
    "nesterov": ("linear", 0.1, {"momentum": 0.8, "nesterov": True}),
}


def sgd(name, steps):
    schedule, warmup, options = RUNS[name]
    section = OptimizerConfig(
        name="sgd",
        learning_rate=0.3,
        schedule=schedule,
        warmup_steps=round(warmup * steps),
        options=options,
    )
    return make_optimizer(section, steps)


def matrix_of(optimizer, steps):
    """A, column by column: where parameters are after every step, of a gradient in one."""

    def way(gradients):
        def step(carry, gradient):
            at, state = carry
            update, state = optimizer.update(gradient[None], state, at)
            at = optax.apply_updates(at, update)
            return (at, state), at[0]

        start = jnp.zeros(1)
        return jax.lax.scan(step, (start, optimizer.init(start)), gradients)[1]

    return -np.asarray(jax.vmap(way)(jnp.eye(steps)), float).T


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("steps", [1, 2, 40])
def test_an_error_is_that_of_optax_by_dense_matrices(name, steps):
    optimizer = sgd(name, steps) if steps > 2 else sgd("momentum", steps)
    workload, own = workload_of(optimizer, steps), matrix_of(optimizer, steps)
    for error, given, matrix in (
        (prefix_error, COLUMN[:steps], banded_matrix),
        (buffered_error, BUFFERS, buffered_matrix),
        (inverse_error, TAKEN, inverse_banded_matrix),
    ):
        wanted = np.linalg.norm(own @ np.linalg.inv(matrix(given, steps))) / np.linalg.norm(own)
        assert error(given, steps, workload) == pytest.approx(wanted, rel=1e-5)


def test_what_is_found_of_an_optimiser_is_what_it_was_made_of():
    made = workload_of(optax.sgd(0.1, momentum=0.9), 30)
    np.testing.assert_allclose(made.memory, 0.9 ** np.arange(30), rtol=1e-5)
    assert made.rates is None
    made = workload_of(
        make_optimizer(OptimizerConfig(name="sgd", learning_rate=5.0, schedule="linear"), 30), 30
    )
    assert made.memory == (1.0,)
    np.testing.assert_allclose(made.rates, 1 - np.arange(30) / 30, rtol=1e-5)
    # Decay of weights is no part of it, and rates may be 0 at both ends.
    decayed = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.3))
    assert workload_of(decayed, 30) == PREFIX_SUMS
    ends = optax.sgd(lambda step: jnp.where((step < 3) | (step > 20), 0.0, 1.0), momentum=0.5)
    assert np.flatnonzero(workload_of(ends, 30).rates).tolist() == list(range(3, 21))


@pytest.mark.parametrize(
    "optimizer",
    [
        None,
        optax.sgd(0.1),
        optax.adam(optax.linear_schedule(0.1, 0.0, 50)),
        optax.adamw(0.1),
        optax.lion(0.1),
        optax.chain(optax.clip_by_global_norm(30.0), optax.sgd(0.1, momentum=0.9)),
        optax.MultiSteps(optax.sgd(0.1), 4),
    ],
)
def test_others_are_taken_for_prefix_sums(optimizer):
    assert workload_of(optimizer, 50) == PREFIX_SUMS


def test_what_cannot_be_tried_is_one_sentence():
    picky = optax.multi_transform({"a": optax.sgd(0.1)}, {"w": "a"})
    with pytest.raises(BadInputError, match="does not run on a single number"):
        workload_of(picky, 5)
    with pytest.raises(BadInputError, match="rates of 5 steps, but the plan has 6"):
        banded_strategy(2, 6, workload_of(sgd("linear", 5), 5))


def test_columns_of_a_search_are_all_of_short_runs_and_near_all_of_long_ones():
    """For steps of which one in eight is taken, to 1e-4; and the transpose is one."""
    rng = np.random.default_rng(0)
    for steps, rel in ((100, 1e-12), (1000, 2e-4)):
        workload = workload_of(sgd("both", steps), steps)
        columns, divided = workload.columns(steps), 0.9 ** np.arange(steps)
        dense = np.zeros((steps, steps))
        for i in range(steps):
            dense[i:, i] = np.cumsum(np.array(workload.rates)[i:] * divided[: steps - i])
        found = (columns.weights * columns.moved(divided) ** 2).sum()
        assert found == pytest.approx((dense**2).sum(), rel=rel)
        other, back = rng.normal(size=steps), rng.normal(size=columns.weights.shape)
        assert (back * columns.moved(other)).sum() == pytest.approx(
            (columns.pulled(back) * other).sum()
        )


@pytest.mark.parametrize("name", ["momentum", "both"])
def test_gradients_are_those_of_finite_differences(name, monkeypatch):
    """Of every search, at its start: of the loss that it hands to SciPy, to 1e-5."""
    workload, looked = workload_of(sgd(name, 60), 60), []

    def minimize(loss, start, **options):
        value, slope = loss(start)
        numeric = optimize.approx_fprime(start, lambda x: loss(x)[0], 1e-7)
        np.testing.assert_allclose(slope, numeric, rtol=1e-4, atol=1e-5)
        looked.append(value)
        return own(loss, start, **options)

    own = optimize.minimize
    monkeypatch.setattr(optimize, "minimize", minimize)
    for search in (banded_strategy, inverse_strategy, buffered_strategy):
        search.cache_clear()
    banded_strategy(5, 60, workload)
    inverse_strategy(4, 60, 10, workload)
    buffered_strategy(2, 60, 10, workload)
    assert len(looked) >= 7


def sensitivity(column, separation, steps):
    """In root of turns: 1 for independent noise."""
    moved = 1 / events.toeplitz(1.0, column, separation, steps).noise_multiplier
    return moved / math.sqrt(-(-steps // separation))


def qualities(steps, workload):
    """Noise in a workload at one epsilon: what is made for prefix sums, and what for it."""
    separation, found = max(2, steps // 20), {}
    for kind, search, column, error in (
        ("blt", buffered_strategy, buffered_column, buffered_error),
        ("banded_inverse", inverse_strategy, inverse_bound, inverse_error),
    ):
        count = 2 if kind == "blt" else 3
        both = [search(count, steps, separation, w) for w in (PREFIX_SUMS, workload)]
        found[kind] = [
            error(x, steps, workload) * sensitivity(column(x, steps), separation, steps)
            for x in both
        ]
    for bands in (4, 16):
        both = [banded_strategy(bands, steps, w) for w in (PREFIX_SUMS, workload)]
        found[f"bandmf, {bands}"] = [
            prefix_error(c, steps, workload) * np.linalg.norm(c) for c in both
        ]
    return found


# Least gains where there is momentum, in per cent of the noise: of BLT, of banded inverse, of 4 and
# 16 bands. A schedule alone gains less than 1 %.
GAINS = {
    (100, "momentum"): (4, 4, 2, 9),
    (100, "both"): (5, 4, 2, 11),
    (1000, "momentum"): (7, 11, 0.6, 3),
    (1000, "both"): (8, 12, 0.6, 3),
}


@pytest.mark.nightly("1000")
@pytest.mark.parametrize("steps", [100, 1000])
@pytest.mark.parametrize("name", RUNS)
def test_noise_made_for_an_optimiser_is_never_worse_there_and_gains_as_said(name, steps):
    found = qualities(steps, workload_of(sgd(name, steps), steps))
    for kind, (plain, own) in found.items():
        assert own <= plain * (1 + 1e-6), kind
        if not RUNS[name][2]:
            assert own > 0.99 * plain, kind
    for kind, least in zip(found, GAINS.get((steps, name), ()), strict=False):
        plain, own = found[kind]
        assert 1 - own / plain > least / 100, kind


@pytest.mark.nightly
@pytest.mark.parametrize(("steps", "bands"), [(24, 4), (100, 3), (200, 10), (500, 8)])
def test_errors_of_momentum_are_jax_privacy_s(steps, bands):
    """By its own function, which knows workloads with one rate, to 1e-6; and none is better."""
    toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    memory = 0.9 ** np.arange(steps)
    workload = Workload(tuple(memory.tolist()))
    column = banded_strategy(bands, steps, workload)
    with jax.enable_x64(True):
        sums = jnp.cumsum(jnp.asarray(memory))

        def theirs(given):
            error = toeplitz.per_query_error(
                strategy_coef=given, n=steps, workload_coef=sums, skip_checks=True
            ).mean()
            return jnp.log(error * (given @ given)) / 2

        given = jnp.asarray(column, jnp.float64)
        independent = float(theirs(jnp.ones(1)))
        ours, own = float(theirs(given)), jax.jit(jax.value_and_grad(theirs))
        best = optimize.minimize(
            lambda x: [np.asarray(y, float) for y in own(jnp.asarray(x))],
            np.r_[1.0, 0.5 ** np.arange(1, bands)], jac=True, method="BFGS",
        )  # fmt: skip
    wanted = math.exp(ours - independent)
    found = prefix_error(column, steps, workload) * float(np.linalg.norm(np.array(column)))
    assert found == pytest.approx(wanted, rel=1e-6)
    assert ours <= best.fun + 1e-6


@pytest.mark.parametrize("name", ["momentum", "both"])
def test_columns_made_for_an_optimiser_are_such_as_turns_are_accounted_by(name):
    """Numbers >= 0 that never grow (``events.toeplitz`` refuses others)."""
    for steps, separation in ((60, 3), (200, 20)):
        workload = workload_of(sgd(name, steps), steps)
        for column in (
            buffered_column(buffered_strategy(2, steps, separation, workload), steps),
            inverse_bound(inverse_strategy(4, steps, separation, workload), steps),
        ):
            assert (column >= 0).all()
            assert (np.diff(column) <= 0).all()
        taken = inverse_strategy(4, steps, separation, workload)
        assert all(f >= 0 for f in taken)
        assert math.fsum(taken) < 1
