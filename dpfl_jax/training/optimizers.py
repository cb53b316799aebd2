"""Optax optimisers by name, with a learning-rate schedule. They only see noised gradients."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import numpy as np
import optax

from dpfl_jax.config.schema import OptimizerConfig
from dpfl_jax.errors import BadInputError, expect, nearest
from dpfl_jax.training.adam_bc import dp_adam_bc

# Optimisers besides those of Optax, by their names in configurations.
OWN = {"dp_adam_bc": dp_adam_bc}


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Makes ``<name>(learning_rate=<schedule over steps>, **options)`` of a config section.

    Raises:
      BadInputError: no such optimiser, an option that it does not take, or too long a warm-up.
    """
    name, options = config.name, dict(config.options)
    factory = OWN.get(name) or getattr(optax, name, None)
    takes = _parameters(factory)
    if "learning_rate" not in takes:
        known = [n for n in dir(optax) if "learning_rate" in _parameters(getattr(optax, n))]
        known += OWN
        raise BadInputError(f"optax has no optimiser called {name!r}: {nearest(name, known)}")
    for option in options:
        if option not in takes:
            raise BadInputError(
                f"optimizer {name} takes no option {option!r}; it takes {', '.join(takes)}"
            )
    try:
        made = factory(learning_rate=_schedule(config, steps), **options)  # type: ignore[misc]
        # Some options fail only at the first update.
        _update_shape(made, jax.ShapeDtypeStruct((1,), np.float32))
    except TypeError as error:
        raise BadInputError(
            f"optimizer {name} cannot be used with these options ({error}): {_ALONE}"
        ) from None
    return made


def _schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up, then constant, linear to 0 or cosine to 0, ``steps`` in all."""
    rate, warmup = config.learning_rate, config.warmup_steps
    if warmup >= steps and warmup > 0:
        raise BadInputError(
            f"warmup_steps is {warmup}, but this phase has only {steps} steps: lower it"
        )
    decay_steps = max(steps - warmup, 1)
    schedule = {
        "constant": optax.constant_schedule(rate),
        "linear": optax.linear_schedule(rate, 0.0, decay_steps),
        "cosine": optax.cosine_decay_schedule(rate, decay_steps),
    }[config.schedule]
    if warmup == 0:
        return schedule
    return optax.join_schedules([optax.linear_schedule(0.0, rate, warmup), schedule], [warmup])


_ALONE = "it must update parameters from their gradients alone, as losses are private"


def check_optimizer(optimizer: Any, params: Any) -> None:
    """Refuses what is not an Optax optimiser, or needs losses (plateaus, line searches).

    Raises:
      BadInputError: it is refused.
    """
    if isinstance(optimizer, optax.MultiSteps):
        raise BadInputError("optimizer is a MultiSteps: give its .gradient_transformation()")
    expect(optimizer, optax.GradientTransformation, "optimizer", "an Optax optimiser")
    try:
        _update_shape(optimizer, params)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise BadInputError(f"the optimizer asks for more ({error}): {_ALONE}") from None


def _update_shape(optimizer: Any, params: Any) -> None:
    with jax.numpy_dtype_promotion("standard"):
        update = optax.with_extra_args_support(optimizer).update
        jax.eval_shape(lambda p: update(p, optimizer.init(p), p, noise_stddev=0.0), params)


def _parameters(factory: Any) -> list[str]:
    if not callable(factory) or inspect.isclass(factory):
        return []
    try:
        return list(inspect.signature(factory).parameters)
    except (TypeError, ValueError):
        return []
