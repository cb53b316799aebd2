"""What can be run: an algorithm, as the driver sees it.

An algorithm knows no directory and no clock. ``begin`` gives it the key of its draws: from then on
every step is a function of the state, of that key and of the step's number.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.sharding import Mesh

from dpfl_jax.randomness import RootKey
from dpfl_jax.run.state import TrainState, hardware
from dpfl_jax.run.terms import Terms

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a step tells besides its state.

    Attributes:
      stats: for ``Algorithm.row``.
      examples: processed, by all processes together.
      tokens: real ones among those that this process read.
      places: for tokens, real or not, that they were computed on in.
      read: part of all tokens that this process read, as (its columns, all columns): columns that
        several processes hold are counted by each.
    """

    stats: Any
    examples: int
    tokens: int = 0
    places: int = 0
    read: tuple[int, int] = (1, 1)


class Steps(abc.ABC):
    """The steps of one run from some step on."""

    def agreed(self) -> dict[str, Any]:
        """What must be equal in all processes, by name."""
        return {}

    def check(self, state: TrainState, say: Callable[[str], object] = str) -> None:
        """Looks, before the first step, whether what is compiled is what is accounted for.

        Args:
          state: the steps begin with.
          say: is told what is being done.

        Raises:
          clipping.SelfCheckError: it is not.
        """
        del state, say

    def clipping(self) -> dict[str, Any] | None:
        """How the norms of how many parameters are computed (``clipping.Explanation``), as JSON."""
        return None

    @abc.abstractmethod
    def inputs(self) -> Iterator[tuple[int, Any]]:
        """Yields (steps taken after it, what a step needs), built ahead of time."""

    @abc.abstractmethod
    def step(self, state: TrainState, inputs: Any) -> tuple[TrainState, Taken]:
        """Takes a step; the state given to it is not used again."""


class Algorithm(abc.ABC):
    """What is run.

    Attributes:
      word: what its steps are called.
      steps: how many there are.
      delta: of its guarantee.
      private: whether it has one.
      mesh: what it is computed on.
      movable: whether a run may go on as another computation, drawing anew.
      layout: what changes no more than rounding; runs that differ in it alone draw independently.
      smaller: what the user changes if memory does not suffice.
    """

    word: str = "steps"
    steps: int
    delta: float
    private: bool
    mesh: Mesh
    movable: bool = True
    layout: Any = None
    smaller: str

    @property
    def hardware(self) -> str:
        """What the steps are computed with."""
        return hardware(self.mesh)

    @abc.abstractmethod
    def terms(self) -> Terms:
        """What the run is."""

    @abc.abstractmethod
    def init(self) -> TrainState:
        """The state before the first step, in its place on the devices."""

    @abc.abstractmethod
    def begin(self, key: RootKey, start: int) -> Steps:
        """The steps after the first ``start``; ``key`` is used for nothing else."""

    @abc.abstractmethod
    def params(self, state: TrainState) -> PyTree:
        """What is released of a state: the model."""

    def seen(self, state: TrainState) -> Any:
        """What is kept of a state beside the model: for an audit, or for ``private/``; or None."""
        del state
        return None

    @abc.abstractmethod
    def row(self, stats: Any) -> dict[str, Any]:
        """A step's metrics; what is private in them is under ``outside_guarantee``."""

    @abc.abstractmethod
    def epsilons(self, counts: Sequence[int]) -> Sequence[float]:
        """Upper bounds on epsilon after these numbers of steps; inf where there is none."""
