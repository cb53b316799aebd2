"""Losses of many kinds, each ``name -> (loss, params, batch)``, for comparing strategies."""

import jax
import jax.numpy as jnp
from jax import lax

ZOO = {}


def entry(function):
    ZOO[function.__name__] = function
    return function


def normal(i, *shape):
    return jax.random.normal(jax.random.key(i), shape)


def tokens(i, vocab, *shape):
    return jax.random.randint(jax.random.key(i), shape, 0, vocab)


def rms(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def rotary(x):
    t, half = jnp.arange(x.shape[0]), x.shape[-1] // 2
    angle = t[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def block(h, w, heads=2):
    t, d = h.shape
    x = rms(h, w["s1"])
    q, k, v = (jnp.einsum("td,dhk->thk", x, w[n].reshape(d, heads, -1)) for n in "qkv")
    q, k = rotary(q), rotary(k)
    score = jnp.einsum("thk,shk->hts", q, k) / jnp.sqrt(q.shape[-1])
    score = jnp.where(jnp.tril(jnp.ones((t, t), bool)), score, -1e9)
    mixed = jnp.einsum("hts,shk->thk", jax.nn.softmax(score), v).reshape(t, d)
    h = h + mixed @ w["o"].T
    x = rms(h, w["s2"])
    return h + (jax.nn.silu(x @ w["up"]) + w["b"]) @ w["down"]


def transformer_params(layers=3, d=8, vocab=11):
    stack = {n: 0.3 * normal(i, layers, d, d) for i, n in enumerate("qkvo")}
    stack |= {"up": 0.3 * normal(5, layers, d, 16), "down": 0.3 * normal(6, layers, 16, d)}
    stack |= {"s1": 1 + 0.1 * normal(7, layers, d), "s2": 1 + 0.1 * normal(8, layers, d)}
    stack |= {"b": 0.1 * normal(9, layers, 16)}
    return {"embed": normal(10, vocab, d), "layers": stack, "final": jnp.ones(d)}


def transformer_loss(params, example, remat=False, scanned=True, tied=True):
    ids = example["tokens"]
    h = params["embed"][ids] * jnp.sqrt(8.0)
    one = jax.checkpoint(block) if remat else block
    if scanned:
        h, _ = lax.scan(lambda h, w: (one(h, w), None), h, params["layers"])
    else:
        for i in range(3):
            h = one(h, jax.tree.map(lambda w, i=i: w[i], params["layers"]))
    head = params["embed"].T if tied else params["head"]
    logits = rms(h, params["final"]) @ head
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), ids[1:, None], 1)[:, 0]
    mask = example["mask"][1:]
    return -jnp.sum(jnp.where(mask, chosen, 0.0)) / jnp.maximum(mask.sum(), 1)


def lm_batch(*lead, t=6, vocab=11):
    mask = jnp.arange(t) < 3 + jax.random.randint(jax.random.key(5), (*lead, 1), 0, t - 2)
    return {"tokens": tokens(4, vocab, *lead, t), "mask": mask}


@entry
def transformer():
    return transformer_loss, transformer_params(), lm_batch(5)


@entry
def transformer_remat():
    return lambda p, e: transformer_loss(p, e, remat=True), transformer_params(), lm_batch(4)


@entry
def transformer_unrolled_untied():
    params = {**transformer_params(), "head": normal(20, 8, 11)}
    return lambda p, e: transformer_loss(p, e, scanned=False, tied=False), params, lm_batch(4)


@entry
def transformer_user():
    """A user of four examples, some masked: the loss of a unit maps over its examples."""

    def loss(params, user):
        losses = jax.vmap(lambda e: transformer_loss(params, e))(user["examples"])
        return jnp.sum(jnp.where(user["mask"], losses, 0)) / jnp.maximum(user["mask"].sum(), 1)

    mask = jnp.array([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]], bool)
    return loss, transformer_params(), {"examples": lm_batch(3, 4), "mask": mask}


@entry
def lora():
    """The frozen rest is closed over; the trained update is a product of two parameters."""
    frozen = normal(0, 8, 8)

    def loss(params, e):
        h = jnp.tanh(e["x"] @ (frozen + params["a"] @ params["b"]))
        h = jnp.tanh(h @ frozen + (h @ params["c"]) @ params["d"])
        return jnp.sum(h**2)

    shapes = {"a": (8, 2), "b": (2, 8), "c": (8, 2), "d": (2, 8)}
    params = {k: 0.3 * normal(i, *s) for i, (k, s) in enumerate(shapes.items())}
    return loss, params, {"x": normal(9, 5, 3, 8)}


def conv(x, w, numbers=("NHWC", "HWIO", "NHWC"), **options):
    options = {"window_strides": (1, 1), "padding": "SAME", **options}
    return lax.conv_general_dilated(x[None], w, dimension_numbers=numbers, **options)[0]


@entry
def cnn():
    def loss(p, e):
        h = jax.nn.relu(conv(e["x"], p["a"], window_strides=(2, 1)) + p["bias"])
        h = jax.nn.relu(conv(h, p["b"], feature_group_count=2, rhs_dilation=(2, 1)))
        h = lax.reduce_window(h, -jnp.inf, lax.max, (2, 2, 1), (2, 2, 1), "VALID")
        h = conv(h, p["c"], padding=((1, 0), (0, 2)), lhs_dilation=(2, 1))
        return jnp.sum((h.reshape(-1) @ p["d"]) ** 2) / 100

    params = {
        "a": normal(0, 3, 3, 2, 4),
        "bias": normal(1, 4),
        "b": normal(2, 2, 3, 2, 6),
        "c": normal(3, 2, 2, 6, 3),
        "d": normal(4, 36, 2),
    }
    return loss, params, {"x": normal(5, 4, 8, 7, 2)}


@entry
def cnn_channels_first_and_1d():
    def loss(p, e):
        h = jnp.tanh(conv(e["x"], p["a"], ("NCHW", "OIHW", "NCHW"), padding="VALID"))
        h = h.reshape(h.shape[0], -1)
        h = conv(h, p["b"], ("NCH", "OIH", "NCH"), window_strides=(3,), padding="VALID")
        return jnp.sum(h**2) / 100

    params = {"a": normal(0, 4, 2, 3, 3), "b": normal(1, 6, 4, 5)}
    return loss, params, {"x": normal(5, 4, 2, 6, 7)}


@entry
def lstm():
    def loss(p, e):
        def cell(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ p["wx"] + h @ p["wh"] + p["b"], 4)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h @ p["out"]

        start = jnp.zeros(4, e["x"].dtype)
        _, y = lax.scan(cell, (start, start), e["x"])
        return jnp.sum((y - e["y"]) ** 2)

    params = {"wx": normal(0, 3, 16), "wh": normal(1, 4, 16), "b": normal(2, 16)}
    params["out"] = normal(3, 4, 2)
    return loss, params, {"x": normal(4, 5, 7, 3), "y": normal(5, 5, 7, 2)}


@entry
def products_that_are_added():
    """Only to one another (one gradient), and not: read twice, of other shapes, to themselves."""

    def loss(p, e):
        def cell(h, x):
            three = x @ p["a"] + h @ p["b"] + (x**2) @ p["a"]  # p["a"] twice, with one gradient
            read_twice = x @ p["c"]
            mixed = read_twice + h @ p["d"] + jnp.tanh(read_twice)
            doubled = x @ p["e"]
            wide = (x @ p["f"])[:1] + h @ p["g"]  # one number, added to each
            h = jnp.tanh(three + mixed + (doubled + doubled) + wide - h @ p["h"])
            return h, read_twice

        h, seen = lax.scan(cell, jnp.zeros(4, e.dtype), e)
        return jnp.sum(h**2) + jnp.sum(seen * e[:, :1])

    shapes = {"a": (3, 4), "b": (4, 4), "c": (3, 4), "d": (4, 4), "e": (3, 4), "f": (3, 2)}
    shapes |= {"g": (4, 4), "h": (4, 4)}
    params = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    return loss, params, normal(9, 5, 6, 3)


@entry
def gru_reversed_with_carried_weights():
    def loss(p, e):
        def cell(carry, x):
            h, w = carry
            z = jax.nn.sigmoid(jnp.concatenate([x, h]) @ w)
            r = jnp.tanh(x @ p["u"] + (z * h) @ p["v"])
            return ((1 - z) * h + z * r, w), None

        (h, _), _ = lax.scan(cell, (jnp.zeros(4, e["x"].dtype), p["w"]), e["x"], reverse=True)
        return jnp.sum(h**2)

    params = {"w": normal(0, 7, 4), "u": normal(1, 3, 4), "v": normal(2, 4, 4)}
    return loss, params, {"x": normal(4, 5, 6, 3)}


@entry
def unrolled_recurrence():
    def loss(p, e):
        h = jnp.zeros(4, e["x"].dtype)
        for t in range(5):
            h = jnp.tanh(e["x"][t] @ p["u"] + h @ p["w"])
        return jnp.sum(h**2)

    return loss, {"w": normal(0, 4, 4), "u": normal(1, 3, 4)}, {"x": normal(2, 4, 5, 3)}


@entry
def layers_of_recurrences():
    """A scan over stacked layers around a scan over time with shared weights."""

    def loss(p, e):
        def layer(x, w):
            def cell(h, x):
                h = jnp.tanh(x @ w["u"] + h @ w["v"])
                return h, h

            return lax.scan(cell, jnp.zeros(4, x.dtype), x)[1], None

        y, _ = lax.scan(layer, e["x"], p)
        return jnp.sum(y**2)

    return loss, {"u": normal(0, 3, 4, 4), "v": normal(1, 3, 4, 4)}, {"x": normal(2, 4, 5, 4)}


@entry
def one_weight_in_many_forms():
    """The same matrix straight, transposed, as a table, and sliced."""

    def loss(p, e):
        h = jnp.tanh(p["w"][e["i"]] @ p["w"].T)
        h = jnp.tanh(h @ (2.0 * p["w"]))
        return jnp.sum((h @ p["w"][:3].T) ** 2) + jnp.sum((h[:, 2:] @ p["w"][:, :3].T[:2]) ** 2)

    return loss, {"w": 0.5 * normal(0, 5, 4)}, {"i": tokens(1, 5, 4, 6)}


@entry
def straight_and_transposed():
    def loss(p, e):
        return jnp.sum(jnp.tanh(jnp.tanh(e["x"] @ p["w"]) @ p["w"].T) ** 2)

    return loss, {"w": normal(0, 5, 4)}, {"x": normal(1, 4, 6, 5)}


@entry
def tied_embedding():
    def loss(p, e):
        return jax.nn.logsumexp(jnp.tanh(p["e"][e["i"]]) @ p["e"].T, -1).sum()

    return loss, {"e": normal(0, 9, 4)}, {"i": tokens(1, 9, 5, 6)}


@entry
def embedding_lookups():
    """Repeated indices, an index out of range, a table looked up twice, one along axis 1."""

    def loss(p, e):
        a = jnp.take(p["e"], e["i"], axis=0, mode="fill", fill_value=0)
        b = jnp.take(p["f"], e["i"], axis=1, mode="clip")
        c = jnp.take(p["e"], e["i"][::2], axis=0, mode="clip")
        return jnp.sum(jnp.tanh(a) ** 2) + jnp.sum(jnp.tanh(b) ** 3) + jnp.sum(jnp.sin(c))

    ids = jnp.array([[0, 0, 0, 1], [8, 9, 30, 2], [3, 3, 8, 8], [5, 6, 7, 5]])
    return loss, {"e": normal(0, 9, 4), "f": normal(1, 3, 9)}, {"i": ids}


@entry
def unsupported_mixture():
    """Some leaves through operations without a rule, one under a branch, one in a custom rule."""

    @jax.custom_vjp
    def odd(x, w):
        return jnp.sin(x) * w

    odd.defvjp(
        lambda x, w: (odd(x, w), (x, w)), lambda r, g: (g * jnp.cos(r[0]) * r[1], 3 * g.sum(0))
    )

    def loss(p, e):
        h = e["x"] @ p["dense"]
        h = odd(h, p["custom"])
        h = jnp.cumsum(p["cum"]) * h + jnp.sort(p["sort"])
        h = lax.cond(h.sum() > 0, lambda h: h @ p["branch"], lambda h: h * 2.0, h)
        h = h @ jnp.tril(p["tri"]) @ jnp.linalg.inv(p["inv"] + 5 * jnp.eye(4))
        return jnp.sum(jnp.tanh(h) ** 2) + jnp.sum(p["reg"] ** 2) + p["scalar"]

    params = {k: normal(i, 4, 4) for i, k in enumerate(("branch", "tri", "inv"))}
    params |= {k: normal(i + 5, 4) for i, k in enumerate(("custom", "cum", "sort", "reg"))}
    params |= {"dense": normal(20, 3, 4), "scalar": jnp.float32(2.0), "unused": normal(21, 2)}
    return loss, params, {"x": normal(22, 5, 3, 3)}


@entry
def activations_with_custom_rules():
    def loss(p, e):
        h = jax.nn.relu(e["x"] @ p["a"])
        h = jax.nn.softplus(jax.nn.silu(h) @ p["b"])
        return jnp.sum(jax.nn.log_softmax(jax.nn.gelu(h)) ** 2)

    return loss, {"a": normal(0, 3, 5), "b": normal(1, 5, 4)}, {"x": normal(2, 4, 3)}


@entry
def jitted_pieces_and_stopped_gradients():
    @jax.jit
    def turn(w):
        return w.T

    @jax.jit
    def dense(x, w):
        return x @ turn(w)

    def loss(p, e):
        h = dense(e["x"], p["a"]) + jax.lax.stop_gradient(p["b"])
        return jnp.sum(dense(h, p["b"]) ** 2)

    return (
        loss,
        {"a": normal(0, 4, 3), "b": normal(1, 4, 4)[0] * jnp.ones((4, 4))},
        {"x": normal(2, 5, 3)},
    )


@entry
def experts():
    """Products with a batch axis: each expert its own matrix."""

    def loss(p, e):
        gate = jax.nn.softmax(e["x"] @ p["gate"])
        h = jnp.einsum("td,edf->etf", e["x"], p["up"])
        y = jnp.einsum("etf,efd->etd", jnp.tanh(h), p["down"])
        return jnp.sum(jnp.einsum("te,etd->td", gate, y) ** 2)

    params = {"gate": normal(0, 4, 3), "up": normal(1, 3, 4, 5), "down": normal(2, 3, 5, 4)}
    return loss, params, {"x": normal(3, 4, 6, 4)}
