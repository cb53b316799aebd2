"""Workloads: the linear map from an optimiser's gradients to its parameters after each step.

Source: Denisov, McMahan, Rush, Smith and Thakurta 2022 (arXiv 2202.08312), sections 2 and 5:
momentum and a schedule of learning rates are factors of the workload A, and a strategy K is as good
as A K^-1 is small. Optax's SGD moves parameters in step t by

    rate_t * (memory_0 g_t + memory_1 g_{t-1} + ...)

(memory 1, beta, beta^2, ... with momentum beta). A adds these up over the steps; with one rate and
no momentum it makes prefix sums. What noise adds to the parameters, root mean square over the
steps, is the error. Weight decay is left out: it is no part of how gradients are added up.

With r the first column of memory times K^-1, column i of A K^-1 is the running sum of
rate_i r_0, rate_{i+1} r_1, ... Where all rates are the same, all columns are parts of the first.
Otherwise a search takes 128 of them, each for its neighbours, as rates change slowly: an evaluation
takes O(128 steps). An error that is stated is that of 8,192 columns at most.
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
    """How gradients add up to parameters, over the steps of a run; the default is prefix sums.

    Attributes:
      memory: factors with which the gradient of a step, and those before it, move parameters; the
        first is 1, and those that are not given are 0.
      rates: learning rates of the steps, the largest 1; None: all the same.

    Examples:
      >>> from dpfl_jax.matrices import Workload
      >>> Workload(memory=(1.0, 0.5)).response(3).tolist()
      [1.0, 1.5, 1.5]
    """

    memory: tuple[float, ...] = (1.0,)
    rates: tuple[float, ...] | None = None

    def response(self, steps: int) -> np.ndarray:
        """What is divided by K: the memory [steps], summed up over the steps without ``rates``."""
        given = np.zeros(steps)
        given[: len(self.memory)] = self.memory[:steps]
        return np.cumsum(given) if self.rates is None else given

    def columns(self, steps: int) -> Columns:
        """The columns whose mean square the search for a strategy minimises."""
        return next(self._columns(steps, _SEARCHED, _SEARCHED))

    def error(self, divided: np.ndarray) -> float:
        """Root mean square of the noise in parameters over the steps, over independent noise's.

        Both for noise of standard deviation 1 in K G (independent: in G).

        Args:
          divided: ``response`` divided by K, [T].
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
        """At most ``most`` columns, evenly spread, ``chunk`` at a time."""
        if self.rates is None:
            yield Columns(np.arange(steps, 0.0, -1.0))
            return
        if len(self.rates) != steps:
            raise BadInputError(
                f"the workload has rates of {len(self.rates)} steps, but the plan has {steps}: "
                f"make it by workload_of(optimizer, {steps})"
            )
        # Stretches of steps, and the middle one of each for all of it.
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
      weights: of the squares; [T], or [columns, T] where rates differ.
      rates: in the shape of the weights; None: all the same.
    """

    weights: np.ndarray
    rates: np.ndarray | None = None

    def moved(self, divided: np.ndarray) -> np.ndarray:
        """What is squared, in the shape of the weights; linear in ``divided`` [T]."""
        return divided if self.rates is None else np.cumsum(self.rates * divided, axis=1)

    def pulled(self, weighted: np.ndarray) -> np.ndarray:
        """The transpose of ``moved``, [T]."""
        if self.rates is None:
            return weighted
        later = np.cumsum(weighted[:, ::-1], axis=1)[:, ::-1]
        return np.asarray((self.rates * later).sum(axis=0))


PREFIX_SUMS = Workload()
