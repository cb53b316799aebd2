"""The workload of an optimiser: how it turns gradients into updates, measured by running it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpfl_jax.errors import BadInputError
from dpfl_jax.matrices import PREFIX_SUMS, Workload


def workload_of(optimizer: optax.GradientTransformation | None, steps: int) -> Workload:
    """The linear map from gradients to updates of an optimiser, measured on one parameter.

    Args:
      optimizer: any of Optax; None: prefix sums.
      steps: T, of its schedule.

    Returns:
      Its workload if it is SGD with any schedule and any momentum; prefix sums if it is not linear
      in gradients (Adam), or if its momentum is not the same at all steps.

    Raises:
      BadInputError: it cannot be tried on one number.

    Examples:
      >>> import optax
      >>> from dpfl_jax.noise import workload_of
      >>> workload_of(optax.sgd(0.1, momentum=0.5), steps=4).memory
      (1.0, 0.5, 0.25, 0.125)
    """
    if optimizer is None:
        return PREFIX_SUMS
    rng = np.random.default_rng(0)
    some = rng.normal(size=steps).astype(np.float32)
    try:
        zero = jnp.zeros(1, jnp.float32)
        state = optimizer.init(zero)
        told = optax.with_extra_args_support(optimizer)

        def move(state: Any, gradient: jax.Array) -> tuple[Any, jax.Array]:
            update, state = told.update(gradient[None], state, zero, noise_stddev=0.0)
            return state, -update[0]

        def after_zeros(state: Any, gradient: jax.Array) -> tuple[Any, jax.Array]:
            return move(state, 0 * gradient)[0], move(state, gradient)[1]

        def run(one: Any, gradients: np.ndarray) -> np.ndarray:
            return np.asarray(jax.lax.scan(one, state, jnp.asarray(gradients))[1], float)

        rates = run(after_zeros, np.ones(steps, np.float32))
        if not (np.isfinite(rates).all() and rates.any()):
            return PREFIX_SUMS
        first = int(np.flatnonzero(rates)[0])
        impulse = run(move, np.eye(1, steps, first, np.float32)[0])[first:]
        trials = [(size * some, run(move, np.float32(size) * some)) for size in (1e-3, 1.0, 1e3)]
    except Exception as error:  # whatever it wants of parameters
        raise BadInputError(
            f"the optimizer cannot be tried on one number ({error}), so that nothing is known of "
            "what it makes of noise: leave it out of plan(..., optimizer=...)"
        ) from error
    memory = np.zeros(steps)
    np.divide(impulse, rates[first:], out=memory[: steps - first], where=rates[first:] != 0)
    for gradients, moved in trials:
        wanted = rates * np.convolve(memory, gradients)[:steps]
        if not np.abs(moved - wanted).max() <= 1e-3 * np.abs(wanted).max():
            return PREFIX_SUMS
    # Six digits: those behind depend on the machine, and zeros cost nothing.
    memory, rates = (np.array([float(f"{x:.6g}") for x in y]) for y in (memory, rates))
    last = np.flatnonzero(np.abs(memory) > 1e-9)[-1]
    alike = np.abs(rates - rates[0]).max() <= 1e-5 * abs(rates[0])
    largest = rates[np.abs(rates).argmax()]
    return Workload(
        tuple(memory[: last + 1].tolist()), None if alike else tuple((rates / largest).tolist())
    )
