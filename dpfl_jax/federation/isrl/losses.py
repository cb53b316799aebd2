"""Losses of linear models, with the constants that the theorems need: L and beta, from |x| <= B.

Losses that are not smooth are replaced by their Moreau envelope (Nesterov smoothing), with the prox
in closed form. f_beta(w) = min_v f(v) + beta/2 |w - v|^2 is beta-smooth, and at most L^2/(2 beta)
below f. Its gradients have norm at most L, because beta |w - v| is at most the Lipschitz bound of
f: so the clip norm is L (the paper's 2 L is not needed). For f(w) = g(<a, w>) the prox only moves w
along a, which leaves one scalar equation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax.config.schema import ModelConfig
from dpfl_jax.errors import BadInputError, positive
from dpfl_jax.federation.isrl.message import Loss


@dataclasses.dataclass(frozen=True)
class LinearLoss:
    """A loss of a linear model, with its constants, which depend on no data.

    Attributes:
      kind: name of the loss.
      train_loss: ``(w, record) -> scalar``; for losses that are not smooth, their envelope.
      eval_loss: ``(w, record) -> scalar``, the loss itself.
      hit: ``(w, record) -> bool``, whether the label is predicted; None if the target is a number.
      shape: shape of w.
      lipschitz: largest gradient norm over W, L.
      smoothness: smoothness beta, without the regulariser.
    """

    kind: str
    train_loss: Loss
    eval_loss: Loss
    hit: Callable[[jax.Array, Any], jax.Array] | None
    shape: tuple[int, ...]
    lipschitz: float
    smoothness: float

    @property
    def dim(self) -> int:
        """The number of parameters."""
        return math.prod(self.shape)


def logistic(w: jax.Array, example: Any) -> jax.Array:
    """Returns the logistic loss, for labels 0 and 1."""
    score = example["x"] @ w
    return jnp.logaddexp(0.0, score) - example["y"] * score


def softmax(w: jax.Array, example: Any) -> jax.Array:
    """Returns the cross-entropy with weights w [classes, d], for labels 0, 1, ..."""
    scores = w @ example["x"]
    return jax.nn.logsumexp(scores) - scores[example["y"].astype(jnp.int32)]


def squared(w: jax.Array, example: Any) -> jax.Array:
    """Returns half the squared error."""
    return 0.5 * jnp.square(example["x"] @ w - example["y"])


def linear_loss(
    config: ModelConfig,
    features: int,
    classes: int,
    max_norm: float,
    max_target: float,
    smoothing: float | None = None,
) -> LinearLoss:
    """Returns the loss of a configuration.

    Args:
      config: the section ``model``.
      features: number of features of a record, the constant included.
      classes: number of classes; 0 if the target is a number.
      max_norm: largest norm of a record's features, B.
      max_target: largest size of a record's target, if it is a number.
      smoothing: beta of the envelope, for a loss that is not smooth.

    Raises:
      BadInputError: the loss does not fit the labels.
    """
    kind, bound, weights = config.loss, max_norm, (features,)
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
        return LinearLoss(kind, logistic, logistic, _positive, weights, bound, bound**2 / 4)
    if kind == "softmax":
        # |softmax - one-hot| <= sqrt(2), and diag(p) - p p^T has no eigenvalue above 1/2.
        shape, lipschitz = (classes, features), math.sqrt(2) * bound
        return LinearLoss(kind, softmax, softmax, _largest, shape, lipschitz, bound**2 / 2)
    if kind == "squared":
        lipschitz = bound * (bound * config.radius + max_target)
        return LinearLoss(kind, squared, squared, None, weights, lipschitz, bound**2)
    beta = config.smoothing or smoothing
    assert beta is not None
    hit = _signed if kind == "hinge" else None
    return LinearLoss(kind, smoothed(kind, beta), exact(kind), hit, weights, bound, beta)


def _positive(w: jax.Array, example: Any) -> jax.Array:
    return (example["x"] @ w > 0) == (example["y"] > 0.5)


def _signed(w: jax.Array, example: Any) -> jax.Array:
    return (example["x"] @ w > 0) == (example["y"] > 0)


def _largest(w: jax.Array, example: Any) -> jax.Array:
    return jnp.argmax(w @ example["x"]) == example["y"].astype(jnp.int32)


# ---- Moreau envelopes of g(s) = max(0, 1 - s) and |s - t| ----------------------------------------
# With h = |a|^2 / beta, the prox is argmin_u g(u) + (u - s)^2 / (2 h).


def hinge_envelope(score: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the envelope of max(0, 1 - s) at a score s; ``scale`` is |a|^2 / beta."""
    short = 1.0 - score
    linear = short - scale / 2
    middle = short**2 / (2 * jnp.maximum(scale, 1e-30))
    return jnp.where(short <= 0, 0.0, jnp.where(short >= scale, linear, middle))


def absolute_envelope(residual: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the envelope of |r|, which is Huber's loss; ``scale`` is |a|^2 / beta."""
    size = jnp.abs(residual)
    middle = residual**2 / (2 * jnp.maximum(scale, 1e-30))
    return jnp.where(size >= scale, size - scale / 2, middle)


def smoothed(kind: str, beta: float) -> Callable[[jax.Array, Any], jax.Array]:
    """Returns the Moreau envelope of a loss, ``(w, {"x": [d], "y": scalar}) -> scalar``.

    Args:
      kind: ``"hinge"`` (labels -1 and 1) or ``"absolute"``.
      beta: smoothness, > 0.

    Raises:
      BadInputError: another kind, whose prox has no closed form.
    """
    positive("smoothing: beta", beta)
    if kind not in ("hinge", "absolute"):
        raise BadInputError(
            f"the loss {kind!r} cannot be smoothed, as its prox has no closed form: take 'hinge' "
            "or 'absolute'"
        )

    def loss(w: jax.Array, example: Any) -> jax.Array:
        x, y = example["x"], example["y"]
        scale = jnp.sum(jnp.square(x)) / beta
        if kind == "hinge":
            return hinge_envelope(y * (x @ w), scale)
        return absolute_envelope(x @ w - y, scale)

    return loss


def exact(kind: str) -> Callable[[jax.Array, Any], jax.Array]:
    """Returns the loss itself, ``"hinge"`` or ``"absolute"``, without smoothing."""

    def loss(w: jax.Array, example: Any) -> jax.Array:
        score = example["x"] @ w
        if kind == "hinge":
            return jnp.maximum(0.0, 1.0 - example["y"] * score)
        return jnp.abs(score - example["y"])

    return loss
