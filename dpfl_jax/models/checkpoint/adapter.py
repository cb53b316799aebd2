"""Adapters by themselves, in the layout that ``peft`` opens beside their base."""

from __future__ import annotations

import collections
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.models.checkpoint.families import FAMILIES, Entry, entries
from dpfl_jax.models.checkpoint.files import (
    CONFIG,
    DTYPES,
    TensorWriter,
    checkpoint_dir,
    copy_companions,
    read_json,
)
from dpfl_jax.models.checkpoint.load import flat_paths
from dpfl_jax.models.config import Lora
from dpfl_jax.models.lora import ADAPTERS
from dpfl_jax.models.transformer import LanguageModel

PyTree = Any
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


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
    """
    lora, flat = model.config.lora, flat_paths(params)
    shapes = flat_paths(jax.eval_shape(model.init, jax.random.key(0)))
    family = FAMILIES[read_json(checkpoint_dir(base) / CONFIG, "checkpoint")["model_type"]]
    held: dict[str, list[tuple[Entry, str]]] = collections.defaultdict(list)
    for entry in entries(model.config, family, shapes, family.prefix):
        projection, _, kind = entry.path.rpartition("/")
        if kind == "kernel" and f"{projection}/{ADAPTERS[0]}" in shapes:
            held[entry.tensor.name.removesuffix(".weight")].append((entry, projection))
    if lora is None or not held:
        raise BadInputError("the model has no adapters: export it as a whole")
    # `transformers` joins an expert's gate and up; `peft` opens what is left of one wrongly.
    experts = collections.Counter(m.rpartition(".")[0] for m in held if ".experts." in m)
    if any(count < 3 for count in experts.values()):
        raise BadInputError(
            "peft opens adapters of experts only where gate, up and down all have one: leave out "
            "--adapter, and they are merged"
        )
    writer = TensorWriter(pathlib.Path(path), 2**62)
    for module, found in held.items():
        parts = [[_row(flat[f"{name}/{kind}"], e) for kind in ADAPTERS] for e, name in found]
        ranks = np.cumsum([0, *(a.shape[1] for a, _ in parts)])
        up = np.zeros((found[0][0].width, ranks[-1]), np.float32)
        for (entry, _), (_, b), first in zip(found, parts, ranks):
            up[entry.start : entry.start + b.shape[1], first : first + b.shape[0]] = b.T
        down = np.concatenate([a.T for a, _ in parts])
        for name, value in (("lora_A", down), ("lora_B", up)):
            tensor = f"base_model.model.{module}.{name}.weight"
            writer.add(tensor, value.astype(DTYPES[dtype]))
    together = {module: len(found) for module, found in held.items()}
    written = _config(lora, together, model.config.num_layers)
    written["base_model_name_or_path"] = _told(base)
    written["fan_in_fan_out"] = family.model_type == "gpt2"
    copy_companions(checkpoint_dir(base), writer.path)
    writer.finish(written, ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    return writer.path


def _row(leaf: Any, entry: Entry) -> np.ndarray:
    return np.asarray(jax.device_get(leaf[entry.row]), np.float32)


def _config(lora: Lora, together: Mapping[str, int], layers: int) -> dict[str, Any]:
    """What ``peft`` must know; ``together``: how many of our adapters are one of each module."""
    # By the ends of names, as peft compares them, where all blocks have them: "mlp.c_proj".
    ends = {module: ".".join(module.split(".")[-2:]) for module in together}
    in_blocks = collections.Counter(ends.values())
    told = {m: end if in_blocks[end] == layers else m for m, end in ends.items()}
    several = {told[m]: count for m, count in together.items() if count > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "bias": "none",
        "lora_dropout": 0.0,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(set(told.values())),
        "rank_pattern": {name: count * lora.rank for name, count in several.items()},
        "alpha_pattern": {name: count * lora.alpha for name, count in several.items()},
    }


def _told(base: str) -> str:
    """The base by its name on the hub, or that of its folder: where it lay is nobody's business."""
    return base.removeprefix("hf:") if base.startswith("hf:") else pathlib.Path(base).name
