"""Counts the arithmetic of matrix products and convolutions in a jaxpr, loops included."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

from dpfl_jax.clipping.isolation import inner_jaxprs


def count_flops(function: Callable[..., Any], *args: Any, loop_length: int = 1) -> float:
    """Multiply-adds times two of all products, times the lengths of the loops around them.

    Compilers' own counts take the body of a loop once.

    Args:
      function: any JAX function.
      *args: arrays or shapes.
      loop_length: iterations assumed of loops whose length is not known before they run.
    """
    return jaxpr_flops(jax.make_jaxpr(function)(*args).jaxpr, loop_length)


def jaxpr_flops(jaxpr: Any, loop_length: int) -> float:
    """``count_flops`` of an open jaxpr."""
    total = 0.0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contract, _), (_, _) = eqn.params["dimension_numbers"]
            summed = math.prod(eqn.invars[0].aval.shape[i] for i in contract)
            total += 2.0 * math.prod(eqn.outvars[0].aval.shape) * summed
        elif name == "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape
            out_axis = eqn.params["dimension_numbers"].rhs_spec[0]
            per_output = math.prod(kernel) / kernel[out_axis]
            total += 2.0 * math.prod(eqn.outvars[0].aval.shape) * per_output
        else:
            times = {"scan": eqn.params.get("length", 1), "while": loop_length}.get(name, 1)
            parts = [jaxpr_flops(inner, loop_length) for inner in inner_jaxprs(eqn.params.values())]
            if name == "cond":
                total += max(parts, default=0.0)
            else:
                total += times * sum(parts)
    return total
