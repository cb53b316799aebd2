"""Replaces batch normalisation, which mixes examples, by group normalisation."""

from __future__ import annotations

import operator
from typing import Any

import jax
from flax import nnx

from dpfl_jax.errors import BadInputError


class _GroupNorm(nnx.GroupNorm):
    """Group normalisation of one example: ``nnx.GroupNorm`` takes the first axis for the batch."""

    def __call__(
        self, x: Any, use_running_average: bool | None = None, *, mask: Any = None
    ) -> jax.Array:
        del use_running_average  # an argument of BatchNorm
        return super().__call__(x[None], mask=None if mask is None else mask[None])[0]


def without_batch_norm(module: Any) -> Any:
    """Returns a copy of a Flax NNX module with group normalisation in place of BatchNorm.

    There are at most 32 groups, each of at least four channels; scales and biases stay, with their
    names. Like all models that ``fit`` trains, it takes one example without a leading axis.

    Args:
      module: the module, which is not changed.

    Raises:
      BadInputError: the module is of another library, is a BatchNorm itself, or normalises another
        axis than the last.

    Examples:
      >>> from flax import nnx
      >>> import dpfl_jax as dpfl
      >>> rngs = nnx.Rngs(0)
      >>> net = nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs))
      >>> net = dpfl.without_batch_norm(net)
      >>> any(isinstance(layer, nnx.BatchNorm) for layer in net.layers)
      False
    """
    if not isinstance(module, nnx.Module) or isinstance(module, nnx.BatchNorm):
        raise BadInputError(
            f"without_batch_norm takes a Flax NNX module that has layers, not "
            f"{type(module).__name__}: in other modules, replace BatchNorm by LayerNorm, or by a "
            "GroupNorm on x[None] (Flax takes the first axis for the batch)"
        )
    copy = nnx.clone(module)
    for _, node in list(nnx.iter_graph(copy)):
        if isinstance(node, nnx.Module):
            for name, layer in list(vars(node).items()):
                if isinstance(layer, nnx.BatchNorm):
                    # In lists of Flax 0.12.3, attributes are numbers.
                    put = setattr if isinstance(name, str) else operator.setitem
                    put(node, name, _of_groups(layer))
    return copy


def _of_groups(layer: nnx.BatchNorm) -> nnx.GroupNorm:
    channels = layer.num_features
    if layer.axis not in (-1, None):
        raise BadInputError(
            f"a BatchNorm of the module normalises axis {layer.axis}: GroupNorm takes the last"
        )
    fitting = (n for n in range(min(32, channels // 4), 0, -1) if channels % n == 0)
    made = _GroupNorm(
        channels,
        next(fitting, 1),
        epsilon=layer.epsilon,
        dtype=layer.dtype,
        param_dtype=layer.param_dtype,
        use_bias=layer.use_bias,
        use_scale=layer.use_scale,
        rngs=nnx.Rngs(0),
    )
    made.scale, made.bias = layer.scale, layer.bias
    return made
