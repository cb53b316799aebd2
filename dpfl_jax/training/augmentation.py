"""Several augmented copies of an image in one loss, before its gradient's norm is taken.

De et al. 2022 (arXiv 2204.13650, "augmentation multiplicity"): the gradients of the copies are
averaged and then clipped, so that one person moves the sum as far as without copies. The guarantee
is the same; computing costs as many times as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dpfl_jax.config.schema import AugmentationConfig, ModelConfig
from dpfl_jax.errors import BadInputError, at_least
from dpfl_jax.randomness import key_argument
from dpfl_jax.task import Task

PyTree = Any


def augmented(
    loss_fn: Callable[..., jax.Array], *, copies: int, shift: int = 0, flip: bool = False
) -> Callable[..., jax.Array]:
    """A loss that is, in training, the mean of ``loss_fn`` over augmented copies of an example.

    Where the loss gets a key (``fit`` gives each example of each step its own) every copy is
    moved and mirrored at random. Evaluation gives none: the example is taken as it is.

    Args:
      loss_fn: ``(params, example) -> scalar`` of one example whose ``x`` is an image, [height,
        width] or [height, width, colours]; it may take ``rng`` or ``key``.
      copies: K.
      shift: most pixels up or down, left or right; what comes in is the image's mirror image.
      flip: whether half of the copies are mirrored from left to right.

    Raises:
      BadInputError: nothing would be changed; or, when the loss is traced, ``x`` is no image, or
        smaller than the shift.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.training import augmented
      >>> loss = augmented(lambda w, example: (example["x"] * w).sum(), copies=4, shift=1)
      >>> image = {"x": jnp.eye(3)}
      >>> float(loss(jnp.eye(3), image)), loss(jnp.eye(3), image, rng=jax.random.key(0)).shape
      (3.0, ())
    """
    at_least("augmentation: copies", copies, 1)
    at_least("augmentation: shift", shift, 0)
    if not (shift or flip):
        raise BadInputError("augmentation changes nothing: set its shift or its flip")
    inner = key_argument(loss_fn)

    def loss(params: PyTree, example: PyTree, rng: jax.Array | None = None) -> jax.Array:
        if rng is None:
            return loss_fn(params, example)

        def of_copy(key: jax.Array) -> jax.Array:
            ours, theirs = jax.random.split(key)
            copy = {**example, "x": _changed(example["x"], ours, shift, flip)}
            return loss_fn(params, copy, **({} if inner is None else {inner: theirs}))

        return jax.vmap(of_copy)(jax.random.split(rng, copies)).mean()

    return loss


def _changed(x: jax.Array, key: jax.Array, shift: int, flip: bool) -> jax.Array:
    """An image, moved and mirrored at random."""
    if x.ndim not in (2, 3) or min(x.shape[:2]) <= shift:
        raise BadInputError(
            f"augmentation moves images [height, width] or [height, width, colours] of more than "
            f"{shift} pixels on a side, but the examples' x has the shape {list(x.shape)}"
        )
    place, side = jax.random.split(key)
    rest = [(0, 0)] * (x.ndim - 2)
    room = jnp.pad(x, [(shift, shift), (shift, shift), *rest], mode="reflect")
    starts = jax.random.randint(place, (2,), 0, 2 * shift + 1)
    moved = jax.lax.dynamic_slice(room, [*starts, *(0 for _ in rest)], x.shape)
    if not flip:
        return moved
    return jnp.where(jax.random.bernoulli(side), moved[:, ::-1], moved)


class Augmented:
    """A model that is trained with the loss of copies, and is otherwise as it was."""

    def __init__(self, model: Any, section: AugmentationConfig) -> None:
        self._model = model
        self.loss = augmented(model.loss, **section.model_dump())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def with_augmentation(model: Any, section: ModelConfig, task: Task) -> Any:
    """The model of a section, with its augmentation if it has one.

    Raises:
      BadInputError: the data are no images.
    """
    if section.augmentation is None:
        return model
    if task.kind == "tokens" or task.vocab_size or len(task.input_shape) not in (2, 3):
        raise BadInputError(
            "model.augmentation moves and mirrors images, which these data are not: remove it"
        )
    return Augmented(model, section.augmentation)
