"""The baseline of a run: the same without privacy, trained after it and shown beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from dpfl_jax.errors import BadInputError
from dpfl_jax.randomness import RootKey
from dpfl_jax.run.algorithm import Algorithm
from dpfl_jax.run.driver import Evaluate, LoopConfig, drive

WITHOUT_PRIVACY = "the same without privacy, for comparison only"
BASELINE_CAVEAT = (
    "the run without privacy beside this one (eval.baseline) is for comparison only: its losses in "
    "report.json, report.md and curves.png are NOT covered by this guarantee; set eval.baseline to "
    "false where the data are private and the report is to be published"
)

Evaluations = list[dict[str, Any]]


def train_baseline(
    algorithm: Callable[[], Algorithm],
    key: RootKey,
    evaluate: Evaluate,
    loop: LoopConfig,
    console: Console,
) -> Evaluations | None:
    """Trains for comparison, and keeps no model.

    Args:
      algorithm: makes the one without privacy.
      key: of its draws alone.
      evaluate: as of the private run.
      loop: likewise; it chooses no checkpoint, and is not profiled.
      console: for people.

    Returns:
      Evaluations, each with its ``step``, the first and the last included; None if it did not end.
    """
    console.print("the same without privacy, for comparison", highlight=False)
    loop = dataclasses.replace(loop, keep_best=False, patience=None, profile=0)
    try:
        result = drive(algorithm(), key=key, evaluate=evaluate, loop=loop, console=console)
    except BadInputError as error:  # the private run is finished, and must be reported
        console.print(f"warning: there is no comparison: {error}")
        return None
    if result.interrupted is not None:
        return None
    return [{"step": row["step"], **row["eval"]} for row in result.metrics if "eval" in row]


def compare_to_baseline(
    report: dict[str, Any],
    found: Evaluations | None,
    describe: Callable[[dict[str, Any]], Mapping[str, Any]],
) -> None:
    """Adds to a report what ``train_baseline`` found; ``describe`` adds to its last evaluation."""
    if found is not None:
        report["outside_guarantee"]["without_privacy"] = found
        report.setdefault("baselines", {})[WITHOUT_PRIVACY] = describe(found[-1])
