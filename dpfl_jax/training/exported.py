"""Writes and reads any model (parameters by name in safetensors files), and predicts with it.

Only numbers and names are read: the reader builds models that are the user's code.
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

from dpfl_jax import buckets
from dpfl_jax.accounting import Guarantee, digests
from dpfl_jax.accounting.statement import NAME, Statement, read
from dpfl_jax.data.in_memory import table_rows
from dpfl_jax.data.table import read_inputs
from dpfl_jax.errors import BadInputError, repeated
from dpfl_jax.models import FunctionalModel, LanguageModel, TransformerConfig, build_by_name
from dpfl_jax.models.checkpoint import load_model
from dpfl_jax.models.checkpoint.convert import ADAPTER_CONFIG
from dpfl_jax.models.checkpoint.files import CONFIG, DTYPES, TensorFiles, TensorWriter
from dpfl_jax.task import Task
from dpfl_jax.training.modules import built, forward_of, functional

PyTree = Any
STRUCTURE = "model.json"


@dataclasses.dataclass(frozen=True)
class Exported:
    """An exported model, as ``load_exported`` returns it.

    Attributes:
      params: the parameters, or the trained module.
      model: what computes with them: a model of the library, or what ``like`` returned together
        with parameters (a Linen module, a Haiku transform, a loss); None if ``params`` is a module,
        or no model was given.
      task: the task of the training data; None if it is unknown.
      guarantee: the guarantee of the model.
      structure: further facts on the model, from model.json.
    """

    params: PyTree
    model: Any
    task: Task | None
    guarantee: Guarantee
    structure: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def predict(self, rows: Any) -> dict[str, np.ndarray]:
        """Predicts the target of new rows.

        Args:
          rows: for a model of a table, a DataFrame, an Arrow table, columns by name, or
            dictionaries: the columns that it was trained on are found by name, checked, and read
            and scaled as in training; others are ignored. For other models an array [n, ...] of
            inputs, made like ``x`` in training.

        Returns:
          ``prediction`` [n]: a class (its name, if the data had names) or a number, in the units of
          the target; and for classes ``probability_NAME`` [n] of each (``score`` for a hinge loss).

        Raises:
          BadInputError: columns are missing or hold something else, the model is a language model,
            or it is unknown what computes with the parameters.
        """
        params, model, task, structure = self.params, self.model, self.task, self.structure
        if isinstance(model, LanguageModel) or structure.get("loss") in ("causal_lm", "tokens"):
            raise BadInputError("this is a language model, which continues a prompt: dpfl sample")
        linear = structure.get("linear")
        kind = structure.get("loss")
        classes = kind in ("classification", "logistic", "softmax", "hinge")
        if not classes and kind not in ("regression", "squared", "absolute"):
            raise BadInputError(
                "this model was trained with a custom loss, so that it is unknown what its outputs "
                "mean: compute with .params"
            )
        x = _inputs(task, rows)
        if linear:
            x, forward = _features(x, linear), _linear
        else:
            forward, params = _forward(params, model)
        compute = jax.jit(jax.vmap(forward, (None, 0)))
        parts = [
            np.asarray(compute(params, x[start : start + _BATCH]), np.float64)
            for start in range(0, len(x), _BATCH)
        ]
        out = np.concatenate(parts) if parts else np.zeros((0, 1))
        if classes:
            return _classes(out, _names(task, linear), kind == "hinge")
        value = out.reshape(len(x))
        if linear and linear["target"] is not None:
            middle, width = linear["target"]
            value = value * width + middle
        if task is not None and task.table is not None:
            middle, width = task.table.scale.get(task.table.target, (0.0, 1.0))
            value = value * width + middle
        return {"prediction": value}


def save_named(
    path: str | os.PathLike[str],
    params: PyTree,
    structure: Mapping[str, Any],
    dtype: str = "float32",
    max_file_bytes: int = 5 * 10**9,
) -> tuple[pathlib.Path, int]:
    """Writes model.json and safetensors files; returns the directory and the number of values.

    Args:
      path: a directory that does not exist or is empty.
      params: any pytree of arrays; None where one is not written.
      structure: further facts on the model, as plain JSON.
      dtype: dtype of floating-point tensors, float32 or bfloat16.
      max_file_bytes: largest size of one file; larger models are split.

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
      like: what the run trained, if it was not a model of the library: a Flax NNX or Equinox
        module or a pytree of the same structure, whose trained values are replaced; or the function
        that ``model.module`` named, which is called. None: the result holds nested dicts and lists.
      model: what computes with parameters that are not a module, as in ``fit``.

    Raises:
      BadInputError: the directory holds no export, or ``like`` has other parameters.

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
    folder = buckets.folder(path)
    if (folder / ADAPTER_CONFIG).exists():
        raise BadInputError(
            f"{folder} holds adapters alone: peft.PeftModel.from_pretrained(base, {str(folder)!r}) "
            "reads them, or export the run without --adapter"
        )
    guarantee = _checked(folder).privacy
    if like is None and (folder / CONFIG).exists():
        language, params = load_model(folder)
        return Exported(params, language, None, guarantee)
    files = TensorFiles(folder, STRUCTURE)
    values = {name: jnp.asarray(files.whole(name)) for name in files}
    structure = files.config
    task = Task.from_json(structure["task"]) if structure.get("task") else None
    model = library_model(structure, task) if model is None else model
    if like is None:
        params = _nested(values, structure["parameters"])
        return Exported(params, model, task, guarantee, structure)
    if callable(like) and not functional(like).is_module and task is not None:
        place, options = structure.get("module"), structure.get("options", {})
        model, like = built(like, place or "like", task, options, jax.random.key(0))
        if model is not None and not hasattr(model, "apply"):  # a custom loss
            structure = {**structure, "loss": None}
    arrays, rebuild, _ = functional(like)
    params = rebuild(_replaced(arrays, values, structure))
    return Exported(params, model, task, guarantee, structure)


def _checked(folder: pathlib.Path) -> Statement:
    """Reads the guarantee of an export, and compares its digests with the files."""
    stated = read(folder / NAME)
    if stated.digests is None:
        warnings.warn(
            f"nothing ties the model in {folder} to its guarantee, which has no digests: export "
            "its run again",
            stacklevel=3,
        )
        return stated
    if not (known := stated.digests.exported):
        raise BadInputError(
            f"{folder / NAME} is not the guarantee of an export: bring back the export's"
        )
    if changed := digests.compare_export(folder, known, NAME).changed:
        raise BadInputError(f"{changed[0]}: take the export as it was written")
    return stated


def library_model(structure: Mapping[str, Any], task: Task | None) -> Any:
    """The model of the library that an export describes; None for other models."""
    if "transformer" in structure:
        return LanguageModel(TransformerConfig(**structure["transformer"]))
    if "kind" in structure and task is not None:
        return build_by_name(structure["kind"], task, structure["options"])
    return None


def _placed(tree: PyTree) -> list[tuple[str, list[Any], Any]]:
    """(name, keys, leaf) of each leaf; None counts as a leaf."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)[0]
    placed = []
    for path, leaf in leaves:
        keys = [getattr(k, "key", getattr(k, "name", getattr(k, "idx", None))) for k in path]
        placed.append(("/".join(map(str, keys)) or "params", keys, leaf))
    return placed


def _nested(values: Mapping[str, jax.Array], held: Mapping[str, list[Any]]) -> PyTree:
    """Nested dicts and lists of the parameters; a single unnamed array is returned as it is."""
    root: dict[Any, Any] = {}
    for name, keys in held.items():
        node = root
        *parents, last = ["", *keys]
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = values[name]
    return _with_lists(root[""])


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    made = {key: _with_lists(value) for key, value in node.items()}
    whole = bool(made) and set(made) == set(range(len(made)))
    return [made[i] for i in range(len(made))] if whole else made


def _replaced(
    like: PyTree, exported: Mapping[str, jax.Array], structure: Mapping[str, Any]
) -> PyTree:
    """``like`` with the exported values, cast to the dtypes of ``like``."""
    values, frozen = [], set(structure["not_trained"])
    placed = _placed(like)
    if more := sorted(set(exported) - {name for name, _, _ in placed}):
        raise BadInputError(f"`like` has no parameter {more[0]!r}, which the export holds")
    for name, _, leaf in placed:
        if leaf is None or name in frozen:
            values.append(leaf)
        elif name not in exported:
            raise BadInputError(f"`like` has a parameter {name!r}, which the export does not hold")
        elif exported[name].shape != jnp.shape(leaf):
            raise BadInputError(
                f"the parameter {name!r} of `like` has shape {jnp.shape(leaf)}, but the exported "
                f"one {exported[name].shape}"
            )
        else:
            values.append(exported[name].astype(jnp.result_type(leaf)))
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


# ---- predictions ---------------------------------------------------------------------------------

_BATCH = 1024


def _inputs(task: Task | None, rows: Any) -> np.ndarray:
    if task is not None and task.table is not None:
        if isinstance(rows, np.ndarray | jax.Array):
            raise BadInputError(
                "the model was trained on a table, and an array does not say which column is "
                f"which: give a DataFrame or columns by name, {list(task.table.inputs)}"
            )
        return read_inputs(
            task.table, ((f"row {i + 1}", row) for i, row in enumerate(table_rows(rows)))
        )
    try:
        x = np.asarray(rows)
    except ValueError:
        x = np.zeros(0)
    shape = () if task is None else task.input_shape
    if x.dtype.kind not in "biuf" or not x.ndim or (task and x.shape[1:] != shape):
        wanted = "" if task is None else f" of shape {[len(x) if x.ndim else 'n', *shape]}"
        raise BadInputError(
            f"the model was trained on arrays: give one{wanted}, made as x of training was"
        )
    if task is not None and x.dtype == np.uint8 and not task.vocab_size:
        raise BadInputError(
            "the array holds uint8, which a store divides by 255 for training: give float32, made "
            "as x of training was"
        )
    x = x if task is not None and task.vocab_size else x.astype(np.float32)
    if not np.isfinite(x).all():
        raise BadInputError("the inputs hold numbers that are not finite: mend or leave out rows")
    return x


def _forward(params: PyTree, model: Any) -> tuple[Any, PyTree]:
    """``(arrays, x) -> outputs``, and the arrays."""
    if isinstance(model, FunctionalModel):
        return model.outputs, params
    arrays, rebuild, is_module = functional(params)
    if model is None and not is_module:
        raise BadInputError(
            "it is unknown what computes with these parameters: give the module that was trained, "
            "load_exported(DIR, like=module), or, for parameters, model= (as of fit)"
        )
    forward = forward_of(params, model)
    return lambda leaves, x: forward(rebuild(leaves), x), arrays


def _features(x: np.ndarray, linear: Mapping[str, Any]) -> np.ndarray:
    """The features of ``isrl.silos``: scaled, with a constant, clipped to ``max_norm``."""
    x = x.reshape(len(x), -1).astype(np.float64)
    if linear["scale"] is not None:
        middle, width = np.asarray(linear["scale"])
        x = (x - middle) / width
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    return (x * np.minimum(1.0, linear["max_norm"] / norms)).astype(np.float32)


def _linear(params: PyTree, x: jax.Array) -> jax.Array:
    return jnp.asarray(params) @ x


def _names(task: Task | None, linear: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    if linear and linear["names"] is not None:
        return tuple(linear["names"])
    if task is None or task.table is None:
        return None
    return task.table.categories.get(task.table.target)


def _classes(out: np.ndarray, names: tuple[str, ...] | None, scores: bool) -> dict[str, np.ndarray]:
    """The likeliest class, and the probability of each (for a hinge loss, its score)."""
    if out.ndim == 1 or out.shape[1] == 1:  # two classes: the log-odds of the second
        out = np.stack([np.zeros(len(out)), out.reshape(len(out))], axis=1)
    best = out.argmax(axis=1)
    labels = [str(i) for i in range(out.shape[1])] if names is None else list(names)
    result = {"prediction": best if names is None else np.array(labels, object)[best]}
    if scores:
        return {**result, "score": out[:, 1]}
    odds = np.exp(out - out.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    return result | {f"probability_{name}": odds[:, i] for i, name in enumerate(labels)}
