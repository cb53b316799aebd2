"""What is learned from a data set's examples; public, and all that a model must know of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

# What makes a unit where no column names users: guarantees are then said to be "for each row".
EACH_ROW = "row, which counts as a user"
# Names of models (dpfl_jax.models.by_name), here so that a configuration is read without JAX.
ModelKind = Literal["transformer", "lstm", "cnn", "small_cnn", "mlp", "logistic", "linear"]


@dataclasses.dataclass(frozen=True)
class Task:
    """The kind of examples.

    Attributes:
      kind: ``"tokens"``: each next one, of ``{"tokens", "mask"}``. ``"classes"``: ``label``, an int
        below ``classes``, from ``x``. ``"regression"``: ``label``, a number, from ``x``.
        ``"preferences"``: which of two sequences, ``{"tokens", "mask"}`` [2, length], is the first.
      input_shape: of one ``x``, or of one example's tokens.
      classes: number of classes; 0 if there are none.
      vocab_size: token ids (in ``tokens``, or in ``x``) are below it; 0 if x holds numbers.
      bos_id: the id that begins a sequence of tokens.
      scaled: numbers are of order 1, by constants that were known without these data.
    """

    kind: Literal["tokens", "classes", "regression", "preferences"]
    input_shape: tuple[int, ...] = ()
    classes: int = 0
    vocab_size: int = 0
    bos_id: int = 1
    scaled: bool = True

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Task:
        """From plain JSON, as ``dataclasses.asdict`` makes it."""
        return cls(**{**plain, "input_shape": tuple(plain["input_shape"])})


def takes_segments(loss_fn: Any) -> Any:
    """Marks a loss that computes the *sum* of several examples' losses, packed in one row.

    Such a row has ``segments``, int [length]: which example each token belongs to, 0 for none. It
    has no key: what the loss draws at random, if anything, must not matter. What wraps the loss is
    another one, and is not marked by it.
    """
    loss_fn.takes_segments = loss_fn
    return loss_fn


def is_marked(loss_fn: Any) -> bool:
    """Whether ``takes_segments`` marked this very loss."""
    return getattr(loss_fn, "takes_segments", None) is getattr(loss_fn, "__func__", loss_fn)
