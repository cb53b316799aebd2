"""Clipped gradients: from the loss of one privacy unit to a sum with a known sensitivity."""

from dpfl_jax.clipping.adaptive import (
    Adaptive,
    AdaptiveMemory,
    CountedSum,
    adapting_noise,
    clipped_and_counted,
)
from dpfl_jax.clipping.auto import Explanation
from dpfl_jax.clipping.gradients import ClippedGrad, clipped_fun, clipped_grad
from dpfl_jax.clipping.measure import Way, fastest
from dpfl_jax.clipping.preflight import Probed, SelfCheck, SelfCheckError, probe, self_check
from dpfl_jax.clipping.result import ClippedGradResult, StepStats
from dpfl_jax.clipping.rules import (
    Automatic,
    Flat,
    NoClip,
    Normalized,
    OwnBound,
    PerGroup,
    PerLayer,
    Rule,
)
from dpfl_jax.clipping.trainable import Trainable, join, split

__all__ = [
    "clipped_grad",
    "clipped_fun",
    "ClippedGrad",
    "ClippedGradResult",
    "StepStats",
    "Rule",
    "Flat",
    "PerLayer",
    "PerGroup",
    "Normalized",
    "Automatic",
    "OwnBound",
    "NoClip",
    "Adaptive",
    "AdaptiveMemory",
    "CountedSum",
    "clipped_and_counted",
    "adapting_noise",
    "Explanation",
    "self_check",
    "SelfCheck",
    "SelfCheckError",
    "probe",
    "Probed",
    "fastest",
    "Way",
    "Trainable",
    "split",
    "join",
]
