"""The convolutional network of LEAF for FEMNIST (Caldas et al. 2018), and smaller ones like it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpfl_jax.errors import BadInputError
from dpfl_jax.models.functional import Classifier, PyTree


def _once(linear: Callable[[jax.Array], jax.Array], x: jax.Array, any_number: jax.Array) -> Any:
    """``linear(x)``, stored where XLA would form it again for each product that reads it.

    On a CPU XLA takes what only moves numbers for free, and does it again in each form in which it
    is read (an ``optimization_barrier`` it drops before that). Patches, 25 times as large as the
    image, are not free: a bounded gradient took a sixth less time with them formed once. What a
    conditional returns is stored. Its condition always holds, which XLA cannot know of a number
    that is no constant.
    """
    return _stored(linear, x, 0 * jax.lax.stop_gradient(any_number) != 1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _stored(linear: Any, x: jax.Array, true: jax.Array) -> jax.Array:
    shape = jax.eval_shape(linear, x).shape
    return jax.lax.cond(true, linear, lambda x: jnp.broadcast_to(0 * x.ravel()[0], shape), x)


@_stored.defjvp
def _of_tangents(linear: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _stored(linear, *primals), linear(tangents[0])


class _PatchConv(nn.Module):
    """``nn.Conv`` of one image without padding, as one product of patches and kernel.

    XLA's convolutions are slow on a CPU in loops, above all strided ones, and their derivatives: a
    bounded gradient of ``SmallCNN`` takes a quarter of the time this way, a plain one a tenth; a
    round of ``LeafCNN`` over silos a third to a fifth.
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

        patches = _once(form, x, kernel[0, 0, 0, 0])
        return jax.lax.dot_general(patches, kernel, (((2, 3, 4), (0, 1, 2)), ((), ()))) + bias


class _Net(nn.Module):
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
        """Returns fresh parameters; compiled, as slices one by one take seconds."""
        return jax.jit(super().init)(key)


class LeafCNN(_Convolutional):
    """5x5 convolutions with ReLU and 2x2 max-pooling, one hidden dense layer, one logit per class.

    The defaults are LEAF's (6,603,710 parameters); ``channels=(8, 16), hidden=64`` is a quick one.
    """

    def __init__(
        self,
        num_classes: int = 62,
        channels: Sequence[int] = (32, 64),
        hidden: int = 2048,
        input_shape: Sequence[int] = (28, 28),
    ) -> None:
        """Builds the model.

        Args:
          num_classes: labels are below it.
          channels: of each convolution; each halves the image.
          hidden: units of the dense layer.
          input_shape: of one image: [height, width] or [height, width, channels].

        Raises:
          BadInputError: sizes below 1, or an image too small for so many convolutions.
        """
        for name, size in (("num_classes", num_classes), ("hidden", hidden)):
            if size < 1:
                raise BadInputError(f"model: {name} is {size}, but it must be at least 1")
        if len(input_shape) not in (2, 3) or min(input_shape[:2]) < 2 ** len(channels):
            raise BadInputError(
                f"model: images of shape {tuple(input_shape)} are too small for "
                f"{len(channels)} convolutions, each of which halves them"
            )
        super().__init__(_Net(tuple(channels), hidden, num_classes), input_shape)


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
    """

    def __init__(self, num_classes: int = 10, input_shape: Sequence[int] = (28, 28)) -> None:
        """Builds the model.

        Args:
          num_classes: labels are below it.
          input_shape: of one image: [height, width] or [height, width, channels], at least 16.

        Raises:
          BadInputError: no class, or an image too small.
        """
        if num_classes < 1:
            raise BadInputError(f"model: num_classes is {num_classes}, but it must be at least 1")
        if len(input_shape) not in (2, 3) or min(input_shape[:2]) < 16:
            raise BadInputError(
                f"model: images of shape {tuple(input_shape)} are too small for the strides of "
                "small_cnn: use cnn or mlp, or images of at least 16 x 16"
            )
        super().__init__(_SmallNet(num_classes), input_shape)
