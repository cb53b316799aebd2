"""From our parameters to a checkpoint that ``transformers`` opens."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax
import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.models.checkpoint.families import FAMILIES, Entry, entries, family_of
from dpfl_jax.models.checkpoint.files import (
    CONFIG,
    DTYPES,
    TensorFiles,
    TensorWriter,
    checkpoint_dir,
    copy_companions,
    without_code,
)
from dpfl_jax.models.checkpoint.hf_config import from_transformer, to_transformer
from dpfl_jax.models.checkpoint.load import flat_paths
from dpfl_jax.models.config import TransformerConfig
from dpfl_jax.models.lora import is_adapter

PyTree = Any


def save_checkpoint(
    path: str | os.PathLike[str],
    config: TransformerConfig,
    params: PyTree,
    *,
    like: str | os.PathLike[str] | None = None,
    dtype: str = "float32",
    max_file_bytes: int = 5 * 10**9,
) -> pathlib.Path:
    """Writes config.json, safetensors files and, from ``like``, the tokeniser's.

    Args:
      path: a directory that does not exist or is empty.
      config: the model's shape.
      params: its parameters, adapters merged.
      like: the checkpoint that the model was loaded from: its config.json and tokeniser are kept.
      dtype: of the tensors, float32 or bfloat16.
      max_file_bytes: more go into several files; so much is in memory at once.

    Returns:
      The directory.

    Raises:
      BadInputError: the model is of no known family, has adapters, or the directory is in use.
    """
    target = pathlib.Path(path)
    flat = flat_paths(params)
    if any(is_adapter(name) for name in flat):
        raise BadInputError("adapters have no place in a checkpoint: merge them before saving")
    if like is None:
        family, written = family_of(config), from_transformer(config, dtype)
    else:
        written = _kept_config(like, dtype)
        family = FAMILIES[written["model_type"]]
    writer = TensorWriter(target, max_file_bytes)
    by_tensor: dict[str, list[Entry]] = {}
    for entry in entries(config, family, flat, family.prefix):
        by_tensor.setdefault(entry.tensor.name, []).append(entry)
    if lost := set(flat) - {e.path for found in by_tensor.values() for e in found}:
        raise BadInputError(
            f"the parameter {min(lost)!r} has no place in a {family.model_type} checkpoint"
        )
    for name, found in by_tensor.items():
        found = sorted(found, key=lambda e: e.start)
        values = [_value(flat[e.path], e) for e in found]
        value = values[0] if len(values) == 1 else np.concatenate(values, axis=-1)
        value = value.T if found[0].tensor.transposed else value
        writer.add(name, value.astype(DTYPES[dtype]))
    if like is not None:
        copy_companions(checkpoint_dir(like), target)
    writer.finish(written)
    return target


def _value(leaf: jax.Array, entry: Entry) -> np.ndarray:
    return np.asarray(jax.device_get(leaf[entry.row]))


def _kept_config(like: str | os.PathLike[str], dtype: str) -> dict[str, Any]:
    files = TensorFiles(like)
    try:
        to_transformer(files.config, str(files.path / CONFIG))
        written = without_code(files.config)
    finally:
        files.close()
    for key in ("dtype", "torch_dtype"):
        if key in written:
            written[key] = dtype
    if not {"dtype", "torch_dtype"} & written.keys():
        written["torch_dtype"] = dtype
    return written
