"""Workloads: the linear map from an optimiser's gradients to its parameters after each step.

Source: Denisov, McMahan, Rush, Smith and Thakurta 2022 (arXiv 2202.08312), sections 2 and 5.
Momentum and a learning rate schedule are factors of the workload A; the smaller A K^-1, the better
the strategy K. In step t, Optax's SGD moves the parameters by

    rate_t * (memory_0 g_t + memory_1 g_{t-1} + ...)

(memory 1, beta, beta^2, ... with momentum beta). A adds these up over the steps; with a constant
rate and no momentum these are prefix sums. The error is what the noise adds to the parameters, root
mean square over the steps. Weight decay is ignored, as it does not change how gradients add up.

With r the first column of memory times K^-1, column i of A K^-1 is the running sum of
rate_i r_0, rate_{i+1} r_1, ... If all rates are equal, all columns are parts of the first.
Otherwise a search takes 128 columns, each for its neighbours, because rates change slowly; an
evaluation takes O(128 steps). A stated error is computed from 8,192 columns at most.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from dpfl_jax.errors import BadInputError

_SEARCHED, _MEASURED, _CHUNK = 128, 8192, 64


@dataclasses.dataclass(frozen=True)
class Workload:
    """How gradients add up to parameters over the steps of a run; the default is prefix sums.

    Attributes:
      memory: factors by which a step's gradient and the gradients before it move the parameters;
        the first factor is 1, and missing factors are 0.
      rates: learning rates of the steps, scaled so that the largest is 1; None: all are equal.

    Examples:
      >>> from dpfl_jax.matrices import Workload
      >>> Workload(memory=(1.0, 0.5)).response(3).tolist()
      [1.0, 1.5, 1.5]
    """

    memory: tuple[float, ...] = (1.0,)
    rates: tuple[float, ...] | None = None

    def response(self, steps: int) -> np.ndarray:
        """Returns what K^-1 multiplies, float64 [steps]: ``memory``, or its sums without rates."""
        given = np.zeros(steps)
        given[: len(self.memory)] = self.memory[:steps]
        return np.cumsum(given) if self.rates is None else given

    def columns(self, steps: int) -> Columns:
        """Returns the columns whose mean square the search for a strategy minimises."""
        return next(self._columns(steps, _SEARCHED, _SEARCHED))

    def error(self, divided: np.ndarray) -> float:
        """Returns the root mean square of the parameters' noise, relative to independent noise.

        Both noises have standard deviation 1, the one in K G and the other in G.

        Args:
          divided: ``response`` divided by K, float64 [T].
        """
        given = self.response(len(divided))
        if self.rates is None:
            return math.sqrt(np.cumsum(divided**2).mean() / np.cumsum(given**2).mean())
        noise, independent = 0.0, 0.0
        for some in self._columns(len(divided), _MEASURED, _CHUNK):
            noise += (some.weights * some.moved(divided) ** 2).sum()
            independent += (some.weights * some.moved(given) ** 2).sum()
        return math.sqrt(noise / independent)

    def _columns(self, steps: int, most: int, chunk: int) -> Iterator[Columns]:
        """Yields at most ``most`` columns, evenly spread, ``chunk`` at a time."""
        if self.rates is None:
            yield Columns(np.arange(steps, 0.0, -1.0))
            return
        if len(self.rates) != steps:
            raise BadInputError(
                f"the workload has rates of {len(self.rates)} steps, but the plan has {steps} "
                f"steps: make it with workload_of(optimizer, {steps})"
            )
        # The middle step of each stretch of steps stands for the whole stretch.
        edges = np.unique(np.linspace(0, steps, min(steps, most) + 1).astype(int))
        middles, lengths = (edges[:-1] + edges[1:] - 1) // 2, np.diff(edges)
        padded = np.r_[self.rates, np.zeros(steps)]
        rates = np.lib.stride_tricks.sliding_window_view(padded, steps)
        for first in range(0, len(middles), chunk):
            some = middles[first : first + chunk]
            exists = np.arange(steps) < steps - some[:, None]
            yield Columns(exists * lengths[first : first + chunk, None].astype(float), rates[some])


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns of A K^-1: the error is the weighted sum of the squares of ``moved(response / K)``.

    Attributes:
      weights: weights of the squares; float64 [T], or [columns, T] if rates differ.
      rates: learning rates, in the shape of the weights; None: all are equal.
    """

    weights: np.ndarray
    rates: np.ndarray | None = None

    def moved(self, divided: np.ndarray) -> np.ndarray:
        """Returns the numbers to be squared, in the shape of the weights; linear in ``divided``."""
        return divided if self.rates is None else np.cumsum(self.rates * divided, axis=1)

    def pulled(self, weighted: np.ndarray) -> np.ndarray:
        """Returns the transpose of ``moved`` applied to ``weighted``, float64 [T]."""
        if self.rates is None:
            return weighted
        later = np.cumsum(weighted[:, ::-1], axis=1)[:, ::-1]
        return np.asarray((self.rates * later).sum(axis=0))


PREFIX_SUMS = Workload()
