"""A plan: a mechanism calibrated for a data set, and what a step of it computes.

``batches`` reads what is drawn, ``sums`` adds up clipped gradients over devices, and ``sum_check``
compares the compiled sum with plain gradients before the first step.
"""

from dpfl_jax.mechanisms.plan.plan import Batch, ClippedSum, Plan

__all__ = ["Batch", "ClippedSum", "Plan"]
