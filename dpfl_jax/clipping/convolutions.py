"""Finds the parameters that are kernels of convolutions: every device must hold these whole.

Where a convolution's kernel is split over devices, XLA's partitioner computes the gradients of
several units wrongly: units mix (docs/internals/clipping.md shows it in plain JAX).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from dpfl_jax.clipping.jaxprs import inner_jaxprs
from dpfl_jax.clipping.result import leaf_name
from dpfl_jax.clipping.taps.trace import INLINED, REMAT, scan_counts

PyTree = Any
Names = frozenset[str]

# Primitives whose inner program has the same inputs and outputs, in order.
_INLINED = INLINED | REMAT | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}


def kernels(loss_fn: Callable[..., Any], params: PyTree, example: PyTree) -> Names:
    """Names of the parameters that the kernel of a convolution depends on.

    Args:
      loss_fn: ``(params, example) -> scalar`` for one example; it is traced, not run.
      params: pytree of arrays or ShapeDtypeStructs.
      example: likewise, of one example.
    """

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
        return jax.ShapeDtypeStruct(jnp.shape(x), dtype)

    shapes = jax.tree.map(shape, params)
    jaxpr = jax.make_jaxpr(loss_fn)(shapes, jax.tree.map(shape, example)).jaxpr
    names = [
        frozenset((leaf_name(path),)) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)
    ]
    rest: list[Names] = [frozenset()] * (len(jaxpr.invars) - len(names))
    kernels: set[str] = set()
    _follow(jaxpr, [*names, *rest], kernels)
    return frozenset(kernels)


def _follow(jaxpr: Any, inputs: Sequence[Names], kernels: set[str]) -> list[Names]:
    """Which parameters each output depends on; adds those that reach a kernel to ``kernels``."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def names(v: Any) -> Names:
        return frozenset() if isinstance(v, Literal) else known.get(v, frozenset())

    for eqn in jaxpr.eqns:
        read = [names(v) for v in eqn.invars]
        if eqn.primitive.name == "conv_general_dilated":
            kernels |= read[1]
        known.update(zip(eqn.outvars, _outputs(eqn, read, kernels), strict=True))
    return [names(v) for v in jaxpr.outvars]


def _outputs(eqn: Any, read: list[Names], kernels: set[str]) -> list[Names]:
    name, inner = eqn.primitive.name, list(inner_jaxprs(eqn.params.values()))
    if name in _INLINED and len(inner) == 1 and len(inner[0].invars) == len(read):
        return _follow(inner[0], read, kernels)
    if name == "cond":
        branches = [_follow(branch, read[1:], kernels) for branch in inner]
        return [read[0].union(*parts) for parts in zip(*branches, strict=True)]
    if name == "scan":
        first, carries = scan_counts(eqn.params)
        while True:
            out = _follow(inner[0], read, kernels)
            before = read[first : first + carries]
            after = [a | b for a, b in zip(before, out)]
            if after == before:
                return out
            read = [*read[:first], *after, *read[first + carries :]]
    # An unknown primitive may do anything with its inputs.
    every = frozenset[str]().union(*read)
    for sub in inner:
        _follow(sub, [every] * len(sub.invars), kernels)
    return [every] * len(eqn.outvars)
