"""The unigram baseline."""

import numpy as np
import pytest

from dpfl_jax.errors import BadInputError
from dpfl_jax.models import UnigramModel


class Texts:
    """Two users, three sequences of two-letter language."""

    user_offsets = np.array([0, 2, 3])
    tokens = np.array([[3, 3, 4, 0], [4, 3, 3, 3], [3, 0, 0, 0]])
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]], bool)

    def read(self, positions):
        return {"tokens": self.tokens[positions], "mask": self.mask[positions]}


def test_counts_real_tokens_only():
    model = UnigramModel.fit(Texts(), vocab_size=5)
    np.testing.assert_allclose(np.exp(model.log_probs), np.array([1, 1, 1, 7, 3]) / 13)


def test_losses_are_means_over_real_tokens():
    model = UnigramModel.fit(Texts(), vocab_size=5)
    losses = model.losses(Texts())
    three, four = -np.log(7 / 13), -np.log(3 / 13)
    assert losses == pytest.approx([(2 * three + four) / 3, (3 * three + four) / 4, three])
    assert len(model.losses(Texts(), max_examples=2)) == 2


class FakeStore:
    def __init__(self, tokens, mask, offsets):
        self.tokens, self.mask = np.asarray(tokens), np.asarray(mask, bool)
        self.user_offsets = np.asarray(offsets)

    def read(self, positions):
        return {"tokens": self.tokens[positions], "mask": self.mask[positions]}


def test_store_that_is_a_slice_and_many_chunks():
    rng = np.random.default_rng(0)
    tokens = rng.choice(5, p=[0.1, 0.2, 0.3, 0.15, 0.25], size=(20_000, 4))
    store = FakeStore(tokens, np.ones_like(tokens), [1000, 5000, 20_000])
    model = UnigramModel.fit(store, 5, smoothing=0.5)
    counts = np.bincount(tokens[1000:].ravel(), minlength=5) + 0.5
    np.testing.assert_allclose(np.exp(model.log_probs), counts / counts.sum())
    losses = model.losses(store)
    assert losses.shape == (19_000,)
    # Its mean loss is the entropy of the frequencies it learnt.
    p = counts / counts.sum()
    assert losses.mean() == pytest.approx(-(p * np.log(p)).sum(), rel=1e-3)


def test_bad_inputs():
    store = FakeStore([[7]], [[1]], [0, 1])
    with pytest.raises(BadInputError, match="token id 7 is outside the vocabulary of 5"):
        UnigramModel.fit(store, 5)
    with pytest.raises(BadInputError, match="must be finite and above 0"):
        UnigramModel.fit(store, 9, smoothing=0)
