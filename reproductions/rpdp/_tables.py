"""Lines of tables and their verdicts: what can change without training anything again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from reproductions.registry import ERROR_RATE, Claim, Source, less

UNTUNED = (  # how an arm of section 7.2 is trained here
    "Adam's learning rate {rate} and clip norm 1 for all arms, as in the authors' present scripts "
    "(paper: plain SGD, the best of five rates and four clip norms)"
)
STOPS = (
    "the curve fit's records leave where the paper's budget accountant stops them: when Renyi's "
    "epsilon, to which the rates are fitted, has used up their budget"
)
ALIKE = 0.02  # accuracies that differ by less are said to be the same
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


def stops(rows: Sequence[dict[str, Any]], by: str, records: int) -> str:
    """That the paper's method has them, and how many records they took in each line.

    Args:
      rows: of a figure.
      by: what tells lines of the same budgets apart.
      records: that there are.
    """
    found = [r for r in rows if r["run"] == "curve fit (paper)"]
    counts = (f"{r['left_early']:,.0f} ({by} {r[by]}, {r['budgets']})" for r in found)
    return f"{STOPS}: of {records:,} records {', '.join(counts)}" if found else STOPS


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
    tight = "the baseline's rates are certified by privacy-loss distributions"
    claims = [
        above(f"{where}: {label} is ahead of {other}", at[label], at[other], tight, source=source)
        for label, source in sources
        for other in others
        if {label, other} <= set(at)
    ]
    if {fitted, "certified"} <= set(at):
        what = f"{where}: certifying costs at most 0.5 points of accuracy"
        note = "certified by privacy-loss distributions, fitted to Renyi's epsilons"
        both = _common(at[fitted], at["certified"])
        claims.append(less(what, *both, note, source="ours", room=0.005))
    return claims


def _common(one: dict[str, Any], other: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Both from seed 0 on."""
    n = min(len(one["by_seed"]), len(other["by_seed"]))
    return one["by_seed"][:n], other["by_seed"][:n]


@dataclasses.dataclass(frozen=True)
class Beside:
    """A mean of others, whose runs share one start, beside a line of ours, of as many starts.

    Attributes:
      claim: what is said.
      found: the line.
      mean: theirs.
      std: theirs, over seeds.
      seeds: how many of theirs.
      drawn: error from what both drew otherwise once and for all, such as test images.
    """

    claim: str
    found: dict[str, Any]
    mean: float
    std: float
    seeds: int
    drawn: float = 0.0

    def tested(self) -> tuple[float, float, float]:
        """The difference, half its interval (Welch), and the p-value of there being none."""
        start = math.sqrt(max(self.found["std"] ** 2 - self.std**2, 0.0))
        drawn = math.hypot(self.drawn, start)
        away, error = distance(self.found, self.mean, self.std, self.seeds, drawn)
        freedom = _freedom(self.found, self.std, self.seeds, error)
        reach = float(stats.t.isf(ERROR_RATE / 2, freedom)) * error
        return away * error, reach, 2 * float(stats.t.sf(abs(away), freedom))


def beside(published: Sequence[Beside]) -> list[Claim]:
    """Means of a published figure beside ours.

    One holds if the difference's 95 % interval lies within ``ALIKE``, and does not if a difference
    beyond that is found, at an error rate of 5 % for all of them (Holm 1979).
    """
    found = [one.tested() for one in published]
    differ, order = set(), sorted(range(len(found)), key=lambda k: found[k][2])
    for rank, k in enumerate(order):
        if found[k][2] > ERROR_RATE / (len(order) - rank):
            break
        differ.add(k)
    claims = []
    for k, (one, (gap, reach, p_value)) in enumerate(zip(published, found, strict=True)):
        apart = k in differ and abs(gap) > ALIKE
        holds = True if abs(gap) + reach <= ALIKE else (False if apart else None)
        note = f"{gap:+.4f} +- {reach:.4f} (p = {p_value:.2g}); alike: within {ALIKE}"
        accuracy, seeds = round(one.found["accuracy"], 4), one.found["seeds"]
        claims.append(
            Claim(one.claim, accuracy, one.mean, holds, note, source="paper", seeds=seeds,
                  power=_chance(max(ALIKE, abs(gap)), reach))
        )  # fmt: skip
    return claims


def _chance(effect: float, reach: float) -> float:
    """Of seeing an effect whose 95 % interval reaches so far to either side."""
    return float(stats.norm.sf((reach - effect) / (reach / stats.norm.isf(ERROR_RATE / 2))))


def _freedom(found: dict[str, Any], std: float, seeds: int, error: float) -> float:
    """Degrees of freedom of a difference (Welch); of few seeds of ours, those of both together."""
    n = found["seeds"]
    if n < 5:
        return n + seeds - 2.0
    parts = (found["std"] ** 2 / n, n - 1), (std**2 / seeds, seeds - 1)
    return error**4 / sum(part**2 / degrees for part, degrees in parts)


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
