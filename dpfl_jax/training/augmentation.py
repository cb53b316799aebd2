"""Augmentation: the loss of an image is the mean over several augmented copies of it.

De et al. 2022 (arXiv 2204.13650, "augmentation multiplicity"): the gradients of the copies are
averaged and then clipped, so that a person moves the sum as far as without copies. The guarantee
is the same; computing costs K times as much with K copies.
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
    """Makes a loss that is, in training, the mean of ``loss_fn`` over copies of an example.

    In training ``fit`` gives the loss a key for each example and step, by which every copy is
    shifted and mirrored at random. Evaluation gives no key: the example is taken as it is.

    Args:
      loss_fn: ``(params, example) -> scalar`` of one example whose ``x`` is an image, [height,
        width] or [height, width, colours]; it may take ``rng`` or ``key``.
      copies: number K of copies.
      shift: largest shift in pixels, up or down and left or right; borders are reflected.
      flip: whether half of the copies are mirrored from left to right.

    Raises:
      BadInputError: no augmentation is set; or, when the loss is traced, ``x`` is not an image, or
        is smaller than the shift.

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
    """Shifts and mirrors an image at random."""
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
    """A model with another ``loss``, over augmented copies; all else is the model's."""

    def __init__(self, model: Any, section: AugmentationConfig) -> None:
        self._model = model
        self.loss = augmented(model.loss, **section.model_dump())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def with_augmentation(model: Any, section: ModelConfig, task: Task) -> Any:
    """Adds the augmentation of a model's section, if it has one, to the model.

    Raises:
      BadInputError: the data are not images.
    """
    if section.augmentation is None:
        return model
    if not task.has_images:
        raise BadInputError(
            "model.augmentation is for images, and these data are not images: remove it"
        )
    return Augmented(model, section.augmentation)
