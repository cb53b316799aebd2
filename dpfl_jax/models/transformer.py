"""A decoder-only transformer in Flax: pre-norm, rotary or learned positions, scanned blocks.

Attention and projections are plain matrix products of parameters with data: what computes the
norms of per-person gradients from the loss's jaxpr knows those.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from dpfl_jax.errors import BadInputError
from dpfl_jax.models.config import TransformerConfig

PyTree = Any
Initializer = Callable[..., jax.Array]
_STDDEV = 0.02


class Linear(nn.Module):
    """x @ kernel (+ bias) in the compute dtype; x [..., i] -> [..., features]."""

    features: int
    config: TransformerConfig
    stddev: float = _STDDEV

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the projection."""
        kernel = self.param(
            "kernel", nn.initializers.normal(self.stddev), (x.shape[-1], self.features)
        )
        y = x @ kernel.astype(x.dtype)
        if self.config.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,))
            y = y + bias.astype(x.dtype)
        return y


class Norm(nn.Module):
    """RMS or layer norm over the last axis, in float32, returned in the input's dtype."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises and scales."""
        y = x.astype(jnp.float32)
        if self.config.norm == "layer":
            y = y - y.mean(axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.config.norm_eps)
        y = y * self.param("scale", nn.initializers.ones, (x.shape[-1],))
        if self.config.norm == "layer":
            y = y + self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        return y.astype(x.dtype)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary positions (Su et al. 2021), halves convention; x [heads, length, width]."""
    _, length, width = x.shape
    frequencies = theta ** (-np.arange(0, width, 2) / width)
    angles = np.arange(length)[:, None] * frequencies
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class Attention(nn.Module):
    """Causal self-attention, optionally with fewer key and value heads."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """X [length, embed_dim] -> the same shape."""
        c = self.config
        length = x.shape[0]

        def heads(name: str, count: int) -> jax.Array:
            # Heads first: the products below are then batched over a leading axis, without copies.
            y = Linear(count * c.width, c, name=name)(x)
            return y.reshape(length, count, c.width).transpose(1, 0, 2)

        q = heads("query", c.num_heads) * c.width**-0.5
        k, v = heads("key", c.kv_heads), heads("value", c.kv_heads)
        if c.positions == "rotary":
            q, k = rotate(q, c.rope_theta), rotate(k, c.rope_theta)
        # Query heads in groups that share one key and value head.
        q = q.reshape(c.kv_heads, c.num_heads // c.kv_heads, length, c.width)
        scores = jnp.einsum("kgtw,ksw->kgts", q, k, preferred_element_type=jnp.float32)
        # Finite, so that nothing is ever inf - inf; its exponential is exactly 0.
        future = np.triu(np.full((length, length), -1e30, np.float32), 1)
        weights = jax.nn.softmax(scores + future, axis=-1).astype(x.dtype)
        mixed = jnp.einsum("kgts,ksw->kgtw", weights, v)
        mixed = mixed.reshape(c.num_heads, length, c.width).transpose(1, 0, 2).reshape(length, -1)
        return Linear(c.embed_dim, c, _STDDEV / math.sqrt(2 * c.num_layers), name="out")(mixed)


class Mlp(nn.Module):
    """Two or (gated) three projections."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """X [length, embed_dim] -> the same shape."""
        c = self.config
        y = Linear(c.hidden, c, name="up")(x)
        if c.gated:
            gate = Linear(c.hidden, c, name="gate")(x)
            y = y * (jax.nn.silu(gate) if c.activation == "swiglu" else jax.nn.gelu(gate))
        else:
            y = jax.nn.gelu(y)
        return Linear(c.embed_dim, c, _STDDEV / math.sqrt(2 * c.num_layers), name="down")(y)


class Block(nn.Module):
    """One pre-norm block, in the form that ``nn.scan`` wants: (carry, nothing)."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        """X [length, embed_dim] -> (the same shape, None)."""
        x = x + Attention(self.config, name="attention")(Norm(self.config, name="norm1")(x))
        return x + Mlp(self.config, name="mlp")(Norm(self.config, name="norm2")(x)), None


class Transformer(nn.Module):
    """tokens int32 [length] -> logits float32 [length, vocab_size] for the *same* positions.

    The input is shifted right behind the beginning-of-sequence id, so that position t predicts
    token t from the tokens before it.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Runs the model on one sequence."""
        c = self.config
        dtype = jnp.dtype(c.dtype)
        init = nn.initializers.normal(_STDDEV)
        embedding = self.param("embedding", init, (c.vocab_size, c.embed_dim))
        bos = jnp.full((1,), c.bos_id, tokens.dtype)
        inputs = jnp.concatenate([bos, tokens[:-1]])
        # Rows before the cast (casting the table would cost its size), and NaN, not another row,
        # for an id outside the vocabulary: a wrong tokeniser must not go unnoticed.
        x = jnp.take(embedding, inputs, axis=0, mode="fill").astype(dtype)
        if c.positions == "learned":
            positions = self.param("positions", init, (c.max_seq_len, c.embed_dim))
            x = x + positions[: tokens.shape[0]].astype(dtype)
        block = Block
        if c.remat != "none":
            # Projections are the matrix products without batch axes (the others have heads).
            kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            policy = kept if c.remat == "light" else None
            block = nn.remat(Block, prevent_cse=not c.scan_layers, policy=policy)
        if c.scan_layers:
            stack = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=c.num_layers,
            )
            x, _ = stack(c, name="blocks")(x, None)
        else:
            for i in range(c.num_layers):
                x, _ = block(c, name=f"block_{i}")(x)
        x = Norm(c, name="final_norm")(x)
        if c.tie_embeddings:
            head = embedding.T
        else:
            head = self.param("head", init, (c.embed_dim, c.vocab_size))
        return jnp.matmul(x, head.astype(dtype), preferred_element_type=jnp.float32)


class LanguageModel:
    """A transformer as pure functions of its parameters.

    Attributes:
      config: its shape.
    """

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config
        self._module = Transformer(config)

    def init(self, key: jax.Array) -> PyTree:
        """Returns fresh parameters: a nested dict of float32 arrays."""
        tokens = jnp.zeros((self.config.max_seq_len,), jnp.int32)
        return self._module.init(key, tokens)["params"]

    def logits(self, params: PyTree, tokens: jax.Array) -> jax.Array:
        """Tokens int32 [length] -> float32 [length, vocab_size]; row t predicts token t.

        Raises:
          BadInputError: a batch, or a sequence longer than max_seq_len.
        """
        if tokens.ndim != 1:
            raise BadInputError(
                f"the language model takes one sequence of token ids, got shape {tokens.shape}: "
                "use jax.vmap for a batch"
            )
        if tokens.shape[0] > self.config.max_seq_len:
            raise BadInputError(
                f"a sequence has {tokens.shape[0]} tokens, but the model's max_seq_len is "
                f"{self.config.max_seq_len}: raise it, or cut the sequences shorter"
            )
        logits: jax.Array = self._module.apply({"params": params}, tokens)  # type: ignore[assignment]
        return logits

    def loss(
        self, params: PyTree, example: dict[str, jax.Array], rng: jax.Array | None = None
    ) -> jax.Array:
        """Mean next-token cross-entropy of ONE example over its real tokens, in nats.

        Args:
          params: as returned by ``init``.
          example: ``tokens`` int32 [length] and ``mask`` bool [length], True for real tokens. Other
            tokens are not predicted, but later ones see them: padding belongs at the end.
          rng: unused (there is no dropout).

        Returns:
          float32 scalar; 0 for an example without real tokens.
        """
        del rng
        tokens, real = example["tokens"], example["mask"].astype(bool)
        logits = self.logits(params, tokens)
        # A comparison instead of a lookup: no scatter backwards, and the vocabulary may be sharded.
        target = jnp.arange(self.config.vocab_size)[None, :] == tokens[:, None]
        picked = jnp.where(target, logits, 0.0).sum(axis=-1)
        losses = jnp.where(real, jax.nn.logsumexp(logits, axis=-1) - picked, 0.0)
        return losses.sum() / jnp.maximum(real.sum(), 1).astype(jnp.float32)

    @functools.cached_property
    def num_params(self) -> int:
        """Number of parameters, without allocating them."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
