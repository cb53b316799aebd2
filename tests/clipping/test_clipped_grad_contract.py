"""The contract of clipped_grad that every strategy keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from neighbours import removed

from dpfl_jax.clipping import Automatic, Flat, Normalized, PerGroup, clipped_grad
from dpfl_jax.errors import BadInputError

STRATEGIES = ["vmap", "scan", "ghost"]


def mlp_loss(params, example):
    hidden = jnp.tanh(example["x"] @ params["w"] + params["b"])
    return jnp.sum((hidden @ params["v"] - example["y"]) ** 2)


def mlp_params(seed=0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "w": jax.random.normal(keys[0], (5, 7), dtype),
        "b": jax.random.normal(keys[1], (7,), dtype),
        "v": jax.random.normal(keys[2], (7, 2), dtype),
    }


def mlp_batch(n, seed=1):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {"x": jax.random.normal(keys[0], (n, 5)), "y": jax.random.normal(keys[1], (n, 2))}


def reference(loss, params, batch, rule):
    """Unit by unit in float64, with no code of the package but the rule's weights."""
    n = jax.tree.leaves(batch)[0].shape[0]
    total, norms = None, []
    for i in range(n):
        gradient = jax.grad(loss)(params, jax.tree.map(lambda a, i=i: a[i], batch))
        flat = np.concatenate(
            [np.asarray(g, np.float64).ravel() for g in jax.tree.leaves(gradient)]
        )
        norm = np.sqrt((flat**2).sum())
        weight = float(rule.weights(jnp.asarray([norm], jnp.float32))[0])
        norms.append(norm)
        part = jax.tree.map(lambda g, w=weight: np.asarray(g, np.float64) * w, gradient)
        total = part if total is None else jax.tree.map(np.add, total, part)
    return total, np.array(norms)


def assert_close(got, want, rtol=1e-5):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        scale = max(np.abs(w).max(), 1e-30)
        np.testing.assert_allclose(np.asarray(g) / scale, np.asarray(w) / scale, atol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
@pytest.mark.parametrize("rule", [Flat(0.5), Normalized(1e4)])
def test_equals_unit_by_unit(strategy, rule):
    params, batch = mlp_params(), mlp_batch(6)
    want, norms = reference(mlp_loss, params, batch, rule)
    got = jax.jit(clipped_grad(mlp_loss, rule=rule, strategy=strategy))(params, batch)
    np.testing.assert_allclose(got.norms, norms, rtol=1e-5)
    assert_close(got.sum, want)
    losses = [mlp_loss(params, jax.tree.map(lambda a, i=i: a[i], batch)) for i in range(6)]
    np.testing.assert_allclose(got.losses, losses, rtol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("poison", [np.nan, 3.0])
def test_padding_contributes_exactly_zero(strategy, poison):
    params, batch = mlp_params(), mlp_batch(4)
    f = jax.jit(clipped_grad(mlp_loss, clip_norm=1.0, strategy=strategy))
    mask = jnp.array([True, False, True, False])
    poisoned = jax.tree.map(lambda a: a.at[jnp.array([1, 3])].set(poison), batch)
    clean = jax.tree.map(lambda a: a.at[jnp.array([1, 3])].set(0.0), batch)
    got, want = f(params, poisoned, mask=mask), f(params, clean, mask=mask)
    for g, w in zip(jax.tree.leaves(got.sum), jax.tree.leaves(want.sum)):
        np.testing.assert_array_equal(g, w)
    np.testing.assert_array_equal(got.norms[jnp.array([1, 3])], 0)
    np.testing.assert_array_equal(got.weights[jnp.array([1, 3])], 0)
    np.testing.assert_array_equal(got.losses[jnp.array([1, 3])], 0)
    assert not np.any(got.nonfinite)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("poison", [np.nan, -np.inf, 1e30])
def test_nonfinite_unit_is_replaced_by_zero_and_reported(strategy, poison):
    params, batch = mlp_params(), mlp_batch(4)
    f = jax.jit(clipped_grad(mlp_loss, clip_norm=1.0, strategy=strategy))
    batch["y"] = batch["y"].at[2, 0].set(poison)
    got = f(params, batch)
    want = f(params, jax.tree.map(lambda a: jnp.delete(a, 2, axis=0), batch))
    np.testing.assert_array_equal(got.nonfinite, [False, False, True, False])
    assert_close(got.sum, want.sum)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(got.sum))
    assert got.norms[2] == 0
    assert got.weights[2] == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_padding_batch_gives_zero(strategy):
    f = jax.jit(clipped_grad(mlp_loss, clip_norm=1.0, strategy=strategy))
    got = f(mlp_params(), mlp_batch(3), mask=jnp.zeros(3, bool))
    for leaf in (*jax.tree.leaves(got.sum), got.norms, got.weights, got.losses):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float_mask_and_no_mask(strategy):
    f = jax.jit(clipped_grad(mlp_loss, clip_norm=1.0, strategy=strategy))
    params, batch = mlp_params(), mlp_batch(3)
    np.testing.assert_allclose(
        f(params, batch).norms, f(params, batch, mask=jnp.ones(3, jnp.float32)).norms, rtol=1e-6
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e12])
def test_zero_tiny_and_huge_gradients(strategy, scale):
    f = jax.jit(
        clipped_grad(lambda p, e: scale * mlp_loss(p, e), rule=Normalized(0.1), strategy=strategy)
    )
    got = f(mlp_params(), mlp_batch(1))
    norm = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(got.sum)))
    assert np.isfinite(norm)
    assert norm <= 1 + 1e-5
    if scale == 1e12:
        assert norm >= 1 - 1e-5
    if scale == 0:
        assert norm == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sum_is_float32_whatever_the_parameters(strategy):
    f = jax.jit(clipped_grad(mlp_loss, clip_norm=1.0, strategy=strategy))
    got = f(mlp_params(dtype=jnp.bfloat16), mlp_batch(3))
    for leaf in (*jax.tree.leaves(got.sum), got.norms, got.weights, got.losses):
        assert leaf.dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.nightly("2-scan", "2-vmap")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("microbatch_size", [2, 5])
def test_microbatches_change_nothing(strategy, microbatch_size):
    params, batch = mlp_params(), mlp_batch(7)
    mask = jnp.arange(7) != 3
    want = clipped_grad(mlp_loss, clip_norm=1.0, strategy="vmap")(params, batch, mask=mask)
    f = clipped_grad(mlp_loss, clip_norm=1.0, strategy=strategy, microbatch_size=microbatch_size)
    got = jax.jit(f)(params, batch, mask=mask)
    assert_close(got.sum, want.sum)
    np.testing.assert_allclose(got.norms, want.norms, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.slow("ghost")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_aux_and_rng_per_unit(strategy):
    def loss(params, example, rng):
        noise = jax.random.normal(rng, (5,))
        value = mlp_loss(params, {"x": example["x"] + noise, "y": example["y"]})
        return value, {"noise": noise}

    params, batch = mlp_params(), mlp_batch(4)
    f = clipped_grad(loss, clip_norm=1.0, strategy=strategy, has_aux=True)
    got = jax.jit(f)(params, batch, rng=jax.random.key(3))
    want = jnp.stack(
        [jax.random.normal(jax.random.fold_in(jax.random.key(3), i), (5,)) for i in range(4)]
    )
    np.testing.assert_allclose(got.aux["noise"], want, rtol=1e-6)
    moved = {"x": batch["x"] + want, "y": batch["y"]}
    expected = clipped_grad(mlp_loss, clip_norm=1.0, strategy="vmap")(params, moved)
    assert_close(got.sum, expected.sum)
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(3), i))(jnp.arange(4))
    assert_close(jax.jit(f)(params, batch, rng=keys).sum, expected.sum)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["name", "tree"])
def test_frozen_parameters(strategy, how):
    trainable = (lambda name: name != "w") if how == "name" else {"w": False, "b": True, "v": True}
    params, batch = mlp_params(), mlp_batch(4)
    f = clipped_grad(mlp_loss, clip_norm=0.7, strategy=strategy, trainable=trainable)
    got = jax.jit(f)(params, batch)
    assert got.sum["w"] is None
    rest = {"b": params["b"], "v": params["v"]}
    want = clipped_grad(
        lambda p, e: mlp_loss({**p, "w": params["w"]}, e), clip_norm=0.7, strategy="vmap"
    )(rest, batch)
    assert_close({"b": got.sum["b"], "v": got.sum["v"]}, want.sum)
    np.testing.assert_allclose(got.norms, want.norms, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cast_first", [False, True])
def test_sensitivity_on_eight_devices(strategy, cast_first):
    """One unit added on one device moves the all-reduced sum by at most C, and reaches it."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    clip_norm = 1.0
    f = clipped_grad(mlp_loss, clip_norm=clip_norm, strategy=strategy)
    spec = PartitionSpec("data")

    def total(params, batch, mask):
        if cast_first:
            params = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)

        def body(i, carry):
            del i
            return jax.tree.map(jnp.add, carry, f(params, batch, mask=mask).sum)

        zeros = jax.tree.map(
            lambda p: jax.lax.pcast(jnp.zeros(p.shape), "data", to="varying"), params
        )
        return jax.lax.psum(jax.lax.fori_loop(0, 1, body, zeros), "data")

    sharded = jax.jit(
        jax.shard_map(
            total,
            mesh=mesh,
            in_specs=(PartitionSpec(), spec, spec),
            out_specs=PartitionSpec(),
            axis_names={"data"},
        )
    )
    params, batch = mlp_params(), mlp_batch(16)
    batch["y"] = 100 * batch["y"]  # every unit is far above the clip norm
    everyone = jnp.ones(16, bool)
    with_all = sharded(params, batch, everyone)
    for unit in (0, 7, 15):
        without = sharded(params, *removed(batch, everyone, unit))
        moved = np.sqrt(
            sum(
                float(((a - b) ** 2).sum())
                for a, b in zip(jax.tree.leaves(with_all), jax.tree.leaves(without))
            )
        )
        assert moved <= clip_norm * (1 + 1e-4)
        assert moved >= clip_norm * (1 - 1e-4)
    local = clipped_grad(mlp_loss, clip_norm=clip_norm, strategy="vmap")(params, batch)
    assert_close(with_all, local.sum)


def test_parameters_split_by_hand_are_refused():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    f = clipped_grad(lambda p, x: jnp.sum(p * x), clip_norm=1.0)
    with pytest.raises(BadInputError, match="'model'"):
        jax.shard_map(
            lambda p, x: f(p, x).norms,
            mesh=mesh,
            in_specs=(PartitionSpec("model"), PartitionSpec("data")),
            out_specs=PartitionSpec("data"),
        )(jnp.ones(4), jnp.ones((8, 1)))


def test_rules_say_their_sensitivity():
    norms = jnp.array([0.0, 1e-30, 0.5, 2.0, 1e18])
    for rule in (Flat(0.5), Normalized(0.5)):
        contribution = np.asarray(rule.weights(norms), np.float64) * np.asarray(norms, np.float64)
        assert contribution.max() <= rule.sensitivity * (1 + 1e-6)
        assert contribution.max() >= rule.sensitivity * (1 - 1e-6)
    assert Flat(0.5).sensitivity == 0.5
    assert Normalized(0.5).sensitivity == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either clip_norm or rule"),
        ({"clip_norm": 1.0, "rule": Flat(1.0)}, "either clip_norm or rule"),
        ({"clip_norm": -1.0}, "above 0"),
        ({"clip_norm": float("nan")}, "above 0"),
        ({"clip_norm": 1.0, "strategy": "fast"}, "must be one of"),
        ({"clip_norm": 1.0, "microbatch_size": 0}, "at least 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(BadInputError, match=message):
        clipped_grad(mlp_loss, **arguments)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bad_calls(strategy):
    f = clipped_grad(mlp_loss, clip_norm=1.0, strategy=strategy)
    batch = mlp_batch(3)
    with pytest.raises(BadInputError, match="same leading unit axis"):
        f(mlp_params(), {"x": batch["x"], "y": batch["y"][:2]})
    with pytest.raises(BadInputError, match="mask has shape"):
        f(mlp_params(), batch, mask=jnp.ones(2))
    with pytest.raises(BadInputError, match="must be a scalar"):
        clipped_grad(lambda p, e: e["x"] * p["w"].sum(), clip_norm=1.0, strategy=strategy)(
            mlp_params(), batch
        )
    with pytest.raises(BadInputError, match="no floating-point"):
        clipped_grad(mlp_loss, clip_norm=1.0, strategy=strategy, trainable=lambda name: False)(
            mlp_params(), batch
        )


@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
@pytest.mark.parametrize("microbatch_size", [None, 1, 4])
def test_no_units_at_all_give_zeros(strategy, microbatch_size):
    def loss(params, example, rng):
        return mlp_loss(params, example) / jnp.sum(example["x"]), jax.random.normal(rng, (3,))

    f = clipped_grad(
        loss, clip_norm=1.0, strategy=strategy, microbatch_size=microbatch_size, has_aux=True
    )
    params, batch = mlp_params(), mlp_batch(0)
    keys = jax.random.split(jax.random.key(0), 0)
    for rng in (jax.random.key(0), keys):
        got = jax.jit(f)(params, batch, mask=jnp.zeros(0, bool), rng=rng)
        assert jax.tree.map(jnp.shape, got.sum) == jax.tree.map(jnp.shape, params)
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(got.sum))  # NaN is not zero either
        for leaf in (got.norms, got.weights, got.losses, got.nonfinite):
            assert leaf.shape == (0,)
        assert got.aux.shape == (0, 3)


def test_no_units_over_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec("data"))
    for size in (None, 8):
        f = clipped_grad(mlp_loss, clip_norm=1.0, unit_sharding=place, microbatch_size=size)
        assert not any(
            np.any(leaf) for leaf in jax.tree.leaves(jax.jit(f)(mlp_params(), mlp_batch(0)))
        )


@pytest.mark.parametrize("rule", [Flat, Normalized, Automatic])
@pytest.mark.parametrize("clip_norm", [0.0, -1.0, 1e-30, np.nan, np.inf])
def test_a_clip_norm_that_turns_out_unusable_gives_zeros(rule, clip_norm):
    """Known on the device alone; a unit of zero gradient and one of a large one."""
    batch = {"x": jnp.stack([jnp.zeros(5), jnp.ones(5)]), "y": jnp.zeros((2, 2))}
    params = {**mlp_params(), "b": jnp.zeros(7)}
    f = jax.jit(lambda c: clipped_grad(mlp_loss, rule=rule(c), strategy="ghost")(params, batch))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(f(clip_norm).sum))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_nan_in_a_mask_is_padding(strategy):
    params, batch = mlp_params(), mlp_batch(3)
    f = clipped_grad(mlp_loss, clip_norm=1.0, strategy=strategy)
    got = f(params, batch, mask=jnp.array([1.0, np.nan, 0.0]))
    np.testing.assert_array_equal(got.norms > 0, [True, False, False])
    np.testing.assert_array_equal(got.weights > 0, [True, False, False])
    want = f(params, jax.tree.map(lambda x: x[:1], batch))
    assert_close(got.sum, want.sum)


@pytest.mark.nightly("vmap", "ghost")
@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
def test_python_numbers_as_parameter_and_as_loss(strategy):
    params, batch = {**mlp_params(), "scale": 2.0}, mlp_batch(3)

    def loss(params, example):
        return params["scale"] * mlp_loss(params, example)

    got = clipped_grad(loss, clip_norm=1.0, strategy=strategy)(params, batch)
    want = clipped_grad(loss, clip_norm=1.0, strategy="vmap")(
        {**params, "scale": jnp.float32(2.0)}, batch
    )
    assert_close(got.sum, want.sum)
    none = clipped_grad(lambda p, e: 1.5, clip_norm=1.0, strategy=strategy)(params, batch)
    np.testing.assert_array_equal(none.norms, 0)
    np.testing.assert_array_equal(none.losses, 1.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": lambda p, e: (mlp_loss(p, e), 1.0)}, "tuple: set has_aux=True"),
        ({"loss": lambda p, e: {"loss": mlp_loss(p, e)}}, "must be a scalar, but it is a dict"),
        ({"loss": lambda p, e: None}, "must be a scalar, but it is a NoneType"),
        ({"has_aux": True}, r"must return \(value, aux\), but it returns an array of shape \(\)"),
        ({"params": {"name": "net"}}, "entry 'name' of params must be an array.*a str"),
        ({"batch": {"id": "abc"}}, "entry 'id' of batch must be an array.*a str"),
        ({"batch": {"id": np.array(["a", "b", "c"])}}, "entry 'id' of batch .* an array of <U1"),
        ({"mask": "abc"}, "mask has shape"),
        ({"mask": np.ones(3, complex)}, "mask has shape .* complex128.* bool, int or float"),
        ({"clip_norm": {"w": 1.0}}, "no pattern matches the parameter"),
        ({"clip_norm": "1"}, "clip_norm must be one number, but it is a str"),
        ({"clip_norm": None, "rule": lambda: PerGroup(("w", 1.0))}, "must be pairs of a pattern"),
    ],
)
def test_what_cannot_be_used_is_named(change, message):
    options = {"clip_norm": 1.0, "has_aux": False} | change
    loss, mask = options.pop("loss", mlp_loss), options.pop("mask", None)
    params = {**mlp_params(), **options.pop("params", {})}
    batch = {**mlp_batch(3), **options.pop("batch", {})}

    def call():
        rule = options.pop("rule", lambda: None)()
        return clipped_grad(loss, rule=rule, **options)(params, batch, mask=mask)

    with pytest.raises(BadInputError, match=message):
        call()


def dot(params, example):
    return jnp.vdot(params["w"].astype(jnp.float32), example["x"]) * example["y"]


def of_two(second, mask=None, clip_norm=1.0, **params):
    """The result of a unit of gradient (0.6, 0) and another; and the sum of the first alone."""
    params = {"w": jnp.ones(2), **params}
    batch = {"x": jnp.array([[0.6, 0.0], [1.0, 1.0]]), "y": jnp.array([1.0, second])}
    got = clipped_grad(dot, rule=Flat(clip_norm))(params, batch, mask=mask)
    first = jax.tree.map(lambda x: x[:1], batch)
    return got, clipped_grad(dot, clip_norm=1.0)(params, first).sum


def adds_nothing(second, nonfinite=False, **options):
    got, alone = of_two(second, **options)
    np.testing.assert_array_equal(got.sum["w"], alone["w"])
    np.testing.assert_array_equal(got.nonfinite, [False, nonfinite])


def no_units():
    none = {"x": jnp.zeros((0, 2)), "y": jnp.zeros(0)}
    got = clipped_grad(dot, clip_norm=1.0)({"w": jnp.ones(2)}, none)
    np.testing.assert_array_equal(got.sum["w"], 0)


def padding():
    for second, there in ((3.0, 0.0), (np.nan, 0.0), (np.inf, np.nan)):
        adds_nothing(second, mask=jnp.array([1.0, there]))


def integer_parameters():
    got, _ = of_two(1.0, i=jnp.arange(3), there=jnp.array(True))
    assert got.sum["i"] is got.sum["there"] is got.leaf_norms["i"] is None


def integer_data():
    def looked_up(params, example):
        assert example["token"].dtype == jnp.int8
        return params["w"][example["token"]]

    tokens = {"token": jnp.array([0, 1, 1], jnp.int8)}
    got = clipped_grad(looked_up, clip_norm=1.0)({"w": jnp.ones(2)}, tokens)
    np.testing.assert_allclose(got.sum["w"], [1.0, 2.0], rtol=1e-6)


def low_precision():
    for dtype in (jnp.bfloat16, jnp.float16):
        got, _ = of_two(1e3, mask=jnp.array([0.0, 1.0]), w=jnp.ones(2, dtype))
        for leaf in (got.sum["w"], got.norms, got.weights, got.losses, got.leaf_norms["w"]):
            assert leaf.dtype == jnp.float32
        assert 0.99 < np.linalg.norm(got.sum["w"]) <= 1 + 1e-6


def unusable_norm():
    for clip_norm in (np.nan, np.inf, 0.0, -1.0):
        got = jax.jit(lambda c: of_two(3.0, clip_norm=c)[0].sum)(clip_norm)
        np.testing.assert_array_equal(got["w"], 0)


EDGE_CASES = {
    "no units (n = 0)": no_units,
    "padding (the mask is zero or NaN)": padding,
    "a NaN or an infinity in a gradient": lambda: [
        adds_nothing(bad, nonfinite=True) for bad in (np.nan, np.inf)
    ],
    "a gradient whose squared norm overflows float32": lambda: adds_nothing(3e19, nonfinite=True),
    "a gradient of zero": lambda: adds_nothing(0.0),
    "integer leaves of trained arguments": integer_parameters,
    "integer leaves of a batch": integer_data,
    "parameters in bfloat16 or float16": low_precision,
    "a traced clip norm that is NaN, infinite or <= 0": unusable_norm,
}


def test_the_docstring_has_these_edge_cases():
    rows = [line.split("|")[1].strip() for line in clipped_grad.__doc__.split("\n") if "|" in line]
    assert rows[0] == "edge case"
    assert rows[2:] == list(EDGE_CASES)


@pytest.mark.parametrize("case", EDGE_CASES)
def test_edge_case(case):
    EDGE_CASES[case]()
