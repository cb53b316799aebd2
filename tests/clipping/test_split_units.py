"""Units over devices: nothing is summed over them before it is bounded, and none is mixed."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from neighbours import removed

from dpfl_jax.clipping import clipped_grad
from dpfl_jax.errors import BadInputError

STRATEGIES = ("vmap", "scan", "ghost", "auto")
SPEC = PartitionSpec("data")


def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def loss(params, x, rng=None):
    scale = 1.0 if rng is None else jax.random.normal(rng)
    return scale * jnp.sum(jnp.tanh(x @ params["w"]) @ params["v"])


PARAMS = {
    "w": jax.random.normal(jax.random.key(0), (6, 16)),
    "v": jax.random.normal(jax.random.key(1), (16, 3)),
}
BATCH = 30 * jax.random.normal(jax.random.key(2), (16, 4, 6))


def norm(tree):
    return float(jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_data_captured_by_the_loss_are_refused(strategy):
    """Units outside the batch: their gradients would be summed over devices, then clipped."""

    def total(params, x):
        here = clipped_grad(lambda p, i: loss(p, x[i]), clip_norm=1.0, strategy=strategy)
        return jax.lax.psum(here(params, jnp.arange(2)).sum, "data")

    sharded = jax.shard_map(
        total, mesh=mesh(), in_specs=(PartitionSpec(), SPEC), out_specs=PartitionSpec()
    )
    with pytest.raises(BadInputError, match="varies over the mesh axes"):
        sharded(PARAMS, BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_units_that_differ_by_their_keys_alone(strategy):
    """The same examples everywhere, another dropout key on each device: still 16 units."""
    keys = jax.random.split(jax.random.key(3), 16)
    same = jnp.broadcast_to(BATCH[:2], (2, *BATCH.shape[1:]))
    f = clipped_grad(loss, clip_norm=0.1, strategy=strategy)

    def total(params, x, keys):
        return jax.lax.psum(f(params, x, rng=keys).sum, "data")

    sharded = jax.shard_map(
        total,
        mesh=mesh(),
        in_specs=(PartitionSpec(), PartitionSpec(), SPEC),
        out_specs=PartitionSpec(),
    )
    got = jax.jit(sharded)(PARAMS, same, keys)
    want = clipped_grad(loss, clip_norm=0.1, strategy="vmap")(
        PARAMS, jnp.tile(same, (8, 1, 1)), rng=keys
    ).sum
    chex.assert_trees_all_close(got, want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [8, 16, 32])
def test_microbatches_of_units_split_over_devices(strategy, size):
    """The loop over microbatches runs beside the split over devices, and never mixes units."""
    rows = NamedSharding(mesh(), SPEC)
    batch = jnp.concatenate([BATCH, 2 * BATCH, 1e-3 * BATCH])
    batch = jax.device_put(batch, rows)
    mask = jnp.arange(48) % 5 != 0
    weight = 1.0 / (1 + jnp.arange(48) % 3)
    f = clipped_grad(
        loss, clip_norm=0.5, strategy=strategy, microbatch_size=size, unit_sharding=rows
    )
    got = jax.jit(f)(PARAMS, batch, mask=mask, weight=weight)
    plain = clipped_grad(loss, clip_norm=0.5, strategy="vmap")
    want = jax.jit(plain)(PARAMS, batch, mask=mask, weight=weight)
    np.testing.assert_allclose(got.norms, want.norms, rtol=2e-5)
    chex.assert_trees_all_close(got.sum, want.sum, atol=2e-5)
    for unit in (1, 17, 47):
        less, others = removed(batch, mask, unit)
        without = jax.jit(f)(PARAMS, less, mask=others, weight=weight)
        moved = norm(jax.tree.map(jnp.subtract, got.sum, without.sum))
        assert moved <= 0.5 * (1 + 1e-4)


def test_microbatches_that_cannot_be_split_are_refused():
    rows = NamedSharding(mesh(), SPEC)
    f = clipped_grad(loss, clip_norm=1.0, microbatch_size=4, unit_sharding=rows)
    with pytest.raises(BadInputError, match="8 parts of unit_sharding"):
        f(PARAMS, BATCH)


@pytest.mark.slow
def test_auto_splits_the_batch_over_devices_and_microbatches():
    rows = NamedSharding(mesh(), SPEC)
    batch = jax.device_put(jnp.tile(BATCH, (8, 1, 1)), rows)
    f = clipped_grad(loss, clip_norm=1.0, memory_limit=3000, unit_sharding=rows)
    found = f.explain(PARAMS, batch)
    assert found.microbatch_size is not None
    assert found.microbatch_size % 8 == 0
    assert found.microbatch_size < 128
    want = clipped_grad(loss, clip_norm=1.0, strategy="vmap")(PARAMS, batch)
    got = jax.jit(f)(PARAMS, batch)
    chex.assert_trees_all_close(got.sum, want.sum, atol=1e-4)


@pytest.mark.slow
def test_a_unit_axis_left_to_the_compiler():
    free = NamedSharding(mesh(), PartitionSpec(PartitionSpec.UNCONSTRAINED))
    batch = jax.device_put(BATCH, NamedSharding(mesh(), SPEC))
    f = clipped_grad(loss, clip_norm=1.0, strategy="ghost", unit_sharding=free)
    want = clipped_grad(loss, clip_norm=1.0, strategy="vmap")(PARAMS, batch)
    np.testing.assert_allclose(jax.jit(f)(PARAMS, batch).norms, want.norms, rtol=1e-5)
