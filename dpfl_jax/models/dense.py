"""Linear and logistic regression, and multi-layer perceptrons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpfl_jax.errors import BadInputError
from dpfl_jax.models.functional import Classifier, FunctionalModel, PyTree


class _Score(nn.Module):
    """One number per input; zero at the start, where convex training begins."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(1, kernel_init=nn.initializers.zeros)(x)[0]


class _Regression(FunctionalModel):
    """One number per input, loss ``(prediction - label)^2 / 2``."""

    def loss(
        self, params: PyTree, example: Mapping[str, jax.Array], rng: jax.Array | None = None
    ) -> jax.Array:
        """Half the squared error."""
        del rng
        return jnp.square(self.predict(params, example["x"]) - example["label"]) / 2

    def predict(self, params: PyTree, x: jax.Array) -> jax.Array:
        """The predicted value, float32 scalar."""
        return self.outputs(params, x).reshape(())


class LinearRegression(_Regression):
    """``label ~ x @ w + b``, loss ``(prediction - label)^2 / 2``; x float32 [num_features]."""

    def __init__(self, num_features: int) -> None:
        _check_positive(num_features=num_features)
        super().__init__(_Score(), (num_features,))


class LogisticRegression(FunctionalModel):
    """Two classes, labels 0 and 1, one score ``z = x @ w + b``; x float32 [num_features]."""

    def __init__(self, num_features: int) -> None:
        _check_positive(num_features=num_features)
        super().__init__(_Score(), (num_features,))

    def loss(
        self, params: PyTree, example: Mapping[str, jax.Array], rng: jax.Array | None = None
    ) -> jax.Array:
        """``log(1 + exp(z)) - label * z``."""
        del rng
        z = self.outputs(params, example["x"])
        return jax.nn.softplus(z) - example["label"].astype(jnp.float32) * z

    def predict(self, params: PyTree, x: jax.Array) -> jax.Array:
        """1 where its probability is above one half, else 0; int32 scalar."""
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
    """Dense layers with ReLU; without hidden layers, multinomial logistic regression."""

    def __init__(
        self, input_shape: Sequence[int], num_classes: int, hidden: Sequence[int] = (64,)
    ) -> None:
        """Builds the model.

        Args:
          input_shape: of one input, flattened.
          num_classes: labels are below it.
          hidden: sizes of the hidden layers.
        """
        _check_positive(inputs=math.prod(input_shape), num_classes=num_classes)
        for size in hidden:
            _check_positive(hidden=size)
        super().__init__(_Layers(tuple(hidden), num_classes), input_shape)


class RegressionMLP(_Regression):
    """Dense layers with ReLU, then one number; loss ``(prediction - label)^2 / 2``."""

    def __init__(self, input_shape: Sequence[int], hidden: Sequence[int] = (64,)) -> None:
        """Builds the model; arguments as of ``MLP``."""
        _check_positive(
            inputs=math.prod(input_shape), **{f"hidden[{i}]": h for i, h in enumerate(hidden)}
        )
        super().__init__(_Layers(tuple(hidden), 1), input_shape)


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise BadInputError(f"model: {name} is {size}, but it must be at least 1")
