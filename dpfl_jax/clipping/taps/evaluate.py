"""Runs the jaxpr of a one-unit loss with a tap wherever a parameter meets data.

The interpreter knows nothing of units: it is mapped over them with ``jax.vmap``, parameters
unmapped, so that every equation is batched by JAX's own rules.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from dpfl_jax.clipping.taps.trace import REMAT, Plan, inner_jaxpr, scan_counts

Tokens = dict[int, jax.Array]
# Grouped by the number of scans around them, because that is where the unit axis goes.
Records = dict[int, dict[Hashable, jax.Array]]


@jax.custom_jvp
def tap(y: jax.Array, token: jax.Array) -> jax.Array:
    """Returns ``y``; its gradient also reaches ``token``, whose value is never read.

    Adding an array of zeros would do the same, but inside loops it would be stored and read.
    """
    return _of_each_unit(y, token)


@tap.defjvp
def _tap_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _of_each_unit(*primals), tangents[0] + tangents[1]


def _of_each_unit(y: jax.Array, token: jax.Array) -> jax.Array:
    """``y``, mapped over whatever the token is mapped over.

    What follows from parameters alone has no axis of units, but its gradient has one: of a
    ``custom_jvp`` whose output has none, JAX adds up the tangents of all units in scans and
    checkpoints. A choice that is never made costs nothing: compilers see that it is not.
    """
    return jax.lax.select(jax.numpy.zeros((), bool), token, y)


def evaluate(
    plan: Plan, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], tokens: Tokens
) -> tuple[list[Any], Records]:
    """Evaluates a jaxpr with taps.

    Args:
      plan: where the taps are.
      jaxpr: an open jaxpr.
      consts: values of its constants.
      inputs: values of its inputs.
      tokens: for each site of the plan, an array [lengths of scans from here on..., *output].

    Returns:
      The outputs, and the records, each with one leading axis per scan entered from here.
    """
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, inputs))
    records: Records = {}

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    for position, eqn in enumerate(jaxpr.eqns):
        args = [read(v) for v in eqn.invars]
        inner = plan.inner.get(position)
        with eqn.ctx.manager:
            if inner is not None:
                taps = {s.index: tokens[s.index] for s in inner.all_sites()}
                outs, below = _enter(inner, eqn, args, taps)
                for depth, found in below.items():
                    records.setdefault(depth, {}).update(found)
            else:
                # JAX up to 0.10.1 returns the functions to call apart from the parameters.
                params = eqn.primitive.get_bind_params(eqn.params)
                functions, params = params if isinstance(params, tuple) else ((), params)
                run = functools.partial(eqn.primitive.bind, *functions, **params)
                as_usual = params.get("accuracy") is None  # of the highest JAX's rule is another
                if plan.depth and eqn.primitive in _BY_VALUE and as_usual:
                    run = _by_value(run, _BY_VALUE[eqn.primitive])
                outs = run(*args)
                outs = list(outs) if eqn.primitive.multiple_results else [outs]
        if position in plan.sites and plan.sites[position].tapped:
            outs = [tap(outs[0], tokens[plan.sites[position].index])]
        values.update(zip(eqn.outvars, outs))
    if plan.records:
        mine = {key: jax.numpy.asarray(read(v)) for key, v in plan.records.items()}
        records.setdefault(plan.depth, {}).update(mine)
    return [read(v) for v in jaxpr.outvars], records


# Gradients by values ``y``, in JAX's own order of operations (that of tanh before 0.11 lost digits
# where y is near -1).
_BY_VALUE = {
    jax.lax.tanh_p: lambda y, g: g * ((1 + y) * (1 - y)),
    jax.lax.logistic_p: lambda y, g: g * (y * (1 - y)),
}


def _by_value(function: Any, gradient: Any) -> Any:
    """The same function, of which loops store ``y`` alone and not ``1 - y`` beside it."""
    value = jax.custom_vjp(function)
    value.defvjp(lambda x: (function(x),) * 2, lambda y, g: (gradient(y, g),))
    return value


def _enter(plan: Plan, eqn: Any, args: list[Any], tokens: Tokens) -> tuple[list[Any], Records]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _scan(plan, params, args, tokens)
    body = inner_jaxpr(eqn)
    closed = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    consts = getattr(closed, "consts", ())
    if name not in REMAT:
        return evaluate(plan, body, consts, args, tokens)

    def run(args: list[Any], tokens: Tokens) -> tuple[list[Any], Records]:
        return evaluate(plan, body, consts, args, tokens)

    again = jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])
    return again(args, tokens)


def _scan(
    plan: Plan, params: dict[str, Any], args: list[Any], tokens: Tokens
) -> tuple[list[Any], Records]:
    held, carried = scan_counts(params)
    consts, start, sliced = args[:held], args[held : held + carried], args[held + carried :]
    closed = params["jaxpr"]

    def body(carry: list[Any], x: tuple[list[Any], Tokens]) -> Any:
        slices, taps = x
        inputs = [*consts, *carry, *slices]
        outs, records = evaluate(plan, closed.jaxpr, closed.consts, inputs, taps)
        return outs[:carried], (outs[carried:], records)

    end, (stacked, records) = jax.lax.scan(
        body,
        start,
        (sliced, tokens),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*end, *stacked], records
