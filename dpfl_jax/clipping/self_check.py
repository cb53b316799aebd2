"""Compares a strategy's norms with plain per-unit gradients before a run trusts it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dpfl_jax.clipping.cost import machine_for
from dpfl_jax.clipping.gradients import ClippedGrad
from dpfl_jax.clipping.per_unit import solve_vmap

PyTree = Any
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}


class SelfCheckError(RuntimeError):
    """A strategy's norms disagree with plain per-unit gradients: the guarantee would not hold."""


@dataclasses.dataclass(frozen=True)
class SelfCheck:
    """What ``self_check`` measured.

    Attributes:
      max_relative_error: largest over units and parameters, relative to the unit's whole norm.
      tolerance: what it was held against.
      units: how many units were compared.
    """

    max_relative_error: float
    tolerance: float
    units: int


def self_check(
    bounded: ClippedGrad,
    *args: PyTree,
    mask: jax.Array | None = None,
    rng: jax.Array | None = None,
    weight: jax.Array | None = None,
    max_units: int = 2,
    tolerance: float | None = None,
) -> SelfCheck:
    """Compares, for each parameter, norms and the weighted sum with ``vmap``.

    Args:
      bounded: what the run will use.
      *args: as in a call: parameters (those that are all zero are moved a little for the check),
        and batches of real units [n, ...], of which the first ``max_units`` that are not padding
        are used.
      mask: [n], as in a call.
      rng: as in a call.
      weight: as in a call.
      max_units: more costs memory (per-unit gradients) and finds little more.
      tolerance: largest relative error; default 1e-3, or 5e-2 where the loss computes in less
        than float32, as products of default precision do on a TPU or GPU.

    Raises:
      SelfCheckError: names the parameter, and what to do.
    """
    params, batch, together = bounded.arguments(args)
    real = np.flatnonzero(np.ones(_length(batch)) if mask is None else np.asarray(mask))
    chosen = real[:max_units]
    if not len(chosen):
        return SelfCheck(0.0, tolerance or TOLERANCE["float32"], 0)
    # NaN in the data shows nothing of a program, and hides what it does with numbers.
    batch = jax.tree.map(lambda x: _finite(jnp.asarray(x)[chosen]), batch)
    weight = None if weight is None else jnp.asarray(weight)[chosen]
    if tolerance is None:
        low = is_low(bounded, *together(params, batch), rng=rng, weight=weight)
        tolerance = TOLERANCE["bfloat16" if low else "float32"]

    places = None
    if remote := [x for x in jax.tree.leaves(params) if _is_remote(x)]:
        # Over several processes, what the host looks at must be whole in each of them.
        places = (NamedSharding(remote[0].sharding.mesh, PartitionSpec()), None)
        batch = jax.tree.map(np.asarray, batch)
    params = away_from_zero(params)
    problem, _ = bounded.problem(together(params, batch), rng=rng, weight=weight)
    names = problem.names

    def run(vmap: bool) -> Any:
        def go(params: PyTree, batch: PyTree) -> Any:
            inner, _ = bounded.problem(together(params, batch), rng=rng, weight=weight)
            seen: list[Any] = []

            def judge(squared: Any) -> Any:
                seen.append(jnp.stack(list(squared)))
                return inner.judge(squared)  # the same weights for both

            watched = dataclasses.replace(inner, judged_by=judge)
            solution = solve_vmap(watched) if vmap else bounded.solve(watched, microbatches=False)
            return seen[-1], solution.sums, solution.weights  # `auto` looks first, then runs

        return jax.jit(go, out_shardings=places, compiler_options=unoptimised())(params, batch)

    got, got_sums, _ = run(vmap=False)
    want, want_sums, weights = run(vmap=True)
    got, want = np.asarray(got), np.asarray(want)
    # A NaN anywhere leaves a unit out, whatever its other norms are (where none is clipped apart).
    told = [x if problem.rule.apart else np.broadcast_to(x.sum(0), x.shape) for x in (want, got)]
    finite = [np.isfinite(x) for x in told]
    compared = finite[0] & finite[1]
    squares = [np.where(compared, np.asarray(x, np.float64), 0.0) for x in (want, got)]
    whole = np.sqrt(np.maximum(squares[0].sum(0), 1e-60))
    error = np.abs(np.sqrt(np.maximum(squares[1], 0.0)) - np.sqrt(squares[0])) / whole
    error = np.where(finite[0] != finite[1], np.inf, error)
    # Over what the units add at most: their sum itself may be nothing, where two cancel.
    added = np.sqrt(squares[0]) * np.reshape(np.asarray(weights, np.float64).T, (-1, len(chosen)))
    size = float(np.linalg.norm(added.sum(axis=1))) or 1.0
    off = [float(jnp.linalg.norm((g - w).ravel())) / size for g, w in zip(got_sums, want_sums)]
    per_leaf = np.maximum(error.max(axis=1), off)
    worst = int(np.argmax(per_leaf))
    if not per_leaf[worst] <= tolerance:
        raise SelfCheckError(
            f"clipped_grad: the norms of strategy {bounded.strategy!r} disagree with per-unit "
            f"gradients at parameter {names[worst]!r} (relative error {per_leaf[worst]:.1e}, "
            f"allowed {tolerance:.0e}), so no step was taken: use strategy='scan' and report this"
        )
    return SelfCheck(float(per_leaf[worst]), tolerance, len(chosen))


def unoptimised() -> dict[str, Any] | None:
    """Compiler options of a program that is run a few times: on a CPU it is soon computed."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


def away_from_zero(params: PyTree) -> PyTree:
    """``params``, with those that are all zero moved: for a check, which sees more there.

    An adapter starts with one factor at zero, which makes the gradient of the other zero: whatever
    was computed of it would be right. What is moved stays on its devices.
    """

    def one(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating) or bool(jnp.any(x != 0)):
            return x

        def draw() -> jax.Array:
            return (0.02 * jax.random.normal(jax.random.key(0), x.shape)).astype(x.dtype)

        return jax.jit(draw, out_shardings=x.sharding)()

    return jax.tree.map(one, params)


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _is_remote(x: Any) -> bool:
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def _length(batch: PyTree) -> int:
    return int(np.shape(jax.tree.leaves(batch)[0])[0])


def is_low(bounded: ClippedGrad, *args: PyTree, rng: Any = None, weight: Any = None) -> bool:
    """Whether anything in the loss is computed in less than float32."""
    if machine_for(bounded.platform).rounding > 0:
        return True

    def losses(*args: PyTree) -> jax.Array:
        return bounded(*args, rng=rng, weight=weight).losses

    return has_low(losses, *args)


def has_low(function: Callable[..., Any], *args: Any) -> bool:
    """Whether a function of arrays computes anything in less than float32."""
    text = jax.make_jaxpr(function)(*args).pretty_print(use_color=False)
    return any(f"{kind}[" in text for kind in ("bf16", "f16"))
