"""Parameters that are trained and parameters that are frozen, as two trees with holes.

Both have the structure of the whole tree, with None where the other has a leaf: None is an empty
pytree, so gradients, optimiser states, noise and checkpoints of the trained part hold nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from dpfl_jax.clipping.problem import trainable_mask

PyTree = Any
Trainable = PyTree | Callable[[str], bool] | None


def split(params: PyTree, trainable: Trainable = None) -> tuple[PyTree, PyTree]:
    """Returns the trained and the frozen part of ``params``.

    Args:
      params: any pytree of arrays (or of anything with a dtype).
      trainable: as in ``clipped_grad``: a function of a parameter's name, or a tree of bools that
        is a prefix of the parameters; None: all that are floating point.

    Raises:
      BadInputError: nothing is left to train, or the tree does not fit the parameters.
    """
    tree: Any
    leaves, tree = jax.tree.flatten(params)
    mask = trainable_mask(params, trainable)
    trained = [x if keep else None for x, keep in zip(leaves, mask, strict=True)]
    frozen = [None if keep else x for x, keep in zip(leaves, mask, strict=True)]
    return tree.unflatten(trained), tree.unflatten(frozen)


def join(trained: PyTree, frozen: PyTree) -> PyTree:
    """The whole tree again; ``frozen`` may be None for nothing."""
    if frozen is None:
        return trained
    return jax.tree.map(
        lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda x: x is None
    )
