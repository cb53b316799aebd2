"""Lines of tables and their verdicts: what can change without training anything again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from reproductions.registry import Claim

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
        **more,
    }


def cost_of_certifying(fitted: dict[str, Any], certified: dict[str, Any]) -> float:
    """Accuracy of the fitted curve's rates minus that of certified ones, over common seeds."""
    pairs = zip(fitted["by_seed"], certified["by_seed"])  # both from seed 0 on
    return float(np.mean([a - b for a, b in pairs]))


def beside(
    found: dict[str, Any], mean: float, std: float, seeds: int, claim: str, drawn: float = 0.0
) -> Claim:
    """A published or independently measured mean within two standard errors of the difference.

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
