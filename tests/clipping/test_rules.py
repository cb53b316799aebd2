"""Clip rules: weights and sensitivities."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from neighbours import removed

from dpfl_jax.clipping import (
    Automatic,
    Flat,
    Normalized,
    OwnBound,
    PerGroup,
    PerLayer,
    clipped_grad,
)
from dpfl_jax.config.kinds import Kinds
from dpfl_jax.errors import BadInputError

NORMS = st.lists(st.floats(0, 2.0**60, width=32), min_size=1, max_size=6)
POSITIVE = st.floats(1e-3, 1e3)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(NORMS, POSITIVE, st.sampled_from([Flat, Normalized, Automatic]))
def test_no_contribution_exceeds_the_sensitivity(norms, clip_norm, rule):
    rule = rule(clip_norm)
    norms = jnp.array(norms, jnp.float32)
    moved = np.asarray(rule.weights(norms), np.float64) * np.asarray(norms, np.float64)
    assert moved.max() <= rule.sensitivity * (1 + 1e-6)


@pytest.mark.parametrize("normalized", [False, True])
def test_a_bound_that_a_unit_brings_is_no_larger_than_the_clip_norm(normalized):
    """Noise is scaled to the clip norm, whatever it brings."""
    rule, own = OwnBound(0.5, normalized), jnp.array([0.25, 0.5, 3.0, np.inf, np.nan, -1.0])
    gradient = clipped_grad(lambda p, u: jnp.vdot(p, u["x"]), rule=rule)
    moved = [
        jnp.linalg.norm(gradient(jnp.zeros(2), {"x": jnp.full((1, 2), 9.0), "bound": b[None]}).sum)
        for b in own
    ]
    wanted = np.array([0.25, 0.5, 0.5, 0.5, 0.0, 0.0]) / (0.5 if normalized else 1.0)
    np.testing.assert_allclose(moved, wanted, rtol=1e-6)
    assert max(moved) <= rule.sensitivity * (1 + 1e-6)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 2**20, width=32)), min_size=1, max_size=9),
    POSITIVE,
)
def test_a_group_contributes_at_most_c(units, clip_norm):
    ids = np.array([g for g, _ in units])
    norms = jnp.array([n for _, n in units], jnp.float32)
    weight = jnp.array([1 / sum(a == b for b in ids) for a in ids], jnp.float32)
    bounded = clipped_grad(jnp.vdot, clip_norm=clip_norm)(jnp.zeros(()), norms, weight=weight)
    moved = np.asarray(bounded.weights, np.float64) * norms
    for one in set(ids):
        assert moved[ids == one].sum() <= clip_norm * (1 + 1e-6)


def test_weights_of_one_over_its_number_average_the_clipped_gradients_of_a_group():
    def loss(params, x):
        return jnp.sum(params["w"] * x)

    params = {"w": jnp.zeros(3)}
    x = jax.random.normal(jax.random.key(0), (5, 3)) * jnp.array([0.1, 1, 2, 3, 4])[:, None]
    f = clipped_grad(loss, clip_norm=1.0)
    got = f(params, x, mask=jnp.arange(5) < 4, weight=jnp.full(5, 0.5)).sum["w"]
    clipped = [v / max(1.0, float(jnp.linalg.norm(v))) for v in x]
    want = (clipped[0] + clipped[1]) / 2 + (clipped[2] + clipped[3]) / 2
    np.testing.assert_allclose(got, want, rtol=1e-5)
    with pytest.raises(BadInputError, match="weight has shape"):
        f(params, x, weight=0.5)


def two_layers(params, x):
    return jnp.sum(jnp.tanh(x @ params["a"]["w"] + params["a"]["b"]) @ params["z"]["w"])


def two_layer_setup():
    key = jax.random.key(0)
    params = {
        "a": {"w": jax.random.normal(key, (3, 4)), "b": jnp.ones(4)},
        "z": {"w": jax.random.normal(key, (4, 2))},
    }
    return params, jax.random.normal(jax.random.key(1), (6, 3))


def leaf_gradients(params, x):
    return jax.vmap(jax.grad(two_layers), in_axes=(None, 0))(params, x)


@pytest.mark.parametrize("strategy", ["vmap", "scan", "ghost"])
def test_groups_of_parameters_are_clipped_apart(strategy):
    params, x = two_layer_setup()
    rule = PerGroup((("a/*", 0.3), ("*", 0.4)))
    got = clipped_grad(two_layers, rule=rule, strategy=strategy)(params, x)
    g = leaf_gradients(params, x)
    norm_a = np.sqrt((g["a"]["w"] ** 2).sum((1, 2)) + (g["a"]["b"] ** 2).sum(1))
    norm_z = np.sqrt((g["z"]["w"] ** 2).sum((1, 2)))
    weight_a, weight_z = np.minimum(1, 0.3 / norm_a), np.minimum(1, 0.4 / norm_z)
    np.testing.assert_allclose(got.weights, np.stack([weight_a, weight_z], 1), rtol=1e-5)
    want = np.einsum("n,nij->ij", weight_a, g["a"]["w"])
    np.testing.assert_allclose(got.sum["a"]["w"], want, rtol=1e-4, atol=1e-6)
    want = np.einsum("n,nij->ij", weight_z, g["z"]["w"])
    np.testing.assert_allclose(got.sum["z"]["w"], want, rtol=1e-4, atol=1e-6)
    assert rule.sensitivity == pytest.approx(0.5)


@pytest.mark.parametrize("strategy", ["vmap", "ghost"])
def test_per_layer_bounds_every_leaf(strategy):
    params, x = two_layer_setup()
    got = clipped_grad(two_layers, rule=PerLayer(0.1), strategy=strategy)(params, x[:1])
    norms = [float(jnp.linalg.norm(v)) for v in jax.tree.leaves(got.sum)]
    np.testing.assert_allclose(norms, 0.1 / math.sqrt(3), rtol=1e-5)


@pytest.mark.parametrize("strategy", ["vmap", "scan", "ghost"])
@pytest.mark.parametrize("method", ["gram", "direct", "keep"])
def test_per_layer_moves_by_at_most_c_whatever_one_unit_holds(strategy, method):
    """A unit leaves, and its data change: no layer moves by more than its share, NaN or not."""
    params, x = two_layer_setup()
    how = {"norm_method": method} if strategy == "ghost" else {}
    bounded = clipped_grad(two_layers, rule=PerLayer(0.5), strategy=strategy, **how)

    def summed(batch, mask):
        return bounded(params, batch, mask=mask).sum

    without = summed(x, jnp.arange(len(x)) != 1)
    for value in (x[1], 1e3 * x[1], jnp.nan * x[1], 1e25 * x[1]):
        changed = x.at[1].set(value)
        moved = jax.tree.map(jnp.subtract, summed(changed, jnp.ones(len(x))), without)
        sizes = np.array([float(jnp.linalg.norm(v)) for v in jax.tree.leaves(moved)])
        assert (sizes <= 0.5 / math.sqrt(3) * (1 + 1e-5)).all()


@pytest.mark.parametrize("strategy", ["vmap", "ghost"])
def test_per_layer_drops_the_layers_that_are_not_finite_and_no_others(strategy):
    params = {"bad": jnp.ones(3), "good": jnp.ones(3)}

    def loss(p, e):
        # The root's slope at zero is infinite; the loss itself is finite.
        return jnp.sqrt(jnp.abs(p["bad"] @ e["bad"])) + p["good"] @ e["good"]

    batch = {"bad": jnp.zeros((1, 3)), "good": jnp.full((1, 3), 7.0)}
    got = clipped_grad(loss, rule=PerLayer(1.0), strategy=strategy)(params, batch)
    assert bool(got.nonfinite[0])
    np.testing.assert_array_equal(got.sum["bad"], 0.0)
    np.testing.assert_allclose(jnp.linalg.norm(got.sum["good"]), 1 / math.sqrt(2), rtol=1e-6)
    np.testing.assert_allclose(got.weights, [[0.0, 1 / math.sqrt(2) / np.linalg.norm([7] * 3)]])


def test_per_layer_computes_nothing_twice():
    """Gradients of a leaf are summed before those of the next one take their memory."""
    kernel = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)  # 32 MiB for each unit, in bfloat16
    params = {"a": kernel, "b": kernel}
    batch = jax.ShapeDtypeStruct((4, 1900, 4096), jnp.bfloat16)

    def loss(p, x):
        return jnp.sum(jnp.tanh(x @ p["a"].astype(x.dtype)) @ p["b"].astype(x.dtype))

    def methods(rule):
        limit = 4 * 2**20 * (4 * 15 + 40)  # what is recorded of four units, and one of two leaves
        made = clipped_grad(loss, rule=rule, strategy="ghost", platform="tpu", memory_limit=limit)
        found = []
        jax.eval_shape(lambda p, x: found.append(made.explain(p, x)), params, batch)
        return {leaf.method for leaf in found[0].leaves}

    assert methods(Flat(1.0)) == {"gram", "keep"}
    assert methods(PerLayer(1.0)) == {"keep"}


# Those of a configuration: their fields, and C of two parameters "a" and "z" (gamma for none).
RULES = {
    "flat": ({"clip_norm": 0.5}, Flat(0.5), 0.5, 0.5),
    "normalized": ({"clip_norm": "0.5"}, Normalized(0.5), 1.0, 0.5),
    "automatic": ({}, Automatic(0.01), 1.0, None),
    "per_layer": ({"clip_norm": 0.5}, PerLayer(0.5), 0.5, 0.5),
    "per_group": ({"clip_norms": {"z": 0.4, "*": 0.3}}, PerGroup({"z": 0.4, "*": 0.3}), 0.5, 0.5),
}


@pytest.mark.parametrize("kind", RULES)
def test_a_configuration_gives_a_rule_by_its_kind(kind):
    """And gives it back, whatever a file does to the order of keys."""
    kinds = Kinds("dpfl_jax.clipping")
    for _, rule, _, _ in RULES.values():
        kinds.register(type(rule))
    fields, rule, _, _ = RULES[kind]
    assert kinds.parse({"kind": kind, **fields}) == rule
    again = json.loads(json.dumps(kinds.dump(rule), sort_keys=True))
    assert kinds.parse(again) == rule
    assert hash(kinds.parse(again)) == hash(rule)


@pytest.mark.parametrize("kind", RULES)
def test_a_rule_says_how_far_one_unit_moves_the_sum(kind):
    """Removed, and its data changed: no further than that, and so far where it is large."""
    _, rule, sensitivity, threshold = RULES[kind]
    assert (rule.sensitivity, rule.threshold) == (pytest.approx(sensitivity), threshold)
    gradient = clipped_grad(lambda p, x: p["a"] @ x[:2] + p["z"] @ x[2:], rule=rule)
    bounded = jax.jit(
        lambda x, mask: gradient({"a": jnp.zeros(2), "z": jnp.zeros(2)}, x, mask=mask)
    )
    batch, everyone = np.float32([[1, 0, 0, 1], [0, 0, 0, 0], [0.1, 0, 0, 0.1]]), np.ones(3, bool)
    reached = 0.0
    for value in (0.1, 7.0, 1e6, np.nan):
        batch[1] = value
        sums = [bounded(*given).sum for given in ((batch, everyone), removed(batch, everyone, 1))]
        moved = float(optax.global_norm(jax.tree.map(jnp.subtract, *sums)))
        assert moved <= sensitivity * (1 + 1e-5)
        reached = max(reached, moved)
    assert reached >= sensitivity * (1 - 1e-5)
    if threshold is not None:  # the last unit is above it, and clipped
        batch[:2], batch[2] = 1e-3, 0.505 * threshold
        small, _, above = bounded(batch, everyone).weights.reshape(3, -1).min(axis=1)
        assert above < small


def test_rules_refuse_nonsense():
    for bad in (0.0, -1.0, math.inf, math.nan):
        for rule in (Flat, Normalized, Automatic, PerLayer):
            with pytest.raises(BadInputError, match="above 0"):
                rule(bad)
    with pytest.raises(BadInputError, match="empty"):
        PerGroup({})
    with pytest.raises(BadInputError, match="must be pairs of a pattern"):
        PerGroup(((1.0, 1.0),))
    with pytest.raises(BadInputError, match="no pattern matches"):
        PerGroup((("a/*", 1.0),)).partition(["a/w", "z/w"])


def test_the_clip_norm_may_be_an_array():
    params, x = two_layer_setup()
    f = clipped_grad(two_layers, clip_norm=1.0)
    adaptive = jax.jit(lambda c: f(params, x, rule=Flat(c)))
    for clip_norm in (0.1, 2.0):
        want = clipped_grad(two_layers, clip_norm=clip_norm)(params, x)
        np.testing.assert_allclose(adaptive(clip_norm).weights, want.weights, rtol=1e-5)
