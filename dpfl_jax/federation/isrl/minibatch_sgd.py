"""Noisy minibatch SGD (Algorithm 2; unbalanced: Algorithm 7, with K_i / n_i equal)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpfl_jax.federation.isrl.schedule import own_rows, use_of

Project = Callable[[jax.Array], jax.Array]


def ball(radius: float | None) -> Project:
    """Projection on the ball of this radius about 0 (half the diameter D); None: no constraint."""

    def project(w: jax.Array) -> jax.Array:
        if radius is None:
            return w
        norm = jnp.linalg.norm(w.ravel())
        return w * jnp.minimum(1.0, radius / jnp.maximum(norm, 1e-30))

    return project


def minibatch_sgd(
    oracle: Callable[[jax.Array, Any], jax.Array],
    rows: Any,
    start: jax.Array,
    step_sizes: jax.Array,
    log_weights: jax.Array,
    project: Project,
) -> jax.Array:
    """w_{r+1} = project(w_r - eta_r g_r); returns the weighted mean of the iterates.

    Args:
      oracle: ``(w, round) -> mean noisy gradient``.
      rows: rounds 0 to R-1 of a schedule.
      start: w_0.
      step_sizes: float [R], eta_r.
      log_weights: float [R+1], log gamma_r of w_0 .. w_R. The paper leaves out w_R (-inf); its
        gamma_r of strongly convex losses grow exponentially, hence logs.
      project: on W.
    """

    def step(carry: MinibatchState, x: Any) -> tuple[MinibatchState, None]:
        row, eta, log_weight = x
        return minibatch_step(oracle, row, carry, eta, log_weight, project), None

    first = jax.tree.map(lambda x: x[0], rows)
    asked = [*use_of(oracle, start, first), *use_of(project, start)]
    rows = own_rows(rows, "minibatch_sgd", start, step_sizes, log_weights, *asked)
    xs = (rows, step_sizes, log_weights[:-1])
    state, _ = jax.lax.scan(step, minibatch_start(start), xs)
    return minibatch_output(state, log_weights[-1])


class MinibatchState(NamedTuple):
    """w_r, and the weighted mean of what came before it."""

    w: jax.Array
    mean: jax.Array
    log_total: jax.Array


def minibatch_start(start: jax.Array) -> MinibatchState:
    """The state before round 0."""
    return MinibatchState(start, start, jnp.asarray(-jnp.inf))


def minibatch_step(
    oracle: Callable[[jax.Array, Any], jax.Array],
    row: Any,
    state: MinibatchState,
    eta: jax.Array,
    log_weight: jax.Array,
    project: Project,
) -> MinibatchState:
    """One round."""
    mean, log_total = _averaged(state.mean, state.log_total, state.w, log_weight)
    return MinibatchState(project(state.w - eta * oracle(state.w, row)), mean, log_total)


def minibatch_output(state: MinibatchState, log_weight: jax.Array) -> jax.Array:
    """The weighted mean, with w_R's weight."""
    return _averaged(state.mean, state.log_total, state.w, log_weight)[0]


def _averaged(
    mean: jax.Array, log_total: jax.Array, w: jax.Array, log_weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    grown = jnp.logaddexp(log_total, log_weight)
    share = jnp.where(jnp.isneginf(grown), 0.0, jnp.exp(log_weight - grown))
    return mean + share * (w - mean), grown


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
