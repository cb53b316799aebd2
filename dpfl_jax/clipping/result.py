"""What a bounded gradient returns, and how arrays are made to vary over devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClippedGradResult:
    """The sum of bounded unit gradients, and what was seen on the way.

    Everything but ``sum`` is of single units and has had no noise added: it is as private as the
    data. ``sum`` becomes private only with noise scaled to the rule's sensitivity.

    Attributes:
      sum: like the parameters, float32; None where a parameter is not trainable.
      norms: float32 [n], the gradient's norm before bounding; 0 for padding and non-finite units.
      weights: float32 [n], what each gradient was multiplied by; [n, groups] for rules that bound
        groups of parameters apart; 0 for padding and non-finite units.
      losses: float32 [n]; 0 for padding.
      nonfinite: bool [n]; the unit's gradient held a NaN or an infinity (or its squared norm
        overflows float32): it was replaced by zero; where parameters are clipped apart (PerLayer),
        what is not finite was.
      aux: what the loss returned beside its value, stacked [n, ...]; None without ``has_aux``.
      leaf_norms: like the parameters, float32 [n]: the norms of each parameter's gradients alone;
        None where a parameter is not trainable.
    """

    sum: PyTree
    norms: jax.Array
    weights: jax.Array
    losses: jax.Array
    nonfinite: jax.Array
    aux: PyTree = None
    leaf_norms: PyTree = None


def leaf_name(path: tuple[Any, ...]) -> str:
    """``layers/mlp/kernel`` from a JAX key path."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "params"


def axes_of(aval: Any) -> frozenset[str]:
    """Mesh axes over which a value of this abstract type varies."""
    # Named `vma` up to JAX 0.10.1, `manual_axis_type.varying` since. No default: were both missing,
    # an empty answer would silently multiply the sensitivity by the number of devices.
    if hasattr(aval, "manual_axis_type"):
        return frozenset(aval.manual_axis_type.varying)
    return frozenset(aval.vma)


def varying_axes(*trees: PyTree) -> frozenset[str]:
    """Mesh axes over which any array in the trees varies inside ``jax.shard_map``."""
    axes: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(trees):
        axes |= axes_of(jax.typeof(leaf))
    return axes


def vary(tree: PyTree, axes: frozenset[str]) -> PyTree:
    """Makes every array of ``tree`` vary over ``axes``; outside ``shard_map`` does nothing.

    Inside ``jax.shard_map``, differentiating with respect to a value that does not vary over a
    mesh axis sums its gradient over that axis, that is *before* clipping: the sensitivity is then
    the number of devices. Whatever is differentiated here goes through this function first.
    """

    def one(x: Any) -> Any:
        missing = tuple(sorted(axes - axes_of(jax.typeof(x))))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, tree)


def pinned(x: jax.Array) -> jax.Array:
    """``x`` so that all who read it read the same numbers, if it has fewer bits than float32.

    XLA may leave out a rounding to bfloat16 or float16 for one reader and not for another: the norm
    would not be that of what is summed. ``reduce_precision`` it never leaves out. What is not
    bfloat16 becomes float32, for it has too few exponents to be rounded to once more unchanged.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize >= 4:
        return x
    rounded = jax.lax.reduce_precision(x.astype(jnp.float32), 8, jnp.finfo(x.dtype).nmant)
    return rounded.astype(x.dtype) if x.dtype == jnp.bfloat16 else rounded


def real_units(mask: jax.Array) -> jax.Array:
    """Bool [n]: the units that a mask (bool, int or float [n]) counts: not those of zero or NaN."""
    mask = jnp.asarray(mask)
    return (mask != 0) & (mask == mask)


def unit_where(keep: jax.Array, x: jax.Array, axis: int = 0) -> jax.Array:
    """Returns ``x`` with the units outside ``keep`` set to exactly zero, NaNs included.

    Args:
      keep: bool [n].
      x: array whose axis ``axis`` is the unit axis.
      axis: position of the unit axis.
    """
    shape = [1] * x.ndim
    shape[axis] = keep.shape[0]
    return jnp.where(keep.reshape(shape), x, jnp.zeros((), x.dtype))
