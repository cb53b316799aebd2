"""The plain gradient of a sum of losses, in the shape of a clipped sum: for baselines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax.clipping import ClippedGradResult, Trainable, join, split

PyTree = Any
LossFn = Callable[..., jax.Array]


def unclipped_sum(loss_fn: LossFn, trainable: Trainable = None) -> Callable[..., ClippedGradResult]:
    """Returns ``(params, batch, mask, weight=1) -> ClippedGradResult`` of gradients as they are.

    Args:
      loss_fn: of one example.
      trainable: which parameters are trained.
    """

    def total(
        trained: PyTree, frozen: PyTree, batch: PyTree, mask: jax.Array, weight: Any
    ) -> tuple[jax.Array, jax.Array]:
        params = join(trained, frozen)
        losses = jax.vmap(lambda example: loss_fn(params, example))(batch)
        losses = jnp.where(mask, losses, 0.0)
        return (weight * losses).sum(), losses

    def summed(
        params: PyTree, batch: PyTree, mask: jax.Array, weight: Any = 1.0
    ) -> ClippedGradResult:
        trained, frozen = split(params, trainable)
        gradient = jax.value_and_grad(total, has_aux=True)
        (_, losses), grad = gradient(trained, frozen, batch, mask, weight)
        grad = jax.tree.map(lambda g: g.astype(jnp.float32), grad)
        weights = mask.astype(jnp.float32)
        return ClippedGradResult(
            sum=grad,
            norms=jnp.zeros_like(weights),
            weights=weights,
            losses=losses,
            nonfinite=jnp.logical_and(mask, ~jnp.isfinite(losses)),
            aux=None,
        )

    return summed
