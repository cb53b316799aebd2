"""Sampling: which units take part in each step, on the host, with random access to any step.

Everything here is NumPy. A mechanism accounts for exactly what its sampler draws.
"""

from dpfl_jax.sampling.samplers import (
    Draw,
    ExampleSampler,
    Sampler,
    Share,
    UserSampler,
    choose_within_users,
    limit_contributions,
    limited_size,
    share_of,
)
from dpfl_jax.sampling.schemes import (
    Cyclic,
    CyclicPoisson,
    FixedSize,
    PersonalizedPoisson,
    Poisson,
    PoissonWithDropout,
    RandomAllocation,
    Scheme,
    TruncatedPoisson,
    poisson_indices,
)

__all__ = [
    "Scheme",
    "Poisson",
    "CyclicPoisson",
    "Cyclic",
    "RandomAllocation",
    "TruncatedPoisson",
    "PoissonWithDropout",
    "PersonalizedPoisson",
    "FixedSize",
    "poisson_indices",
    "Sampler",
    "UserSampler",
    "ExampleSampler",
    "Draw",
    "Share",
    "share_of",
    "limit_contributions",
    "limited_size",
    "choose_within_users",
]
