"""User-level sampling with individual accounting: users with small gradients stay for longer.

Source: Feldman and Zrnic, "Individual privacy accounting via a Renyi filter" (2021, arXiv
2008.11193), with users for points and Poisson sampling:

    every `refresh` steps, for each user u:                          # a look at everybody
      b_u = min(C, norm of u's gradient at the model as it is now)   # rounded up to a public level
    at each step t:
      A   = users who can pay for this step, too, at b_u             # drawn or not, they pay
      U   = each user of A independently with probability q          # Poisson
      D_u = at most group_size examples of u, afresh, for u in U
      g_u = clip(mean over D_u of grad, b_u)
      g   = (sum over U of g_u + N(0, (C sigma)^2)) / M

A step costs a user the Renyi divergence of a Poisson-sampled Gaussian that moves by b_u. The budget
of everybody is that of `least_steps` steps at b = C: nobody leaves before, and who has small
gradients leaves later or never, where the accounting of `uls` ends for all at once.

Departures: b_u is of the last look, not of this step, whose gradient is taken of those alone who
are drawn: a bound that is taken when a user is drawn would tell that they were. So it is clipped
to, whatever the gradient is by now. Who cannot pay at b_u sits out until the next look, at which
b_u may be smaller. M stays, and nobody is told how many users are left.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from dpfl_jax.mechanisms.own_budgets import OwnBudgets
from dpfl_jax.mechanisms.uls import ULS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Individual(OwnBudgets, ULS):
    """User-level sampling, in which every user has a privacy budget of their own."""

    kind: ClassVar[str] = "individual"
    accountant: ClassVar[str] = (
        "Renyi filter over Poisson-subsampled Gaussians of each user's own bound (rounded "
        "upwards); PLD until anybody can have spent a budget"
    )
    unfiltered: ClassVar[str] = "uls"
    leaving: ClassVar[str] = "who leaves"
    costliest: ClassVar[str] = "at the clip norm"
    most_units: ClassVar[int] = 1

    def units_of_users(self, user_offsets: np.ndarray) -> np.ndarray:
        """A user is one."""
        return np.ones(len(user_offsets) - 1, np.int64)
