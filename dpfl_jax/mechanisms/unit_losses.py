"""The loss of a unit of several examples from the loss of one; and a unit in pieces.

A unit is a user, a subject, or all records of a silo's step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
LossFn = Callable[..., jax.Array]


def mean_of_examples(loss_fn: LossFn, axis: str | None = None) -> LossFn:
    """Lifts a loss of one example to the loss of one unit: the mean over its examples.

    The unit is ``{"examples": pytree [group_size, ...], "mask": bool [group_size]}``. The divisor
    is the unit's own count, as in Algorithm 2 of Charles et al. 2024; no unit without examples.
    A unit with a further entry ``"count"`` is a piece of one (see ``pieces_of_unit``): its loss is
    the sum over the piece, divided by the count of the whole.

    Args:
      loss_fn: of one example.
      axis: mesh axis over which the examples are split, where they are.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.mechanisms import mean_of_examples
      >>> loss = mean_of_examples(lambda w, example: w * example["x"])
      >>> examples = {"x": jnp.array([1.0, 3.0, 9.0])}
      >>> user = {"examples": examples, "mask": jnp.array([True, True, False])}
      >>> float(loss(1.0, user))
      2.0
    """

    def unit_loss(params: PyTree, unit: PyTree, **kwargs: Any) -> jax.Array:
        every = jax.vmap(lambda example: loss_fn(params, example, **kwargs), spmd_axis_name=axis)
        mask = unit["mask"]
        if "count" in unit:
            losses, count = every(unit["examples"]), unit["count"]
        else:
            losses, count = every(_without_absent(unit)), jnp.sum(mask)
        # proof: uls-sensitivity-2
        return jnp.sum(jnp.where(mask, losses, 0.0)) / jnp.maximum(count, 1).astype(losses.dtype)

    return unit_loss


def _without_absent(unit: PyTree) -> PyTree:
    """A unit's examples, with one that is there in the place of each that is not.

    Where a loss is not differentiable at what fills the gaps (a norm at zeros), even a loss that
    counts nothing would have a gradient of NaN.
    """
    mask = unit["mask"]
    some = jnp.argmax(mask)

    def one(x: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, x[some])

    return jax.tree.map(one, unit["examples"])


def pieces_of_unit(
    unit: PyTree, microbatch_size: int, sharding: jax.sharding.NamedSharding | None = None
) -> PyTree:
    """Cuts a unit into pieces whose losses (``mean_of_examples``) add up to the unit's.

    Args:
      unit: ``{"examples": pytree [group_size, ...], "mask": bool [group_size]}``.
      microbatch_size: examples of a piece, >= 1; the last piece is filled up with absent ones.
      sharding: how the examples of a piece are split over devices; None: not.

    Returns:
      Units of ``microbatch_size`` examples with a ``"count"``, stacked: a pytree of arrays
      [pieces, ...].
    """
    size = unit["mask"].shape[0]
    pieces = -(-size // microbatch_size)
    missing = pieces * microbatch_size - size

    def cut(x: jax.Array) -> jax.Array:
        x = x.reshape(pieces, microbatch_size, *x.shape[1:])
        if sharding is None:
            return x
        spec = jax.sharding.PartitionSpec(None, *sharding.spec)
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(sharding.mesh, spec))

    def filled(x: jax.Array) -> jax.Array:
        return jnp.take(x, jnp.arange(size + missing) % size, axis=0) if missing else x

    return {
        "examples": jax.tree.map(lambda x: cut(filled(x)), _without_absent(unit)),
        "mask": cut(jnp.pad(unit["mask"], (0, missing))),
        "count": jnp.broadcast_to(jnp.sum(unit["mask"]), (pieces,)),
    }
