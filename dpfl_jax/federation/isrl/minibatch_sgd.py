"""Noisy minibatch SGD (Algorithm 2; unbalanced: Algorithm 7, with K_i / n_i equal)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpfl_jax.federation.isrl.method import Method, Oracle

Project = Callable[[jax.Array], jax.Array]


def ball(radius: float | None) -> Project:
    """Projection on the ball of this radius about 0 (half the diameter D); None: no constraint."""

    def project(w: jax.Array) -> jax.Array:
        if radius is None:
            return w
        norm = jnp.linalg.norm(w.ravel())
        return w * jnp.minimum(1.0, radius / jnp.maximum(norm, 1e-30))

    return project


class MinibatchState(NamedTuple):
    """w_r, and the weighted mean of what came before it."""

    w: jax.Array
    mean: jax.Array
    log_total: jax.Array


def minibatch_sgd(step_sizes: jax.Array, log_weights: jax.Array, project: Project) -> Method:
    """w_{r+1} = project(w_r - eta_r g_r); its output is the weighted mean of the iterates.

    Args:
      step_sizes: float [R], eta_r.
      log_weights: float [R+1], log gamma_r of w_0 .. w_R. The paper leaves out w_R (-inf); its
        gamma_r of strongly convex losses grow exponentially, hence logs.
      project: on W.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.federation import isrl
      >>> method = isrl.minibatch_sgd(jnp.full(20, 0.5), jnp.zeros(21), project=lambda w: w)
      >>> method.rounds
      20
    """

    def start(w: jax.Array) -> MinibatchState:
        return MinibatchState(w, w, jnp.asarray(-jnp.inf))

    def step(oracle: Oracle, row: Any, state: MinibatchState, x: Any) -> MinibatchState:
        eta, log_weight = x
        mean, log_total = _averaged(state, log_weight)
        return MinibatchState(project(state.w - eta * oracle(state.w, row)), mean, log_total)

    def output(state: MinibatchState, rounds: int) -> jax.Array:
        mean, log_total = _averaged(state, log_weights[rounds])
        # Only the last iterates may count: before the end, the current one stands in.
        return jnp.where(jnp.isneginf(log_total), state.w, mean)

    return Method(start, step, output, (step_sizes, log_weights[:-1]))


def _averaged(state: MinibatchState, log_weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    grown = jnp.logaddexp(state.log_total, log_weight)
    share = jnp.where(jnp.isneginf(grown), 0.0, jnp.exp(log_weight - grown))
    return state.mean + share * (state.w - state.mean), grown


def uniform_weights(rounds: int) -> jax.Array:
    """gamma_r = 1/R, for convex losses."""
    return jnp.concatenate([jnp.zeros(rounds), jnp.full(1, -jnp.inf)])


def strongly_convex_weights(rounds: int, strong_convexity: float, step_size: float) -> jax.Array:
    """gamma_r = (1 - mu eta)^-(r+1) (Lemma D.5)."""
    rate = -jnp.log1p(-jnp.asarray(strong_convexity * step_size))
    return jnp.concatenate([rate * jnp.arange(1, rounds + 1), jnp.full(1, -jnp.inf)])


def last_weights(rounds: int, count: int = 1) -> jax.Array:
    """The mean of the last ``count`` iterates, w_R among them."""
    return jnp.where(jnp.arange(rounds + 1) > rounds - count, 0.0, -jnp.inf)
