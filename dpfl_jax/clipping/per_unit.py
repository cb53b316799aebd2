"""The strategies that form each unit's gradient: ``vmap`` (the reference) and ``scan``.

``vmap`` holds n gradients. ``scan`` holds the gradients of one microbatch and an accumulator. With
microbatches of one unit it computes one ordinary gradient after the other, which for units of many
tokens costs little more than training without privacy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax.clipping import accumulate
from dpfl_jax.clipping.problem import ClippedSums, ClippingProblem
from dpfl_jax.clipping.result import unit_where
from dpfl_jax.errors import BadInputError
from dpfl_jax.varying import vary, varying_axes

PyTree = Any
# Up to this many gradients are weighted and summed in one loop over their entries.
_ONE_LOOP = 8


def squared_norms(gradients: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns each unit's squared norm for each leaf: leaves [n, ...] -> float32 [n] each."""

    def one(g: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(g.astype(jnp.float32)), axis=tuple(range(1, g.ndim)))

    return [one(g) for g in gradients]


def weighted_sum(gradient: jax.Array, weights: jax.Array, keep: jax.Array, parts: int) -> jax.Array:
    """Returns the sum over units of weight times gradient, float32; 0 outside ``keep`` (bool [n]).

    ``parts`` is the number of parts into which devices split the unit axis.
    """
    if parts == 1 and len(gradient) <= _ONE_LOOP:
        terms = [
            jnp.where(k, w * g.astype(jnp.float32), 0.0) for k, w, g in zip(keep, weights, gradient)
        ]
        return sum(terms[1:], start=terms[0])
    scale = weights.reshape(-1, *[1] * (gradient.ndim - 1))
    return unit_where(keep, scale * gradient.astype(jnp.float32)).sum(0)


def solve_vmap(problem: ClippingProblem) -> ClippedSums:
    """Forms the gradients of all units at once, in memory for n x parameters."""
    (losses, aux), gradients = problem.every_gradient()
    units = problem.unit_weights(squared_norms(gradients))
    sums = [weighted_sum(*x, problem.parts) for x in zip(gradients, units.weights, units.keeps)]
    return problem.clipped_sums(sums, units, losses, aux)


def microbatched(solve: Any, problem: ClippingProblem, microbatch_size: int) -> ClippedSums:
    """Runs a strategy over microbatches in a ``lax.scan`` and adds up the sums.

    Args:
      solve: ``ClippingProblem -> ClippedSums``.
      problem: any number of units; the last microbatch is filled up with padding.
      microbatch_size: units in a microbatch, >= 1.

    Raises:
      BadInputError: units are split over devices, but a microbatch cannot be split equally.
    """
    n = problem.num_units
    size = min(microbatch_size, n)
    if size % problem.parts:
        raise BadInputError(
            f"clipped_grad: microbatches of {size} units cannot be split over the "
            f"{problem.parts} parts of unit_sharding: set microbatch_size to a multiple of that"
        )
    steps = -(-n // size)
    if steps == 1:  # XLA's CPU compiler keeps a loop of one iteration, with slow convolutions
        return solve(problem)

    def split(x: jax.Array) -> jax.Array:
        # Padding repeats real units instead of zeros, for which a loss may fail.
        filled = jnp.take(x, jnp.arange(steps * size) % n, axis=0) if steps * size != n else x
        # Without this constraint the compiler splits the axis of steps over devices, and its loop
        # over steps then mixes units.
        return problem.place(filled.reshape(steps, size, *x.shape[1:]), 1)

    real = problem.real
    if steps * size != n:
        real = jnp.take(real, jnp.arange(steps * size) % n) & (jnp.arange(steps * size) < n)
    xs = (
        jax.tree.map(split, (problem.units, problem.weight, problem.bound)),
        problem.place(real.reshape(steps, size), 1),
    )

    def body(carry: Any, chunk: Any) -> tuple[Any, ClippedSums]:
        (units, weight, bound), chunk_real = chunk
        some = {"units": units, "real": chunk_real, "weight": weight, "bound": bound}
        part = solve(dataclasses.replace(problem, **some))
        sums, errors = carry
        return accumulate.add(sums, errors, part.sums), dataclasses.replace(part, sums=[])

    axes = varying_axes(problem.leaves, xs)
    zeros = vary([jnp.zeros(p.shape, jnp.float32) for p in problem.leaves], axes)
    compensated = problem.rule.compensated or accumulate.needs_compensation(n, steps)
    errors = accumulate.start(zeros, compensated)
    carry, parts = jax.lax.scan(body, (zeros, errors), xs)
    sums, errors = carry
    sums = accumulate.finish(sums, errors)
    merged = jax.tree.map(lambda x: x.reshape(steps * size, *x.shape[2:])[:n], parts)
    return dataclasses.replace(merged, sums=sums)
