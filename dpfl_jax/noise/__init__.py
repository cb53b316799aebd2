"""Noise that is added to clipped sums."""

from dpfl_jax.noise.banded import banded, prefix_error, strategy
from dpfl_jax.noise.banded_inverse import (
    banded_inverse,
    inverse_column,
    inverse_error,
    inverse_multiplied,
    inverse_strategy,
)
from dpfl_jax.noise.buffered import (
    Buffers,
    buffered,
    buffered_column,
    buffered_error,
    buffered_strategy,
    multiplied,
)
from dpfl_jax.noise.exact import compiler_options
from dpfl_jax.noise.gaussian import GaussianNoise
from dpfl_jax.noise.transform import MOST_NOISE, Noise, NoiseState, transformation

__all__ = [
    "MOST_NOISE",
    "Buffers",
    "GaussianNoise",
    "Noise",
    "NoiseState",
    "banded",
    "banded_inverse",
    "buffered",
    "buffered_column",
    "buffered_error",
    "buffered_strategy",
    "compiler_options",
    "inverse_column",
    "inverse_error",
    "inverse_multiplied",
    "inverse_strategy",
    "multiplied",
    "prefix_error",
    "strategy",
    "transformation",
]
