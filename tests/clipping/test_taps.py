"""The tap engine equals per-unit gradients, for every kind of model and every way to a norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import ZOO

from dpfl_jax.clipping import Flat, clipped_grad
from dpfl_jax.clipping.jaxprs import every_program
from dpfl_jax.clipping.taps.evaluate import _BY_VALUE, _by_value
from dpfl_jax.errors import BadInputError


def relative_error(got, want):
    """Largest error of the sum over all leaves, relative to the sum's norm."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    size = np.sqrt(sum(float((np.asarray(w, np.float64) ** 2).sum()) for _, w in pairs))
    off = np.sqrt(
        sum(float(((np.asarray(g, np.float64) - np.asarray(w)) ** 2).sum()) for g, w in pairs)
    )
    return off / max(size, 1e-30)


def compare(loss, params, batch, methods, mask=None):
    """Compares the ghost strategy with vmap at a clip norm that clips about half of the units."""
    n = jax.tree.leaves(batch)[0].shape[0]
    mask = np.ones(n, bool) if mask is None else mask

    plain = clipped_grad(loss, clip_norm=1.0, strategy="vmap")
    ways = [
        clipped_grad(loss, clip_norm=1.0, strategy="ghost", norm_method=method)
        for method in methods
    ]

    @jax.jit  # all in one program: nearly all of the time is taken by compiling
    def run(p, b, m, c):
        return [f(p, b, mask=m, rule=Flat(c)) for f in (plain, *ways)]

    norms = np.asarray(run(params, batch, mask, 1.0)[0].norms)
    want, *found = run(params, batch, mask, float(np.median(norms[mask])))
    for method, got in zip(methods, found, strict=True):
        np.testing.assert_allclose(got.norms, want.norms, rtol=1e-5, err_msg=str(method))
        # Losses whose terms cancel are as exact as the terms: one such differs by machine.
        least = float(np.finfo(np.float32).eps * np.max(np.abs(want.losses)))
        np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5, atol=least)
        np.testing.assert_allclose(got.weights, want.weights, rtol=1e-5)
        assert relative_error(got.sum, want.sum) < 1e-5, method


@pytest.mark.slow
@pytest.mark.nightly("transformer_user", "transformer_remat", "transformer_unrolled_untied")
@pytest.mark.parametrize("name", list(ZOO))
def test_equals_vmap(name):
    loss, params, batch = ZOO[name]()
    n = jax.tree.leaves(batch)[0].shape[0]
    # Every way to a norm for every model but the large ones, which share their rules.
    every = not name.startswith("transformer_")
    methods = ["gram", "direct", "keep"] if every else ["gram"]
    compare(loss, params, batch, methods, mask=np.arange(n) != 1)


def test_a_loop_stores_one_gradient_of_products_that_are_only_added_up():
    """An LSTM's two matrices have the gradient of its gates; its bias has the sum over time."""
    loss, params, batch = ZOO["lstm"]()
    program = jax.make_jaxpr(clipped_grad(loss, clip_norm=1.0, strategy="ghost"))(params, batch)
    steps, units, gates = 7, 5, 16
    stored = [
        v
        for jaxpr in every_program(program.jaxpr)
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "scan"
        for v in eqn.outvars
        if sorted(v.aval.shape) == sorted((steps, units, gates))
    ]
    assert len(stored) == 1


def test_a_loop_stores_values_of_sigmoids_alone():
    """Of tanh and logistic JAX's own gradient has a loop store ``1 - y`` beside ``y``, too."""
    loss, params, batch = ZOO["lstm"]()
    program = jax.make_jaxpr(clipped_grad(loss, clip_norm=1.0, strategy="ghost"))(params, batch)
    forward = next(e for e in program.jaxpr.eqns if e.primitive.name == "scan")
    made = {v: e.primitive.name for e in forward.params["jaxpr"].jaxpr.eqns for v in e.outvars}
    stored = [made.get(v) for v in forward.params["jaxpr"].jaxpr.outvars]
    assert {name: stored.count(name) for name in ("tanh", "logistic", "sub")} == {
        "tanh": 2,
        "logistic": 3,
        "sub": 0,
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("function", [jnp.tanh, jax.nn.sigmoid])
def test_gradients_of_sigmoids_by_their_values_are_jax_s_own(function, dtype):
    """To the last bit, from where they are flat to where they are steep."""
    primitive = jax.make_jaxpr(function)(1.0).jaxpr.eqns[0].primitive
    x = jnp.linspace(-20.0, 20.0, 4001, dtype=dtype)
    g = jax.random.normal(jax.random.key(0), x.shape).astype(dtype)
    (want,) = jax.vjp(function, x)[1](g)
    (got,) = jax.vjp(_by_value(function, _BY_VALUE[primitive]), x)[1](g)
    if function is jnp.tanh and not hasattr(jax.lax, "one_minus_square"):
        # Before 0.11 JAX takes g + g y, which cancels where y is near -1: four roundings here.
        y = np.asarray(function(x), np.float64)
        want = np.asarray(g, np.float64) * (1 + y) * (1 - y)
        got, error = np.asarray(got, np.float64), 3 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(got, want, rtol=error, atol=float(jnp.finfo(dtype).tiny))
        return
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("positions", [1, 2])
@pytest.mark.parametrize("width", [4, 4096])
@pytest.mark.parametrize(
    ("x_size", "d_size"), [(1e18, 1e-20), (1e-20, 1e18), (1e-17, 1e14), (1e-12, 1e-12)]
)
def test_gram_norm_does_not_lose_what_underflows(x_size, d_size, width, positions):
    """Squares of one factor underflow while the gradient itself is of ordinary size."""

    def loss(params, x):
        return d_size * jnp.sum((x @ params["w"]) * jnp.arange(1.0, 4.0))

    x = x_size * jax.random.normal(jax.random.key(0), (3, positions, width))
    params = {"w": jnp.ones((width, 3))}
    true = clipped_grad(loss, clip_norm=1.0, strategy="ghost", norm_method="direct")(params, x)
    f = clipped_grad(loss, clip_norm=1e-3, strategy="ghost", norm_method="gram")
    got = f(params, x)
    assert np.all(got.norms >= 0.999 * true.norms)
    alone = [float(jnp.linalg.norm(f(params, x[i : i + 1]).sum["w"])) for i in range(3)]
    assert max(alone) <= 1e-3 * (1 + 1e-5)


@pytest.mark.parametrize("scale", [-3.0, 1e6, 1e-12])
@pytest.mark.parametrize(("x_size", "d_size"), [(1e18, 1e-20), (1e-20, 1e18), (1e-30, 1e-3)])
def test_gram_norm_of_a_scaled_parameter_does_not_lose_what_underflows(x_size, d_size, scale):
    """What was lost is scaled, too; and nothing overflows that need not."""

    def loss(params, x):
        return d_size * jnp.sum((x @ (params["w"] * scale)) * jnp.arange(1.0, 4.0))

    x = x_size * np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    d = np.float64(np.float32(d_size)) * np.arange(1.0, 4.0)
    true = abs(scale) * np.linalg.norm(x.astype(np.float64), axis=1) * np.linalg.norm(d)
    f = clipped_grad(loss, clip_norm=1e-3, strategy="ghost", norm_method="gram")
    got = f({"w": jnp.ones((64, 3))}, x)
    assert np.all(got.norms >= 0.999 * true - 1e-18)
    assert not np.any(got.nonfinite)
    assert np.all(got.weights * true <= 1e-3 * (1 + 1e-5))


@pytest.mark.parametrize("side", ["x", "d"])
@pytest.mark.parametrize("positions", [1, 2])
def test_gram_norm_does_not_lose_many_small_entries_beside_one(side, positions):
    """The one is large enough for its square; of the others, all squares underflow."""
    small = np.full((1, positions, 100_000), 1e-19, np.float32)
    small[..., 0] = 1.02e-15 / np.sqrt(100_000)
    large = np.zeros((1, positions, 2), np.float32)
    large[0, 0, 0] = 1e18
    x, d = (small, large) if side == "x" else (large, small)

    def loss(params, unit):
        return jnp.sum((unit["x"] @ params["w"]) * unit["d"])

    f = clipped_grad(loss, clip_norm=1.0, strategy="ghost", norm_method="gram")
    got = f({"w": jnp.zeros((x.shape[-1], d.shape[-1]))}, {"x": x, "d": d})
    assert np.linalg.norm(np.asarray(got.sum["w"], np.float64)) <= 1.0 + 1e-5


@pytest.mark.parametrize("positions", [1, 2])
def test_gram_norm_of_zeros(positions):
    """Exactly zero where the loss does not count; next to nothing where the data is zero."""

    def loss(params, x):
        return x[0, 0] * jnp.sum(x[:, 1:] @ params["w"])

    x = np.ones((3, positions, 5), np.float32)
    x[0, :, 0], x[1, :, 1:] = 0.0, 0.0
    f = clipped_grad(loss, clip_norm=1.0, strategy="ghost", norm_method="gram")
    norms = f({"w": jnp.ones((4, 3))}, x).norms
    assert norms[0] == 0.0
    assert norms[1] < 1e-17
    np.testing.assert_allclose(norms[2], np.sqrt(12.0) * positions, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("positions", [1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("side", ["x", "d"])
def test_gram_norm_of_one_side_that_is_not_finite(side, bad, positions):
    """The unit is left out, also where the other side, or all the rest of this one, is zero."""

    def loss(params, unit):
        return jnp.sum((unit["x"] @ params["w"]) * unit["d"])

    sides = {"x": np.ones((4, positions, 5)), "d": np.ones((4, positions, 3))}
    for i, rest in enumerate([1.0, 0.0]):
        sides[side][i] = rest
        sides[side][i, -1, -1] = bad
    sides["d" if side == "x" else "x"][1] = 0.0
    batch = {name: jnp.asarray(values, jnp.float32) for name, values in sides.items()}
    f = clipped_grad(loss, clip_norm=1.0, strategy="ghost", norm_method="gram")
    got = f({"w": jnp.ones((5, 3))}, batch)
    np.testing.assert_array_equal(got.nonfinite, [True, True, False, False])
    rest = {name: values[2:] for name, values in batch.items()}
    want = f({"w": jnp.ones((5, 3))}, rest).sum["w"]
    np.testing.assert_allclose(got.sum["w"], want, rtol=1e-6)


def test_gram_norms_of_one_position_in_each_of_several_parts():
    """Batched products, channels apart, stacked layers: squares add up over parts, not norms."""

    def loss(params, x):
        h = jnp.einsum("gi,gio->go", x, params["batched"])
        apart = jax.lax.conv_general_dilated(
            h.reshape(1, 3, 8), params["apart"], (1,), "VALID",
            dimension_numbers=("NHC", "HIO", "NHC"), feature_group_count=8,
        )  # fmt: skip
        body = lambda h, w: (jnp.tanh(w @ h), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(body, apart.ravel(), params["stacked"])[0] ** 2)

    shapes = {"batched": (8, 5, 3), "apart": (3, 1, 8), "stacked": (6, 8, 8)}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), 3)))
    params = {name: jax.random.normal(keys[name], shape) for name, shape in shapes.items()}
    compare(loss, params, jax.random.normal(jax.random.key(1), (3, 8, 5)), ["gram"])


@pytest.mark.slow
@pytest.mark.parametrize("length", [512, 516, 514])
def test_gram_norms_of_long_units(length):
    """Positions along one axis and along two, tokens of a table, one weight used twice."""

    def loss(params, x):
        h = jnp.tanh(params["table"][x] @ params["w"])
        h = jnp.tanh(h @ params["w"] + params["table"][x[::-1]])
        pairs = h.reshape(length // 2, 2, 6).swapaxes(0, 1)
        return jnp.sum((jnp.arange(1, length // 2 + 1)[:, None] * pairs @ params["v"]) ** 2)

    shapes = {"table": (9, 6), "w": (6, 6), "v": (6, 3)}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), 3)))
    params = {name: jax.random.normal(keys[name], shape) for name, shape in shapes.items()}
    compare(loss, params, jax.random.randint(jax.random.key(1), (3, length), 0, 9), ["gram"])


def test_gram_matrices_of_long_units_are_half_formed():
    """Of four parts of the positions, each meets itself and those behind it: ten of sixteen."""

    def norms(length):
        def loss(params, x):
            return jnp.sum(jnp.sin(x @ params["w"]))

        f = clipped_grad(loss, clip_norm=1.0, strategy="ghost", norm_method="gram")
        args = {"w": jnp.ones((64, 64))}, jnp.ones((1, length, 64))
        return jax.jit(lambda p, x: f(p, x).norms).lower(*args).compile().cost_analysis()["flops"]

    # One product forward and both Gram matrices; elementwise work is 1 to 3 %.
    whole, parts = (2.0 * n * 64 * (64 + 2 * n * share) for n, share in ((508, 1), (512, 0.625)))
    assert norms(508) == pytest.approx(whole, rel=0.05)
    assert norms(512) == pytest.approx(parts, rel=0.05)


def test_gram_norm_is_not_too_small_where_everything_cancels():
    """Two positions whose gradients cancel but for a little: the sum still has norm at most C."""

    def loss(params, e):
        y = e["x"] @ params["w"]
        return jnp.sum(y[0] * e["d"]) - jnp.sum(y[1] * e["d"])

    key = jax.random.key(0)
    x = jax.random.normal(key, (1, 1, 64))
    batch = {"x": jnp.concatenate([x, x + 1e-5], 1) * 1e3, "d": jax.random.normal(key, (1, 32))}
    f = clipped_grad(loss, clip_norm=1e-4, strategy="ghost", norm_method="gram")
    got = f({"w": jnp.zeros((64, 32))}, batch)
    assert float(jnp.linalg.norm(got.sum["w"])) <= 1e-4


def test_parameters_in_complex_arithmetic():
    def loss(params, x):
        spectrum = jnp.fft.rfft(x) * jnp.fft.rfft(params["filter"])
        return jnp.sum(jnp.abs(spectrum @ params["mix"].astype(jnp.complex64)) ** 2)

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "filter": jax.random.normal(keys[0], (8,)),
        "mix": jax.random.normal(keys[1], (5, 2)),
    }
    compare(loss, params, jax.random.normal(keys[2], (4, 8)), [None])
    bad = {"c": jnp.ones(3, jnp.complex64), "r": jnp.ones(2)}
    with pytest.raises(BadInputError, match="'c' is complex"):
        clipped_grad(lambda p, x: p["r"].sum() * x, clip_norm=1.0)(bad, jnp.ones(2))
