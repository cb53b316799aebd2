"""Losses of linear models, with the constants that the theorems need: L and beta, from |x| <= B."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax.config.schema import ModelConfig
from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl.message import Loss
from dpfl_jax.federation.isrl.smoothing import plain, smoothed


@dataclasses.dataclass(frozen=True)
class Task:
    """A loss and what is known about it without data.

    Attributes:
      kind: name of the loss.
      train_loss: ``(w, record) -> scalar``; of losses that are not smooth, their envelope.
      loss: what is evaluated.
      hit: ``(w, record) -> 1 or 0``, whether the label is predicted; None for numbers.
      shape: of w.
      lipschitz: L, largest gradient norm over W.
      smoothness: beta, without the regulariser.
    """

    kind: str
    train_loss: Loss
    loss: Loss
    hit: Callable[[jax.Array, Any], jax.Array] | None
    shape: tuple[int, ...]
    lipschitz: float
    smoothness: float

    @property
    def dim(self) -> int:
        """Number of parameters d."""
        return math.prod(self.shape)


def logistic(w: jax.Array, example: Any) -> jax.Array:
    """The logistic loss of one record, whose label is 0 or 1."""
    score = example["x"] @ w
    return jnp.logaddexp(0.0, score) - example["y"] * score


def softmax(w: jax.Array, example: Any) -> jax.Array:
    """Cross-entropy of weights w [classes, d]; labels 0, 1, ..."""
    scores = w @ example["x"]
    return jax.nn.logsumexp(scores) - scores[example["y"].astype(jnp.int32)]


def squared(w: jax.Array, example: Any) -> jax.Array:
    """Half the squared error of one record."""
    return 0.5 * jnp.square(example["x"] @ w - example["y"])


def make_task(
    config: ModelConfig,
    features: int,
    classes: int,
    max_norm: float,
    max_target: float,
    smoothing: float | None = None,
) -> Task:
    """The loss of a configuration.

    Args:
      config: the model section.
      features: of a record, its constant among them.
      classes: of the labels; 0 for a number.
      max_norm: B, of a record's features.
      max_target: of a record's number.
      smoothing: beta of the envelope of a loss that is not smooth.

    Raises:
      BadInputError: a loss that does not fit the labels.
    """
    kind, bound = config.loss, max_norm
    fits = {
        "logistic": classes == 2,
        "hinge": classes == 2,
        "softmax": classes >= 2,
        "squared": classes == 0,
        "absolute": classes == 0,
    }
    if not fits[kind]:
        what = f"labels of {classes} classes" if classes else "a number as target"
        good = ", ".join(k for k, ok in fits.items() if ok)
        raise BadInputError(f"model.loss={kind} does not fit data with {what}: use {good}")
    if kind == "logistic":
        return Task(kind, logistic, logistic, _positive, (features,), bound, bound**2 / 4)
    if kind == "softmax":
        # |softmax - one-hot| <= sqrt(2), and diag(p) - p p^T has no eigenvalue above 1/2.
        lipschitz = math.sqrt(2) * bound
        return Task(kind, softmax, softmax, _largest, (classes, features), lipschitz, bound**2 / 2)
    if kind == "squared":
        lipschitz = bound * (bound * config.radius + max_target)
        return Task(kind, squared, squared, None, (features,), lipschitz, bound**2)
    beta = config.smoothing or smoothing
    assert beta is not None
    hit = _signed if kind == "hinge" else None
    return Task(kind, smoothed(kind, beta), plain(kind), hit, (features,), bound, beta)


def _positive(w: jax.Array, example: Any) -> jax.Array:
    return (example["x"] @ w > 0) == (example["y"] > 0.5)


def _signed(w: jax.Array, example: Any) -> jax.Array:
    return (example["x"] @ w > 0) == (example["y"] > 0)


def _largest(w: jax.Array, example: Any) -> jax.Array:
    return jnp.argmax(w @ example["x"]) == example["y"].astype(jnp.int32)
