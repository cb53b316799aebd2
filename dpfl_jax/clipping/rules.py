"""Clip rules: from the norm of a unit's gradient to the weight it is multiplied by.

A rule is a frozen dataclass. It carries its own sensitivity, the largest norm that one unit's
contribution can have, so that noise is scaled to what was summed and to nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dpfl_jax.errors import BadInputError


def _check_positive(rule: str, **values: float) -> None:
    for name, value in values.items():
        if isinstance(value, jax.Array):  # a clip norm that adapts is known only on the device
            continue
        if not (math.isfinite(value) and value > 0):
            raise BadInputError(f"{rule}: {name} is {value}, but it must be finite and above 0")


@dataclasses.dataclass(frozen=True)
class Rule:
    """What all rules share: the weights of one norm per unit, the same for every parameter."""

    def weights(self, norms: jax.Array, group: jax.Array | None = None) -> jax.Array:
        """Returns what each unit's gradient is multiplied by.

        Args:
          norms: float32 [n], finite and >= 0.
          group: int or float [n], used by rules that weight by group; see ``GroupAverage``.

        Returns:
          float32 [n].
        """
        raise NotImplementedError

    @property
    def sensitivity(self) -> float:
        """Largest norm of one privacy unit's contribution (adjacency: add or remove it)."""
        raise NotImplementedError

    def partition(self, names: Sequence[str]) -> list[int] | None:
        """The group of parameters each leaf belongs to, or None: all leaves are one group."""
        del names
        return None

    def leaf_weights(
        self, squared: Sequence[jax.Array], names: Sequence[str], group: jax.Array | None
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Weights for each leaf from the squared norms of each leaf.

        Args:
          squared: one float32 [n] per leaf, finite.
          names: the leaves' names.
          group: see ``weights``.

        Returns:
          The weights as reported ([n], or [n, groups] for rules with groups of parameters), and
          one float32 [n] per leaf.
        """
        del names
        weights = self.weights(jnp.sqrt(sum(squared, start=jnp.zeros(()))), group)
        return weights, [weights] * len(squared)


@dataclasses.dataclass(frozen=True)
class Standard(Rule):
    """min(1, C/n): contributions have norm at most C (Abadi et al. 2016, Algorithm 1).

    Attributes:
      clip_norm: C > 0, in the units of the gradient.
    """

    clip_norm: float

    def __post_init__(self) -> None:
        """Validates."""
        _check_positive("Standard", clip_norm=self.clip_norm)

    def weights(self, norms: jax.Array, group: jax.Array | None = None) -> jax.Array:
        """See ``Rule.weights``."""
        del group
        return jnp.where(norms > self.clip_norm, self.clip_norm / norms, 1.0)

    @property
    def sensitivity(self) -> float:
        """C."""
        return self.clip_norm


@dataclasses.dataclass(frozen=True)
class Normalized(Rule):
    """min(1/C, 1/n): the standard rule divided by C (De et al. 2022, section 3.3).

    The learning rate then does not scale with C.

    Attributes:
      clip_norm: C > 0.
    """

    clip_norm: float

    def __post_init__(self) -> None:
        """Validates."""
        _check_positive("Normalized", clip_norm=self.clip_norm)

    def weights(self, norms: jax.Array, group: jax.Array | None = None) -> jax.Array:
        """See ``Rule.weights``."""
        del group
        return 1.0 / jnp.maximum(norms, self.clip_norm)

    @property
    def sensitivity(self) -> float:
        """1."""
        return 1.0
