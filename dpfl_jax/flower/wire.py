"""Messages: a header of plain JSON and named arrays, as a safetensors file.

Nothing is unpickled: reading a message runs no code of its sender.
"""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from dpfl_jax.errors import BadInputError, one_line

PyTree = Any


class MessageError(BadInputError):
    """The bytes are no message of this protocol, or not the one that was expected."""


_HEADER = "dpfl"


def pack(header: dict[str, Any], **trees: PyTree) -> bytes:
    """Header and trees of arrays as bytes, the same for the same content.

    Args:
      header: plain JSON.
      **trees: by name, pytrees of arrays.
    """
    arrays = {}
    for name, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            arrays[name + jax.tree_util.keystr(path)] = np.asarray(leaf, order="C")
    return save(arrays, {_HEADER: json.dumps(header, sort_keys=True, allow_nan=False)})


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header, and the arrays by name.

    Raises:
      MessageError: they are no such bytes.
    """
    try:
        arrays = load(data)
        head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        header = json.loads(head["__metadata__"][_HEADER])
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise MessageError("these bytes are no message of this protocol")
    return header, arrays


def why_of(header: dict[str, Any]) -> str:
    """Why a silo refuses, in its words, which are not trusted: on one line, cut."""
    return one_line(str(header.get("why", header["kind"]))[:500])


def tree_of(arrays: dict[str, np.ndarray], name: str, like: PyTree) -> PyTree:
    """The tree that was packed as ``name``.

    Args:
      arrays: of ``unpack``.
      name: of the tree.
      like: pytree with the shapes and types that are expected.

    Raises:
      MessageError: another tree, or other shapes or types.
    """
    expected = {
        name + jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(like)
    }
    sent = {key for key in arrays if key == name or key.startswith((name + "[", name + "."))}
    if sent != set(expected):
        raise MessageError(
            f"{name} has the arrays {sorted(sent)}, but {sorted(expected)} are expected: the "
            "models are not the same"
        )
    for key, leaf in expected.items():
        array = arrays[key]
        if array.shape != tuple(leaf.shape) or array.dtype != leaf.dtype:
            raise MessageError(
                f"{key} is {array.dtype} {array.shape}, but {leaf.dtype} {tuple(leaf.shape)} is "
                "expected: the models are not the same"
            )
    leaves = [arrays[key] for key in expected]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def is_finite(tree: PyTree) -> bool:
    """Whether all numbers of a tree are finite."""
    return all(math.isfinite(np.abs(leaf).max(initial=0.0)) for leaf in jax.tree.leaves(tree))
