"""Over which axes of a mesh values vary inside ``jax.shard_map``."""

from __future__ import annotations

from typing import Any

import jax

PyTree = Any


def axes_of(aval: Any) -> frozenset[str]:
    """Returns the mesh axes over which a value of this abstract type varies."""
    # JAX up to 0.10.1 calls them `vma`, later versions `manual_axis_type.varying`. There is no
    # default, because an empty answer would silently multiply the sensitivity by the device count.
    if hasattr(aval, "manual_axis_type"):
        return frozenset(aval.manual_axis_type.varying)
    return frozenset(aval.vma)


def varying_axes(*trees: PyTree) -> frozenset[str]:
    """Returns the mesh axes over which any array of the trees varies inside ``jax.shard_map``."""
    axes: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(trees):
        axes |= axes_of(jax.typeof(leaf))
    return axes


def vary(tree: PyTree, axes: frozenset[str]) -> PyTree:
    """Makes every array of ``tree`` vary over ``axes``; outside ``shard_map`` it does nothing.

    Inside ``jax.shard_map``, differentiating with respect to a value that does not vary over a
    mesh axis sums its gradient over that axis *before* clipping, which multiplies the sensitivity
    by the number of devices. So everything that is differentiated goes through this function first.
    """

    def one(x: Any) -> Any:
        missing = tuple(sorted(axes - axes_of(jax.typeof(x))))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, tree)
