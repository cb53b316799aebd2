"""A Renyi filter: full-batch noisy descent in which every record stops when its budget is spent.

Source: Feldman and Zrnic 2021, "Individual privacy accounting via a Renyi filter", Algorithm 3; the
baseline "Filter" of Liu et al. 2024, section 7.1. A record pays for the squared norm of its own
clipped gradients, s_i, against a fixed B_i: with noise of stddev sigma C its Renyi divergence of
order a is at most a B_i / (2 sigma^2 C^2), however the steps depend on one another.

Add-or-remove one record. The number of steps and what the sum is divided by are constants: the
authors' code stops when fewer than ten records are active, which tells of the records.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.accounting.rates import check_budgets
from dpfl_jax.errors import BadInputError
from dpfl_jax.noise import GaussianNoise

PyTree = Any

# Integers and fractions: large budgets have their best order near 1.
_ORDERS = np.concatenate([1 + np.geomspace(0.01, 1, 60)[:-1], np.geomspace(2, 4096, 400)])


def epsilon_of_norms(squared: np.ndarray, sigma: float, delta: float) -> np.ndarray:
    """Epsilon of records whose clipped gradients' squared norms add up to ``squared`` C^2.

    Args:
      squared: float [n], B in units of C^2.
      sigma: noise multiplier.
      delta: in (0, 1).
    """
    a = _ORDERS[:, None]
    renyi = a * np.asarray(squared, np.float64)[None, :] / (2 * sigma**2)
    found = renyi + np.log1p(-1 / a) - (math.log(delta) + np.log(a)) / (a - 1)
    return np.where(np.asarray(squared) > 0, np.maximum(found.min(axis=0), 0.0), 0.0)


def norms_of_epsilon(budgets: np.ndarray, sigma: float, delta: float) -> np.ndarray:
    """B: the largest sum of squared norms (in units of C^2) that each epsilon allows, float64 [n].

    Solved order by order: B = max_a (epsilon - conversion) 2 sigma^2 / a; 0 if nothing fits.
    """
    budgets = check_budgets(budgets)
    a = _ORDERS[:, None]
    rest = budgets[None, :] - np.log1p(-1 / a) + (math.log(delta) + np.log(a)) / (a - 1)
    return np.maximum((rest * 2 * sigma**2 / a).max(axis=0), 0.0) * (1 - 1e-12)


def filtered_descent(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    records: PyTree,
    allowed: np.ndarray,
    *,
    sigma: float,
    clip_norm: float,
    learning_rate: float,
    steps: int,
    divisor: float,
    key: jax.Array,
) -> tuple[PyTree, jax.Array]:
    """Full-batch noisy gradient descent; every record's gradients fit what is left of its B.

    Args:
      loss_fn: ``(params, record) -> scalar``.
      params: initial parameters.
      records: arrays [n, ...].
      allowed: float [n], B of each record in units of clip_norm^2; secret.
      sigma: noise multiplier.
      clip_norm: C.
      learning_rate: of plain descent.
      steps: public.
      divisor: public number of records, a declared constant.
      key: of the noise; used for nothing else.

    Returns:
      The parameters, and what each record has spent: float32 [n], in units of clip_norm^2.

    Raises:
      BadInputError: a divisor that is not above 0, or another number of B than of records.
    """
    count = len(jax.tree.leaves(records)[0])
    if not divisor > 0:
        raise BadInputError(f"the divisor is {divisor}, but it must be above 0")
    if np.shape(allowed) != (count,):
        raise BadInputError(f"{np.shape(allowed)} allowances for {count} records: give one each")
    # Room for rounding in float32, where every addition errs: what is added up stays below B.
    room = max(1 - 1e-5 - steps * 2.0**-24, 0.0)
    budget = jnp.asarray(np.asarray(allowed, np.float64) * room, jnp.float32)
    records = jax.tree.map(jnp.asarray, records)
    settings = jnp.array([sigma, clip_norm, learning_rate, divisor], jnp.float32)
    return _descend(params, records, budget, settings, jax.random.split(key, steps), loss_fn)


@functools.partial(jax.jit, static_argnames="loss_fn")
def _descend(
    params: PyTree,
    records: PyTree,
    budget: jax.Array,
    settings: jax.Array,
    keys: jax.Array,
    loss_fn: Callable[..., jax.Array],
) -> tuple[PyTree, jax.Array]:
    sigma, clip_norm, learning_rate, divisor = settings
    count = len(budget)
    gradients = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))

    def step(carry: tuple[PyTree, jax.Array], noise_key: jax.Array) -> tuple[Any, None]:
        now, spent = carry
        found = gradients(now, records)
        norms = jnp.sqrt(
            sum(jnp.sum(jnp.square(g).reshape(count, -1), axis=1) for g in jax.tree.leaves(found))
        )
        most = clip_norm * jnp.sqrt(jnp.clip(budget - spent, 0.0, 1.0))
        usable = jnp.isfinite(norms)
        scale = jnp.where(usable, jnp.minimum(1.0, most / jnp.maximum(norms, 1e-30)), 0.0)
        spent = spent + jnp.where(usable, jnp.square(scale * norms / clip_norm), 0.0)

        def total(g: jax.Array) -> jax.Array:
            clean = jnp.where(usable.reshape(-1, *[1] * (g.ndim - 1)), g, 0.0)
            return jnp.tensordot(scale, clean, axes=1, precision="highest")

        def descended(p: jax.Array, g: jax.Array, z: jax.Array) -> jax.Array:
            return p - learning_rate * ((total(g) + sigma * clip_norm * z) / divisor)

        noise = GaussianNoise(1.0).sample(noise_key, now)
        return (jax.tree.map(descended, now, found, noise), spent), None

    (params, spent), _ = jax.lax.scan(step, (params, jnp.zeros(count, jnp.float32)), keys)
    return params, spent
