"""Noise that is added to clipped sums."""

from dpfl_jax.noise.gaussian import GaussianNoise
from dpfl_jax.noise.transform import NoiseState, transformation

__all__ = ["GaussianNoise", "NoiseState", "transformation"]
