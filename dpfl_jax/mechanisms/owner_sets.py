"""User-level sampling where records have several owners: sets of owners are drawn.

Source: user-level sampling as in ``uls``; bounding as in Ganesh et al. 2025 (arXiv 2503.03622).

    S_sub = sets of owners, at most sets_per_user of each user       # once, by who owns what
    at each step:
      S     = each set of S_sub independently with probability q     # Poisson
      D_s   = at most group_size records of the set s, afresh, for s in S
      g     = (sum over S of clip(mean over D_s of grad, C) + N(0, (C sigma)^2)) / M

A set is what the same people wrote together: a conversation, the papers of some co-authors.
Emptying all records of one user empties every record of at most K = sets_per_user sets, and touches
no other: what is accounted is ELS of K examples, with sets for examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from dpfl_jax import accounting
from dpfl_jax.accounting.cells import Contribution
from dpfl_jax.data.owners import whole_of
from dpfl_jax.data.store import Readable
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.base import Population
from dpfl_jax.mechanisms.uls import ULS
from dpfl_jax.sampling import check_probability


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnerSets(ULS):
    """DP-SGD that draws sets of owners, accounted for users.

    Attributes:
      group_size: most records of one set per step (privacy does not depend on it).
      cohort_size: M, expected number of sets per step (the divisor).
      sampling_prob: q; default cohort_size / (number of sets kept).
      sets_per_user: K, most sets of one user that are used in the whole run.
    """

    sets_per_user: int

    kind: ClassVar[str] = "owner_sets"
    several_owners: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.sets_per_user < 1:
            raise BadInputError(f"sets_per_user is {self.sets_per_user}, but it must be at least 1")

    def bounded(self, data: Readable) -> Readable:
        """Nobody is in more than ``sets_per_user`` of the sets whose records are kept."""
        whole = whole_of(data)
        if whole is None:
            raise BadInputError(
                "mechanism.kind=owner_sets is for records with several owners, but every record of "
                "the data has one: use mechanism.kind=uls, or give owners as lists"
            )
        # proof: owner-sets-1
        return whole.bounded(self.sets_per_user, whole=True)

    def declared_population(
        self, num_users: int, num_examples: int, limited: Mapping[int, int]
    ) -> Population:
        """Refused: how many sets are kept follows from who owns what."""
        raise BadInputError(
            "mechanism.kind=owner_sets needs the data themselves: leave out the section population"
        )

    def unit_bounds(self, population: Population) -> tuple[int, int]:
        """Nobody is in more than ``sets_per_user`` sets, and each holds a record."""
        return 1, min(population.num_examples, self.sets_per_user * population.num_users)

    @classmethod
    def at_budget(cls, compute_budget: float, group_size: int, **common: Any) -> OwnerSets:
        """Refused: a budget does not say how many sets of a user are used."""
        raise BadInputError(
            "mechanism.kind=owner_sets is not chosen by a compute budget: set mechanism.cohort_size"
        )

    def sampling_probability(self, population: Population) -> float:
        """Q = M / (number of sets kept) unless declared."""
        if self.sampling_prob is not None:
            return self.sampling_prob
        return check_probability(
            self.cohort_size / max(population.num_units, 1),
            f"expected cohort of {self.cohort_size:g} from {population.num_units} sets of owners",
            f"set mechanism.cohort_size to at most {population.num_units}, or use more data",
        )

    @property
    def contribution(self) -> Contribution:
        """A user is in Binomial(sets_per_user, q) of the sets drawn, each moving the sum by C."""
        return Contribution(units=self.sets_per_user)

    def guarantee(
        self, population: Population, steps: int, delta: float, caveats: tuple[str, ...] = ()
    ) -> accounting.Guarantee:
        """Of all owners of a record, even where each has one."""
        shared = dataclasses.replace(population, shared=True)
        return super().guarantee(shared, steps, delta, caveats)

    def told_sampling(self, population: Population) -> str:
        """Limited once, then Poisson over sets."""
        return (
            f"at most {self.sets_per_user} sets of owners of each user kept for the whole run "
            f"(greedily, by who owns what), then Poisson over the {population.num_units} kept, "
            f"probability {self.sampling_probability(population):.6g} each, "
            f"{self._examples} of a set per step"
        )
