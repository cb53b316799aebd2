"""Sampling text from a language model, one token at a time with a cache of keys and values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.errors import BadInputError, at_least
from dpfl_jax.models.config import TransformerConfig
from dpfl_jax.models.transformer import LanguageModel

PyTree = Any


def generate(
    model: LanguageModel,
    params: PyTree,
    prompt: Sequence[int] | np.ndarray,
    *,
    max_tokens: int,
    key: jax.Array,
    temperature: float = 1.0,
    top_k: int | None = None,
    stop_ids: Collection[int] = (),
) -> Iterator[int]:
    """Yields tokens that follow a prompt.

    Args:
      model: the model.
      params: its parameters.
      prompt: ids as the model reads them, beginning included (``dpfl_jax.data.prompt_ids``).
      max_tokens: most tokens to sample.
      key: JAX key of the draws.
      temperature: logits are divided by it; 0: always the most likely token.
      top_k: draw from the k most likely tokens; None: from all.
      stop_ids: any of them ends the text, and is not yielded.

    Raises:
      BadInputError: there is nothing to sample, prompt and sample are longer than the model takes,
        a token is outside the vocabulary, or a setting makes no sense.
    """
    config = model.config
    tokens = np.asarray(prompt, np.int64)
    if not len(tokens):
        raise BadInputError("the prompt has no token: give at least one for the model to continue")
    length = len(tokens) + max_tokens
    at_least("the number of tokens to sample", max_tokens, 1)
    if length > config.max_seq_len + 1:  # the last token sampled is not read again
        raise BadInputError(
            f"prompt and sample are {length - 1} tokens long, but the model takes at most "
            f"{config.max_seq_len}: shorten one of them"
        )
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise BadInputError(
            f"the prompt has a token id outside the model's vocabulary of {config.vocab_size}"
        )
    at_least("temperature", temperature, 0)
    at_least("top_k", top_k, 1)
    if config.positions == "rotary":  # the cache need not be longer than this text
        config = dataclasses.replace(config, max_seq_len=length)
    return _tokens(config, params, tokens, max_tokens, key, temperature, top_k, stop_ids)


# Jitted by configuration: one compiled program for all models of a shape.
@functools.partial(
    jax.jit, static_argnames=("config", "temperature", "top_k"), donate_argnames="cache"
)
def _read(
    config: TransformerConfig,
    params: PyTree,
    cache: PyTree,
    tokens: jax.Array,
    key: jax.Array,
    temperature: float,
    top_k: int | None,
) -> tuple[jax.Array, PyTree]:
    logits, cache = LanguageModel(config).next_logits(params, cache, tokens)
    return sample_token(logits[-1], key, temperature, top_k), cache


def _tokens(
    config: TransformerConfig,
    params: PyTree,
    tokens: np.ndarray,
    max_tokens: int,
    key: jax.Array,
    temperature: float,
    top_k: int | None,
    stop_ids: Collection[int],
) -> Iterator[int]:
    cache, unread = LanguageModel(config).init_cache(params), jnp.asarray(tokens, jnp.int32)
    for i in range(max_tokens):
        drawn, cache = _read(
            config, params, cache, unread, jax.random.fold_in(key, i), temperature, top_k
        )
        token = int(drawn)
        if token in stop_ids:
            return
        yield token
        unread = drawn[None]


def sample_token(
    logits: jax.Array, key: jax.Array, temperature: float = 1.0, top_k: int | None = None
) -> jax.Array:
    """Draws one token, int32 scalar, from logits [vocab_size]."""
    if temperature == 0:
        return jnp.argmax(logits).astype(jnp.int32)
    if top_k is not None and top_k < logits.shape[0]:
        smallest = jax.lax.top_k(logits, top_k)[0][-1]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature).astype(jnp.int32)
