"""What a run is shown beside: the same run without privacy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from dpfl_jax.errors import BadInputError
from dpfl_jax.run.driver import RunResult

WITHOUT_PRIVACY = "the same without privacy, for comparison only"
BASELINE_CAVEAT = (
    "the run without privacy beside this one (eval.baseline) is for comparison only: its losses in "
    "report.json, report.md and curves.png are NOT covered by this guarantee; set eval.baseline to "
    "false where the data are private and the report is to be published"
)

Evaluations = list[dict[str, Any]]


def without_privacy(train: Callable[[], RunResult], console: Console) -> Evaluations | None:
    """Trains for comparison, and keeps no model.

    Args:
      train: the run without privacy, which evaluates as the private one does.
      console: for people.

    Returns:
      Evaluations, each with its ``step``, the first and the last included; None if it did not end.
    """
    console.print("the same without privacy, for comparison", highlight=False)
    try:
        result = train()
    except BadInputError as error:  # the private run is finished, and must be reported
        console.print(f"warning: there is no comparison: {error}")
        return None
    if result.interrupted is not None:
        return None
    return [{"step": row["step"], **row["eval"]} for row in result.metrics if "eval" in row]


def show_beside(
    report: dict[str, Any],
    found: Evaluations | None,
    shown: Callable[[dict[str, Any]], Mapping[str, Any]] = dict,
) -> None:
    """Adds to a report what ``without_privacy`` found; ``shown`` adds to its last evaluation."""
    if found is not None:
        report["outside_guarantee"]["without_privacy"] = found
        report.setdefault("baselines", {})[WITHOUT_PRIVACY] = shown(found[-1])
