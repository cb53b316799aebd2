"""From a checkpoint to our parameters; each device reads its part."""

from __future__ import annotations

import dataclasses
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
    to_transformer,
)
from dpfl_jax.models.checkpoint.files import CONFIG, DTYPES, TensorFiles, checkpoint_dir, read_json
from dpfl_jax.models.config import TransformerConfig
from dpfl_jax.models.params import flat_paths, nested, without_adapters

PyTree = Any
Place = Callable[[PyTree], PyTree]


def read_config(path: Any) -> TransformerConfig:
    """The transformer of a checkpoint, from its config.json alone.

    Its ``bos_id`` is that of config.json. Whether sequences begin with it is up to the tokeniser
    (``load_tokenizer(path).bos_id``); examples of chats contain it, and the model must have None.

    Raises:
      BadInputError: no checkpoint, or of an unknown family.

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
    """What identifies a checkpoint, for the record of a model made from it.

    Returns:
      ``name`` (of the directory without its parents, or on the hub), ``digest`` (``fingerprint``),
      and ``files``: bytes of each weights file by name.

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

    Each device's part of every parameter is read separately: no host holds more than its devices
    do, and one parameter's part in passing.

    Args:
      path: directory with config.json and safetensors files.
      config: the model's shape: the checkpoint's, perhaps stacked differently and with adapters.
      shapes: ``jax.eval_shape(model.init, key)``.
      shardings: a NamedSharding for each parameter; default all on the first device.
      dtype: of the parameters: float32 or bfloat16, or a function of their path.

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
    to_transformer(files.config, str(files.path / CONFIG))  # refuses what is not known
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
        loaded[name].block_until_ready()  # the host's copy can go
    return nested(loaded)


def _sources(
    files: TensorFiles, config: TransformerConfig, family: Family, wanted: Mapping[str, Any]
) -> dict[str, list[Entry]]:
    """For each parameter its tensors, block by block, after comparing both sides."""
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
    if unknown := [name for name, found in sources.items() if not found]:
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
