"""Noise that is added to bounded sums."""

from dpfl_jax.noise.gaussian import GaussianNoise

__all__ = ["GaussianNoise"]
