"""A Renyi filter: every unit pays for its own steps, and takes part only while its budget lasts.

Source: Feldman and Zrnic, "Individual privacy accounting via a Renyi filter" (2021, arXiv
2008.11193), with Poisson sampling. The norm of what a unit may add to a sum is bounded by one of a
few public levels, C 2^(-j/4). A step costs a unit the Renyi divergence, at one public order and the
larger of both directions, of a Poisson-sampled Gaussian of its level, whether or not it is drawn.
The budget of every unit is the cost of ``least_steps`` steps at the clip norm.

Where parts of units are drawn (examples of users), each part is bounded by the unit's level, and
the Gaussian moves by a binomial number of them; numbers of parts, too, are rounded up to public
ones. Costs are whole numbers, rounded up, so that adding them is exact.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from dpfl_jax.accounting.drawn import RESERVED
from dpfl_jax.accounting.events import els
from dpfl_jax.accounting.renyi import ORDERS, epsilon_from_renyi, renyi_divergences
from dpfl_jax.errors import BadInputError

LEVELS, PER_HALF = 32, 4
_UNITS = 1 << 30  # the cost of a step at the clip norm
# Absolute and relative rounding errors of a divergence, which is computed by sums near 1.
_ROUNDING, _RELATIVE = 1e-13, 1e-9


def bounds(clip_norm: float) -> np.ndarray:
    """Float32 [LEVELS]: the bound of each level; the first is the clip norm."""
    return (clip_norm * 2.0 ** (-np.arange(LEVELS) / PER_HALF)).astype(np.float32)


def levels_of(norms: np.ndarray, clip_norm: float) -> np.ndarray:
    """uint8 [n]: for each norm the level of the least bound that is not below it, or the first."""
    norms = np.asarray(norms, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.floor(PER_HALF * np.log2(clip_norm / norms))
    steps = np.where(np.isfinite(norms) & ~np.isnan(steps), steps, 0.0)
    return np.clip(steps, 0, LEVELS - 1).astype(np.uint8)


def sizes(most: int) -> tuple[int, ...]:
    """Numbers of parts for which costs are computed: up to ``most``, about four per doubling."""
    steps = range(PER_HALF * most.bit_length() + 1)
    return tuple(sorted({min(most, math.ceil(2 ** (i / PER_HALF))) for i in steps}))


def best_order(event: Any, delta: float) -> float:
    """The order of ``renyi.ORDERS`` at which an event's epsilon is smallest."""
    divergences, delta = renyi_divergences(event), delta * (1 - RESERVED)
    each = [epsilon_from_renyi(divergences[[i]], ORDERS[[i]], delta) for i in range(len(ORDERS))]
    return float(ORDERS[int(np.argmin(each))])


@dataclasses.dataclass(frozen=True)
class RenyiFilter:
    """The costs of steps, and the budget of every unit.

    Attributes:
      costs: of a step, by number of parts (``sizes``) and level, in units of 2^-30 of the cost of a
        step at the clip norm with the most parts.
      least_steps: number of steps that every unit can pay for.
      order: Renyi order.
      step: divergence of the costliest step, nats.
      most: largest number of parts of a unit.
    """

    costs: tuple[tuple[int, ...], ...]
    least_steps: int
    order: float
    step: float
    most: int = 1

    @classmethod
    def of(
        cls, sigma: float, prob: float, least_steps: int, order: float, most: int = 1
    ) -> RenyiFilter:
        """The filter of Poisson-sampled Gaussians.

        Args:
          sigma: noise multiplier, > 0.
          prob: of a part in a step.
          least_steps: number of steps whose cost at the clip norm, with the most parts, is the
            budget.
          order: one of ``renyi.ORDERS``.
          most: largest number of parts of a unit.

        Raises:
          BadInputError: there is so little noise that no cost can be computed.
        """
        costs, step = _costs(sigma, prob, order, most)
        return cls(costs, least_steps, order, step, most)

    @property
    def budget(self) -> int:
        """The budget of every unit, in the unit of ``costs``."""
        return self.least_steps * _UNITS

    def steps_left(
        self, spent: np.ndarray, levels: np.ndarray, most: int, parts: np.ndarray | int = 1
    ) -> np.ndarray:
        """int64 [n]: steps that each unit can pay for at its level, up to ``most``.

        Args:
          spent: int64 [n].
          levels: uint8 [n].
          most: at least 0.
          parts: int64 [n], at most ``self.most``; units without any pay as with one.
        """
        # proof: individual-filter-1
        return np.minimum((self.budget - spent) // self._costs_of(levels, parts), most)

    def after(
        self, spent: np.ndarray, levels: np.ndarray, steps: int, parts: np.ndarray | int = 1
    ) -> np.ndarray:
        """int64 [n]: what units have spent after ``steps`` more, of those that they can pay for."""
        # proof: individual-filter-2
        taken = self.steps_left(spent, levels, steps, parts)
        return spent + taken * self._costs_of(levels, parts)

    def at_most(self, spent: np.ndarray, steps: int) -> np.ndarray:
        """int64 [n]: the most that units have spent after ``steps`` more, whatever their levels.

        Args:
          spent: int64 [n].
          steps: at least 0.
        """
        return np.minimum(spent + steps * _UNITS, self.budget)

    def _costs_of(self, levels: np.ndarray, parts: np.ndarray | int) -> np.ndarray:
        return np.asarray(self.costs)[np.searchsorted(sizes(self.most), parts), levels]

    def epsilons(self, spent: np.ndarray, delta: float) -> np.ndarray:
        """Float64 [n]: what each unit has spent, as an epsilon at the filter's order; secret."""
        order, delta = np.array([self.order]), delta * (1 - RESERVED)
        amounts, which = np.unique(np.asarray(spent), return_inverse=True)
        divergences = amounts[:, None] * (self.step / _UNITS)
        return np.array([epsilon_from_renyi(d, order, delta) for d in divergences])[which]


@functools.lru_cache(maxsize=64)
def _costs(
    sigma: float, prob: float, order: float, most: int
) -> tuple[tuple[tuple[int, ...], ...], float]:
    """Costs of a step by parts and level, and the divergence of the costliest step."""
    multipliers = sigma * 2.0 ** (np.arange(LEVELS) / PER_HALF)
    array = np.array([order])
    divergences = np.array(
        [
            [renyi_divergences(els(s, prob, n, 1), array)[0] for s in multipliers]
            for n in sizes(most)
        ]
    )
    largest = float(divergences[-1, 0])
    if not np.isfinite(divergences).all():
        raise BadInputError(
            f"with the noise multiplier {sigma:g} a step costs more than can be computed at the "
            f"Renyi order {order:g}: raise the noise"
        )
    # proof: individual-filter-3
    safe = np.ceil(_UNITS * ((divergences + _ROUNDING / (order - 1)) * (1 + _RELATIVE) / largest))
    return tuple(tuple(row) for row in np.minimum(safe, _UNITS).astype(int).tolist()), largest
