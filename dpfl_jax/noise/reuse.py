"""Refuses a second release under one noise key.

The difference of two such releases has no noise: it is that of their clipped sums. In a run
of ``fit`` each step has one release. A loop of one's own may have two losses (a GAN) or take a
second gradient at another point (SAM), and then use the key of its batch twice.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from dpfl_jax.errors import BadInputError

PyTree = Any
ONE_RELEASE = (
    "it is for one release, and the difference of two would show the sums without noise: add the "
    "losses up to one, or make a plan of a step for each release and take a batch for each"
)


class OnceState(NamedTuple):
    """What ``once`` knows between steps.

    Attributes:
      noise: the state of the noise itself.
      next: uint32 scalar, the step after the last one that was released.
      run: uint32 [2], the run of that step.
    """

    noise: PyTree
    next: jax.Array | np.ndarray
    run: jax.Array | np.ndarray


# Keys that were used for a release, by identity: tracers have no value to compare, and one array
# may be given to two transformations.
_used: dict[int, weakref.ref[Any]] = {}


def once(noise: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Adds noise as ``noise`` does, and refuses a noise key that it is given again.

    Args:
      noise: whose ``noise_key`` ends with its step and two words of its run (``Plan.noise_key``),
        and whose gradient is NaN where ``refused``.

    Returns:
      As ``noise``, with ``OnceState``. If the state has released this step, or a later one, of the
      same run, the gradient is NaN under ``jit``, and BadInputError is raised outside. It is raised
      if one array is given twice, also one of a function that is traced, and outside ``jit`` if the
      same words are, in whatever array. With a state from before the first release, a key is not
      seen that is given twice to a compiled function, by ``vmap``, ``scan`` or ``lax.map``, or as
      copies that a compiled function makes.
    """
    words: set[int] = set()  # of this transformation: under a public seed a loop may run again

    def init(params: PyTree) -> OnceState:
        return OnceState(noise.init(params), np.zeros((), np.uint32), np.zeros(2, np.uint32))

    def update(
        total: PyTree,
        state: OnceState,
        params: PyTree | None = None,
        *,
        noise_key: jax.Array,
        **others: Any,
    ) -> tuple[PyTree, OnceState]:
        step, run = noise_key[-3], noise_key[-2:]
        again = (step < state.next) & (run == state.run).all()
        known = not isinstance(again, jax.core.Tracer)
        value = None
        if not isinstance(noise_key, jax.core.Tracer):
            value = hash(np.asarray(noise_key).tobytes())
        used = _used.get(id(noise_key))
        same = (used is not None and used() is noise_key) or value in words
        if same or (known and bool(again)):
            which = "a noise key" if isinstance(step, jax.core.Tracer) else f"that of step {step}"
            raise BadInputError(f"noise.update: {which} is given a second time, but {ONE_RELEASE}")
        others = {**others, "noise_key": noise_key, "refused": again}
        gradient, inner = noise.update(total, state.noise, params, **others)
        if value is not None:
            words.add(value)
        name = id(noise_key)
        _used[name] = weakref.ref(noise_key, lambda _: _used.pop(name, None))
        return gradient, OnceState(inner, step + np.uint32(1), run)

    return optax.GradientTransformationExtraArgs(init, update)
