"""From our parameters to a checkpoint that ``transformers`` opens, or to adapters for ``peft``."""

from __future__ import annotations

import collections
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.models.checkpoint.families import (
    FAMILIES,
    Entry,
    entries,
    from_transformer,
    to_transformer,
)
from dpfl_jax.models.checkpoint.files import (
    CONFIG,
    DTYPES,
    TensorFiles,
    TensorWriter,
    checkpoint_dir,
    copy_companions,
    read_json,
    without_code,
)
from dpfl_jax.models.config import Lora, TransformerConfig
from dpfl_jax.models.params import ADAPTERS, flat_paths, is_adapter
from dpfl_jax.models.transformer import LanguageModel

PyTree = Any
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


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
      max_file_bytes: most bytes in a file, and in memory at once.

    Returns:
      The directory.

    Raises:
      BadInputError: the model is of no known family, has adapters, or the directory is in use.

    Examples:
      >>> import tempfile
      >>> import jax
      >>> from dpfl_jax.models import LanguageModel, transformer_config
      >>> from dpfl_jax.models.checkpoint import read_config, save_checkpoint
      >>> config = transformer_config("tiny", vocab_size=259, activation="swiglu")
      >>> params = LanguageModel(config).init(jax.random.key(0))
      >>> path = save_checkpoint(tempfile.mkdtemp() + "/model", config, params)
      >>> read_config(path).num_layers == config.num_layers
      True
    """
    target = pathlib.Path(path)
    flat = flat_paths(params)
    if any(is_adapter(name) for name in flat):
        raise BadInputError("adapters have no place in a checkpoint: merge them before saving")
    written = from_transformer(config, dtype) if like is None else _kept_config(like, dtype)
    family = FAMILIES[written["model_type"]]
    writer = TensorWriter(target, max_file_bytes)
    by_tensor: dict[str, list[Entry]] = {}
    for entry in entries(config, family, flat, family.prefix):
        by_tensor.setdefault(entry.tensor, []).append(entry)
    if lost := set(flat) - {e.path for parts in by_tensor.values() for e in parts}:
        raise BadInputError(
            f"the parameter {min(lost)!r} has no place in a {family.model_type} checkpoint"
        )
    for name, parts in by_tensor.items():
        parts = sorted(parts, key=lambda e: e.start)
        values = [_value(flat[e.path], e) for e in parts]
        value = values[0] if len(values) == 1 else np.concatenate(values, axis=-1)
        value = value.T if parts[0].transposed else value
        writer.add(name, value.astype(DTYPES[dtype]))
    if like is not None:
        copy_companions(checkpoint_dir(like), target)
    writer.finish(written)
    return target


def _value(leaf: jax.Array, entry: Entry) -> np.ndarray:
    return np.asarray(jax.device_get(leaf[entry.row]))


def _kept_config(like: str | os.PathLike[str], dtype: str) -> dict[str, Any]:
    files = TensorFiles(like)
    to_transformer(files.config, str(files.path / CONFIG))
    written = without_code(files.config)
    named = {"dtype", "torch_dtype"} & written.keys() or {"torch_dtype"}
    return written | dict.fromkeys(named, dtype)


def save_adapter(
    path: str | os.PathLike[str],
    model: LanguageModel,
    params: PyTree,
    *,
    base: str,
    dtype: str = "float32",
) -> pathlib.Path:
    """Writes adapter_config.json, adapter_model.safetensors and the base's tokeniser.

    Where the base holds several projections in one (queries, keys and values of GPT-2), their
    adapters of rank r become one of rank r times their number, which computes the same.

    Args:
      path: a directory that does not exist or is empty.
      model: with adapters.
      params: its parameters, of which only adapters are read.
      base: the checkpoint that they were trained beside.
      dtype: of the tensors, float32 or bfloat16.

    Returns:
      The directory.

    Raises:
      BadInputError: there are no adapters, or of experts some alone; or the directory is in use.

    Examples:
      >>> import tempfile
      >>> import jax
      >>> from dpfl_jax.models import LanguageModel
      >>> from dpfl_jax.models.checkpoint import checkpoint_dir, read_config, save_adapter
      >>> from dpfl_jax.models.config import Lora
      >>> import dataclasses
      >>> base = checkpoint_dir("bundled:quickstart")
      >>> config = dataclasses.replace(read_config(base), lora=Lora(rank=2))
      >>> model = LanguageModel(config)
      >>> params = model.init(jax.random.key(0))
      >>> save_adapter(tempfile.mkdtemp() + "/adapter", model, params, base=str(base)).name
      'adapter'
    """
    lora, flat = model.config.lora, flat_paths(params)
    shapes = flat_paths(jax.eval_shape(model.init, jax.random.key(0)))
    family = FAMILIES[read_json(checkpoint_dir(base) / CONFIG, "checkpoint")["model_type"]]
    by_module: dict[str, list[tuple[Entry, str]]] = collections.defaultdict(list)
    for entry in entries(model.config, family, shapes, family.prefix):
        projection, _, kind = entry.path.rpartition("/")
        if kind == "kernel" and f"{projection}/{ADAPTERS[0]}" in shapes:
            by_module[entry.tensor.removesuffix(".weight")].append((entry, projection))
    if lora is None or not by_module:
        raise BadInputError("the model has no adapters: export it as a whole")
    # `transformers` joins an expert's gate and up; `peft` opens what is left of one wrongly.
    experts = collections.Counter(m.rpartition(".")[0] for m in by_module if ".experts." in m)
    if any(count < 3 for count in experts.values()):
        raise BadInputError(
            "peft opens adapters of experts only where gate, up and down all have one: leave out "
            "--adapter, and they are merged"
        )
    writer = TensorWriter(pathlib.Path(path), 2**62)
    for module, members in by_module.items():
        parts = [[_value(flat[f"{name}/{kind}"], e) for kind in ADAPTERS] for e, name in members]
        ranks = np.cumsum([0, *(a.shape[1] for a, _ in parts)])
        up = np.zeros((members[0][0].width, ranks[-1]), np.float32)
        for (entry, _), (_, b), first in zip(members, parts, ranks):
            up[entry.start : entry.start + b.shape[1], first : first + b.shape[0]] = b.T
        down = np.concatenate([a.T for a, _ in parts])
        for name, value in (("lora_A", down), ("lora_B", up)):
            tensor = f"base_model.model.{module}.{name}.weight"
            writer.add(tensor, value.astype(DTYPES[dtype]))
    joined = {module: len(members) for module, members in by_module.items()}
    written = _config(lora, joined, model.config.num_layers)
    # Its name on the hub, or that of its folder: where the folder lay is private.
    name = base.removeprefix("hf:") if base.startswith("hf:") else pathlib.Path(base).name
    written["base_model_name_or_path"] = name
    written["fan_in_fan_out"] = not family.transposed
    copy_companions(checkpoint_dir(base), writer.path)
    writer.finish(written, ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    return writer.path


def _config(lora: Lora, joined: Mapping[str, int], layers: int) -> dict[str, Any]:
    """What ``peft`` must know; ``joined``: how many of our adapters each module joins."""
    # By the ends of names, as peft compares them, where all blocks have them: "mlp.c_proj".
    ends = {module: ".".join(module.split(".")[-2:]) for module in joined}
    in_blocks = collections.Counter(ends.values())
    names = {m: end if in_blocks[end] == layers else m for m, end in ends.items()}
    several = {names[m]: count for m, count in joined.items() if count > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "bias": "none",
        "lora_dropout": 0.0,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(set(names.values())),
        "rank_pattern": {name: count * lora.rank for name, count in several.items()},
        "alpha_pattern": {name: count * lora.alpha for name, count in several.items()},
    }
