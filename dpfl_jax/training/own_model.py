"""A model of the user's own package, named in a configuration by ``model.module``."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.config.schema import ModelConfig
from dpfl_jax.data import Store
from dpfl_jax.data.example_keys import key_argument, with_any_key
from dpfl_jax.data.owners import grouped_by_owner_set
from dpfl_jax.errors import BadInputError, imported
from dpfl_jax.task import Task
from dpfl_jax.training.modules import (
    check_one_example,
    forward_of,
    functional,
    named_loss,
    of_arrays,
)

PyTree = Any
_LOSSES = {"tokens": "causal_lm", "classes": "classification", "regression": "regression"}


class OwnModel:
    """What a function of the user's builds, with the face of the library's models.

    Attributes:
      loss: ``(params, example) -> scalar`` for ONE example.
      predict: ``(params, x) -> class``, an int scalar; None if there are no classes, or the loss is
        the user's own.
      num_params: numbers in all parameters.
    """

    loss: Callable[..., jax.Array]
    predict: Callable[[PyTree, jax.Array], jax.Array] | None = None

    def __init__(
        self, place: str, task: Task, options: Mapping[str, Any], key: jax.Array, example: PyTree
    ) -> None:
        """Calls ``build(task, key, **options)``.

        It returns an NNX or Equinox module, whose loss is that of the task; or a pair: a Linen
        module or Haiku transform and its parameters, or ``loss(params, example)`` and parameters
        (or a module).

        Args:
          place: ``package.module:build``.
          task: shapes and classes of the data.
          options: further arguments of the function.
          key: JAX key of the initial parameters.
          example: one of the data, to try the loss on.

        Raises:
          BadInputError: there is no such function, it takes other arguments or fails, or what it
            returns cannot be trained on these data.
        """
        model, params = built(imported(place, "model.module"), place, task, options, key)
        with _naming(place):
            arrays, rebuild, is_module = functional(params)
            loss: Any = model
            if model is None or hasattr(model, "apply"):
                if task.kind not in _LOSSES:
                    raise BadInputError("preference pairs need a loss: return (loss, params)")
                loss = named_loss(_LOSSES[task.kind], params, model)
            if loss is not model and task.kind == "classes":
                forward = forward_of(params, model)
                self.predict = lambda params, x: jnp.argmax(forward(rebuild(params), x))
            self.loss = of_arrays(loss, rebuild) if is_module else loss
            check_one_example(with_any_key(self.loss, key_argument(self.loss)), arrays, example)
        self._params = arrays
        self.num_params = sum(jnp.size(leaf) for leaf in jax.tree.leaves(arrays))

    @classmethod
    def of(cls, section: ModelConfig, task: Task, store: Store, init_seed: int) -> OwnModel:
        """As a configuration names it, for data like those of ``store``."""
        assert section.module is not None
        first = store.read(np.asarray(grouped_by_owner_set(store).user_offsets)[:1])
        example, key = jax.tree.map(lambda x: x[0], first), jax.random.key(init_seed)
        return cls(section.module, task, section.options, key, example)

    def init(self, key: jax.Array) -> PyTree:
        """The parameters as they were built: ``key`` was given to the function."""
        del key
        return self._params


def built(
    build: Callable[..., Any], place: str, task: Task, options: Mapping[str, Any], key: jax.Array
) -> tuple[Any, Any]:
    """(a loss or what computes outputs, or None for a module; parameters) of ``OwnModel``.

    Raises:
      BadInputError: as of ``OwnModel``.
    """
    try:
        inspect.signature(build).bind(task, key, **options)
    except TypeError as error:
        raise BadInputError(
            f"model.module={place} is called as build(task, key, **model.options), which does "
            f"not fit it: {error}"
        ) from None
    with _naming(place):
        return _parts(build(task, key, **options))


@contextlib.contextmanager
def _naming(place: str) -> Iterator[None]:
    """Errors inside name the module that they come from, in one sentence."""
    try:
        yield
    except Exception as error:  # whatever the user's code raises
        name = "" if isinstance(error, BadInputError) else f"{type(error).__name__}: "
        text = " ".join(str(error).split())[:300]
        raise BadInputError(f"model.module={place}: {name}{text}") from error


def _parts(found: Any) -> tuple[Any, Any]:
    """(a loss, a model, or None for a module; parameters)."""
    pair = isinstance(found, tuple) and len(found) == 2
    if pair and callable(getattr(found[0], "apply", found[0])):
        return found
    if functional(found).is_module:
        return None, found
    raise BadInputError(
        f"it returns {type(found).__name__}: return an NNX or Equinox module, or a pair: (model, "
        "params) of a Linen module or Haiku transform, or (loss, params) with loss(params, example)"
    )
