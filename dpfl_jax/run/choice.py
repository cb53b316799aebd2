"""What held-out loss decides on the way: which checkpoint is best, and when to stop.

Both are functions of the rows of metrics, so that a run that goes on decides as it would have.

A number of steps that follows from the models is not one fixed beforehand: the epsilon of the steps
taken holds only for the latter (Rogers et al. 2016). That of all steps holds for any rule, as what
was published is a part of what all steps would publish.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dpfl_jax.run.checkpoint import Checkpoints

PyTree = Any
BEST_CAVEAT = (
    "the best checkpoint was chosen by held-out loss, without noise: the guarantee covers every "
    "checkpoint for those who were trained on, but nobody who was held out"
)


def stopped_caveat(done: int, steps: int, word: str) -> str:
    """The caveat of a run that a rule has stopped after ``done`` of its steps."""
    return (
        f"the run stopped after {done} of {steps} {word} by held-out loss, without noise: nobody "
        f"who was held out is covered; epsilon is that of all {steps}, since when to stop followed "
        "from the models"
    )


def interrupted_caveat(done: int, asked: int, steps: int, word: str) -> str:
    """Of a run that somebody or something has stopped; ``asked``: that may have been released."""
    more = "" if asked == done else f", and what it released of up to {asked} before it was resumed"
    return (
        f"the run was interrupted after {done} of {steps} {word}{more}: epsilon is that of {asked} "
        "if the reason had nothing to do with what the run had shown, and otherwise that of all "
        f"{steps}"
    )


@dataclasses.dataclass(frozen=True)
class Best:
    """The evaluation with the lowest held-out loss; step 0 is none.

    Attributes:
      step: steps taken before it.
      loss: held-out loss there.
      params: reads the parameters from the run's directory.
    """

    step: int
    loss: float
    params: Callable[[], PyTree] | None = None


def exhausted(rows: Iterable[Mapping[str, Any]], patience: int | None) -> bool:
    """Whether ``patience`` evaluations in a row have found no lower loss; never if it is None."""
    rows = list(rows)
    found = _best(rows)
    if patience is None or found is None:
        return False
    return sum("eval" in row and row["step"] > found.step for row in rows) >= patience


class KeepBest:
    """Keeps the best checkpoint of a run beside its newest ones."""

    def __init__(self, checkpoints: Checkpoints, rows: Iterable[Mapping[str, Any]]) -> None:
        """Goes on from what the run's directory holds."""
        self._checkpoints, self._kept = checkpoints, set(checkpoints.steps())
        self._found: Best | None = None
        self.look(rows, 0)

    def look(self, rows: Iterable[Mapping[str, Any]], done: int) -> bool:
        """Looks at the evaluations so far; returns whether that after ``done`` steps is the best.

        It must then be saved. An earlier one whose checkpoint was not kept, as nobody had asked for
        it yet, is no choice.
        """
        self._found = _best(row for row in rows if row["step"] in {*self._kept, done})
        if self._found is None:
            return False
        self._checkpoints.best = self._found.step
        self._kept |= {self._found.step}
        return self._found.step == done

    def found(self, params: Callable[[Checkpoints, int], PyTree]) -> Best | None:
        """What was kept; ``params`` reads a checkpoint's."""
        found = self._found
        if found is None:
            return None

        def read() -> PyTree:
            kept = Checkpoints(self._checkpoints.directory, 1)
            try:
                return params(kept, found.step)
            finally:
                kept.close()

        return dataclasses.replace(found, params=read)


def _best(rows: Iterable[Mapping[str, Any]]) -> Best | None:
    """The best of the evaluations in ``rows``, the first of equal ones; None if there is none."""
    losses = [(row["eval"]["loss"], row["step"]) for row in rows if "eval" in row and row["step"]]
    loss, step = min((x for x in losses if math.isfinite(x[0])), default=(math.nan, 0))
    return Best(step, loss) if step else None
