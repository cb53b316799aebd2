"""Example-level sampling with individual accounting: small gradients, or few of them, cost less.

Source: Feldman and Zrnic, "Individual privacy accounting via a Renyi filter" (2021, arXiv
2008.11193), of users whose examples are drawn as in Charles et al. 2024, Algorithm 1:

    D_u = at most group_size examples of each user u                 # once, before training
    every `refresh` steps, for each user u:                          # a look at everybody
      b_u = min(C, largest norm of a gradient of D_u at the model as it is now)     # rounded up
    at each step t:
      A = users who can pay for this step, too, at |D_u| and b_u     # drawn or not, they pay
      S = each example of A's independently with probability p       # Poisson
      g = (sum over u in A, x in S and D_u of clip(grad, b_u) + N(0, (C sigma)^2)) / B

A step costs a user the Renyi divergence of a mixture of Gaussians that move by Binomial(|D_u|, p)
times b_u. The budget of everybody is that of `least_steps` steps at b = C and group_size examples:
nobody leaves before. Who has fewer examples, or small gradients, leaves later or never, where the
accounting of `els` ends for all at once.

Departures: as of ``individual``. All of a user's examples are clipped to the user's bound: one of
each would clip small gradients closer, and save nobody anything, as the largest would still be
paid for.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from dpfl_jax.data.store import Readable
from dpfl_jax.mechanisms.base import Mechanism
from dpfl_jax.mechanisms.els import ELS
from dpfl_jax.mechanisms.own_budgets import OwnBudgets


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndividualELS(OwnBudgets, ELS):
    """Example-level sampling, in which every user has a privacy budget of their own."""

    kind: ClassVar[str] = "individual_els"
    several_owners: ClassVar[bool] = False  # a record would leave with its first owner who does
    accountant: ClassVar[str] = (
        "Renyi filter over mixtures of Gaussians of each user's own bound and number of examples "
        "(rounded upwards); PLD until anybody can have spent a budget"
    )
    unfiltered: ClassVar[str] = "els"
    leaving: ClassVar[str] = "of users who leave"
    costliest: ClassVar[str] = "at the clip norm with a whole group of examples"

    def bounded(self, data: Readable) -> Readable:
        """All of it, of one owner each."""
        return Mechanism.bounded(self, data)

    @property
    def most_units(self) -> int:
        """The group size."""
        return self.group_size

    def units_of_users(self, user_offsets: np.ndarray) -> np.ndarray:
        """The examples kept of each."""
        return np.minimum(np.diff(user_offsets), self.group_size).astype(np.int64)
