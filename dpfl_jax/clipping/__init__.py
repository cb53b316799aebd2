"""Bounded gradients: from the loss of one privacy unit to a sum with a known sensitivity."""

from dpfl_jax.clipping.adaptive import AdaptiveClip
from dpfl_jax.clipping.auto import Explanation
from dpfl_jax.clipping.bounded import BoundedGrad, bounded_grad, clipped_fun
from dpfl_jax.clipping.probe import Probed, probe
from dpfl_jax.clipping.result import BoundedSum
from dpfl_jax.clipping.rules import (
    Automatic,
    GroupAverage,
    Normalized,
    OwnBound,
    PerGroup,
    PerLayer,
    Rule,
    Standard,
    group_sizes,
)
from dpfl_jax.clipping.self_check import SelfCheck, SelfCheckError, self_check
from dpfl_jax.clipping.trainable import Trainable, join, split

__all__ = [
    "AdaptiveClip",
    "Automatic",
    "BoundedGrad",
    "BoundedSum",
    "Explanation",
    "GroupAverage",
    "Normalized",
    "OwnBound",
    "PerGroup",
    "PerLayer",
    "Probed",
    "Rule",
    "SelfCheck",
    "SelfCheckError",
    "Standard",
    "Trainable",
    "bounded_grad",
    "clipped_fun",
    "group_sizes",
    "join",
    "probe",
    "self_check",
    "split",
]
