"""The real step: its sensitivity is measured, on one device and on eight."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfl_jax.mechanisms import els, uls
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.state import init_state
from dpfl_jax.training.central import clipped_sum_over_microbatches, make_train_step
from tests.noised import noised

CLIP = 0.7
DIM = 5


def loss_fn(params, example):
    """A small non-linear model with two leaves."""
    hidden = jnp.tanh(params["w"] @ example["x"])
    return jnp.sum((hidden + params["b"] - example["y"]) ** 2)


def make_params():
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(size=(3, DIM)), jnp.float32),
        "b": jnp.zeros(3, jnp.float32),
    }


def examples(rng, n, scale=1.0):
    return {
        "x": rng.normal(size=(n, DIM)).astype(np.float32) * scale,
        "y": rng.normal(size=(n, 3)).astype(np.float32) * scale,
    }


def meshes():
    return {1: data_parallel_mesh(jax.devices()[:1]), 8: data_parallel_mesh()}


def pack(units, n, capacity, row):
    """Pads units [n, ...] to [capacity, row, ...]."""

    def one(leaf):
        full = np.zeros((capacity * row, *leaf.shape[1:]), leaf.dtype)
        full[:n] = leaf
        return full.reshape(capacity, row, *leaf.shape[1:])

    mask = np.zeros(capacity * row, bool)
    mask[:n] = True
    return jax.tree.map(one, units), mask.reshape(capacity, row), np.int32(-(-n // row))


def uls_units(rng, n, group=3, scale=1.0):
    flat = examples(rng, n * group, scale)
    counts = rng.integers(1, group + 1, size=n)
    return {
        "examples": jax.tree.map(lambda x: x.reshape(n, group, -1), flat),
        "mask": np.arange(group) < counts[:, None],
    }


def made_els(**kwargs):
    return els(**{"group_size": 2, "batch_size": 20, "clip_norm": CLIP} | kwargs)


def made_uls(**kwargs):
    return uls(**{"group_size": 3, "cohort_size": 20, "clip_norm": CLIP} | kwargs)


def reference_sum(mechanism, params, units, n):
    """One unit after the other, plain jax.grad."""
    unit_loss = mechanism.participation.unit_loss(loss_fn)
    total = jax.tree.map(np.zeros_like, params)
    for i in range(n):
        g = jax.grad(unit_loss)(params, jax.tree.map(lambda u: u[i], units))  # noqa: B023
        norm = float(jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(g))))
        c = mechanism.clip_norm
        weight = min(1.0, c / norm) if mechanism.clip.kind == "flat" else min(1 / c, 1 / norm)
        total = jax.tree.map(lambda t, x: t + weight * np.asarray(x), total, g)  # noqa: B023
    return total


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("clipping", ["flat", "normalized"])
@pytest.mark.parametrize("make", [made_els, made_uls])
def test_sum_equals_one_unit_after_the_other(make, clipping, devices):
    rng = np.random.default_rng(1)
    n = 21
    units = uls_units(rng, n) if make is made_uls else examples(rng, n)
    mechanism = make(clipping=clipping)
    mesh = meshes()[devices]
    batch = pack(units, n, capacity=4, row=8)
    total, stats = jax.jit(clipped_sum_over_microbatches(mechanism, loss_fn, mesh))(
        make_params(), *batch
    )
    expected = reference_sum(mechanism, make_params(), units, n)
    chex.assert_trees_all_close(total, expected, rtol=2e-5, atol=1e-5)
    assert float(stats.units) == n


@pytest.fixture(scope="module")
def sums():
    """Compiled pre-noise sums for every mechanism and device count, shared by the properties."""
    return {
        (make, clipping, devices): jax.jit(
            clipped_sum_over_microbatches(make(clipping=clipping), loss_fn, mesh)
        )
        for make in (made_els, made_uls)
        for clipping in ("flat", "normalized")
        for devices, mesh in meshes().items()
    }


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("clipping", ["flat", "normalized"])
@pytest.mark.parametrize("make", [made_els, made_uls])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    exponent=st.integers(-6, 18),
    where=st.integers(0, 19),
    poison=st.sampled_from([None, np.nan, np.inf]),
)
def test_one_unit_moves_the_sum_by_at_most_the_sensitivity(
    sums, make, clipping, devices, seed, exponent, where, poison
):
    """Removing any unit, however extreme, moves the real pre-noise sum by <= its sensitivity."""
    rng = np.random.default_rng(seed)
    n = 20
    units = uls_units(rng, n) if make is made_uls else examples(rng, n)
    extreme = uls_units(rng, 1) if make is made_uls else examples(rng, 1)
    scaled = extreme["examples"] if make is made_uls else extreme
    for leaf in scaled.values():
        leaf *= np.float32(10.0**exponent)
    if poison is not None:
        scaled["y"][0, ..., 0] = poison

    def put(batch, unit):
        batch[where] = unit[0]
        return batch

    units = jax.tree.map(put, units, extreme)
    keep = np.arange(n) != where
    without = jax.tree.map(lambda u: u[keep], units)
    params = make_params()
    summed = sums[make, clipping, devices]
    a, _ = summed(params, *pack(units, n, 4, 8))
    b, _ = summed(params, *pack(without, n - 1, 4, 8))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(a))
    distance = np.sqrt(
        sum(
            ((np.asarray(x, np.float64) - np.asarray(y)) ** 2).sum()
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        )
    )
    assert distance <= make(clipping=clipping).rule.sensitivity * (1 + 1e-4) + 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["flat", "normalized"])
def test_step_adds_the_right_noise_and_divides_by_the_expected_size(clipping):
    """Noise on the sum has stddev sigma times the sensitivity; the divisor is not the batch."""
    mechanism = made_els(clipping=clipping, batch_size=50)
    big = {"w": jnp.zeros((300, 300)), "b": jnp.zeros(3)}
    mesh = data_parallel_mesh(jax.devices()[:1])

    def zero_loss(params, example):
        return 0.0 * (jnp.sum(params["w"]) + jnp.sum(params["b"])) * example["x"][0]

    step = make_train_step(noised(mechanism, 1.7), zero_loss, optax.sgd(1.0), mesh)
    state = init_state(big, optax.sgd(1.0), mesh)
    batch = pack(examples(np.random.default_rng(0), 9), 9, 2, 8)
    state, _ = step(state, *batch, RootKey.from_seed(0).words("noise", 0))
    noise = -np.asarray(state.params["w"], np.float64).ravel() * 50
    expected = 1.7 * mechanism.rule.sensitivity
    n = len(noise)
    # False alarm 1e-6, two-sided.
    assert abs(noise.std() / expected - 1) < 4.9 / np.sqrt(2 * n)
    assert abs(noise.mean()) < 4.9 * expected / np.sqrt(n)


def test_an_empty_draw_is_a_step_of_noise():
    mesh = data_parallel_mesh()
    step = make_train_step(noised(made_els(), 1.0), loss_fn, optax.sgd(1.0), mesh)
    state = init_state(make_params(), optax.sgd(1.0), mesh)
    before = jax.tree.map(np.asarray, state.params)
    batch = pack(examples(np.random.default_rng(0), 0), 0, 2, 8)
    state, stats = step(state, *batch, RootKey.from_seed(0).words("noise", 0))
    assert float(stats.units) == 0
    assert int(state.step) == 1
    moved = np.asarray(state.params["w"]) - before["w"]
    assert (moved != 0).all()
    assert np.isfinite(moved).all()


def run_steps(devices, mechanism=None, steps=4):
    rng = np.random.default_rng(2)
    mechanism = mechanism or made_els()
    mesh = meshes()[devices]
    optimizer = optax.adam(0.05)
    step = make_train_step(noised(mechanism, 1.0), loss_fn, optimizer, mesh)
    state = init_state(make_params(), optimizer, mesh)
    for t, n in zip(range(steps), (21, 3, 0, 32), strict=False):
        batch = pack(examples(rng, n), n, 4, 8)
        state, _ = step(state, *batch, RootKey.from_seed(4).words("noise", t))
    return step, state


@pytest.mark.slow
def test_one_and_eight_devices_give_the_same_parameters():
    _, one = run_steps(1)
    _, eight = run_steps(8)
    chex.assert_trees_all_close(one.params, eight.params, rtol=1e-5, atol=1e-6)


def test_batch_sizes_never_recompile():
    step, _ = run_steps(8)
    assert step.sum._cache_size() == step.update._cache_size() == 1


def test_non_finite_units_are_counted_and_replaced_by_zero():
    rng = np.random.default_rng(3)
    units = examples(rng, 10)
    clean = jax.tree.map(lambda u: np.delete(u, [2, 5], axis=0), units)
    units["x"][2] = np.nan
    units["y"][5] = np.inf
    summed = jax.jit(clipped_sum_over_microbatches(made_els(), loss_fn, meshes()[8]))
    total, stats = summed(make_params(), *pack(units, 10, 2, 8))
    expected, _ = summed(make_params(), *pack(clean, 8, 2, 8))
    assert float(stats.nonfinite) == 2
    assert float(stats.units) == 10
    assert np.isfinite(float(stats.loss))
    chex.assert_trees_all_close(total, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("capacity", [1, 6])
def test_one_reduction_whatever_the_number_of_microbatches(capacity):
    """Sums over devices sit outside the loop: their number does not grow with the microbatches."""
    summed = jax.jit(clipped_sum_over_microbatches(made_els(), loss_fn, meshes()[8]))
    batch = pack(examples(np.random.default_rng(0), 8), 8, capacity, 8)
    text = summed.lower(make_params(), *batch).compile().as_text()
    reductions = [line for line in text.splitlines() if " all-to-all(" in line]
    leaves = len(jax.tree.leaves(make_params())) + 6  # sums of statistics
    assert 1 <= len(reductions) <= leaves
    assert not any("while/body" in line for line in reductions)
