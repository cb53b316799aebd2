"""A unigram model: what a language model must beat to have learnt more than frequencies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from dpfl_jax.errors import BadInputError, positive

_CHUNK = 8192


@dataclasses.dataclass(frozen=True)
class UnigramModel:
    """Independent tokens, with frequencies from smoothed counts.

    Attributes:
      log_probs: float64 [vocab_size], natural logarithms of probabilities.

    Examples:
      >>> import numpy as np
      >>> from dpfl_jax.models import UnigramModel
      >>> batch = {"tokens": np.array([[0, 1, 1]]), "mask": np.ones((1, 3), bool)}
      >>> model = UnigramModel.from_batches([batch], vocab_size=2)
      >>> np.exp(model.log_probs).round(2).tolist()
      [0.4, 0.6]
    """

    log_probs: np.ndarray

    @classmethod
    def from_batches(
        cls, batches: Iterable[Mapping[str, np.ndarray]], vocab_size: int, smoothing: float = 1.0
    ) -> UnigramModel:
        """Counts the tokens of batches of examples.

        Args:
          batches: each with ``tokens`` int [..., L] and ``mask`` bool [..., L].
          vocab_size: ids are below it.
          smoothing: added to every count, > 0, so that an unseen token has a finite loss.

        Raises:
          BadInputError: smoothing <= 0, or a token outside the vocabulary.
        """
        positive("smoothing of a unigram model", smoothing)
        counts = np.zeros(vocab_size, np.int64)
        for batch in batches:
            counts += np.bincount(_real_tokens(batch, vocab_size), minlength=vocab_size)
        smooth = counts + float(smoothing)
        return cls(np.log(smooth / smooth.sum()))

    @classmethod
    def fit(cls, store: Any, vocab_size: int, smoothing: float = 1.0) -> UnigramModel:
        """Counts the tokens of a store (``dpfl_jax.data``), a chunk at a time."""
        return cls.from_batches(_batches(store, None), vocab_size, smoothing)

    def example_losses(self, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        """Mean loss in nats per real token of each example, float64 [...]; 0 if it has none."""
        _real_tokens(batch, len(self.log_probs))
        mask = np.asarray(batch["mask"], bool)
        nll = np.where(mask, -self.log_probs[np.where(mask, batch["tokens"], 0)], 0.0)
        return nll.sum(-1) / np.maximum(mask.sum(-1), 1)

    def losses(self, store: Any, max_examples: int | None = None) -> np.ndarray:
        """``example_losses`` of (the first ``max_examples`` of) a store, in its order."""
        parts = [self.example_losses(batch) for batch in _batches(store, max_examples)]
        return np.concatenate(parts) if parts else np.zeros(0)


def _batches(store: Any, max_examples: int | None) -> Iterator[dict[str, np.ndarray]]:
    first, stop = int(store.user_offsets[0]), int(store.user_offsets[-1])
    if max_examples is not None:
        stop = min(stop, first + max_examples)
    for start in range(first, stop, _CHUNK):
        yield store.read(np.arange(start, min(start + _CHUNK, stop)))


def _real_tokens(batch: Mapping[str, Any], vocab_size: int) -> np.ndarray:
    tokens = np.asarray(batch["tokens"])[np.asarray(batch["mask"], bool)]
    if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab_size):
        bad = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise BadInputError(
            f"token id {bad} is outside the vocabulary of {vocab_size}: "
            "the store was made with another tokeniser"
        )
    return tokens
