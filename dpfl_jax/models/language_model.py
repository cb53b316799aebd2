"""The language model as functions of a plain tree of parameters."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dpfl_jax.errors import BadInputError
from dpfl_jax.models.config import TransformerConfig
from dpfl_jax.models.transformer import Block, Ends

PyTree = Any


class LanguageModel:
    """A causal language model: ``init``, ``logits`` and ``loss`` for one example.

    >>> model = LanguageModel(transformer_config("tiny", vocab_size=259))
    >>> params = model.init(jax.random.key(0))
    >>> losses = jax.vmap(model.loss, in_axes=(None, 0))(params, batch)

    Parameters are a nested dict of float32 arrays, ``{"ends": {...}, "blocks": {...}}``; every leaf
    of ``blocks`` has a leading axis of layers. The object itself holds no array.

    Attributes:
      config: the shape.
    """

    def __init__(self, config: TransformerConfig) -> None:
        self.config = config
        make_ends, make_block = self._makers()
        self._ends = nnx.graphdef(nnx.eval_shape(make_ends, jax.random.key(0)))
        self._block = nnx.graphdef(nnx.eval_shape(make_block, jax.random.key(0)))

    def __repr__(self) -> str:
        """The config."""
        return f"LanguageModel({self.config})"

    def _makers(self) -> tuple[Any, Any]:
        return (
            lambda key: Ends(self.config, nnx.Rngs(params=key)),
            lambda key: Block(self.config, nnx.Rngs(params=key)),
        )

    def init(self, key: jax.Array) -> PyTree:
        """Returns random parameters drawn from ``key``."""
        make_ends, make_block = self._makers()

        def arrays(make: Any, key: jax.Array) -> PyTree:
            return nnx.to_pure_dict(nnx.state(make(key)))

        ends_key, blocks_key = jax.random.split(key)
        block_keys = jax.random.split(blocks_key, self.config.layers)
        return {
            "ends": arrays(make_ends, ends_key),
            "blocks": jax.vmap(functools.partial(arrays, make_block))(block_keys),
        }

    @functools.cached_property
    def num_params(self) -> int:
        """Number of parameters (padding of the vocabulary included); allocates nothing."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes))

    def logits(self, params: PyTree, tokens: jax.Array) -> jax.Array:
        """Scores of the next token.

        Args:
          params: from ``init``.
          tokens: int [L], without BOS, L <= max_seq_len.

        Returns:
          float32 [L, vocab_size]; row j scores token j, given BOS and tokens 0..j-1.

        Raises:
          BadInputError: ``tokens`` is not one sequence of at most max_seq_len integers.
        """
        tokens = jnp.asarray(tokens)
        if tokens.ndim != 1 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise BadInputError(
                f"the language model takes one sequence of token ids [L], got {tokens.dtype} of "
                f"shape {tokens.shape}: use jax.vmap for a batch"
            )
        if tokens.shape[0] > self.config.max_seq_len:
            raise BadInputError(
                f"an example has {tokens.shape[0]} tokens, but model.max_seq_len is "
                f"{self.config.max_seq_len}: raise it, or cut the examples shorter"
            )
        ends = nnx.merge(self._ends, params["ends"])
        bos = jnp.full((1,), self.config.bos_id, tokens.dtype)
        x = ends.embed(jnp.concatenate([bos, tokens[:-1]]))
        return ends.logits(self._run_blocks(params["blocks"], x))

    def _run_blocks(self, blocks: PyTree, x: jax.Array) -> jax.Array:
        def run(x: jax.Array, block: PyTree) -> jax.Array:
            return nnx.merge(self._block, block)(x)

        if self.config.remat:
            # Inside a scan, XLA cannot undo the recomputation, so it need not be prevented.
            run = jax.checkpoint(run, prevent_cse=not self.config.scan_layers)
        if self.config.scan_layers:
            return jax.lax.scan(lambda x, block: (run(x, block), None), x, blocks)[0]
        for i in range(self.config.layers):
            x = run(x, jax.tree.map(lambda p, i=i: p[i], blocks))
        return x

    def token_losses(self, params: PyTree, tokens: jax.Array) -> jax.Array:
        """Cross-entropy of each token in nats, float32 [L], given those before it."""
        scores = self.logits(params, tokens)
        # Comparing with the targets instead of gathering them: no scatter in the backward pass,
        # and the vocabulary may be sharded.
        target = jnp.arange(scores.shape[-1])[None, :] == tokens[:, None]
        return jax.nn.logsumexp(scores, axis=-1) - jnp.where(target, scores, 0.0).sum(-1)

    def loss(
        self, params: PyTree, example: Mapping[str, jax.Array], rng: jax.Array | None = None
    ) -> jax.Array:
        """Mean next-token cross-entropy of ONE example.

        Args:
          params: from ``init``.
          example: ``tokens`` int [L], ``mask`` bool [L]. Tokens whose mask is False are not
            predicted; they are still context for later ones, so padding belongs at the end.
          rng: unused (there is no dropout).

        Returns:
          float32 scalar in nats per token: the mean over tokens with mask, 0 if there are none.
        """
        del rng
        mask = example["mask"].astype(bool)
        losses = jnp.where(mask, self.token_losses(params, example["tokens"]), 0.0)
        return losses.sum() / jnp.maximum(mask.sum(), 1).astype(jnp.float32)
