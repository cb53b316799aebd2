"""Trees of parameters: by path, and with or without adapters (Hu et al. 2021, "LoRA")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax.errors import BadInputError
from dpfl_jax.models.config import Lora

PyTree = Any
ADAPTERS = ("lora_a", "lora_b")


def is_adapter(path: str) -> bool:
    """Whether a parameter's path is an adapter's."""
    return path.rpartition("/")[2] in ADAPTERS


def without_adapters(params: PyTree) -> PyTree:
    """The base model's parameters: a nested dict without adapters."""
    if not isinstance(params, dict):
        return params
    return {k: without_adapters(v) for k, v in params.items() if k not in ADAPTERS}


def merge(params: PyTree, lora: Lora | None, dtype: str = "float32") -> PyTree:
    """Merges adapters into the base: every kernel becomes W + (alpha / rank) A B.

    Args:
      params: a model's parameters, stacked or not.
      lora: the adapters of the model's configuration.
      dtype: dtype of kernels that had adapters (merged in float32); others keep theirs.

    Raises:
      BadInputError: there are adapters, but ``lora`` is None.
    """
    if not isinstance(params, dict):
        return params
    if "lora_a" not in params:
        return {k: merge(v, lora, dtype) for k, v in params.items()}
    if lora is None:
        raise BadInputError("the parameters have adapters, but the model's configuration has none")
    a, b = (params[name].astype(jnp.float32) for name in ADAPTERS)
    kernel = params["kernel"].astype(jnp.float32) + lora.scale * jnp.matmul(
        a, b, precision="highest"
    )
    rest = {k: v for k, v in params.items() if k not in (*ADAPTERS, "kernel")}
    return {"kernel": kernel.astype(dtype), **rest}


def flat_paths(tree: PyTree) -> dict[str, Any]:
    """Flattens a nested dict to ``{"blocks/mlp/up/kernel": leaf}``."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in flat}


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of ``flat_paths``."""
    out: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return out
