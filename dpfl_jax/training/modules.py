"""Models of other libraries and of ``model.module`` as named arrays, and losses by name."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax.config.schema import ModelConfig
from dpfl_jax.data import Store
from dpfl_jax.data.owners import grouped_by_owner_set
from dpfl_jax.errors import BadInputError, imported, one_of, repeated
from dpfl_jax.models.small import Classifier, LogisticRegression, cross_entropy
from dpfl_jax.randomness import key_argument, with_any_key
from dpfl_jax.task import Task

PyTree = Any
_STATISTICS = (
    "the model keeps statistics of its batches (BatchNorm), which mix people and are not private: "
)
_FROZEN_NNX = (
    "train dpfl_jax.without_batch_norm(module), or, if its statistics are of public data, freeze "
    "them by module.eval()"
)
_FROZEN_LINEN = (
    "if they are of public data, freeze them: give variables['params'] alone, and as the loss one "
    "of model.apply({'params': params, 'batch_stats': statistics}, x) with "
    "use_running_average=True; else replace BatchNorm by LayerNorm, or by GroupNorm on x[None] "
    "(Flax takes the first axis for the batch)"
)


class Functional(NamedTuple):
    """A model, split into arrays and a function that rebuilds it.

    Attributes:
      params: what can be trained: a pytree of arrays.
      rebuild: makes the model of such a pytree; also inside ``jit``.
      is_module: whether the model is an object that holds its parameters.
    """

    params: PyTree
    rebuild: Callable[[PyTree], Any]
    is_module: bool


def functional(model: Any) -> Functional:
    """Splits a model into trainable arrays and a function that rebuilds it from them.

    Args:
      model: a Flax NNX module (its ``Param`` are trained), an Equinox module (its arrays of floats
        are trained), or a pytree of arrays, which stays as it is. Parameters of a module get names
        such as ``layers/0/kernel``.

    Raises:
      BadInputError: an NNX module changes as it computes (batch statistics that are not frozen, or
        dropout that holds its random state), or variables of a Linen module have batch statistics.

    Examples:
      >>> from flax import nnx
      >>> import dpfl_jax as dpfl
      >>> params, rebuild, is_module = dpfl.functional(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> rebuild(params).kernel.shape, is_module
      ((2, 3), True)
    """
    homes = {c.__module__.partition(".")[0] for c in type(model).__mro__}
    if "equinox" in homes:
        import equinox

        arrays, rest = equinox.partition(model, equinox.is_inexact_array)
        params, together = _named(arrays)
        return Functional(params, lambda p: equinox.combine(together(p), rest), True)
    if "flax" in homes:
        from flax import nnx

        if isinstance(model, nnx.Module):
            _check_nnx(model)
            parts: Any = nnx.split(model, nnx.Param, ...)
            graph, state, rest = parts
            params, together = _named(state)

            def rebuild(p: PyTree) -> Any:
                # Other variables are copied, so that a module that is used later changes no other.
                return nnx.merge(graph, together(p), jax.tree.map(lambda x: x, rest))

            return Functional(params, rebuild, True)
    if "torch" in homes:
        raise BadInputError("this is a PyTorch module: its JAX form, or a checkpoint, is needed")
    if any(map(_is_module, jax.tree.leaves(model, is_leaf=_is_module))):
        raise BadInputError(
            "the parameters are a collection of modules: make them the attributes of one module"
        )
    if isinstance(model, Mapping) and {"params", "batch_stats"} <= set(model):
        raise BadInputError(_STATISTICS + _FROZEN_LINEN)
    return Functional(model, lambda p: p, False)


def _is_module(node: Any) -> bool:
    names = {f"{c.__module__}.{c.__name__}" for c in type(node).__mro__}
    return bool(names & {"flax.nnx.pytreelib.Pytree", "flax.nnx.module.Module"}) or any(
        name.startswith("equinox.") and name.endswith(".Module") for name in names
    )


def _named(tree: PyTree) -> tuple[dict[str, jax.Array], Callable[[dict[str, Any]], PyTree]]:
    """Leaves by name (files keep dictionaries), and the function that restores the tree."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = []
    for path, _ in paths:
        parts = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
        names.append("/".join(parts[:-1] if len(parts) > 1 and parts[-1] == "value" else parts))
    twice = repeated(names)
    if twice is not None:
        raise BadInputError(f"the model has two parameters called {twice!r}: rename one")
    leaves = dict(zip(names, (leaf for _, leaf in paths), strict=True))
    return leaves, lambda p: jax.tree.unflatten(treedef, [p[name] for name in names])


def _check_nnx(model: Any) -> None:
    from flax import nnx

    modules = [m for _, m in nnx.iter_graph(model) if isinstance(m, nnx.Module)]
    for module in modules:
        kept = any(isinstance(held, nnx.BatchStat) for held in vars(module).values())
        if kept and not getattr(module, "use_running_average", False):
            raise BadInputError(_STATISTICS + _FROZEN_NNX)
    draws = [m for m in modules if isinstance(m, nnx.Dropout)]
    if any(m.rate > 0 and not m.deterministic and m.rngs is not None for m in draws):
        raise BadInputError(
            "the model's dropout holds its random state, which would be the same at every step: "
            "call model.eval(), or make it without rngs and pass the key in the loss: "
            "loss(model, example, rng) with model(x, rngs=nnx.Rngs(dropout=rng))"
        )


LOSSES = ("causal_lm", "classification", "regression")


def named_loss(name: str, params: Any, model: Any = None) -> Callable[[Any, Any], jax.Array]:
    """Returns a common loss of one example.

    Args:
      name: ``"classification"``: cross-entropy of logits and ``label``; ``"regression"``: half the
        squared error, of one number and ``label``; ``"causal_lm"``: mean cross-entropy of the real
        tokens after the first, in nats.
      params: a module, or parameters of ``model``.
      model: if ``params`` are not a module: a Linen module, a Haiku transform, or a function
        ``(params, x)``. It takes one ``x`` (or ``tokens``), without a leading axis.

    Raises:
      BadInputError: there is no such loss, or no model.
    """
    one_of("loss_fn", name, LOSSES, "or give a function (params, example)")
    forward = forward_of(params, model, name)

    def classification(params: Any, example: Any) -> jax.Array:
        logits = forward(params, example["x"])
        if logits.ndim != 1:
            raise BadInputError(
                f"the model gives {logits.shape} for one x, but a classifier gives one number for "
                "each class: it takes x without a leading axis"
            )
        return cross_entropy(logits, example["label"])

    def regression(params: Any, example: Any) -> jax.Array:
        predicted = forward(params, example["x"]).reshape(()).astype(jnp.float32)
        return jnp.square(predicted - example["label"]) / 2

    def causal_lm(params: Any, example: Any) -> jax.Array:
        tokens, mask = example["tokens"], example["mask"][1:]
        logits = forward(params, tokens)
        losses = jax.vmap(cross_entropy)(logits[:-1], tokens[1:])
        return jnp.where(mask, losses, 0.0).sum() / jnp.maximum(mask.sum(), 1)

    made = {"classification": classification, "regression": regression, "causal_lm": causal_lm}
    return made[name]


def number_of_classes(loss_fn: Any, params: Any, model: Any, example: Any) -> int | None:
    """The number of classes of a loss; None if it is not a classification, or unknown.

    Arguments as in ``fit``; ``example`` is one example of the data.
    """
    owner = getattr(loss_fn, "__self__", None)
    if isinstance(owner, LogisticRegression):
        return 2
    forward: Callable[[Any, Any], Any]
    if isinstance(owner, Classifier):
        forward = owner.outputs
    elif loss_fn == "classification":
        forward = forward_of(params, model, loss_fn)
    else:
        return None
    arrays, rebuild, _ = functional(params)
    logits = jax.eval_shape(lambda p, x: forward(rebuild(p), x), arrays, example["x"])
    return int(logits.shape[-1]) if getattr(logits, "ndim", 0) == 1 else None


def of_arrays(loss_fn: Callable[..., jax.Array], rebuild: Callable[[PyTree], Any]) -> Any:
    """Turns a loss of a module into a loss of its arrays, with the same further arguments."""

    @functools.wraps(loss_fn)
    def loss(params: PyTree, *args: Any, **kwargs: Any) -> jax.Array:
        return loss_fn(rebuild(params), *args, **kwargs)

    return loss


def forward_of(params: Any, model: Any, name: str = "") -> Callable[[Any, Any], Any]:
    """``(params, x) -> outputs`` of a module or ``model``; ``name``: its loss, for the error."""
    if model is None:
        if not functional(params).is_module:
            raise BadInputError(
                f"the loss {name!r} needs model=: a Linen module, a Haiku transform or a function "
                "(params, x); or give an NNX or Equinox module as the parameters"
            )
        return lambda module, x: module(x)
    if not hasattr(model, "apply"):
        return model
    if hasattr(model, "init_with_output"):  # Linen
        if isinstance(params, dict) and set(params) - {"params"} and "params" in params:
            raise BadInputError(
                "the model has variables besides its parameters "
                f"({sorted(set(params) - {'params'})}), which no private step may change: "
                f"{_FROZEN_LINEN}"
            )
        if isinstance(params, dict) and set(params) == {"params"}:
            return model.apply
        return lambda params, x: model.apply({"params": params}, x)
    keyed = "rng" in inspect.signature(model.apply).parameters
    return lambda params, x: model.apply(params, None, x) if keyed else model.apply(params, x)


def check_one_example(loss_fn: Callable[..., Any], params: PyTree, example: PyTree) -> None:
    """Raises BadInputError unless the loss of one example is one number with a gradient."""
    if not jax.tree.leaves(params):
        raise BadInputError("the parameters hold no array: give those of the model's init")
    try:
        value = jax.eval_shape(loss_fn, params, example)
        if not isinstance(value, jax.ShapeDtypeStruct):
            raise BadInputError(
                f"the loss of one example must be one number, but it is a {type(value).__name__}: "
                "return the number alone (no auxiliary output)"
            )
        shape = value.shape
        if shape != ():
            raise BadInputError(
                f"the loss of one example must be one number, but it has shape {shape}: sum it, or "
                "take its mean"
            )
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise BadInputError(
                f"the loss of one example is {value.dtype}, which has no gradient: it must be a "
                "floating-point number"
            )
        return
    except BadInputError:
        raise
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as early:
        raise BadInputError(
            f"the loss cannot be traced by JAX: it asks for a value before there is one "
            f"({str(early).splitlines()[0]}): use jnp, jnp.where and jax.lax.cond instead of "
            "NumPy, float() and if"
        ) from early
    except KeyError as missing:
        if not isinstance(example, Mapping) or missing.args[0] in example:
            raise
        raise BadInputError(
            f"the loss asks for {missing.args[0]!r}, which neither an example "
            f"({', '.join(example)}) nor the parameters have"
        ) from missing
    except Exception as failed:  # whatever the user's code raises; raised again below
        error = failed
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), example)
    try:
        jax.eval_shape(loss_fn, params, batch)
    except Exception:  # the leading axis is not the cause: the first error says what is
        raise error from None
    raise BadInputError(
        "the loss takes a batch of examples, but it must take one example, whose arrays have no "
        "leading axis (it is mapped over examples, which keeps people apart): leave the batch out, "
        "or give `lambda params, x: loss(params, jax.tree.map(lambda a: a[None], x))`"
    ) from error


# ---- models that `model.module` names ------------------------------------------------------------

_LOSSES = {"tokens": "causal_lm", "classes": "classification", "regression": "regression"}


class UserModel:
    """A model that a function of the user builds, with the interface of the library's models.

    Attributes:
      loss: ``(params, example) -> scalar`` for ONE example.
      predict: ``(params, x) -> class``, an int scalar; None if there are no classes, or the user
        gave the loss.
      num_params: number of values in all parameters.
    """

    loss: Callable[..., jax.Array]
    predict: Callable[[PyTree, jax.Array], jax.Array] | None = None

    def __init__(self, section: ModelConfig, task: Task, store: Store, init_seed: int) -> None:
        """Calls ``build(task, key, **options)``, which ``model.module`` names.

        It returns an NNX or Equinox module, which gets the loss of the task; or a pair: a Linen
        module or Haiku transform and its parameters, or ``loss(params, example)`` and parameters
        (or a module).

        Args:
          section: names the function and its options.
          task: shapes and classes of the data.
          store: the data; the loss is tried on the first example.
          init_seed: seed of the initial parameters.

        Raises:
          BadInputError: there is no such function, it takes other arguments or fails, or what it
            returns cannot be trained on these data.
        """
        place, key = str(section.module), jax.random.key(init_seed)
        build = imported(place, "model.module")
        model, params = built(build, place, task, section.options, key)
        first = store.read(np.asarray(grouped_by_owner_set(store).user_offsets)[:1])
        example = jax.tree.map(lambda x: x[0], first)
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

    def init(self, key: jax.Array) -> PyTree:
        """The parameters as they were built; ``key`` is ignored, as ``build`` already had one."""
        del key
        return self._params


def built(
    build: Callable[..., Any], place: str, task: Task, options: Mapping[str, Any], key: jax.Array
) -> tuple[Any, Any]:
    """Calls ``build``; returns (a loss or a model, or None for a module) and parameters.

    Raises:
      BadInputError: the call fails, or returns something else (see ``UserModel``).
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


def _parts(made: Any) -> tuple[Any, Any]:
    """(a loss, a model, or None for a module; parameters)."""
    pair = isinstance(made, tuple) and len(made) == 2
    if pair and callable(getattr(made[0], "apply", made[0])):
        return made
    if functional(made).is_module:
        return None, made
    raise BadInputError(
        f"it returns {type(made).__name__}: return an NNX or Equinox module, or a pair: (model, "
        "params) of a Linen module or Haiku transform, or (loss, params) with loss(params, example)"
    )
