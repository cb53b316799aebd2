"""Small models in Flax: linear models, perceptrons, convolutional networks, an LSTM."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpfl_jax.errors import BadInputError, at_least

PyTree = Any


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        at_least(f"model: {name}", size, 1)


class FunctionalModel:
    """A Flax module as functions of its parameters, for ONE example ``{"x": ..., "label": ...}``.

    Attributes:
      module: maps one input to its outputs.
      input_shape: shape of one input.
      input_dtype: dtype of one input.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.models import MLP
      >>> model = MLP((4,), num_classes=3)
      >>> params = model.init(jax.random.key(0))
      >>> model.loss(params, {"x": jnp.ones(4), "label": jnp.int32(2)}).shape
      ()
    """

    def __init__(
        self, module: nn.Module, input_shape: Sequence[int], input_dtype: Any = jnp.float32
    ) -> None:
        self.module = module
        self.input_shape = tuple(input_shape)
        self.input_dtype = jnp.dtype(input_dtype)

    def init(self, key: jax.Array) -> PyTree:
        """Returns fresh parameters: a nested dict of float32 arrays."""
        return self.module.init(key, jnp.zeros(self.input_shape, self.input_dtype))["params"]

    def outputs(self, params: PyTree, x: jax.Array) -> jax.Array:
        """Returns the last layer's outputs for one input, float32.

        Raises:
          BadInputError: ``x`` has another shape than one input.
        """
        if x.shape != self.input_shape:
            raise BadInputError(
                f"{type(self).__name__} takes one input of shape {self.input_shape}, got "
                f"{x.shape}: use jax.vmap for a batch"
            )
        out: jax.Array = self.module.apply({"params": params}, x.astype(self.input_dtype))  # type: ignore[assignment]
        return out.astype(jnp.float32)

    def loss(self, params: PyTree, example: Mapping[str, jax.Array]) -> jax.Array:
        """Loss of one example, float32 scalar."""
        raise NotImplementedError

    def predict(self, params: PyTree, x: jax.Array) -> jax.Array:
        """The prediction for one input."""
        raise NotImplementedError

    @functools.cached_property
    def num_params(self) -> int:
        """Number of parameters, without allocating them."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Cross-entropy of one label in nats; NaN for a label that is not a class, to be noticed."""
    logits = logits.astype(jnp.float32)
    valid = (label >= 0) & (label < logits.shape[-1])
    picked = jnp.where(jnp.arange(logits.shape[-1]) == label, logits, 0.0).sum()
    return jax.nn.logsumexp(logits) - jnp.where(valid, picked, jnp.nan)


class Classifier(FunctionalModel):
    """Outputs are one logit per class; the label is an int below their number.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from dpfl_jax.models import Classifier
      >>> model = Classifier(nn.Dense(3), input_shape=(4,))
      >>> model.outputs(model.init(jax.random.key(0)), jnp.ones(4)).shape
      (3,)
    """

    def loss(self, params: PyTree, example: Mapping[str, jax.Array]) -> jax.Array:
        """Cross-entropy in nats; NaN for a label that is not a class, to be noticed."""
        return cross_entropy(self.outputs(params, example["x"]), example["label"])

    def predict(self, params: PyTree, x: jax.Array) -> jax.Array:
        """The most likely class, int32 scalar."""
        return jnp.argmax(self.outputs(params, x)).astype(jnp.int32)


# ---- linear models and perceptrons ---------------------------------------------------------------


class _Score(nn.Module):
    """One number per input; all parameters are zero at the start."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(1, kernel_init=nn.initializers.zeros)(x)[0]


class _Regression(FunctionalModel):
    """One number per input, loss ``(prediction - label)^2 / 2``."""

    def loss(self, params: PyTree, example: Mapping[str, jax.Array]) -> jax.Array:
        return jnp.square(self.predict(params, example["x"]) - example["label"]) / 2

    def predict(self, params: PyTree, x: jax.Array) -> jax.Array:
        """The predicted value, float32 scalar."""
        return self.outputs(params, x).reshape(())


class LinearRegression(_Regression):
    """``label ~ x @ w + b``, loss ``(prediction - label)^2 / 2``; x float32 [num_features].

    Examples:
      >>> from dpfl_jax.models import LinearRegression
      >>> LinearRegression(num_features=5).num_params
      6
    """

    def __init__(self, num_features: int) -> None:
        _check_sizes(num_features=num_features)
        super().__init__(_Score(), (num_features,))


class LogisticRegression(FunctionalModel):
    """Two classes, labels 0 and 1, one score ``z = x @ w + b``; x float32 [num_features].

    Examples:
      >>> from dpfl_jax.models import LogisticRegression
      >>> LogisticRegression(num_features=13).num_params
      14
    """

    def __init__(self, num_features: int) -> None:
        _check_sizes(num_features=num_features)
        super().__init__(_Score(), (num_features,))

    def loss(self, params: PyTree, example: Mapping[str, jax.Array]) -> jax.Array:
        """``log(1 + exp(z)) - label * z``."""
        z = self.outputs(params, example["x"])
        return jax.nn.softplus(z) - example["label"].astype(jnp.float32) * z

    def predict(self, params: PyTree, x: jax.Array) -> jax.Array:
        """1 if its probability is above one half, else 0; int32 scalar."""
        return (self.outputs(params, x) > 0).astype(jnp.int32)


class _Layers(nn.Module):
    hidden: tuple[int, ...]
    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(-1)
        for size in self.hidden:
            x = nn.relu(nn.Dense(size)(x))
        return nn.Dense(self.num_classes)(x)


class MLP(Classifier):
    """Dense layers with ReLU; without hidden layers, multinomial logistic regression.

    Args:
      input_shape: shape of one input, which is flattened.
      num_classes: labels are below it.
      hidden: sizes of the hidden layers.

    Examples:
      >>> from dpfl_jax.models import MLP
      >>> MLP((784,), num_classes=10, hidden=(64,)).num_params
      50890
    """

    def __init__(
        self, input_shape: Sequence[int], num_classes: int, hidden: Sequence[int] = (64,)
    ) -> None:
        _check_sizes(inputs=math.prod(input_shape), num_classes=num_classes)
        _check_sizes(**{f"hidden[{i}]": size for i, size in enumerate(hidden)})
        super().__init__(_Layers(tuple(hidden), num_classes), input_shape)


class RegressionMLP(_Regression):
    """Dense layers with ReLU, then one number; loss ``(prediction - label)^2 / 2``.

    Examples:
      >>> from dpfl_jax.models import RegressionMLP
      >>> RegressionMLP((5,), hidden=(8,)).num_params
      57
    """

    def __init__(self, input_shape: Sequence[int], hidden: Sequence[int] = (64,)) -> None:
        _check_sizes(
            inputs=math.prod(input_shape), **{f"hidden[{i}]": h for i, h in enumerate(hidden)}
        )
        super().__init__(_Layers(tuple(hidden), 1), input_shape)


# ---- convolutional networks ----------------------------------------------------------------------


def _materialized(
    linear: Callable[[jax.Array], jax.Array], x: jax.Array, any_number: jax.Array
) -> Any:
    """``linear(x)``, stored so that XLA does not recompute it for each product that reads it.

    On a CPU XLA fuses operations that only move numbers into every reader (and drops an
    ``optimization_barrier`` before that). Patches are 25 times as large as the image: a clipped
    gradient takes a sixth less time with them stored. XLA stores the result of a conditional; the
    condition always holds, which XLA cannot know, as it depends on a parameter.
    """
    return _through_cond(linear, x, 0 * jax.lax.stop_gradient(any_number) != 1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _through_cond(linear: Any, x: jax.Array, true: jax.Array) -> jax.Array:
    shape = jax.eval_shape(linear, x).shape
    return jax.lax.cond(true, linear, lambda x: jnp.broadcast_to(0 * x.ravel()[0], shape), x)


@_through_cond.defjvp
def _through_cond_jvp(linear: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _through_cond(linear, *primals), linear(tangents[0])


class _PatchConv(nn.Module):
    """``nn.Conv`` of one image without padding, as one product of patches and kernel.

    XLA's convolutions, above all strided ones, and their derivatives are slow in loops on a CPU. In
    this form a clipped gradient of ``SmallCNN`` takes a quarter of the time, a plain one a tenth,
    and a round of ``LeafCNN`` over silos a third to a fifth.
    """

    features: int
    size: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        k, s = self.size, self.stride
        shape = (k, k, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.linear.default_kernel_init, shape)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        rows, columns = (s * ((n - k) // s) + 1 for n in x.shape[:2])

        def form(x: jax.Array) -> jax.Array:
            return jnp.stack(
                [
                    jnp.stack([x[i : i + rows : s, j : j + columns : s] for j in range(k)], axis=2)
                    for i in range(k)
                ],
                axis=2,
            )

        patches = _materialized(form, x, kernel[0, 0, 0, 0])
        return jax.lax.dot_general(patches, kernel, (((2, 3, 4), (0, 1, 2)), ((), ()))) + bias


class _ConvNet(nn.Module):
    channels: tuple[int, ...]
    hidden: int
    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x[..., None] if x.ndim == 2 else x
        for i, features in enumerate(self.channels):
            name = f"Conv_{i}"
            if jax.default_backend() == "cpu":
                x = jnp.pad(x, ((2, 2), (2, 2), (0, 0)))
                x = nn.relu(_PatchConv(features, 5, 1, name=name)(x))
            else:
                x = nn.relu(nn.Conv(features, (5, 5), padding="SAME", name=name)(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(self.hidden)(x.reshape(-1)))
        return nn.Dense(self.num_classes)(x)


class _Convolutional(Classifier):
    def init(self, key: jax.Array) -> PyTree:
        """Returns fresh parameters; compiled, as op by op it takes seconds."""
        return jax.jit(super().init)(key)


class LeafCNN(_Convolutional):
    """5x5 convolutions with ReLU and 2x2 max-pooling, one hidden dense layer, one logit per class.

    The defaults are LEAF's (6,603,710 parameters); ``channels=(8, 16), hidden=64`` is a quick one.

    Examples:
      >>> from dpfl_jax.models import LeafCNN
      >>> LeafCNN(num_classes=62).num_params
      6603710
    """

    def __init__(
        self,
        num_classes: int = 62,
        channels: Sequence[int] = (32, 64),
        hidden: int = 2048,
        input_shape: Sequence[int] = (28, 28),
    ) -> None:
        """Builds the model for images [height, width] or [height, width, channels].

        Raises:
          BadInputError: sizes below 1, or an image too small: each convolution halves it.
        """
        _check_sizes(num_classes=num_classes, hidden=hidden)
        if len(input_shape) not in (2, 3) or min(input_shape[:2]) < 2 ** len(channels):
            raise BadInputError(
                f"model: images of shape {tuple(input_shape)} are too small for "
                f"{len(channels)} convolutions, each of which halves them"
            )
        super().__init__(_ConvNet(tuple(channels), hidden, num_classes), input_shape)


def _overlapping_max(x: jax.Array) -> jax.Array:
    """``nn.max_pool`` of 2x2 with stride 1; its derivative needs no scatter."""
    x = jnp.maximum(x[1:], x[:-1])
    return jnp.maximum(x[:, 1:], x[:, :-1])


class _SmallNet(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = 2.0 * (x[..., None] if x.ndim == 2 else x) - 1.0
        x = jnp.pad(x, ((3, 3), (3, 3), (0, 0)))
        x = _overlapping_max(nn.relu(_PatchConv(16, 8, 2, name="Conv_0")(x)))
        x = _overlapping_max(nn.relu(_PatchConv(32, 4, 2, name="Conv_1")(x)))
        x = nn.relu(nn.Dense(32)(x.reshape(-1)))
        return nn.Dense(self.num_classes)(x)


class SmallCNN(_Convolutional):
    """The small network of private MNIST training: 26,010 parameters on images of 28 x 28.

    Two strided convolutions (16 of 8x8, 32 of 4x4), each with ReLU and overlapping max-pooling, one
    hidden layer of 32. Pixels in 0..1 are brought to -1..1 (Papernot et al. 2019; Liu et al. 2024).

    Examples:
      >>> from dpfl_jax.models import SmallCNN
      >>> SmallCNN().num_params
      26010
    """

    def __init__(self, num_classes: int = 10, input_shape: Sequence[int] = (28, 28)) -> None:
        """Builds the model for images [height, width] or [height, width, channels].

        Raises:
          BadInputError: no class, or images smaller than 16 x 16.
        """
        _check_sizes(num_classes=num_classes)
        if len(input_shape) not in (2, 3) or min(input_shape[:2]) < 16:
            raise BadInputError(
                f"model: images of shape {tuple(input_shape)} are too small for the strides of "
                "small_cnn: use cnn or mlp, or images of at least 16 x 16"
            )
        super().__init__(_SmallNet(num_classes), input_shape)


# ---- the stacked LSTM of LEAF --------------------------------------------------------------------


class _Layer(nn.Module):
    """One LSTM layer (Hochreiter & Schmidhuber 1997): [L, inputs] -> [L, hidden]."""

    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # The inputs' part of the gates is one product over all times; the loop adds the state's.
        inputs = nn.Dense(4 * self.hidden, name="input")(x)
        shape = (self.hidden, 4 * self.hidden)
        kernel = self.param("state", nn.initializers.orthogonal(), shape)

        def step(carry: tuple[jax.Array, jax.Array], z: jax.Array) -> tuple:
            h, c = carry
            i, f, g, o = jnp.split(z + h @ kernel, 4)
            # Forget bias 1, so that a cell remembers by default (Jozefowicz et al. 2015; LEAF).
            c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros_like(inputs[0, : self.hidden])
        return jax.lax.scan(step, (start, start), inputs)[1]


class _LstmNet(nn.Module):
    vocab_size: int
    embed_dim: int
    hidden: int
    num_layers: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        init = nn.initializers.normal(0.1)
        table = self.param("embedding", init, (self.vocab_size, self.embed_dim))
        x = jnp.take(table, tokens, axis=0, mode="fill")  # NaN for an id out of range
        for i in range(self.num_layers):
            x = _Layer(self.hidden, name=f"lstm_{i}")(x)
        return nn.Dense(self.vocab_size, name="head")(x[-1])


class StackedLSTM(Classifier):
    """The LSTM of LEAF for Shakespeare (Caldas et al. 2018): the next character of a window.

    ``x`` int [window], characters; ``label`` int, the character that follows. The defaults are
    LEAF's: 817,872 parameters (one bias per gate).

    Examples:
      >>> from dpfl_jax.models import StackedLSTM
      >>> StackedLSTM(vocab_size=80, hidden=16).num_params
      5712
    """

    def __init__(
        self,
        vocab_size: int = 80,
        window: int = 80,
        embed_dim: int = 8,
        hidden: int = 256,
        num_layers: int = 2,
    ) -> None:
        _check_sizes(vocab_size=vocab_size, window=window)
        _check_sizes(embed_dim=embed_dim, hidden=hidden, num_layers=num_layers)
        super().__init__(_LstmNet(vocab_size, embed_dim, hidden, num_layers), (window,), jnp.int32)
