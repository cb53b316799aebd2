"""What works and is proven, but may change or go with any release.

Individual budgets: every user has a budget of their own, and is charged by a bound of their own.
"""

from dpfl_jax.mechanisms.individual_budget import IndividualBudget
from dpfl_jax.mechanisms.presets import individual, individual_els

__all__ = ["individual", "individual_els", "IndividualBudget"]
