"""Reads and writes a directory of safetensors files, one or several with an index."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dpfl_jax.errors import BadInputError
from dpfl_jax.files import local_path, on_disk, read_text, within

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# Files that are copied when a model is exported; none is code.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "generation_config.json",
    "chat_template.jinja",
)
BUNDLED, _BUNDLED_AT = "bundled:", pathlib.Path(__file__).parent / "bundled"
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def checkpoint_dir(name: str | os.PathLike[str]) -> pathlib.Path:
    """The directory of a checkpoint: a path, ``bundled:NAME``, or a name on the hub.

    Raises:
      BadInputError: there is no such bundled checkpoint, or the cache does not hold it.

    Examples:
      >>> from dpfl_jax.models.checkpoint import checkpoint_dir
      >>> checkpoint_dir("bundled:quickstart").name
      'quickstart'
    """
    text = os.fspath(name)
    if not text.startswith(BUNDLED):
        return pathlib.Path(local_path(text, "model"))
    known = sorted(BUNDLED + folder.name for folder in _BUNDLED_AT.iterdir())
    if text not in known:
        raise BadInputError(f"there is no checkpoint {text!r}: bundled are {', '.join(known)}")
    return _BUNDLED_AT / text.removeprefix(BUNDLED)


class TensorFiles:
    """The tensors of a checkpoint, read by slices.

    Attributes:
      path: the directory.
      config: content of config.json, or of the file in its place.
    """

    def __init__(self, path: str | os.PathLike[str], config: str = CONFIG) -> None:
        """Opens the files (memory mapped: nothing is read yet).

        Args:
          path: the directory.
          config: the file that describes the tensors.

        Raises:
          BadInputError: there is no checkpoint, or it is not in safetensors files.
        """
        self.path = checkpoint_dir(path)
        self.config: dict[str, Any] = read_json(self.path / config, "checkpoint")
        self._file_of: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        for file in self._names():
            try:
                opened = safe_open(self.path / file, framework="numpy")
            except FileNotFoundError:
                raise BadInputError(
                    f"{self.path / INDEX} names the file {file}, which is not there"
                ) from None
            except (OSError, SafetensorError) as error:
                raise BadInputError(
                    f"{self.path / file} cannot be read as a safetensors file: {error}"
                ) from None
            self._open[file] = opened
            for name in opened.keys():  # noqa: SIM118 (it is not a dict)
                if name in self._file_of:
                    raise BadInputError(
                        f"the tensor {name!r} is in two files of {self.path}, "
                        f"{self._file_of[name]} and {file}"
                    )
                self._file_of[name] = file

    def _names(self) -> list[str]:
        if (self.path / INDEX).exists():
            index = read_json(self.path / INDEX, "index")
            if not isinstance(index.get("weight_map"), dict):
                raise BadInputError(f"{self.path / INDEX} has no weight_map")
            names = sorted(set(map(str, index["weight_map"].values())))
            for name in names:
                if pathlib.PurePath(name).name != name:
                    raise BadInputError(f"{self.path / INDEX} names a file elsewhere: {name!r}")
            if (self.path / SINGLE).exists() and SINGLE not in names:
                raise BadInputError(
                    f"{self.path} holds {SINGLE} and, in other files, what {INDEX} names: remove "
                    "the one that is not the model"
                )
            return names
        if (self.path / SINGLE).exists():
            return [SINGLE]
        pickled = [p.name for p in self.path.glob("*.bin")]
        hint = f" ({pickled[0]} is a pickle, which is never opened)" if pickled else ""
        raise BadInputError(f"{self.path} holds no {SINGLE} and no {INDEX}{hint}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor.

        Raises:
          BadInputError: it does not hold floating-point numbers.
        """
        tensor = self._slice(name)
        if tensor.get_dtype() not in _FLOATS:
            raise BadInputError(
                f"the tensor {name!r} of {self.path} has type {tensor.get_dtype()}, but only "
                f"{', '.join(_FLOATS)} are known (quantised checkpoints are not)"
            )
        return tuple(tensor.get_shape())

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a part of a tensor, in the dtype of the file."""
        return self._slice(name)[index]

    def whole(self, name: str) -> np.ndarray:
        """Reads a whole tensor, in the dtype of the file."""
        return self._open[self._file_of[name]].get_tensor(name)

    def _slice(self, name: str) -> Any:
        return self._open[self._file_of[name]].get_slice(name)

    def equal(self, one: str, other: str) -> bool:
        """Whether two tensors are equal, compared by rows."""
        if self.shape(one) != self.shape(other):
            return False
        rows = self.shape(one)[0]
        parts = ((slice(start, min(start + 4096, rows)),) for start in range(0, rows, 4096))
        return all(np.array_equal(self.read(one, p), self.read(other, p)) for p in parts)

    def sizes(self) -> dict[str, int]:
        """Bytes of each weights file, by name."""
        return {file: (self.path / file).stat().st_size for file in sorted(self._open)}

    def fingerprint(self) -> str:
        """Identifies the checkpoint by its configuration and names, shapes and rows of tensors."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name in sorted(self):
            tensor = self._slice(name)
            shape = tuple(tensor.get_shape())
            digest.update(f"{name} {shape} {tensor.get_dtype()}".encode())
            if not shape or min(shape) == 0:
                continue
            # A sample of rows is enough, as training changes all; reading all takes minutes.
            rows = sorted({round(k * (shape[0] - 1) / 15) for k in range(16)})
            for row in rows:
                part = (slice(row, row + 1), *(slice(None) for _ in shape[1:]))
                digest.update(np.ascontiguousarray(tensor[part]).tobytes())
        return digest.hexdigest()[:32]


class TensorWriter:
    """Writes a directory of safetensors files, at most ``limit`` bytes in memory at once."""

    def __init__(self, path: pathlib.Path, limit: int) -> None:
        """Creates the directory.

        Raises:
          BadInputError: it is not empty.
        """
        path = on_disk(path)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise BadInputError(f"{path} exists and is not an empty directory: choose another name")
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.limit = path, limit
        self._pending: dict[str, np.ndarray] = {}
        self._files: list[list[str]] = []
        self._size = self._total = 0

    def add(self, name: str, value: np.ndarray) -> None:
        """Writes a tensor after the earlier ones, in a new file if the current one is full."""
        if self._pending and self._size + value.nbytes > self.limit:
            self._flush()
        self._pending[name] = np.asarray(value, order="C")  # a scalar keeps its shape
        self._size += value.nbytes
        self._total += value.nbytes

    def finish(self, config: dict[str, Any], name: str = CONFIG, single: str = SINGLE) -> None:
        """Writes the remaining tensors, the index, and last ``config``."""
        self._flush()
        count = len(self._files)
        if count == 1:
            (self.path / _part(0)).rename(self.path / single)
        else:
            weight_map: dict[str, str] = {}
            for i, names in enumerate(self._files):
                final = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
                (self.path / _part(i)).rename(self.path / final)
                weight_map |= dict.fromkeys(names, final)
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            (self.path / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
        (self.path / name).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    def _flush(self) -> None:
        if not self._pending:
            return
        name = _part(len(self._files))
        save_file(self._pending, self.path / name, metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._pending, self._size = {}, 0


def _part(i: int) -> str:
    return f"part-{i}.safetensors"


def copy_companions(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies tokeniser files, without the names of code in them.

    Raises:
      BadInputError: one is a link out of the checkpoint (and the hub's cache): a checkpoint from
        somebody else could link to any file of ours.
    """
    for name in COMPANIONS:
        if not (source / name).is_file():
            continue
        file = within(source, name)
        if name.endswith("_config.json"):
            config = without_code(read_json(file, name))
            (target / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        else:
            shutil.copyfile(file, target / name)


def without_code(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without the names of code that transformers would fetch and run."""
    named = ("auto_map", "custom_pipelines")
    return {key: value for key, value in config.items() if key not in named}


def tokenizer_file(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path of the tokeniser's file in a checkpoint's directory.

    Raises:
      BadInputError: the directory has no tokeniser.

    Examples:
      >>> from dpfl_jax.models.checkpoint import checkpoint_dir, tokenizer_file
      >>> tokenizer_file(checkpoint_dir("bundled:quickstart")).name
      'tokenizer.json'
    """
    names: Iterable[str] = ("tokenizer.json", "tokenizer.model")
    folder = checkpoint_dir(path)
    if not folder.is_dir():
        raise BadInputError(f"there is no folder {path}: give the folder of a checkpoint")
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise BadInputError(
        f"{path} holds no tokenizer.json and no tokenizer.model: name a tokeniser as "
        "data.tokenizer, or bytes"
    )


def read_json(path: pathlib.Path, what: str) -> dict[str, Any]:
    """Reads a JSON object; ``what`` names it in messages.

    Raises:
      BadInputError: the file is missing or holds something else.
    """
    try:
        value = json.loads(read_text(path))
    except FileNotFoundError:
        raise BadInputError(f"there is no {what} in {path.parent}: it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadInputError(f"{path} does not hold a JSON object")
    return value
