"""What small models have in common: a Flax module as functions of a plain tree of parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpfl_jax.errors import BadInputError

PyTree = Any


class FunctionalModel:
    """``init``, ``outputs``, ``loss`` and ``predict`` for ONE example ``{"x": ..., "label": ...}``.

    Attributes:
      module: maps one input to its outputs.
      input_shape: shape of one input.
      input_dtype: its type.
    """

    def __init__(
        self, module: nn.Module, input_shape: Sequence[int], input_dtype: Any = jnp.float32
    ) -> None:
        self.module = module
        self.input_shape = tuple(input_shape)
        self.input_dtype = jnp.dtype(input_dtype)

    def init(self, key: jax.Array) -> PyTree:
        """Returns fresh parameters: a nested dict of float32 arrays."""
        return self.module.init(key, jnp.zeros(self.input_shape, self.input_dtype))["params"]

    def outputs(self, params: PyTree, x: jax.Array) -> jax.Array:
        """What the last layer gives for one input, float32.

        Raises:
          BadInputError: ``x`` has another shape than one input.
        """
        if x.shape != self.input_shape:
            raise BadInputError(
                f"{type(self).__name__} takes one input of shape {self.input_shape}, got "
                f"{x.shape}: use jax.vmap for a batch"
            )
        out: jax.Array = self.module.apply({"params": params}, x.astype(self.input_dtype))  # type: ignore[assignment]
        return out.astype(jnp.float32)

    def loss(
        self, params: PyTree, example: Mapping[str, jax.Array], rng: jax.Array | None = None
    ) -> jax.Array:
        """Loss of one example, float32 scalar; ``rng`` is unused (there is no dropout)."""
        raise NotImplementedError

    def predict(self, params: PyTree, x: jax.Array) -> jax.Array:
        """The model's answer for one input."""
        raise NotImplementedError

    @functools.cached_property
    def num_params(self) -> int:
        """Number of parameters, without allocating them."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    """In nats, of one label; NaN for one that is no class, so that it is noticed."""
    logits = logits.astype(jnp.float32)
    valid = (label >= 0) & (label < logits.shape[-1])
    picked = jnp.where(jnp.arange(logits.shape[-1]) == label, logits, 0.0).sum()
    return jax.nn.logsumexp(logits) - jnp.where(valid, picked, jnp.nan)


class Classifier(FunctionalModel):
    """Outputs are one logit per class; the label is an int below their number."""

    def loss(
        self, params: PyTree, example: Mapping[str, jax.Array], rng: jax.Array | None = None
    ) -> jax.Array:
        """Cross-entropy in nats; NaN for a label that is no class, so that it is noticed."""
        del rng
        return cross_entropy(self.outputs(params, example["x"]), example["label"])

    def predict(self, params: PyTree, x: jax.Array) -> jax.Array:
        """The most likely class, int32 scalar."""
        return jnp.argmax(self.outputs(params, x)).astype(jnp.int32)
