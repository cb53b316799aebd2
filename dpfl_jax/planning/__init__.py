"""Planning: which algorithm and group size to take for a compute budget.

The quantity compared is the standard deviation of the noise on the averaged gradient, for clip
norms at the size of typical gradients (Charles et al. 2024, section 3, equations (5) to (7)).
"""

from dpfl_jax.planning.estimates import (
    Sensitivities,
    estimate_sensitivities,
    median_group_size,
    private_median_group_size,
)
from dpfl_jax.planning.planner import (
    Option,
    Planner,
    Recommendation,
    UserStatistics,
    estimate_and_double,
)

__all__ = [
    "Planner",
    "UserStatistics",
    "Sensitivities",
    "Option",
    "Recommendation",
    "estimate_sensitivities",
    "median_group_size",
    "private_median_group_size",
    "estimate_and_double",
]
