"""Keys for losses that draw at random in training (dropout, augmentation).

Each example has a key at each step, ``fold_in(the step's key, place)``, with ``place`` the
example's position in the store. It does not depend on devices, processes, microbatches and the
order of units, and noise and sampling never share it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey

if TYPE_CHECKING:
    import jax

PyTree = Any
PURPOSE = "loss"


def key_argument(loss_fn: Callable[..., Any], *, needed_without: str | None = None) -> str | None:
    """The name under which a loss takes a key: ``rng`` or ``key``; None if it takes none.

    Only arguments after (params, example) count, without a default or with the default None.

    Raises:
      BadInputError: the key has no default, and ``needed_without`` says where there is none.
    """
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())[2:]
    except (TypeError, ValueError):  # a callable without a signature
        return None
    for p in parameters:
        if p.name not in ("rng", "key") or p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            continue
        if p.default is p.empty and needed_without is not None:
            raise BadInputError(
                f"the loss needs its argument `{p.name}`, but {needed_without} is without "
                f"randomness: give it the default None, and leave dropout out there"
            )
        if p.default is p.empty or p.default is None:
            return p.name
    return None


def example_keys(root: RootKey, counters: tuple[int, ...], places: np.ndarray) -> np.ndarray:
    """What ``keyed`` derives the examples' keys from, uint32 [..., 3].

    They are the step's key ``root.jax("loss", *counters)``, and the place: ``places`` are int64
    [...], positions in the store (of padding: any).
    """
    words = root.threefry(PURPOSE, *counters)
    out = np.empty((*places.shape, 3), np.uint32)
    out[..., :2] = words
    out[..., 2] = places.astype(np.uint32)  # modulo 2^32
    return out


def with_keys(examples: PyTree, keys: Any) -> PyTree:
    """Examples with their ``example_keys``, as a ``keyed`` loss takes them."""
    return {"example": examples, "key": keys}


def keyed(loss_fn: Callable[..., jax.Array], name: str) -> Callable[..., jax.Array]:
    """A loss of examples ``with_keys``; each example's key is its argument ``name``."""
    import jax

    def loss(params: PyTree, example: PyTree, **kwargs: Any) -> jax.Array:
        step = jax.random.wrap_key_data(example["key"][:2], impl="threefry2x32")
        key = jax.random.fold_in(step, example["key"][2])
        return loss_fn(params, example["example"], **kwargs, **{name: key})

    return loss


def with_any_key(loss_fn: Callable[..., jax.Array], name: str | None) -> Callable[..., jax.Array]:
    """A loss ``(params, example)`` for tracing only: its ``key_argument`` is filled in."""
    import jax

    return loss_fn if name is None else functools.partial(loss_fn, **{name: jax.random.key(0)})
