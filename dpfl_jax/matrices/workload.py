"""What an optimiser makes of noise: the linear map from gradients to the way of the parameters.

Source: Denisov, McMahan, Rush, Smith and Thakurta 2022 (arXiv 2202.08312), sections 2 and 5:
momentum and a schedule of learning rates are factors of the workload A, and a strategy K is as good
as A K^-1 is small. Optax's SGD moves parameters in step t by

    rate_t * (memory_0 g_t + memory_1 g_{t-1} + ...)

(memory 1, beta, beta^2, ... with momentum beta). A adds these up over the steps; with one rate and
no momentum it makes prefix sums. What noise adds to the parameters, root mean square over the
steps, is the error. Decay of weights is left out: it is no part of how gradients are added up.

With r the first column of memory times K^-1, column i of A K^-1 is the running sum of
rate_i r_0, rate_{i+1} r_1, ... Where rates are alike all columns are parts of the first. Else a
search takes 128 of them, each for its neighbours, as rates change slowly: in O(128 steps) a look.
An error that is stated is that of 8,192 columns at most.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from dpfl_jax.errors import BadInputError

_SEARCHED, _MEASURED, _AT_ONCE = 128, 8192, 64


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is to be noised little: parameters on their way; the default is prefix sums.

    Attributes:
      memory: with which gradients of a step and of those before it move parameters, the first of
        them 1; what is not there is 0.
      rates: of the steps, the largest 1; None: alike.
    """

    memory: tuple[float, ...] = (1.0,)
    rates: tuple[float, ...] | None = None

    def response(self, steps: int) -> np.ndarray:
        """What to divide by K: [steps]; of rates that are alike, summed up over the steps."""
        given = np.zeros(steps)
        given[: len(self.memory)] = self.memory[:steps]
        return np.cumsum(given) if self.rates is None else given

    def columns(self, steps: int) -> Columns:
        """What a search makes small."""
        return next(self._columns(steps, _SEARCHED, _SEARCHED))

    def error(self, divided: np.ndarray) -> float:
        """Root mean square of the noise in parameters on their way, over independent noise's.

        Both for noise of standard deviation 1 in K G (independent: in G).

        Args:
          divided: ``response`` divided by K, [T].
        """
        given = self.response(len(divided))
        if self.rates is None:
            return math.sqrt(np.cumsum(divided**2).mean() / np.cumsum(given**2).mean())
        noise, independent = 0.0, 0.0
        for some in self._columns(len(divided), _MEASURED, _AT_ONCE):
            noise += (some.weights * some.moved(divided) ** 2).sum()
            independent += (some.weights * some.moved(given) ** 2).sum()
        return math.sqrt(noise / independent)

    def _columns(self, steps: int, most: int, at_once: int) -> Iterator[Columns]:
        """At most so many columns, evenly spread, some at a time."""
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
        for first in range(0, len(middles), at_once):
            some = middles[first : first + at_once]
            there = np.arange(steps) < steps - some[:, None]
            yield Columns(there * lengths[first : first + at_once, None].astype(float), rates[some])


@dataclasses.dataclass(frozen=True)
class Columns:
    """Squares of which an error is made, as a function of a response that was divided by K.

    Attributes:
      weights: of what is squared; [T], or [columns, T] where rates differ.
      rates: in the shape of the weights; None: alike.
    """

    weights: np.ndarray
    rates: np.ndarray | None = None

    def moved(self, divided: np.ndarray) -> np.ndarray:
        """What is squared: linear in ``divided`` [T]."""
        return divided if self.rates is None else np.cumsum(self.rates * divided, axis=1)

    def pulled(self, weighted: np.ndarray) -> np.ndarray:
        """The transpose of ``moved``, [T]."""
        if self.rates is None:
            return weighted
        later = np.cumsum(weighted[:, ::-1], axis=1)[:, ::-1]
        return np.asarray((self.rates * later).sum(axis=0))


PREFIX_SUMS = Workload()
