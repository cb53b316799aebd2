"""Lines of tables and their verdicts: what can change without training anything again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from reproductions.registry import Claim, Source, less

LAST = 3  # accuracy is the mean over this many last rounds


def row(label: str, law: str, curves: list[np.ndarray], **more: Any) -> dict[str, Any]:
    """A line of a table: accuracy over the last rounds, its spread over seeds."""
    last = np.array([curve[-LAST:].mean() for curve in curves])
    return {
        "run": label,
        "budgets": law,
        "accuracy": float(last.mean()),
        "std": float(last.std(ddof=1)) if len(last) > 1 else 0.0,
        "seeds": len(last),
        "by_seed": [round(float(a), 4) for a in last],
        "curve": [round(float(a), 4) for a in np.mean(curves, axis=0)],
        "curves": [[round(float(a), 3) for a in curve] for curve in curves],
        **more,
    }


def above(
    claim: str,
    better: dict[str, Any],
    worse: dict[str, Any],
    note: str = "",
    *,
    source: Source,
) -> Claim:
    """That one line's accuracy lies above another's, by the seeds that both have."""
    low, high = _common(worse, better)
    note = f"accuracies {np.mean(high):.4f} and {np.mean(low):.4f}; {note}".removesuffix("; ")
    return less(claim, low, high, note, source=source)


def orders(
    where: str, at: dict[str, dict[str, Any]], fitted: str, others: Sequence[str]
) -> list[Claim]:
    """The paper's order, of its fitted curve; ours, of certified rates; and what certifying costs.

    Args:
      where: data and distribution, for people.
      at: lines by label; those that are missing are left out.
      fitted: label of the paper's method.
      others: labels of the baselines.
    """
    sources: tuple[tuple[str, Source], ...] = ((fitted, "paper"), ("certified", "ours"))
    claims = [
        above(f"{where}: {label} is ahead of {other}", at[label], at[other], source=source)
        for label, source in sources
        for other in others
        if {label, other} <= set(at)
    ]
    if {fitted, "certified"} <= set(at):
        what = f"{where}: certifying costs at most 0.5 points of accuracy"
        claims.append(less(what, *_common(at[fitted], at["certified"]), source="ours", room=0.005))
    return claims


def _common(one: dict[str, Any], other: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Both from seed 0 on."""
    n = min(len(one["by_seed"]), len(other["by_seed"]))
    return one["by_seed"][:n], other["by_seed"][:n]


def beside(
    found: dict[str, Any], mean: float, std: float, seeds: int, claim: str, drawn: float = 0.0
) -> Claim:
    """A published mean within two standard errors of the difference.

    Args:
      found: a line of ours.
      mean: theirs.
      std: theirs, over seeds.
      seeds: how many of theirs.
      claim: what is said.
      drawn: error from what both drew otherwise once and for all, such as test images.
    """
    away, error = distance(found, mean, std, seeds, drawn)
    return Claim(
        claim,
        round(found["accuracy"], 4),
        mean,
        abs(away) <= 2,
        f"{away:+.1f} standard errors of the difference ({error:.4f}); at most 2",
        source="paper",
    )


def distance(
    found: dict[str, Any], mean: float, std: float, seeds: int, drawn: float = 0.0
) -> tuple[float, float]:
    """How far ours is from another's mean, in standard errors of the difference, and the error.

    A deviation over fewer than five seeds of ours says little: it is pooled with the other's.
    """
    own, n = found["std"], found["seeds"]
    if n < 5:
        degrees = n - 1, seeds - 1
        pooled = (degrees[0] * own**2 + degrees[1] * std**2) / sum(degrees)
        own = math.sqrt(pooled)
    error = math.hypot(own / math.sqrt(n), std / math.sqrt(seeds), drawn)
    return (found["accuracy"] - mean) / error, error
