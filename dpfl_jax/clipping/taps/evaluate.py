"""The interpreter that runs the jaxpr of a one-unit loss with a tap at every site.

It works on one unit. ``jax.vmap`` maps it over units, but not over parameters, so that JAX's own
rules batch every equation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from dpfl_jax.clipping.result import pinned
from dpfl_jax.clipping.taps.trace import REMAT, Site, TapPlan, inner_jaxpr, scan_counts
from dpfl_jax.varying import axes_of, vary

Tokens = dict[int, jax.Array]
# Number of enclosing scans -> records by key; the unit axis comes after the axes of the scans.
Recorded = dict[int, dict[Hashable, jax.Array]]


@jax.custom_jvp
def tap(y: jax.Array, token: jax.Array) -> jax.Array:
    """Returns ``y``; its gradient also reaches ``token``, whose value is never read.

    Adding an array of zeros has this effect, too, but loops would store and read the array.
    """
    return _batched_like(y, token)


@tap.defjvp
def _tap_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _batched_like(*primals), tangents[0] + tangents[1]


def _batched_like(y: jax.Array, token: jax.Array) -> jax.Array:
    """``y`` with the batch axes of ``token``.

    Values that depend on parameters alone have no unit axis, but their gradients need one: if the
    output of a ``custom_jvp`` has no unit axis, JAX sums the tangents of all units in scans and
    checkpoints. The select never takes ``token``, and compilers remove it.
    """
    return jax.lax.select(jax.numpy.zeros((), bool), token, y)


@jax.custom_vjp
def _pinned_backwards(y: jax.Array) -> jax.Array:
    """Returns ``y`` (bfloat16); the backward pass applies ``pinned`` to its cotangent.

    Applied after a loop, ``pinned`` would read and write what all iterations have stored.
    """
    return y


_pinned_backwards.defvjp(lambda y: (y, None), lambda _, g: (pinned(g),))


def evaluate(
    plan: TapPlan, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], tokens: Tokens
) -> tuple[list[Any], Recorded]:
    """Evaluates a jaxpr with taps.

    Args:
      plan: where the taps are.
      jaxpr: an open jaxpr.
      consts: values of its constants.
      inputs: values of its inputs.
      tokens: for each site of the plan, an array [lengths of scans from here on..., *output], or
        *view for one that is ``early``.

    Returns:
      The outputs; and the records, each with one leading axis per scan entered from here.
    """
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, inputs))
    records: Recorded = {}

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    for position, eqn in enumerate(jaxpr.eqns):
        args = [read(v) for v in eqn.invars]
        inner, site = plan.inner.get(position), plan.sites.get(position)
        with eqn.ctx.manager:
            if inner is not None:
                taps = {s.index: tokens[s.index] for s in inner.all_sites()}
                outs, below = _enter(inner, eqn, args, taps)
                for depth, values_there in below.items():
                    records.setdefault(depth, {}).update(values_there)
            else:
                # JAX up to 0.10.1 returns the functions to call separately from the parameters.
                params = eqn.primitive.get_bind_params(eqn.params)
                functions, params = params if isinstance(params, tuple) else ((), params)
                run: Callable[..., Any]
                run = functools.partial(eqn.primitive.bind, *functions, **params)
                default = params.get("accuracy") is None  # other accuracies have another gradient
                if plan.depth and eqn.primitive in _BY_VALUE and default:
                    run = _by_value(run, _BY_VALUE[eqn.primitive])
                if site is not None and site.early:
                    run = _forming(run, site, tokens[site.index])
                outs = run(*args)
                outs = list(outs) if eqn.primitive.multiple_results else [outs]
        if site is not None and site.tapped and not site.early:
            out = tap(outs[0], tokens[site.index])
            pins = plan.pinned and out.dtype == jax.numpy.bfloat16
            outs = [_pinned_backwards(out) if pins else out]
        values.update(zip(eqn.outvars, outs))
    if plan.records:
        here = {key: jax.numpy.asarray(read(v)) for key, v in plan.records.items()}
        if plan.pinned:
            here = {k: pinned(x) if x.dtype == jax.numpy.bfloat16 else x for k, x in here.items()}
        records.setdefault(plan.depth, {}).update(here)
    return [read(v) for v in jaxpr.outvars], records


def _forming(run: Callable[..., jax.Array], site: Site, token: jax.Array) -> Callable[..., Any]:
    """Returns the product ``run`` with a gradient rule of its own.

    The cotangent of ``token`` is the gradient with respect to the site's parameter, of one unit;
    the cotangent of the parameter itself is zero.
    """

    def value(args: tuple[jax.Array, ...], token: jax.Array) -> jax.Array:
        y = run(*args)
        return _batched_like(y, jax.numpy.broadcast_to(token.ravel()[0], y.shape))

    def forward(args: tuple[jax.Array, ...], token: jax.Array) -> Any:
        return value(args, token), args

    def backward(args: tuple[jax.Array, ...], g: jax.Array) -> Any:
        def of(k: int) -> jax.Array:
            def linear(x: jax.Array) -> jax.Array:
                return run(*args[:k], x, *args[k + 1 :])

            return jax.linear_transpose(linear, args[k])(g)[0]

        none = jax.numpy.zeros_like(args[site.position])
        gradients = tuple(none if k == site.position else of(k) for k in range(len(args)))
        return gradients, pinned(of(site.position))

    product = jax.custom_vjp(value)
    product.defvjp(forward, backward)
    # Arguments are cast to varying outside the rule, where JAX drops the psum of unused gradients.
    return lambda *args: product(vary(args, axes_of(site.out)), token)


# Gradients as functions of the output ``y``, in JAX's order of operations (before 0.11, JAX's order
# for tanh lost digits where y is near -1).
_BY_VALUE = {
    jax.lax.tanh_p: lambda y, g: g * ((1 + y) * (1 - y)),
    jax.lax.logistic_p: lambda y, g: g * (y * (1 - y)),
}


def _by_value(function: Any, gradient: Any) -> Any:
    """The function with a gradient for which loops store only ``y``, and not ``1 - y`` as well."""
    value = jax.custom_vjp(function)
    value.defvjp(lambda x: (function(x),) * 2, lambda y, g: (gradient(y, g),))
    return value


def _enter(plan: TapPlan, eqn: Any, args: list[Any], tokens: Tokens) -> tuple[list[Any], Recorded]:
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _scan(plan, params, args, tokens)
    body = inner_jaxpr(eqn)
    closed = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    consts = getattr(closed, "consts", ())
    if name not in REMAT:
        return evaluate(plan, body, consts, args, tokens)

    def run(args: list[Any], tokens: Tokens) -> tuple[list[Any], Recorded]:
        return evaluate(plan, body, consts, args, tokens)

    run = jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])
    return run(args, tokens)


def _scan(
    plan: TapPlan, params: dict[str, Any], args: list[Any], tokens: Tokens
) -> tuple[list[Any], Recorded]:
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
