"""Analysis of jaxprs: inner programs, FLOPs of products, peak memory, kernels of convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
from jax.extend.core import Literal

from dpfl_jax.clipping.result import leaf_name
from dpfl_jax.clipping.taps.trace import INLINED, REMAT, scan_counts

# Primitives whose results the compiler recomputes where they are read, instead of storing them.
_FREE = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "copy_p",
        "expand_dims",
        "iota",
        "name",
        "pcast",
        "pvary",
        "reduce_precision",
        "reshape",
        "squeeze",
        "transpose",
    }
)


def traced_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function``, whose Python code runs once for each type of arguments.

    Tracing a model takes longer than evaluating its jaxpr, and a clipped gradient needs the loss
    several times: to see that units do not mix, to choose a strategy, and to compute.
    """
    known: dict[Any, tuple[Callable[..., Any], Any]] = {}

    def evaluated(*args: Any) -> Any:
        tree: Any
        flat, tree = jax.tree.flatten(args)
        kind = tree, tuple(map(jax.typeof, flat))
        if kind not in known:
            structures: list[Any] = []

            def outputs(*flat: Any) -> list[Any]:
                leaves, structure = jax.tree.flatten(function(*tree.unflatten(flat)))
                structures.append(structure)
                return leaves

            jaxpr = jax.make_jaxpr(outputs)(*flat)
            known[kind] = jex.core.jaxpr_as_fun(jaxpr), structures[-1]
        run, structure = known[kind]
        return structure.unflatten(run(*flat))

    return evaluated


def every_program(program: Any) -> Iterator[Any]:
    """Yields a ClosedJaxpr or Jaxpr and every program that it calls."""
    yield program
    for equation in program.eqns:
        for inner in inner_programs(equation.params.values()):
            yield from every_program(inner)


def inner_jaxprs(values: Any) -> Iterator[Any]:
    """Returns the open Jaxprs among an equation's parameters, without captured arrays."""
    return (getattr(program, "jaxpr", program) for program in inner_programs(values))


def inner_programs(values: Any) -> Iterator[Any]:
    """Yields the programs among an equation's parameters: ClosedJaxprs and Jaxprs."""
    for value in values:
        if isinstance(value, (jex.core.ClosedJaxpr, jex.core.Jaxpr)):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from inner_programs(value)
        elif isinstance(value, Mapping):
            yield from inner_programs(value.values())


def count_flops(function: Callable[..., Any], *args: Any, loop_length: int = 1) -> float:
    """Returns the FLOPs of matrix products and convolutions (two per multiply-add), with loops.

    XLA's count includes the body of a loop only once.

    Args:
      function: any JAX function.
      *args: arrays or shapes.
      loop_length: iterations assumed for loops whose length is not known before they run.
    """
    return jaxpr_flops(jax.make_jaxpr(function)(*args).jaxpr, loop_length)


def jaxpr_flops(jaxpr: Any, loop_length: int) -> float:
    """Returns ``count_flops`` of an open jaxpr."""
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


def peak_bytes(jaxpr: Any) -> float:
    """Estimates the peak memory of intermediate values and results, in bytes, without arguments.

    Values are assumed to be stored in the order of the equations, each until its last use.

    Args:
      jaxpr: an open jaxpr.
    """
    owner: dict[Any, Any] = {}  # a value that is not stored -> the stored value it is read from

    def stored(v: Any) -> Any:
        return owner.get(v, v)

    last: dict[Any, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        read = [v for v in eqn.invars if not isinstance(v, Literal)]
        if eqn.primitive.name in _FREE and len(eqn.outvars) == 1 and len(read) <= 1:
            owner[eqn.outvars[0]] = stored(read[0]) if read else None
        for v in read:
            last[stored(v)] = i
    for v in jaxpr.outvars:
        if not isinstance(v, Literal):
            last[stored(v)] = len(jaxpr.eqns)
    ending: dict[int, list[Any]] = {}
    for v, i in last.items():
        ending.setdefault(i, []).append(v)

    held: dict[Any, float] = {}
    alive = most = 0.0
    for i, eqn in enumerate(jaxpr.eqns):
        made = {v: _bytes(v) for v in eqn.outvars if v not in owner}
        within = max((peak_bytes(j) for j in inner_jaxprs(eqn.params.values())), default=0.0)
        if eqn.primitive.name != "scan":  # the inner peak already includes the results
            within = max(0.0, within - sum(made.values()))
        most = max(most, alive + sum(made.values()) + within)
        held |= {v: size for v, size in made.items() if last.get(v, i) > i}
        for v in ending.get(i, ()):
            held.pop(v, None)
        alive = sum(held.values())
    return most


def _bytes(v: Any) -> float:
    dtype = getattr(v.aval, "dtype", None)
    return float(math.prod(v.aval.shape) * getattr(dtype, "itemsize", 0))


# ---- kernels of convolutions ---------------------------------------------------------------------
# Where a convolution's kernel is split over devices, XLA's partitioner computes the gradients of
# several units wrongly: units mix (docs/internals/clipping.md shows it in plain JAX). So every
# device must hold such kernels in full.

Names = frozenset[str]
# Primitives whose inner program has the equation's inputs and outputs, in order.
_INLINED = INLINED | REMAT | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}


def convolution_kernels(loss_fn: Callable[..., Any], params: Any, example: Any) -> Names:
    """Returns the names of the parameters on which the kernel of a convolution depends.

    Args:
      loss_fn: ``(params, example) -> scalar`` for one example; it is traced, not run.
      params: pytree of arrays or ShapeDtypeStructs.
      example: pytree of arrays or ShapeDtypeStructs, one example.
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
    """The parameters that each output depends on; adds those that reach a kernel to ``kernels``."""
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
