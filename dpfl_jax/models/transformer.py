"""A decoder-only transformer in Flax: pre-norm, rotary or learned positions, scanned blocks.

All parameters enter in plain matrix products with data, from which the loss's jaxpr gives per-unit
gradient norms. Operations between them have no parameters and may have any form.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from dpfl_jax.errors import BadInputError
from dpfl_jax.models.attention import (
    attend,
    rotary_frequencies,
    rotary_tables,
    rotate,
    visible,
    weighted,
)
from dpfl_jax.models.config import TransformerConfig
from dpfl_jax.models.params import flat_paths, is_adapter, nested, without_adapters
from dpfl_jax.task import takes_segments

PyTree = Any
_STDDEV = 0.02
# Above this many logits (1 GiB) losses are computed in chunks.
_MAX_LOGITS = 2**28


Constraint = Callable[[jax.Array], jax.Array]


_CONSTRAINT = contextvars.ContextVar[Constraint | None]("constraint", default=None)


@contextlib.contextmanager
def constrain_activations(constraint: Constraint) -> Iterator[None]:
    """Applies ``constraint`` to every activation of the models traced inside.

    With parameters split over devices, the compiler may follow them, give every device a slice of
    each layer of *all* examples, and send activations rather than parameters. A caller who knows
    the mesh keeps each activation with its example by a sharding constraint.
    """
    token = _CONSTRAINT.set(constraint)
    try:
        yield
    finally:
        _CONSTRAINT.reset(token)


def _constrained(x: jax.Array) -> jax.Array:
    constraint = _CONSTRAINT.get()
    return x if constraint is None else constraint(x)


class Linear(nn.Module):
    """x @ kernel (+ bias) in the compute dtype; x [..., i] -> [..., features].

    With ``experts`` each expert has a kernel: x [length, i] -> [length, experts, features], and
    x [length, experts, i] -> [length, features], summed over experts.
    """

    features: int
    config: TransformerConfig
    stddev: float = _STDDEV
    bias: bool = False
    experts: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        lead = () if self.experts is None else (self.experts,)
        init = nn.initializers.normal(self.stddev)
        kernel = self.param("kernel", init, (*lead, x.shape[-1], self.features))
        y = _product(x, kernel.astype(x.dtype), x.ndim == 2)
        if self.config.use_bias or self.bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,))
            y = y + bias.astype(x.dtype)
        lora = self.config.lora
        if lora is not None and lora.covers("/".join(self.path)):
            down = nn.initializers.normal(x.shape[-1] ** -0.5)
            a = self.param("lora_a", down, (*lead, x.shape[-1], lora.rank))
            b = self.param("lora_b", nn.initializers.zeros, (*lead, lora.rank, self.features))
            inner = _product(x, a.astype(x.dtype), True)
            y = y + _product(inner, b.astype(x.dtype), x.ndim == 2) * lora.scale
        if self.name in self.config.remat_saves:
            y = checkpoint_name(y, self.name)
        return _constrained(y)


def _product(x: jax.Array, kernel: jax.Array, separate: bool) -> jax.Array:
    """x @ kernel; with experts one product for each, kept separate or summed."""
    if kernel.ndim == 2:
        return x @ kernel
    read, made = "te" if x.ndim == 3 else "t", "te" if separate else "t"
    return jnp.einsum(f"{read}i,eif->{made}f", x, kernel)


class Norm(nn.Module):
    """RMS or layer norm over the last axis, in float32, returned in the input's dtype."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        if self.config.norm == "layer":
            y = y - y.mean(axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.config.norm_eps)
        if self.config.norm_plus_one:  # in this form the parameter multiplies data
            y = y + y * self.param("scale", nn.initializers.zeros, (x.shape[-1],))
        else:
            y = y * self.param("scale", nn.initializers.ones, (x.shape[-1],))
        if self.config.norm == "layer":
            y = y + self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        return y.astype(x.dtype)


class Attention(nn.Module):
    """Causal self-attention, optionally with fewer key and value heads (grouped-query attention).

    Attributes:
      config: the model's shape.
      decode: continue from a cache of keys and values of up to max_seq_len earlier positions.
    """

    config: TransformerConfig
    decode: bool = False

    @nn.compact
    def __call__(
        self, x: jax.Array, local: bool | jax.Array = False, segments: jax.Array | None = None
    ) -> jax.Array:
        """x [length, embed_dim] -> the same shape; ``local``: bool, whether the layer is local."""
        c = self.config
        length = x.shape[0]

        def heads(name: str, count: int, norm: str | None = None) -> jax.Array:
            # Heads first: the products below are batched over a leading axis, without copies.
            y = Linear(count * c.width, c, bias=c.qkv_bias, name=name)(x)
            y = y.reshape(length, count, c.width)
            y = Norm(c, name=norm)(y) if norm is not None and c.head_norms else y
            return y.transpose(1, 0, 2)

        scale = c.width**-0.5 if c.query_scale is None else c.query_scale
        q = heads("query", c.num_heads, "query_norm") * scale
        k, v = heads("key", c.kv_heads, "key_norm"), heads("value", c.kv_heads)
        # Query heads in groups that share one key and value head.
        grouped = (c.kv_heads, c.num_heads // c.kv_heads, length, c.width)
        if self.decode:
            q, k, v, seen = self._cached(q, k, v, local)
            mixed = weighted(q.reshape(grouped), k, v, seen, c.attention_softcap)
        else:
            q, k = self._rotated(q, k, 0, local)
            mixed = self._attend(q.reshape(grouped), k, v, local, segments)
        mixed = mixed.reshape(c.num_heads, length, c.width).transpose(1, 0, 2).reshape(length, -1)
        return Linear(c.embed_dim, c, _STDDEV / math.sqrt(2 * c.num_layers), name="out")(mixed)

    def _attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        local: bool | jax.Array,
        segments: jax.Array | None,
    ) -> jax.Array:
        c = self.config
        form = functools.partial(
            attend, form=c.attention, softcap=c.attention_softcap, segments=segments
        )
        near = functools.partial(form, window=c.sliding_window)
        if c.sliding_window is None or c.sliding_window >= q.shape[2]:
            return form(q, k, v)
        if isinstance(local, bool):
            return near(q, k, v) if local else form(q, k, v)
        return jax.lax.cond(local, near, form, q, k, v)

    def _rotated(
        self, q: jax.Array, k: jax.Array, start: Any, local: bool | jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Rotates queries and keys [heads, length, width] of the positions from ``start`` on.

        Only relative positions matter: segments of one row need no positions of their own.
        """
        c, length = self.config, q.shape[1]
        if c.positions != "rotary":
            return q, k
        most = c.max_seq_len if self.decode else length
        angles: Any = rotary_tables(most, rotary_frequencies(c.width, c.rope_theta, c.rope_scaling))
        if c.local_rope_theta is not None:
            near = rotary_tables(most, rotary_frequencies(c.width, c.local_rope_theta))
            angles = [jnp.where(local, a, b) for a, b in zip(near, angles)]
        if self.decode:
            angles = (
                jax.lax.dynamic_slice_in_dim(jnp.asarray(table), start, length) for table in angles
            )
        cos, sin = angles
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def _cached(
        self, q: jax.Array, k: jax.Array, v: jax.Array, local: bool | jax.Array
    ) -> tuple[jax.Array, ...]:
        """Appends to the cache; returns queries, all keys and values, and which are visible."""
        c, length = self.config, q.shape[1]
        shape = (c.kv_heads, c.max_seq_len, c.width)
        keys = self.variable("cache", "keys", jnp.zeros, shape, k.dtype)
        values = self.variable("cache", "values", jnp.zeros, shape, v.dtype)
        at = self.variable("cache", "index", jnp.zeros, (), jnp.int32)
        start = at.value
        q, k = self._rotated(q, k, start, local)
        keys.value = jax.lax.dynamic_update_slice_in_dim(keys.value, k, start, axis=1)
        values.value = jax.lax.dynamic_update_slice_in_dim(values.value, v, start, axis=1)
        at.value = start + length
        queries, places = start + jnp.arange(length), jnp.arange(c.max_seq_len)
        seen = visible(queries, places, None)
        if c.sliding_window is not None:
            seen = jnp.where(local, visible(queries, places, c.sliding_window), seen)
        return q, keys.value, values.value, seen


class Mlp(nn.Module):
    """Two or (gated) three projections, or as many for each of the experts.

    All experts are computed for all positions, with weight zero if a position has not chosen them:
    no position is left out because of others' choices, and all products are of parameters with
    data. This takes num_experts / experts_per_token times the arithmetic of the chosen experts.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [length, embed_dim] -> the same shape."""
        c = self.config
        linear = functools.partial(Linear, config=c, experts=c.num_experts)
        y = linear(c.hidden, name="up")(x)
        if c.gated:
            gate = linear(c.hidden, name="gate")(x)
            y = y * (jax.nn.silu(gate) if c.activation == "swiglu" else jax.nn.gelu(gate))
        else:
            y = jax.nn.gelu(y)
        if c.num_experts is not None:
            scores = Linear(c.num_experts, c, name="router")(x)
            y = y * expert_weights(scores, c).astype(y.dtype)[..., None]
        return linear(c.embed_dim, stddev=_STDDEV / math.sqrt(2 * c.num_layers), name="down")(y)


def expert_weights(scores: jax.Array, config: TransformerConfig) -> jax.Array:
    """The weight of each expert at each position, float32 like ``scores``; 0 if not chosen."""
    assert config.experts_per_token is not None
    weights = jax.nn.softmax(scores.astype(jnp.float32))
    chosen = jax.lax.top_k(weights, config.experts_per_token)[1]
    weights = weights * jax.nn.one_hot(chosen, scores.shape[-1]).sum(axis=-2)
    if config.experts_sum_to_one:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights


class Block(nn.Module):
    """One pre-norm block, in the form that ``nn.scan`` takes: (carry, nothing).

    Attributes:
      config: the model's shape.
      decode: as in ``Attention``.
      local: whether all blocks of this stack have a window; None: the argument ``local`` decides.
    """

    config: TransformerConfig
    decode: bool = False
    local: bool | None = False

    @nn.compact
    def __call__(
        self, x: jax.Array, local: jax.Array | None = None, segments: jax.Array | None = None
    ) -> tuple[jax.Array, None]:
        """x [length, embed_dim] -> (the same shape, None)."""
        c = self.config
        x = _constrained(x)
        is_local: Any = local if self.local is None else self.local
        y = Attention(c, self.decode, name="attention")(
            Norm(c, name="norm1")(x), is_local, segments
        )
        x = x + (Norm(c, name="post_norm1")(y) if c.post_norms else y)
        y = Mlp(c, name="mlp")(Norm(c, name="norm2")(x))
        return x + (Norm(c, name="post_norm2")(y) if c.post_norms else y), None


class Transformer(nn.Module):
    """tokens int32 [length] -> logits float32 [length, vocab_size] for the *same* positions.

    With ``losses``, the cross-entropy of each token instead, float32 [length].

    The input is shifted right behind the beginning-of-sequence id, so that position t predicts
    token t from the tokens before it. Without such an id nothing predicts a sequence's first token,
    and its loss is 0. With ``decode`` it is not shifted: the model continues from its cache, and
    position t predicts what follows token t.

    With ``segments``, int32 [length], there are several sequences, one after another: each starts
    where the number changes, and sees only itself.
    """

    config: TransformerConfig
    decode: bool = False

    @nn.compact
    def __call__(
        self, tokens: jax.Array, losses: bool = False, segments: jax.Array | None = None
    ) -> jax.Array:
        c = self.config
        dtype = jnp.dtype(c.dtype)
        init = nn.initializers.normal(_STDDEV)
        embedding = self.param("embedding", init, (c.vocab_size, c.embed_dim))
        inputs = tokens
        first = jnp.arange(tokens.shape[0]) == 0 if segments is None else segment_starts(segments)
        bos = None if self.decode else c.bos_id
        if bos is not None:
            inputs = jnp.where(first, bos, jnp.roll(tokens, 1))
        # The lookup comes before the cast, which would copy the whole table. An id outside the
        # vocabulary gives NaN, not another row, so that a wrong tokeniser is noticed.
        x = jnp.take(embedding, inputs, axis=0, mode="fill").astype(dtype)
        if c.positions == "learned":
            positions = self.param("positions", init, (c.max_seq_len, c.embed_dim))
            if self.decode:
                at = self.variable("cache", "index", jnp.zeros, (), jnp.int32)
                encoding = jax.lax.dynamic_slice_in_dim(positions, at.value, tokens.shape[0])
                at.value = at.value + tokens.shape[0]
            elif segments is not None:
                places = jnp.arange(tokens.shape[0])
                places = places - jax.lax.cummax(jnp.where(first, places, 0))
                # Padding may be longer than any sequence.
                places = jnp.where(segments > 0, places, 0)
                encoding = jnp.take(positions, places, axis=0, mode="fill")
            else:
                encoding = positions[: tokens.shape[0]]
            x = x + encoding.astype(dtype)
        if c.scale_embeddings:
            x = x * jnp.asarray(math.sqrt(c.embed_dim), dtype)
        block = Block
        if c.remat != "none" and not self.decode:
            # Projections are the matrix products without batch axes (the others have heads).
            policies, policy = jax.checkpoint_policies, None
            if c.remat_saves:
                policy = policies.save_only_these_names(*c.remat_saves)
            elif c.remat == "light":
                policy = policies.dots_with_no_batch_dims_saveable
            block = nn.remat(Block, prevent_cse=not c.scan_layers, policy=policy)
        if c.scan_layers:
            local = c.local_layers
            for name, length in c.stacks:
                of_stack, local = local[:length], local[length:]
                stack = nn.scan(
                    block,
                    variable_axes={"params": 0, "cache": 0},
                    split_rngs={"params": True},
                    in_axes=(0, nn.broadcast),
                    length=length,
                )
                all_local = of_stack[0] if len(set(of_stack)) == 1 else None
                local_of_each = jnp.array(of_stack) if all_local is None else None
                x, _ = stack(c, self.decode, all_local, name=name)(x, local_of_each, segments)
        else:
            for i, near in enumerate(c.local_layers):
                x, _ = block(c, self.decode, near, name=f"block_{i}")(x, None, segments)
        x = _constrained(Norm(c, name="final_norm")(x))
        unshifted = bos is None and not self.decode
        if unshifted:
            x = jnp.roll(x, 1, axis=0)  # a position predicts the next token
        if c.tie_embeddings:
            head = embedding.T
        else:
            head = self.param("head", init, (c.embed_dim, c.vocab_size))

        def logits(x: jax.Array) -> jax.Array:
            out = jnp.matmul(x, head.astype(dtype)).astype(jnp.float32)
            if c.logit_softcap is not None:
                out = c.logit_softcap * jnp.tanh(out / c.logit_softcap)
            return _constrained(out)

        if not losses:
            return logits(x)
        out = _losses(logits, x, tokens, c.vocab_size)
        return jnp.where(first, 0.0, out) if unshifted else out


def segment_starts(segments: jax.Array) -> jax.Array:
    """Bool [length]: where a segment starts."""
    return jnp.concatenate([jnp.ones((1,), bool), segments[1:] != segments[:-1]])


def _losses(
    logits: Callable[[jax.Array], jax.Array], x: jax.Array, tokens: jax.Array, vocab_size: int
) -> jax.Array:
    """Cross-entropies of tokens, float32 [length]; in chunks where logits are large."""

    def chunk_losses(x: jax.Array, tokens: jax.Array) -> jax.Array:
        losses = logits(x)
        # A comparison instead of a lookup: no scatter backwards, and the vocabulary may be sharded.
        target = jnp.arange(vocab_size)[None, :] == tokens[:, None]
        picked = jnp.where(target, losses, 0.0).sum(axis=-1)
        return jax.nn.logsumexp(losses, axis=-1) - picked

    length = tokens.shape[0]
    if length * vocab_size <= _MAX_LOGITS:
        return chunk_losses(x, tokens)
    size = max(1, _MAX_LOGITS // 4 // vocab_size)
    size = size // 128 * 128 or size
    chunks = -(-length // size)
    padding = chunks * size - length
    x = jnp.pad(x, ((0, padding), (0, 0))).reshape(chunks, size, -1)
    tokens = jnp.pad(tokens, (0, padding)).reshape(chunks, size)
    recomputed = jax.checkpoint(chunk_losses, prevent_cse=False)
    losses = jax.lax.scan(lambda _, chunk: (None, recomputed(*chunk)), None, (x, tokens))[1]
    return losses.reshape(-1)[:length]


class LanguageModel:
    """A transformer as pure functions of its parameters.

    Attributes:
      config: its shape.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import dpfl_jax as dpfl
      >>> config = dpfl.transformer_config("tiny", vocab_size=259, max_seq_len=8)
      >>> model = dpfl.LanguageModel(config)
      >>> params = model.init(jax.random.key(0))
      >>> model.logits(params, jnp.zeros(8, jnp.int32)).shape  # of one sequence
      (8, 259)
    """

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config
        self._module = Transformer(config)
        self._decoder = Transformer(config, decode=True)

    def init(self, key: jax.Array) -> PyTree:
        """Returns fresh parameters: a nested dict of float32 arrays."""
        tokens = jnp.zeros((min(8, self.config.max_seq_len),), jnp.int32)  # any length will do
        return self._module.init(key, tokens)["params"]

    def logits(self, params: PyTree, tokens: jax.Array) -> jax.Array:
        """tokens int32 [length] -> float32 [length, vocab_size]; row t predicts token t.

        Raises:
          BadInputError: a batch, or a sequence longer than max_seq_len.
        """
        return self._apply(params, tokens)

    def _apply(
        self,
        params: PyTree,
        tokens: jax.Array,
        losses: bool = False,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        if tokens.ndim != 1:
            raise BadInputError(
                f"the language model takes one sequence of token ids, got shape {tokens.shape}: "
                "use jax.vmap for a batch"
            )
        if tokens.shape[0] > self.config.max_seq_len and segments is None:
            raise BadInputError(
                f"a sequence has {tokens.shape[0]} tokens, but the model's max_seq_len is "
                f"{self.config.max_seq_len}: raise it, or cut the sequences shorter"
            )
        out = self._module.apply({"params": params}, tokens, losses, segments)
        return cast(jax.Array, out)

    @takes_segments
    def loss(self, params: PyTree, example: dict[str, jax.Array]) -> jax.Array:
        """Mean next-token cross-entropy of ONE example over its real tokens, in nats.

        Args:
          params: as returned by ``init``.
          example: ``tokens`` int32 [length] and ``mask`` bool [length], True for real tokens. Other
            tokens are not predicted, but later ones see them: padding belongs at the end. With
            ``segments``, int32 [length], it is a row of several examples, and the loss is the sum
            of their losses.

        Returns:
          float32 scalar; 0 for an example without real tokens.
        """
        tokens, real = example["tokens"], example["mask"].astype(bool)
        segments = example.get("segments")
        if self.config.bos_id is None:
            first = jnp.arange(real.shape[0]) == 0 if segments is None else segment_starts(segments)
            real = real & ~first
        losses = jnp.where(real, self._apply(params, tokens, True, segments), 0.0)
        if segments is None:
            return losses.sum() / jnp.maximum(real.sum(), 1).astype(jnp.float32)
        number = jnp.cumsum(segment_starts(segments)) - 1
        counts = jax.ops.segment_sum(real.astype(jnp.float32), number, segments.shape[0])
        return (losses / jnp.maximum(counts, 1.0)[number]).sum()

    def init_cache(self, params: PyTree) -> PyTree:
        """Returns an empty cache for ``next_logits``, of max_seq_len positions."""
        tokens = jax.ShapeDtypeStruct((1,), jnp.int32)
        shapes = jax.eval_shape(
            lambda p, t: self._decoder.apply({"params": p}, t, mutable=["cache"]), params, tokens
        )
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[1]["cache"])

    def next_logits(
        self, params: PyTree, cache: PyTree, tokens: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        """Reads some more tokens.

        Args:
          params: as returned by ``init``.
          cache: ``init_cache(params)``, or as returned by the last call. It holds max_seq_len
            positions; the caller must not read more.
          tokens: int32 [length]; the first of a sequence is bos_id, if there is one.

        Returns:
          float32 [length, vocab_size], row t for what follows token t; and the new cache.
        """
        logits, changed = self._decoder.apply(
            {"params": params, "cache": cache}, tokens, mutable=["cache"]
        )
        return logits, changed["cache"]

    @functools.cached_property
    def num_params(self) -> int:
        """Number of parameters, without allocating them."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


# ---- direct preference optimisation --------------------------------------------------------------
# Rafailov et al. 2023 (arXiv 2305.18290). The reference is the model before the first step, a
# constant: the base of a model with adapters, or a frozen copy of the parameters that are trained.


REFERENCE = "reference"


def with_reference(params: PyTree, trained: Callable[[str], bool] | None = None) -> PyTree:
    """Adds the reference of a ``PreferenceModel`` to ``params`` before the first step.

    Args:
      params: parameters of the model; B of adapters is zero.
      trained: ``name -> whether that parameter is trained``; None: all are.

    Returns:
      ``params``, with a copy of the trained ones under ``"reference"`` (see ``not_reference``);
      adapters need no copy.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.models import with_reference
      >>> sorted(with_reference({"w": jnp.ones(2)}))
      ['reference', 'w']
    """
    chosen = {
        name: value
        for name, value in flat_paths(params).items()
        if not is_adapter(name) and (trained is None or trained(name))
    }
    return {**params, REFERENCE: nested(chosen)} if chosen else params


def not_reference(name: str) -> bool:
    """Whether a parameter is not part of the reference; ``trainable`` of a run must use it.

    Examples:
      >>> from dpfl_jax.models import not_reference
      >>> not_reference("blocks/mlp/up/kernel"), not_reference("reference/blocks/mlp/up/kernel")
      (True, False)
    """
    return not name.startswith(f"{REFERENCE}/")


class PreferenceModel(LanguageModel):
    """A transformer that learns which of two answers was chosen.

    Attributes:
      beta: weight of the KL divergence to the reference.

    Examples:
      >>> from dpfl_jax.models import PreferenceModel, transformer_config
      >>> PreferenceModel(transformer_config("tiny", vocab_size=259), beta=0.1).beta
      0.1
    """

    def __init__(self, config: TransformerConfig, beta: float = 0.1) -> None:
        super().__init__(config)
        self.beta = beta
        self._base = LanguageModel(dataclasses.replace(config, lora=None))

    def loss(self, params: PyTree, example: dict[str, jax.Array]) -> jax.Array:
        """-log sigmoid(beta (margin of the model - margin of the reference)) of ONE pair.

        A margin is log p(chosen answer) - log p(rejected answer), summed over their tokens.

        Args:
          params: as returned by ``with_reference``.
          example: ``tokens`` int32 [2, length], the chosen sequence first, and ``mask`` bool [2,
            length], True for the answers' tokens.

        Returns:
          float32 scalar; log 2 if the model equals the reference.
        """
        model_params = {name: value for name, value in params.items() if name != REFERENCE}
        reference = flat_paths(params.get(REFERENCE, {}))
        base_params = nested({**flat_paths(without_adapters(model_params)), **reference})
        margin = _margin(self, model_params, example)
        reference_margin = jax.lax.stop_gradient(_margin(self._base, base_params, example))
        return jax.nn.softplus(-self.beta * (margin - reference_margin))

    def right(self, losses: jax.Array) -> jax.Array:
        """Whether margins are above the reference's, from losses: 1, 0, or 1/2 if equal."""
        return 0.5 + 0.5 * jnp.sign(jnp.log(jnp.float32(2.0)) - losses)


def _margin(model: LanguageModel, params: PyTree, example: dict[str, jax.Array]) -> jax.Array:
    def log_likelihood(row: int) -> jax.Array:
        losses = model._apply(params, example["tokens"][row], losses=True)
        return -jnp.where(example["mask"][row], losses, 0.0).sum()

    return log_likelihood(0) - log_likelihood(1)
