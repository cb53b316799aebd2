"""The unigram baseline."""

import numpy as np
import pytest

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
