"""Names that work and are proven, but may change or be removed in any release.

Individual budgets: every user has a personal budget, and is charged by a personal bound.
"""

from dpfl_jax.mechanisms.individual_budget import IndividualBudget
from dpfl_jax.mechanisms.presets import individual, individual_els

__all__ = ["individual", "individual_els", "IndividualBudget"]
