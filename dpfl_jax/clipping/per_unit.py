"""The strategies that form each unit's gradient: ``vmap`` (the reference) and ``scan``.

``vmap`` holds n copies of the parameters. ``scan`` holds one microbatch's worth and an
accumulator; with microbatches of one unit it runs the ordinary gradient of each unit in turn,
which for units of many tokens is close to the floor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax.clipping import accumulate
from dpfl_jax.clipping.problem import Problem, Solution
from dpfl_jax.clipping.result import unit_where, vary, varying_axes
from dpfl_jax.errors import BadInputError

PyTree = Any
# So few gradients are weighted and added up in one loop over entries; of more it is a product.
_ONE_LOOP = 8


def squared_norms(gradients: Sequence[jax.Array]) -> list[jax.Array]:
    """Squared norm of each unit for each leaf: leaves [n, ...] -> float32 [n] each."""

    def one(g: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(g.astype(jnp.float32)), axis=tuple(range(1, g.ndim)))

    return [one(g) for g in gradients]


def weighted_sum(gradient: jax.Array, weights: jax.Array, keep: jax.Array, parts: int) -> jax.Array:
    """Sum over units of weight times gradient, in float32; units outside ``keep`` add exactly 0.

    ``parts``: into how many the unit axis is split over devices.
    """
    if parts == 1 and len(gradient) <= _ONE_LOOP:
        terms = [
            jnp.where(k, w * g.astype(jnp.float32), 0.0) for k, w, g in zip(keep, weights, gradient)
        ]
        return sum(terms[1:], start=terms[0])
    scale = weights.reshape(-1, *[1] * (gradient.ndim - 1))
    return unit_where(keep, scale * gradient.astype(jnp.float32)).sum(0)


def solve_vmap(problem: Problem) -> Solution:
    """Per-unit gradients all at once; memory n x parameters."""
    (losses, aux), gradients = problem.every_gradient()
    decided = problem.judge(squared_norms(gradients))
    sums = [weighted_sum(*x, problem.parts) for x in zip(gradients, decided.weights, decided.keeps)]
    return Solution(
        sums=sums,
        norms=decided.norms,
        leaf_norms=decided.leaf_norms,
        weights=decided.reported,
        losses=unit_where(problem.real, losses),
        nonfinite=decided.nonfinite,
        aux=aux,
    )


def in_microbatches(solve: Any, problem: Problem, microbatch_size: int) -> Solution:
    """Runs a strategy over microbatches in a ``lax.scan``, adding up the sums.

    Args:
      solve: ``Problem -> Solution``.
      problem: any number of units; the last microbatch is filled with padding.
      microbatch_size: units at a time, >= 1.

    Raises:
      BadInputError: units are split over devices, and a microbatch cannot be.
    """
    n = problem.num_units
    size = min(microbatch_size, n)
    if size % problem.parts:
        raise BadInputError(
            f"clipped_grad: microbatches of {size} units cannot be split over the "
            f"{problem.parts} parts of unit_sharding; take a multiple"
        )
    steps = -(-n // size)
    if steps == 1:  # XLA's CPU compiler keeps a loop of one turn, where convolutions are slow
        return solve(problem)

    def split(x: jax.Array) -> jax.Array:
        # Padding repeats real units rather than inventing zeros, which a loss may choke on.
        filled = jnp.take(x, jnp.arange(steps * size) % n, axis=0) if steps * size != n else x
        # Placed at once: left to itself the compiler splits the axis of steps over devices, and its
        # loop over steps then mixes units.
        return problem.place(filled.reshape(steps, size, *x.shape[1:]), 1)

    real = problem.real
    if steps * size != n:
        real = jnp.take(real, jnp.arange(steps * size) % n) & (jnp.arange(steps * size) < n)
    xs = (
        jax.tree.map(split, (problem.units, problem.weight, problem.bound)),
        problem.place(real.reshape(steps, size), 1),
    )

    def body(carry: Any, chunk: Any) -> tuple[Any, Solution]:
        (units, weight, bound), chunk_real = chunk
        own = {"units": units, "real": chunk_real, "weight": weight, "bound": bound}
        part = solve(dataclasses.replace(problem, **own))
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
