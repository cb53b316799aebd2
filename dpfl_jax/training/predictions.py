"""What an exported model says of new rows, read as those of training were, in words of its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.data.in_memory import table_rows
from dpfl_jax.data.table import read_inputs
from dpfl_jax.errors import BadInputError
from dpfl_jax.models import FunctionalModel, LanguageModel
from dpfl_jax.task import Task
from dpfl_jax.training.modules import forward_of, functional

PyTree = Any
_BATCH = 1024


def predict(
    params: PyTree, model: Any, task: Task | None, structure: Mapping[str, Any], rows: Any
) -> dict[str, np.ndarray]:
    """Predictions for new rows; see ``exported.Exported.predict``.

    Args:
      params: the parameters, or a module.
      model: what computes with them.
      task: of the training data.
      structure: content of model.json.
      rows: what is predicted for.
    """
    if isinstance(model, LanguageModel) or structure.get("loss") in ("causal_lm", "tokens"):
        raise BadInputError("this is a language model, which goes on with a prompt: dpfl sample")
    linear = structure.get("linear")
    kind = structure.get("loss")
    classes = kind in ("classification", "logistic", "softmax", "hinge")
    if not classes and kind not in ("regression", "squared", "absolute"):
        raise BadInputError(
            "this model was trained by a loss of its own, of which it is not known what outputs "
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


def _inputs(task: Task | None, rows: Any) -> np.ndarray:
    """``x`` of all rows."""
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
            "what computes with these parameters is not known: give the module that was trained, "
            "load_exported(DIR, like=module), or beside parameters model= (as of fit)"
        )
    forward = forward_of(params, model)
    return lambda found, x: forward(rebuild(found), x), arrays


def _features(x: np.ndarray, linear: Mapping[str, Any]) -> np.ndarray:
    """As ``isrl.silos`` makes them: scaled, with a constant, within the ball."""
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
    """The likeliest class, and the probability (hinge: the score) of each."""
    if out.ndim == 1 or out.shape[1] == 1:  # of two classes, how much likelier the second is
        out = np.stack([np.zeros(len(out)), out.reshape(len(out))], axis=1)
    best = out.argmax(axis=1)
    labels = [str(i) for i in range(out.shape[1])] if names is None else list(names)
    found = {"prediction": best if names is None else np.array(labels, object)[best]}
    if scores:
        return {**found, "score": out[:, 1]}
    odds = np.exp(out - out.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    return found | {f"probability_{name}": odds[:, i] for i, name in enumerate(labels)}
