"""Losses that are legal but odd: whatever a loss does to its parameters, norms and sums hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_taps import compare
from zoo import normal

from dpfl_jax.clipping import clipped_grad

METHODS = ["gram", "direct", "keep"]
ODD = {}


def odd(function):
    ODD[function.__name__] = function
    return function


def ids(i, low, high, *shape, dtype=jnp.int32):
    return jax.random.randint(jax.random.key(i), shape, low, high).astype(dtype)


def lookups(index, mode=None, wrap=True):
    def loss(p, i):
        rows = p["e"].at[i].get(mode=mode, wrap_negative_indices=wrap, fill_value=0.5)
        return jnp.sum(jnp.sin(rows + 0.1) * jnp.arange(1.0, 4.0))

    return loss, {"e": normal(0, 7, 3)}, index


@odd
def negative_indices():
    return lookups(ids(1, -7, 7, 4, 6))


@odd
def out_of_range_filled():
    return lookups(ids(1, -20, 20, 4, 6), "fill")


@odd
def out_of_range_clipped():
    return lookups(ids(1, -20, 20, 4, 6), "clip")


@odd
def out_of_range_clipped_without_wrapping():
    return lookups(ids(1, -9, 20, 4, 6), "clip", wrap=False)


@odd
def one_index_repeated():
    return lookups(jnp.full((4, 6), 3))


def narrow_indices(dtype, high):
    def loss(p, i):
        return jnp.sum(jnp.sin(p["e"][i]) * p["e"][299])

    return loss, {"e": normal(0, 300, 3)}, ids(1, 0, high, 4, 6, dtype=dtype)


@odd
def indices_of_one_byte():
    return narrow_indices(jnp.uint8, 255)


@odd
def narrow_indices_out_of_range():
    def loss(p, i):
        numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
        rows = lax.gather(p["e"], i[:, None], numbers, (1, 3), mode="clip")
        return jnp.sum(jnp.sin(rows) * jnp.arange(1.0, 4.0))

    return loss, {"e": normal(0, 200, 3)}, ids(1, -128, 127, 4, 6, dtype=jnp.int8)


@odd
def a_row_of_each_unit():
    """Of a table of, say, users; an index out of range reads the last row."""

    def loss(p, i):
        return jnp.sum(jnp.sin(p["e"][i]) * jnp.cos(p["e"].T[:, i])) + jnp.sum(p["f"][:, i] ** 2)

    return loss, {"e": normal(0, 7, 3), "f": normal(1, 2, 7, 3)}, jnp.array([0, 6, -2, 9])


@odd
def rows_looked_up_one_by_one():
    def loss(p, i):
        a = jax.vmap(lambda j: p["e"][j])(i)
        b = jax.vmap(lambda j: p["f"][:, j])(i)
        return jnp.sum(jnp.sin(a) ** 2) + jnp.sum(jnp.tanh(b) ** 2)

    return loss, {"e": normal(0, 7, 3), "f": normal(1, 2, 7, 3)}, ids(1, -9, 9, 4, 6)


@odd
def bags_of_embeddings():
    """Sums of rows, repeated or out of range (dropped), of tables that are read elsewhere, too."""

    def loss(p, i):
        a = jnp.take(p["e"], i, axis=0, mode="fill", fill_value=0).sum(0)
        b = p["f"][:, i].mean(1)
        c = p["g"][i[:3]].sum(0) + p["g"][i[3:]].sum(0) * p["g"][i[0]]
        both = p["h"][i]
        d = both.sum(0) + jnp.sin(both).sum(0)
        part = p["h"][i[:4].reshape(2, 2)].sum(1)[0]
        part += jnp.take(p["k"], i[:1], axis=0, mode="fill", fill_value=0).sum(0)
        return jnp.sum(jnp.sin(a) * jnp.cos(b @ p["e"].T)[:3]) + jnp.sum(jnp.tanh(c * d) * part)

    sizes = {"e": (7, 3), "f": (3, 7), "g": (7, 4), "h": (7, 4), "k": (7, 4)}
    return loss, {k: normal(n, *s) for n, (k, s) in enumerate(sizes.items())}, ids(1, -9, 9, 4, 6)


@odd
def a_sum_of_rows_under_loops():
    def loss(p, i):
        def step(h, x):
            w, j = x
            return jnp.tanh(h + w[j].sum(0) + p["e"][j].mean(0)), None

        h, _ = jax.lax.scan(step, jnp.ones(3), (p["w"], i))
        return jnp.sum(h**3)

    return loss, {"w": normal(0, 2, 7, 3), "e": normal(1, 7, 3)}, ids(2, 0, 7, 4, 2, 6)


@odd
def parts_of_one_table():
    """Uses of different entries."""

    def loss(p, x):
        y = sum(jnp.tanh(x @ p["w"][k]) @ p["v"][:, 2 * k : 2 * k + 2].T for k in range(3))
        return jnp.sum(jnp.sin(y))

    return loss, {"w": 2 * normal(0, 3, 4, 2), "v": normal(1, 3, 6)}, normal(2, 4, 5, 4)


@odd
def looked_up_along_the_last_axis_and_twice():
    def loss(p, i):
        return jnp.sum(jnp.sin(p["e"][:, i]) @ jnp.cos(p["e"].T[i]))

    return loss, {"e": normal(0, 3, 7)}, ids(1, 0, 7, 4, 6)


@odd
def axes_of_one_on_both_sides():
    def loss(p, x):
        y = lax.dot_general(x, p["w"].reshape(1, 5, 1, 3, 1), (((1,), (1,)), ((), ())))
        return jnp.sum(jnp.sin(y))

    return loss, {"w": normal(0, 5, 3)}, normal(1, 4, 6, 5)


@odd
def batch_axes_of_one():
    def loss(p, x):
        y = jnp.einsum("btd,bdk->btk", x[None], p["w"][None])
        z = lax.dot_general(x[None, None], p["w"][None, None], (((3,), (2,)), ((0, 1), (0, 1))))
        return jnp.sum(jnp.sin(y)) + jnp.sum(z**2)

    return loss, {"w": normal(0, 5, 3)}, normal(1, 4, 6, 5)


@odd
def stacked_and_concatenated():
    def loss(p, x):
        both = jnp.concatenate([p["a"], p["b"]], 1)
        piled = jnp.stack([p["a"], p["a"][::-1]])
        return jnp.sum(jnp.sin(x @ both)) + jnp.sum(jnp.einsum("td,sdk->tsk", x, piled) ** 2)

    return loss, {"a": normal(0, 5, 3), "b": normal(1, 5, 2)}, normal(2, 4, 6, 5)


@odd
def overlapping_slices():
    def loss(p, x):
        w = p["w"]
        a, b, c = x @ w[:, :4], x @ w[:, 2:6], x @ w[:, ::2][:, :4]
        return jnp.sum(jnp.sin(a) * b) + jnp.sum(c * b) + jnp.sum((x[:, :3] @ w[1:4]) ** 2)

    return loss, {"w": normal(0, 5, 8)}, normal(1, 4, 6, 5)


@odd
def square_parameter_and_its_transpose():
    def loss(p, x):
        w = p["w"]
        h = jnp.sin(x @ w) @ w.T
        y = jnp.einsum("td,kd->tk", h, w).reshape(3, 2, 4) @ w.reshape(2, 2, 4).reshape(4, 4).T
        return jnp.sum(y**2) + jnp.sum(jnp.sin(x.T[:, :4] @ (2 * w)))

    return loss, {"w": 0.3 * normal(0, 4, 4)}, normal(1, 4, 6, 4)


@odd
def one_parameter_in_two_shapes():
    def loss(p, x):
        a = x.reshape(4, 6) @ p["w"].reshape(6, 4)
        b = x.reshape(6, 4) @ p["w"].reshape(4, 6)
        c = x.reshape(3, 8) @ p["w"].reshape(8, 3)
        return jnp.sum(jnp.sin(a)) + jnp.sum(b**2) + jnp.sum(jnp.cos(c))

    return loss, {"w": normal(0, 24)}, normal(1, 4, 24)


@odd
def diagonal_trace_and_repeated_letters():
    def loss(p, x):
        d = jnp.einsum("tii->ti", jnp.einsum("ti,ij->tij", x, p["w"]))
        return jnp.sum(d**2) + jnp.einsum("ii,ti->", p["w"], x) + jnp.sum(x @ jnp.diag(p["w"])) ** 2

    return loss, {"w": normal(0, 5, 5)}, normal(1, 4, 6, 5)


@odd
def broadcast_over_own_positions():
    def loss(p, x):
        w = jnp.broadcast_to(p["w"], (6, 5, 3))
        y = jnp.einsum("td,tdk->tk", x, w)
        z = jnp.einsum("td,de->te", x, jnp.broadcast_to(p["s"][:, None], (5, 5)))
        one = jnp.broadcast_to(p["one"], (5, 2))
        return jnp.sum(jnp.sin(y)) + jnp.sum(z**2) + jnp.sum(jnp.sin(x @ one))

    return loss, {"w": normal(0, 5, 3), "s": normal(1, 5), "one": normal(2)}, normal(3, 4, 6, 5)


@odd
def inside_and_outside_of_everything():
    def loss(p, x):
        w = p["w"]

        @jax.custom_vjp
        def reverse(y):
            return y

        reverse.defvjp(lambda y: (y, None), lambda _, d: (-2 * d,))

        def step(h, t):
            return jnp.tanh(h @ w + reverse(t @ w)), jnp.sum(h)

        h, s = lax.scan(step, x[0], x, reverse=True)
        h = jax.checkpoint(lambda h: jnp.sin(h @ w) @ w.T)(h)
        h = h + reverse(x[1] @ w)
        n = lax.fori_loop(0, 3, lambda i, a: a + jnp.sum(w).astype(jnp.int32), 0)
        return jnp.sum(h @ w) + jnp.sum(s) + 0 * n

    return loss, {"w": 0.3 * normal(0, 5, 5)}, normal(1, 4, 6, 5)


@odd
def in_branches_and_loops():
    def loss(p, x):
        h = lax.cond(x[0, 0] > 0, lambda h: h @ p["w"], lambda h: jnp.sin(h) @ p["v"], x)
        h = lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["v"]), h)
        h = lax.switch((x[0, 1] > 0).astype(int), [lambda h: h @ p["w"], lambda h: 2 * h], h)
        return jnp.sum(h @ p["w"])

    return loss, {"w": 0.3 * normal(0, 5, 5), "v": 0.3 * normal(1, 5, 5)}, normal(2, 4, 6, 5)


@odd
def stopped_gradients():
    def loss(p, x):
        stop = lax.stop_gradient
        y = stop(x @ p["w"]) + x @ stop(p["w"]) * (x @ p["w"])
        return jnp.sum(y**2) + jnp.sum(stop(p["v"]) * p["w"])

    return loss, {"w": normal(0, 5, 3), "v": normal(1, 5, 3)}, normal(2, 4, 6, 5)


@odd
def positions_coupled_by_means():
    def loss(p, x):
        h = x @ p["w"]
        h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)
        h = h - h.mean(1, keepdims=True)
        return jnp.sum((h @ p["v"] - (h @ p["v"]).mean(0)) ** 3)

    return loss, {"w": normal(0, 5, 8), "v": normal(1, 8, 3)}, normal(2, 4, 16, 5)


@odd
def products_of_parameters():
    def loss(p, x):
        a = x @ (p["u"] @ p["v"])
        return jnp.sum(jnp.sin(a)) + jnp.sum((x @ p["u"]) ** 2) + jnp.sum(x @ (p["w"] @ p["w"]))

    params = {"u": normal(0, 5, 2), "v": normal(1, 2, 5), "w": normal(3, 5, 5)}
    return loss, params, normal(2, 4, 6, 5)


@odd
def integer_empty_scalar_and_unused():
    def loss(p, x):
        y = p["scale"] * (x @ p["w"])[:, p["take"]] + p["shift"]
        nothing = x[:0] @ p["w"]
        more = x[:, :0] @ p["none"].reshape(0, 4) @ p["none"].reshape(4, 0).sum(1)
        wide = jnp.broadcast_to(p["none"].reshape(-1), (3, 0))
        return jnp.sum(jnp.sin(y)) + jnp.sum(nothing) + jnp.sum(more) + jnp.sum(wide)

    params = {"w": normal(0, 5, 3), "take": jnp.array([0, 2]), "none": jnp.zeros((0, 4))}
    params |= {"scale": jnp.float32(1.5), "shift": jnp.float32(0.3), "unused": normal(1, 3)}
    return loss, params, normal(2, 4, 6, 5)


@odd
def odd_convolutions():
    def loss(p, x):
        def conv(x, w, **k):
            return lax.conv_general_dilated(x, w, **k)

        a = conv(
            x[None],
            p["w"],
            window_strides=(2, 1),
            padding=((2, 1), (-1, 3)),
            lhs_dilation=(2, 3),
            rhs_dilation=(1, 2),
            feature_group_count=2,
        )
        b = conv(
            x.transpose(1, 2, 0)[None],
            p["v"],
            window_strides=(3, 2),
            padding="VALID",
            dimension_numbers=("NHWC", "OHWI", "CNHW"),
            rhs_dilation=(2, 1),
        )
        # the parameter as the image, the data as the kernel, and groups of the batch
        c = conv(p["w"], x[:2, :3, :3][None], window_strides=(1, 1), padding="SAME")
        d = conv(
            x.reshape(2, 2, 7, 6),
            p["u"],
            window_strides=(1, 1),
            padding="SAME",
            batch_group_count=2,
        )
        return sum(jnp.sum(jnp.sin(y)) for y in (a, b, c, d))

    params = {"w": normal(0, 6, 2, 3, 2), "v": normal(1, 5, 2, 3, 4), "u": normal(2, 4, 2, 3, 3)}
    return loss, params, normal(3, 4, 4, 7, 6)


@odd
def mapped_over_examples_with_padding_of_nan():
    def loss(p, e):
        def one(x, real):
            x = jnp.where(real, x, 0.0)
            return jnp.where(real, jnp.sum(jnp.sin(x @ p["w"]) @ p["v"]) + p["b"], 0.0)

        return jnp.sum(jax.vmap(one)(e["x"], e["real"])) / jnp.maximum(e["real"].sum(), 1)

    real = jnp.arange(3)[None] < jnp.array([3, 1, 0, 2])[:, None]
    x = jnp.where(real[..., None, None], normal(0, 4, 3, 6, 5), jnp.nan)
    params = {"w": normal(1, 5, 3), "v": normal(2, 3, 2), "b": jnp.float32(0.0)}
    return loss, params, {"x": x, "real": real}


@odd
def parameter_mapped_over_an_axis():
    def loss(p, x):
        y = jax.vmap(lambda w, x: jnp.sin(x @ w), in_axes=(2, 0))(p["w"], x.reshape(3, 2, 5))
        i = jnp.argmax(x[:, 0]) % 4
        z = jax.vmap(lambda e: e[i] + e[2 * i % 4])(p["e"])
        t = jnp.take_along_axis(p["e"], jnp.argsort(x[:3, :4]), 1)
        return jnp.sum(y**2) + jnp.sum(z**2) + jnp.sum(t**3) + p["e"][1, i]

    return loss, {"w": normal(0, 5, 4, 3), "e": normal(1, 3, 4)}, normal(2, 4, 6, 5)


@odd
def layers_scanned_sliced_and_used_again():
    def loss(p, x):
        def layer(h, ws):
            w, b = ws
            return jnp.sin(h @ w + b) + h @ p["held"], h @ w.T

        h, ys = lax.scan(layer, x, (p["w"], p["b"]), unroll=2)
        h, _ = lax.scan(layer, h, (p["w"], p["b"]), reverse=True)
        h, _ = lax.scan(lambda h, w: (h @ w, None), h, p["w"][1:])
        return jnp.sum((h @ p["w"][0] @ p["held"]) ** 2) + jnp.sum(jnp.sin(ys))

    params = {"w": 0.3 * normal(0, 3, 5, 5), "b": normal(1, 3, 5), "held": 0.3 * normal(2, 5, 5)}
    return loss, params, normal(3, 4, 6, 5)


@odd
def a_parameter_written_into_a_ref():
    def loss(p, x):
        box = jax.new_ref(jnp.zeros((5, 3)))
        box[...] = p["w"]
        return jnp.sum(jnp.sin(x @ box[...]) @ p["v"])

    return loss, {"w": normal(0, 5, 3), "v": normal(1, 3)}, normal(2, 4, 6, 5)


def of_parameters_alone(inside):
    """What meets no data, in the body of a loop or a checkpoint, times data."""

    def found(p):
        some = jnp.sin(jnp.ones(5) @ p["w"]) + p["e"][2] + lax.dynamic_index_in_dim(p["e"], 1)[0]
        kernel = p["k"][..., None, None]
        seen = lax.conv_general_dilated(jnp.ones((1, 2, 3, 3)), kernel, (1, 1), "VALID")
        return some + jnp.tanh(jnp.sum(p["e"][jnp.arange(4)], axis=0)) + jnp.sum(seen)

    def loss(p, x):
        y = inside(found, p)
        return jnp.sum(jnp.tanh(x @ p["w"]) * y) + x[0, 0] * jnp.sum(y)

    params = {"w": 0.3 * normal(0, 5, 3), "e": normal(1, 7, 3), "k": normal(2, 3, 2)}
    return loss, params, normal(3, 4, 6, 5)


@odd
def parameters_alone_in_a_checkpoint():
    return of_parameters_alone(lambda f, p: jax.checkpoint(f)(p))


@odd
def parameters_alone_in_a_loop():
    def inside(f, p):
        return lax.scan(lambda h, t: (h, t * f(p)), 0.0, jnp.arange(3.0))[1].sum(0)

    return of_parameters_alone(inside)


@odd
def parameters_alone_in_a_checkpoint_in_a_loop_that_carries_them():
    def inside(f, p):
        body = jax.checkpoint(lambda h, t: (jnp.sin(h) + t * f(p), None))
        return lax.scan(body, jnp.zeros(3), jnp.arange(3.0))[0]

    return of_parameters_alone(inside)


@odd
def a_table_with_an_axis_of_one_looked_up_and_multiplied():
    def loss(p, e):
        x, i = e
        return jnp.sum(jnp.sin(p["e"][i])) + jnp.sum(jnp.einsum("td,vod->tvo", x, p["e"]) ** 2)

    return loss, {"e": normal(0, 7, 1, 3)}, (normal(1, 4, 2, 3), ids(2, 0, 7, 4, 2))


@pytest.mark.slow
def test_a_unit_whose_gradient_follows_from_parameters_alone_moves_the_sum_by_its_bound():
    """Its data are a factor: quiet units once had no gradient, and all others its own."""

    def loss(w, x):
        return x * jax.checkpoint(lambda w: jnp.sum(w[jnp.array([0, 2])]))(w)

    w, x = jnp.ones((5, 3)), jnp.concatenate([jnp.tile(jnp.array([1e-3, -1e-3]), 32), jnp.ones(1)])
    for strategy in ("ghost", "auto"):
        bounded = clipped_grad(loss, clip_norm=1.0, strategy=strategy)
        with_it, without, other = bounded(w, x), bounded(w, x[:-1]), bounded(w, x.at[-1].set(-7.0))
        np.testing.assert_allclose(with_it.norms, 6**0.5 * jnp.abs(x), rtol=1e-5)
        assert with_it.losses.shape == x.shape
        assert jnp.linalg.norm(with_it.sum - without.sum) == pytest.approx(1.0, rel=1e-5)
        assert jnp.linalg.norm(other.sum - without.sum) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ODD))
def test_odd_losses_equal_vmap(name):
    loss, params, batch = ODD[name]()
    compare(loss, params, batch, METHODS)


@pytest.mark.parametrize(
    "name", ["a_row_of_each_unit", "rows_looked_up_one_by_one", "a_sum_of_rows_under_loops"]
)
def test_tables_are_not_copied(name):
    loss, params, batch = ODD[name]()
    told = clipped_grad(loss, clip_norm=1.0, strategy="ghost").explain(params, batch)
    assert [leaf.method for leaf in told.leaves if leaf.method == "per-unit copies"] == []


def test_the_tokens_of_a_bag_share_one_gradient():
    """What is held of a unit is that gradient: 4 bytes for each of the 8 columns."""

    def loss(table, i):
        return jnp.sum(jnp.sin(table[i].mean(0)))

    f = clipped_grad(loss, clip_norm=1.0, strategy="ghost", norm_method="gram")
    told = f.explain(jnp.ones((50, 8)), jnp.zeros((4, 6), jnp.int32))
    assert told.leaves[0].recorded == 4 * 8


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["clip", "fill", "wrap"])
def test_equal_tokens_of_a_bag_are_counted(mode):
    """Every pair once, whether their number is even or odd; some are out of range."""

    def loss(table, i):
        return jnp.sum(jnp.sin(jnp.take(table, i, axis=0, mode=mode, fill_value=0).mean(0)))

    table = normal(0, 7, 3)
    for count in (1, 2, 3, 16, 33) if mode == "clip" else (2, 3):  # the mode is of rows alone
        tokens = jax.random.randint(jax.random.key(count), (6, count), -2, 9)
        got, want = (
            clipped_grad(loss, clip_norm=0.1, strategy=s, norm_method="gram")(table, tokens)
            for s in ("ghost", "vmap")
        )
        np.testing.assert_allclose(got.sum, want.sum, atol=2e-5)
        np.testing.assert_allclose(got.norms, want.norms, rtol=2e-5)
        assert np.all(got.norms >= want.norms * (1 - 1e-6)), count


def test_norm_at_zero_is_reported_not_hidden():
    """The gradient of a norm at zero is NaN in JAX: such a unit must not pass as a small one."""

    def loss(p, x):
        return jnp.linalg.norm(x @ p["w"])

    x = normal(0, 3, 2, 5).at[1].set(0.0)
    for strategy in ("vmap", "ghost"):
        got = clipped_grad(loss, clip_norm=1.0, strategy=strategy)({"w": normal(1, 5, 3)}, x)
        assert np.array_equal(got.nonfinite, [False, True, False]), strategy
        assert np.all(np.isfinite(got.sum["w"]))


@pytest.mark.parametrize("method", ["gram", "direct", "keep"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("wide", "narrow"), [(2, 64), (64, 2)])
def test_weighting_in_low_precision_stays_under_the_bound(method, dtype, wide, narrow):
    """Whichever factor is weighted, and rounded, and whatever the output's precision."""

    def loss(p, x):
        w = p["w"].astype(dtype)
        y = lax.dot_general(
            x.astype(dtype), w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return jnp.sum(y)

    params, x = {"w": jnp.zeros((wide, narrow))}, jnp.ones((1, 1, wide))
    for part in (0.5, 0.6016, 0.7051, 0.9, 0.9985):
        clip_norm = part * float(np.sqrt(wide * narrow))
        f = clipped_grad(loss, clip_norm=clip_norm, strategy="ghost", norm_method=method)
        assert float(jnp.linalg.norm(f(params, x).sum["w"])) <= clip_norm * (1 + 1e-5)


@pytest.mark.parametrize("method", ["gram", "direct", "keep"])
def test_half_precision_gradients_that_barely_exist(method):
    """Weighting the last bits of a float16 must not round them back up, or to infinity."""

    def loss(p, x):
        y = x.astype(jnp.float16) @ p["w"].astype(jnp.float16)
        return jnp.sum(y.astype(jnp.float32)) * 1.2e-7

    params, x = {"w": jnp.zeros((4, 8))}, jnp.full((1, 2, 4), 1e4)
    norm = float(clipped_grad(loss, clip_norm=1.0, strategy="vmap")(params, x).norms[0])
    for part in (0.6, 0.8, 0.9):
        f = clipped_grad(loss, clip_norm=part * norm, strategy="ghost", norm_method=method)
        assert float(jnp.linalg.norm(f(params, x).sum["w"])) <= part * norm * (1 + 1e-3)


def test_norm_formed_directly_is_not_too_small_where_everything_cancels():
    """Norm and sum are accumulated in different orders: rounding alone must not pass the bound."""
    x = 1e8 * normal(0, 1, 64, 8)
    batch = {"x": jnp.concatenate([x, x[:, :, ::-1]], 2), "d": normal(1, 1, 64, 4)}

    def loss(p, e):
        y = e["x"] @ p["w"]
        return jnp.sum(y * e["d"]) - jnp.sum((e["x"][::-1] @ p["w"]) * e["d"][::-1])

    f = clipped_grad(loss, clip_norm=1e-3, strategy="ghost", norm_method="direct")
    assert float(jnp.linalg.norm(f({"w": jnp.zeros((16, 4))}, batch).sum["w"])) <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "method"),
    [("auto", None), ("scan", None), ("ghost", "gram"), ("ghost", "direct"), ("ghost", "keep")],
)
def test_a_tied_embedding_in_bfloat16(strategy, method):
    """Its factors are bfloat16 on both sides: products that not every CPU program takes."""

    def loss(w, tokens):
        return jnp.sum(jnp.tanh(w[tokens] @ w.T).astype(jnp.float32) ** 2)

    w = (0.05 * normal(0, 512, 128)).astype(jnp.bfloat16)
    tokens = ids(1, 0, 512, 4, 16)
    formed = jax.vmap(jax.grad(loss), (None, 0))(w, tokens).astype(jnp.float32)
    norms = jnp.sqrt(jnp.sum(formed**2, (1, 2)))
    f = clipped_grad(loss, clip_norm=1.0, strategy=strategy, norm_method=method)
    got = jax.jit(f)(w, tokens)
    want = jnp.einsum("n,nab->ab", jnp.minimum(1.0, 1.0 / norms), formed)
    np.testing.assert_allclose(got.norms, norms, rtol=1e-2)
    assert float(jnp.linalg.norm(got.sum - want)) < 1e-2 * float(jnp.linalg.norm(want))
