"""Adaptive clip norms, which follow a quantile of the units' gradient norms.

    clip = Adaptive(quantile=0.5)
    summed = clipped_and_counted(clip, clipped_grad(loss_fn, rule=clip.rule()))
    noise = adapting_noise(clip, transformation(Noise(z * clip.sensitivity, clip.sensitivity), m))
    state = noise.init(params)

    total = summed(state.memory.clip_norm, params, batch, mask=mask).sum
    gradient, state = noise.update(total, state, params, noise_key=key)

In addition to its clipped gradient, each unit adds one more coordinate to the sum, which says
whether its norm was at most the clip norm. The sum is noised once, as a whole, so a step is one
Gaussian mechanism with noise multiplier z, accounted as under any other rule: Theorem 1 of the
paper says how the noise is shared between gradient and count.

Source: Andrew, Thakkar, McMahan, Ramaswamy, "Differentially private learning with adaptive
clipping" (2021), Algorithm 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpfl_jax.clipping.gradients import ClippedGrad
from dpfl_jax.clipping.result import ClippedGradResult, real_units
from dpfl_jax.clipping.rules import SMALLEST_CLIP_NORM, Normalized, check_floats
from dpfl_jax.errors import probability, require

PyTree = Any
# Squares of larger norms overflow float32.
_LARGEST_CLIP_NORM = 1e18


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """A clip norm that moves towards a quantile of the gradient norms, by a factor in each step.

    Attributes:
      clip_norm: C of the first step.
      quantile: target share of units that are not clipped, between 0 and 1.
      learning_rate: eta, learning rate of log C.
      count_weight: s, weight of the count of units relative to the gradients. At noise multiplier z
        the count has noise of about z / s units, and the noise on gradients grows by a factor of
        sqrt(1 + s^2/4): with s = 0.1 these are 10 z units and 0.1 %.

    Examples:
      >>> from dpfl_jax.clipping import Adaptive
      >>> clip = Adaptive(clip_norm=0.5, quantile=0.5)
      >>> round(clip.sensitivity, 5)  # of the normalised gradient and the count together
      1.00125
    """

    kind: ClassVar[str] = "adaptive"

    clip_norm: float = 1.0
    quantile: float = 0.5
    learning_rate: float = 0.2
    count_weight: float = 0.1

    def __post_init__(self) -> None:
        check_floats(self)
        most_of = {"clip_norm": _LARGEST_CLIP_NORM, "count_weight": 1e6, "learning_rate": 1e6}
        for name, most in most_of.items():
            value, wanted = getattr(self, name), f"at most {most:g} for float32 sums"
            require(value <= most, f"Adaptive: {name}", value, wanted)
        probability("Adaptive: quantile", self.quantile, zero=False, one=False)

    @property
    def sensitivity(self) -> float:
        """sqrt(1 + s^2/4), the largest norm that one unit adds to a ``CountedSum``, whatever C is.

        This is for add-or-remove adjacency; replacing a unit may change the sum by twice as much.
        """
        return math.hypot(1.0, self.count_weight / 2)

    @property
    def threshold(self) -> None:
        """None, as the clip norm changes from step to step."""

    @property
    def assumption(self) -> str:
        """The sentence of a guarantee about the clip norm and its effect on the sensitivity."""
        return (
            f"the clip norm is such a constant in the first step alone, {self.clip_norm:g}; that "
            "of a later step follows from a count of the units whose norm was at most the clip "
            "norm, which is noised and released with their sum: one unit moves both together by "
            f"at most {self.sensitivity:.7g} clip norms, and noise is scaled to that"
        )

    def rule(self, clip_norm: jax.Array | float | None = None) -> Normalized:
        """Returns the rule of a step with this C, a number or traced value; None: the first C."""
        return Normalized(self.clip_norm if clip_norm is None else clip_norm)  # type: ignore[arg-type]


class CountedSum(NamedTuple):
    """The sum of gradients and count that is noised as a whole.

    Attributes:
      gradient: sum of the clipped gradients, divided by C.
      indicators: s times the sum of 1/2 for each unit with norm at most C and -1/2 for each other
        unit; float32 scalar.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.clipping import CountedSum
      >>> total = CountedSum(gradient={"w": jnp.ones(2)}, indicators=jnp.float32(0.05))
      >>> total.gradient["w"].shape
      (2,)
    """

    gradient: PyTree
    indicators: jax.Array


class AdaptiveMemory(NamedTuple):
    """The state between steps: the next step's C, which is public, and the memory of the noise.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.clipping import AdaptiveMemory
      >>> float(AdaptiveMemory(clip_norm=jnp.float32(0.5), noise=()).clip_norm)
      0.5
    """

    clip_norm: jax.Array
    noise: PyTree


def clipped_and_counted(clip: Adaptive, gradient: ClippedGrad) -> Callable[..., ClippedGradResult]:
    """Returns ``(clip_norm, *args, **options) -> ClippedGradResult`` with a ``CountedSum``.

    One unit moves the result's ``sum`` by at most ``clip.sensitivity`` (divided by the gradient's
    ``normalize_by``). Padding, and units whose gradient is not finite, add nothing.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.clipping import Adaptive, clipped_and_counted, clipped_grad
      >>> clip = Adaptive()
      >>> summed = clipped_and_counted(clip, clipped_grad(lambda w, x: w * x, rule=clip.rule()))
      >>> summed(2.0, jnp.ones(()), jnp.array([1.0, 4.0])).sum  # one unit below the clip norm 2
      CountedSum(gradient=Array(1.5, dtype=float32), indicators=Array(0., dtype=float32))
    """

    def summed(
        clip_norm: jax.Array | float, *args: PyTree, mask: jax.Array | None = None, rng: Any = None
    ) -> ClippedGradResult:
        result = gradient(*args, mask=mask, rng=rng, rule=clip.rule(clip_norm))
        counted = ~result.nonfinite if mask is None else ~result.nonfinite & real_units(mask)
        # proof: clip-7
        sides = jnp.where(result.norms <= clip_norm, 0.5, -0.5).astype(jnp.float32)
        indicators = clip.count_weight * jnp.sum(jnp.where(counted, sides, 0))
        total = CountedSum(result.sum, indicators / gradient.normalize_by)
        return dataclasses.replace(result, sum=total)

    return summed


def adapting_noise(
    clip: Adaptive, noise: optax.GradientTransformationExtraArgs
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that noises a ``CountedSum``, adapts C, and multiplies by C.

    Args:
      clip: how C adapts.
      noise: a ``noise.transformation`` that adds independent noise, scaled to ``clip.sensitivity``,
        to every leaf, and divides by the expected number of units, a constant.

    Returns:
      A transformation like ``noise``, whose state's ``memory`` is an ``AdaptiveMemory``.

    Examples:
      >>> import jax.numpy as jnp
      >>> from dpfl_jax.clipping import Adaptive, adapting_noise
      >>> from dpfl_jax.noise import Noise, transformation
      >>> clip = Adaptive(clip_norm=0.5)
      >>> noise = adapting_noise(clip, transformation(Noise(1.0, clip.sensitivity), divisor=8.0))
      >>> float(noise.init({"w": jnp.zeros(2)}).memory.clip_norm)
      0.5
    """

    def init(params: PyTree) -> Any:
        state: Any = noise.init(CountedSum(params, jnp.zeros((), jnp.float32)))
        first = jnp.asarray(clip.clip_norm, jnp.float32)
        return state._replace(memory=AdaptiveMemory(first, state.memory))

    def update(
        total: CountedSum, state: Any, params: PyTree | None = None, **given: Any
    ) -> tuple[PyTree, Any]:
        clip_norm, inner = state.memory
        (mean, indicators), after = noise.update(total, state._replace(memory=inner), **given)
        # proof: clip-8
        share = indicators / clip.count_weight + 0.5
        changed = clip_norm * jnp.exp(-clip.learning_rate * (share - clip.quantile))
        following = jnp.clip(changed, SMALLEST_CLIP_NORM, _LARGEST_CLIP_NORM)
        gradient = jax.tree.map(
            lambda g, p: None if g is None else (clip_norm * g).astype(p.dtype),
            mean,
            mean if params is None else params,
            is_leaf=lambda x: x is None,  # frozen parameters have no sum
        )
        return gradient, after._replace(memory=AdaptiveMemory(following, after.memory))

    return optax.GradientTransformationExtraArgs(init, update)
