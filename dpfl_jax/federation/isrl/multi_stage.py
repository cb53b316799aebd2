"""Multi-stage accelerated SGD for strongly convex losses (Appendix E.1; Ghadimi and Lan 2013)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.isrl.accelerated import accelerated
from dpfl_jax.federation.isrl.method import Method
from dpfl_jax.federation.isrl.minibatch_sgd import Project


@dataclasses.dataclass(frozen=True)
class Stage:
    """One run of Algorithm 1, from where the one before it ended.

    Attributes:
      rounds: R_k.
      scale: u_k; prox weights are 4 u_k / (r (r+1)).

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> isrl.Stage(rounds=10, scale=2.0).rounds
      10
    """

    rounds: int
    scale: float


def stages(
    rounds: int,
    smoothness: float,
    strong_convexity: float,
    variance: float,
    gap: float,
    *,
    stage_constant: float = 1.0,
) -> list[Stage]:
    """The stages that fit in R rounds, the last one lengthened to end with them.

    A silo pays for R rounds, so that none is left over: a longer stage's bound is a lower one. If
    not even the first stage fits, it is cut to R.

    The paper prints u_k with R_k (R_k+1) (R_k+2) in the denominator, so that it is always 2 beta;
    its own stage bound (D_0^2 <= 2 gap 2^-(k-1) / mu) puts it in the numerator.

    Args:
      rounds: R.
      smoothness: beta.
      strong_convexity: mu > 0.
      variance: V^2 of the mean noisy gradient.
      gap: Delta >= F(w_0) - F*.
      stage_constant: scales 128/3, which is very conservative.

    Raises:
      BadInputError: mu is not positive.

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> plan = isrl.stages(100, smoothness=2.0, strong_convexity=1.0, variance=0.1, gap=1.0)
      >>> sum(stage.rounds for stage in plan)
      100
    """
    if strong_convexity <= 0:
        raise BadInputError(
            "multi-stage needs a strongly convex loss (mu > 0): use the accelerated algorithm"
        )
    lengths: list[int] = []
    for k in range(1, 61):
        target = gap * 2.0**-k
        least = 4 * math.sqrt(2 * smoothness / strong_convexity)
        noise = stage_constant * 128 * variance / (3 * strong_convexity * target / 2)
        length = math.ceil(max(least, noise, 1.0))
        if sum(lengths) + length > rounds:
            break
        lengths.append(length)
    if lengths:
        lengths[-1] += rounds - sum(lengths)
    found = []
    for k, length in enumerate(lengths or [rounds]):
        cube = float(length) * (length + 1) * (length + 2)
        inner = strong_convexity * variance / (3 * gap * 2.0**-k) * cube
        found.append(Stage(length, max(2 * smoothness, math.sqrt(inner))))
    return found


def multi_stage(plan: Sequence[Stage], strong_convexity: float, project: Project) -> Method:
    """The stages over consecutive rounds of a schedule; no round serves twice.

    Examples:
      >>> from dpfl_jax.federation import isrl
      >>> plan = isrl.stages(100, smoothness=2.0, strong_convexity=1.0, variance=0.1, gap=1.0)
      >>> isrl.multi_stage(plan, strong_convexity=1.0, project=lambda w: w).rounds
      100
    """
    rounds = [np.arange(1, stage.rounds + 1, dtype=float) for stage in plan]
    alphas = np.concatenate([2 / (r + 1) for r in rounds])
    prox = np.concatenate([4 * s.scale / (r * (r + 1)) for s, r in zip(plan, rounds, strict=True)])
    return accelerated(
        jnp.asarray(alphas, jnp.float32),
        jnp.asarray(prox, jnp.float32),
        strong_convexity,
        project,
        jnp.asarray(np.concatenate([r == 1 for r in rounds])),
    )
