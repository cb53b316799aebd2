"""Averages of the iterates, in which the noise of the last steps partly cancels.

The average is a function of models that already have noise (post-processing), so it costs no
privacy. It costs memory: one more copy of the trained parameters, in float32 and split over the
devices like them.

``ema`` is the exponential moving average (De et al. 2022, "Unlocking high-accuracy differentially
private image classification through scale", section 3.3). A fixed decay would weigh the first model
too much in a short run. So the average is warmed up: its decay after step t is (t - 1) / (t + 9)
until it reaches the requested decay. This is the polynomial-decay average of Shamir and Zhang
(2013, section 4) with eta = 9, which spans about the last tenth of the steps. The first model has
no weight, so there is no bias to correct.

``tail`` is the plain mean over the second half of the steps (Rakhlin, Shamir and Sridharan 2012,
"alpha-suffix averaging" with alpha = 1/2); until then it is the last iterate.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

PyTree = Any
Average = Literal["none", "ema", "tail"]
_ETA = 9


def newest_weight(average: Average, decay: float, step: int, steps: int) -> float:
    """The weight of the newest iterate in the average after ``step`` of ``steps`` steps."""
    if average == "ema":
        return max(1 - decay, (1 + _ETA) / (step + _ETA))
    return 1 / max(step - steps // 2, 1)


@jax.jit
def started(params: PyTree) -> PyTree:
    """The average before the first step: a copy of the parameters, in float32 or wider."""
    return jax.tree.map(lambda p: jnp.array(p, _wide(p), copy=True), params)


@functools.partial(jax.jit, donate_argnums=0)
def moved(averaged: PyTree, params: PyTree, weight: float) -> PyTree:
    """The average with another iterate, of weight ``weight``; ``averaged`` is donated."""
    return jax.tree.map(
        lambda a, p: (1 - weight) * a + weight * p.astype(a.dtype), averaged, params
    )


def as_params(averaged: PyTree, params: PyTree) -> PyTree:
    """The average, cast to the dtypes of the parameters."""
    return jax.tree.map(lambda a, p: a.astype(p.dtype), averaged, params)


def _wide(p: jax.Array) -> jnp.dtype:
    return jnp.promote_types(p.dtype, jnp.float32)
