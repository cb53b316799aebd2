"""Messages between server and silos: a header of plain JSON and named arrays, as safetensors.

Nothing is unpickled, so that reading a message runs none of its sender's code.
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
    """Raised for bytes that are no message of this protocol, or not the expected message."""


_HEADER = "dpfl"


def pack(header: dict[str, Any], **trees: PyTree) -> bytes:
    """Returns a header and pytrees of arrays as bytes, deterministically.

    Args:
      header: plain JSON.
      **trees: pytrees of arrays by name.
    """
    arrays = {}
    for name, tree in trees.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            arrays[name + jax.tree_util.keystr(path)] = np.asarray(leaf, order="C")
    return save(arrays, {_HEADER: json.dumps(header, sort_keys=True, allow_nan=False)})


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the header, and the arrays by name, from bytes of ``pack``.

    Raises:
      MessageError: the bytes are no message of this protocol.
    """
    try:
        arrays = load(data)
        head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        header = json.loads(head["__metadata__"][_HEADER])
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise MessageError("these bytes are no message of this protocol: look at what sent them")
    return header, arrays


def why_of(header: dict[str, Any]) -> str:
    """Returns why a silo refuses, in its own words: untrusted, so one line of limited length."""
    return one_line(str(header.get("why", header["kind"]))[:500])


def tree_of(arrays: dict[str, np.ndarray], name: str, like: PyTree) -> PyTree:
    """Returns the pytree that was packed as ``name``.

    Args:
      arrays: arrays that ``unpack`` returned.
      name: name of the tree.
      like: pytree with the expected structure, shapes and dtypes.

    Raises:
      MessageError: structure, shapes or dtypes differ.
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
    """Returns whether all numbers of a pytree are finite."""
    return all(math.isfinite(np.abs(leaf).max(initial=0.0)) for leaf in jax.tree.leaves(tree))
