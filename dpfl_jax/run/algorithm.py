"""The interface between the loop (``driver``) and the algorithms that it runs.

An algorithm knows no directory and no clock. ``begin`` gives it the key of its draws: from then on
every step is a function of the state, of that key and of the step's number.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.sharding import Mesh

from dpfl_jax.audit.proof import RunAudit
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.checkpoint import Best
from dpfl_jax.run.directory import RunDirectory
from dpfl_jax.run.state import TrainState, hardware
from dpfl_jax.run.terms import Terms

PyTree = Any


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What a step returns besides its state.

    Attributes:
      stats: what ``Algorithm.row`` makes metrics of.
      examples: number of examples that all processes together processed.
      tokens: number of real tokens that this process read.
      padded_tokens: number of tokens that this process read, padding included.
      read: share of all tokens that this process read, as (its columns, all columns): columns that
        several processes hold are counted by each.
    """

    stats: Any
    examples: int
    tokens: int = 0
    padded_tokens: int = 0
    read: tuple[int, int] = (1, 1)


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a run returns.

    Attributes:
      params: the model after the last step, or the average of the iterates (``LoopConfig``).
      steps: number of steps taken, also before a resume.
      metrics: the rows of metrics.jsonl.
      interrupted: name of the signal that stopped the run, or None.
      caveats: what the run adds to the caveats of the guarantee.
      seconds: wall time of the steps taken in this process (without compilation).
      examples: number of examples processed in that time.
      tokens: real tokens processed in that time (0 if examples are not token sequences).
      padded_tokens: tokens processed in that time, padding included.
      goodput: share of the time that went into these steps; the rest is compilation, the check
        before the first step, evaluation and checkpoints (not imports and reading data).
      mfu: share of the devices' peak FLOP/s that non-private training would have needed for these
        steps (model FLOPs utilisation); None where either is not known.
      planned: number of planned steps.
      clipping: how gradients were clipped; None if the run is not private.
      best: the checkpoint with the lowest held-out loss, if it was kept.
      private_state: see ``Algorithm.private_state``.
      audit: what an attack on the run observed, if it had canaries and finished.
      released: number of steps that may have been released, also by a killed process.
    """

    params: PyTree
    steps: int
    metrics: list[dict[str, Any]]
    interrupted: str | None
    caveats: tuple[str, ...]
    seconds: float
    examples: int
    tokens: int
    planned: int
    clipping: dict[str, Any] | None = None
    best: Best | None = None
    private_state: Any = dataclasses.field(default=None, repr=False)
    padded_tokens: int = 0
    goodput: float | None = None
    mfu: float | None = None
    released: int = 0
    audit: RunAudit | None = None

    @property
    def accounted(self) -> int:
        """Steps that the guarantee covers: all planned ones, if a rule decided when to stop.

        A step that was released before the run was killed stays released, whether or not the run
        took it again.
        """
        return self.planned if self.interrupted is None else max(self.steps, self.released, 1)

    @property
    def last(self) -> dict[str, Any] | None:
        """The evaluation at the end; None if the run was interrupted."""
        return self.evaluation(self.steps) if self.interrupted is None else None

    @property
    def last_iterate(self) -> dict[str, Any] | None:
        """The evaluation of the last iterate if ``params`` is an average, else None."""
        rows = (r for r in self.metrics if r["step"] == self.steps and "last_iterate" in r)
        return next((row["last_iterate"] for row in rows), None) if self.last else None

    def evaluation(self, step: int) -> dict[str, Any] | None:
        """The evaluation logged after ``step`` steps, if there is one."""
        return evaluation_after(self.metrics, step)


def evaluation_after(rows: list[dict[str, Any]], step: int) -> dict[str, Any] | None:
    """The evaluation in the rows of metrics after ``step`` steps, if there is one."""
    return next((r["eval"] for r in rows if r["step"] == step and "eval" in r), None)


class Steps(abc.ABC):
    """The steps of one run, from its first or a resumed step on."""

    def agreed(self) -> dict[str, Any]:
        """What must be equal in all processes, by name."""
        return {}

    def check(self, state: TrainState, say: Callable[[str], object] = str) -> None:
        """Checks, before the first step, that what is compiled is what is accounted for.

        Args:
          state: the state that the steps begin with.
          say: called with the name of each part of the check.

        Raises:
          clipping.SelfCheckError: the two differ.
        """
        del state, say

    def clipping(self) -> dict[str, Any] | None:
        """How gradients are clipped (``clipping.Explanation.to_json``); None without privacy."""
        return None

    @abc.abstractmethod
    def inputs(self) -> Iterator[tuple[int, Any]]:
        """Yields (number of steps taken after this one, inputs of the step), built ahead."""

    @abc.abstractmethod
    def step(self, state: TrainState, inputs: Any) -> tuple[TrainState, StepOutput]:
        """Takes a step; the state given to it is not used again."""


class Algorithm(abc.ABC):
    """A training algorithm, as the loop sees it.

    Attributes:
      word: what its steps are called ("steps", "rounds").
      steps: number of steps.
      delta: delta of its guarantee.
      private: whether it has a guarantee.
      mesh: the devices that it runs on.
      can_reshard_on_resume: whether a run may resume on other hardware, with fresh draws.
      layout_fingerprint: settings that change only rounding; runs that differ only in them draw
        independently.
      memory_hint: what the user can change if memory does not suffice.
    """

    word: str = "steps"
    steps: int
    delta: float
    private: bool
    mesh: Mesh
    can_reshard_on_resume: bool = True
    layout_fingerprint: Any = None
    memory_hint: str

    @property
    def hardware(self) -> str:
        """Devices and versions that the steps are computed with (``state.hardware``)."""
        return hardware(self.mesh)

    @abc.abstractmethod
    def terms(self) -> Terms:
        """What must be equal for a run to be resumed: data, mechanism, loss, parameters, ..."""

    @abc.abstractmethod
    def init(self) -> TrainState:
        """The state before the first step, on its devices."""

    @abc.abstractmethod
    def begin(self, key: RootKey, start: int) -> Steps:
        """The steps after the first ``start``; ``key`` is used for nothing else."""

    @abc.abstractmethod
    def params(self, state: TrainState) -> PyTree:
        """The part of a state that is released: the model's parameters."""

    def private_state(self, state: TrainState) -> Any:
        """What an audit or a file in ``private/`` needs of a state besides the model, or None."""
        del state
        return None

    def write_private(self, directory: RunDirectory, result: RunResult) -> None:
        """Writes what an ended or interrupted run keeps of single units under ``private/``."""
        del directory, result

    def audited(self, result: RunResult) -> RunAudit | None:
        """What an attack on a finished run observed; None if the run had no canaries."""
        del result
        return None

    def flops(self, examples: float, tokens: int) -> float:
        """Operations that non-private training needs for these; 0 if that is not known."""
        del examples, tokens
        return 0.0

    @abc.abstractmethod
    def row(self, stats: Any) -> dict[str, Any]:
        """The metrics of a step; those that are private are under ``outside_guarantee``."""

    @abc.abstractmethod
    def epsilons(self, counts: Sequence[int]) -> Sequence[float]:
        """Upper bounds on epsilon after these numbers of steps; inf without privacy."""
