"""Noise that is added to clipped sums."""

from dpfl_jax.noise.banded import banded
from dpfl_jax.noise.banded_inverse import banded_inverse, redrawn, redrawn_rows
from dpfl_jax.noise.buffered import buffered
from dpfl_jax.noise.exact import compiler_options
from dpfl_jax.noise.gaussian import GaussianNoise
from dpfl_jax.noise.reuse import once
from dpfl_jax.noise.transform import MOST_NOISE, Noise, NoiseState, transformation
from dpfl_jax.noise.workload import workload_of

__all__ = [
    "MOST_NOISE",
    "GaussianNoise",
    "Noise",
    "NoiseState",
    "banded",
    "banded_inverse",
    "buffered",
    "compiler_options",
    "once",
    "redrawn",
    "redrawn_rows",
    "transformation",
    "workload_of",
]
