"""``fit`` for tests that vary one thing: all that makes a plan beside all that ``fit`` takes."""

from __future__ import annotations

import dataclasses
from typing import Any

from dpfl_jax.config.execution import Execution
from dpfl_jax.run.driver import LoopConfig
from dpfl_jax.training.fitting import algorithm_of, fit, train

_PLAN = ("epsilon", "noise_multiplier", "delta", "mesh")
_LOOP = tuple(field.name for field in dataclasses.fields(LoopConfig))


def fit_given(*, loss_fn, params, data, mechanism, optimizer, steps, charge=None, **given: Any):
    """Makes the plan, and fits."""

    def taken(names):
        return {name: given.pop(name) for name in names if name in given}

    execution = Execution(**taken(name for name in Execution.model_fields if name != "mesh"))
    plan = mechanism.plan(data, steps=steps, execution=execution, **taken(_PLAN))
    loop = LoopConfig(**taken(_LOOP))
    if charge is None:
        return fit(loss_fn, params, plan, optimizer, loop=loop, **given)
    algorithm = algorithm_of(loss_fn, params, plan, optimizer, given.pop("trainable", None))
    return train(algorithm, loop=loop, charge=charge, **given)
