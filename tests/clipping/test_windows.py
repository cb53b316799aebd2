"""Convolutions whose windows are formed for a few units at a time, or not at all."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dpfl_jax.clipping import clipped_grad, cost

KEY = jax.random.key(5)


def normal(number, *shape):
    return jax.random.normal(jax.random.fold_in(KEY, number), shape)


def convolve(x, w, **options):
    numbers = {3: "NWC WIO", 4: "NHWC HWIO", 5: "NDHWC DHWIO"}[x.ndim].split()
    given = {"window_strides": (1,) * (x.ndim - 2), "padding": "SAME"} | options
    return jax.lax.conv_general_dilated(
        x, w, dimension_numbers=(numbers[0], numbers[1], numbers[0]), **given
    )


# Name: (options, shape of a unit, shape of the kernel).
KINDS = {
    "one dimension": ({"window_strides": (2,)}, (2, 9, 3), (4, 3, 5)),
    "dilated": (
        {"rhs_dilation": (2, 1), "lhs_dilation": (1, 2), "padding": ((2, 1), (0, 1))},
        (1, 6, 5, 2),
        (3, 2, 2, 4),
    ),
    "cropped": ({"padding": ((-1, 2), (0, 1))}, (2, 6, 6, 3), (3, 3, 3, 2)),
    "groups": ({"feature_group_count": 2}, (2, 5, 5, 4), (3, 3, 2, 6)),
    "three dimensions": ({}, (1, 3, 4, 3, 2), (2, 2, 2, 2, 3)),
}


def loss_of(kind, stacked):
    options = KINDS[kind][0]

    def loss(params, x):
        if stacked:  # a layer's kernel each
            found = jax.lax.scan(lambda _, w: (None, convolve(x, w, **options)), None, params["w"])
            return jnp.sum(jnp.sin(found[1]))
        return jnp.sum(jnp.sin(convolve(x, params["w"], **options)))

    return loss


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("method", ["keep", "direct", "gram"])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_and_norms_are_those_of_each_unit(kind, method, stacked, monkeypatch):
    """With a cache that holds one unit's windows, or none."""
    small = dataclasses.replace(cost.MACHINES["cpu"], cache=2e3)
    monkeypatch.setitem(cost.MACHINES, "cpu", small)
    loss = loss_of(kind, stacked)
    x, w = normal(1, 6, *KINDS[kind][1]), normal(2, *(2,) * stacked, *KINDS[kind][2])
    f = clipped_grad(loss, clip_norm=2.0, strategy="ghost", norm_method=method)
    found = jax.jit(f)({"w": w}, x)
    each = jax.vmap(jax.grad(loss), (None, 0))({"w": w}, x)["w"]
    norms = jnp.sqrt(jnp.square(each).reshape(6, -1).sum(1))
    np.testing.assert_allclose(found.norms, norms, rtol=2e-5)
    scale = jnp.minimum(1.0, 2.0 / norms)
    want = jnp.einsum("n...,n->...", each, scale)
    chex.assert_trees_all_close(found.sum["w"], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["direct", "gram", None])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_units_that_do_not_divide_among_devices_are_counted_once(groups, method):
    """XLA counts a grouped convolution's own gradient twice here: 12 units of 2 on 8 devices."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:8]), ("d",)), PartitionSpec("d"))
    whole = NamedSharding(sharding.mesh, PartitionSpec())

    def loss(params, x):
        return jnp.sum(jnp.sin(convolve(x, params["w"], feature_group_count=groups)))

    options = {} if method is None else {"strategy": "ghost", "norm_method": method}
    f = clipped_grad(loss, clip_norm=0.01, unit_sharding=sharding, **options)
    params = jax.device_put({"w": normal(3, 3, 3, 4 // groups, 4)}, whole)
    x, mask = normal(4, 12, 2, 3, 4, 4), jnp.arange(12) == 0  # one real unit
    summed = jax.jit(lambda p, x: f(p, x, mask=mask).sum["w"], out_shardings=whole)(params, x)
    np.testing.assert_allclose(jnp.linalg.norm(summed.ravel()), 0.01, rtol=1e-4)


@pytest.mark.parametrize("method", ["keep", "direct", None])
@pytest.mark.parametrize(
    ("unit", "kernel"),
    [((1, 4, 4, 2), (3, 3, 2, 0)), ((1, 4, 4, 2), (5, 5, 2, 3)), ((1, 4, 0, 2), (3, 3, 2, 3))],
)
def test_what_is_empty_is_zero(unit, kernel, method):
    def loss(params, x):
        return jnp.sum(convolve(x, params["w"], padding="VALID")) + jnp.sum(params["b"] * x.sum())

    params = {"w": jnp.ones(kernel), "b": jnp.ones(2)}
    f = clipped_grad(loss, clip_norm=1.0, strategy="ghost", norm_method=method)
    assert not jnp.any(f(params, normal(6, 5, *unit)).sum["w"])


@pytest.mark.parametrize("strategy", ["auto", "ghost", "vmap", "scan"])
@pytest.mark.parametrize(("groups", "how"), [(1, "plain"), (1, "standardised"), (2, "plain")])
def test_a_unit_that_is_not_finite_takes_no_other_with_it(strategy, groups, how):
    """A kernel for each unit is a group for each; XLA multiplies groups with each other by zero."""

    def loss(params, unit):
        w = params["w"]
        if how == "standardised":
            w = (w - w.mean((0, 1, 2))) / w.std((0, 1, 2))
        y = jax.lax.conv_general_dilated(
            unit["x"][None], w, (1, 1), "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
        )  # fmt: skip
        return jnp.square(y.mean((0, 1, 2)) @ params["h"] - unit["y"]).sum()

    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"w": (3, 3, 4 // groups, 8), "h": (8, 2)}
    params = {name: jax.random.normal(k, s) for k, (name, s) in zip(keys, shapes.items())}
    x, y = jax.random.normal(keys[2], (8, 8, 8, 4)), jax.random.normal(keys[3], (8, 2))
    f = jax.jit(clipped_grad(loss, clip_norm=1.0, strategy=strategy))
    without = f(params, {"x": x, "y": y}, mask=jnp.arange(8) != 1)
    for bad in ({"x": x.at[1].set(jnp.nan), "y": y}, {"x": x, "y": y.at[1].set(1e38)}):
        got = f(params, bad)
        np.testing.assert_array_equal(got.nonfinite, np.arange(8) == 1)
        moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), got.sum, without.sum)
        assert max(jax.tree.leaves(moved)) < 1e-5
