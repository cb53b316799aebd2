"""Trained and frozen parameters as two trees.

Both have the structure of the whole tree, with None where the other tree has a leaf. As None is an
empty pytree, gradients, optimiser states, noise and checkpoints hold trained parameters only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.clipping.result import leaf_name
from dpfl_jax.errors import BadInputError

PyTree = Any
Trainable = PyTree | Callable[[str], bool] | None


def trainable_mask(params: PyTree, trainable: Trainable) -> list[bool]:
    """Returns a bool per leaf of ``params``: whether it is floating point and ``trainable``.

    Raises:
      BadInputError: no parameter is left to train, or the tree does not fit the parameters.
    """
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    if trainable is None:
        chosen = [True] * len(flat)
    elif callable(trainable):
        chosen = [bool(trainable(leaf_name(path))) for path, _ in flat]
    else:
        try:
            if not all(isinstance(flag, bool | np.bool_) for flag in jax.tree.leaves(trainable)):
                raise ValueError("its leaves are not bools")
            chosen = jax.tree.leaves(
                jax.tree.map(
                    lambda flag, sub: jax.tree.map(lambda _: bool(flag), sub), trainable, params
                )
            )
        except ValueError as error:
            raise BadInputError(
                "clipped_grad: `trainable` must be a function of a parameter's name or a tree of "
                f"bools that is a prefix of the parameters ({error})"
            ) from error
    for (path, x), keep in zip(flat, chosen):
        if keep and jnp.issubdtype(jnp.result_type(x), jnp.complexfloating):
            raise BadInputError(
                f"clipped_grad: the parameter {leaf_name(path)!r} is complex: store its real and "
                "imaginary parts as two parameters"
            )
    mask = [
        keep and jnp.issubdtype(jnp.result_type(x), jnp.floating)
        for keep, (_, x) in zip(chosen, flat)
    ]
    if not any(mask):
        raise BadInputError("clipped_grad: no floating-point parameter is trainable")
    return mask


def split(params: PyTree, trainable: Trainable = None) -> tuple[PyTree, PyTree]:
    """Returns the trained and the frozen part of ``params``.

    Args:
      params: any pytree of arrays (or of objects with a dtype).
      trainable: as in ``clipped_grad``: a function of a parameter's name, or a tree of bools that
        is a prefix of the parameters; None: all floating-point parameters.

    Raises:
      BadInputError: no parameter is left to train, or the tree does not fit the parameters.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.clipping import split
      >>> params = {"body": jnp.ones(1), "head": jnp.zeros(1)}
      >>> trained, frozen = split(params, lambda name: name == "head")
      >>> print(trained, frozen["body"])
      {'body': None, 'head': Array([0.], dtype=float32)} [1.]
    """
    tree: Any
    leaves, tree = jax.tree.flatten(params)
    mask = trainable_mask(params, trainable)
    trained = [x if keep else None for x, keep in zip(leaves, mask, strict=True)]
    frozen = [None if keep else x for x, keep in zip(leaves, mask, strict=True)]
    return tree.unflatten(trained), tree.unflatten(frozen)


def join(trained: PyTree, frozen: PyTree) -> PyTree:
    """Returns the whole tree of parameters, the inverse of ``split``; ``frozen`` may be None.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.clipping import join
      >>> params = join({"body": None, "head": jnp.zeros(1)}, {"body": jnp.ones(1), "head": None})
      >>> print(params["body"], params["head"])
      [1.] [0.]
    """
    if frozen is None:
        return trained
    return jax.tree.map(
        lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda x: x is None
    )
