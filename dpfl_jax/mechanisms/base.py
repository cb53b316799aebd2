"""What every mechanism is: one frozen object that samples, bounds, adds noise and accounts.

Because all four come from the same fields, what is accounted cannot differ from what runs.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dpfl_jax import accounting
from dpfl_jax.clipping import Normalized, Rule, Standard, bounded_grad
from dpfl_jax.errors import BadInputError
from dpfl_jax.noise import GaussianNoise
from dpfl_jax.randomness import RootKey
from dpfl_jax.sampling import Sampler

PyTree = Any
LossFn = Callable[..., jax.Array]
Self = TypeVar("Self", bound="Mechanism")


@dataclasses.dataclass(frozen=True)
class Population:
    """What a mechanism must know of a data set to sample and to account: public facts.

    Attributes:
      num_users: users in the training set.
      num_examples: examples in the training set, before any limit.
      num_units: units that may be drawn (ELS: examples of the limited set; ULS: users).
    """

    num_users: int
    num_examples: int
    num_units: int

    def default_delta(self) -> float:
        """num_examples ** -1.1 (Charles et al. 2024, section 5)."""
        return float(self.num_examples) ** -1.1


def require_positive(name: str, value: float) -> None:
    """Raises BadInputError unless ``value`` is finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise BadInputError(f"{name} is {value}, but it must be a finite number above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism(abc.ABC):
    """A private (or, for baselines, non-private) way to estimate a gradient.

    Attributes:
      clip_norm: C, the largest norm of one unit's gradient.
      clipping: ``"standard"`` (min(1, C/n) times the gradient; contribution at most C) or
        ``"normalized"`` (min(1/C, 1/n); at most 1, so that the learning rate does not scale with
        C; De et al. 2022).
      noise_multiplier: sigma; the noise on the sum has stddev sigma times the largest
        contribution. None until calibrated.
    """

    clip_norm: float = 1.0
    clipping: Literal["standard", "normalized"] = "standard"
    noise_multiplier: float | None = None

    kind: ClassVar[str]
    unit: ClassVar[str]
    private: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Validates what all mechanisms share."""
        require_positive("clip_norm", self.clip_norm)
        if self.clipping not in ("standard", "normalized"):
            raise BadInputError(
                f"clipping is {self.clipping!r}, but it must be 'standard' or 'normalized'"
            )
        if self.noise_multiplier is not None and not (
            math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0
        ):
            raise BadInputError(
                f"noise_multiplier is {self.noise_multiplier}, but it must be finite and >= 0"
            )

    # ---- what runs -------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def divisor(self) -> float:
        """The constant the noised sum is divided by: the expected size, never the realised one."""

    @abc.abstractmethod
    def population(self, user_offsets: np.ndarray) -> Population:
        """Counts what this mechanism samples from. user_offsets: int64 [num_users + 1]."""

    @abc.abstractmethod
    def sampling_probability(self, population: Population) -> float:
        """Probability with which one unit is drawn at each step; raises BadInputError over 1."""

    @abc.abstractmethod
    def sampler(self, user_offsets: np.ndarray, key: RootKey) -> Sampler:
        """Returns the sampler of a run."""

    def unit_loss(self, loss_fn: LossFn) -> LossFn:
        """Turns the loss of one example into the loss of one unit."""
        return loss_fn

    def units(self, examples: PyTree, example_mask: Any) -> PyTree:
        """Turns the examples of some units into what ``unit_loss`` takes.

        Args:
          examples: pytree of arrays [..., (group_size,) ...], zero where there is no example.
          example_mask: bool [..., group_size], or None if a unit is one example.

        Returns:
          A pytree of arrays with the same leading axes.
        """
        del example_mask
        return examples

    @property
    def rule(self) -> Rule:
        """The clip rule; it carries the sensitivity that the noise is scaled to."""
        return {"standard": Standard, "normalized": Normalized}[self.clipping](self.clip_norm)

    def bounded_grad(self, loss_fn: LossFn, **options: Any) -> Any:
        """Returns the function that sums this mechanism's bounded unit gradients.

        Args:
          loss_fn: ``(params, example) -> scalar`` for one example.
          **options: passed to ``clipping.bounded_grad`` (``strategy``, ...).
        """
        return bounded_grad(self.unit_loss(loss_fn), rule=self.rule, **options)

    @property
    def sigma(self) -> float:
        """The noise multiplier; raises BadInputError before calibration."""
        if self.noise_multiplier is None:
            raise BadInputError(
                f"this {self.kind} mechanism has no noise multiplier: set noise_multiplier, or "
                "call calibrate() with a target epsilon and delta"
            )
        return self.noise_multiplier

    @property
    def noise(self) -> GaussianNoise:
        """The noise on the bounded sum."""
        return GaussianNoise(self.sigma * self.rule.sensitivity)

    # ---- what is accounted -----------------------------------------------------------------

    @abc.abstractmethod
    def event(self, population: Population, steps: int) -> Any:
        """The ``dp_accounting.DpEvent`` of ``steps`` steps for one privacy unit."""

    def calibrate(
        self: Self, population: Population, steps: int, epsilon: float, delta: float
    ) -> Self:
        """Returns a copy whose noise multiplier is the smallest known to meet the target.

        Raises:
          BadInputError: epsilon <= 0, delta outside (0, 1), steps < 1, or out of reach.
        """

        def event(sigma: float) -> Any:
            return dataclasses.replace(self, noise_multiplier=sigma).event(population, steps)

        sigma = accounting.calibrate_noise_multiplier(event, epsilon, delta)
        return dataclasses.replace(self, noise_multiplier=sigma)

    @abc.abstractmethod
    def guarantee(
        self, population: Population, steps: int, delta: float, caveats: tuple[str, ...] = ()
    ) -> accounting.Guarantee:
        """What ``steps`` steps guarantee at ``delta``; ``caveats`` are added to the mechanism's."""


COMMON_ASSUMPTIONS = (
    "every example belongs to exactly one user, and removing a user removes all their examples",
    "the numbers of users, of examples and of examples left by the group size, the group size, the "
    "expected size, the clip norm and the number of steps are public constants, fixed before "
    "looking at one user's data",
    "the root key is secret; threefry (64-bit keys, one a step) and HMAC-SHA256 outputs are "
    "treated as random bits, and "
    "float32 Gaussian noise as real-valued Gaussian noise",
)


def mean_of_examples(loss_fn: LossFn) -> LossFn:
    """Lifts a loss of one example to the loss of one user: the mean over the examples they have.

    The user is ``{"examples": pytree [group_size, ...], "mask": bool [group_size]}``. The divisor
    is the user's own count, as in Algorithm 2 of Charles et al. 2024; no user without examples.
    """

    def user_loss(params: PyTree, user: PyTree, **kwargs: Any) -> jax.Array:
        losses = jax.vmap(lambda example: loss_fn(params, example, **kwargs))(user["examples"])
        mask = user["mask"]
        return jnp.sum(jnp.where(mask, losses, 0.0)) / jnp.maximum(jnp.sum(mask), 1)

    return user_loss
