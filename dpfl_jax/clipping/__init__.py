"""Bounded gradients: from the loss of one privacy unit to a sum with a known sensitivity."""

from dpfl_jax.clipping.bounded import BoundedGrad, bounded_grad
from dpfl_jax.clipping.result import BoundedSum
from dpfl_jax.clipping.rules import Normalized, Rule, Standard

__all__ = ["BoundedGrad", "BoundedSum", "Normalized", "Rule", "Standard", "bounded_grad"]
