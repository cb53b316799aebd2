"""Accelerated noisy minibatch SGD (Algorithm 1; AC-SA of Ghadimi and Lan 2012)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.federation.isrl.method import Method, Oracle
from dpfl_jax.federation.isrl.minibatch_sgd import Project


def accelerated(
    alphas: jax.Array,
    prox_weights: jax.Array,
    strong_convexity: jax.Array | float,
    project: Project,
    begins: jax.Array | None = None,
) -> Method:
    """Its state is (w, w^ag), its output w_R^ag.

    Args:
      alphas: float [R], alpha_r.
      prox_weights: float [R], the paper's eta_r, which is an *inverse* step size.
      strong_convexity: mu of the loss; 0 if it is only convex.
      project: on W.
      begins: bool [R], rounds that begin a stage, from w^ag; None if there is one stage.

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> alphas, prox = isrl.step_weights(35, smoothness=1.0, variance=0.01, distance=2.0)
      >>> isrl.accelerated(alphas, prox, 0.0, project=lambda w: w).rounds
      35
    """
    mu = strong_convexity
    if begins is None:
        begins = jnp.zeros(len(alphas), bool)

    def step(oracle: Oracle, row: Any, state: Any, x: Any) -> tuple[jax.Array, jax.Array]:
        (w, w_ag), (alpha, prox, begin) = state, x
        w = jnp.where(begin, w_ag, w)
        w_md = middle_point(w, w_ag, alpha, prox, mu)
        w = project(closed_form(oracle(w_md, row), w_md, w, alpha, prox, mu))
        return w, alpha * w + (1 - alpha) * w_ag

    return Method(
        lambda w: (w, w), step, lambda state, rounds: state[1], (alphas, prox_weights, begins)
    )


def middle_point(w: jax.Array, w_ag: jax.Array, alpha: Any, prox: Any, mu: Any) -> jax.Array:
    """Where the gradient is taken: a convex combination."""
    whole = prox + (1 - alpha**2) * mu
    return ((1 - alpha) * (mu + prox) * w_ag + alpha * ((1 - alpha) * mu + prox) * w) / whole


def closed_form(
    gradient: jax.Array, w_md: jax.Array, w: jax.Array, alpha: Any, prox: Any, mu: Any
) -> jax.Array:
    """Argmin of alpha (<g, v> + mu/2 |w_md - v|^2) + ((1-alpha) mu/2 + prox/2) |w - v|^2."""
    return (alpha * mu * w_md + ((1 - alpha) * mu + prox) * w - alpha * gradient) / (mu + prox)


def step_weights(
    rounds: int, smoothness: float, variance: float, distance: float
) -> tuple[jax.Array, jax.Array]:
    """alpha_r = 2/(r+1), and prox weights 4 u / (r (r+1)), which the paper does not print.

    u = max(2 beta, sqrt(2 V^2 R (R+1) (R+2) / (3 D_0^2))) gives a risk of at most
    2 u D_0^2 / (R (R+1)) + 4 V^2 (R+2) / (3 u), that is beta D^2/R^2 + V D / sqrt(R).

    Args:
      rounds: R.
      smoothness: beta.
      variance: V^2 of the mean noisy gradient.
      distance: D_0 >= |w_0 - w*|.

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> alphas, prox = isrl.step_weights(3, smoothness=1.0, variance=0.0, distance=1.0)
      >>> alphas.shape, float(alphas[0])
      ((3,), 1.0)
    """
    r = np.arange(1, rounds + 1, dtype=float)
    grown = 2 * variance * rounds * (rounds + 1) * (rounds + 2) / (3 * distance**2)
    scale = max(2 * smoothness, math.sqrt(grown))
    alphas, prox = 2 / (r + 1), 4 * scale / (r * (r + 1))
    return jnp.asarray(alphas, jnp.float32), jnp.asarray(prox, jnp.float32)
