"""The blocks of the transformer, as Flax NNX modules for one sequence of tokens.

Everything is written for one example [L, ...] and batched with ``jax.vmap``. Only matrix products,
lookups and elementwise operations touch parameters, and positions never depend on the data, so
that bounded gradients can be computed without per-unit copies of the parameters.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dpfl_jax.models.config import TransformerConfig


class Norm(nnx.Module):
    """RMSNorm or LayerNorm with float32 statistics."""

    def __init__(self, config: TransformerConfig) -> None:
        self.center = config.norm == "layer"
        self.eps = config.norm_eps
        self.scale = nnx.Param(jnp.ones((config.width,), jnp.float32))
        if self.center and config.bias:
            self.bias = nnx.Param(jnp.zeros((config.width,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises [L, width] over its last axis; the result has the dtype of ``x``."""
        y = x.astype(jnp.float32)
        if self.center:
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        y = y * self.scale[...]
        if hasattr(self, "bias"):
            y = y + self.bias[...]
        return y.astype(x.dtype)


def linear(
    config: TransformerConfig, size_in: int, size_out: int, rngs: nnx.Rngs, residual: bool = False
) -> nnx.Linear:
    """A linear layer; ``residual`` says that it writes to the residual stream."""
    stddev = config.init_stddev / (np.sqrt(2 * config.layers) if residual else 1.0)
    return nnx.Linear(
        size_in,
        size_out,
        use_bias=config.bias,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.float32,
        kernel_init=nnx.initializers.normal(stddev),
        rngs=rngs,
    )


def rotary_angles(length: int, head_size: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary angles, float32 [length, 1, head_size / 2] each."""
    rates = theta ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    angles = np.arange(length, dtype=np.float64)[:, None, None] * rates
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates pairs (i, i + head_size / 2) of [L, heads, head_size] in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention, with grouped queries where there are fewer key heads."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        queries = config.heads * config.head_size
        keys = config.num_kv_heads * config.head_size
        self.query = linear(config, config.width, queries, rngs)
        self.key = linear(config, config.width, keys, rngs)
        self.value = linear(config, config.width, keys, rngs)
        self.out = linear(config, queries, config.width, rngs, residual=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [L, width] to [L, width]."""
        config, length = self.config, x.shape[0]
        size, groups = config.head_size, config.num_kv_heads
        q = self.query(x).reshape(length, config.heads, size)
        k = self.key(x).reshape(length, groups, size)
        v = self.value(x).reshape(length, groups, size)
        if config.positions == "rotary":
            cos, sin = rotary_angles(length, size, config.rope_theta)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q = q.reshape(length, groups, config.heads // groups, size)
        scores = jnp.einsum("qgnd,kgd->gnqk", q, k, preferred_element_type=jnp.float32)
        causal = np.tril(np.ones((length, length), bool))
        scores = jnp.where(causal, scores * size**-0.5, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        mixed = jnp.einsum("gnqk,kgd->qgnd", weights, v)
        return self.out(mixed.reshape(length, config.heads * size))


class MLP(nnx.Module):
    """Two linear layers with GELU, or three with a gate."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        self.up = linear(config, config.width, config.hidden, rngs)
        self.down = linear(config, config.hidden, config.width, rngs, residual=True)
        if config.gated:
            self.gate = linear(config, config.width, config.hidden, rngs)
        gelu = functools.partial(jax.nn.gelu, approximate=True)
        self.activation = jax.nn.silu if config.activation == "swiglu" else gelu

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [L, width] to [L, width]."""
        if hasattr(self, "gate"):
            return self.down(self.activation(self.gate(x)) * self.up(x))
        return self.down(self.activation(self.up(x)))


class Block(nnx.Module):
    """Attention and MLP, each on the normalised residual stream."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = Norm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = Norm(config)
        self.mlp = MLP(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [L, width] to [L, width]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Ends(nnx.Module):
    """What comes before and after the blocks: embeddings, last norm, head."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        normal = nnx.initializers.normal(config.init_stddev)
        shape = (config.padded_vocab_size, config.width)
        self.embedding = nnx.Param(normal(rngs.params(), shape, jnp.float32))
        if config.positions == "learned":
            shape = (config.max_seq_len, config.width)
            self.positions = nnx.Param(normal(rngs.params(), shape, jnp.float32))
        self.norm = Norm(config)
        if not config.tied_head:
            shape = (config.width, config.padded_vocab_size)
            self.head = nnx.Param(normal(rngs.params(), shape, jnp.float32))

    def embed(self, inputs: jax.Array) -> jax.Array:
        """Maps token ids [L] to [L, width] in the compute dtype; ids out of range give NaN."""
        # Rows are taken before the cast: casting the whole table would cost its size every time.
        x = jnp.take(self.embedding[...], inputs, axis=0, mode="fill")
        if self.config.positions == "learned":
            x = x + self.positions[...][: inputs.shape[0]]
        return x.astype(self.config.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """Maps [L, width] to float32 [L, vocab_size]."""
        x = self.norm(x)
        if self.config.tied_head:
            table = self.embedding[...].astype(x.dtype)
            out = jnp.einsum("ld,vd->lv", x, table, preferred_element_type=jnp.float32)
        else:
            head = self.head[...].astype(x.dtype)
            out = jnp.einsum("ld,dv->lv", x, head, preferred_element_type=jnp.float32)
        return out[:, : self.config.vocab_size]
