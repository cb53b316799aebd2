"""A smoothed unigram model: the least that a language model must beat."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

_CHUNK = 8192


class TokenStore(Protocol):
    """The part of a store of token sequences that is needed here."""

    @property
    def user_offsets(self) -> np.ndarray:
        """int64 [num_users + 1]."""

    def read(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Tokens int32 [m, length] and mask bool [m, length]."""


@dataclasses.dataclass(frozen=True)
class UnigramModel:
    """Independent tokens.

    Attributes:
      log_probs: float64 [vocab_size], natural logarithms.
    """

    log_probs: np.ndarray

    @classmethod
    def fit(cls, store: TokenStore, vocab_size: int) -> UnigramModel:
        """Counts the tokens of a store, with one added to every count."""
        counts = np.ones(vocab_size)
        for batch in _batches(store, None):
            counts += np.bincount(batch["tokens"][batch["mask"]], minlength=vocab_size)
        return cls(np.log(counts / counts.sum()))

    def losses(self, store: TokenStore, max_examples: int | None = None) -> np.ndarray:
        """Mean cross-entropy of each example over its real tokens (nats), float64 [n]."""
        parts = []
        for batch in _batches(store, max_examples):
            each = np.where(batch["mask"], -self.log_probs[batch["tokens"]], 0.0)
            parts.append(each.sum(axis=1) / np.maximum(batch["mask"].sum(axis=1), 1))
        return np.concatenate(parts)


def _batches(store: TokenStore, max_examples: int | None):  # type: ignore[no-untyped-def]
    first, stop = int(store.user_offsets[0]), int(store.user_offsets[-1])
    if max_examples is not None:
        stop = min(stop, first + max_examples)
    for start in range(first, stop, _CHUNK):
        yield store.read(np.arange(start, min(start + _CHUNK, stop)))
