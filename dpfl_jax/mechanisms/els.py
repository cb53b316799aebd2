"""DP-SGD-ELS: example-level sampling with a user-level guarantee.

Source: Charles, Ganesh, McKenna, McMahan, Mitchell, Pillutla, Rush, "Fine-tuning large language
models with user-level differential privacy" (2024), Algorithm 1 and Theorem 1.

    D_sub = at most group_size examples of each user                 # once, before training
    at each step:
      S     = each example of D_sub independently with probability p # Poisson
      g     = (sum over S of clip(grad, C) + N(0, (C sigma)^2)) / B  # B = expected size

Departures: B and p may be declared as constants (``batch_size``, ``sampling_prob``), because the
paper's p = B / |D_sub| depends on the data set; by default |D_sub| is taken as public. The paper's
runs shuffled instead of sampling; here the sampling that runs is Poisson.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from dpfl_jax.accounting.cells import Contribution
from dpfl_jax.data.owners import whole_of
from dpfl_jax.data.store import Readable
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.base import Mechanism, Population, require_positive
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import (
    ExampleSampler,
    Poisson,
    check_probability,
    limit_contributions,
    limited_size,
)
from dpfl_jax.sampling.contribution import check_group_size
from dpfl_jax.sampling.schemes import AtRate


@dataclasses.dataclass(frozen=True, kw_only=True)
class ELS(Mechanism):
    """DP-SGD with example-level sampling, accounted for whole users.

    Attributes:
      group_size: most examples of one user that are used in the whole run.
      batch_size: B, expected number of examples per step (the divisor).
      sampling_prob: p; default batch_size / (examples kept under group_size).
    """

    group_size: int
    batch_size: float
    sampling_prob: float | None = None

    kind: ClassVar[str] = "els"
    several_owners: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        check_group_size(self.group_size)
        require_positive("mechanism.batch_size", self.batch_size)
        if self.sampling_prob is not None:
            check_probability(self.sampling_prob, "given as sampling_prob")

    @property
    def divisor(self) -> float:
        """B, the expected batch size."""
        # proof: els-divisor-1
        return float(self.batch_size)

    def population(self, user_offsets: np.ndarray) -> Population:
        """Counts users, examples, and the examples kept under ``group_size``."""
        return Population(
            num_users=len(user_offsets) - 1,
            num_examples=int(user_offsets[-1] - user_offsets[0]),
            num_units=limited_size(user_offsets, self.group_size),
        )

    def bounded(self, data: Readable) -> Readable:
        """Nobody owns more than ``group_size`` examples of it, alone or with others."""
        whole = whole_of(data)
        # proof: els-owners-1
        return data if whole is None else whole.bounded(self.group_size)

    def declared_population(
        self, num_users: int, num_examples: int, limited: Mapping[int, int]
    ) -> Population:
        """Counts what ``limited`` says of ``group_size``."""
        if self.group_size not in limited:
            raise BadInputError(
                f"population.limited_examples has no number for {self.group_size}: ELS needs the "
                f"number of examples left with at most {self.group_size} per user"
            )
        return Population(num_users, num_examples, limited[self.group_size])

    def unit_bounds(self, population: Population) -> tuple[int, int]:
        """Nobody has more than ``group_size`` of them, alone or with others."""
        return 1, min(population.num_examples, self.group_size * population.num_users)

    @classmethod
    def at_budget(cls, compute_budget: float, group_size: int, **common: Any) -> ELS:
        """The budget is the batch."""
        return cls(group_size=group_size, batch_size=compute_budget, **common)

    def sampling_probability(self, population: Population) -> float:
        """P = B / |D_sub| unless declared."""
        if self.sampling_prob is not None:
            return self.sampling_prob
        return check_probability(
            self.batch_size / max(population.num_units, 1),
            f"expected batch of {self.batch_size:g} examples from the {population.num_units} left "
            f"with at most {self.group_size} per user",
            f"set mechanism.batch_size to at most {population.num_units}, or use more data",
        )

    def scheme(self, population: Population) -> AtRate:
        """Each example by a coin."""
        # proof: els-sampling-2
        return Poisson(self.sampling_probability(population))

    def sampler(self, user_offsets: np.ndarray, key: RootKey) -> ExampleSampler:
        """Limits contributions once (from the key), then samples examples by Poisson."""
        # proof: els-sampling-1
        positions = limit_contributions(
            key.numpy("contribution-limit"), user_offsets, self.group_size
        )
        return ExampleSampler(self.scheme(self.population(user_offsets)), positions, key)

    @property
    def contribution(self) -> Contribution:
        """Of ``group_size`` examples a draw holds Binomial(group_size, p) (Theorem 1)."""
        return Contribution(units=self.group_size)

    def told_sampling(self, population: Population) -> str:
        """Limited once, then Poisson over examples."""
        how = "greedily, by who owns what" if population.shared else "uniformly without replacement"
        return (
            f"at most {self.group_size} examples of a user kept for the whole run "
            f"({how}), then Poisson over the {population.num_units} kept, "
            f"probability {self.sampling_probability(population):.6g} each"
        )
