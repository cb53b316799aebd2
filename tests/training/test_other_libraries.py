"""Models of other libraries in ``fit``: the same data, the same steps, the module handed back."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dpfl_jax as dpfl

equinox = pytest.importorskip("equinox")
haiku = pytest.importorskip("haiku")

STEPS = 3


@pytest.fixture(scope="module")
def store():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 6)).astype(np.float32)
    label = (x[:, 0] > 0).astype(np.int32)
    return dpfl.from_arrays({"x": x, "label": label}, np.arange(90) // 3)


@pytest.fixture(scope="module")
def plan(store):
    mechanism = dpfl.uls(group_size=2, cohort_size=10, clip_norm=1.0)
    return mechanism.plan(store, steps=STEPS, epsilon=8.0)


def weights():
    rng = np.random.default_rng(1)
    return [rng.normal(size=s).astype(np.float32) / 3 for s in ((6, 8), (8,), (8, 2), (2,))]


def trained(plan, loss, params, **more):
    key = dpfl.RootKey.from_seed(0)
    return dpfl.fit(loss, params, plan, optax.sgd(0.1), key=key, **more).params


@pytest.fixture(scope="module")
def want(plan):
    """A plain function of the same arrays, in the order (bias, kernel) that all below have."""

    def loss(params, example):
        b, a, d, c = params
        logits = jax.nn.relu(example["x"] @ a + b) @ c + d
        return jax.nn.logsumexp(logits) - logits[example["label"]]

    a, b, c, d = weights()
    b, a, d, c = trained(plan, loss, [b, a, d, c])
    return a, b, c, d


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


@pytest.mark.nightly
def test_nnx(plan, want):
    a, b, c, d = weights()
    net = NnxNet(nnx.Rngs(0))
    net.first.kernel[...], net.first.bias[...] = a, b
    net.second.kernel[...], net.second.bias[...] = c, d
    got = trained(plan, "classification", net)
    assert isinstance(got, NnxNet)
    found = (got.first.kernel, got.first.bias, got.second.kernel, got.second.bias)
    for one, other in zip(found, want, strict=True):
        np.testing.assert_allclose(one[...], other, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(net.first.kernel[...], a)  # what was given stays
    # Some of its parameters, by name.
    some = trained(plan, "classification", net, trainable=lambda name: name.startswith("second"))
    np.testing.assert_array_equal(some.first.kernel[...], a)
    assert np.abs(some.second.kernel[...] - c).max() > 0


class EquinoxNet(equinox.Module):
    a_bias: jax.Array
    a_kernel: jax.Array
    b_bias: jax.Array
    b_kernel: jax.Array
    steps: int = 3  # no array: it stays

    def __call__(self, x):
        return jax.nn.relu(x @ self.a_kernel + self.a_bias) @ self.b_kernel + self.b_bias


@pytest.mark.nightly
def test_equinox_with_a_run_in_a_folder(plan, want, tmp_path):
    a, b, c, d = map(jnp.asarray, weights())
    net = EquinoxNet(b, a, d, c)

    def loss(net, example):
        logits = net(example["x"])
        return jax.nn.logsumexp(logits) - logits[example["label"]]

    got = trained(plan, loss, net, run_dir=tmp_path / "run", validation=plan.data)
    assert isinstance(got, EquinoxNet)
    assert got.steps == 3
    found = (got.a_kernel, got.a_bias, got.b_kernel, got.b_bias)
    for one, other in zip(found, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert (tmp_path / "run" / "report.json").exists()


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Dense(8)(x))
        return linen.Dense(2)(x)


@pytest.mark.nightly
def test_linen(plan, want):
    a, b, c, d = weights()
    params = {"Dense_0": {"kernel": a, "bias": b}, "Dense_1": {"kernel": c, "bias": d}}
    got = trained(plan, "classification", params, model=LinenNet())
    np.testing.assert_allclose(got["Dense_1"]["kernel"], want[2], rtol=1e-5, atol=1e-6)
    same = trained(plan, "classification", {"params": params}, model=LinenNet())
    np.testing.assert_array_equal(got["Dense_0"]["bias"], same["params"]["Dense_0"]["bias"])


@pytest.mark.nightly
@pytest.mark.parametrize("keyed", [True, False])
def test_haiku(plan, want, keyed):
    def net(x):
        x = jax.nn.relu(haiku.Linear(8)(x))
        return haiku.Linear(2)(x)

    transform = haiku.transform(net)
    a, b, c, d = weights()
    params = {"linear": {"w": a, "b": b}, "linear_1": {"w": c, "b": d}}
    model = transform if keyed else haiku.without_apply_rng(transform)
    got = trained(plan, "classification", params, model=model)
    np.testing.assert_allclose(got["linear_1"]["w"], want[2], rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
def test_regression_and_language(store):
    plan = dpfl.uls(group_size=2, cohort_size=10).plan(store, steps=1, epsilon=8.0)
    got = trained(plan, "regression", {"w": jnp.zeros(6)}, model=lambda p, x: x @ p["w"])
    assert np.isfinite(got["w"]).all()
    texts = dpfl.from_texts([(i % 20, f"text {i}") for i in range(40)], seq_len=8)
    plan = dpfl.uls(group_size=1, cohort_size=5).plan(texts, steps=1, epsilon=8.0)
    net = nnx.Sequential(nnx.Embed(259, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 259, rngs=nnx.Rngs(1)))
    example = jax.tree.map(lambda a: a[0], texts.read(np.arange(1)))
    from dpfl_jax.training.modules import named_loss

    logits = net(jnp.asarray(example["tokens"]))
    expected = optax.softmax_cross_entropy_with_integer_labels(logits[:-1], example["tokens"][1:])
    mean = expected[example["mask"][1:]].mean()
    np.testing.assert_allclose(named_loss("causal_lm", net)(net, example), mean, rtol=1e-5)
    assert isinstance(trained(plan, "causal_lm", net), nnx.Sequential)


class Normed(nnx.Module):
    def __init__(self, layer):
        self.layer = layer
        self.out = nnx.Linear(6, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.out(self.layer(x))


def batch_loss(params, batch):
    logits = batch["x"] @ params["w"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(axis=(0,))


PARAMS = {"w": np.zeros((6, 2), np.float32)}


@pytest.mark.parametrize(
    ("loss", "params", "message"),
    [
        (
            lambda p, b: jnp.mean(jax.vmap(lambda x, y: (x @ p["w"])[y])(b["x"], b["label"])),
            PARAMS,
            "takes a batch of examples, but it must take one",
        ),
        (batch_loss, PARAMS, "takes a batch of examples"),
        ("classification", PARAMS, "needs model="),
        ("hinge", PARAMS, "loss_fn is 'hinge'.*one of causal_lm, classification, regression"),
        ("classification", Normed(nnx.BatchNorm(6, rngs=nnx.Rngs(0))), "BatchNorm.*mix people"),
        (
            lambda v, e: v["params"]["w"].sum() * e["x"].sum(),  # Linen's, in a loss of one's own
            {"params": PARAMS, "batch_stats": {"mean": np.zeros(6, np.float32)}},
            "BatchNorm.*mix people",
        ),
        ("classification", {"a": nnx.Linear(6, 2, rngs=nnx.Rngs(0))}, "a collection of modules"),
        (
            "classification",
            Normed(nnx.Dropout(0.5, rngs=nnx.Rngs(0))),
            "dropout holds its random state",
        ),
    ],
)
def test_what_cannot_be_trained_is_named(plan, loss, params, message):
    with pytest.raises(dpfl.BadInputError, match=message):
        trained(plan, loss, params)


def test_an_error_of_the_loss_itself_comes_through(plan):
    with pytest.raises(AttributeError, match="pixels"):
        trained(plan, lambda p, e: e["x"].pixels.sum() * p["w"].sum(), PARAMS)


class Convolved(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Conv(1, 8, (2, 2), rngs=rngs), nnx.BatchNorm(8, rngs=rngs)])
        self.head = nnx.Sequential(nnx.BatchNorm(8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs))

    def __call__(self, x):
        x = x.reshape(2, 3, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((0, 1)))


def test_batch_norm_becomes_a_norm_of_each_example(plan):
    net = Convolved(nnx.Rngs(0))
    with pytest.raises(dpfl.BadInputError, match="without_batch_norm"):
        trained(plan, "classification", net)
    net.blocks[1].scale[...] = 3.0
    made = dpfl.without_batch_norm(net)
    assert type(net.blocks[1]) is nnx.BatchNorm
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    groups = x.reshape(6, 2, 4)
    mean, deviation = groups.mean((0, 2), keepdims=True), groups.std((0, 2), keepdims=True)
    expected = 3 * ((groups - mean) / deviation).reshape(x.shape)
    np.testing.assert_allclose(made.blocks[1](x), expected, rtol=1e-3, atol=1e-3)
    assert made.head.layers[0](x[0, 0]).shape == (8,)
    got = trained(plan, "classification", made)
    assert set(dpfl.functional(got).params) == set(dpfl.functional(made).params)
    with pytest.raises(dpfl.BadInputError, match=r"not dict: .* on x\[None\]"):
        dpfl.without_batch_norm({})


def test_frozen_statistics_of_batches_are_constants(plan):
    net = Convolved(nnx.Rngs(0))
    net.blocks[1].mean[...] = 0.5
    net.eval()
    got = trained(plan, "classification", net)
    np.testing.assert_array_equal(got.blocks[1].mean[...], 0.5)
    assert not np.array_equal(got.blocks[1].scale[...], net.blocks[1].scale[...])
    assert not any("mean" in name for name in dpfl.functional(net).params)


@pytest.mark.nightly
def test_the_trained_module_shares_nothing_with_the_one_given(plan):
    net = NnxNet(nnx.Rngs(0))
    net.count = nnx.Variable(jnp.zeros(()))
    got = trained(plan, "classification", net)
    got.count[...] = 9.0
    assert net.count[...] == 0
