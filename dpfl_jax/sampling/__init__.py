"""Which units take part in each step: host-side, seeded by counter, random access.

Everything here is NumPy. What a sampler draws is what the mechanism that owns it accounts for.
"""

from dpfl_jax.sampling.base import Draw, Sampler, check_probability
from dpfl_jax.sampling.contribution import (
    choose_within_users,
    limit_contributions,
    limited_size,
)
from dpfl_jax.sampling.poisson import PoissonExamples, PoissonUsers, poisson_indices

__all__ = [
    "Draw",
    "PoissonExamples",
    "PoissonUsers",
    "Sampler",
    "check_probability",
    "choose_within_users",
    "limit_contributions",
    "limited_size",
    "poisson_indices",
]
