"""Refuses losses of a unit that depend on other units: on more than parameters and its own data.

Norms would not show it: the gradient of a loss that reads other units through a collective, or
through data of other devices that it has captured, is moved by many units together.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from dpfl_jax.clipping.jaxprs import every_program, inner_jaxprs
from dpfl_jax.clipping.result import axes_of
from dpfl_jax.errors import BadInputError

# Primitives that name an axis and send nothing over it. (`axis_index` is not one of them: where a
# unit is left out, others move to other places, and what they add would change.)
_SILENT = {"pvary", "pcast"}


def check_isolated(
    loss: Callable[..., Any], leaves: Sequence[jax.Array], units: Any, axes: frozenset[str]
) -> None:
    """Refuses a loss that other units can reach.

    Args:
      loss: ``(leaves, unit) -> (scalar, aux)``.
      leaves: trained parameters.
      units: pytree of arrays [n, ...].
      axes: the mesh axes over which the units vary.

    Raises:
      BadInputError: as of ``refuse_opaque``; or the loss varies over other mesh axes than the
        units (it has captured data: its gradient would be summed over those axes before clipping),
        or it, or its gradient, communicates over an axis that is bound outside of it.
    """
    bound = _axes_are_bound()  # inside shard_map, or inside vmap with a named axis

    def one(x: jax.Array) -> Any:  # a real unit, where its axes matter
        return x[0] if bound else jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    unit = jax.tree.map(one, units)
    value = jax.make_jaxpr(lambda p, u: loss(p, u)[0])(leaves, unit)
    refuse_opaque(value, "clipped_grad: the loss")
    if not bound:
        return
    if captured := axes_of(value.out_avals[0]) - axes:
        raise BadInputError(
            f"clipped_grad: the loss of a unit varies over the mesh axes {sorted(captured)}, but "
            "the units passed in do not: the loss uses data from outside; pass them in the batch"
        )
    # The gradient, too, as custom_vjp rules show only there.
    gradient = jax.make_jaxpr(jax.grad(loss, has_aux=True))(leaves, unit)
    for name, over in _messages(gradient.jaxpr, frozenset()):
        raise BadInputError(
            f"clipped_grad: the loss of a unit, or its gradient, communicates over the axis "
            f"{over!r} ({name}): it would depend on other units (a statistic of the batch?) or "
            "hold only a part of this one, and the clip norm would bound neither; make the loss a "
            "function of one unit, and leave the splitting of parameters to automatic sharding"
        )


def refuse_opaque(program: Any, what: str) -> None:
    """Refuses programs with parts that can be neither bounded nor fingerprinted.

    Args:
      program: a ClosedJaxpr.
      what: the program's name in the message.

    Raises:
      BadInputError: it calls back into Python or into code outside of JAX, computes something else
        under ``vmap`` (by ``custom_vmap``, or a primitive whose rule is not JAX's own), or draws
        with keys that under ``vmap`` draw for all units together.
    """
    for inner in every_program(program):
        for equation in inner.eqns:
            name = equation.primitive.name
            if name in ("pure_callback", "io_callback", "ffi_call"):
                where = "code outside of JAX" if name == "ffi_call" else "Python"
                raise BadInputError(
                    f"{what} calls into {where} ({name}): what is computed there can neither be "
                    "bounded nor told from another run's; write it in JAX"
                )
            if name == "custom_vmap_call" or not _batched_by_jax(equation.primitive):
                raise BadInputError(
                    f"{what} has a rule of its own for vmap ({name}): what that computes can "
                    "neither be bounded nor told from another run's; write it without one"
                )
            kinds = [str(getattr(v.aval, "dtype", "")) for v in equation.invars]
            if name in ("rng_bit_generator", "rng_uniform") or any(
                kind.startswith("key<") and kind != "key<fry>" for kind in kinds
            ):
                raise BadInputError(
                    f"{what} draws with a generator ({name}) that draws for all units together "
                    "when it is mapped over them, so that one would move the others: use keys of "
                    "jax.random.key(seed, impl='threefry2x32')"
                )


def _batched_by_jax(primitive: Any) -> bool:
    """Whether the batching rule of a primitive is JAX's, or Equinox's."""
    if primitive.name.startswith("unvmap_"):  # Equinox's: over all units
        return False
    try:  # not public; without it, rules are taken on trust
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
            # JAX wraps the rules that it is given.
            rules += [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
    return True


def _axes_are_bound() -> bool:
    """Whether a collective could be used here at all."""
    try:  # not public; without it, all losses are checked
        from jax._src.core import get_axis_env

        return bool(get_axis_env().axis_sizes)
    except (ImportError, AttributeError):
        return True


def _messages(jaxpr: Any, inner: frozenset[Any]) -> Iterator[tuple[str, Any]]:
    """Yields primitives that communicate over named axes bound outside, with the axis."""
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
