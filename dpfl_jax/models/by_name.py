"""Builds a model by name, for the task of the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpfl_jax.errors import BadInputError
from dpfl_jax.models.config import transformer_config
from dpfl_jax.models.small import (
    MLP,
    LeafCNN,
    LinearRegression,
    LogisticRegression,
    RegressionMLP,
    SmallCNN,
    StackedLSTM,
)
from dpfl_jax.models.transformer import LanguageModel
from dpfl_jax.task import Task


def build_by_name(kind: str, task: Task, options: Mapping[str, Any]) -> Any:
    """Returns a model for a task, by ``dpfl_jax.task.ModelKind``.

    ``options`` are further arguments of the model's class; for a transformer ``size`` and fields of
    ``TransformerConfig``.

    Raises:
      BadInputError: the kind does not fit the task, or does not take the options.

    Examples:
      >>> from dpfl_jax.models import build_by_name
      >>> from dpfl_jax.task import Task
      >>> task = Task("classes", input_shape=(4,), classes=3)
      >>> build_by_name("mlp", task, {"hidden": [8]}).num_params
      67
    """
    shape, classes = task.input_shape, task.classes
    fitting: dict[str, Any] = {}
    if task.kind == "preferences":
        raise BadInputError(
            "the data are preference pairs, which central runs of a transformer learn from: set "
            "model.kind=transformer and model.dpo.beta=0.1, or read other columns"
        )
    if task.kind == "tokens":
        fitting["transformer"] = lambda size="tiny", **more: LanguageModel(
            transformer_config(
                size,
                **{"vocab_size": task.vocab_size, "bos_id": task.bos_id, "max_seq_len": shape[0]}
                | more,
            )
        )
    elif task.vocab_size:
        fitting["lstm"] = lambda **more: StackedLSTM(task.vocab_size, shape[0], **more)
    elif task.kind == "classes":
        fitting["mlp"] = lambda **more: MLP(shape, classes, **more)
        fitting["linear"] = lambda **more: MLP(shape, classes, hidden=(), **more)
        if classes == 2 and len(shape) == 1:
            fitting["logistic"] = lambda **more: LogisticRegression(shape[0], **more)
            fitting["linear"] = fitting["logistic"]
        if len(shape) > 1:
            fitting["cnn"] = lambda **more: LeafCNN(classes, input_shape=shape, **more)
            fitting["small_cnn"] = lambda **more: SmallCNN(classes, shape, **more)
    else:
        fitting["mlp"] = lambda **more: RegressionMLP(shape, **more)
        if len(shape) == 1:
            fitting["linear"] = lambda **more: LinearRegression(shape[0], **more)
    if kind not in fitting:
        learned = f"{classes} classes" if classes else task.kind
        raise BadInputError(
            f"model.kind={kind} does not fit these data ({learned}, inputs of shape "
            f"{list(shape)}): use {' or '.join(fitting)}"
        )
    try:
        return fitting[kind](**options)
    except TypeError as error:
        raise BadInputError(f"model.options do not fit model.kind={kind}: {error}") from None
