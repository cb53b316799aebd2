"""Losses with convolutions, ``name -> (loss, params, shape of an example's x)``."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ZOO = {}


def entry(function):
    ZOO[function.__name__] = function
    return function


def normal(i, *shape):
    return (0.5 * np.random.default_rng(i).normal(size=shape)).astype("f4")


def conv(x, w, **options):
    letters = "WHD"[: x.ndim - 1][::-1]
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    options = {"window_strides": (1,) * len(letters), "padding": "SAME", **options}
    return lax.conv_general_dilated(x[None], w, dimension_numbers=numbers, **options)[0]


def energy(h):
    """A scalar to which all positions and channels add differently."""
    weights = 1 + jnp.arange(h.size, dtype=jnp.float32).reshape(h.shape) / h.size
    return jnp.sum(jnp.tanh(h) * weights) ** 2 / h.size


@entry
def one_d():
    return lambda p, e: energy(conv(e["x"], p["w"]) + p["bias"]), {
        "w": normal(0, 3, 4, 8),
        "bias": normal(1, 8),
    }, (6, 4)  # fmt: skip


@entry
def two_d():
    def loss(p, e):
        h = jax.nn.relu(conv(e["x"], p["a"], window_strides=(2, 1)))
        return energy(h.reshape(-1) @ p["out"])

    return loss, {"a": normal(0, 3, 3, 2, 8), "out": normal(1, 64, 4)}, (4, 4, 2)


@entry
def grouped():
    return (
        lambda p, e: energy(conv(e["x"], p["w"], feature_group_count=2)),
        {"w": normal(0, 3, 4, 8)},
        (6, 8),
    )


@entry
def dilated():
    return (
        lambda p, e: energy(conv(e["x"], p["w"], rhs_dilation=(2,))),
        {"w": normal(0, 3, 4, 8)},
        (7, 4),
    )


@entry
def depthwise():
    return (
        lambda p, e: energy(conv(e["x"], p["w"], feature_group_count=8) @ p["up"]),
        {"w": normal(0, 3, 1, 8), "up": normal(1, 8, 4)},
        (6, 8),
    )


@entry
def transposed():
    def loss(p, e):
        numbers = ("NWC", "WIO", "NWC")
        return energy(lax.conv_transpose(e["x"][None], p["w"], (2,), "SAME", None, numbers)[0])

    return loss, {"w": normal(0, 4, 4, 8)}, (5, 4)


@entry
def standardised():
    def loss(p, e):
        w = p["w"]
        w = (w - w.mean((0, 1, 2))) / (w.std((0, 1, 2)) + 0.1)
        return energy(conv(e["x"], w * p["scale"]))

    return loss, {"w": normal(0, 3, 3, 4, 8), "scale": 1 + normal(1, 8)}, (4, 4, 4)


@entry
def scanned():
    """Blocks of a dense layer and a convolution, stacked; each is computed again."""

    def block(h, layer):
        return h + conv(jnp.tanh(h @ layer["dense"]), layer["w"]), None

    def loss(p, e):
        h, _ = lax.scan(jax.checkpoint(block), e["x"] @ p["in"], p["layers"])
        return energy(h)

    layers = {"w": normal(0, 2, 3, 8, 8), "dense": normal(1, 2, 8, 8)}
    return loss, {"in": normal(2, 4, 8), "layers": layers}, (6, 4)


# What the partitioner may split for itself: the kernel, and nothing of the parameters of a dense
# layer before it.
KERNELS = {
    "one_d": {"w"},
    "two_d": {"a"},
    "grouped": {"w"},
    "dilated": {"w"},
    "depthwise": {"w"},
    "transposed": {"w"},
    "standardised": {"w", "scale"},
    "scanned": {"layers/w"},
}
