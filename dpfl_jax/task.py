"""What is learned from a data set: public facts, and all that a model must know of the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

# The unit key where no column names users: guarantees are then "for each row".
EACH_ROW = "row, which counts as a user"
# Models of ``dpfl_jax.models.by_name``; here, so that configurations are read without JAX.
ModelKind = Literal["transformer", "lstm", "cnn", "small_cnn", "mlp", "logistic", "linear"]


@dataclasses.dataclass(frozen=True)
class Table:
    """Which columns of a table are learned from, and how their cells become numbers.

    All of it is public: the header of the files, and what was declared without looking at rows. An
    exported model holds it, so that new rows are read as in training.

    Attributes:
      inputs: columns that ``x`` is made of, in this order.
      target: column of ``label``.
      scale: by column, (middle, half width), which become 0 and 1.
      categories: by column, its words: an input has a number for each, 1 for the word in the cell;
        of the target they are the classes.
      missing: columns whose cells may be empty: an empty cell counts as the middle of the scale,
        or as none of the words.
      dates: by column, how dates that are text are written (``strptime``). All dates become years
        since 2000.
      decimal: point or comma, the decimal separator of numbers that are text.
    """

    inputs: tuple[str, ...]
    target: str
    scale: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict, hash=False)
    categories: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict, hash=False)
    missing: tuple[str, ...] = ()
    dates: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)
    decimal: str = "point"

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Table:
        """From plain JSON, as ``dataclasses.asdict`` makes it."""
        lists = {name: tuple(plain[name]) for name in ("inputs", "missing")}
        pairs = {
            name: {column: tuple(values) for column, values in plain[name].items()}
            for name in ("scale", "categories")
        }
        return cls(**{**plain, **lists, **pairs})


@dataclasses.dataclass(frozen=True)
class Task:
    """The kind of examples of a data set.

    Attributes:
      kind: ``"tokens"``: the next token, from ``{"tokens", "mask"}``. ``"classes"``: ``label``, an
        int below ``classes``, from ``x``. ``"regression"``: ``label``, a number, from ``x``.
        ``"preferences"``: which of two sequences, ``{"tokens", "mask"}`` [2, length], is the first.
      input_shape: of one ``x``, or of one example's tokens.
      classes: number of classes; 0 if there are none.
      vocab_size: token ids (in ``tokens``, or in ``x``) are below it; 0 if x holds numbers.
      bos_id: the id that a model prepends to a sequence of tokens; None: it prepends nothing.
      scaled: whether numbers are of order 1, by constants that were known without these data.
      table: what ``x`` and ``label`` were read from; None for other data.
    """

    kind: Literal["tokens", "classes", "regression", "preferences"]
    input_shape: tuple[int, ...] = ()
    classes: int = 0
    vocab_size: int = 0
    bos_id: int | None = 1
    scaled: bool = True
    table: Table | None = None

    @property
    def has_images(self) -> bool:
        """Whether ``x`` is an image of numbers, [height, width] or [height, width, colours]."""
        return not self.vocab_size and self.kind != "tokens" and len(self.input_shape) in (2, 3)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Task:
        """From plain JSON, as ``dataclasses.asdict`` makes it."""
        table = None if plain.get("table") is None else Table.from_json(plain["table"])
        return cls(**{**plain, "input_shape": tuple(plain["input_shape"]), "table": table})


def takes_segments(loss_fn: Any) -> Any:
    """Marks a loss that computes the *sum* of the losses of several examples packed in one row.

    Such a row has ``segments``, int [length]: the example of each token, 0 for none. The loss gets
    no key for random numbers. A function that wraps the loss is not marked.
    """
    loss_fn.takes_segments = loss_fn
    return loss_fn


def handles_segments(loss_fn: Any) -> bool:
    """Whether ``takes_segments`` marked this very loss."""
    return getattr(loss_fn, "takes_segments", None) is getattr(loss_fn, "__func__", loss_fn)
