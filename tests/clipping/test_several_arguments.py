"""What JAX-Privacy's users know: several batch arguments, trees of clip norms, any function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from neighbours import removed

import dpfl_jax as dpfl
from dpfl_jax.clipping import PerGroup, self_check
from dpfl_jax.errors import BadInputError

PARAMS = {"a": {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}, "z": jnp.ones(2)}
X = jax.random.normal(jax.random.key(0), (6, 3)) * jnp.arange(1, 7)[:, None]
Y = jax.random.normal(jax.random.key(1), (6,))


def loss(params, x, y):
    hidden = jnp.tanh(x @ params["a"]["w"] + params["a"]["b"])
    return (hidden @ params["z"] - y) ** 2


def each_gradient():
    return jax.vmap(jax.grad(loss), (None, 0, 0))(PARAMS, X, Y)


def norms_of(tree):
    return np.sqrt(sum(np.square(x.reshape(len(X), -1)).sum(1) for x in jax.tree.leaves(tree)))


@pytest.mark.parametrize("strategy", ["vmap", "scan", "ghost", "auto"])
def test_a_loss_of_several_arguments(strategy):
    mask = jnp.array([1, 1, 1, 0, 1, 1])
    several = dpfl.clipped_grad(loss, clip_norm=0.5, strategy=strategy)
    one = dpfl.clipped_grad(lambda p, e: loss(p, *e), clip_norm=0.5, strategy=strategy)
    got, want = several(PARAMS, X, Y, mask=mask), one(PARAMS, (X, Y), mask=mask)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    each = jax.tree.map(np.asarray, each_gradient())
    weights = np.minimum(1, 0.5 / norms_of(each)) * np.asarray(mask)
    jax.tree.map(
        lambda s, g: np.testing.assert_allclose(s, np.einsum("n,n...", weights, g), rtol=1e-4),
        got.sum,
        each,
    )


@pytest.mark.parametrize(
    ("argnums", "order", "trained"),
    [(1, "xzy", "z"), (-1, "xya", "a"), ((3, 1), "xzya", "az"), ([-2], "xzy", "z")],
)
def test_argnums_are_those_of_jax_grad(argnums, order, trained):
    """What they name is trained, in that order; every other argument is a batch."""
    values, each = {"x": X, "y": Y, **PARAMS}, each_gradient()

    def fun(*args):
        known = values | dict(zip(order, args, strict=True))
        return loss({name: known[name] for name in PARAMS}, known["x"], known["y"])

    args = [values[name] for name in order]
    f = dpfl.clipped_grad(fun, argnums, clip_norm=0.5)
    got = f(*args)
    want = each[trained] if isinstance(argnums, int) else tuple(each[name] for name in trained)
    weights = 0.5 / np.maximum(0.5, norms_of(want))
    assert jax.tree.structure(got.sum) == jax.tree.structure(want)
    for s, g in zip(jax.tree.leaves(got.sum), jax.tree.leaves(want)):
        np.testing.assert_allclose(s, np.einsum("n,n...", weights, g), rtol=1e-4)
    assert self_check(f, *args).max_relative_error < 1e-5


@pytest.mark.parametrize(
    ("argnums", "message"),
    [
        ("x", "must be an int or a tuple of ints"),
        (0.0, "must be an int or a tuple of ints"),
        (3, "name each of these once"),
        ((0, -3), "name each of these once"),
        ((0, 1, 2), "at least one batch"),
    ],
)
def test_argnums_that_fit_no_call_are_refused(argnums, message):
    with pytest.raises(BadInputError, match=message):
        dpfl.clipped_grad(loss, argnums, clip_norm=0.5)(PARAMS, X, Y)


def test_the_norms_of_each_parameter_are_told():
    got = dpfl.clipped_grad(loss, clip_norm=0.5)(PARAMS, X, Y)
    assert jax.tree.structure(got.leaf_norms) == jax.tree.structure(PARAMS)
    jax.tree.map(
        lambda told, g: np.testing.assert_allclose(told, norms_of(g), rtol=1e-4),
        got.leaf_norms,
        each_gradient(),
    )
    squares = sum(np.square(x) for x in jax.tree.leaves(got.leaf_norms))
    np.testing.assert_allclose(np.sqrt(squares), got.norms, rtol=1e-5)
    frozen = dpfl.clipped_grad(loss, clip_norm=0.5, trainable={"a": True, "z": False})
    assert frozen(PARAMS, X, Y).leaf_norms["z"] is None


def test_clip_norms_are_a_tree_that_is_a_prefix_of_the_parameters():
    gradient = dpfl.clipped_grad(loss, clip_norm={"a": 0.3, "z": 0.4})
    assert gradient.sensitivity("add-or-remove") == pytest.approx(0.5)
    got, each = gradient(PARAMS, X, Y), each_gradient()
    for name, norm in (("a", 0.3), ("z", 0.4)):
        weights = norm / np.maximum(norm, norms_of(each[name]))
        jax.tree.map(
            lambda s, g, w=weights: np.testing.assert_allclose(
                s, np.einsum("n,n...", w, g), rtol=1e-4
            ),
            got.sum[name],
            each[name],
        )
    assert PerGroup((("a/*", 0.3), ("z", 0.4))).partition(["a/b", "a/w", "z"]) == [0, 0, 1]
    with pytest.raises(BadInputError, match="no pattern matches the parameter 'z'"):
        dpfl.clipped_grad(loss, clip_norm={"a": 0.3})(PARAMS, X, Y)
    with pytest.raises(BadInputError, match="is -1"):
        dpfl.clipped_grad(loss, clip_norm={"a": 0.3, "z": -1})


def test_normalised_sums_have_a_normalised_sensitivity():
    plain = dpfl.clipped_grad(loss, clip_norm=0.5)
    shared = dpfl.clipped_grad(loss, clip_norm=0.5, normalize_by=8.0)
    for neighboring, moved in (("add-or-remove", 1), ("zero-out", 1), ("replace-one", 2)):
        assert shared.sensitivity(neighboring) == pytest.approx(moved * 0.5 / 8)
    with pytest.raises(BadInputError, match=r"neighboring is 'replace'.*replace-one"):
        shared.sensitivity("replace")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a / 8, b, rtol=1e-6),
        plain(PARAMS, X, Y).sum,
        shared(PARAMS, X, Y).sum,
    )
    for value in (0.0, -1.0, float("nan")):
        with pytest.raises(BadInputError, match="normalize_by is"):
            dpfl.clipped_grad(loss, clip_norm=0.5, normalize_by=value)


@pytest.mark.parametrize("options", [{}, {"strategy": "scan", "microbatch_size": 2}])
def test_any_function_of_a_unit_is_clipped(options):
    def statistics(params, x, y):
        return {"mean": x - params, "product": jnp.outer(x, x) * y}

    clipped = dpfl.clipped_fun(statistics, clip_norm=2.0, normalize_by=3.0, **options)
    center, mask = jnp.ones(3), jnp.array([1, 1, 0, 1, 1, 1])
    got = jax.jit(clipped)(center, X, Y, mask=mask)
    each = jax.vmap(statistics, (None, 0, 0))(center, X, Y)
    weights = np.minimum(1, 2.0 / norms_of(each)) * np.asarray(mask)
    jax.tree.map(
        lambda s, v: np.testing.assert_allclose(s, np.einsum("n,n...", weights, v) / 3, rtol=1e-4),
        got.sum,
        each,
    )
    # Without a unit, whatever it holds, the sum moves by at most C / 3.
    for i in range(len(X)):
        wild = (X.at[i].multiply(1e6), Y)
        without, left = removed(wild, np.ones(len(X), bool), i)
        change = jax.tree.map(
            lambda a, b: a - b,
            clipped(center, *wild).sum,
            clipped(center, *without, mask=left).sum,
        )
        size = np.sqrt(sum(np.square(c).sum() for c in jax.tree.leaves(change)))
        assert size <= 2.0 / 3 * (1 + 1e-4)


def test_a_function_that_is_not_finite_for_a_unit_loses_that_unit():
    clipped = dpfl.clipped_fun(lambda params, x: jnp.log(x), clip_norm=1.0)
    got = clipped(None, jnp.array([[1.0, 2.0], [-1.0, 2.0], [0.5, 0.5]]))
    np.testing.assert_array_equal(got.nonfinite, [False, True, False])
    assert np.isfinite(got.sum).all()


def test_too_many_batches_are_refused_by_name():
    with pytest.raises(BadInputError, match="a mask as mask="):
        dpfl.clipped_grad(loss, clip_norm=0.5)(PARAMS, X, Y, jnp.ones(6))


@pytest.mark.parametrize(
    "norm", [np.uint8(16), np.int8(100), np.int32(70_000), np.float16(1e-4), jnp.bfloat16(3)]
)
def test_sensitivities_of_any_kind_of_number_are_those_of_floats(norm):
    tree = {"a": norm, "z": norm}
    want = float(norm) * 2**0.5
    assert dpfl.clipped_grad(loss, clip_norm=tree).sensitivity("zero-out") == pytest.approx(
        want, rel=1e-12
    )
    many = PerGroup(tuple((f"p{i}", norm) for i in range(4096)))
    assert many.sensitivity == pytest.approx(float(norm) * 64, rel=1e-12)
    single = dpfl.clipped_grad(loss, clip_norm=norm, normalize_by=np.float16(0.1))
    assert single.sensitivity("zero-out") == pytest.approx(
        float(norm) / float(np.float16(0.1)), rel=1e-12
    )


def test_what_a_clipped_function_cannot_be():
    clipped = dpfl.clipped_fun(lambda p, x: {"x": x, "n": (x > 0).sum()}, clip_norm=1.0)
    assert clipped.sensitivity("add-or-remove") == 1.0
    with pytest.raises(BadInputError, match=r"floating-point arrays only.*int32"):
        clipped(None, X)
    empty = dpfl.clipped_fun(lambda p, x: 2 * x, clip_norm=1.0)(None, X[:0])
    np.testing.assert_array_equal(empty.sum, np.zeros(3))
    with pytest.raises(BadInputError, match="give either clip_norm or rule"):
        dpfl.clipped_fun(lambda p, x: x)


@pytest.mark.parametrize("strategy", ["vmap", "scan", "ghost", "auto"])
def test_draws_that_would_be_shared_between_units_are_refused(strategy):
    key = jax.random.key(0, impl="rbg")

    def dropped(params, example):
        kept = jax.random.bernoulli(jax.random.fold_in(key, example["id"]), 0.5, (8,))
        return jnp.sum(params * jnp.where(kept, example["x"], 0.0))

    batch = {"id": jnp.arange(64), "x": jnp.ones((64, 8))}
    with pytest.raises(BadInputError, match=r"draws for all units together.*threefry2x32"):
        dpfl.clipped_grad(dropped, clip_norm=1.0, strategy=strategy)(jnp.zeros(8), batch)


def test_what_vmap_computes_otherwise_is_refused():
    mixed = jax.custom_batching.custom_vmap(lambda x: x)
    mixed.def_vmap(lambda size, batched, x: (x + x.sum(0), batched[0]))

    def own(params, x):
        return jnp.sum(params * mixed(x))

    with pytest.raises(BadInputError, match="custom rule for vmap"):
        dpfl.clipped_grad(own, clip_norm=1.0)(jnp.zeros(3), X)
