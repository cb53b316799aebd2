"""The central training engine: the jit-compiled private step, and the run around it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpfl_jax.mesh import data_parallel_mesh
    from dpfl_jax.run.state import TrainState
    from dpfl_jax.training.adam_bc import AdamBCState, dp_adam_bc, scale_by_adam_bc
    from dpfl_jax.training.augmentation import augmented
    from dpfl_jax.training.central import make_train_step
    from dpfl_jax.training.fitting import FitResult, fit

# Imported on first use: a plan needs only ``optimizers`` of this package.
_HOMES = {
    "AdamBCState": "dpfl_jax.training.adam_bc",
    "FitResult": "dpfl_jax.training.fitting",
    "TrainState": "dpfl_jax.run.state",
    "augmented": "dpfl_jax.training.augmentation",
    "data_parallel_mesh": "dpfl_jax.mesh",
    "dp_adam_bc": "dpfl_jax.training.adam_bc",
    "fit": "dpfl_jax.training.fitting",
    "make_train_step": "dpfl_jax.training.central",
    "scale_by_adam_bc": "dpfl_jax.training.adam_bc",
}

__all__ = [
    "fit",
    "FitResult",
    "make_train_step",
    "augmented",
    "TrainState",
    "data_parallel_mesh",
    "dp_adam_bc",
    "scale_by_adam_bc",
    "AdamBCState",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
