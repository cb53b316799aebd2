"""Checks of a clipped gradient before the first step of a run.

``self_check`` compares a strategy's norms and sum with plain per-unit gradients. ``probe`` asks the
compiler how much memory a strategy needs, which ``auto`` only estimates from shapes: book-keeping
holds the activations and output gradients of all units of a microbatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dpfl_jax.clipping import cost
from dpfl_jax.clipping.cost import machine_for
from dpfl_jax.clipping.gradients import ClippedGrad
from dpfl_jax.clipping.per_unit import solve_vmap
from dpfl_jax.errors import BadInputError

PyTree = Any
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}


class SelfCheckError(RuntimeError):
    """A strategy's norms disagree with plain per-unit gradients: the guarantee would not hold.

    Examples:
      >>> from dpfl_jax.clipping import SelfCheckError
      >>> try:
      ...     raise SelfCheckError("w: norms differ")
      ... except RuntimeError as error:
      ...     print(error)
      w: norms differ
    """


@dataclasses.dataclass(frozen=True)
class SelfCheck:
    """The result of ``self_check``.

    Attributes:
      max_relative_error: largest error over units and parameters, relative to the unit's norm.
      tolerance: largest error allowed.
      units: number of units compared.

    Examples:
      >>> from dpfl_jax.clipping import SelfCheck
      >>> SelfCheck(max_relative_error=2e-7, tolerance=1e-3, units=2).units
      2
    """

    max_relative_error: float
    tolerance: float
    units: int


def self_check(
    gradient: ClippedGrad,
    *args: PyTree,
    mask: jax.Array | None = None,
    rng: jax.Array | None = None,
    weight: jax.Array | None = None,
    max_units: int = 2,
    tolerance: float | None = None,
) -> SelfCheck:
    """Compares each parameter's norms and weighted sum with those of plain per-unit gradients.

    Args:
      gradient: the clipped gradient that the run will use.
      *args: as in a call: parameters (those that are all zero are perturbed for the check), and
        batches [n, ...], of which the first ``max_units`` that are not padding are used.
      mask: [n], as in a call.
      rng: as in a call.
      weight: as in a call.
      max_units: number of units to compare; each takes the memory of its gradient.
      tolerance: largest relative error; default: 1e-3, or 5e-2 where the loss computes in less
        than float32, as products of default precision do on a TPU or GPU.

    Raises:
      SelfCheckError: they disagree; the message names the parameter, and what to do.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.clipping import clipped_grad, self_check
      >>> grad = clipped_grad(lambda w, x: jnp.tanh(x @ w) ** 2, clip_norm=1.0)
      >>> found = self_check(grad, jnp.ones(2), jnp.ones((4, 2)))
      >>> found.units, found.max_relative_error < found.tolerance
      (2, True)
    """
    params, batch, rebuild_arguments = gradient.arguments(args)
    count = np.shape(jax.tree.leaves(batch)[0])[0]
    real = np.flatnonzero(np.ones(count) if mask is None else np.asarray(mask))
    chosen = real[:max_units]
    if not len(chosen):
        return SelfCheck(0.0, tolerance or TOLERANCE["float32"], 0)
    # A NaN in the data would hide errors of the program.
    batch = jax.tree.map(lambda x: _finite(jnp.asarray(x)[chosen]), batch)
    weight = None if weight is None else jnp.asarray(weight)[chosen]
    if tolerance is None:
        low = is_low(gradient, *rebuild_arguments(params, batch), rng=rng, weight=weight)
        tolerance = TOLERANCE["bfloat16" if low else "float32"]

    places = None
    if remote := [x for x in jax.tree.leaves(params) if _is_remote(x)]:
        # With several processes, what the host compares must be replicated in each of them.
        everywhere = NamedSharding(remote[0].sharding.mesh, PartitionSpec())
        places = (everywhere, None, everywhere)
        batch = jax.tree.map(np.asarray, batch)
    params = away_from_zero(params)
    problem, _ = gradient.problem(rebuild_arguments(params, batch), rng=rng, weight=weight)
    names = problem.names

    def run(vmap: bool) -> Any:
        def go(params: PyTree, batch: PyTree) -> Any:
            inner, _ = gradient.problem(rebuild_arguments(params, batch), rng=rng, weight=weight)
            seen: list[Any] = []

            def weights_fn(squared: Any) -> Any:
                seen.append(jnp.stack(list(squared)))
                return inner.unit_weights(squared)  # equal weights for both strategies

            watched = dataclasses.replace(inner, weights_fn=weights_fn)
            solution = solve_vmap(watched) if vmap else gradient.solve(watched, microbatches=False)
            return seen[-1], solution.sums, solution.weights  # `auto` traces it first

        return jax.jit(go, out_shardings=places, compiler_options=unoptimised())(params, batch)

    got, got_sums, _ = run(vmap=False)
    want, want_sums, weights = run(vmap=True)
    got, want = np.asarray(got), np.asarray(want)
    # A NaN anywhere excludes the whole unit, unless leaves are clipped separately.
    apart = problem.rule.is_per_leaf
    finite = [np.isfinite(x if apart else np.broadcast_to(x.sum(0), x.shape)) for x in (want, got)]
    compared = finite[0] & finite[1]
    squares = [np.where(compared, np.asarray(x, np.float64), 0.0) for x in (want, got)]
    whole = np.sqrt(np.maximum(squares[0].sum(0), 1e-60))
    error = np.abs(np.sqrt(np.maximum(squares[1], 0.0)) - np.sqrt(squares[0])) / whole
    error = np.where(finite[0] != finite[1], np.inf, error)
    # Errors are relative to the most that the units can add, because their sum may cancel.
    added = np.sqrt(squares[0]) * np.reshape(np.asarray(weights, np.float64).T, (-1, len(chosen)))
    size = float(np.linalg.norm(added.sum(axis=1))) or 1.0
    off = [float(jnp.linalg.norm((g - w).ravel())) / size for g, w in zip(got_sums, want_sums)]
    errors = np.maximum(error.max(axis=1), off)
    worst = int(np.argmax(errors))
    if not errors[worst] <= tolerance:
        raise SelfCheckError(
            f"clipped_grad: the norms of strategy {gradient.strategy!r} disagree with per-unit "
            f"gradients at parameter {names[worst]!r} (relative error {errors[worst]:.1e}, "
            f"allowed {tolerance:.0e}), so no step was taken: use strategy='scan' and report this"
        )
    return SelfCheck(float(errors[worst]), tolerance, len(chosen))


def unoptimised() -> dict[str, Any] | None:
    """Returns compiler options for programs that run only a few times: a CPU compiles faster."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


def away_from_zero(params: PyTree) -> PyTree:
    """Returns ``params`` with random numbers in place of parameters that are all zero.

    An adapter starts with one factor at zero, which makes the gradient of the other factor zero, so
    that a check would find no error. Arrays stay on their devices.
    """

    def one(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating) or bool(_any(x)):
            return x

        def draw() -> jax.Array:
            return (0.02 * jax.random.normal(jax.random.key(0), x.shape)).astype(x.dtype)

        return jax.jit(draw, out_shardings=x.sharding)()

    return jax.tree.map(one, params)


@jax.jit
def _any(x: jax.Array) -> jax.Array:
    return jnp.any(x != 0)


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _is_remote(x: Any) -> bool:
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def is_low(gradient: ClippedGrad, *args: PyTree, rng: Any = None, weight: Any = None) -> bool:
    """Returns whether anything in the loss is computed in less than float32."""
    if machine_for(gradient.platform).rounding > 0:
        return True

    def losses(*args: PyTree) -> jax.Array:
        return gradient(*args, rng=rng, weight=weight).losses

    return has_low(losses, *args)


def has_low(function: Callable[..., Any], *args: Any) -> bool:
    """Returns whether a function of arrays computes anything in less than float32."""
    text = jax.make_jaxpr(function)(*args).pretty_print(use_color=False)
    return any(f"{kind}[" in text for kind in ("bf16", "f16"))


@dataclasses.dataclass(frozen=True)
class Probed:
    """The result of ``probe``.

    Attributes:
      gradient: the clipped gradient with strategy and microbatch size fixed.
      temp_bytes: bytes of temporary memory that the compiler allocates for it on one device.
      tried: (strategy, microbatch size or None, temporary bytes) for each compiled candidate.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.clipping import clipped_grad, probe
      >>> grad = clipped_grad(lambda w, x: jnp.tanh(x @ w) ** 2, clip_norm=1.0)
      >>> probe(grad, jnp.ones(2), jnp.ones((4, 2))).temp_bytes < 1e6
      True
    """

    gradient: ClippedGrad
    temp_bytes: int
    tried: tuple[tuple[str, int | None, int], ...]

    def __str__(self) -> str:
        return "\n".join(
            f"{strategy}{'' if size is None else f', {size} units at a time'}: "
            f"{taken / 2**20:.1f} MiB"
            for strategy, size, taken in self.tried
        )


def probe(
    gradient: ClippedGrad,
    *args: PyTree,
    mask: jax.Array | None = None,
    rng: jax.Array | None = None,
    weight: jax.Array | None = None,
    memory_limit: float | None = None,
) -> Probed:
    """Fixes the strategy of ``gradient`` by compiling it for arrays of these shapes.

    It compiles the choice of ``auto`` first. If that does not fit into memory, it compiles ever
    smaller microbatches, and finally a scan over single units.

    Args:
      gradient: a clipped gradient, usually with strategy ``"auto"``.
      *args: arrays or ``jax.ShapeDtypeStruct``s, as in a call.
      mask: as in a call.
      rng: as in a call.
      weight: as in a call.
      memory_limit: bytes of temporary memory; default: the limit of ``gradient``, else half of the
        device's memory. If neither is known, the first choice is taken.

    Returns:
      A ``Probed``, whose ``gradient`` is the one to use.

    Raises:
      BadInputError: even one unit at a time does not fit.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.clipping import clipped_grad, probe
      >>> grad = clipped_grad(lambda w, x: jnp.tanh(x @ w) ** 2, clip_norm=1.0)
      >>> found = probe(grad, jnp.ones(2), jnp.ones((4, 2)))
      >>> found.gradient.strategy in ("ghost", "vmap")
      True
    """
    limit = gradient.memory_limit if memory_limit is None else memory_limit
    if limit is None:
        limit = cost.memory_limit()
    units = jax.tree.leaves(gradient.arguments(args)[1])[0].shape[0]
    chosen = gradient.explain(*args, mask=mask, rng=rng, weight=weight)
    candidates: list[tuple[str, int | None]] = [(chosen.strategy, chosen.microbatch_size)]
    if chosen.strategy == "ghost":
        size = chosen.microbatch_size or units
        while size > 1:
            size = -(-size // 2)
            candidates.append(("ghost", size))
    if ("scan", 1) not in candidates:
        candidates.append(("scan", 1))
    tried: list[tuple[str, int | None, int]] = []
    for strategy, size in candidates:
        fixed = dataclasses.replace(gradient, strategy=strategy, microbatch_size=size)  # type: ignore[arg-type]
        taken = _temp_bytes(fixed, args, mask, rng, weight)
        tried.append((strategy, size, taken))
        if limit is None or taken <= limit:
            return Probed(fixed, taken, tuple(tried))
    least = min(taken for _, _, taken in tried)
    raise BadInputError(
        f"clipped_grad: the gradient of one unit takes {least / 2**20:.0f} MiB of temporary "
        f"memory, but only {(limit or 0) / 2**20:.0f} MiB are allowed: shorten the examples, lower "
        "the group size, turn remat on, or split the parameters over more devices"
    )


def _temp_bytes(
    gradient: ClippedGrad,
    args: tuple[PyTree, ...],
    mask: jax.Array | None,
    rng: jax.Array | None,
    weight: jax.Array | None,
) -> int:
    def call(args: tuple[PyTree, ...], mask: Any, rng: Any, weight: Any) -> Any:
        return gradient(*args, mask=mask, rng=rng, weight=weight)

    compiled = jax.jit(call).lower(args, mask, rng, weight).compile()
    memory = compiled.memory_analysis()
    return 0 if memory is None else int(memory.temp_size_in_bytes)
