"""Noise that is added to clipped sums."""

from dpfl_jax.noise.banded import banded, prefix_error, strategy
from dpfl_jax.noise.banded_inverse import (
    banded_inverse,
    inverse_column,
    inverse_error,
    inverse_strategy,
    redrawn,
    redrawn_rows,
)
from dpfl_jax.noise.buffered import (
    Buffers,
    buffered,
    buffered_column,
    buffered_error,
    buffered_strategy,
)
from dpfl_jax.noise.exact import compiler_options
from dpfl_jax.noise.gaussian import GaussianNoise
from dpfl_jax.noise.reuse import once
from dpfl_jax.noise.transform import MOST_NOISE, Noise, NoiseState, transformation
from dpfl_jax.noise.workload import PREFIX_SUMS, Workload, workload_of

__all__ = [
    "MOST_NOISE",
    "PREFIX_SUMS",
    "Buffers",
    "GaussianNoise",
    "Noise",
    "NoiseState",
    "Workload",
    "banded",
    "banded_inverse",
    "buffered",
    "buffered_column",
    "buffered_error",
    "buffered_strategy",
    "compiler_options",
    "inverse_column",
    "inverse_error",
    "inverse_strategy",
    "once",
    "prefix_error",
    "redrawn",
    "redrawn_rows",
    "strategy",
    "transformation",
    "workload_of",
]
