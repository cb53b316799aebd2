"""Noise beside signal, before anything is trained; and what would help where noise swamps signal.

In a round silo i takes T_i steps along (bounded sum + noise) / b_i. A bounded sum over b has norm
about C at most; its noise has standard deviation sigma C / b in each of d coordinates. Averaged
with weights w_i that add up to 1, and added up over R rounds, in units of the learning rate:

    signal  at most  R sum_i w_i T_i C_i                                 gradients at C, aligned
    noise   about    sqrt(R d sum_i w_i^2 T_i (sigma_i C_i / b_i)^2)     a random walk

A run whose noise goes farther than its gradients could at best learns nothing.
"""

from __future__ import annotations

import math

from dpfl_jax.federation.federation import Federation
from dpfl_jax.run.balance import Balance


def balance_of(federation: Federation, dim: int) -> Balance:
    """The balance of a federation whose noise is set.

    Args:
      federation: with its noise.
      dim: d, number of parameters.
    """
    plans = [federation.silos[i] for i in federation.participants.tolist()]
    # On average so many take part, and weights are those of them.
    total = sum(plan.weight for plan in plans) * federation.participation
    variance = signal = 0.0
    for plan in plans:
        mechanism, share = plan.mechanism, plan.weight / total
        stddev = plan.noise_stddev / mechanism.participation.divisor(plan.facts)
        variance += federation.participation * share**2 * plan.local_steps * stddev**2
        signal += federation.participation * share * plan.local_steps * mechanism.clip.sensitivity
    return Balance(math.sqrt(dim * variance), signal, federation.rounds)
