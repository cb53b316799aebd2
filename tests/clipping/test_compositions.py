"""Random compositions of supported operations, against per-unit gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from test_taps import compare

WIDTH = 4


def dense(x, w):
    return jnp.tanh(x @ w["m"])


def turned(x, w):
    return jnp.tanh(jnp.einsum("td,ed->te", x, 2.0 * w["m"]))


def split_heads(x, w):
    q = jnp.einsum("td,dhk->thk", x, w["m"].reshape(WIDTH, 2, 2))
    return jnp.tanh(q.reshape(x.shape))


def sliced(x, w):
    return jnp.concatenate([x @ w["m"][:, :2], jnp.sin(x @ w["m"][:, 2:])], axis=1)


def affine(x, w):
    return x * w["s"] + w["b"]


def normed(x, w):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 0.1) * w["s"]


def convolved(x, w):
    kernel = w["k"].reshape(3, WIDTH, WIDTH)
    y = lax.conv_general_dilated(
        x[None], kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    )
    return jnp.tanh(y[0])


def recurrent(x, w):
    def cell(h, x):
        h = jnp.tanh(x @ w["m"] + h @ w["n"])
        return h, h

    return lax.scan(cell, jnp.zeros(WIDTH), x)[1]


def looked_up(x, w):
    return x + w["m"][jnp.argsort(x[:, 0]) % WIDTH]


def attention(x, w):
    return jax.nn.softmax((x @ w["m"]) @ (x @ w["n"]).T) @ x


def recomputed(x, w):
    return jax.checkpoint(dense)(x, w) + x


def jitted(x, w):
    return jax.jit(dense)(x, w) - jax.nn.relu(x)


def without_rule(x, w):
    return x * jnp.cumsum(w["s"]) + jnp.sort(w["b"])


LAYERS = [
    dense,
    turned,
    split_heads,
    sliced,
    affine,
    normed,
    convolved,
    recurrent,
    looked_up,
    attention,
    recomputed,
    jitted,
    without_rule,
]


def parameters(seed):
    keys = jax.random.split(jax.random.key(seed), 5)
    return {
        "m": jax.random.normal(keys[0], (WIDTH, WIDTH)),
        "n": jax.random.normal(keys[1], (WIDTH, WIDTH)),
        "k": 0.5 * jax.random.normal(keys[2], (3 * WIDTH, WIDTH)),
        "s": 1 + 0.3 * jax.random.normal(keys[3], (WIDTH,)),
        "b": jax.random.normal(keys[4], (WIDTH,)),
    }


def check(layers, shared, stacked, length, units, method, seed):
    count = 1 if shared else len(layers)
    weights = [parameters(seed + i) for i in range(count)]
    params = {"layers": weights}
    if stacked:
        params["stack"] = jax.tree.map(lambda *a: jnp.stack(a), parameters(50), parameters(51))

    def loss(params, x):
        for i, layer in enumerate(layers):
            x = layer(x, params["layers"][i % count])
        if stacked:
            x, _ = lax.scan(lambda x, w: (layers[0](x, w), None), x, params["stack"])
        return jnp.sum(jnp.sin(x))

    batch = jax.random.normal(jax.random.key(seed + 99), (units, length, WIDTH))
    compare(loss, params, batch, [method], mask=np.arange(units) != units - 2)


CASES = {
    "layers": st.lists(st.sampled_from(LAYERS), min_size=1, max_size=4),
    "shared": st.booleans(),
    "stacked": st.booleans(),
    "length": st.integers(1, 5),
    "units": st.integers(1, 3),
    "method": st.sampled_from([None, "gram", "direct", "keep"]),
    "seed": st.integers(0, 10),
}


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=8)
@given(**CASES)
def test_random_compositions(**case):
    check(**case)


@pytest.mark.nightly
@settings(derandomize=True, deadline=None, max_examples=60)
@given(**CASES)
def test_many_random_compositions(**case):
    check(**case)
