"""What a run says of held-out people."""

import jax
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import dpfl_jax as dpfl
from dpfl_jax.mesh import data_parallel_mesh
from dpfl_jax.models import LanguageModel, TransformerConfig
from dpfl_jax.models.small import MLP, LogisticRegression
from dpfl_jax.training.evaluate import Evaluator, auc_of


def test_the_area_under_the_curve_is_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    for decimals in (1, 8):  # with ties, and without
        labels = rng.integers(0, 2, 200)
        scores = np.round(rng.normal(size=200) + labels, decimals)
        assert auc_of(scores, labels) == pytest.approx(roc_auc_score(labels, scores))
    assert auc_of(scores, np.ones(200)) is None


@pytest.mark.parametrize("model", [LogisticRegression(3), MLP((3,), 2), MLP((3,), 4)])
def test_classes_have_a_majority_and_two_an_area(model, tmp_path):
    rng = np.random.default_rng(1)
    classes = 4 if model.outputs(model.init(jax.random.key(0)), np.zeros(3)).size == 4 else 2
    x, label = rng.normal(size=(90, 3)).astype("float32"), rng.integers(0, classes, 90)
    label[:40] = 1
    data = dpfl.from_arrays({"x": x, "label": label.astype("int32")}, users=np.arange(90) // 3)
    mesh = data_parallel_mesh(jax.devices()[:1])
    evaluator = Evaluator(model.loss, mesh, 16, model.predict, classes=classes)
    params = model.init(jax.random.key(2))
    found = evaluator(params, data)
    held = data.read(np.arange(90))
    guess = np.array([model.predict(params, one) for one in held["x"]])
    assert found.accuracy == pytest.approx((guess == held["label"]).mean())
    assert found.majority_accuracy == pytest.approx((held["label"] == 1).mean())
    if classes == 4:
        assert (found.base_rate, found.auc) == (None, None)
        return
    scores = np.array([model.outputs(params, one) for one in held["x"]])
    scores = scores if scores.ndim == 1 else scores[:, 1] - scores[:, 0]
    assert found.base_rate == pytest.approx((held["label"] == 1).mean())
    assert found.auc == pytest.approx(roc_auc_score(held["label"], scores), abs=1e-6)


@pytest.mark.slow
def test_short_texts_are_evaluated_together_without_most_of_their_padding():
    rng = np.random.default_rng(2)
    lengths = np.where(rng.random(200) < 0.5, 7, rng.integers(1, 65, 200))
    tokens, mask = rng.integers(0, 31, (200, 64)), np.arange(64) < lengths[:, None]
    data = dpfl.from_arrays(
        {"tokens": np.where(mask, tokens, 0).astype("int32"), "mask": mask},
        users=np.arange(200) // 10,
        tokenizer="bytes",
    )
    model = LanguageModel(
        TransformerConfig(vocab_size=300, num_layers=1, embed_dim=16, num_heads=2, max_seq_len=64)
    )
    params, mesh = model.init(jax.random.key(0)), data_parallel_mesh(jax.devices()[:1])
    computed = []

    def loss(params, example):
        computed.append(example["tokens"].shape[0])  # once for each program
        return model.loss(params, example)

    want, _ = Evaluator(loss, mesh, 4).measure(params, data)
    assert computed == [64]
    got, _ = Evaluator(loss, mesh, 4, cuts=True).measure(params, data)
    assert computed[1:] == [8, 32, 64]  # too few have 9 to 16 tokens for another program
    np.testing.assert_allclose(got, want, rtol=1e-5)
