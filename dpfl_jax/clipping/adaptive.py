"""Clip norms that follow a quantile of the units' norms, privately.

Source: Andrew, Thakkar, McMahan, Ramaswamy, "Differentially private learning with adaptive
clipping" (2021), Algorithm 1 and Theorem 1.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from dpfl_jax.clipping.rules import SMALLEST_CLIP_NORM
from dpfl_jax.errors import BadInputError


@dataclasses.dataclass(frozen=True)
class AdaptiveClip:
    """Geometric updates of the clip norm towards a quantile of the norms.

    Each step also releases how many units were at most at the clip norm, with noise. That release
    is paid for by more noise on the gradient, so that both together are one Gaussian mechanism of
    noise multiplier z (Theorem 1): account for z, and add ``gradient_noise_multiplier(z)`` times
    the sensitivity to the sum.

    Attributes:
      initial: clip norm of the first step.
      quantile: share of units not to be clipped, between 0 and 1.
      learning_rate: of the logarithm of the clip norm.
      count_noise: stddev of the noise on the count, in units; the paper takes a twentieth of the
        cohort (section 3.1).
    """

    initial: float
    count_noise: float
    quantile: float = 0.5
    learning_rate: float = 0.2

    def __post_init__(self) -> None:
        """Validates."""
        for name in ("initial", "learning_rate", "count_noise"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise BadInputError(
                    f"AdaptiveClip: {name} is {value}, but it must be finite and above 0"
                )
        if not 0 <= self.quantile <= 1:
            raise BadInputError(
                f"AdaptiveClip: quantile is {self.quantile}, but it must be between 0 and 1"
            )

    def gradient_noise_multiplier(self, noise_multiplier: float) -> float:
        """z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2), the noise multiplier for the sum alone.

        Args:
          noise_multiplier: z, of the step as a whole, as accounted for.

        Raises:
          BadInputError: the count alone costs more than z allows.
        """
        if noise_multiplier == 0:
            return 0.0
        left = noise_multiplier**-2 - (2 * self.count_noise) ** -2
        if left <= 0:
            raise BadInputError(
                f"AdaptiveClip: count_noise {self.count_noise} is too small for noise multiplier "
                f"{noise_multiplier}: it must be above {noise_multiplier / 2}"
            )
        return left**-0.5

    def count(self, norms: jax.Array, mask: jax.Array, clip_norm: jax.Array | float) -> jax.Array:
        """Sum over units of [norm <= C] - 1/2: one unit changes it by at most 1/2; float32.

        Args:
          norms: float32 [n], before bounding.
          mask: bool [n]; padding adds exactly 0. Non-finite units count as above C only if the
            caller leaves them in the mask with an infinite norm; either choice is private.
          clip_norm: C of this step.
        """
        below = (norms <= clip_norm).astype(jnp.float32)
        return jnp.sum(jnp.where(jnp.asarray(mask) != 0, below - 0.5, 0.0))

    def update(
        self, clip_norm: jax.Array | float, noised_count: jax.Array, expected_units: float
    ) -> jax.Array:
        """The next clip norm: C exp(-eta (b - quantile)), never so small that float32 loses it.

        Args:
          clip_norm: C of this step.
          noised_count: ``count`` over the whole step plus N(0, count_noise^2):
            ``noise.Noise(count_noise, 0.5).add(key, count)``.
          expected_units: expected units a step, a public constant.
        """
        share = noised_count / expected_units + 0.5
        changed = clip_norm * jnp.exp(-self.learning_rate * (share - self.quantile))
        return jnp.maximum(changed, SMALLEST_CLIP_NORM)
