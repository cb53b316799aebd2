"""Any model out and in again: parameters by name in safetensors files, and what they belong to.

Nothing but numbers and names is read: a model of the user's own code is built by the reader.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.accounting import Guarantee, digests
from dpfl_jax.accounting.statement import NAME, Statement, read
from dpfl_jax.errors import BadInputError, repeated
from dpfl_jax.models import LanguageModel, TransformerConfig, build_by_name
from dpfl_jax.models.checkpoint import load_checkpoint, read_config
from dpfl_jax.models.checkpoint.files import CONFIG, DTYPES, TensorFiles, TensorWriter
from dpfl_jax.models.checkpoint.save import ADAPTER_CONFIG
from dpfl_jax.task import Task
from dpfl_jax.training.modules import functional
from dpfl_jax.training.own_model import built
from dpfl_jax.training.predictions import predict

PyTree = Any
STRUCTURE = "model.json"


@dataclasses.dataclass(frozen=True)
class Exported:
    """What ``dpfl export`` wrote.

    Attributes:
      params: the parameters, or the trained module.
      model: what computes with them: a model of the library, or what ``like`` built beside
        parameters (a Linen module, a Haiku transform, a loss); None where ``params`` is a module,
        or nobody said.
      task: of the data that it was trained on; None where that is not known.
      guarantee: what holds for it.
      structure: what else the export says of the model.
    """

    params: PyTree
    model: Any
    task: Task | None
    guarantee: Guarantee
    structure: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def predict(self, rows: Any) -> dict[str, np.ndarray]:
        """What the model says of new rows.

        Args:
          rows: of a model of a table, a DataFrame, an Arrow table, columns by name, or
            dictionaries: the columns that it was trained on are found by name, read and scaled as
            they were then, and checked; others are not looked at. Of other models an array
            [n, ...] of inputs, made as ``x`` of training was.

        Returns:
          ``prediction`` [n]: a class (its name, if the data had names) or a number, in the units of
          the target; and for classes ``probability_NAME`` of each [n] (of a hinge loss, ``score``).

        Raises:
          BadInputError: columns that are not there or hold something else; a language model; or
            nobody said what computes with the parameters.
        """
        return predict(self.params, self.model, self.task, self.structure, rows)


def save_named(
    path: str | os.PathLike[str],
    params: PyTree,
    structure: Mapping[str, Any],
    dtype: str = "float32",
    max_file_bytes: int = 5 * 10**9,
) -> tuple[pathlib.Path, int]:
    """Writes model.json and safetensors files; returns the directory, and how many numbers.

    Args:
      path: a directory that does not exist or is empty.
      params: any pytree of arrays; None where one is not written.
      structure: plain JSON: what else is to be known of the model.
      dtype: of floating-point tensors, float32 or bfloat16.
      max_file_bytes: more go into several files.

    Raises:
      BadInputError: two parameters have one name, or the directory is in use.
    """
    placed = _placed(params)
    names = [name for name, _, _ in placed]
    if (twice := repeated(names)) is not None:
        raise BadInputError(f"the model has two parameters called {twice!r}: rename one")
    writer, numbers = TensorWriter(pathlib.Path(path), max_file_bytes), 0
    for name, _, leaf in placed:
        if leaf is not None:
            value = np.asarray(jax.device_get(leaf))
            floats = jnp.issubdtype(value.dtype, jnp.floating)
            writer.add(name, value.astype(DTYPES[dtype]) if floats else value)
            numbers += value.size
    held = {name: keys for name, keys, leaf in placed if leaf is not None}
    absent = [name for name, _, leaf in placed if leaf is None]
    writer.finish({**structure, "parameters": held, "not_trained": absent}, STRUCTURE)
    return writer.path, numbers


def load_exported(path: str | os.PathLike[str], like: Any = None, model: Any = None) -> Exported:
    """Reads what ``dpfl export`` wrote.

    Args:
      path: the directory.
      like: what the run trained, if that was not a model of the library: a Flax NNX or Equinox
        module or a pytree of the same structure, whose values are replaced (but for parameters
        that were not trained); or the function that ``model.module`` named, which is called. None:
        nested dicts and lists, by name.
      model: what computes with parameters that are no module, as of ``fit``.

    Raises:
      BadInputError: it is none, or ``like`` has other parameters.

    Examples:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import optax
      >>> import dpfl_jax as dpfl
      >>> store = dpfl.from_arrays({"x": np.ones((64, 1), "float32")}, users=np.arange(64))
      >>> mechanism = dpfl.uls(group_size=1, cohort_size=16)
      >>> plan = mechanism.plan(store, steps=2, epsilon=8.0, delta=1e-3)
      >>> def loss(params, example):
      ...     return jnp.sum(example["x"] * params["w"])
      >>> folder, start = tempfile.mkdtemp(), {"w": jnp.zeros(1)}
      >>> result = dpfl.fit(loss, start, plan, optax.sgd(0.1), run_dir=f"{folder}/run")
      >>> written = dpfl.export(f"{folder}/run", f"{folder}/model")
      >>> dpfl.load_exported(f"{folder}/model", like=start).params["w"].shape
      (1,)
    """
    folder = pathlib.Path(path)
    if (folder / ADAPTER_CONFIG).exists():
        raise BadInputError(
            f"{folder} holds adapters alone: peft.PeftModel.from_pretrained(base, {str(folder)!r}) "
            "reads them, or export the run without --adapter"
        )
    guarantee = _checked(folder).privacy
    if like is None and (folder / CONFIG).exists():
        language = LanguageModel(read_config(folder))
        shapes = jax.eval_shape(language.init, jax.random.key(0))
        params = load_checkpoint(folder, language.config, shapes)
        return Exported(params, language, None, guarantee)
    files = TensorFiles(folder, STRUCTURE)
    found = {name: jnp.asarray(files.whole(name)) for name in files}
    structure = files.config
    task = Task.from_json(structure["task"]) if structure.get("task") else None
    model = _library_model(structure, task) if model is None else model
    if like is None:
        params = _nested(found, structure["parameters"])
        return Exported(params, model, task, guarantee, structure)
    if callable(like) and not functional(like).is_module and task is not None:
        place, options = structure.get("module"), structure.get("options", {})
        model, like = built(like, place or "like", task, options, jax.random.key(0))
        if model is not None and not hasattr(model, "apply"):  # a loss of its own
            structure = {**structure, "loss": None}
    arrays, rebuild, _ = functional(like)
    params = rebuild(_replaced(arrays, found, structure))
    return Exported(params, model, task, guarantee, structure)


def _checked(folder: pathlib.Path) -> Statement:
    """The guarantee of an export, if it is that of the files beside it."""
    stated = read(folder / NAME)
    if stated.digests is None:
        warnings.warn(
            f"nothing ties the model in {folder} to its guarantee, which has no digests: export "
            "its run again",
            stacklevel=3,
        )
        return stated
    if not (known := stated.digests.exported):
        raise BadInputError(f"{folder / NAME} is the guarantee of no export: bring its own back")
    if changed := digests.compare_export(folder, known, NAME).changed:
        raise BadInputError(f"{changed[0]}: take the export as it was written")
    return stated


def _library_model(structure: Mapping[str, Any], task: Task | None) -> Any:
    if "transformer" in structure:
        return LanguageModel(TransformerConfig(**structure["transformer"]))
    if "kind" in structure and task is not None:
        return build_by_name(structure["kind"], task, structure["options"])
    return None


def _placed(tree: PyTree) -> list[tuple[str, list[Any], Any]]:
    """(name, keys, leaf) of each leaf, None too."""
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)[0]
    placed = []
    for path, leaf in found:
        keys = [getattr(k, "key", getattr(k, "name", getattr(k, "idx", None))) for k in path]
        placed.append(("/".join(map(str, keys)) or "params", keys, leaf))
    return placed


def _nested(found: Mapping[str, jax.Array], held: Mapping[str, list[Any]]) -> PyTree:
    """Dicts and lists of the parameters; one alone is itself."""
    root: dict[Any, Any] = {}
    for name, keys in held.items():
        node = root
        *parents, last = ["", *keys]
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = found[name]
    return _with_lists(root[""])


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    made = {key: _with_lists(value) for key, value in node.items()}
    whole = bool(made) and set(made) == set(range(len(made)))
    return [made[i] for i in range(len(made))] if whole else made


def _replaced(like: PyTree, found: Mapping[str, jax.Array], structure: Mapping[str, Any]) -> PyTree:
    """``like`` with the values that were found, in its own types."""
    values, frozen = [], set(structure["not_trained"])
    placed = _placed(like)
    if more := sorted(set(found) - {name for name, _, _ in placed}):
        raise BadInputError(f"`like` has no parameter {more[0]!r}, which the export holds")
    for name, _, leaf in placed:
        if leaf is None or name in frozen:
            values.append(leaf)
        elif name not in found:
            raise BadInputError(f"`like` has a parameter {name!r}, which the export does not hold")
        elif found[name].shape != jnp.shape(leaf):
            raise BadInputError(
                f"the parameter {name!r} of `like` has shape {jnp.shape(leaf)}, but the exported "
                f"one {found[name].shape}"
            )
        else:
            values.append(found[name].astype(jnp.result_type(leaf)))
    return _with_leaves(like, values)


def filled(params: PyTree, like: Callable[[], PyTree]) -> PyTree:
    """``params`` with what was not trained taken from ``like()``, by name."""
    placed = _placed(params)
    if all(leaf is not None for _, _, leaf in placed):
        return params
    whole = {name: leaf for name, _, leaf in _placed(like())}
    return _with_leaves(params, [whole[n] if leaf is None else leaf for n, _, leaf in placed])


def _with_leaves(tree: PyTree, leaves: list[Any]) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=lambda x: x is None), leaves)
