"""Sampling text from a language model: a running batch with a cache of keys and values.

A batch has *slots*. Each holds one text: its prompt, and what was drawn so far. At every step each
slot reads one token; once a text ends, the next one takes its slot, whatever the others do. A
text's draws depend on the key, its number and the place of each token alone, not on the batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.errors import BadInputError, at_least, probability
from dpfl_jax.models.config import TransformerConfig
from dpfl_jax.models.params import merge
from dpfl_jax.models.transformer import LanguageModel

PyTree = Any
# Steps between two looks at the texts of a batch; a text that is streamed is shown more often.
_STEPS, _STREAMED = 16, 4
# Redraws of a text (``generate_texts``) before it is given up.
_MOST_REDRAWS = 200


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
      temperature: logits are divided by it; 0: always the most likely token.
      top_k: draw from the k most likely tokens; None: from all.
      top_p: draw from the most likely tokens that together have this probability (nucleus sampling,
        Holtzman et al. 2020); None: from all.
      stop_ids: any of them ends the text, and is not part of it.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        at_least("the temperature", self.temperature, 0, most=1e6)
        at_least("top_k", self.top_k, 1)
        probability("top_p", self.top_p, zero=False)


@dataclasses.dataclass(frozen=True)
class Sampled:
    """A sampled text.

    Attributes:
      number: its number.
      tokens: what was drawn, without the prompt and the token that ended it.
      ended: whether a token ended it; else it is as long as allowed.
      redraws: how often a part of it was drawn again.
      valid: False if it was given up, and has no tokens.
    """

    number: int
    tokens: list[int]
    ended: bool
    redraws: int = 0
    valid: bool = True


def generate(
    model: LanguageModel,
    params: PyTree,
    prompt: Sequence[int] | np.ndarray,
    *,
    max_tokens: int,
    key: jax.Array,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_ids: Collection[int] = (),
) -> Iterator[int]:
    """Yields tokens that follow a prompt, a few at a time.

    Args:
      model: the model.
      params: its parameters.
      prompt: ids as the model reads them, beginning included (``dpfl_jax.data.prompt_ids``).
      max_tokens: most tokens to sample.
      key: JAX key of the draws.
      temperature: as in ``Sampling``, like the rest.
      top_k: as there.
      top_p: as there.
      stop_ids: as there.

    Raises:
      BadInputError: there is nothing to sample, prompt and sample are longer than the model takes,
        a token is outside the vocabulary, or a setting makes no sense.
    """
    sampling = Sampling(temperature, top_k, top_p, frozenset(stop_ids))
    batch = _Batch(model, params, [prompt], 1, max_tokens, key, sampling)
    return _stream(batch)


def _stream(batch: _Batch) -> Iterator[int]:
    batch.begin(0, 0)
    batch.read_prompts()
    shown = 0
    while batch.slots["active"].any():
        batch.advance(_STREAMED)
        tokens = batch.sampled(0).tokens
        yield from tokens[shown:]
        shown = len(tokens)


Validator = Callable[[Sampled, bool], int | None]


def generate_texts(
    model: LanguageModel,
    params: PyTree,
    prompts: Sequence[Sequence[int] | np.ndarray],
    *,
    max_tokens: int,
    key: jax.Array,
    sampling: Sampling,
    batch_size: int,
    skip: Collection[int] = (),
    validator: Validator | None = None,
    sharding: jax.sharding.Sharding | None = None,
) -> Iterator[Sampled]:
    """Yields a text for each prompt, as they end.

    Two runs with different batch sizes, or on other devices, draw the same texts up to rounding.

    Args:
      model: the model.
      params: its parameters.
      prompts: ids of the prompts, as in ``generate``; text i continues prompt i.
      max_tokens: most tokens to sample for each.
      key: JAX key of all draws.
      sampling: how tokens are drawn.
      batch_size: texts that are computed at once.
      skip: numbers of texts that are not needed.
      validator: ``(text so far, whether that is all of it) -> None``, or how many of its tokens are
        kept: the rest is drawn again. The answer must not depend on later tokens.
      sharding: how slots are split over devices; None: they are not.

    Raises:
      BadInputError: as in ``generate``.
    """
    at_least("the batch size", batch_size, 1, whole=True)
    batch = _Batch(model, params, prompts, batch_size, max_tokens, key, sampling, sharding)
    return _texts(batch, iter([n for n in range(len(prompts)) if n not in skip]), validator)


def _texts(batch: _Batch, waiting: Iterator[int], validator: Validator | None) -> Iterator[Sampled]:
    slots = batch.slots
    busy = []
    for slot, number in zip(range(batch.size), waiting):
        batch.begin(slot, number)
        busy.append(slot)
    while busy:
        batch.advance(_STEPS)
        for slot in list(busy):
            text = batch.sampled(slot)
            over = not bool(slots["active"][slot])
            keep = None if validator is None else validator(text, over)
            if keep is not None and text.redraws < _MOST_REDRAWS:
                batch.redraw(slot, keep)
                continue
            if keep is not None:
                text = dataclasses.replace(text, tokens=[], valid=False)
            elif not over:
                continue
            yield text
            following = next(waiting, None)
            if following is None:
                slots["active"][slot] = False
                busy.remove(slot)
            else:
                batch.begin(slot, following)


class _Batch:
    """The state of a running batch: texts on the host, keys and values on the devices."""

    def __init__(
        self,
        model: LanguageModel,
        params: PyTree,
        prompts: Sequence[Sequence[int] | np.ndarray],
        size: int,
        max_tokens: int,
        key: jax.Array,
        sampling: Sampling,
        sharding: jax.sharding.Sharding | None = None,
    ) -> None:
        at_least("the number of tokens to sample", max_tokens, 1)
        length = max(map(len, prompts), default=1) + max_tokens
        _check_prompts(model.config, prompts, length)
        self.prompts, self.size, self._sharding = prompts, size, sharding
        self._max_tokens, self._key, self._sampling = max_tokens, key, sampling
        # The last token is not read.
        self._config, self._params = _unrolled(model.config, params, max(length - 1, 1))
        one = LanguageModel(self._config).init_cache(self._params)
        self._cache = jax.tree.map(
            lambda x: self._placed(jnp.zeros((size, *x.shape), x.dtype)), one
        )
        # Of each slot: the ids of its text, how many of them are read, known, and allowed, the
        # number of the text, how often it was redrawn, and whether it goes on, or has ended.
        self.slots: dict[str, np.ndarray] = {
            "text": np.zeros((size, length), np.int32),
            **{
                name: np.zeros(size, np.int32)
                for name in ("read", "known", "limit", "number", "redraws")
            },
            **{name: np.zeros(size, bool) for name in ("active", "ended")},
        }

    def _placed(self, x: Any) -> Any:
        return x if self._sharding is None else jax.device_put(x, self._sharding)

    def begin(self, slot: int, number: int) -> None:
        """Puts the prompt of a text into a slot."""
        prompt, slots = self.prompts[number], self.slots
        slots["text"][slot, : len(prompt)] = prompt
        for name, value in (
            ("read", 0),
            ("known", len(prompt)),
            ("limit", len(prompt) + self._max_tokens),
            ("number", number),
            ("redraws", 0),
            ("active", True),
            ("ended", False),
        ):
            slots[name][slot] = value

    def redraw(self, slot: int, keep: int) -> None:
        """Goes back to the first ``keep`` tokens that were drawn: their keys and values stay."""
        slots, number = self.slots, int(self.slots["number"][slot])
        known = len(self.prompts[number]) + keep
        slots["known"][slot], slots["read"][slot] = known, known - 1
        slots["redraws"][slot] += 1
        slots["active"][slot], slots["ended"][slot] = True, False

    def sampled(self, slot: int) -> Sampled:
        """What was drawn for the text in a slot."""
        slots, number = self.slots, int(self.slots["number"][slot])
        start, stop = len(self.prompts[number]), int(slots["known"][slot])
        ended = bool(slots["ended"][slot])
        tokens = slots["text"][slot, start : stop - ended].tolist()
        return Sampled(number, tokens, ended, int(slots["redraws"][slot]))

    def advance(self, steps: int) -> None:
        """Draws up to ``steps`` tokens of each text; stops once an eighth of the texts ended."""
        placed = {name: self._placed(x) for name, x in self.slots.items()}
        self._cache, changed = _advance(
            self._config, self._params, self._cache, placed, self._key, self._sampling, steps
        )
        for name, x in changed.items():
            self.slots[name][...] = x

    def read_prompts(self) -> None:
        """Reads all but the last token of the prompts, which have one length, at once."""
        last = int(self.slots["known"][0]) - 1
        if last:
            tokens = self._placed(jnp.asarray(self.slots["text"][:, :last]))
            self._cache = _read(self._config, self._params, self._cache, tokens)
            self.slots["read"][:] = last


def _check_prompts(
    config: TransformerConfig, prompts: Sequence[Sequence[int] | np.ndarray], length: int
) -> None:
    if not all(map(len, prompts)):
        raise BadInputError("the prompt has no token: give at least one for the model to continue")
    if length > config.max_seq_len + 1:  # the last token sampled is not read again
        raise BadInputError(
            f"prompt and sample are {length - 1} tokens long, but the model takes at most "
            f"{config.max_seq_len}: shorten one of them"
        )
    for prompt in {id(prompt): prompt for prompt in prompts}.values():
        if min(prompt) < 0 or max(prompt) >= config.vocab_size:
            raise BadInputError(
                f"the prompt has a token id outside the model's vocabulary of {config.vocab_size}"
            )


def _unrolled(
    config: TransformerConfig, params: PyTree, length: int
) -> tuple[TransformerConfig, PyTree]:
    """The model with adapters merged, a parameter for each block, and ``length`` positions.

    A scan over blocks would copy the cache of all at every step.
    """
    made = dict(merge(params, config.lora))
    if config.positions == "learned":
        made["positions"] = made["positions"][:length]
    if config.scan_layers:
        stacks = {name: made.pop(name) for name, _ in config.stacks}
        for block in range(config.num_layers):
            name, row = config.place_of_block(block)
            made[f"block_{block}"] = jax.tree.map(lambda x, row=row: x[row], stacks[name])
    config = dataclasses.replace(
        config, scan_layers=False, last_layers=0, lora=None, max_seq_len=length
    )
    return config, made


# Jitted by configuration: one compiled program for all models of a shape.
@functools.partial(
    jax.jit, static_argnames=("config", "sampling", "steps"), donate_argnames="cache"
)
def _advance(
    config: TransformerConfig,
    params: PyTree,
    cache: PyTree,
    slots: dict[str, jax.Array],
    key: jax.Array,
    sampling: Sampling,
    steps: int,
) -> tuple[PyTree, dict[str, jax.Array]]:
    rows = jnp.arange(slots["read"].shape[0])
    begun = slots["active"].sum()
    stops = jnp.asarray(sorted(sampling.stop_ids), jnp.int32)

    def draw(logits: jax.Array, number: Any, redraws: Any, place: Any) -> jax.Array:
        own = functools.reduce(jax.random.fold_in, (number, redraws, place), key)
        return sample_token(logits, own, sampling.temperature, sampling.top_k, sampling.top_p)

    def unfinished(state: Any) -> jax.Array:
        step, _, slots = state
        return (step < steps) & (slots["active"].sum() >= jnp.maximum(begun - begun // 8, 1))

    def step(state: Any) -> Any:
        count, cache, slots = state
        read, active, text = slots["read"], slots["active"], slots["text"]
        logits, cache = _next_logits(config, params, cache, read, text[rows, read][:, None])
        place = read + 1
        drawn = jax.vmap(draw)(logits[:, -1], slots["number"], slots["redraws"], place)
        new = active & (place == slots["known"])  # else the next token is part of the prompt
        known = slots["known"] + new
        ended = new & (drawn[:, None] == stops).any(axis=1)
        slots = {
            **slots,
            "text": text.at[rows, place].set(jnp.where(new, drawn, text[rows, place])),
            "read": read + active,
            "known": known,
            "ended": slots["ended"] | ended,
            "active": active & ~ended & (known < slots["limit"]),
        }
        return count + 1, cache, slots

    _, cache, slots = jax.lax.while_loop(unfinished, step, (0, cache, slots))
    return cache, slots


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _read(config: TransformerConfig, params: PyTree, cache: PyTree, tokens: jax.Array) -> PyTree:
    return _next_logits(config, params, cache, jnp.zeros(len(tokens), jnp.int32), tokens)[1]


def _next_logits(
    config: TransformerConfig, params: PyTree, cache: PyTree, read: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, PyTree]:
    """``LanguageModel.next_logits`` of each slot, which has read so many tokens."""
    # What lies behind the index in a cache is never seen.
    at = jax.tree_util.tree_map_with_path(lambda p, x: read if p[-1].key == "index" else x, cache)
    return jax.vmap(LanguageModel(config).next_logits, (None, 0, 0))(params, at, tokens)


def sample_token(
    logits: jax.Array,
    key: jax.Array,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> jax.Array:
    """Draws one token, int32 scalar, from logits [vocab_size]."""
    if temperature == 0:
        return jnp.argmax(logits).astype(jnp.int32)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[0]:
        smallest = jax.lax.top_k(logits, top_k)[0][-1]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if top_p is not None and top_p < 1:
        probs = jax.nn.softmax(logits)
        logits = jnp.where(probs < _nucleus(probs, top_p), -jnp.inf, logits)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def _nucleus(probs: jax.Array, top_p: float) -> jax.Array:
    """The largest p such that probabilities of p and more sum to ``top_p``.

    By bisection over the bits of a float, as sorting a vocabulary takes far longer on a CPU.
    """

    def halve(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        least = jax.lax.bitcast_convert_type(middle, jnp.float32)
        enough = jnp.where(probs >= least, probs, 0.0).sum() >= top_p
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    above_one = 0x3F800001  # bits of positive floats are in their order
    low, _ = jax.lax.fori_loop(0, 31, halve, (jnp.int32(0), jnp.int32(above_one)))
    return jax.lax.bitcast_convert_type(low, jnp.float32)
