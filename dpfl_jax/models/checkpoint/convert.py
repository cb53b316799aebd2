"""Reads our parameters from checkpoints, part by part, and writes them, whole or as adapters."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.models.checkpoint.families import (
    FAMILIES,
    HEAD,
    Entry,
    Family,
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
from dpfl_jax.models.params import ADAPTERS, flat_paths, is_adapter, nested, without_adapters
from dpfl_jax.models.transformer import LanguageModel

# ---- from a checkpoint --------------------------------------------------------------------------


PyTree = Any


def read_config(path: Any) -> TransformerConfig:
    """Reads the transformer of a checkpoint, from its config.json only.

    Its ``bos_id`` is from config.json. Whether sequences begin with it is up to the tokeniser
    (``load_tokenizer(path).bos_id``); examples of chats contain it, and the model must have None.

    Raises:
      BadInputError: there is no checkpoint, or it is of an unknown family.

    Examples:
      >>> from dpfl_jax.models.checkpoint import checkpoint_dir, read_config
      >>> read_config(checkpoint_dir("bundled:quickstart")).num_layers
      2
    """
    file = checkpoint_dir(path) / CONFIG
    return to_transformer(read_json(file, "checkpoint"), str(file))


def fingerprint(path: Any) -> str:
    """Identifies a checkpoint by its configuration and some rows of every tensor.

    Examples:
      >>> from dpfl_jax.models.checkpoint import checkpoint_dir, fingerprint
      >>> path = checkpoint_dir("bundled:quickstart")
      >>> fingerprint(path) == fingerprint(path)
      True
    """
    return TensorFiles(path).fingerprint()


def describe(path: Any) -> dict[str, Any]:
    """Returns what identifies a checkpoint, for the record of a model made from it.

    Returns:
      ``name`` (of the directory without its parents, or on the hub), ``digest`` (``fingerprint``),
      and ``files``: the size in bytes of each weights file, by name.

    Examples:
      >>> from dpfl_jax.models.checkpoint import checkpoint_dir, describe
      >>> sorted(describe(checkpoint_dir("bundled:quickstart")))
      ['digest', 'files', 'name']
    """
    files = TensorFiles(path)
    is_path = files.path == pathlib.Path(path)
    name = files.path.resolve().name if is_path else str(path)
    return {"name": name, "digest": files.fingerprint(), "files": files.sizes()}


def load_checkpoint(
    path: Any,
    config: TransformerConfig,
    shapes: PyTree,
    shardings: PyTree | None = None,
    dtype: str | Callable[[str], str] = "float32",
) -> PyTree:
    """Reads the parameters of a model.

    Each device's part of every parameter is read separately: a host never holds more than the part
    of one parameter besides what its devices hold.

    Args:
      path: directory with config.json and safetensors files.
      config: the model's shape: the checkpoint's, perhaps stacked differently and with adapters.
      shapes: ``jax.eval_shape(model.init, key)``.
      shardings: a NamedSharding for each parameter; default all on the first device.
      dtype: dtype of the parameters, float32 or bfloat16, or a function from a path to it.

    Returns:
      A tree like ``shapes`` without adapters (they are not in a checkpoint).

    Raises:
      BadInputError: a tensor is missing, unknown, or has another shape.

    Examples:
      >>> import jax
      >>> from dpfl_jax.models import LanguageModel
      >>> from dpfl_jax.models.checkpoint import checkpoint_dir, load_checkpoint, read_config
      >>> path = checkpoint_dir("bundled:quickstart")
      >>> config = read_config(path)
      >>> shapes = jax.eval_shape(LanguageModel(config).init, jax.random.key(0))
      >>> params = load_checkpoint(path, config, shapes)
      >>> jax.tree.structure(params) == jax.tree.structure(shapes)
      True
    """
    files = TensorFiles(path)
    to_transformer(files.config, str(files.path / CONFIG))  # refuses unknown settings
    family = FAMILIES[files.config["model_type"]]
    wanted = flat_paths(without_adapters(shapes))
    places = None if shardings is None else flat_paths(without_adapters(shardings))
    sources = _sources(files, config, family, wanted)
    choose = dtype if callable(dtype) else (lambda _: dtype)
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    loaded = {}
    for name, like in wanted.items():
        place = first_device if places is None else places[name]
        reader = _Reader(files, sources[name], tuple(like.shape), DTYPES[choose(name)])
        loaded[name] = jax.make_array_from_callback(tuple(like.shape), place, reader)
        loaded[name].block_until_ready()  # so that the host's copy can be freed
    return nested(loaded)


def load_model(path: Any) -> tuple[LanguageModel, PyTree]:
    """Reads the language model of a checkpoint, and its parameters.

    Raises:
      BadInputError: ``read_config`` or ``load_checkpoint`` refuses it.

    Examples:
      >>> from dpfl_jax.models.checkpoint import checkpoint_dir, load_model
      >>> model, params = load_model(checkpoint_dir("bundled:quickstart"))
      >>> model.config.num_layers
      2
    """
    model = LanguageModel(read_config(path))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return model, load_checkpoint(path, model.config, shapes)


def _sources(
    files: TensorFiles, config: TransformerConfig, family: Family, wanted: Mapping[str, Any]
) -> dict[str, list[Entry]]:
    """The tensors of each parameter, block by block; names and shapes are checked on both sides."""
    prefix = family.prefix if any(name.startswith(family.prefix) for name in files) else ""
    sources: dict[str, list[Entry]] = {name: [] for name in wanted}
    known = set()
    for entry in entries(config, family, wanted, prefix):
        name = entry.tensor
        known.add(name)
        if name not in files:
            raise BadInputError(
                f"the checkpoint {files.path} has no tensor {name!r}, which its {CONFIG} asks for"
            )
        expected = entry.full_shape(tuple(wanted[entry.path].shape))
        if files.shape(name) != expected:
            raise BadInputError(
                f"the tensor {name!r} of {files.path} has shape {files.shape(name)}, but its "
                f"{CONFIG} asks for {expected}"
            )
        sources[entry.path].append(entry)
    if unknown := [name for name, parts in sources.items() if not parts]:
        raise BadInputError(
            f"a {family.model_type} checkpoint has no tensor for the parameter {unknown[0]!r}"
        )
    for name in files:
        tied = name == HEAD and config.tie_embeddings
        if name not in known and not tied and not name.endswith(family.buffers):
            raise BadInputError(
                f"the checkpoint {files.path} has a tensor {name!r}, for which a model of its "
                f"{CONFIG} has no place"
            )
        embedding = sources["embedding"][0].tensor
        if tied and not files.equal(name, embedding):
            raise BadInputError(
                f"{files.path / CONFIG} ties the output head to the embedding, but {name!r} holds "
                f"other numbers than {embedding!r}: set its tie_word_embeddings to false, or "
                "remove the tensor that is not the model's"
            )
    return sources


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads any part of one (perhaps stacked) parameter."""

    files: TensorFiles
    entries: list[Entry]
    shape: tuple[int, ...]
    dtype: np.dtype

    def __call__(self, index: tuple[slice, ...] | None) -> np.ndarray:
        given = index or ()
        cut = [slice(*s.indices(n)) for s, n in zip(given, self.shape)]
        cut += [slice(0, n) for n in self.shape[len(cut) :]]
        if not self.entries[0].row:
            return self._one(self.entries[0], cut)
        out = np.empty([s.stop - s.start for s in cut], self.dtype)
        for entry in self.entries:
            if all(s.start <= row < s.stop for row, s in zip(entry.row, cut)):
                at = tuple(row - s.start for row, s in zip(entry.row, cut))
                out[at] = self._one(entry, cut[len(at) :])
        return out

    def _one(self, entry: Entry, cut: list[slice]) -> np.ndarray:
        last = cut[-1]
        cut = [*cut[:-1], slice(last.start + entry.start, last.stop + entry.start)]
        if entry.transposed:
            part = self.files.read(entry.tensor, tuple(cut[::-1])).T
        else:
            part = self.files.read(entry.tensor, tuple(cut))
        return np.ascontiguousarray(part.astype(self.dtype))


# ---- to a checkpoint, or to adapters ------------------------------------------------------------


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
    """Writes config.json, safetensors files and the tokeniser files of ``like``.

    Args:
      path: a directory that does not exist or is empty.
      config: the model's shape.
      params: its parameters, with adapters merged.
      like: the checkpoint that the model was loaded from: its config.json and tokeniser are kept.
      dtype: dtype of the tensors, float32 or bfloat16.
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

    If the base holds several projections in one (queries, keys and values of GPT-2), their adapters
    of rank r become one of rank r times their number, which computes the same.

    Args:
      path: a directory that does not exist or is empty.
      model: the model with adapters.
      params: its parameters, of which only adapters are read.
      base: the checkpoint that training started from.
      dtype: dtype of the tensors, float32 or bfloat16.

    Returns:
      The directory.

    Raises:
      BadInputError: there are no adapters, an expert has some but not all, or the directory is in
        use.

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
    # `transformers` joins an expert's gate and up; `peft` misreads an expert with only one of them.
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
    # Its name on the hub, or its folder's name: the path of the folder may be private.
    name = base.removeprefix("hf:") if base.startswith("hf:") else pathlib.Path(base).name
    written["base_model_name_or_path"] = name
    written["fan_in_fan_out"] = not family.transposed
    copy_companions(checkpoint_dir(base), writer.path)
    writer.finish(written, ADAPTER_CONFIG, ADAPTER_WEIGHTS)
    return writer.path


def _config(lora: Lora, joined: Mapping[str, int], layers: int) -> dict[str, Any]:
    """The configuration for ``peft``; ``joined``: how many of our adapters each module joins."""
    # Modules that all blocks have are named by their endings, which peft compares: "mlp.c_proj".
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
