"""Noise beside signal, before anything is trained; and what would help where noise swamps signal.

In a round silo i takes T_i steps along (bounded sum + noise) / b_i. A bounded sum over b has norm
about C at most; its noise has standard deviation sigma C / b in each of d coordinates. Averaged
with weights w_i that add up to 1, and added up over R rounds, in units of the learning rate:

    signal  at most  R sum_i w_i T_i C_i                                 gradients at C, aligned
    noise   about    sqrt(R d sum_i w_i^2 T_i (sigma_i C_i / b_i)^2)     a random walk

A run whose noise goes farther than its gradients could at best learns nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dpfl_jax.errors import BadInputError
from dpfl_jax.federation.federation import Federation

# (the key to change, its value, what the balance would be); the values of a key in order.
Knobs = Iterable[tuple[str, Sequence[tuple[Any, Callable[[], "Balance"]]]]]


@dataclasses.dataclass(frozen=True)
class Balance:
    """Expected size of the noise, and the largest of the signal, in units of the learning rate.

    Attributes:
      noise: norm of the noise on a round's averaged update.
      signal: most that a round's averaged update can be.
      rounds: R.
    """

    noise: float
    signal: float
    rounds: int

    @property
    def ratio(self) -> float:
        """Noise over signal of the whole run; above 1 noise swamps signal."""
        if not self.noise:
            return 0.0
        return self.noise / (self.signal * math.sqrt(self.rounds))

    def to_json(self) -> dict[str, float]:
        """Plain numbers."""
        found = {"round": self.noise / self.signal, "run": self.ratio}
        return {f"over_a_{name}": float(f"{value:.4g}") for name, value in found.items()}

    def __str__(self) -> str:
        """In one sentence."""
        return (
            f"noise on a round's averaged update is about {self.noise / self.signal:.3g} times the "
            f"largest that the update itself can be, and over {self.rounds} rounds "
            f"{self.ratio:.3g} times"
        )


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
        stddev = mechanism.sigma * mechanism.clip_norm / mechanism.divisor(plan.facts)
        variance += federation.participation * share**2 * plan.local_steps * stddev**2
        signal += federation.participation * share * plan.local_steps * mechanism.clip_norm
    return Balance(math.sqrt(dim * variance), signal, federation.rounds)


def advice(balance: Balance, knobs: Knobs) -> list[str]:
    """Sentences to print: the balance, and where noise swamps signal the values that would do.

    Args:
      balance: of what is configured.
      knobs: see ``Knobs``; asked for only if needed.
    """
    if balance.ratio <= 1.0:
        return [str(balance)]
    found = []
    for key, values in knobs:
        for value, would_be in values:
            try:
                ratio = would_be().ratio
            except BadInputError:  # no such mechanism, or no noise that meets the target
                continue
            if ratio <= 1.0:
                found.append(f"{key}={value} ({ratio:.2g})")
                break
    better = (
        f"one of these would do, the noise then being so many times the signal: {', '.join(found)}"
        if found
        else "no single change of epsilon, records a step, cap or rounds would do: take a smaller "
        "model, or more silos or people"
    )
    return [f"[bold yellow]warning:[/bold yellow] noise swamps signal: {balance}; {better}"]


def doubled(start: float, most: float, times: int = 6) -> list[float]:
    """2, 4, ... times ``start``, up to ``most``, rounded to three digits."""
    found = [float(f"{start * 2**k:.3g}") for k in range(1, times + 1)]
    return [*dict.fromkeys(min(value, most) for value in found)]
