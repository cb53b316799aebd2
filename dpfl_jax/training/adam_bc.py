"""DP-AdamBC: Adam whose second moment is corrected for the noise.

Noise on the mean gradient adds its variance to Adam's second moment, often far more than the
gradient itself does. Then all coordinates are divided by nearly the same number, and Adam is SGD
with momentum. The variance is a public constant of the plan, so it is subtracted:

    m, v = moments of the noised mean gradient, each over 1 - b^t
    phi  = the same average as v, of the noise's variance
    update = m / sqrt(max(v - phi, floor * phi))

The variance is averaged like v, since it changes from step to step if noise is correlated over
steps or the clip norm adapts. All of it is a function of noised gradients (post-processing): it
costs no privacy.

Source: Tang, Shpilevskiy, Lécuyer 2024, "DP-AdamBC: Your DP-Adam is actually DP-SGD (unless you
apply bias correction)" (arXiv 2312.14334), Algorithm 1. Departure: instead of floor * phi the paper
has a number gamma', which must be tuned for every model, clip norm and cohort. As a share of the
noise's variance one value fits all: at 1, a coordinate of pure noise is divided by the noise's
stddev, which is about what Adam divides it by, so that Adam's learning rates fit, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpfl_jax.errors import BadInputError, positive, probability

PyTree = Any
_LEAST = 1e-16  # smallest second moment without noise: the square of Adam's epsilon


class AdamBCState(NamedTuple):
    """The state of DP-AdamBC.

    Attributes:
      step: int32 scalar, number of steps taken.
      mu: first moment, like the parameters.
      nu: second moment of gradients with noise, like the parameters.
      phi: float32 scalar, second moment of the noise.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.training import AdamBCState, scale_by_adam_bc
      >>> state: AdamBCState = scale_by_adam_bc().init({"w": jnp.zeros(2)})
      >>> int(state.step), float(state.phi)
      (0, 0.0)
    """

    step: jax.Array
    mu: PyTree
    nu: PyTree
    phi: jax.Array


def scale_by_adam_bc(
    b1: float = 0.9, b2: float = 0.999, floor: float = 1.0
) -> optax.GradientTransformationExtraArgs:
    """Makes DP-AdamBC without a learning rate, for ``optax.chain``.

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.
      floor: smallest second moment, as a share of the noise's variance, above 0.

    Returns:
      An optimiser with ``update(gradient, state, params, *, noise_stddev)``; noise_stddev is the
      standard deviation of the noise on each entry of the mean gradient. ``fit`` and silos pass it;
      your own loop passes ``plan.calibrated.noise_on_gradients[step]``.

    Raises:
      BadInputError: an argument is out of range, or ``update`` gets no noise_stddev.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from dpfl_jax.training import scale_by_adam_bc
      >>> optimizer = optax.chain(scale_by_adam_bc(floor=0.5), optax.scale(-0.1))
      >>> params = {"w": jnp.zeros(1)}
      >>> gradient = {"w": jnp.array([0.5])}
      >>> update, _ = optimizer.update(gradient, optimizer.init(params), params, noise_stddev=0.4)
      >>> round(float(update["w"][0]), 4)  # -0.1 * 0.5 / sqrt(0.5^2 - 0.4^2)
      -0.1667
    """
    probability("b1", b1, one=False)
    probability("b2", b2, one=False)
    positive("floor", floor)

    def init(params: PyTree) -> AdamBCState:
        zeros = optax.tree.zeros_like(params)
        return AdamBCState(jnp.int32(0), zeros, zeros, jnp.float32(0))

    def update(
        gradient: PyTree,
        state: AdamBCState,
        params: PyTree | None = None,
        *,
        noise_stddev: Any = None,
        **others: Any,
    ) -> tuple[PyTree, AdamBCState]:
        del params, others
        if noise_stddev is None:
            raise BadInputError(
                "dp_adam_bc needs the noise on the gradient: give update(..., noise_stddev=...), "
                "or use adam if there is no noise"
            )
        step = optax.safe_increment(state.step)
        mu = optax.tree.update_moment(gradient, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(gradient, state.nu, b2, 2)
        phi = b2 * state.phi + (1 - b2) * jnp.square(jnp.float32(noise_stddev))
        m, v, noise = (
            optax.tree.bias_correction(moment, decay, step)
            for moment, decay in ((mu, b1), (nu, b2), (phi, b2))
        )
        least = jnp.maximum(floor * noise, _LEAST)
        updates = jax.tree.map(lambda m, v: m / jnp.sqrt(jnp.maximum(v - noise, least)), m, v)
        return updates, AdamBCState(step, mu, nu, phi)

    return optax.GradientTransformationExtraArgs(init, update)


def dp_adam_bc(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    floor: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Makes DP-AdamBC, Adam corrected for the noise (``optimizer.name: dp_adam_bc``).

    Args:
      learning_rate: a number, or a schedule.
      b1: decay of the first moment.
      b2: decay of the second moment.
      floor: smallest second moment, as a share of the noise's variance, above 0.

    Raises:
      BadInputError: an argument is out of range, or ``update`` gets no noise_stddev.

    Examples:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import dpfl_jax as dpfl
      >>> from dpfl_jax.training import dp_adam_bc
      >>> store = dpfl.from_arrays({"x": np.ones((64, 1), "float32")}, users=np.arange(64))
      >>> mechanism = dpfl.uls(group_size=1, cohort_size=16)
      >>> plan = mechanism.plan(store, steps=3, epsilon=8.0, delta=1e-3)
      >>> def loss(params, example):
      ...     return jnp.sum(example["x"] * params)
      >>> dpfl.fit(loss, jnp.zeros(1), plan, dp_adam_bc(0.1)).params.shape
      (1,)
    """
    return optax.chain(scale_by_adam_bc(b1, b2, floor), optax.scale_by_learning_rate(learning_rate))
