"""CNN, LSTM and linear models: against NumPy, published sizes, and bounded gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from dpfl_jax.clipping import clipped_grad
from dpfl_jax.errors import BadInputError
from dpfl_jax.models import (
    MLP,
    LeafCNN,
    LinearRegression,
    LogisticRegression,
    SmallCNN,
    StackedLSTM,
)
from dpfl_jax.models.small import Classifier, _PatchConv

MODELS = {
    "cnn": LeafCNN(num_classes=5, channels=(3, 4), hidden=6, input_shape=(8, 8)),
    "lstm": StackedLSTM(vocab_size=11, window=7, embed_dim=4, hidden=6),
    "mlp": MLP((6,), num_classes=4, hidden=(8, 7)),
    "softmax": MLP((6,), num_classes=4, hidden=()),
    "logistic": LogisticRegression(6),
    "linear": LinearRegression(6),
}
CLASSES = {"cnn": 5, "lstm": 11, "mlp": 4, "softmax": 4, "logistic": 2}


def batch(name, n=6):
    model, rng = MODELS[name], np.random.default_rng(0)
    if name == "lstm":
        x = rng.integers(0, 11, (n, 7))
    else:
        x = rng.normal(size=(n, *model.input_shape)).astype(np.float32)
    label = rng.integers(0, CLASSES[name], n) if name in CLASSES else rng.normal(size=n)
    return {"x": jnp.asarray(x), "label": jnp.asarray(label)}


def params_of(name):
    """Parameters without zeros, so that each one matters."""
    leaves, tree = jax.tree.flatten(MODELS[name].init(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return tree.unflatten([x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def numpy_dense(w, x):
    return x @ w["kernel"] + w["bias"]


def numpy_outputs(name, p, x):
    if name in ("logistic", "linear"):
        return numpy_dense(p["Dense_0"], x)[0]
    if name in ("mlp", "softmax"):
        for i in range(len(p)):
            x = numpy_dense(p[f"Dense_{i}"], x)
            x = np.maximum(x, 0) if i < len(p) - 1 else x
        return x
    if name == "lstm":
        x = p["embedding"][x]
        for layer in (p["lstm_0"], p["lstm_1"]):
            h = c = np.zeros(6)
            out = []
            for now in x:
                i, f, g, o = np.split(numpy_dense(layer["input"], now) + h @ layer["state"], 4)
                c = sigmoid(f + 1) * c + sigmoid(i) * np.tanh(g)
                h = sigmoid(o) * np.tanh(c)
                out.append(h)
            x = np.array(out)
        return numpy_dense(p["head"], x[-1])
    x = x[..., None]
    for w in (p["Conv_0"], p["Conv_1"]):
        padded, size = np.pad(x, ((2, 2), (2, 2), (0, 0))), len(x)
        y = np.zeros((size, size, w["bias"].size))
        for i in range(size):
            for j in range(size):
                y[i, j] = np.einsum("abc,abcf->f", padded[i : i + 5, j : j + 5], w["kernel"])
        y = np.maximum(y + w["bias"], 0)
        x = y.reshape(size // 2, 2, size // 2, 2, -1).max(axis=(1, 3))
    hidden = np.maximum(numpy_dense(p["Dense_0"], x.reshape(-1)), 0)
    return numpy_dense(p["Dense_1"], hidden)


@pytest.mark.nightly("cnn", "mlp", "lstm")
@pytest.mark.parametrize("name", MODELS)
def test_outputs_loss_and_prediction_equal_numpy(name):
    model, params, examples = MODELS[name], params_of(name), batch(name)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    losses = jax.jit(jax.vmap(model.loss, (None, 0)))(params, examples)
    answers = jax.jit(jax.vmap(model.predict, (None, 0)))(params, examples["x"])
    outputs = jax.jit(jax.vmap(model.outputs, (None, 0)))(params, examples["x"])
    assert losses.dtype == jnp.float32
    for i in range(6):
        out = numpy_outputs(name, p, np.asarray(examples["x"][i]))
        label = np.asarray(examples["label"][i])
        np.testing.assert_allclose(outputs[i], out, rtol=1e-4, atol=1e-4)
        if name == "linear":
            expected, answer = (out - label) ** 2 / 2, out
        elif name == "logistic":
            expected, answer = -np.log(sigmoid(out if label else -out)), int(out > 0)
        else:
            expected, answer = np.log(np.exp(out).sum()) - out[label], np.argmax(out)
        np.testing.assert_allclose(losses[i], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(answers[i], answer, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly("cnn", "mlp", "lstm")
@pytest.mark.parametrize("name", MODELS)
def test_bounded_gradients_know_every_layer(name):
    model, params, examples = MODELS[name], params_of(name), batch(name)
    ghost, plain = (
        jax.jit(clipped_grad(model.loss, clip_norm=0.5, strategy=s))(params, examples)
        for s in ("ghost", "vmap")
    )
    assert plain.norms.min() > 0
    np.testing.assert_allclose(ghost.norms, plain.norms, rtol=1e-5)
    chex.assert_trees_all_close(ghost.sum, plain.sum, rtol=1e-4, atol=1e-6)


@pytest.mark.nightly("cnn", "lstm")
@pytest.mark.parametrize("name", MODELS)
def test_learns_a_small_batch(name):
    model, examples = MODELS[name], batch(name)
    params = model.init(jax.random.key(0))
    optimizer = optax.adam(0.03)
    state = optimizer.init(params)

    def mean(params):
        return jax.vmap(model.loss, (None, 0))(params, examples).mean()

    @jax.jit
    def step(params, state):
        loss, gradient = jax.value_and_grad(mean)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(300):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.15 * losses[0]


def test_published_sizes():
    # LEAF: femnist/cnn.py and shakespeare/stacked_lstm.py.
    assert LeafCNN().num_params == 6_603_710
    assert StackedLSTM().num_params == 817_872


def test_bad_inputs():
    model = MODELS["mlp"]
    params = model.init(jax.random.key(0))
    with pytest.raises(BadInputError, match=r"MLP takes one input of shape \(6,\), got \(2, 6\)"):
        model.outputs(params, jnp.zeros((2, 6)))
    for label in (-1, 4):
        example = {"x": jnp.ones(6), "label": jnp.asarray(label)}
        assert np.isnan(model.loss(params, example))
    with pytest.raises(BadInputError, match="too small for 2 convolutions"):
        LeafCNN(input_shape=(3, 3))
    with pytest.raises(BadInputError, match="hidden is 0"):
        StackedLSTM(hidden=0)
    with pytest.raises(BadInputError, match="num_features is 0"):
        LinearRegression(0)


def test_the_small_network_of_private_mnist_has_26010_parameters():
    assert SmallCNN().num_params == 26_010
    with pytest.raises(BadInputError, match="too small for the strides"):
        SmallCNN(10, (8, 8))


@pytest.mark.nightly
def test_the_network_of_leaf_is_the_one_of_convolutions():
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x[..., None]
            for features in (3, 4):
                x = nn.relu(nn.Conv(features, (5, 5), padding="SAME")(x))
                x = nn.max_pool(x, (2, 2), strides=(2, 2))
            x = nn.relu(nn.Dense(6)(x.reshape(-1)))
            return nn.Dense(5)(x)

    assert_same(MODELS["cnn"], Classifier(Plain(), (8, 8)), (8, 8))


@pytest.mark.nightly
def test_the_small_network_is_the_one_of_convolutions_and_pooling():
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = 2.0 * x[..., None] - 1.0
            x = nn.relu(nn.Conv(16, (8, 8), strides=(2, 2), padding=3)(x))
            x = nn.max_pool(x, (2, 2), strides=(1, 1))
            x = nn.relu(nn.Conv(32, (4, 4), strides=(2, 2), padding="VALID")(x))
            x = nn.max_pool(x, (2, 2), strides=(1, 1))
            x = nn.relu(nn.Dense(32)(x.reshape(-1)))
            return nn.Dense(10)(x)

    assert_same(SmallCNN(), Classifier(Plain(), (28, 28)), (28, 28))


@pytest.mark.parametrize("first", [0.5, np.inf, np.nan])
def test_a_convolution_by_patches_is_one_whatever_its_kernel_holds(first):
    """Patches are formed under a condition on the kernel's first number, which must always hold."""
    image = 1.0 + jax.random.uniform(jax.random.key(0), (6, 6, 2))
    plain, ours = nn.Conv(3, (3, 3), padding="VALID"), _PatchConv(3, 3, 1)
    params = plain.init(jax.random.key(1), image)["params"]
    params["kernel"] = params["kernel"].at[0, 0, 0, 0].set(first)
    wanted, got = (jax.jit(m.apply)({"params": params}, image) for m in (plain, ours))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def assert_same(ours, plain, shape):
    """The same parameters, by the same names, and the same gradients."""
    params = ours.init(jax.random.key(1))
    same = jax.tree.map(np.array_equal, params, jax.jit(plain.init)(jax.random.key(1)))
    assert all(jax.tree.leaves(same))
    image = {"x": jax.random.uniform(jax.random.key(2), shape), "label": jnp.int32(3)}
    ours_grad, plain_grad = (jax.jit(jax.grad(m.loss))(params, image) for m in (ours, plain))
    for a, b in zip(jax.tree.leaves(ours_grad), jax.tree.leaves(plain_grad), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
