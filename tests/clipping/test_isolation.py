"""Losses that other units could reach through a collective are refused, whatever the strategy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dpfl_jax.clipping import clipped_grad
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms import els
from dpfl_jax.mechanisms.plan.sums import clipped_sum_over_microbatches
from dpfl_jax.mesh import make_mesh

STRATEGIES = ["vmap", "scan", "ghost", "auto"]


@jax.custom_vjp
def reads_others_on_the_way_back(x):
    return x


def _back(_, g):
    return (jax.lax.pcast(jax.lax.psum(g, "data"), "data", to="varying"),)


reads_others_on_the_way_back.defvjp(lambda x: (x, None), _back)


def batch_statistic(w, x):
    return jnp.vdot(w, x - jax.lax.pmean(x, "data"))


def in_a_loop(w, x):
    step = lambda c, _: (c + jax.lax.pmax(x.sum(), "data"), None)  # noqa: E731
    return jnp.vdot(w, x) * jax.lax.scan(step, x.sum(), None, length=2)[0]


def on_the_way_back(w, x):
    return jnp.vdot(reads_others_on_the_way_back(w), x)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("loss", [batch_statistic, in_a_loop, on_the_way_back])
def test_collectives_over_the_units_are_refused_in_the_train_step(strategy, loss):
    mechanism = els(clip_norm=1.0, group_size=1, batch_size=8)
    summed = clipped_sum_over_microbatches(mechanism, loss, make_mesh(), strategy=strategy)
    with pytest.raises(BadInputError, match="communicates over the axis 'data'"):
        jax.jit(summed)(jnp.ones(3), jnp.ones((1, 8, 3)), jnp.ones((1, 8), bool), 1)


@pytest.mark.parametrize("check_vma", [True, False])
def test_parameters_gathered_by_hand_are_refused(check_vma):
    def loss(part, x):
        return jnp.vdot(jax.lax.all_gather(part, "data", tiled=True), x)

    @functools.partial(
        jax.shard_map,
        mesh=make_mesh(),
        in_specs=(P("data"), P("data")),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    def local(w, x):
        return clipped_grad(loss, clip_norm=1.0)(w, x).sum

    with pytest.raises(BadInputError, match="all_gather"):
        jax.jit(local)(jnp.ones(16), jnp.ones((8, 16)))


def test_a_named_axis_of_an_outer_vmap_is_refused():
    gradient = clipped_grad(lambda w, x: jnp.vdot(w, jax.lax.psum(x, "outer")), clip_norm=1.0)
    with pytest.raises(BadInputError, match="'outer'"):
        jax.vmap(lambda x: gradient(jnp.ones(3), x).sum, axis_name="outer")(jnp.ones((4, 1, 3)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_axes_bound_inside_the_loss_are_its_own(strategy):
    """A mean over a unit's own rows through a named axis, inside a named vmap outside."""

    def loss(w, x):
        centred = jax.vmap(lambda r: r - jax.lax.pmean(r, "rows"), axis_name="rows")(x)
        return jnp.sum(jnp.square(centred @ w))

    gradient = clipped_grad(loss, clip_norm=1.0, strategy=strategy)
    x = np.random.default_rng(0).normal(size=(2, 5, 4, 3)).astype(np.float32)
    found = jax.vmap(lambda x: gradient(jnp.ones(3), x).sum, axis_name="outer")(x)
    for one, alone in zip(found, x):
        np.testing.assert_allclose(one, gradient(jnp.ones(3), alone).sum, rtol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_asking_which_device_this_is_is_refused(strategy):
    """A unit that leaves moves others to other devices, and what they add with them."""

    def loss(w, x):
        return jnp.vdot(w, x) * (1.0 + jax.lax.axis_index("data"))

    mechanism = els(clip_norm=1e3, group_size=1, batch_size=8)
    summed = clipped_sum_over_microbatches(mechanism, loss, make_mesh(), strategy=strategy)
    with pytest.raises(BadInputError, match="axis_index"):
        jax.jit(summed)(jnp.ones(3), jnp.ones((1, 8, 3)), jnp.ones((1, 8), bool), 1)
