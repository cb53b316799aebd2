"""Refuses losses of a unit that depend on other units.

The clip norm would not bound such dependence: if a loss reads other units through a collective, or
through captured data of other devices, one unit moves the gradients of many.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from dpfl_jax.clipping.jaxprs import every_program, inner_jaxprs
from dpfl_jax.errors import BadInputError
from dpfl_jax.varying import axes_of

# Primitives that name an axis but send nothing over it. (`axis_index` is not among them: without
# one unit, other units move to other positions, and their contributions would change.)
_SILENT = {"pvary", "pcast"}


def check_isolated(
    loss: Callable[..., Any], leaves: Sequence[jax.Array], units: Any, axes: frozenset[str]
) -> None:
    """Refuses a loss that can depend on other units.

    Args:
      loss: ``(leaves, unit) -> (scalar, aux)``.
      leaves: trained parameters.
      units: pytree of arrays [n, ...].
      axes: the mesh axes over which the units vary.

    Raises:
      BadInputError: ``refuse_opaque`` refuses the loss; or the loss varies over other mesh axes
        than the units (it has captured data, and its gradient would be summed over those axes
        before clipping); or the loss or its gradient communicates over an outer axis.
    """
    bound = _axes_are_bound()  # inside shard_map, or inside vmap with a named axis

    def one(x: jax.Array) -> Any:  # a concrete unit, which has its mesh axes, where these matter
        return x[0] if bound else jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    unit = jax.tree.map(one, units)
    value = jax.make_jaxpr(lambda p, u: loss(p, u)[0])(leaves, unit)
    refuse_opaque(value, "clipped_grad: the loss")
    if not bound:
        return
    if captured := axes_of(value.out_avals[0]) - axes:
        raise BadInputError(
            f"clipped_grad: the loss of a unit varies over the mesh axes {sorted(captured)}, but "
            "the units do not, so the loss uses captured data: pass that data in the batch"
        )
    # Check the gradient as well, because custom_vjp rules appear only there.
    gradient = jax.make_jaxpr(jax.grad(loss, has_aux=True))(leaves, unit)
    for name, over in _messages(gradient.jaxpr, frozenset()):
        raise BadInputError(
            f"clipped_grad: the loss of a unit, or its gradient, communicates over the axis "
            f"{over!r} ({name}), so it depends on other units (a statistic of the batch?) or holds "
            "only a part of this one, and the clip norm would bound neither: make the loss a "
            "function of one unit, and leave the splitting of parameters to automatic sharding"
        )


def refuse_opaque(program: Any, what: str) -> None:
    """Refuses programs with parts that can be neither bounded nor fingerprinted.

    Args:
      program: a ClosedJaxpr.
      what: the program's name in messages.

    Raises:
      BadInputError: the program calls Python or code outside of JAX, may compute something else
        under ``vmap`` (by ``custom_vmap``, or a primitive with a foreign batching rule), or draws
        with keys that draw for all units together under ``vmap``.
    """
    for inner in every_program(program):
        for equation in inner.eqns:
            name = equation.primitive.name
            if name in ("pure_callback", "io_callback", "ffi_call"):
                where = "code outside of JAX" if name == "ffi_call" else "Python"
                raise BadInputError(
                    f"{what} calls into {where} ({name}), where computation can be neither bounded "
                    "nor fingerprinted: write it in JAX"
                )
            if name == "custom_vmap_call" or not _batched_by_jax(equation.primitive):
                raise BadInputError(
                    f"{what} has a custom rule for vmap ({name}), whose computation can be neither "
                    "bounded nor fingerprinted: write it without a custom rule"
                )
            kinds = [str(getattr(v.aval, "dtype", "")) for v in equation.invars]
            if name in ("rng_bit_generator", "rng_uniform") or any(
                kind.startswith("key<") and kind != "key<fry>" for kind in kinds
            ):
                raise BadInputError(
                    f"{what} draws random numbers with a generator ({name}) that draws for all "
                    "units together under vmap, so that one unit would change the others: use keys "
                    "of jax.random.key(seed, impl='threefry2x32')"
                )


def _batched_by_jax(primitive: Any) -> bool:
    """Whether the batching rule of a primitive comes from JAX or Equinox."""
    if primitive.name.startswith("unvmap_"):  # Equinox's reductions over all units
        return False
    try:  # not public; without it, rules are trusted
        from jax._src.interpreters import batching

        tables = (batching.fancy_primitive_batchers, batching.primitive_batchers)
    except (ImportError, AttributeError):
        return True
    rules = [table[primitive] for table in tables if isinstance(table, dict) and primitive in table]
    while rules:
        rule = rules.pop()
        if isinstance(rule, functools.partial):
            rules.append(rule.func)
        elif inspect.isroutine(rule):
            if (rule.__module__ or "jax").partition(".")[0] not in ("jax", "jaxlib", "equinox"):
                return False
            # JAX wraps registered rules in closures.
            rules += [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
    return True


def _axes_are_bound() -> bool:
    """Whether any named axis is bound here, so that a collective could be used."""
    try:  # not public; without it, all losses are checked
        from jax._src.core import get_axis_env

        return bool(get_axis_env().axis_sizes)
    except (ImportError, AttributeError):
        return True


def _messages(jaxpr: Any, inner: frozenset[Any]) -> Iterator[tuple[str, Any]]:
    """Yields primitives that communicate over named axes bound outside the jaxpr, with the axis."""
    for eqn in jaxpr.eqns:
        bound = inner
        if eqn.primitive.name == "shard_map":
            mesh = eqn.params["mesh"]
            bound = inner | frozenset(eqn.params.get("manual_axes", mesh.axis_names))
        elif isinstance(eqn.params.get("axis_name"), str) and "call_jaxpr" in eqn.params:
            bound = inner | {eqn.params["axis_name"]}
        if bound is inner and eqn.primitive.name not in _SILENT:
            for axis in _named_axes(eqn.params):
                if axis not in inner:
                    yield eqn.primitive.name, axis
        for sub in inner_jaxprs(eqn.params.values()):
            yield from _messages(sub, bound)


def _named_axes(params: dict[str, Any]) -> Iterator[str]:
    for key in ("axes", "axis_name", "axis_names", "axis"):
        value = params.get(key)
        for axis in value if isinstance(value, (tuple, list, frozenset, set)) else (value,):
            if isinstance(axis, str):
                yield axis
