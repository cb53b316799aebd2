"""BLT: users in turns, without sampling, and noise that a few buffers take back over all steps.

Source: McMahan, Xu and Xu, "A hassle-free algorithm for private learning in practice" (2024, arXiv
2408.08868), with central data; Dvijotham et al. 2024 (arXiv 2404.16706) for the noise.

    turn(u) = uniform in 0 .. s-1, for each user u                # once, before training
    at each step t:
      U   = the users whose turn is t mod s
      D_u = at most group_size examples of u, afresh, for u in U
      g_t = sum over U of clip(mean over D_u of grad, C)
      g   = (g_t + C sigma (K^-1 Z)_t) / M                        # K: see noise/buffered.py

In T steps a user takes part at most k = ceil(T / s) times, and two of these steps are s apart. What
that moves K G by is bounded for whoever knows whose turn it is: nothing rests on sampling being
secret, and nothing is gained by it.

Departures: turns are drawn user by user, not by devices that check in, nor by cutting a list of
users: a list of equal parts depends on everybody.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np
import optax

from dpfl_jax import accounting
from dpfl_jax.errors import BadInputError
from dpfl_jax.mechanisms.allocation import Allocation
from dpfl_jax.mechanisms.base import Population
from dpfl_jax.noise import (
    Buffers,
    Noise,
    buffered,
    buffered_column,
    buffered_strategy,
    multiplied,
)
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Sampler, Turns, UserSampler

_LARGEST_CLIP = 1e20  # float32 ends at 3e38: for 1e9 people in 1e9 steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class BLT(Allocation):
    """Every user at every s-th step, with buffered Toeplitz noise.

    Attributes:
      cohort_size: M, the divisor, and about the expected number of users per step: that is (number
        of users) / s.
      sampling_prob: 1 / s for a whole s; default s = (number of users) / M, rounded.
      buffers: B, of the noise.
      decays: of the buffers, in [0, 1]; default, with scales, the best for the number of steps.
      scales: of the buffers, 0 or more, which add up to 1 at most.
      horizon: most steps of the run; default those of the plan.
    """

    buffers: int = 2
    decays: tuple[float, ...] | None = None
    scales: tuple[float, ...] | None = None
    horizon: int | None = None

    kind: ClassVar[str] = "blt"
    accountant: ClassVar[str] = (
        "one Gaussian of all steps, without amplification by sampling (sensitivity rounded upwards)"
    )
    assumed: ClassVar[tuple[str, ...]] = (
        "all steps are taken by one run under one key, which draws a user's turn once; whose turn "
        "it is may be known",
        "the number of turns and the buffers of the noise are public constants, fixed before "
        "looking at one user's data",
        "checkpoints are as secret as the root key: they hold sums of earlier steps without noise",
    )

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.horizon is not None and self.horizon < 1:
            raise BadInputError(f"mechanism.horizon is {self.horizon}: it must be 1 or more steps")
        if self.clip_norm > _LARGEST_CLIP:
            raise BadInputError(
                f"mechanism.clip_norm is {self.clip_norm:g}, but sums of all steps are kept, which "
                f"must stay finite: set it to at most {_LARGEST_CLIP:g}"
            )
        if self.decays is None and self.scales is None:
            return
        for name in ("decays", "scales"):
            given = np.asarray(getattr(self, name) or (), np.float32)
            if len(given) != self.buffers or not ((given >= 0) & (given <= 1)).all():
                raise BadInputError(
                    f"mechanism.{name} has {len(given)} numbers, but it must have one for each of "
                    f"the {self.buffers} buffers, all from 0 to 1"
                )
            # As it runs, so that no other number is accounted.
            object.__setattr__(self, name, tuple(map(float, given)))
        if (total := math.fsum(self.scales or ())) > 1:
            raise BadInputError(
                f"mechanism.scales add up to {total:g}, but to at most 1 they must, so that a step "
                "is remembered no more than it counts itself: make them smaller"
            )

    @property
    def chosen(self) -> Buffers:
        """Decays and scales; raises BadInputError before they are chosen for a plan's steps."""
        if self.decays is None or self.scales is None or self.horizon is None:
            raise BadInputError(
                "this blt mechanism has no buffers or horizon yet: give mechanism.decays, scales "
                "and horizon, or make a plan, which chooses them for its number of steps"
            )
        return self.decays, self.scales

    def for_steps(self, population: Population, steps: int) -> BLT:
        """With the buffers that are best for these steps, unless it has some."""
        made = dataclasses.replace(self, horizon=self.horizon or steps)
        if self.decays is not None:
            return made
        decays, scales = buffered_strategy(self.buffers, steps, self.once_in(population))
        return dataclasses.replace(made, decays=decays, scales=scales)

    # ---- what runs -------------------------------------------------------------------------

    def sampler(self, user_offsets: np.ndarray, key: RootKey) -> UserSampler:
        """Draws every user's turn, and samples examples within each user, afresh at each step."""
        separation = self.once_in(self.population(user_offsets))
        # proof: blt-sampling-1
        law = Turns(len(user_offsets) - 1, separation)
        return UserSampler(law, np.asarray(user_offsets), self.group_size, key)

    def noise_transform(self) -> optax.GradientTransformationExtraArgs:
        """Noise of standard deviation C sigma in every row of K G, taken back by the buffers."""
        buffers, steps = self.chosen, self.horizon or 1
        # What one turn moves: no more than is accounted, so that the grid is fine enough.
        reach = float(np.linalg.norm(buffered_column(buffers, steps))) * self.rule.sensitivity
        # proof: blt-noise-1
        noise = Noise(self.noise_stddev, reach, self.noise, rows=4 * steps)
        return buffered(noise, buffers, self.divisor)

    # ---- what is accounted -----------------------------------------------------------------

    def event(self, population: Population, steps: int) -> Any:
        """One Gaussian, of the most that a user's turns so far move."""
        buffers, separation = self.chosen, self.once_in(population)
        if steps > (self.horizon or 0):
            raise BadInputError(
                f"{steps} steps are asked for, but mechanism.horizon is {self.horizon}: raise it"
            )
        column = buffered_column(buffers, max(steps, 1))
        return accounting.events.toeplitz(self.sigma, column, separation, steps)

    def told_sampling(self, population: Population) -> str:
        """Turns, then as ULS."""
        separation = self.once_in(population)
        return (
            f"each of {population.num_users} users at every {separation}-th step, from one of the "
            f"first {separation} on that is drawn uniformly and independently (no amplification by "
            f"sampling is counted on), {self._examples} of a user who takes part"
        )

    def along(self, seen: np.ndarray, inside: np.ndarray, sampler: Sampler) -> np.ndarray:
        """Of all turns of a unit together what its columns of K say; of the steps that were."""
        users: Any = sampler
        there = ~np.isnan(seen).all(axis=0)
        seen = seen[:, there]
        # Who is not in the data has a turn like everybody: it is drawn, and means nothing.
        turn: np.ndarray = np.random.default_rng(0).integers(users.law.once_in, size=(len(seen),))
        turn[inside] = users.law.turn_of(users.key)[: inside.sum()]
        steps = np.arange(seen.shape[1])
        taken = (steps % users.law.once_in == turn[:, None]).astype(float)
        moved, rows = (multiplied(self.chosen, part) for part in (taken, seen))
        with np.errstate(invalid="ignore"):  # no turn
            found: np.ndarray = (moved * rows).sum(axis=1) / np.linalg.norm(moved, axis=1)
        return found[:, None]
