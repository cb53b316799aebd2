"""Where activations lie when parameters are split over devices: with the example they belong to.

Left to itself, the compiler may follow the parameters instead, give every device a slice of each
layer of *all* examples, and send activations rather than parameters. A caller who knows the mesh
says so here; the model only names what it computes.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import jax

Pin = Callable[[jax.Array], jax.Array]
_PIN: contextvars.ContextVar[Pin | None] = contextvars.ContextVar("pin", default=None)


@contextlib.contextmanager
def activations_pinned(pin: Pin) -> Iterator[None]:
    """Applies ``pin`` to every activation that a model traced inside passes to ``pinned``."""
    token = _PIN.set(pin)
    try:
        yield
    finally:
        _PIN.reset(token)


def pinned(x: jax.Array) -> jax.Array:
    """An activation, kept where its example is if somebody asked for that."""
    pin = _PIN.get()
    return x if pin is None else pin(x)
