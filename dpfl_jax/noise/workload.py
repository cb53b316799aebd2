"""``workload_of``: how an optimiser turns gradients into updates, measured by running it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpfl_jax.errors import BadInputError
from dpfl_jax.matrices import PREFIX_SUMS, Workload


def workload_of(optimizer: optax.GradientTransformation | None, steps: int) -> Workload:
    """Returns an optimiser's linear map from gradients to updates, measured on one parameter.

    Args:
      optimizer: any Optax optimiser; None: prefix sums.
      steps: T, the steps of its schedule.

    Returns:
      The workload of SGD with any schedule and constant momentum; prefix sums for optimisers that
      are not linear in gradients (Adam), or whose momentum changes.

    Raises:
      BadInputError: the optimiser does not run on a single number.

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
        extended = optax.with_extra_args_support(optimizer)

        def move(state: Any, gradient: jax.Array) -> tuple[Any, jax.Array]:
            update, state = extended.update(gradient[None], state, zero, noise_stddev=0.0)
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
    except Exception as error:  # an optimiser may expect anything of its parameters
        raise BadInputError(
            f"the optimizer does not run on a single number ({error}), so its effect on noise "
            "cannot be measured: leave it out of plan(..., optimizer=...)"
        ) from error
    memory = np.zeros(steps)
    np.divide(impulse, rates[first:], out=memory[: steps - first], where=rates[first:] != 0)
    for gradients, moved in trials:
        wanted = rates * np.convolve(memory, gradients)[:steps]
        if not np.abs(moved - wanted).max() <= 1e-3 * np.abs(wanted).max():
            return PREFIX_SUMS
    # Keep six digits, as later ones depend on the machine, and drop trailing zeros.
    memory, rates = (np.array([float(f"{x:.6g}") for x in y]) for y in (memory, rates))
    last = np.flatnonzero(np.abs(memory) > 1e-9)[-1]
    alike = np.abs(rates - rates[0]).max() <= 1e-5 * abs(rates[0])
    largest = rates[np.abs(rates).argmax()]
    return Workload(
        tuple(memory[: last + 1].tolist()), None if alike else tuple((rates / largest).tolist())
    )
