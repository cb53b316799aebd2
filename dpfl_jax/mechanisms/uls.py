"""DP-SGD-ULS: user-level sampling.

Source: Charles et al., "Fine-tuning large language models with user-level differential privacy"
(2024), Algorithm 2 and Theorem 2.

    at each step:
      U   = each user independently with probability q               # Poisson
      D_u = at most group_size examples of u, afresh, for u in U
      g_u = mean over D_u of grad                                    # the user's own count
      g   = (sum over U of clip(g_u, C) + N(0, (C sigma)^2)) / M     # M = expected cohort

Departures: M and q may be declared as constants (``cohort_size``, ``sampling_prob``), because the
paper's q = M / N depends on the data set; by default the number of users is taken as public. The
paper's runs shuffled users instead of sampling them; here the sampling that runs is Poisson.

With ``local_learning_rate`` a step is a federated round: users are devices that take steps by
themselves, and g_u is how far these move the parameters (``local_steps``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.base import (
    LossFn,
    Mechanism,
    Population,
    PyTree,
    mean_of_examples,
    pieces_of_user,
    require_positive,
)
from dpfl_jax.mechanisms.local_steps import clipped_updates
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Poisson, UserSampler, check_probability
from dpfl_jax.sampling.contribution import check_group_size
from dpfl_jax.sampling.schemes import AtRate


@dataclasses.dataclass(frozen=True, kw_only=True)
class ULS(Mechanism):
    """DP-SGD with user-level sampling.

    Attributes:
      group_size: most examples of one user per step (privacy does not depend on it).
      cohort_size: M, expected number of users per step (the divisor).
      sampling_prob: q; default cohort_size / (number of users).
      local_learning_rate: of the steps that a user takes by itself; None: it takes none.
      local_batch_size: most examples of such a step; None: all.
      local_epochs: passes over the user's examples.
    """

    group_size: int
    cohort_size: float
    sampling_prob: float | None = None
    local_learning_rate: float | None = None
    local_batch_size: int | None = None
    local_epochs: int = 1

    kind: ClassVar[str] = "uls"

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        check_group_size(self.group_size)
        require_positive("mechanism.cohort_size", self.cohort_size)
        if self.sampling_prob is not None:
            check_probability(self.sampling_prob, "given as sampling_prob")
        for name, least in (
            ("local_batch_size", self.local_batch_size),
            ("local_epochs", self.local_epochs),
        ):
            if least is not None and least < 1:
                raise BadInputError(f"{name} is {least}, but it must be at least 1")
        if self.local_learning_rate is not None:
            require_positive("local_learning_rate", self.local_learning_rate)
        elif self.local_batch_size is not None or self.local_epochs != 1:
            raise BadInputError(
                "local_batch_size and local_epochs are of the steps that users take by "
                "themselves: give local_learning_rate, too, or leave them out"
            )

    @property
    def takes_local_steps(self) -> bool:
        """Whether users are devices of a federated round."""
        return self.local_learning_rate is not None

    @property
    def passes(self) -> int:
        """Epochs of local steps."""
        return self.local_epochs

    @property
    def divisor(self) -> float:
        """M, the expected cohort size."""
        # proof: uls-divisor-1
        return float(self.cohort_size)

    def population(self, user_offsets: np.ndarray) -> Population:
        """Counts users and examples; the units are the users."""
        num_users = len(user_offsets) - 1
        return Population(
            num_users=num_users,
            num_examples=int(user_offsets[-1] - user_offsets[0]),
            num_units=num_users,
        )

    def declared_population(
        self, num_users: int, num_examples: int, limited: Mapping[int, int]
    ) -> Population:
        """The units are the users."""
        return Population(num_users, num_examples, num_users)

    def unit_bounds(self, population: Population) -> tuple[int, int]:
        """The units are the users."""
        return population.num_users, population.num_users

    @classmethod
    def at_budget(cls, compute_budget: float, group_size: int, **common: Any) -> ULS:
        """Each user of the cohort has up to ``group_size`` examples."""
        return cls(group_size=group_size, cohort_size=compute_budget / group_size, **common)

    @property
    def unit_examples(self) -> int:
        """The group size."""
        return self.group_size

    def sampling_probability(self, population: Population) -> float:
        """Q = M / N unless declared."""
        if self.sampling_prob is not None:
            return self.sampling_prob
        return check_probability(
            self.cohort_size / max(population.num_users, 1),
            f"expected cohort of {self.cohort_size:g} from {population.num_users} users",
            f"set mechanism.cohort_size to at most {population.num_users}, or use more data",
        )

    def scheme(self, population: Population) -> AtRate:
        """Each user by a coin."""
        # proof: uls-sampling-1
        return Poisson(self.sampling_probability(population))

    def sampler(self, user_offsets: np.ndarray, key: RootKey) -> UserSampler:
        """Draws users, and examples within each, afresh at each step."""
        scheme = self.scheme(self.population(user_offsets))
        return UserSampler(scheme, np.asarray(user_offsets), self.group_size, key)

    def unit_loss(self, loss_fn: LossFn) -> LossFn:
        """The mean of the losses of the user's examples."""
        # proof: uls-sensitivity-1
        return mean_of_examples(loss_fn)

    def in_pieces(
        self, loss_fn: LossFn, at_once: int, sharding: jax.sharding.NamedSharding | None
    ) -> tuple[LossFn, Callable[[PyTree], PyTree]]:
        """A piece is a user with fewer examples, who knows how many there are in all."""
        if self.takes_local_steps:
            raise BadInputError(
                "a user who takes local steps has one batch after the other: set "
                "mechanism.local_batch_size, and leave out execution.examples_at_once and "
                "execution.split_users"
            )
        axis = None if sharding is None else sharding.spec[0]
        cut = functools.partial(pieces_of_user, at_once=at_once, sharding=sharding)
        return mean_of_examples(loss_fn, axis), cut

    def clipped_grad(self, loss_fn: LossFn, **options: Any) -> Any:
        """As of every mechanism; or of users' updates."""
        rate = self.local_learning_rate
        if rate is None or options.get("examples_at_once") is not None:
            return super().clipped_grad(loss_fn, **options)
        for name in ("examples_at_once", "example_sharding"):
            options.pop(name, None)
        steps = (rate, self.local_batch_size, self.local_epochs)
        return clipped_updates(loss_fn, self.rule, *steps, **options)

    def units(self, examples: PyTree, example_mask: Any) -> PyTree:
        """A user is ``{"examples": [group_size, ...], "mask": bool [group_size]}``."""
        return {"examples": examples, "mask": example_mask}

    def told_sampling(self, population: Population) -> str:
        """Poisson over users."""
        prob = self.sampling_probability(population)
        return (
            f"Poisson over {population.num_users} users, probability {prob:.6g} each, "
            f"{self._examples} of a sampled user per step"
        )

    @property
    def _examples(self) -> str:
        told = "one example" if self.group_size == 1 else f"up to {self.group_size} examples"
        if not self.takes_local_steps:
            return told
        epochs = "one epoch" if self.local_epochs == 1 else f"{self.local_epochs} epochs"
        size = self.local_batch_size
        batches = "" if size is None else f" in batches of {size}"
        return f"{told} (for {epochs} of local steps{batches}, rate {self.local_learning_rate:g})"
