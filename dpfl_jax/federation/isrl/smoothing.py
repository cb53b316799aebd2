"""Nesterov smoothing: the Moreau envelope of a loss that is not smooth, with closed-form prox.

f_beta(w) = min_v f(v) + beta/2 |w - v|^2 is beta-smooth, within L^2/(2 beta) below f, and, because
beta |w - v| is at most the Lipschitz bound of f, has gradients of norm at most L: clip at L (the
paper's 2 L is not needed). For f(w) = g(<a, w>) the prox moves w along a only: one scalar equation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax.errors import BadInputError

# g(s) = max(0, 1 - s) and |s - t|; with h = |a|^2 / beta, argmin_u g(u) + (u - s)^2 / (2 h).


def hinge_envelope(score: jax.Array, scale: jax.Array) -> jax.Array:
    """Envelope of max(0, 1 - s) along its line; ``scale`` is |a|^2 / beta."""
    short = 1.0 - score
    linear = short - scale / 2
    middle = short**2 / (2 * jnp.maximum(scale, 1e-30))
    return jnp.where(short <= 0, 0.0, jnp.where(short >= scale, linear, middle))


def absolute_envelope(residual: jax.Array, scale: jax.Array) -> jax.Array:
    """Envelope of |r| along its line: Huber's loss."""
    size = jnp.abs(residual)
    middle = residual**2 / (2 * jnp.maximum(scale, 1e-30))
    return jnp.where(size >= scale, size - scale / 2, middle)


def smoothed(kind: str, beta: float) -> Callable[[jax.Array, Any], jax.Array]:
    """The envelope's loss ``(w, {"x": [d], "y": scalar}) -> scalar`` of a linear model.

    Args:
      kind: ``"hinge"`` (labels -1 and 1) or ``"absolute"``.
      beta: smoothness, > 0.

    Raises:
      BadInputError: another kind, which would need an inner solver.
    """
    if not beta > 0:
        raise BadInputError(f"smoothing: beta is {beta}, but it must be above 0")
    if kind not in ("hinge", "absolute"):
        raise BadInputError(
            f"smoothing: no closed-form prox for {kind!r}; there is one for 'hinge' and 'absolute'"
        )

    def loss(w: jax.Array, example: Any) -> jax.Array:
        x, y = example["x"], example["y"]
        scale = jnp.sum(jnp.square(x)) / beta
        if kind == "hinge":
            return hinge_envelope(y * (x @ w), scale)
        return absolute_envelope(x @ w - y, scale)

    return loss


def plain(kind: str) -> Callable[[jax.Array, Any], jax.Array]:
    """The loss of a kind without smoothing."""

    def loss(w: jax.Array, example: Any) -> jax.Array:
        score = example["x"] @ w
        if kind == "hinge":
            return jnp.maximum(0.0, 1.0 - example["y"] * score)
        return jnp.abs(score - example["y"])

    return loss
