"""Mechanisms with a noise multiplier, for tests that need no data."""

from dpfl_jax.mechanisms import Calibrated, Population


def noised(mechanism, noise_multiplier, steps=9):
    return Calibrated(mechanism, noise_multiplier, Population(100, 100, 100), steps, 1e-5)
