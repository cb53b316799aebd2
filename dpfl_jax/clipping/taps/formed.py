"""The method ``keep``: gradients are formed, clipped and added up a few units at a time.

The gradient of a unit that is formed for its norm is kept for the sum, so that no product is
computed twice. Only a few units' gradients exist at a time: they take little memory, and stay in
the cache between their norm and the sum.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax.clipping import accumulate
from dpfl_jax.clipping.cost import Machine
from dpfl_jax.clipping.per_unit import weighted_sum
from dpfl_jax.clipping.problem import ClippingProblem, UnitWeights
from dpfl_jax.clipping.result import vary, varying_axes
from dpfl_jax.clipping.taps import leaves
from dpfl_jax.clipping.taps.factors import Pair


def microbatch_size(uses: Sequence[Sequence[Pair]], units: int, machine: Machine) -> int:
    """How many units' gradients exist at a time, a divisor of ``units``.

    Args:
      uses: the uses of each parameter whose gradients are formed.
      units: of one part of the unit axis.
      machine: whose cache should hold what is formed.
    """
    if machine.cache is None or not uses:
        return units
    gradients = sum(leaves.formed_bytes(pairs) for pairs in uses)
    most = machine.cache / max(1.0, *(leaves.formed_bytes(p, windows=True) for p in uses))
    if gradients > machine.cache:  # they leave it anyway: then add to the sums rarely
        most = max(most, (machine.working_set or gradients) / gradients)
    return max(k for k in range(1, units + 1) if units % k == 0 and k <= max(1.0, most))


def clip_and_sum(
    problem: ClippingProblem,
    squared: Mapping[int, jax.Array],
    rounded: Sequence[jax.Array | None],
    formed: Mapping[int, Sequence[Pair]],
    size: int,
) -> tuple[UnitWeights, dict[int, jax.Array]]:
    """Computes the weights of all units, and sums the weighted gradients that are formed.

    Args:
      problem: its units are those of ``formed``.
      squared: for each leaf whose gradients are not formed, their squared norms [n].
      rounded: as ``ClippingProblem.unit_weights`` takes it.
      formed: the uses of the other leaves.
      size: units of each part of the unit axis at a time.

    Returns:
      The weights, and for each leaf of ``formed`` the sum, float32 of the leaf's shape.
    """
    n, shards = problem.num_units, problem.shards
    steps = n // (shards * size)
    shapes = {k: tuple(problem.leaves[k].shape) for k in formed}

    def some(i: jax.Array | None) -> tuple[UnitWeights, dict[int, list[jax.Array]]]:
        def pick(x: jax.Array) -> jax.Array:
            return x if i is None else leaves.pick(x, 0, i, shards, size, bits=True)

        gradients, squares = {}, {k: pick(x) for k, x in squared.items()}
        for k, pairs in formed.items():
            if i is not None:  # on a CPU alone
                pairs = [leaves.units_of(p, i, shards, size, bits=True) for p in pairs]
            gradients[k], squares[k] = leaves.formed_gradients(pairs, shapes[k], problem.parts)
        every = (problem.real, problem.weight, problem.bound)
        real, weight, bound = jax.tree.map(pick, every)
        part = dataclasses.replace(problem, real=real, weight=weight, bound=bound)
        extra = [None if x is None else pick(x) for x in rounded]
        units = part.unit_weights([squares[k] for k in sorted(squares)], extra)
        return units, {
            k: [weighted_sum(x, units.weights[k], units.keeps[k], problem.parts) for x in uses]
            for k, uses in gradients.items()
        }

    if steps == 1:
        units, sums = some(None)
    else:
        like = jax.eval_shape(lambda: some(jnp.zeros((), jnp.int32))[1])
        axes = varying_axes(problem.leaves, problem.real, dict(squared))
        zeros = vary(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like), axes)
        compensated = problem.rule.compensated or accumulate.needs_compensation(n, steps)
        errors = accumulate.start(zeros, compensated)

        def body(carry: Any, i: jax.Array) -> tuple[Any, UnitWeights]:
            units, more = some(i)
            sums, errors = carry
            return accumulate.add(sums, errors, more), units

        total, parts = jax.lax.scan(body, (zeros, errors), jnp.arange(steps))
        sums = accumulate.finish(*total)
        units = jax.tree.map(functools.partial(_in_order, shards=shards), parts)
    return units, {
        k: leaves.as_leaf(formed[k], shapes[k], x, problem.parts) for k, x in sums.items()
    }


def _in_order(parts: jax.Array, shards: int) -> jax.Array:
    """[steps, shards * size, ...] as [n, ...]."""
    steps, count = parts.shape[:2]
    split = parts.reshape(steps, shards, count // shards, *parts.shape[2:]).swapaxes(0, 1)
    return split.reshape(steps * count, *parts.shape[2:])
