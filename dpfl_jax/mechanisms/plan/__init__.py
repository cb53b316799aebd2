"""Plans: mechanisms calibrated for a data set, and what their steps compute.

``batches`` reads the units that are drawn, ``sums`` adds up clipped gradients over devices, and
``sum_check`` compares the compiled sum with plain gradients before the first step.
"""

from dpfl_jax.mechanisms.plan.plan import Batch, ClippedSum, Plan

__all__ = ["Batch", "ClippedSum", "Plan"]
