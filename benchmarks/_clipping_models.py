"""The models that ``dpfl bench clipping`` measures: losses of one unit, parameters, a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax.errors import BadInputError

PyTree = Any
MODELS = ("lm-small", "lm-350m", "cnn", "lstm", "mlp")


@dataclasses.dataclass(frozen=True)
class Workload:
    """Something to take bounded gradients of.

    Attributes:
      loss: ``(params, unit) -> scalar``.
      init: key -> params.
      batch: key -> pytree of arrays [n, ...].
    """

    loss: Callable[[PyTree, PyTree], jax.Array]
    init: Callable[[jax.Array], PyTree]
    batch: Callable[[jax.Array], PyTree]


def workload(
    name: str, unit: str, batch: int, group_size: int, seq_len: int, dtype: str
) -> Workload:
    """Builds a workload.

    Args:
      name: one of ``MODELS``.
      unit: ``"example"`` or ``"user"`` (of ``group_size`` examples).
      batch: number of units.
      group_size: examples of a user.
      seq_len: tokens of an example, time steps for the LSTM.
      dtype: of the language models' activations.

    Raises:
      BadInputError: an unknown model.
    """
    if name not in MODELS:
        raise BadInputError(f"bench clipping: model is {name!r}, but it must be one of {MODELS}")
    lead = (batch,) if unit == "example" else (batch, group_size)
    if name.startswith("lm"):
        base = _language_model(name, lead, seq_len, dtype)
    else:
        base = {"cnn": _cnn, "lstm": _lstm, "mlp": _mlp}[name](lead, seq_len)
    if unit == "example":
        return base

    def user_loss(params: PyTree, user: PyTree) -> jax.Array:
        return jnp.mean(jax.vmap(lambda e: base.loss(params, e))(user))

    return dataclasses.replace(base, loss=user_loss)


def _language_model(name: str, lead: tuple[int, ...], seq_len: int, dtype: str) -> Workload:
    from dpfl_jax.models import LanguageModel, transformer_config

    size, vocab = {"lm-small": ("3m", 1024), "lm-350m": ("350m", 32_000)}[name]
    config = transformer_config(size, vocab_size=vocab, max_seq_len=seq_len, dtype=dtype)
    model = LanguageModel(config)

    def make(key: jax.Array) -> PyTree:
        tokens = jax.random.randint(key, (*lead, seq_len), 3, vocab)
        return {"tokens": tokens, "mask": jnp.ones((*lead, seq_len), bool)}

    return Workload(model.loss, model.init, make)


def _cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    return -jax.nn.log_softmax(logits)[label]


def images(lead: tuple[int, ...], *shape: int) -> Callable[[jax.Array], PyTree]:
    def make(key: jax.Array) -> PyTree:
        label = jax.random.randint(key, lead, 0, 10)
        return {"x": jax.random.normal(key, (*lead, *shape)), "label": label}

    return make


def _random(key: jax.Array, *shape: int) -> jax.Array:
    fan_in = 1
    for size in shape[:-1]:
        fan_in *= size
    return jax.random.normal(key, shape) * fan_in**-0.5


def _cnn(lead: tuple[int, ...], seq_len: int) -> Workload:
    del seq_len
    sizes = ((5, 5, 1, 32), (3, 3, 32, 64), (3, 3, 64, 64), (7 * 7 * 64, 128), (128, 10))

    def init(key: jax.Array) -> PyTree:
        keys = jax.random.split(key, len(sizes))
        return {
            f"layer{i}": {"kernel": _random(k, *s), "bias": jnp.zeros(s[-1])}
            for i, (k, s) in enumerate(zip(keys, sizes))
        }

    def loss(params: PyTree, e: PyTree) -> jax.Array:
        h = e["x"][None]
        for i, stride in enumerate((2, 2, 1)):
            w = params[f"layer{i}"]
            h = jax.lax.conv_general_dilated(
                h, w["kernel"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            h = jax.nn.relu(h + w["bias"])
        h = h.reshape(-1)
        h = jax.nn.relu(h @ params["layer3"]["kernel"] + params["layer3"]["bias"])
        logits = h @ params["layer4"]["kernel"] + params["layer4"]["bias"]
        return _cross_entropy(logits, e["label"])

    return Workload(loss, init, images(lead, 28, 28, 1))


def _lstm(lead: tuple[int, ...], seq_len: int) -> Workload:
    width, inputs = 128, 32

    def init(key: jax.Array) -> PyTree:
        a, b, c = jax.random.split(key, 3)
        return {
            "x": _random(a, inputs, 4 * width),
            "h": _random(b, width, 4 * width),
            "bias": jnp.zeros(4 * width),
            "out": _random(c, width, 10),
        }

    def loss(params: PyTree, e: PyTree) -> jax.Array:
        def cell(carry: Any, x: jax.Array) -> Any:
            h, c = carry
            gates = x @ params["x"] + h @ params["h"] + params["bias"]
            i, f, g, o = jnp.split(gates, 4)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), None

        zero = jnp.zeros(width)
        (h, _), _ = jax.lax.scan(cell, (zero, zero), e["x"])
        return _cross_entropy(h @ params["out"], e["label"])

    return Workload(loss, init, images(lead, seq_len, inputs))


def _mlp(lead: tuple[int, ...], seq_len: int) -> Workload:
    del seq_len
    sizes = (784, 512, 512, 10)

    def init(key: jax.Array) -> PyTree:
        keys = jax.random.split(key, 3)
        return [
            {"kernel": _random(k, a, b), "bias": jnp.zeros(b)}
            for k, a, b in zip(keys, sizes, sizes[1:])
        ]

    def loss(params: PyTree, e: PyTree) -> jax.Array:
        h = e["x"]
        for i, w in enumerate(params):
            h = h @ w["kernel"] + w["bias"]
            h = jax.nn.relu(h) if i < 2 else h
        return _cross_entropy(h, e["label"])

    return Workload(loss, init, images(lead, 784))
