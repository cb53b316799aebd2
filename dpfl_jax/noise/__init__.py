"""Gaussian noise for clipped sums: exact or in float32, independent or correlated over steps."""

from dpfl_jax.noise.correlated import banded, banded_inverse, buffered, redrawn, redrawn_rows
from dpfl_jax.noise.exact import compiler_options
from dpfl_jax.noise.gaussian import GaussianNoise
from dpfl_jax.noise.transform import (
    MOST_NOISE,
    ONE_RELEASE,
    Noise,
    NoiseState,
    refuse_key_reuse,
    transformation,
)
from dpfl_jax.noise.workload import workload_of

__all__ = [
    "Noise",
    "transformation",
    "NoiseState",
    "refuse_key_reuse",
    "banded",
    "banded_inverse",
    "buffered",
    "redrawn",
    "redrawn_rows",
    "workload_of",
    "GaussianNoise",
    "compiler_options",
    "MOST_NOISE",
    "ONE_RELEASE",
]
